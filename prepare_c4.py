"""
Turn text into shards of token ids.

    python prepare_c4.py                                 your Python's standard library, as bytes
    python prepare_c4.py --source=c4 --max_tokens=1e9    C4 en from the Hugging Face hub
    python prepare_c4.py --source='dump/*.json.gz'       your .json.gz, .jsonl, .parquet, .txt files

A shard is a 64-byte header and at most shard_tokens token ids. data.py reads shards. Documents
follow one another in a fixed order, and end-of-text ends each of them. A document can start in one
shard and end in the next. If preparation is stopped, start it again. It continues after the last
complete shard, at the file, document and token in meta.json. Training leaves out every document
whose tokens are also a document of the validation split.
"""

import glob
import hashlib
import json
import os
import shutil
import sys
import sysconfig
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, pairwise
from multiprocessing import get_context, parent_process
from threading import Thread

import numpy as np

import data
from configurator import check, configure, echo
from machine import cores

source = "python"  # python (its standard library), c4 (from the hub), or a pattern of file names
val_source: str | None = None  # validation files; None: c4's own, or val_share of the documents
val_share = 0.05  # share of the documents for validation, chosen by a hash of their text
tokenizer: str | None = None  # bytes, gpt2, a .tiktoken or a .json; None: bytes for python, or gpt2
data_dir: str | None = None  # folder for the shards; None: data/python, data/c4 or data/text
max_tokens: int | None = None  # stop after this many training tokens; None: take all text
max_val_tokens = 10_000_000  # stop after this many validation tokens
shard_tokens = 50_000_000  # tokens per shard
workers: int | None = None  # processes that tokenise; None: one per core
verify = False  # write nothing, only compare the shards in data_dir with their sha256 in meta.json

LEAST = 257  # tokens of a split: one window of train.py's default block_size, and its last target
RULES = (
    ("max_tokens max_val_tokens shard_tokens", lambda v: v >= LEAST, f"at least {LEAST}"),
    ("workers", lambda v: v >= 1, "at least 1"),
    ("val_share", lambda v: 0 <= v < 1, "at least 0 and below 1"),
)
FEW = 100  # with fewer documents, val_share is a share of each document

# C4 has 1024 training files and 8 validation files.
C4 = "hf://datasets/allenai/c4/en/c4-{split}.{i:05d}-of-{n:05d}.json.gz"


# ------------------------------------------------------------------------------------------------
# Documents


def list_files(source):
    """(training files, validation files or None). With None, divide() splits the documents."""
    if source == "c4":
        return [
            [C4.format(split=split, i=i, n=n) for i in range(n)]
            for split, n in (("train", 1024), ("validation", 8))
        ]
    if source == "python":
        root = sysconfig.get_paths()["stdlib"]
        pattern = os.path.join(glob.escape(root), "**", "*.py")
        files = glob.glob(pattern, recursive=True)
        return sorted(f for f in files if "site-packages" not in f), None
    return sorted(glob.glob(source, recursive=True)), None


def validates(text, share):
    """Whether a document belongs to validation. A hash of its text decides."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def divide(files, share):
    """Split documents without validation files.

    Returns a function of a text: (its part for validation, its part for training). A part may be
    None. A hash puts each document into one split. With fewer than FEW documents the shares would
    be far from val_share, and a split could be empty: then every document is cut in two. One that
    is the beginning of another one is left out: the other one would train on its end.
    """

    def by_hash(text):
        return (text, None) if validates(text, share) else (None, text)

    def by_place(text):
        if text in begun:
            return None, None
        at = int((1 - share) * len(text))
        return text[at:] or None, text[:at] or None

    sides, texts = set(), set()
    for count, text in enumerate(chain.from_iterable(map(data.read_documents, files)), 1):
        sides.add(validates(text, share))
        texts.add(text)
        if count >= FEW and len(sides) == 2:
            return by_hash
    # in sorted order, a text that others extend comes right before one of them
    begun = {text for text, after in pairwise(sorted(texts)) if after.startswith(text)}
    print(f"few documents: validation gets the last {100 * share:.3g}% of each")
    if begun:
        print(f"left out {len(begun)} documents that are the beginning of another one")
    return by_place


def batches(files, part, start):
    """Yield lists of (file index, document index, text), about a megabyte each.

    start is the (file index, document index) to begin at. part(text) is the part of a document that
    belongs to the split, or None.
    """
    batch, size = [], 0
    for f in range(start[0], len(files)):
        for n, document in enumerate(data.read_documents(files[f])):
            text = None if (f, n) < start else part(document)
            if text is None:
                continue
            batch.append((f, n, text))
            size += len(text)
            if size > 1_000_000:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------------
# Tokens


def start_worker(name):
    """Load the tokenizer in a worker process, and exit when the parent process ends."""
    global encoding
    encoding = data.get_tokenizer(name)
    exit_with_parent = lambda: (parent_process().join(), os._exit(1))
    Thread(target=exit_with_parent, daemon=True).start()


def tokenise(batch):
    """Tokens of each document: [(file index, document index, array that ends with end-of-text)].

    Text that spells a special token is tokenised as ordinary text.
    """
    dtype, eot = data.token_dtype(encoding.n_vocab), encoding.eot_token
    ids = [encoding.encode_to_numpy(text, disallowed_special=()) for _, _, text in batch]
    return [(f, n, np.append(tokens, eot).astype(dtype)) for (f, n, _), tokens in zip(batch, ids)]


def in_order(pool, jobs, ahead):
    """Tokenise jobs in other processes, and yield the results in the order of the jobs.

    At most `ahead` jobs are submitted at a time.
    """
    pending = deque()
    for job in jobs:
        pending.append(pool.submit(tokenise, job))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


# ------------------------------------------------------------------------------------------------
# Shards


def write_shard(path, tokens, tokenizer_sha256):
    """Write one shard. Return its entry for meta.json."""
    digest = bytes.fromhex(tokenizer_sha256)
    with data.atomic(path) as file:
        file.write(data.HEADER.pack(data.MAGIC, data.VERSION, tokens.itemsize, len(tokens), digest))
        file.write(tokens.data)
    return {"file": os.path.basename(path), "tokens": len(tokens), "sha256": data.file_sha256(path)}


def token_hash(tokens):
    """The hash by which two documents are the same: 8 bytes, to keep millions of them in memory."""
    return hashlib.sha256(tokens).digest()[:8]


def validation_hashes(directory, meta):
    """Hashes of the documents in the validation shards, and of the one that max_val_tokens cut."""
    tokens = np.concatenate(data.open_shards(directory, meta, "val"))
    ends = np.flatnonzero(tokens == meta["eot"]) + 1
    cut = bytes.fromhex(meta["splits"]["val"].get("cut", ""))
    return {cut, *(token_hash(tokens[a:b]) for a, b in pairwise([0, *ends.tolist()]))}


def write_split(name, files, part, limit, directory, meta, pool, workers):
    """Write the shards of one split that are still missing. Update meta.json after each shard.

    part(text) is as in batches(). limit is the number of tokens to stop at, or None.
    """
    split, shard_tokens = meta["splits"][name], meta["shard_tokens"]
    buffer = np.empty(shard_tokens, data.token_dtype(meta["vocab_size"]))
    fill = 0  # tokens in the buffer
    most = sys.maxsize if limit is None else limit

    def flush(next_token, complete=False):
        nonlocal fill
        if fill:
            path = os.path.join(directory, f"{name}_{len(split['shards']):05d}.bin")
            split["shards"].append(write_shard(path, buffer[:fill], meta["tokenizer_sha256"]))
        split.update(tokens=split["tokens"] + fill, next=next_token, complete=complete)
        data.write_json(os.path.join(directory, "meta.json"), meta)
        print(f"{name}: {split['tokens']:,} tokens in {len(split['shards'])} shards", flush=True)
        fill = 0

    refused = validation_hashes(directory, meta) if name == "train" else set()
    file, document, skip = split["next"]
    for results in in_order(pool, batches(files, part, (file, document)), 4 * workers):
        for f, n, tokens in results:
            digest = token_hash(tokens)
            if digest in refused:
                split["left_out"] = split.get("left_out", 0) + 1
                continue
            at = skip if (f, n) == (file, document) else 0
            while at < len(tokens) and split["tokens"] + fill < most:
                room = min(shard_tokens - fill, most - split["tokens"] - fill)
                piece = tokens[at : at + room]
                buffer[fill : fill + len(piece)] = piece
                fill += len(piece)
                at += len(piece)
                if fill == shard_tokens:
                    flush([f, n, at])
            if name == "val" and 0 < at < len(tokens):
                split["cut"] = digest.hex()  # the shards hold only its beginning
            if split["tokens"] + fill >= most:
                break
        if split["tokens"] + fill >= most:
            break
    total = split["tokens"] + fill
    if "left_out" in split:
        print(f"{name}: left out {split['left_out']:,} documents that are in validation")
    if total < LEAST:
        written = [shard["file"] for shard in meta["splits"]["val"]["shards"]]
        for file in (*written, "meta.json") if written else ():
            os.remove(os.path.join(directory, file))
        few = f"{total} tokens for {name} are fewer than the {LEAST} of a window"
        raise SystemExit(f"{directory}: {few}: give more text, or another --val_share")
    flush([len(files), 0, 0], complete=True)


def open_meta(directory, name, encoding, settings, train, val):
    """A new meta, or the one in the directory if its settings are the same."""
    path = os.path.join(directory, "meta.json")
    local = name.endswith((".tiktoken", ".json"))
    sources = ("source", "val_source", "val_share", "max_tokens", "max_val_tokens")
    sizes = [[f, os.path.getsize(f) if os.path.exists(f) else None] for f in (*train, *(val or ()))]
    meta = {
        "version": data.VERSION,
        "tokenizer": "tokenizer" + os.path.splitext(name)[1] if local else name,
        "tokenizer_sha256": data.fingerprint(encoding).hex(),
        "vocab_size": encoding.n_vocab,
        "eot": encoding.eot_token,
        "shard_tokens": settings["shard_tokens"],
        "made_from": {key: settings[key] for key in sources},
        "input_files": hashlib.sha256(json.dumps(sizes).encode()).hexdigest(),
        "splits": {
            split: {"tokens": 0, "shards": [], "next": [0, 0, 0], "complete": False}
            for split in ("val", "train")
        },
    }
    if os.path.exists(path):
        old = data.read_meta(directory)
        differs = [key for key in meta if key != "splits" and meta[key] != old.get(key)]
        if not differs:
            return old
        if any(split["shards"] for split in old["splits"].values()):
            raise SystemExit(f"{directory} has another {', '.join(differs)}: give a new --data_dir")
    own = os.path.join(directory, meta["tokenizer"])
    if local and os.path.realpath(name) != os.path.realpath(own):
        shutil.copyfile(name, own)
    return meta


# ------------------------------------------------------------------------------------------------


def check_shards(directory):
    """Compare all shards with meta.json. If one differs, exit with a line for each that does."""
    if problems := [*data.damaged_shards(directory)]:
        raise SystemExit("\n".join(problems))
    shards = [len(split["shards"]) for split in data.read_meta(directory)["splits"].values()]
    print(f"{directory}: {sum(shards)} shards have the sha256 that meta.json says")


def prepare(settings):
    """Write both splits to data_dir, validation first. With verify, only check them."""
    source, limit = settings["source"], settings["max_tokens"]
    directory = settings["data_dir"] or f"data/{source if source in ('python', 'c4') else 'text'}"
    if settings["verify"]:
        return check_shards(directory)
    check(settings, RULES)
    workers = settings["workers"] or cores()
    if source == "c4" and limit is None:
        raise SystemExit("C4 has 160e9 tokens: say how many you want with --max_tokens=1e9")
    share = settings["val_share"]
    train, val = list_files(source)
    if settings["val_source"] is not None:
        files, of_c4 = list_files(settings["val_source"])
        val = of_c4 or files
    if not train or val == []:
        raise SystemExit(f"no file matches {source if not train else settings['val_source']!r}")
    if both := {*map(os.path.realpath, train)} & {*map(os.path.realpath, val or [])}:
        raise SystemExit(f"val_source: {len(both)} files are also in source, such as {min(both)}")
    if val is None and not share:
        raise SystemExit("val_share=0 leaves no validation text: name some with --val_source")

    name = settings["tokenizer"] or ("bytes" if source == "python" else "gpt2")
    encoding = data.get_tokenizer(name)
    data.make_folder(directory)
    meta = open_meta(directory, name, encoding, settings, train, val)
    left = max(0, (limit or 0) - meta["splits"]["train"]["tokens"])
    need = left * data.token_dtype(encoding.n_vocab).itemsize
    free = shutil.disk_usage(directory).free
    if need > free:
        raise SystemExit(f"{left:,} tokens need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")

    parts = divide(train, share) if val is None else lambda text: (text, text)
    jobs = {
        "val": (val or train, lambda text: parts(text)[0], settings["max_val_tokens"]),
        "train": (train, lambda text: parts(text)[1], limit),
    }
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (name,)) as pool:
        for split, (files, part, most) in jobs.items():
            if not meta["splits"][split]["complete"]:
                write_split(split, files, part, most, directory, meta, pool, workers)
    print(f"{directory}: " + ", ".join(f"{s} {meta['splits'][s]['tokens']:,} tokens" for s in jobs))


if __name__ == "__main__":
    settings, _ = configure(globals(), argv=sys.argv[1:])
    echo(settings)
    prepare(settings)
