"""
Ask a checkpoint: its loss, what its stream does through depth, and a sample of text.

    python eval.py --out_dir=out --what=loss,depth,sample --prompt='def main():'
"""

import codecs
import json
import os
import sys

import torch
import torch.nn.functional as F

from configurator import configure
from model import GPT, GPTConfig
from norms import wide
from prepare_c4 import Windows, meta_tokenizer, to_batch, write_json

out_dir = "out"  # where the run is; eval.json goes there too
checkpoint = "ckpt.pt"  # which of its checkpoints: ckpt.pt, ckpt_best.pt or one that was kept
data_dir: str | None = None  # shards with a val split; None: those it was trained on
what = "loss,depth,sample"  # which parts, separated by commas
eval_tokens: int | None = None  # validation tokens for the loss; None: all
depth_tokens = 16384  # validation tokens for depth
batch_size = 16  # windows at once
prompt = "def "  # what the sample begins with
max_new_tokens = 200  # length of the sample
temperature = 0.8  # of the sample; 0: greedy
top_k: int | None = None  # sample from the likeliest so many; None: all
top_p: float | None = None  # sample from the likeliest that hold so much; None: all
seed = 1337  # of the sample
device = "cpu"  # cpu, cuda, cuda:1, ...


def load(path, device="cpu"):
    """A checkpoint of train.py and the model in it"""
    if not os.path.exists(path):
        raise SystemExit(f"{path}: no such checkpoint")
    state = torch.load(path, map_location="cpu", weights_only=True)
    model = GPT(GPTConfig(**state["config"])).to(device)
    model.load_state_dict(state["model"])
    return state, model.eval()


def eval_batches(windows, count, batch_size, device, rank=0, world=1):
    """Inputs and targets of this rank's share of the first count windows, padded to batch_size with targets of -1, so
    that every rank has as many batches and no shape ever changes"""
    for first in range(0, count, batch_size * world):
        mine = range(first + rank, first + batch_size * world, world)
        x, y = (t.to(device) for t in to_batch([windows[i % count] for i in mine], device))
        y[[i >= count for i in mine]] = -1
        yield x, y


def count_windows(windows, tokens):
    """How many whole windows there are in so many tokens, at least one; all of them for None"""
    return len(windows) if tokens is None else min(len(windows), max(1, tokens // windows.T))


@torch.no_grad()
def evaluate(model, windows, tokens, batch_size, device, rank=0, world=1):
    """Mean loss over the first `tokens` tokens of a split (all, if None), in whole windows: the same ones every time,
    and the same number whatever the batch size and the number of ranks."""
    total, training = torch.zeros(2, dtype=torch.float64, device=device), model.training
    model.eval()
    for x, y in eval_batches(windows, count_windows(windows, tokens), batch_size, device, rank, world):
        logits = model(x)[0].float()
        total[0] += F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1, reduction="sum")
        total[1] += (y >= 0).sum()
    model.train(training)
    if world > 1:
        torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def depth(model, windows, tokens, batch_size, device):
    """The stream behind the embedding and behind every block: variance and rms over the features, largest entry"""
    seen = []
    hooks = [block.register_forward_pre_hook(lambda m, args: seen.append(args[0].x)) for block in model.blocks[:1]]
    hooks += [block.register_forward_hook(lambda m, args, out: seen.append(out.x)) for block in model.blocks]
    total, n = torch.zeros(len(model.blocks) + 1, 3, device=device), 0
    for x, y in eval_batches(windows, count_windows(windows, tokens), batch_size, device):
        seen.clear()
        model(x[y[:, 0] >= 0])
        for i, s in enumerate(map(wide, seen)):
            total[i] += torch.stack([s.var(-1).mean(), s.square().mean(), s.abs().amax(-1).mean()]) * len(s)
        n += len(seen[0])
    for hook in hooks:
        hook.remove()
    variance, square, largest = (total / n).T
    return {"variance": variance.tolist(), "rms": square.sqrt().tolist(), "max": largest.tolist()}


def sample(model, encoding, device):
    """Print a continuation of the prompt as it is made."""
    torch.manual_seed(seed)
    ids = encoding.encode_ordinary(prompt) or [encoding.eot_token]
    made = model.stream_tokens(
        torch.tensor([ids], device=device), max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        stop=encoding.eot_token, n_vocab=encoding.n_vocab,
    )  # fmt: skip
    characters = codecs.getincrementaldecoder("utf-8")("replace")  # a character can be several tokens
    print(prompt, end="", flush=True)
    for token in made:
        ids.append(int(token))
        print(characters.decode(encoding.decode_single_token_bytes(ids[-1])), end="", flush=True)
    print()
    return encoding.decode(ids)


def table(rows):
    names = list(rows)
    print("layer  " + "  ".join(f"{name:>10}" for name in names))
    for i, values in enumerate(zip(*rows.values())):
        print(f"{i:>5}  " + "  ".join(f"{v:>10.4g}" for v in values))


def main():
    settings = configure(globals(), argv=sys.argv[1:])
    parts = what.split(",")
    unknown = set(parts) - {"loss", "depth", "sample"}
    if unknown:
        raise SystemExit(f"what={what!r}: {', '.join(unknown)} is not one of loss, depth, sample")
    state, model = load(os.path.join(out_dir, checkpoint), device)
    windows = Windows(data_dir or state["settings"]["data_dir"], "val", model.config.block_size)
    if windows.meta["tokenizer_sha256"] != state["meta"]["tokenizer_sha256"]:
        raise SystemExit("the data's tokenizer is not the one that the checkpoint was trained with")
    path, report = os.path.join(out_dir, "eval.json"), {"checkpoint": checkpoint, "step": state["step"]}
    if os.path.exists(path):  # parts that were asked of the same checkpoint before stay
        old = json.load(open(path))
        report = old if old.items() >= report.items() else report
    report["settings"] = report.get("settings", {}) | dict.fromkeys(parts, settings)
    if "loss" in parts:
        report["loss"] = evaluate(model, windows, eval_tokens, batch_size, device)
        print(f"loss {report['loss']:.4f} nats a token")
    if "depth" in parts:
        report["depth"] = depth(model, windows, depth_tokens, batch_size, device)
        table(report["depth"])
    if "sample" in parts:
        directory = data_dir or state["settings"]["data_dir"]
        report["sample"] = sample(model, meta_tokenizer(directory, windows.meta), device)
    write_json(path, report)


if __name__ == "__main__":
    main()
