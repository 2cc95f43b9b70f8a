"""
Why deep networks need a careful start, a norm, a skip: stacks of plain layers that guess a byte from the 8 before it.

    python runs/classroom.py                          the cases A, B, C and the deep one, trained; 2 minutes on 2 cores
    python runs/classroom.py --what=walk --init=xavier --activation=relu --norm=none --skip=False
    python runs/classroom.py --what=transformer       one block of a character transformer, with its skip and without

A layer is x <- act(W x), with a norm x <- act(W Norm(x)), with the skip x <- x + act(W Norm(x)).
"""

import json
import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure  # noqa: E402
from data import Windows  # noqa: E402
from model import ACTIVATIONS, GPT, INITS, GPTConfig  # noqa: E402
from norms import NORMS, pick  # noqa: E402

what = "cases"  # cases, walk or transformer
cases = "A,B,C,deep"  # cases: which of CASES
data_dir = "data/python"  # shards of bytes
out = "results/classroom"  # where the losses go
steps = 1000  # of training
batch_size = 256  # places in the text a step; the transformer's, of 64 bytes, are an eighth of it
n_layer = 24  # walk: layers
width = 256  # of a layer
init = "kaiming"  # walk: normal, kaiming, xavier or uniform
init_scale = 0.02  # walk: std of normal, half the width of uniform
activation = "gelu"  # walk: gelu, relu or silu
norm = "rms"  # walk: rms, layer or none
skip = True  # walk: x + ... in place of x
seed = 1  # of the start and of the data
settings, _ = configure(globals(), argv=sys.argv[1:])

CASES = {  # (n_layer, init, init_scale, activation, norm, skip), the learning rate, and what ought to come of it
    "A": ((12, "kaiming", 0.0, "relu", "none", False), 1e-3, "plateau"),
    "B": ((12, "uniform", 0.5, "relu", "none", False), 1e-3, "explosion"),
    "C": ((30, "kaiming", 0.0, "gelu", "rms", True), 3e-4, "smooth"),
    "deep": ((24, "kaiming", 0.0, "gelu", "rms", True), 1e-3, "smooth"),
}


class Stack(nn.Module):
    def __init__(self, n_layer, init, init_scale, activation, norm, skip):
        super().__init__()
        self.act, gated, gain = pick(ACTIVATIONS, activation, "activation")
        if gated:
            raise SystemExit(
                f"activation={activation!r} gates a second projection, which these layers have not"
            )
        self.embed, self.inward, self.head = (
            nn.Embedding(257, 32),
            nn.Linear(256, width),
            nn.Linear(width, 257),
        )
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n_layer))
        self.norms, self.skip = (
            nn.ModuleList(pick(NORMS, norm, "norm")(width, 1e-6) for _ in range(n_layer + 1)),
            skip,
        )
        for linear in self.linears:
            pick(INITS, init, "init")(linear.weight, init_scale, gain)
        for module in self.norms if norm != "none" else ():
            module.reset_parameters()

    def forward(self, idx, seen=None):
        x = self.inward(self.embed(idx).flatten(1))  # (B, width) from (B, 8)
        for norm, linear in zip(self.norms, self.linears):
            f = self.act(linear(norm(x)))
            x = x + f if self.skip else f
            if seen is not None:
                x.retain_grad()
                seen.append(x)
        return self.head(self.norms[-1](x))


def batches(context, size):
    """Endless (inputs, next bytes) from places drawn at random"""
    tokens, rng = Windows(data_dir, "train", context).shards[0], np.random.default_rng(seed)
    while True:
        rows = tokens[
            rng.integers(0, len(tokens) - context, size)[:, None] + np.arange(context + 1)
        ]
        rows = torch.from_numpy(rows.astype(np.int64))
        yield rows[:, :-1], rows[:, 1:]


def train(model, loss_of, data, learning_rate):
    """Losses of all steps, AdamW without warm-up, to the last or the first not finite; the mean of 20 at the end"""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=learning_rate), []
    while len(losses) < steps and (not losses or math.isfinite(losses[-1])):
        optimizer.zero_grad()
        (loss := loss_of(*next(data))).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(losses[-20:]) / len(losses[-20:])


def verdict(losses):
    """explosion: not finite, or 50 steps without one better than chance; plateau: the second half brought next to
    nothing; spiky: a tenth of the steps was worse than the one before; else smooth"""
    if len(losses) < steps or not min(losses[:50]) < math.log(257):
        return "explosion"
    tenths = [np.mean(part) for part in np.array_split(losses, 10)]
    if tenths[5] - tenths[9] < 0.1:
        return "plateau"
    return (
        "smooth"
        if max(after - before for before, after in zip(tenths, tenths[1:])) < 0.1
        else "spiky"
    )


def run_cases():
    print("| case | first loss | last | steps | came out | ought to |\n|---|---|---|---|---|---|")
    for name in cases.split(","):
        how, rate, expected = pick(CASES, name, "cases")
        torch.manual_seed(seed)
        model = Stack(*how)
        losses, last = train(
            model, lambda x, y: F.cross_entropy(model(x), y[:, -1]), batches(8, batch_size), rate
        )
        save(name, losses, {"last": last, "verdict": verdict(losses), "expected": expected})
        print(
            f"| {name} | {losses[0]:.3f} | {last:.3f} | {len(losses)} | {verdict(losses)} | {expected} |"
        )


def walk():
    """Variance of what each layer gives, and of the gradient that it gets, before any training"""
    torch.manual_seed(seed)
    model, seen = Stack(n_layer, init, init_scale, activation, norm, skip), []
    x, y = next(batches(8, batch_size))
    F.cross_entropy(model(x, seen), y[:, -1]).backward()
    print("| layer | variance | of its gradient |\n|---|---|---|")
    print(
        "\n".join(
            f"| {i} | {x.var().item():.3g} | {x.grad.var().item():.3g} |"
            for i, x in enumerate(seen)
        )
    )


def transformer():
    """One block of a byte-level transformer; the gradient norm of each parameter in its last step"""
    bare = lambda stream, f, gate=1.0: stream._replace(x=f)
    for name, residual, write in (
        ("skip", "prenorm", None),
        ("no_skip", "prenorm", bare),
        ("none", "none", None),
    ):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=128, block_size=64, residual=residual))
        for layer in (model.blocks[0].attn_residual, model.blocks[0].mlp_residual) if write else ():
            layer.write = write
        losses, last = train(model, lambda x, y: model(x, y)[1], batches(64, batch_size // 8), 1e-3)
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        save(name, losses, {"last": last, "gradients": norms})
        print(f"{name}: {last:.3f}  " + "  ".join(f"{n} {g:.2g}" for n, g in norms.items()))


def save(name, losses, report):
    os.makedirs(out, exist_ok=True)
    records = (
        {"settings": settings},
        *({"step": i, "loss": x} for i, x in enumerate(losses)),
        report,
    )
    with open(os.path.join(out, f"{name}.jsonl"), "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


pick({"cases": run_cases, "walk": walk, "transformer": transformer}, what, "what")()
