"""
Ask a checkpoint: its loss, what its stream does through depth, the tasks of lm-evaluation-harness, a sample of text.

    python eval.py --out_dir=out --what=loss,depth,sample --prompt='def main():'
    python eval.py --out_dir=out --what=loss --text=book.txt
    python eval.py --out_dir=out --what=tasks --tasks=piqa,boolq --limit=100
"""

import codecs
import copy
import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F

import depth
import lora
import mod
from configurator import configure
from data import Windows, eval_batches, meta_tokenizer, read_documents, spread, to_batch, write_json
from generate import FOLDS, KVCache, stream_tokens
from machine import autocast, can_compile, pick_device, pick_dtype, prepare_process
from model import evaluate

out_dir = "out"  # where the run is; eval.json goes there too
checkpoint: str | None = None  # a file or folder in out_dir, such as ckpt_best.pt; None: the newest
data_dir: str | None = None  # shards with a val split; None: those it was trained on
what: str | None = (
    None  # parts, separated by commas: loss, depth, mod, sample, tasks; None: all but tasks
)
eval_tokens: int | None = None  # tokens for the loss, evenly spaced over the split; None: all
val_part = "all"  # of the validation split: all, or one half of its windows: tune or report
text: str | None = (
    None  # for the loss, in place of val: a text, .jsonl or .parquet file, or a name on the hub
)
text_column = "text"  # of such records
text_split = "test"  # of a name on the hub
depth_tokens = 16384  # validation tokens for depth and mod, evenly spaced over the split
mod_rate: float | None = (
    None  # let this share of the tokens skip, in place of what it was trained with
)
batch_size = 8  # windows at once; that of training finds its compiled blocks again
prompt = "def "  # what the sample begins with, and the text that mod maps
max_new_tokens = 200  # length of the sample
temperature = 0.8  # of the sample; 0: greedy
top_k: int | None = None  # sample from the likeliest so many; None: all
top_p: float | None = None  # sample from the likeliest that hold so much; None: all
seed = 1337  # of the sample
tasks: str | None = (
    None  # the harness's names, separated by commas; None: the eight of the norm papers
)
task_dir: str | None = (
    None  # take tasks from the files here and no others; None: the harness's own, from the hub
)
num_fewshot: int | None = None  # examples before each question; None: as the task has it
limit: int | None = None  # questions of each task; None: all
device = "auto"  # cpu, mps, cuda, cuda:1, ...; auto: CUDA if there is any, then mps, then cpu
dtype = "auto"  # of the loss: float32 or bfloat16 autocast; auto: bfloat16 where the hardware computes in it
compile: bool | None = (
    None  # torch.compile the loss and the sample's steps; None: the loss of much text, if possible
)
loss_chunk: int | None = None  # tokens whose logits are in memory at a time; None: as in training


# ---------------------------------------------------------------------------------------------------------------------
# Loss


class TextWindows:
    """Texts as rows (2, T) of inputs and targets, end-of-text around each, the last row filled up with targets of -1"""

    def __init__(self, texts, encoding, T, tokens=None):
        ids = [encoding.eot_token]
        for one in texts:
            ids += [*encoding.encode_ordinary(one), encoding.eot_token]
            if tokens is not None and len(ids) > tokens:
                break
        self.ids, self.T = ids[: None if tokens is None else tokens + 1], T
        if len(self.ids) < 3:  # end-of-text twice
            raise SystemExit(f"text={text!r}: there is none in it")

    def __len__(self):
        return -(-(len(self.ids) - 1) // self.T)

    def __getitem__(self, i):
        row = self.ids[i * self.T : (i + 1) * self.T + 1]
        x, y = row[:-1], row[1:]
        return np.array([x + [0] * (self.T - len(x)), y + [-1] * (self.T - len(y))])


def read_texts(source, column, split):
    """The texts of a file, whole or in records, or of a column of a data set on the hub"""
    if os.path.exists(source):
        records = source.endswith((".json.gz", ".jsonl", ".jsonl.gz", ".parquet"))
        return (
            read_documents(source, column) if records else [open(source, encoding="utf-8").read()]
        )
    from datasets import load_dataset

    return (record[column] for record in load_dataset(source, split=split, streaming=True))


def loss(model, windows, indices, encoding, batch_size, device):
    """Nats a token, perplexity, and bits a byte of the text that the tokens stand for."""
    size = np.zeros(
        encoding.n_vocab + 1
    )  # bytes of each token; end-of-text and the -1 of padding have none
    for token, i in encoding._mergeable_ranks.items():
        size[i] = len(token)
    tokens, length = 0, 0
    for i in indices:
        targets = to_batch([windows[i]], "cpu")[1].numpy()
        tokens, length = tokens + int((targets >= 0).sum()), length + int(size[targets].sum())
    if compile or (compile is None and tokens > 500_000 and can_compile(device.type)):
        model = copy.deepcopy(model)  # the other parts want the model that is not compiled
        model.compile_blocks()
    with autocast(device.type, pick_dtype(dtype, device.type)):
        nats = evaluate(model, eval_batches(windows, indices, batch_size, device))
    bits = nats * tokens / math.log(2) / max(1, length)
    return {
        "loss": nats,
        "perplexity": math.exp(nats),
        "bits per byte": bits,
        "tokens": tokens,
        "bytes": length,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


def score_choices(model, pairs, batch_size, n_vocab, device):
    """For each (context, continuation), both lists of ids: the log-probability of the continuation, and whether greedy
    decoding would have written it. A context is read once for all its continuations, batches have contexts of one
    length, the longest first."""
    T, shared, results = model.config.block_size, {}, [None] * len(pairs)
    for i, (context, continuation) in enumerate(pairs):
        if not 0 < len(continuation) <= T:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens does not fit into block_size={T}"
            )
        context = tuple(
            context[-(T + 1 - len(continuation)) :]
        )  # cut from the left; the last token is not read
        shared.setdefault(context, []).append(i)
    by_length = {}
    for context in sorted(shared, key=len, reverse=True):
        by_length.setdefault(len(context), []).append(context)
    for contexts in by_length.values():
        for first in range(0, len(contexts), batch_size):
            group = contexts[first : first + batch_size]
            members = [[*shared[context]] for context in group]
            rows = [i for row, ids in enumerate(members) for i in ids]
            owner = torch.tensor(
                [row for row, ids in enumerate(members) for _ in ids], device=device
            )
            for i, result in zip(
                rows, score_group(model, group, owner, [pairs[i][1] for i in rows], n_vocab, device)
            ):
                results[i] = result
    return results


@torch.no_grad()
def score_group(model, contexts, owner, continuations, n_vocab, device):
    """The same for continuations whose contexts, contexts[owner], have one length: (log-probability, greedy) of each"""
    length, longest = len(contexts[0]), max(map(len, continuations))
    y = torch.tensor(
        [c + [0] * (longest - len(c)) for c in continuations], device=device
    )  # (N, longest)
    cache = KVCache(model, len(contexts), length + longest - 1)
    hidden, head = model.hidden(torch.tensor(contexts, device=device), cache=cache)
    hidden = hidden[owner, -1:]  # (N, 1, C)
    if longest > 1:
        cache.kv = [[tensor[owner] for tensor in layer] for layer in cache.kv]
        hidden = torch.cat((hidden, model.hidden(y[:, :-1], cache=cache)[0]), dim=1)
    chunk = model.loss_chunk or 2048  # tokens whose logits are in memory at a time
    parts = zip(hidden.flatten(0, 1).split(chunk), y.flatten().split(chunk))
    scores = [token_scores(h, head, t, n_vocab) for h, t in parts]
    logp, best = (torch.cat(part).view(y.shape) for part in zip(*scores))
    real = torch.arange(longest, device=device) < torch.tensor(
        [[len(c)] for c in continuations], device=device
    )
    return [*zip((logp * real).sum(-1).tolist(), (best | ~real).all(-1).tolist())]


def token_scores(hidden, head, y, n_vocab):
    """The log-probability of each token of y (N,), and whether it is the likeliest, (N,) each."""
    logp = F.linear(hidden, head)[..., :n_vocab].float().log_softmax(-1)
    return logp.gather(-1, y[..., None])[..., 0], logp.argmax(-1) == y


def harness(model, encoding, batch_size, device):
    """The model as lm-evaluation-harness wants to see it"""
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    T, eot = model.config.block_size, encoding.eot_token

    class Checkpoint(TemplateLM):
        eot_token_id = eot  # also what every context begins with, as every document did in training

        def tok_encode(self, string, **kwargs):
            return encoding.encode_ordinary(string)

        def _loglikelihood_tokens(self, requests, **kwargs):
            pairs = []
            for _, context, continuation in requests:
                context = context[1:] if context[:1] == [eot] else context
                pairs.append(
                    ([eot, *context[max(0, len(context) + len(continuation) - T) :]], continuation)
                )
            return score_choices(model, pairs, batch_size, encoding.n_vocab, device)

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for request in requests:
                windows = utils.get_rolling_token_windows(
                    self.tok_encode(request.args[0]), eot, T, 1
                )
                pairs = [utils.make_disjoint_window(window) for window in windows]
                scores = score_choices(model, pairs, batch_size, encoding.n_vocab, device)
                totals.append(sum(total for total, _ in scores))
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            texts = []
            for context, how in (request.args for request in requests):
                how = normalize_gen_kwargs(how)
                until, heat = (
                    handle_stop_sequences(how["until"], None),
                    how["temperature"] if how["do_sample"] else 0.0,
                )
                texts.append(
                    write_until(model, encoding, context, until, how["max_gen_toks"], heat, device)
                )
            return texts

    return Checkpoint()


def write_until(model, encoding, context, until, most, temperature, device):
    """What the model writes behind the context, up to the first of the strings in until"""
    keep, written = max(model.config.block_size // 2, model.config.block_size - most), []
    ids = [encoding.eot_token, *encoding.encode_ordinary(context)[-max(1, keep - 1) :]]
    for token in stream_tokens(
        model, torch.tensor([ids], device=device), most, temperature, n_vocab=encoding.n_vocab
    ):
        written.append(int(token))
        text = encoding.decode(written)
        ends = [text.index(stop) for stop in until if stop and stop in text]
        if ends or written[-1] == encoding.eot_token:
            return text[: min(ends)] if ends else encoding.decode(written[:-1])
    return encoding.decode(written)


def run_tasks(model, encoding, device):
    """{task: its metrics} of lm-evaluation-harness, and the versions that made them"""
    try:
        import datasets
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise SystemExit(f"tasks need lm-evaluation-harness: pip install lm-eval ({error})")
    manager = TaskManager(include_path=task_dir, include_defaults=task_dir is None)
    names = (
        tasks or "arc_easy,arc_challenge,piqa,hellaswag,openbookqa,winogrande,mmlu,boolq"
    ).split(",")
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise SystemExit(
            f"tasks={tasks!r}: {', '.join(unknown)} is not one of {', '.join(sorted(manager.all_tasks))}"
        )
    found = lm_eval.simple_evaluate(
        harness(model, encoding, batch_size, device), tasks=names, num_fewshot=num_fewshot, limit=limit,
        task_manager=manager, bootstrap_iters=100, log_samples=False, random_seed=seed,
    )  # fmt: skip
    report = {
        name: {k: v for k, v in of.items() if isinstance(v, float)}
        for name, of in found["results"].items()
    }
    return report | {"versions": {"lm_eval": lm_eval.__version__, "datasets": datasets.__version__}}


# ---------------------------------------------------------------------------------------------------------------------
# What is printed


def show_loss(report):
    print(f"loss {report['loss']:.4f} nats a token, perplexity {report['perplexity']:.2f}, "
          f"{report['bits per byte']:.4f} bits a byte, over {report['tokens']:,} tokens")  # fmt: skip


TABLES = {  # what has a value behind the embedding and each block, for each block, each sublayer, each attention
    "stream": ("variance", "norm", "magnitude", "max", "max/rms", "kurtosis"),
    "block": ("cosine", "dropped", "gradient", "sink"),
    "sublayer": ("update", "rotation", "from embedding", "alpha", "a"),
}


def show_depth(report):
    for title, names in TABLES.items():
        rows = {name: report[name] for name in names if name in report}
        print(f"{title:<9}" + "".join(f"  {name:>14}" for name in rows))
        for i, values in enumerate(zip(*rows.values())):
            print(f"{i:<9}" + "".join(f"  {v:>14.4g}" for v in values))
    for name in ("norm and entropy", "norm and loss"):
        print(f"correlation of the last {name}: {report[name]}")
    print(f"calibration error {report['calibration error']:.4f}")


def show_skipping(report):
    print(f"skipped {report['rate']:.1%}; loss {report['causal loss']:.4f}, "
          f"{report['look-ahead loss']:.4f} looking ahead")  # fmt: skip
    for where, share, row in zip(report["where"], report["skipped"], report["map"]):
        print(f"{where:<9} {share:>6.1%} " + "".join(".#"[ran] for ran in row[:96]))


def show_tasks(report):
    for name, metrics in report.items():
        print(
            f"{name:<20}"
            + "  ".join(f"{k} {v:.4f}" for k, v in metrics.items() if isinstance(v, float))
        )


def sample(model, encoding, device):
    """Print a continuation of the prompt as it is made. It starts with end-of-text, as every document in training."""
    torch.manual_seed(seed)
    ids, began, times = start_of_text(encoding), time.perf_counter(), []
    made = stream_tokens(
        model, torch.tensor([ids], device=device), max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        stop=encoding.eot_token, n_vocab=encoding.n_vocab, compile=bool(compile),
    )  # fmt: skip
    characters = codecs.getincrementaldecoder("utf-8")(
        "replace"
    )  # a character can be several tokens
    print(prompt, end="", flush=True)
    with mod.switched(model, "collect"):
        for token in made:
            ids.append(int(token))
            times.append(time.perf_counter())
            if ids[-1] == encoding.eot_token:
                break
            print(
                characters.decode(encoding.decode_single_token_bytes(ids[-1])), end="", flush=True
            )
    ran = f", {mod.skipped(mod.routers(model)):.1%} skipped" if mod.routers(model) else ""
    print(f"\n{decoding_speed(began, times)}{ran}")
    return encoding.decode(ids[1:])


def start_of_text(encoding):
    return [encoding.eot_token, *encoding.encode_ordinary(prompt)]


def decoding_speed(began, times):
    """Tokens a second after the second token: the first takes the prompt, the second the compilation of the step."""
    if len(times) < 3:
        return (
            f"{len(times)} tokens in {time.perf_counter() - began:.2f} s, too few to time decoding"
        )
    rate = (len(times) - 2) / (times[-1] - times[1])
    return (
        f"{rate:.0f} tokens/s; {times[1] - began:.2f} s before, for the prompt and the first step"
    )


# ---------------------------------------------------------------------------------------------------------------------


def answers(parts, model, windows, encoding):
    """Answer part by part: print each and yield (its name, its report)."""
    indices = spread(windows, depth_tokens, val_part)
    batches = []
    for x, y in eval_batches(windows, indices, batch_size, device):
        real = y[:, 0] >= 0
        batches.append((x[real], y[real]))
    if "loss" in parts:
        if text is None:
            report = loss(
                model, windows, spread(windows, eval_tokens, val_part), encoding, batch_size, device
            )
        else:
            rows = TextWindows(
                read_texts(text, text_column, text_split), encoding, windows.T, eval_tokens
            )
            report = loss(model, rows, range(len(rows)), encoding, batch_size, device)
        show_loss(report)
        yield "loss", report
    if "depth" in parts:
        report = depth.depth(model, batches)
        report |= {
            "dropped": depth.dropped(model, batches),
            "gradient": depth.gradients(model, *batches[0]),
        }
        show_depth(report)
        yield "depth", report
    if "mod" in parts:
        report = depth.skipping(model, batches, start_of_text(encoding)[: windows.T])
        report["causal loss"] = evaluate(model, eval_batches(windows, indices, batch_size, device))
        with mod.switched(model, "look_ahead"):
            report["look-ahead loss"] = evaluate(
                model, eval_batches(windows, indices, batch_size, device)
            )
        show_skipping(report)
        yield "mod", report
    if "tasks" in parts:
        report = run_tasks(model, encoding, device)
        show_tasks(report)
        yield "tasks", report
    if "sample" in parts:
        if model.config.residual in FOLDS:
            FOLDS[model.config.residual](model)  # last, because it cannot be undone
        yield "sample", sample(model, encoding, device)


def dial(model, directory):
    """Set the routers' thresholds so that a share mod_rate of the tokens skips, on training windows."""
    if not 0 <= mod_rate < 1:
        raise SystemExit(f"mod_rate={mod_rate}: give a share, 0 <= mod_rate < 1")
    if not mod.routers(model):
        raise SystemExit(f"mod_rate={mod_rate}: in {out_dir} no token may skip anything")
    windows = Windows(directory, "train", model.config.block_size)
    batches = [x for x, _ in eval_batches(windows, spread(windows, 32768), batch_size, device)]
    mod.calibrate(model, batches, model.config.mod_budget == "global", mod_rate)


def main():
    global device
    settings, _ = configure(globals(), argv=sys.argv[1:])
    device = pick_device(device)
    prepare_process(device)
    pick_dtype(dtype, device.type)
    state, model = lora.load_model(
        out_dir if checkpoint is None else os.path.join(out_dir, checkpoint), device
    )
    if loss_chunk is not None:
        model.loss_chunk = loss_chunk
    known = ["loss", "depth", "mod", "sample", "tasks"]
    if not mod.routers(model):
        known.remove("mod")
    parts = known[:-1] if what is None else what.split(",")
    unknown = set(parts) - set(known)
    if unknown:
        raise SystemExit(f"what={what!r}: {', '.join(unknown)} is not one of {', '.join(known)}")
    for key, part in (
        ("text", "loss"),
        ("tasks", "tasks"),
        ("task_dir", "tasks"),
        ("limit", "tasks"),
    ):
        if settings[key] is not None and part not in parts:
            raise SystemExit(
                f"{key}={settings[key]!r} is for {part}, which what={what!r} does not ask for"
            )
    directory = data_dir or state["settings"]["data_dir"]
    windows = Windows(directory, "val", model.config.block_size)
    if windows.meta["tokenizer_sha256"] != state["meta"]["tokenizer_sha256"]:
        raise SystemExit("the data's tokenizer is not the one that the checkpoint was trained with")
    if mod_rate is not None:
        dial(model, directory)
    name = os.path.basename(state["path"])
    path, report = os.path.join(out_dir, "eval.json"), {"checkpoint": name, "step": state["step"]}
    if os.path.exists(path):  # keep the parts that were asked of the same checkpoint before
        old = json.load(open(path))
        report = old if old.items() >= report.items() else report
    report["settings"] = report.get("settings", {}) | dict.fromkeys(parts, settings)
    report["data"] = windows.sha256
    report |= dict(answers(parts, model, windows, meta_tokenizer(directory, windows.meta)))
    write_json(path, report)


if __name__ == "__main__":
    main()
