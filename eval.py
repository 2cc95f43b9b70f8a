"""
Evaluate a checkpoint: loss, measurements by depth, skipped tokens, benchmark tasks, a text sample.

    python eval.py --out_dir=out --what=loss,depth,sample --prompt='def main():'
    python eval.py --out_dir=out --what=loss --text=book.txt
    python eval.py --out_dir=out --what=tasks --tasks=piqa,boolq --limit=100

It prints each part and writes the numbers to eval.json in out_dir.
"""

import codecs
import copy
import json
import math
import os
import sys
import time
from itertools import groupby

import numpy as np
import torch

import depth
import mod
import prune
from checkpoint import load_model
from configurator import configure
from data import (
    Windows,
    eval_batches,
    is_imported,
    meta_tokenizer,
    read_documents,
    spread,
    start_of_text,
    to_batch,
    token_bytes,
    write_json,
)
from generate import FOLDS, KVCache, stream_tokens
from machine import autocast, can_compile, pick_device, pick_dtype, prepare_process
from model import evaluate

out_dir = "out"  # folder of the run; eval.json goes there too
checkpoint: str | None = None  # file in out_dir, such as ckpt_best.pt; None: the newest
data_dir: str | None = None  # folder with the shards; None: the one that the run was trained on
what: str | None = None  # parts: loss,depth,mod,sample,tasks; None: all that apply except tasks
eval_tokens: int | None = None  # tokens for loss: evenly spaced, or the first of --text; None: all
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
loss_chunk: int | None = None  # tokens whose logits are in memory at a time; None: as in training


# ------------------------------------------------------------------------------------------------
# Loss


class TextWindows:
    """Texts as rows (2, T) of inputs and targets.

    End-of-text precedes the first text and follows each text. The last row is padded with targets
    of -1, which the loss ignores. tokens limits their number. An imported model's texts begin as
    its tokenizer says; those ids are not targets.
    """

    def __init__(self, texts, encoding, T, tokens=None):
        eot, start = encoding.eot_token, start_of_text(encoding)
        ids, empty = [], True
        for one in texts:
            body = encoding.encode_ordinary(one)
            begin = start if start != [eot] or not ids else []  # end-of-text is there already
            ids += [(i, -1) for i in begin] + [(i, i) for i in (*body, eot)]
            empty &= not body
            if tokens is not None and len(ids) > tokens:
                break
        ids = ids[: None if tokens is None else tokens + 1]
        self.x, self.y = [i for i, _ in ids[:-1]], [target for _, target in ids[1:]]
        if empty:
            raise SystemExit(f"text={text!r}: the text is empty")
        self.T = min(T, len(self.x))

    def __len__(self):
        return math.ceil(len(self.x) / self.T)

    def __getitem__(self, i):
        part = slice(i * self.T, (i + 1) * self.T)
        x, y = self.x[part], self.y[part]
        padding = self.T - len(x)
        return np.array([x + [0] * padding, y + [-1] * padding])


def read_texts(source, column, split):
    """The texts of a file, or of one column of a data set on the hub."""
    if os.path.exists(source):
        if source.endswith((".json.gz", ".jsonl", ".jsonl.gz", ".parquet")):
            return read_documents(source, column)
        return [open(source, encoding="utf-8").read()]
    from datasets import load_dataset

    return (record[column] for record in load_dataset(source, split=split, streaming=True))


def loss(model, windows, indices, encoding, batch_size, device):
    """Loss in nats per token, perplexity, and bits per byte of the text."""
    lengths = token_bytes(encoding)
    tokens, text_bytes = 0, 0
    for i in indices:
        targets = to_batch([windows[i]], "cpu")[1].numpy()
        tokens += int((targets >= 0).sum())
        text_bytes += int(lengths[targets].sum())

    if compile or (compile is None and tokens > 500_000 and can_compile(device.type)):
        model = copy.deepcopy(model)  # the other parts need the uncompiled model
        model.compile_blocks()
    with autocast(device.type, pick_dtype(dtype, device.type)):
        nats = evaluate(model, eval_batches(windows, indices, batch_size, device))
    return {
        "loss": nats,
        "perplexity": math.exp(nats),
        "bits per byte": nats * tokens / math.log(2) / max(1, text_bytes),
        "tokens": tokens,
        "bytes": text_bytes,
    }


# ------------------------------------------------------------------------------------------------
# Tasks


def score_choices(model, pairs, batch_size, n_vocab, device):
    """Score continuations: a list of (log-probability, whether greedy decoding gives it).

    pairs are (context, continuation), two lists of token ids. Continuations of the same context
    share one forward of it. A batch has contexts of equal length, and the longest come first.
    """
    T = model.config.block_size
    by_context = {}  # {context: indices of its pairs}
    for i, (context, continuation) in enumerate(pairs):
        n = len(continuation)
        if not 0 < n <= T:
            raise ValueError(f"a continuation of {n} tokens does not fit into block_size={T}")
        # Cut the context from the left. The model does not read the last token of a continuation.
        by_context.setdefault(tuple(context[-(T + 1 - n) :]), []).append(i)

    results = [None] * len(pairs)
    for _, group in groupby(sorted(by_context, key=len, reverse=True), key=len):
        contexts = [*group]
        for first in range(0, len(contexts), batch_size):
            batch = contexts[first : first + batch_size]
            members = [(row, i) for row, context in enumerate(batch) for i in by_context[context]]
            owner = torch.tensor([row for row, _ in members], device=device)
            continuations = [pairs[i][1] for _, i in members]
            scores = score_group(model, batch, owner, continuations, n_vocab, device)
            for (_, i), score in zip(members, scores):
                results[i] = score
    return results


@torch.no_grad()
def score_group(model, contexts, owner, continuations, n_vocab, device):
    """Score continuations whose contexts have equal length.

    Continuation i follows contexts[owner[i]]. Returns (log-probability, greedy) for each.
    """
    longest = max(map(len, continuations))
    padded = [ids + [0] * (longest - len(ids)) for ids in continuations]
    y = torch.tensor(padded, device=device)  # (N, longest)
    cache = KVCache(model, len(contexts), len(contexts[0]) + longest - 1)
    hidden, head = model.hidden(torch.tensor(contexts, device=device), cache=cache)
    hidden = hidden[owner, -1:]  # (N, 1, C)
    if longest > 1:
        cache.kv = [[tensor[owner] for tensor in layer] for layer in cache.kv]
        cache.ids = cache.ids[owner]
        hidden = torch.cat((hidden, model.hidden(y[:, :-1], cache=cache)[0]), dim=1)

    chunk = model.loss_chunk or 2048  # tokens whose logits are in memory at a time
    parts = zip(hidden.flatten(0, 1).split(chunk), y.flatten().split(chunk))
    scores = [token_scores(model.logits(h, head), targets, n_vocab) for h, targets in parts]
    logp, greedy = (torch.cat(part).view(y.shape) for part in zip(*scores))
    lengths = torch.tensor([[len(ids)] for ids in continuations], device=device)
    real = torch.arange(longest, device=device) < lengths  # (N, longest), False for padding
    return [*zip((logp * real).sum(-1).tolist(), (greedy | ~real).all(-1).tolist())]


def token_scores(logits, y, n_vocab):
    """Log-probability of each token of y, and whether it is the most likely one, (N,) each."""
    logp = logits[..., :n_vocab].float().log_softmax(-1)
    return logp.gather(-1, y[..., None])[..., 0], logp.argmax(-1) == y


def harness(model, encoding, batch_size, device):
    """Wrap the model in the interface of lm-evaluation-harness."""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    T, eot, start = model.config.block_size, encoding.eot_token, start_of_text(encoding)
    first, own, n_vocab = eot, [], encoding.n_vocab
    if getattr(encoding, "imported", False):  # all as in the harness's own class `hf`
        first = eot if encoding.bos_token is None else encoding.bos_token
        own, n_vocab = start, model.config.vocab_size

    class Checkpoint(TemplateLM):
        eot_token_id, prefix_token_id = eot, first

        def tok_encode(self, string, **kwargs):
            return encoding.encode_ordinary(string)

        def _loglikelihood_tokens(self, requests, **kwargs):
            pairs = []
            for _, context, continuation in requests:
                context = context[1:] if start and context == [first] else context
                cut = max(0, len(start) + len(context) + len(continuation) - 1 - T)
                pairs.append(([*start, *context[cut:]], continuation))
            return score_choices(model, pairs, batch_size, n_vocab, device)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for request in requests:
                ids = [*own, *self.tok_encode(request.args[0])]
                windows = utils.get_rolling_token_windows(ids, first, T, 1)
                pairs = [utils.make_disjoint_window(window) for window in windows]
                scores = score_choices(model, pairs, batch_size, n_vocab, device)
                totals.append(sum(total for total, _ in scores))
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            texts = []
            for context, options in (request.args for request in requests):
                options = normalize_gen_kwargs(options)
                stops = handle_stop_sequences(options["until"], None)
                heat = options["temperature"] if options["do_sample"] else 0.0
                limits = (stops, options["max_gen_toks"], heat)
                texts.append(write_until(model, encoding, context, *limits, device))
            return texts

    return Checkpoint()


def write_until(model, encoding, context, stops, max_new, temperature, device):
    """Continue the context up to the first of the strings in stops, or up to end-of-text.

    The context is cut from the left, to at least half a window.
    """
    size = model.config.block_size
    keep = max(size // 2, size - max_new)
    ids = [*start_of_text(encoding), *encoding.encode_ordinary(context)[-max(1, keep - 1) :]]
    start, written = torch.tensor([ids], device=device), []
    for token in stream_tokens(model, start, max_new, temperature, n_vocab=encoding.n_vocab):
        written.append(int(token))
        text = encoding.decode(written)
        ends = [text.index(stop) for stop in stops if stop and stop in text]
        if ends or written[-1] == encoding.eot_token:
            return text[: min(ends)] if ends else encoding.decode(written[:-1])
    return encoding.decode(written)


def run_tasks(model, encoding, device):
    """Run lm-evaluation-harness: {task: {metric: value}}, and the versions of the packages."""
    try:
        import datasets
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        message = f"tasks need lm-evaluation-harness: pip install lm-eval ({error})"
        raise SystemExit(message) from error
    manager = TaskManager(include_path=task_dir, include_defaults=task_dir is None)
    common = "arc_easy,arc_challenge,piqa,hellaswag,openbookqa,winogrande,mmlu,boolq"
    names = (tasks or common).split(",")
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        known = ", ".join(sorted(manager.all_tasks))
        raise SystemExit(f"tasks={tasks!r}: {', '.join(unknown)} is not one of {known}")
    chosen = dict(tasks=names, num_fewshot=num_fewshot, limit=limit, random_seed=seed)
    lm = harness(model, encoding, batch_size, device)
    found = lm_eval.simple_evaluate(
        lm, task_manager=manager, bootstrap_iters=100, log_samples=False, **chosen
    )
    report = {
        name: {key: value for key, value in metrics.items() if isinstance(value, float)}
        for name, metrics in found["results"].items()
    }
    show_tasks(report)
    return report | {"versions": {"lm_eval": lm_eval.__version__, "datasets": datasets.__version__}}


# ------------------------------------------------------------------------------------------------
# Printing


def show_loss(report):
    print(
        f"loss {report['loss']:.4f} nats per token, perplexity {report['perplexity']:.2f}, "
        f"{report['bits per byte']:.4f} bits per byte, over {report['tokens']:,} tokens"
    )


TABLES = {
    "stream": ("variance", "norm", "magnitude", "max", "max/rms", "kurtosis"),
    "block": ("cosine", "dropped", "gradient", "sink"),
    "sublayer": ("update", "rotation", "from embedding", "alpha", "a", "mixing entropy"),
}


def show_depth(report):
    """Print three tables. In the stream's table, row 0 is the embedding and the blocks follow."""
    for title, names in TABLES.items():
        rows = {name: report[name] for name in names if name in report}
        print(f"{title:<9}" + "".join(f"  {name:>14}" for name in rows))
        for i, values in enumerate(zip(*rows.values())):
            print(f"{i:<9}" + "".join(f"  {v:>14.4g}" for v in values))
    for name in ("norm and entropy", "norm and loss"):
        print(f"correlation of the last {name}: {report[name]}")
    print(f"calibration error {report['calibration error']:.4f}")


def show_skipping(report):
    print(
        f"skipped {report['rate']:.1%}; loss {report['causal loss']:.4f}, "
        f"{report['look-ahead loss']:.4f} looking ahead"
    )
    for where, share, row in zip(report["where"], report["skipped"], report["map"]):
        print(f"{where:<9} {share:>6.1%} " + "".join(".#"[ran] for ran in row[:96]))


def show_pruning(report):
    units = ", ".join(report["skipped"]) or "nothing"
    print(f"skipped {units}; {report['FLOPs left']:.1%} of the FLOPs left")


def show_tasks(report):
    for name, metrics in report.items():
        values = [f"{key} {value:.4f}" for key, value in metrics.items()]
        print(f"{name:<20}" + "  ".join(values))


def sample(model, encoding, device):
    """Print and return a continuation of the prompt."""
    torch.manual_seed(seed)
    began, times = time.perf_counter(), []
    ids = begun_prompt(encoding)
    start = torch.tensor([ids], device=device)
    choices = dict(temperature=temperature, top_k=top_k, top_p=top_p, compile=bool(compile))
    eot, n_vocab = encoding.eot_token, encoding.n_vocab
    tokens = stream_tokens(model, start, max_new_tokens, stop=eot, n_vocab=n_vocab, **choices)
    # One character can take several tokens, so an incremental decoder collects the bytes.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(prompt, end="", flush=True)
    with mod.switched(model, "collect"):
        for token in tokens:
            ids.append(int(token))
            times.append(time.perf_counter())
            if ids[-1] == eot:
                break
            new_bytes = encoding.decode_single_token_bytes(ids[-1])
            print(decoder.decode(new_bytes), end="", flush=True)
    skipped = f", {mod.skipped(mod.routers(model)):.1%} skipped" if mod.routers(model) else ""
    print(f"\n{decoding_speed(began, times)}{skipped}")
    return encoding.decode(ids[len(start_of_text(encoding)) :])


def begun_prompt(encoding):
    """Token ids of the prompt, after those that begin a text."""
    ids = [*start_of_text(encoding), *encoding.encode_ordinary(prompt)]
    return ids or [encoding.eot_token]


def decoding_speed(began, times):
    """Tokens per second of decoding alone: after the second token.

    The first token's time is that of the prompt, the second's includes compilation of the step.
    """
    if len(times) < 3:
        elapsed = time.perf_counter() - began
        return f"{len(times)} tokens in {elapsed:.2f} s, too few to time decoding"
    rate = (len(times) - 2) / (times[-1] - times[1])
    prompt_time, first_step = times[0] - began, times[1] - times[0]
    before = f"the prompt took {prompt_time:.2f} s, the first step {first_step:.2f} s"
    return f"decoding: {rate:.0f} tokens/s; before it, {before}"


# ------------------------------------------------------------------------------------------------
# All parts


def answers(parts, model, windows, encoding):
    """Evaluate and print each part, and yield (part, report). windows: the split, or None."""
    rows, reads = windows, set(parts) & {"depth", "mod"}
    if text is not None:
        T = context or model.config.block_size
        rows = TextWindows(read_texts(text, text_column, text_split), encoding, T, eval_tokens)
    if "loss" in parts:
        places = range(len(rows)) if text is not None else spread(rows, eval_tokens, val_part)
        report = loss(model, rows, places, encoding, batch_size, device)
        show_loss(report)
        yield "loss", report
    if reads:
        rows = whole_rows(rows)
        places = spread(rows, depth_tokens, val_part if text is None else "all")
        batches = unpadded(rows, places)
    if "depth" in parts:
        report = depth.depth(model, batches)
        report["dropped"] = depth.dropped(model, batches)
        report["gradient"] = depth.gradients(model, *batches[0])
        show_depth(report)
        yield "depth", report
    if "mod" in parts:
        report = depth.skipping(model, batches, begun_prompt(encoding)[: rows.T])
        padded = [*eval_batches(rows, places, batch_size, device)]
        report["causal loss"] = evaluate(model, padded)
        with mod.switched(model, "look_ahead"):
            report["look-ahead loss"] = evaluate(model, padded)
        show_skipping(report)
        yield "mod", report
    if "tasks" in parts:
        yield "tasks", run_tasks(model, encoding, device)
    if "sample" in parts:
        if model.config.residual in FOLDS:
            FOLDS[model.config.residual](model)  # cannot be undone: sample is last
        yield "sample", sample(model, encoding, device)


def whole_rows(rows):
    """rows without the last one of a text, if it is padded."""
    if not isinstance(rows, TextWindows):
        return rows
    rows, end = copy.copy(rows), len(rows.x) // rows.T * rows.T
    rows.x, rows.y = rows.x[:end], rows.y[:end]
    return rows


def unpadded(rows, places):
    """Batches (inputs, targets) without the windows that are repeated to fill the last batch."""
    pairs = eval_batches(rows, places, batch_size, device)
    return [(x[real], y[real]) for x, y in pairs for real in [(y >= 0).any(1)]]


def dial(model, directory, encoding):
    """Skip a share mod_rate of the tokens, or of the units in a model without routers.

    Training windows set the thresholds or score the units; without shards, the text does. Returns
    new parts of eval.json.
    """
    if not 0 <= mod_rate < 1:
        raise SystemExit(f"mod_rate={mod_rate}: must be at least 0 and below 1")
    T = context or model.config.block_size
    if directory is not None:
        windows = Windows(directory, "train", T)
    elif text is not None:
        windows = TextWindows(read_texts(text, text_column, text_split), encoding, T, 32768)
    else:
        raise SystemExit(f"mod_rate={mod_rate} needs text: give --text or --data_dir")
    windows = whole_rows(windows)
    batches = [x for x, _ in unpadded(windows, spread(windows, 32768))]
    if mod.routers(model):
        mod.calibrate(model, batches, model.config.mod_budget == "global", mod_rate)
        return {}
    report = pruned(model, batches)
    show_pruning(report)
    return {"prune": report}


def pruned(model, batches):
    """Skip whole sublayers or blocks. Returns their names and the share of FLOPs that is left."""
    whole = model.flops_per_token()
    try:
        units = prune.prune(model, batches, mod_rate, prune_unit, prune_by, seed)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    left = model.flops_per_token() / whole
    return {"skipped": prune.names(units, prune_unit), "FLOPs left": left}


def refuse_unused(model, given):
    """Settings of prune.py are errors where prune.py does not run."""
    for key in ("prune_unit", "prune_by"):
        if key in given and (mod_rate is None or mod.routers(model)):
            raise SystemExit(f"{key}={given[key]!r} needs mod_rate, and a model without routers")


def choose_parts(model, settings, has_shards):
    """The parts to evaluate. Unknown parts and settings of parts that do not run are errors."""
    known, has_text = ["loss", "depth", "mod", "sample", "tasks"], has_shards or text is not None
    if not mod.routers(model):
        known.remove("mod")
    parts = known[:-1] if what is None else what.split(",")
    unknown = set(parts) - set(known)
    if unknown:
        raise SystemExit(f"what={what!r}: {', '.join(unknown)} is not one of {', '.join(known)}")
    reads = [part for part in parts if part in ("loss", "depth", "mod")]
    if not has_text and what is None:
        parts = ["sample"]
    elif not has_text and reads:
        raise SystemExit(f"{', '.join(reads)}: this model has no shards: give --text or --data_dir")
    used_by = dict.fromkeys(("tasks", "task_dir", "limit", "num_fewshot"), ("tasks",))
    if mod_rate is None or has_shards:  # else dial reads the text
        used_by["text"] = ("loss", "depth", "mod")
    for key, users in used_by.items():
        if settings[key] is not None and not set(users) & set(parts):
            asked = f"which what={what!r} does not include"
            raise SystemExit(f"{key}={settings[key]!r} is for {' or '.join(users)}, {asked}")
    return parts


def open_data(state, model):
    """The windows of the validation split, or None without shards, and the tokenizer."""
    directory, meta = data_dir or state["settings"]["data_dir"], state["meta"]
    if directory is None:
        if not meta["tokenizer"]:
            raise SystemExit("this model was imported without a tokenizer.json: give --data_dir")
        return None, meta_tokenizer(os.path.dirname(state["path"]), meta)
    windows = Windows(directory, "val", context or model.config.block_size)
    if meta["tokenizer_sha256"] not in (None, windows.meta["tokenizer_sha256"]):
        raise SystemExit("the data's tokenizer is not the one that the checkpoint was trained with")
    if windows.meta["vocab_size"] > model.config.vocab_size:
        raise SystemExit(f"{directory} has more token ids than the model")
    if is_imported(meta):  # with shards too, its texts begin as its own tokenizer says
        return windows, meta_tokenizer(os.path.dirname(state["path"]), meta)
    return windows, meta_tokenizer(directory, windows.meta)


def main():
    global device
    settings, given = configure(globals(), argv=sys.argv[1:])
    device = pick_device(device)
    prepare_process(device)
    pick_dtype(dtype, device.type)  # refuse an unknown dtype before any work
    path = out_dir if checkpoint is None else os.path.join(out_dir, checkpoint)
    state, model = load_model(path, device)
    if not all(p.isfinite().all() for p in model.parameters()):
        raise SystemExit(f"{state['path']}: some weights are not finite")
    if loss_chunk is not None:
        model.loss_chunk = loss_chunk
    windows, encoding = open_data(state, model)
    parts = choose_parts(model, settings, windows is not None)
    refuse_unused(model, given)
    if {*parts} - {"sample", "tasks"} and depth.leak(model) > 1e-3:
        raise SystemExit("not causal: logits change with later tokens, so no loss means anything")
    if context is not None and context > model.config.block_size:
        raise SystemExit(f"context={context}: must be at most block_size={model.config.block_size}")
    directory = data_dir or state["settings"]["data_dir"]
    dialled = {} if mod_rate is None else dial(model, directory, encoding)

    path = os.path.join(out_dir, "eval.json")
    report = {"checkpoint": os.path.basename(state["path"]), "step": state["step"]}
    if os.path.exists(path):  # keep earlier parts if they belong to the same checkpoint
        old = json.load(open(path))
        report = old if old.items() >= report.items() else report
    report["settings"] = report.get("settings", {}) | dict.fromkeys([*parts, *dialled], settings)
    report["data"] = None if windows is None else windows.sha256
    report |= dialled
    for part, result in answers(parts, model, windows, encoding):
        report[part] = result
        write_json(path, report)  # a later part may fail


if __name__ == "__main__":
    main()
