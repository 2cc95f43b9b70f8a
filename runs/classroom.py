"""
Why deep networks need init, norms and skips: plain layers predict a byte from the previous 8.

    python runs/classroom.py                       train the cases A, B, C, deep: 2 minutes, 2 cores
    python runs/classroom.py --what=walk --init=xavier --activation=relu --norm=none --skip=False
    python runs/classroom.py --what=transformer    one block of a byte-level transformer

A layer is x <- act(W Norm(x)), or x <- x + act(W Norm(x)) with skip. norm=none omits Norm. walk
prints the variances of activations and gradients before training. transformer trains the block
with its skip connections and without them.
"""

import json
import math
import os
import sys
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure
from data import Windows
from model import ACTIVATIONS, GPT, INITS, GPTConfig
from norms import NORMS, pick

what = "cases"  # cases, walk or transformer
cases = "A,B,C,deep"  # cases: names from CASES, separated by commas
data_dir = "data/python"  # folder with shards of bytes
out = "results/classroom"  # folder for the losses
steps = 1000  # training steps
batch_size = 256  # contexts of 8 bytes per step; transformer: 1/8 as many, of 64 bytes
n_layer = 24  # walk: layers
width = 256  # width of a layer
init = "kaiming"  # walk: normal, kaiming, xavier or uniform
init_scale = 0.02  # walk: standard deviation of normal, half the width of uniform
activation = "gelu"  # walk: gelu, relu or silu
norm = "rms"  # walk: rms, layer or none
skip = True  # walk: add the input of a layer to its output
seed = 1  # seed of the weights and of the data
settings, _ = configure(globals(), argv=sys.argv[1:])

# (n_layer, init, init_scale, activation, norm, skip), learning rate, expected verdict
CASES = {
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
            raise SystemExit(f"activation={activation!r}: these layers have no gate")
        self.embed = nn.Embedding(257, 32)
        self.inward = nn.Linear(8 * 32, width)
        self.head = nn.Linear(width, 257)
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(n_layer))
        make_norm = partial(pick(NORMS, norm, "norm"), width, 1e-6)
        self.norms = nn.ModuleList(make_norm() for _ in range(n_layer + 1))
        self.skip = skip
        for linear in self.linears:
            pick(INITS, init, "init")(linear.weight, init_scale, gain)
        for module in self.norms if norm != "none" else ():
            module.reset_parameters()

    def forward(self, idx, activations=None):
        x = self.inward(self.embed(idx).flatten(1))  # (B, 8) to (B, width)
        for norm, linear in zip(self.norms, self.linears):
            f = self.act(linear(norm(x)))
            x = x + f if self.skip else f
            if activations is not None:
                x.retain_grad()
                activations.append(x)
        return self.head(self.norms[-1](x))

    def loss(self, idx, targets):
        return F.cross_entropy(self(idx), targets[:, -1])


def batches(context, size):
    """Yield (inputs, targets), (size, context) each, from random places in the first shard."""
    tokens, rng = Windows(data_dir, "train", context).shards[0], np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - context, size)
        rows = tokens[starts[:, None] + np.arange(context + 1)]
        rows = torch.from_numpy(rows.astype(np.int64))
        yield rows[:, :-1], rows[:, 1:]


def train(model, loss_of, data, learning_rate):
    """Train with AdamW, without warm-up. Stops after a loss that is not finite.

    Returns (losses of all steps, mean of the last 20).
    """
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=learning_rate), []
    while len(losses) < steps and (not losses or math.isfinite(losses[-1])):
        optimizer.zero_grad()
        loss = loss_of(*next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(losses[-20:]) / len(losses[-20:])


def verdict(losses):
    """Describe a loss curve.

    explosion: a loss is not finite, or none of the first 50 is better than chance.
    plateau:   the last tenth is less than 0.1 better than the sixth tenth.
    spiky:     some tenth is at least 0.1 worse than the one before it.
    smooth:    none of these.
    """
    if len(losses) < steps or not min(losses[:50]) < math.log(257):
        return "explosion"
    tenths = [np.mean(part) for part in np.array_split(losses, 10)]
    if tenths[5] - tenths[9] < 0.1:
        return "plateau"
    worst = max(after - before for before, after in zip(tenths, tenths[1:]))
    return "smooth" if worst < 0.1 else "spiky"


def run_cases():
    print("| case | first loss | last | steps | verdict | expected |\n|---|---|---|---|---|---|")
    for name in cases.split(","):
        layers, rate, expected = pick(CASES, name, "cases")
        torch.manual_seed(seed)
        model = Stack(*layers)
        losses, last = train(model, model.loss, batches(8, batch_size), rate)
        got = verdict(losses)
        save(name, losses, {"last": last, "verdict": got, "expected": expected})
        print(f"| {name} | {losses[0]:.3f} | {last:.3f} | {len(losses)} | {got} | {expected} |")


def walk():
    """Print the variance of the output of each layer, and of its gradient, before training."""
    torch.manual_seed(seed)
    model, activations = Stack(n_layer, init, init_scale, activation, norm, skip), []
    x, y = next(batches(8, batch_size))
    F.cross_entropy(model(x, activations), y[:, -1]).backward()
    print("| layer | variance | of its gradient |\n|---|---|---|")
    for i, x in enumerate(activations):
        print(f"| {i} | {x.var().item():.3g} | {x.grad.var().item():.3g} |")


def transformer():
    """Train one block with pre-norm, with pre-norm without its skips, and with x <- Norm(F(x)).

    Prints the gradient norm of each parameter in the last step.
    """
    for name, residual in (("skip", "prenorm"), ("no_skip", "prenorm"), ("none", "none")):
        torch.manual_seed(seed)
        model = GPT(GPTConfig(n_layer=1, n_head=4, n_embd=128, block_size=64, residual=residual))
        if name == "no_skip":
            write = lambda stream, f, gate=1.0: stream.replace(x=f)
            model.blocks[0].attn_residual.write = model.blocks[0].mlp_residual.write = write
        loss_of = lambda x, y, model=model: model(x, y)[1]
        losses, last = train(model, loss_of, batches(64, batch_size // 8), 1e-3)
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        save(name, losses, {"last": last, "gradients": norms})
        print(f"{name}: {last:.3f}  " + "  ".join(f"{n} {g:.2g}" for n, g in norms.items()))


def save(name, losses, report):
    """Write one record for the settings, one per step, and the report."""
    os.makedirs(out, exist_ok=True)
    records = [{"settings": settings}, *({"step": i, "loss": x} for i, x in enumerate(losses))]
    with open(os.path.join(out, f"{name}.jsonl"), "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in [*records, report])


pick({"cases": run_cases, "walk": walk, "transformer": transformer}, what, "what")()
