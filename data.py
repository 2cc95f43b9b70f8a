"""
Data: tokenizers, text files, shards of token ids, and batches for training and evaluation.

A shard is a 64-byte header followed by token ids. prepare_c4.py writes shards; this file reads
them. meta.json in the same folder lists the shards with their lengths and sha256.
"""

import base64
import glob
import gzip
import hashlib
import json
import os
import re
import struct
import sys
import time
import uuid
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice, takewhile
from threading import Thread

import numpy as np
import tiktoken

# 64 bytes: magic, version, bytes a token, tokens, sha256 of the tokenizer
HEADER = struct.Struct("<8sII Q 32s 8x")
MAGIC, VERSION = b"resshard", 1
EOT = "<|endoftext|>"
AGAIN = "delete the folder and prepare the data again"
META = {"tokenizer", "tokenizer_sha256", "vocab_size", "eot", "splits"}  # what meta.json must have
SHARD = {"file", "tokens", "sha256"}  # and what it must say of every shard
PATIENCE = 3600  # stop reading after this many seconds without a new record from the hub
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


# ------------------------------------------------------------------------------------------------
# Files


def make_folder(path):
    """Make a folder, if it does not exist yet."""
    try:
        os.makedirs(path or ".", exist_ok=True)
    except OSError as error:
        raise SystemExit(f"{path}: no folder can be made there: {error.strerror}") from None


@contextmanager
def atomic(path):
    """Open a temporary file for writing. It is renamed to path once it is complete on disk.

    Its name is unique, so that two processes cannot mix what they write. It removes those that
    killed processes left; if another process still writes one, the rename there fails.
    """
    if not path or os.path.isdir(path):
        raise SystemExit(f"{path!r} is not the name of a file")
    for unfinished in glob.glob(f"{glob.escape(path)}.????????.tmp"):
        with suppress(FileNotFoundError):  # another process has just renamed or removed it
            os.remove(unfinished)
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        file = open(temporary, "wb")
    except OSError as error:
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise


def write_json(path, value):
    with atomic(path) as file:
        file.write(json.dumps(value, indent=1).encode())


def read_json(path):
    """The table of keys in a file."""
    try:
        value = json.load(open(path, encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise SystemExit(f"{path} is not a table of keys")
    return value


def json_lines(path):
    """Yield the values in a file of JSON lines, without lines that a crash has damaged."""
    for line in open(path, "rb"):
        with suppress(ValueError):
            yield json.loads(line)


def reason_of(error):
    """The first line of an error's message, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def file_sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------------
# Tokenizers


def get_tokenizer(name):
    """A tiktoken Encoding: "bytes", a local .tiktoken file, or a name that tiktoken downloads.

    A .tiktoken file has lines of `base64 rank`; its text is split into words as gpt2 does.
    A .json file is a JsonTokenizer.
    """
    if name.endswith(".json"):
        return JsonTokenizer(name)
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            name, pat_str=r"[\s\S]{1,32}", mergeable_ranks=ranks, special_tokens={EOT: 256}
        )
    if name.endswith(".tiktoken"):
        if not os.path.exists(name):
            raise SystemExit(f"{name}: no such tokenizer file")
        lines = [line.split() for line in open(name, "rb") if line.strip()]
        try:
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
            eot = 1 + max(ranks.values())  # ranks may have gaps
        except ValueError as error:
            raise SystemExit(f"{name}: not lines of base64 and rank ({error})") from None
        return tiktoken.Encoding(
            name, pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens={EOT: eot}
        )
    if name not in tiktoken.list_encoding_names():
        others = ", ".join((".tiktoken or .json file", *tiktoken.list_encoding_names()))
        raise SystemExit(f"tokenizer={name!r}: choose bytes, a {others}")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # of the package requests
        failed = f"tokenizer={name!r} cannot be downloaded ({type(error).__name__})"
        copied = "set TIKTOKEN_CACHE_DIR to a folder from a machine that has downloaded it"
        raise SystemExit(f"{failed}: use --tokenizer=bytes, or {copied}") from None


def byte_characters():
    """The character that byte-level BPE writes for each byte: itself, if it can be printed."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printed else next(others)) for byte in range(256)]


class JsonTokenizer:
    """A tokenizer.json of Hugging Face, with the methods of tiktoken's Encoding that are used here.

    Text that spells a special token becomes ordinary tokens. start: the ids that begin a text.
    bos: the begin-of-text token, or None. Some tokenizers have one but do not put it before a text.
    """

    def __init__(self, path, eot=None, start=None, bos=None):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise SystemExit(f"{path} needs a package: pip install tokenizers") from None
        if not os.path.exists(path):
            raise SystemExit(f"{path}: no such tokenizer file")
        try:
            self.inner = Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more specific
            raise SystemExit(f"{path} is not a valid tokenizer.json: {error}") from None
        self.inner.encode_special_tokens = True
        self.inner.no_truncation()
        self.inner.no_padding()
        self.path, self.sha256 = path, file_sha256(path)
        self.added = self.inner.get_added_tokens_decoder()
        self._special_tokens = {t.content: i for i, t in self.added.items() if t.special}
        self.n_vocab = 1 + max(self.inner.get_vocab(with_added_tokens=True).values())
        self.eot_token, self.bos_token = self.special_tokens() if eot is None else (eot, bos)
        self.start, self.imported = start or [], start is not None
        if not self.imported:  # the tokenizer of shards, in which end-of-text begins every text
            self.start = [self.eot_token]
        self.bytes_of = {c: byte for byte, c in enumerate(byte_characters())}
        self.byte_level = "ByteLevel" in str(self.inner.decoder)

    def special_tokens(self):
        """Ids of end-of-text and begin-of-text, from files that Hugging Face keeps beside it."""
        found = {"eos": None, "bos": None}
        for name, key in (("tokenizer_config.json", "{}_token"), ("config.json", "{}_token_id")):
            path = os.path.join(os.path.dirname(self.path), name)
            given = read_json(path) if os.path.exists(path) else {}
            for kind in found if given else ():
                value = given.get(key.format(kind))
                value = value["content"] if isinstance(value, dict) else value
                value = value[0] if isinstance(value, list) else value
                value = self.inner.token_to_id(value) if isinstance(value, str) else value
                found[kind] = value if found[kind] is None else found[kind]
            if given and found["eos"] is not None:
                break  # a bos only in config.json does not count
        if found["eos"] is None:
            raise SystemExit(f"{self.path}: its folder needs tokenizer_config.json with eos_token")
        return found["eos"], found["bos"]

    def own_start(self):
        """The ids that the tokenizer itself puts before a text, such as begin-of-text.

        As in transformers, tokenizer.json decides, and not add_bos_token beside it.
        """
        made = self.inner.encode("a")
        pairs = takewhile(lambda pair: pair[1], zip(made.ids, made.special_tokens_mask))
        return [i for i, _ in pairs]

    def encode_ordinary(self, text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_to_numpy(self, text, disallowed_special=()):
        return np.array(self.encode_ordinary(text))

    def decode(self, ids):
        return self.inner.decode(ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, i):
        """The bytes of a token: exact for byte-level BPE."""
        if i in self.added:
            return self.added[i].content.encode()
        text = self.inner.id_to_token(i) or ""
        if self.byte_level:
            return bytes(self.bytes_of[character] for character in text)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()


def token_bytes(encoding):
    """Bytes of text of each token id. Special tokens have 0, and so has the id -1 of padding."""
    lengths = np.zeros(encoding.n_vocab + 1)
    if isinstance(encoding, JsonTokenizer):
        ids = encoding.inner.get_vocab(with_added_tokens=True).values()
        for i in {*ids} - {*encoding._special_tokens.values()}:
            lengths[i] = len(encoding.decode_single_token_bytes(i))
    else:
        for token, i in encoding._mergeable_ranks.items():
            lengths[i] = len(token)
    return lengths


def start_of_text(encoding):
    """The token ids that start a text: end-of-text, or what an imported tokenizer puts there."""
    return getattr(encoding, "start", [encoding.eot_token])


def begun(ids, encoding):
    """Token ids after those that start a text; end-of-text if there are none at all."""
    return [*start_of_text(encoding), *ids] or [encoding.eot_token]


def ends_text(token, encoding):
    """Whether a token ends a text: end-of-text, or another one of an imported model."""
    return token in getattr(encoding, "stops", [encoding.eot_token])


def plain_text(ids, encoding):
    """The text of token ids without special tokens."""
    special = {*encoding._special_tokens.values()}
    return encoding.decode([i for i in ids if i not in special])


def fingerprint(encoding):
    """sha256 of everything that decides how text becomes token ids."""
    if isinstance(encoding, JsonTokenizer):
        return hashlib.sha256(f"{encoding.sha256} {encoding.eot_token}".encode()).digest()
    digest = hashlib.sha256(encoding._pat_str.encode())
    for token, rank in sorted(encoding._mergeable_ranks.items()):
        digest.update(struct.pack("<II", rank, len(token)) + token)
    digest.update(json.dumps(sorted(encoding._special_tokens.items())).encode())
    return digest.digest()


def is_imported(meta):
    """Whether the tokenizer came with an imported model. It then lies beside the checkpoint."""
    return meta.get("start") is not None


def meta_tokenizer(folder, meta):
    """The tokenizer that made the shards in a folder, or that was imported into it."""
    name = meta["tokenizer"]
    path = os.path.join(folder, name)
    if name.endswith(".json"):
        encoding = JsonTokenizer(path, meta["eot"], meta.get("start"), meta.get("bos"))
        encoding.stops = meta.get("stops", [encoding.eot_token])
    elif name.endswith(".tiktoken"):
        encoding = get_tokenizer(path)
    else:
        return get_tokenizer(name)
    if fingerprint(encoding).hex() != meta["tokenizer_sha256"]:
        raise SystemExit(f"{path} is not the tokenizer that this model or data was made with")
    return encoding


def token_dtype(n_vocab):
    return np.dtype("<u2" if n_vocab <= 2**16 else "<u4")


# ------------------------------------------------------------------------------------------------
# Text


def read_documents(path, column="text"):
    """Yield the texts in one file, in order."""
    if path.endswith(".py"):
        try:
            yield open(path, encoding="utf-8").read()
        except UnicodeDecodeError:
            pass  # a few of the standard library's tests use other encodings on purpose
        return
    from datasets import load_dataset

    kinds = dict.fromkeys((".json.gz", ".jsonl", ".jsonl.gz"), "json")
    kinds |= {".parquet": "parquet", ".txt": "text"}
    kind = next((kind for ending, kind in kinds.items() if path.endswith(ending)), None)
    if kind is None:
        raise SystemExit(f"{path}: expected a file that ends in {', '.join(kinds)}")
    if os.path.exists(path) and not os.path.getsize(path):
        return
    options = {"sample_by": "document"} if kind == "text" else {}
    on_hub = path.startswith("hf://")
    options["data_files"] = [path if on_hub else glob.escape(os.path.abspath(path))]
    load = partial(load_dataset, kind, split="train", streaming=True, **options)
    try:
        records = read_hub(path, load) if on_hub else load()
        yield from column_of(records, column, path)
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:  # damaged or cut short
        raise SystemExit(f"{path} cannot be read: {reason_of(error)}") from None


def column_of(records, column, source):
    """Yield a column of text. source: where the records come from, for the message."""
    for n, record in enumerate(records):
        if not isinstance(record.get(column), str):
            raise SystemExit(f"{source}: record {n} has no {column}, but {', '.join(record)}")
        yield record[column]


def read_hub(path, load):
    """Yield the records that load() reads from a file on the hub.

    When the hub fails, wait, load again and skip the records already read. If waiting cannot help,
    exit with a one-line message.
    """
    from datasets import config
    from huggingface_hub import HfFileSystem
    from huggingface_hub.utils import httpx

    # datasets can retry a failed read, but loses the bytes that the failed read already had. So we
    # disable its retries and pauses, and open the file again.
    config.STREAMING_READ_MAX_RETRIES = 1
    config.STREAMING_READ_RETRY_INTERVAL = 0
    config.STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL = 0
    config.STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL = 0
    done, pause, progress_at, listed = 0, 1, time.time(), False
    while True:
        try:
            # load() calls a file missing if the hub does not answer. info() tells the two apart.
            HfFileSystem().info(path)
            listed = True
            for record in islice(load(), done, None):
                yield record
                done, pause, progress_at = done + 1, 1, time.time()
            return
        except (httpx.HTTPError, ConnectionError, FileNotFoundError) as error:
            cause = error.__cause__ or error
            response = getattr(cause, "response", None)
            status = 500 if response is None else response.status_code
            if not listed and not isinstance(error, httpx.HTTPError):
                status = 404  # missing, or not accessible, or HF_HUB_OFFLINE is set
        reason = str(cause).strip().split("\n")[0]
        problem = f"\n{path}: {type(cause).__name__}: {reason}"
        if status < 500 and status not in (408, 429):  # these two are temporary
            raise SystemExit(f"{problem}; set HF_TOKEN to a token that may read it")
        if time.time() + pause > progress_at + PATIENCE:
            raise SystemExit(f"{problem}; gave up after {PATIENCE} s; start again to continue")
        print(f"{problem}; trying again in {pause} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        pause = min(2 * pause, 60)


# ------------------------------------------------------------------------------------------------
# Shards


def read_meta(directory):
    path = os.path.join(directory, "meta.json")
    if not os.path.exists(path):
        raise SystemExit(f"{directory} holds no prepared data (no meta.json): run prepare_c4.py")
    with suppress(ValueError, LookupError, AttributeError, TypeError):
        meta = json.load(open(path))
        shards = [shard for split in ("val", "train") for shard in meta["splits"][split]["shards"]]
        if META <= meta.keys() and all(SHARD <= shard.keys() for shard in shards):
            return meta
    raise SystemExit(f"{path} is damaged, or from another version of prepare_c4.py: {AGAIN}")


def open_shard(path, meta, expected):
    """Memory-map the tokens of one shard, after checking its header and size."""
    if not os.path.exists(path):
        raise SystemExit(f"{path} is listed in meta.json but missing: {AGAIN}")
    dtype, digest = token_dtype(meta["vocab_size"]), bytes.fromhex(meta["tokenizer_sha256"])
    header = HEADER.pack(MAGIC, VERSION, dtype.itemsize, expected, digest)
    if open(path, "rb").read(HEADER.size) != header:
        raise SystemExit(f"{path} is not the shard that meta.json describes: {AGAIN}")
    if os.path.getsize(path) != HEADER.size + expected * dtype.itemsize:
        raise SystemExit(f"{path} is truncated, or longer than its {expected} tokens: {AGAIN}")
    return np.memmap(path, dtype, "r", HEADER.size)


def open_shards(directory, meta, split):
    shards = meta["splits"][split]["shards"]
    return [open_shard(os.path.join(directory, s["file"]), meta, s["tokens"]) for s in shards]


def damaged_shards(directory):
    """Yield one line for each shard that is missing or whose sha256 is not that in meta.json."""
    for split in read_meta(directory)["splits"].values():
        for shard in split["shards"]:
            path = os.path.join(directory, shard["file"])
            if not os.path.exists(path):
                yield f"{path} is listed in meta.json but missing: {AGAIN}"
            elif shard["sha256"] != file_sha256(path):
                yield f"{path} has changed since it was prepared: {AGAIN}"


class Windows:
    """A split as windows of T + 1 tokens. They overlap by one token, so that no target is lost."""

    def __init__(self, directory, split, T):
        meta = read_meta(directory)
        if not meta["splits"][split]["complete"]:
            raise SystemExit(f"{directory}: {split} was cut short: run prepare_c4.py again")
        self.directory, self.T, self.meta, self.damage = directory, T, meta, []
        self.shards = open_shards(directory, meta, split)
        hashes = " ".join(shard["sha256"] for shard in meta["splits"][split]["shards"])
        self.sha256 = hashlib.sha256(hashes.encode()).hexdigest()  # of the content of the split
        self.ends = np.cumsum([(len(shard) - 1) // T for shard in self.shards], dtype=np.int64)
        if not len(self.ends) or self.ends[-1] == 0:
            short = f"{split} has no window of {T} tokens"
            raise SystemExit(f"{directory}: {short}: lower block_size (in eval.py, context)")

    def __len__(self):
        return int(self.ends[-1])

    def refuse_other_tokenizer(self, meta, vocab_size):
        """Exit with a message unless a model with this meta and vocab_size reads these tokens."""
        if meta["tokenizer_sha256"] not in (None, self.meta["tokenizer_sha256"]):
            raise SystemExit(f"{self.directory}: the checkpoint was trained with another tokenizer")
        size = self.meta["vocab_size"]
        if size > vocab_size:
            more = f"more token ids than the model: for a new one set --vocab_size={size} or more"
            raise SystemExit(f"{self.directory} has {more}")

    def verify(self):
        """Compare every shard of the folder with its sha256, in a thread. Returns the thread.

        If a shard has changed, reading the next window ends the run with one line.
        """
        find = lambda: self.damage.extend(damaged_shards(self.directory))
        thread = Thread(target=find, daemon=True)
        thread.start()
        return thread

    def __getitem__(self, i):
        if self.damage:
            raise SystemExit(self.damage[0])
        shard = int(np.searchsorted(self.ends, i, "right"))
        start = (i - (self.ends[shard - 1] if shard else 0)) * self.T
        return self.shards[shard][start : start + self.T + 1]


# ------------------------------------------------------------------------------------------------
# Batches


def to_batch(rows, device):
    """Stack rows into int64 tensors (B, T): inputs, targets, and any further parts of a row.

    A row is T + 1 tokens, or an array (2 or more, T) of inputs, targets and further parts.
    """
    import torch  # here, because prepare_c4.py's worker processes do not need it

    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    parts = tokens.unbind(1) if tokens.ndim == 3 else (tokens[:, :-1], tokens[:, 1:])
    parts = [part.contiguous() for part in parts]
    return [part.pin_memory() for part in parts] if str(device).startswith("cuda") else parts


class Loader:
    """Training batches: the windows in shuffled order, each once per epoch.

    The windows of a batch are a function of (seed, step, micro-step, rank). Those of a whole step
    do not depend on the number of ranks or on the batch size. A thread reads the next batch while
    the model trains on the current one.
    """

    def __init__(self, windows, batch_size, micro_steps, seed, rank=0, world=1, device="cpu"):
        self.windows, self.seed = windows, seed
        self.batch_size, self.micro_steps = batch_size, micro_steps
        self.rank, self.world, self.device = rank, world, device
        self.epoch, self.order = None, None
        self.thread, self.ahead = ThreadPoolExecutor(1), (None, None)

    def indices(self, step, micro):
        first = ((step * self.micro_steps + micro) * self.world + self.rank) * self.batch_size
        return [self.shuffled(k) for k in range(first, first + self.batch_size)]

    def shuffled(self, k):
        n = len(self.windows)
        epoch, i = divmod(k, n)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.arange(n, dtype=np.uint32)
            np.random.default_rng((self.seed, epoch)).shuffle(self.order)
        return int(self.order[i])

    def fetch(self, step, micro):
        return to_batch([self.windows[i] for i in self.indices(step, micro)], self.device)

    def batch(self, step, micro):
        """Inputs, targets and any further parts, (batch_size, T) each, on the device."""
        key, future = self.ahead
        if key != (step, micro):
            future = self.thread.submit(self.fetch, step, micro)
        parts = future.result()
        micro += 1
        key = (step + micro // self.micro_steps, micro % self.micro_steps)
        self.ahead = key, self.thread.submit(self.fetch, *key)
        return [part.to(self.device, non_blocking=True) for part in parts]


def micro_batches(share, batch_size):
    """(sequences of a micro-step, micro-steps) for a rank that trains share sequences a step.

    A micro-step has at most batch_size sequences.
    """
    sequences = max(n for n in range(1, min(batch_size, share) + 1) if share % n == 0)
    return sequences, share // sequences


VAL_PARTS = {"all": slice(None), "tune": slice(0, None, 2), "report": slice(1, None, 2)}


def spread(windows, tokens=None, part="all"):
    """Indices of evenly spaced windows with about `tokens` tokens, the same in every call.

    part "tune" takes windows 0, 2, 4, ... and "report" windows 1, 3, 5, ...: settings are chosen on
    one half and losses reported on the other. Each half covers the whole split.
    tokens None: all windows of the part.
    """
    pool = range(len(windows))[VAL_PARTS[part]]
    if not pool:
        raise SystemExit(f"val_part={part!r}: the split has only {len(windows)} window")
    count = len(pool) if tokens is None else min(len(pool), max(1, tokens // windows.T))
    return [pool[(2 * i + 1) * len(pool) // (2 * count)] for i in range(count)]


def eval_batches(windows, indices, batch_size, device, rank=0, world=1):
    """Yield this rank's share of the windows at indices, as tensors (inputs, targets, ...).

    The last batches are padded with repeated windows whose targets are -1, so that every rank has
    the same number of batches and every batch has the same shape.
    """
    count = len(indices)
    for first in range(0, count, batch_size * world):
        places = range(first + rank, first + batch_size * world, world)
        rows = [windows[indices[i % count]] for i in places]
        x, y, *more = (part.to(device) for part in to_batch(rows, device))
        y[[i >= count for i in places]] = -1
        yield x, y, *more
