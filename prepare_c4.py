"""
Text to shards of tokens, and shards to batches: the format is written and read in this one file.

    python prepare_c4.py                                    the Python standard library as bytes: no download, seconds
    python prepare_c4.py --source=c4 --max_tokens=1e9       C4 en from the hub, gpt2 BPE (set HF_TOKEN if you have one)
    python prepare_c4.py --source='dump/*.json.gz'          the same records from disk: .json.gz .jsonl .parquet .txt

A shard is a 64-byte header and up to shard_tokens token ids. Documents follow one another in a fixed order, each with
end-of-text behind it, running on from one shard into the next. Started again after a kill, preparation goes on behind
the last whole shard: meta.json says which token of which document of which file comes next.
"""

import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np

from configurator import configure, echo
from data import (
    HEADER,
    MAGIC,
    VERSION,
    atomic,
    file_sha256,
    fingerprint,
    get_tokenizer,
    read_documents,
    read_meta,
    token_dtype,
    write_json,
)

source = "python"  # python: the standard library's own source; c4: from the hub; anything else: a glob of files
val_source: str | None = (
    None  # glob of validation files; None: c4's own, elsewhere val_share of the documents
)
val_share = (
    0.05  # share of the documents, chosen by a hash of their text, that is kept for validation
)
tokenizer: str | None = (
    None  # bytes, a name tiktoken knows, or a .tiktoken file; None: bytes for python, else gpt2
)
data_dir: str | None = None  # where the shards go; None: data/python, data/c4 or data/text
max_tokens: int | None = None  # stop after so many training tokens; None: take all there is
max_val_tokens = 10_000_000  # stop after so many validation tokens
shard_tokens = 50_000_000  # tokens a shard
workers: int | None = None  # processes that tokenise; None: one a core

C4 = "hf://datasets/allenai/c4/en/c4-{split}.{i:05d}-of-{n:05d}.json.gz"  # 1024 files train, 8 validate


# ---------------------------------------------------------------------------------------------------------------------
# Documents


def list_files(source):
    """(training files, validation files or None where a hash of each document decides)"""
    if source == "c4":
        return [
            [C4.format(split=s, i=i, n=n) for i in range(n)]
            for s, n in (("train", 1024), ("validation", 8))
        ]
    if source == "python":
        root = sysconfig.get_paths()["stdlib"]
        pattern = os.path.join(glob.escape(root), "**", "*.py")
        return sorted(
            f for f in glob.glob(pattern, recursive=True) if "site-packages" not in f
        ), None
    return sorted(glob.glob(source, recursive=True)), None


def validates(text, share):
    return (
        int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        < share * 2**64
    )


def batches(files, keep, start):
    """Lists of (file, document, text) of about a megabyte, beginning at (file, document) = start"""
    batch, size = [], 0
    for f in range(start[0], len(files)):
        for n, text in enumerate(read_documents(files[f])):
            if (f, n) < start or not keep(text):
                continue
            batch.append((f, n, text))
            size += len(text)
            if size > 1_000_000:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def start_worker(name):
    global encoding
    encoding = get_tokenizer(name)
    Thread(
        target=lambda: (parent_process().join(), os._exit(1)), daemon=True
    ).start()  # do not outlive a killed parent


def tokenise(batch):
    """[(file, document, tokens with end-of-text behind them)]; text that spells a special token is just text"""
    dtype, eot = token_dtype(encoding.n_vocab), encoding.eot_token
    ids = [encoding.encode_to_numpy(text, disallowed_special=()) for _, _, text in batch]
    return [(f, n, np.append(tokens, eot).astype(dtype)) for (f, n, _), tokens in zip(batch, ids)]


def in_order(pool, jobs, ahead):
    """tokenise the jobs in other processes, never more than `ahead` in flight; results in the order of the jobs"""
    pending = deque()
    for job in jobs:
        pending.append(pool.submit(tokenise, job))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def write_split(name, files, keep, limit, directory, meta, pool, workers):
    """Write what is missing of one split, shard by shard, and say so in meta.json behind each."""
    split, digest = meta["splits"][name], bytes.fromhex(meta["tokenizer_sha256"])
    dtype, size = token_dtype(meta["vocab_size"]), meta["shard_tokens"]
    buffer, fill, began, before = np.empty(size, dtype), 0, time.time(), split["tokens"]

    def flush(next_token, complete=False):
        nonlocal fill
        if fill:
            shard = f"{name}_{len(split['shards']):05d}.bin"
            with atomic(os.path.join(directory, shard)) as file:
                file.write(HEADER.pack(MAGIC, VERSION, dtype.itemsize, fill, digest))
                file.write(buffer[:fill].data)
            split["shards"].append(
                {
                    "file": shard,
                    "tokens": fill,
                    "sha256": file_sha256(os.path.join(directory, shard)),
                }
            )
        split.update(tokens=split["tokens"] + fill, next=next_token, complete=complete)
        write_json(os.path.join(directory, "meta.json"), meta)
        fill = 0

    file, document, skip = split["next"]
    for results in in_order(pool, batches(files, keep, (file, document)), 4 * workers):
        for f, n, tokens in results:
            at = skip if (f, n) == (file, document) else 0
            while at < len(tokens) and (limit is None or split["tokens"] + fill < limit):
                room = min(
                    size - fill, sys.maxsize if limit is None else limit - split["tokens"] - fill
                )
                part = tokens[at : at + room]
                buffer[fill : fill + len(part)] = part
                fill, at = fill + len(part), at + len(part)
                if fill == size:
                    flush([f, n, at])
        tokens = split["tokens"] + fill
        progress(
            name,
            tokens,
            tokens / limit if limit else f / len(files),
            (tokens - before) / (time.time() - began),
        )
        if limit is not None and tokens >= limit:
            break
    flush([len(files), 0, 0], complete=True)
    print(f"\n{name}: {split['tokens']:,} tokens in {len(split['shards'])} shards", flush=True)


def progress(name, tokens, share, rate):
    eta = f"{tokens * (1 / share - 1) / rate:.0f} s" if share and rate else "?"
    bar = f"{name} [{'#' * int(20 * share):<20}] {tokens:,} tokens, {rate / 1e6:.2f} M/s, ETA {eta}   "
    print("\r" + bar, end="", file=sys.stderr, flush=True)


def prepare(settings):
    source = settings["source"]
    name = settings["tokenizer"] or ("bytes" if source == "python" else "gpt2")
    directory = settings["data_dir"] or f"data/{source if source in ('python', 'c4') else 'text'}"
    limit, cores = settings["max_tokens"], settings["workers"] or os.cpu_count()
    if source == "c4" and limit is None:
        raise SystemExit(
            "c4 is some 160e9 tokens, 320 GB of shards: say how many you want with --max_tokens=1e9"
        )
    if (
        min(
            settings["shard_tokens"],
            settings["max_val_tokens"],
            1 if limit is None else limit,
            cores,
        )
        < 1
    ):
        raise SystemExit("shard_tokens, max_tokens, max_val_tokens and workers must be at least 1")
    if not 0 <= settings["val_share"] < 1:
        raise SystemExit(f"val_share={settings['val_share']}: give a share, 0 <= val_share < 1")
    train, val = list_files(source)
    if settings["val_source"] is not None:
        val = list_files(settings["val_source"])[0]
    if not train or val == []:
        raise SystemExit(f"no file matches {source if not train else settings['val_source']!r}")
    encoding = get_tokenizer(name)
    os.makedirs(directory, exist_ok=True)
    meta = open_meta(directory, name, encoding, settings, train, val)
    left = max(0, (limit or 0) - meta["splits"]["train"]["tokens"])
    need, free = left * token_dtype(encoding.n_vocab).itemsize, shutil.disk_usage(directory).free
    if need > free:
        raise SystemExit(
            f"{directory}: {left:,} tokens need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )
    share = settings["val_share"] if val is None else 0.0
    jobs = {
        "val": (
            val or train,
            lambda text: val or validates(text, share),
            settings["max_val_tokens"],
        ),
        "train": (train, lambda text: not share or not validates(text, share), limit),
    }
    with ProcessPoolExecutor(cores, get_context("spawn"), start_worker, (name,)) as pool:
        for split, (files, keep, most) in jobs.items():
            if not meta["splits"][split]["complete"]:
                write_split(split, files, keep, most, directory, meta, pool, cores)
    print(f"{directory}: " + ", ".join(f"{s} {meta['splits'][s]['tokens']:,} tokens" for s in jobs))


def local_size(path):
    return os.path.getsize(path) if os.path.exists(path) else None


def open_meta(directory, name, encoding, settings, train, val):
    """A new meta.json, or the one that is there if it is of the very same preparation"""
    path = os.path.join(directory, "meta.json")
    local = name.endswith(".tiktoken")
    meta = {
        "version": VERSION,
        "tokenizer": "tokenizer.tiktoken" if local else name,
        "tokenizer_sha256": fingerprint(encoding).hex(),
        "vocab_size": encoding.n_vocab,
        "eot": encoding.eot_token,
        "dtype": token_dtype(encoding.n_vocab).name,
        "shard_tokens": settings["shard_tokens"],
        "made_from": {
            k: settings[k]
            for k in ("source", "val_source", "val_share", "max_tokens", "max_val_tokens")
        },
        "input_files": hashlib.sha256(
            json.dumps([[f, local_size(f)] for f in (*train, *(val or ()))]).encode()
        ).hexdigest(),
        "splits": {
            s: {"tokens": 0, "shards": [], "next": [0, 0, 0], "complete": False}
            for s in ("val", "train")
        },
    }
    if os.path.exists(path):
        old = read_meta(directory)
        differs = [key for key in meta if key != "splits" and meta[key] != old.get(key)]
        if differs:
            raise SystemExit(
                f"{directory} was prepared with another {', '.join(differs)}: choose another --data_dir"
            )
        return old
    if local:
        shutil.copyfile(name, os.path.join(directory, meta["tokenizer"]))
    write_json(path, meta)
    return meta


if __name__ == "__main__":
    settings, _ = configure(globals(), argv=sys.argv[1:])
    echo(settings)
    prepare(settings)
