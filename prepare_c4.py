"""
Text to shards of tokens, and shards to batches: the format is written and read in this one file.

    python prepare_c4.py                                    the Python standard library as bytes: no download, seconds
    python prepare_c4.py --source=c4 --max_tokens=1e9       C4 en from the hub, gpt2 BPE (set HF_TOKEN if you have one)
    python prepare_c4.py --source='dump/*.json.gz'          the same records from disk: .json.gz .jsonl .parquet .txt

A shard is a 64-byte header and up to shard_tokens token ids. Documents follow one another in a fixed order, each with
end-of-text behind it, running on from one shard into the next. Started again after a kill, preparation goes on behind
the last whole shard: meta.json says which token of which document of which file comes next.
"""

import base64
import glob
import hashlib
import json
import os
import shutil
import struct
import sys
import sysconfig
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np
import tiktoken

from configurator import configure, echo

source = "python"  # python: the standard library's own source; c4: from the hub; anything else: a glob of files
val_source: str | None = None  # glob of validation files; None: c4's own, elsewhere val_share of the documents
val_share = 0.05  # share of the documents, chosen by a hash of their text, that is kept for validation
tokenizer: str | None = None  # bytes, a name tiktoken knows, or a .tiktoken file; None: bytes for python, else gpt2
data_dir: str | None = None  # where the shards go; None: data/python, data/c4 or data/text
max_tokens: int | None = None  # stop after so many training tokens; None: take all there is
max_val_tokens = 10_000_000  # stop after so many validation tokens
shard_tokens = 50_000_000  # tokens a shard
workers: int | None = None  # processes that tokenise; None: one a core

C4 = "hf://datasets/allenai/c4/en/c4-{split}.{i:05d}-of-{n:05d}.json.gz"  # 1024 files train, 8 validate
HEADER = struct.Struct("<8sII Q 32s 8x")  # magic, version, bytes a token, tokens, sha256 of the tokenizer: 64 bytes
MAGIC, VERSION = b"resshard", 1
EOT = "<|endoftext|>"
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers


def get_tokenizer(name):
    """bytes, a local file of `base64 rank` lines cut up as gpt2 does, or one of tiktoken's own (which downloads it)"""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(name, pat_str=r"[\s\S]{1,32}", mergeable_ranks=ranks, special_tokens={EOT: 256})
    if name.endswith(".tiktoken"):
        if not os.path.exists(name):
            raise SystemExit(f"{name}: no such file of tokens and ranks")
        lines = [line.split() for line in open(name, "rb") if line.strip()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        return tiktoken.Encoding(name, pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={EOT: len(ranks)})
    if name not in tiktoken.list_encoding_names():
        names = ", ".join(tiktoken.list_encoding_names())
        raise SystemExit(f"tokenizer={name!r}: choose bytes, a .tiktoken file, or one of {names}")
    return tiktoken.get_encoding(name)


def fingerprint(encoding):
    """sha256 over everything that decides how text becomes ids"""
    digest = hashlib.sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items()):
        digest.update(struct.pack("<II", rank, len(token)) + token)
    digest.update(json.dumps(sorted(encoding._special_tokens.items())).encode())
    return digest.digest()


def meta_tokenizer(data_dir, meta):
    """The tokenizer that made the shards of data_dir"""
    name = meta["tokenizer"]
    return get_tokenizer(os.path.join(data_dir, name) if name.endswith(".tiktoken") else name)


# ---------------------------------------------------------------------------------------------------------------------
# Documents


def list_files(source):
    """(training files, validation files or None where a hash of each document decides)"""
    if source == "c4":
        return [[C4.format(split=s, i=i, n=n) for i in range(n)] for s, n in (("train", 1024), ("validation", 8))]
    if source == "python":
        root = sysconfig.get_paths()["stdlib"]
        pattern = os.path.join(glob.escape(root), "**", "*.py")
        return sorted(f for f in glob.glob(pattern, recursive=True) if "site-packages" not in f), None
    return sorted(glob.glob(source, recursive=True)), None


def read_documents(path, column="text"):
    """The texts in one file, in order"""
    if path.endswith(".py"):
        try:
            yield open(path, encoding="utf-8").read()
        except UnicodeDecodeError:
            pass  # a handful of the library's tests are in other encodings on purpose
        return
    from datasets import load_dataset

    kinds = {".json.gz": "json", ".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet", ".txt": "text"}
    kind = next((kind for ending, kind in kinds.items() if path.endswith(ending)), None)
    if kind is None:
        raise SystemExit(f"{path}: expected a file that ends in {', '.join(kinds)}")
    whole = {"sample_by": "document"} if kind == "text" else {}
    for n, record in enumerate(load_dataset(kind, data_files=[path], split="train", streaming=True, **whole)):
        if not isinstance(record.get(column), str):
            raise SystemExit(f"{path}: record {n} has no {column}: C4's records are {{'text': ..., 'url': ...}}")
        yield record[column]


def validates(text, share):
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") < share * 2**64


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
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()  # do not outlive a killed parent


def tokenise(batch):
    """[(file, document, tokens with end-of-text behind them)]; text that spells a special token is just text"""
    dtype, eot = token_dtype(encoding.n_vocab), encoding.eot_token
    ids = [encoding.encode_to_numpy(text, disallowed_special=()) for _, _, text in batch]
    return [(f, n, np.append(tokens, eot).astype(dtype)) for (f, n, _), tokens in zip(batch, ids)]


def token_dtype(n_vocab):
    return np.dtype("<u2" if n_vocab <= 2**16 else "<u4")


def in_order(pool, jobs, ahead):
    """tokenise the jobs in other processes, never more than `ahead` in flight; results in the order of the jobs"""
    pending = deque()
    for job in jobs:
        pending.append(pool.submit(tokenise, job))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def atomic(path):
    """A file to write into that takes its name when it is whole and on disk, or not at all"""
    try:
        with open(path + ".tmp", "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".tmp", path)
    except BaseException:
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")
        raise


def write_json(path, value):
    with atomic(path) as file:
        file.write(json.dumps(value, indent=1).encode())


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
            split["shards"].append({"file": shard, "tokens": fill})
        split.update(tokens=split["tokens"] + fill, next=next_token, complete=complete)
        write_json(os.path.join(directory, "meta.json"), meta)
        fill = 0

    file, document, skip = split["next"]
    for results in in_order(pool, batches(files, keep, (file, document)), 4 * workers):
        for f, n, tokens in results:
            at = skip if (f, n) == (file, document) else 0
            while at < len(tokens) and (limit is None or split["tokens"] + fill < limit):
                room = min(size - fill, sys.maxsize if limit is None else limit - split["tokens"] - fill)
                part = tokens[at : at + room]
                buffer[fill : fill + len(part)] = part
                fill, at = fill + len(part), at + len(part)
                if fill == size:
                    flush([f, n, at])
        tokens = split["tokens"] + fill
        progress(name, tokens, tokens / limit if limit else f / len(files), (tokens - before) / (time.time() - began))
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
        raise SystemExit("c4 is some 160e9 tokens, 320 GB of shards: say how many you want with --max_tokens=1e9")
    if min(settings["shard_tokens"], settings["max_val_tokens"], 1 if limit is None else limit, cores) < 1:
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
        raise SystemExit(f"{directory}: {left:,} tokens need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
    share = settings["val_share"] if val is None else 0.0
    jobs = {
        "val": (val or train, lambda text: val or validates(text, share), settings["max_val_tokens"]),
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
        "made_from": {k: settings[k] for k in ("source", "val_source", "val_share", "max_tokens", "max_val_tokens")},
        "input_files": hashlib.sha256(
            json.dumps([[f, local_size(f)] for f in (*train, *(val or ()))]).encode()
        ).hexdigest(),
        "splits": {s: {"tokens": 0, "shards": [], "next": [0, 0, 0], "complete": False} for s in ("val", "train")},
    }
    if os.path.exists(path):
        old = read_meta(directory)
        differs = [key for key in meta if key != "splits" and meta[key] != old.get(key)]
        if differs:
            raise SystemExit(f"{directory} was prepared with another {', '.join(differs)}: choose another --data_dir")
        return old
    if local:
        shutil.copyfile(name, os.path.join(directory, meta["tokenizer"]))
    write_json(path, meta)
    return meta


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_meta(directory):
    path = os.path.join(directory, "meta.json")
    if not os.path.exists(path):
        raise SystemExit(f"{directory} holds no prepared data (no meta.json): run python prepare_c4.py first")
    return json.load(open(path))


def open_shard(path, meta, expected):
    """The tokens of one shard, memory-mapped, after every check that its header and its size allow"""
    if not os.path.exists(path):
        raise SystemExit(f"{path} is listed in meta.json but missing: prepare the data again")
    head = open(path, "rb").read(HEADER.size)
    dtype, size = token_dtype(meta["vocab_size"]), os.path.getsize(path)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise SystemExit(f"{path} is no shard: it starts with {head[:8]!r}, not {MAGIC!r}")
    _, version, itemsize, tokens, digest = HEADER.unpack(head)
    if version != VERSION:
        raise SystemExit(f"{path} has format version {version}, this code reads {VERSION}: prepare the data again")
    if digest.hex() != meta["tokenizer_sha256"] or itemsize != dtype.itemsize:
        raise SystemExit(f"{path} was made with another tokenizer than meta.json says: prepare the data again")
    if tokens != expected:
        raise SystemExit(f"{path} holds {tokens} tokens, meta.json says {expected}: prepare the data again")
    if size != HEADER.size + tokens * itemsize:
        raise SystemExit(f"{path} is truncated: it has {size} bytes, its header promises {tokens} tokens")
    return np.memmap(path, dtype, "r", HEADER.size)


class Windows:
    """A split as windows of T + 1 tokens, each beginning with the last token of the one before it in the same shard"""

    def __init__(self, directory, split, T):
        meta = read_meta(directory)
        if not meta["splits"][split]["complete"]:
            raise SystemExit(f"{directory}: preparation of {split} was cut short: run prepare_c4.py again to finish it")
        shards = meta["splits"][split]["shards"]
        self.shards = [open_shard(os.path.join(directory, s["file"]), meta, s["tokens"]) for s in shards]
        self.T, self.meta = T, meta
        self.ends = np.cumsum([(len(shard) - 1) // T for shard in self.shards], dtype=np.int64)
        if not len(self.ends) or self.ends[-1] == 0:
            raise SystemExit(f"{directory}: {split} is shorter than one window of {T} + 1 tokens")

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, i):
        shard = int(np.searchsorted(self.ends, i, "right"))
        at = (i - (self.ends[shard - 1] if shard else 0)) * self.T
        return self.shards[shard][at : at + self.T + 1]


class Loader:
    """Batches of a Windows in shuffled order, every window once an epoch. Which windows make a batch is a function of
    (seed, step, micro-step, rank) and nothing else, and which windows make a step does not depend on how many ranks
    share it. The next batch is read, and pinned for CUDA, while the present one is trained on."""

    def __init__(self, windows, batch_size, micro_steps, seed, rank=0, world=1, device="cpu"):
        self.windows, self.batch_size, self.micro_steps, self.seed = windows, batch_size, micro_steps, seed
        self.rank, self.world, self.device = rank, world, device
        self.epoch, self.order = None, None
        self.thread, self.ahead = ThreadPoolExecutor(1), (None, None)

    def indices(self, step, micro):
        first = ((step * self.micro_steps + micro) * self.world + self.rank) * self.batch_size
        return [self.shuffled(k) for k in range(first, first + self.batch_size)]

    def shuffled(self, k):
        epoch, i = divmod(k, len(self.windows))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.windows))
        return int(self.order[i])

    def fetch(self, step, micro):
        return to_batch([self.windows[i] for i in self.indices(step, micro)], self.device)

    def batch(self, step, micro):
        """inputs and targets, (batch_size, T) each, and what else there is in a row, on the device"""
        key, future = self.ahead
        parts = future.result() if key == (step, micro) else self.thread.submit(self.fetch, step, micro).result()
        micro += 1
        key = (step + micro // self.micro_steps, micro % self.micro_steps)
        self.ahead = key, self.thread.submit(self.fetch, *key)
        return [part.to(self.device, non_blocking=True) for part in parts]


def to_batch(rows, device):
    """Tensors of inputs and targets from rows of T + 1 tokens, or from rows that hold them apart, (2 or more, T)"""
    import torch

    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    parts = tokens.unbind(1) if tokens.ndim == 3 else (tokens[:, :-1], tokens[:, 1:])
    parts = [part.contiguous() for part in parts]
    return [part.pin_memory() for part in parts] if str(device).startswith("cuda") else parts


if __name__ == "__main__":
    settings = configure(globals(), argv=sys.argv[1:])
    echo(settings)
    prepare(settings)
