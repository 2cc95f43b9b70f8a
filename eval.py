"""
Evaluate a checkpoint: loss, measurements by depth, skipped tokens, benchmark tasks, a text sample.

    python eval.py --out_dir=out --what=loss,depth,sample --prompt='def main():'
    python eval.py --out_dir=out --what=loss --text=book.txt
    python eval.py --out_dir=out --what=tasks --tasks=winogrande,boolq --limit=100

It prints each part and writes the numbers to eval.json in out_dir.
"""

import codecs
import copy
import math
import os
import sys
import time
from itertools import chain

import numpy as np
import torch

import data
import depth
import mod
import prune
from checkpoint import load_model
from configurator import check, configure
from generate import stream_tokens
from machine import autocast, can_compile, pick_device, pick_dtype, prepare_process
from model import evaluate
from tasks import run_tasks

out_dir = "out"  # folder of the run; eval.json goes there too
checkpoint: str | None = None  # file in out_dir, such as ckpt_best.pt; None: the newest
data_dir: str | None = None  # folder with the shards; None: the one that the run was trained on
what: str | None = None  # parts: loss,depth,mod,sample,tasks; None: all that apply except tasks
eval_tokens: int | None = None  # of loss, evenly spaced; with --text, of all parts; None: all
val_part = "all"  # windows of the validation split: all, or one half of them, tune or report
context: int | None = None  # tokens of a window; None: the model's block_size
text: str | None = None  # file (text, .jsonl, .parquet) or hub data set; None: validation split
text_column = "text"  # column that holds the text in records
text_split = "test"  # split of a data set on the hub
depth_tokens = 16384  # validation tokens for depth and mod, evenly spaced over the split
mod_rate: float | None = None  # share of tokens to skip, or of units; None: as trained
prune_unit = "sublayer"  # what mod_rate skips in a model without routers: sublayer or block
prune_by = "angle"  # how it chooses them: lowest angle, lowest norm (see prune.py) or random
batch_size = 8  # windows per batch; the value used in training reuses the compiler's cache
prompt = "def "  # start of the sample, and the text in the map of mod
max_new_tokens = 200  # tokens in the sample
temperature = 0.8  # temperature of the sample; 0: greedy
top_k: int | None = None  # sample from the top_k likeliest tokens; None: from all
top_p: float | None = None  # sample from likeliest tokens of total probability top_p; None: all
seed = 1337  # seed of the sample, of the tasks and of prune_by="random"
tasks: str | None = None  # names of the harness's tasks; None: the eight of the norm papers
task_dir: str | None = None  # folder with task files; None: the tasks of the harness
num_fewshot: int | None = None  # examples before each question; None: the default of each task
limit: int | None = None  # questions per task; None: all
device = "auto"  # cpu, mps, cuda, cuda:1, ...; auto: CUDA if there is any, then mps, then cpu
dtype = "auto"  # autocast of loss: float32, bfloat16, or auto (bfloat16 if the hardware has it)
compile: bool | None = None  # compile loss and decoding; None: loss above 500,000 tokens


# ------------------------------------------------------------------------------------------------
# Loss


class TextWindows(list):
    """Texts as rows (2, T) of inputs and targets.

    End-of-text precedes the first text and follows each text. The last row is padded with targets
    of -1, which the loss ignores. tokens limits their number. An imported model's texts begin as
    its tokenizer says; those ids are not targets.
    """

    def __init__(self, texts, encoding, T, tokens=None):
        eot, start = encoding.eot_token, data.start_of_text(encoding)
        ids, empty = [], True
        for one in texts:
            body = encoding.encode_ordinary(one)
            begin = start if start != [eot] or not ids else []  # end-of-text is there already
            ids += [(i, -1) for i in begin] + [(i, i) for i in (*body, eot)]
            empty &= not body
            if tokens is not None and len(ids) > tokens:
                break
        ids = ids[: None if tokens is None else tokens + 1]
        if empty:
            raise SystemExit(f"text={text!r}: the text is empty")
        self.T = T = min(T, len(ids) - 1)
        self.padding = -(len(ids) - 1) % T
        x = [i for i, _ in ids[:-1]] + [0] * self.padding
        y = [target for _, target in ids[1:]] + [-1] * self.padding
        super().__init__(np.array([x[i : i + T], y[i : i + T]]) for i in range(0, len(x), T))


def read_texts(source, column, split):
    """The texts of a file, or of one column of a data set on the hub."""
    if os.path.exists(source):
        if source.endswith((".json.gz", ".jsonl", ".jsonl.gz", ".parquet")):
            return data.read_documents(source, column)
        try:
            return [open(source, encoding="utf-8").read()]
        except (OSError, ValueError) as error:
            raise SystemExit(f"text={source!r} cannot be read: {error}") from None
    if "/" not in source:
        raise SystemExit(f"text={source!r}: no such file, and not OWNER/NAME of a data set")
    from datasets import load_dataset

    try:
        records = load_dataset(source, split=split, streaming=True)
    except Exception as error:  # the hub's errors have no common class
        why = data.reason_of(error)
        raise SystemExit(f"text={source!r}: no such file, and no data set: {why}") from error
    return data.column_of(records, column, source)


def loss(model, windows, indices, encoding, batch_size, device):
    """Loss in nats per token, perplexity, and bits per byte of the text."""
    lengths = data.token_bytes(encoding)
    tokens, text_bytes = 0, 0
    for i in indices:
        targets = data.to_batch([windows[i]], "cpu")[1].numpy()
        tokens += int((targets >= 0).sum())
        text_bytes += int(lengths[targets].sum())

    if compile or (compile is None and tokens > 500_000 and can_compile(device.type)):
        model = copy.deepcopy(model)  # the other parts need the uncompiled model
        model.compile_blocks()
    with autocast(device.type, pick_dtype(dtype, device.type)):
        nats = evaluate(model, data.eval_batches(windows, indices, batch_size, device))
    return {
        "loss": nats,
        "perplexity": math.exp(min(nats, 700)),  # more would overflow
        "bits per byte": nats * tokens / math.log(2) / max(1, text_bytes),
        "tokens": tokens,
        "bytes": text_bytes,
    }


# ------------------------------------------------------------------------------------------------
# Printing


def show_loss(report):
    of_bytes = f"{report['bits per byte']:.4f} bits per byte, over {report['tokens']:,} tokens"
    nats = f"loss {report['loss']:.4f} nats per token, perplexity {report['perplexity']:.2f}"
    print(f"{nats}, {of_bytes}")


TABLES = {
    "stream": ("variance", "norm", "magnitude", "max", "max/rms", "kurtosis"),
    "block": ("cosine", "dropped", "gradient", "sink", "before MLP", "predicted", "R2"),
    "sublayer": ("update", "rotation", "from embedding", "alpha", "a", "mixing entropy"),
}


def show_depth(report):
    """Print three tables. In the stream's table, row 0 is the embedding and the blocks follow."""
    for title, names in TABLES.items():
        rows = {name: report[name] for name in names if name in report}
        print(f"{title:<9}" + "".join(f"  {name:>14}" for name in rows))
        for i, values in enumerate(zip(*rows.values())):
            print(f"{i:<9}" + "".join(f"  {v:>14.4g}" for v in values))
    if "load" in report:
        ends = ", ".join(f"{min(shares):.1%} to {max(shares):.1%}" for shares in report["load"])
        print(f"least and most used expert of each block, share of the choices: {ends}")
    for name in ("norm and entropy", "norm and loss"):
        value = report[name]
        correlation = "none, all norms are equal" if value is None else f"{value:+.3f}"
        print(f"correlation of the last {name}: {correlation}")
    print("random tokens: loss {:.3f}, when they repeat {:.3f}".format(*report["copying"]))


def show_skipping(report):
    print(f"skipped {report['rate']:.1%}, averaged over the sublayers that tokens may skip")
    print(f"two losses on the same tokens, at most {depth_tokens:,}:")
    print(f"loss {report['causal loss']:.4f}: a token compares its own score with a threshold")
    ahead = "the highest scores of a sequence run, as in training; this looks at later tokens"
    print(f"loss {report['look-ahead loss']:.4f}: {ahead}")
    print("the prompt, at most 96 tokens, a column per token: # runs, . skips")
    for where, share, row in zip(report["where"], report["skipped"], report["map"]):
        print(f"{where:<9} {share:>6.1%} " + "".join(".#"[ran] for ran in row[:96]))


def sample(model, encoding, device):
    """Print and return a continuation of the prompt."""
    torch.manual_seed(seed)
    began = time.perf_counter()
    ids = data.begun(encoding.encode_ordinary(prompt), encoding)
    start = torch.tensor([ids], device=device)
    choices = dict(temperature=temperature, top_k=top_k, top_p=top_p, compile=bool(compile))
    tokens = stream_tokens(model, start, max_new_tokens, n_vocab=encoding.n_vocab, **choices)
    # One character can take several tokens, so an incremental decoder collects the bytes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(prompt, end="", flush=True)
    for token in tokens:
        ids.append(int(token))
        if data.ends_text(ids[-1], encoding):
            break
        new_bytes = encoding.decode_single_token_bytes(ids[-1])
        print(decoder.decode(new_bytes), end="", flush=True)
    seconds = time.perf_counter() - began
    print(f"\n{len(ids) - start.size(1)} tokens in {seconds:.1f} s")
    return encoding.decode(ids[len(data.start_of_text(encoding)) :])


# ------------------------------------------------------------------------------------------------
# All parts


def answers(parts, model, rows, encoding):
    """Evaluate and print each part, and yield (part, report). rows: what to score, or None."""
    if "loss" in parts:
        places = range(len(rows)) if text is not None else data.spread(rows, eval_tokens, val_part)
        print(f"loss of {len(places):,} windows; --eval_tokens takes fewer", flush=True)
        report = loss(model, rows, places, encoding, batch_size, device)
        show_loss(report)
        yield "loss", report
    if {"depth", "mod"} & set(parts):
        if text is not None and rows.padding:
            rows.pop()
        places = data.spread(rows, depth_tokens, val_part if text is None else "all")
        print(f"the stream in {len(places):,} windows; --depth_tokens takes fewer", flush=True)
        batches = unpadded(rows, places)
    if "depth" in parts:
        report = depth.depth(model, batches)
        report["dropped"] = depth.dropped(model, batches)
        report["gradient"] = depth.gradients(model, *batches[0])
        report["copying"] = depth.copying(model, torch.cat([x.flatten() for x, _ in batches]))
        show_depth(report)
        yield "depth", report
    if "mod" in parts:
        ids = data.begun(encoding.encode_ordinary(prompt), encoding)[: rows.T]
        report = depth.skipping(model, batches, ids)
        names = map(encoding.decode_single_token_bytes, ids)
        report["characters"] = [name.decode(errors="replace") for name in names]
        padded = [*data.eval_batches(rows, places, batch_size, device)]
        report["causal loss"] = evaluate(model, padded)
        with mod.switched(model, "look_ahead"):
            report["look-ahead loss"] = evaluate(model, padded)
        show_skipping(report)
        yield "mod", report
    if "tasks" in parts:
        how = dict(task_dir=task_dir, num_fewshot=num_fewshot, limit=limit, seed=seed)
        yield "tasks", run_tasks(model, encoding, batch_size, device, tasks, **how)
    if "sample" in parts:
        model.ends.fold(model)  # cannot be undone: sample is last
        yield "sample", sample(model, encoding, device)


def unpadded(rows, places):
    """Batches (inputs, targets) without the windows that are repeated to fill the last batch."""
    pairs = data.eval_batches(rows, places, batch_size, device)
    return [(x[real], y[real]) for x, y in pairs for real in [(y >= 0).any(1)]]


def dial(model, rows):
    """Skip a share mod_rate of the tokens of a model with routers, else of the units of prune.py,
    chosen on these rows. Returns new parts of eval.json: how many tokens skip depends on the text.
    """
    batches = [x for x, _ in unpadded(rows, data.spread(rows, 32768))]
    if mod.routers(model):
        mod.calibrate(model, batches, model.config.mod_budget == "global", mod_rate)
        return {}
    whole = model.flops_per_token()
    try:
        indices = prune.prune(model, batches, mod_rate, prune_unit, prune_by, seed)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    skipped, left = prune.names(indices, prune_unit), prune.flops_per_token(model) / whole
    print(f"skipped {', '.join(skipped) or 'nothing'}; {left:.1%} of the FLOPs left")
    return {"prune": {"skipped": skipped, "FLOPs left": left}}


ABOVE_0 = "batch_size eval_tokens context depth_tokens top_k limit"
RULES = (
    (ABOVE_0, lambda v: v > 0, "above 0"),
    ("max_new_tokens temperature num_fewshot seed", lambda v: v >= 0, "at least 0"),
    ("seed", lambda v: v < 2**63, "below 2**63"),
    ("mod_rate", lambda v: 0 <= v < 1, "at least 0 and below 1"),
    ("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("val_part", lambda v: v in data.VAL_PARTS, "all, tune or report"),
)


def choose_parts(model, settings, given, has_shards):
    """The parts to evaluate. Unknown parts and settings that nothing uses are errors."""
    if text is not None and "val_part" in given:
        raise SystemExit(f"{val_part=} is for the validation split, not for text={text!r}")
    for key in ("prune_unit", "prune_by"):
        if key in given and (mod_rate is None or mod.routers(model)):
            raise SystemExit(f"{key}={given[key]!r} needs mod_rate, and a model without routers")
    has_text = has_shards or text is not None
    known = ["loss", "depth", *["mod"] * bool(mod.routers(model)), "sample", "tasks"]
    usual = known[:-1] if has_text else ["sample"]
    parts = usual if what is None else what.split(",")
    unknown = set(parts) - set(known)  # mod is for models with routers
    if unknown:
        raise SystemExit(f"what={what!r}: {', '.join(unknown)} is not one of {', '.join(known)}")
    reads = [part for part in parts if part in ("loss", "depth", "mod")]
    if reads and not has_text:
        raise SystemExit(f"{', '.join(reads)}: this model has no shards: give --text or --data_dir")
    used_by = dict.fromkeys(("tasks", "task_dir", "limit", "num_fewshot"), ("tasks",))
    used_by["text"] = ("loss", "depth", "mod")
    for key, users in used_by.items():
        if settings[key] is not None and not set(users) & set(parts):
            raise SystemExit(f"{key}={settings[key]!r} is for {' or '.join(users)}, not {what=}")
    return parts


def open_data(state, model):
    """The windows of the validation split, or None without shards, and the tokenizer."""
    directory, meta = data_dir or state["settings"]["data_dir"], state["meta"]
    has_shards = directory is not None and os.path.exists(os.path.join(directory, "meta.json"))
    if data_dir is None and not has_shards:
        if directory is not None:
            print(f"the shards are no longer in {directory}: if you moved them, give --data_dir")
        if not meta["tokenizer"]:
            raise SystemExit("this model was imported without a tokenizer.json: give --data_dir")
        return None, data.meta_tokenizer(os.path.dirname(state["path"]), meta)
    windows = data.Windows(directory, "val", context or model.config.block_size)
    windows.refuse_other_tokenizer(meta, model.config.vocab_size)
    if data.is_imported(meta):  # with shards too, its texts begin as its own tokenizer says
        return windows, data.meta_tokenizer(os.path.dirname(state["path"]), meta)
    return windows, data.meta_tokenizer(directory, windows.meta)


def main():
    global device
    settings, given = configure(globals(), argv=sys.argv[1:])
    check(settings, RULES)
    device = pick_device(device)
    prepare_process(device)
    pick_dtype(dtype, device.type)  # refuse an unknown dtype before any work
    texts = None if text is None else read_texts(text, text_column, text_split)
    if os.path.isfile(out_dir):
        raise SystemExit(f"{out_dir} is a file: give its folder, and --checkpoint")
    path = out_dir if checkpoint is None else os.path.join(out_dir, checkpoint)
    state, model = load_model(path, device)
    if not all(p.isfinite().all() for p in model.parameters()):
        raise SystemExit(f"{state['path']}: some weights are not finite")
    if context is not None and context > model.config.block_size:
        raise SystemExit(f"context={context}: must be at most block_size={model.config.block_size}")
    windows, encoding = open_data(state, model)
    parts = choose_parts(model, settings, given, windows is not None)
    if {*parts} - {"sample", "tasks"} and depth.leak(model) > 1e-3:
        raise SystemExit("not causal: logits change with later tokens, or are not finite")
    rows, dialled, T = windows, {}, context or model.config.block_size
    if text is not None:
        rows = TextWindows(texts, encoding, T, eval_tokens)
    if mod_rate is not None:
        if windows is None:
            raise SystemExit(f"{mod_rate=} chooses what to skip on training text: give --data_dir")
        dialled = dial(model, data.Windows(windows.directory, "train", T))

    print(f"{state['path']}: {', '.join([*dialled, *parts])}")
    path, name = os.path.join(out_dir, "eval.json"), os.path.relpath(state["path"], out_dir)
    whose = {"checkpoint": name, "step": state["step"], "run_id": state.get("run_id")}
    if os.path.exists(path):
        data.read_json(path)  # a damaged file is an error before any work
    how = settings | {"data": None if windows is None else windows.sha256}
    for part, result in chain(dialled.items(), answers(parts, model, rows, encoding)):
        old = data.read_json(path) if os.path.exists(path) else {}
        report = whose | {"settings": {}} | old  # older code wrote no run_id
        if not report.items() >= whose.items():
            report = whose | {"settings": {}}
        report[part], report["settings"][part] = result, how
        data.write_json(path, report)  # a later part may fail


if __name__ == "__main__":
    main()
