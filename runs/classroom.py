"""
What skip connections, norms and initialisations do, on models small enough to show it.

    python runs/classroom.py                     all of it: about 20 minutes on 2 cores
    python runs/classroom.py --what=stacks       deep stacks of MLPs, and their first gradients
    python runs/classroom.py --what=transformer  one block, with and without its first skip

transformer: one post-norm block of width 64 over 65 characters. After attention: x <- x + output,
x <- output, or that line deleted, so that nothing reads the output.

    x <- Norm(x + Attention(x)),  x <- Norm(x + MLP(x))                                          (1)

stacks: x <- x + W_2 act(W_1 Norm(x)) predicts a byte from the 8 before it. A and B have no norm and
no skip. walk measures the variance of activations and gradients before training.

Each run is one line in results/classroom.jsonl with settings, curve and measurements. It is not
repeated.
"""

import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F
from study import append, data_hash, read, thinned
from torch import nn

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure
from data import Windows
from model import INITS
from norms import RMSNorm

what = "stacks,transformer"  # what to run, separated by commas
data_dir = "data/python"  # folder with shards of bytes
steps = 46500  # of the transformer
stack_steps = 1000  # of a stack
seed = 1  # seed of the weights and of the data
name = "classroom"  # name of the file in results/


def batches(context, size):
    """Yield (inputs, targets), (size, context) each, from random places in the first shard."""
    tokens, rng = Windows(data_dir, "train", context).shards[0], np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(tokens) - context, size)
        rows = tokens[starts[:, None] + np.arange(context + 1)]
        rows = torch.from_numpy(rows.astype(np.int64))
        yield rows[:, :-1], rows[:, 1:]


def train(model, loss_of, data, rate, steps):
    """Train with Adam, up to the first loss that is not finite. Returns all losses."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=rate), []
    while len(losses) < steps and (not losses or math.isfinite(losses[-1])):
        optimizer.zero_grad()
        loss = loss_of(*next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def keep(settings, run):
    """The line of these settings on this data, from the file or from run().

    A killed run starts again.
    """
    settings = settings | {"data": data_hash(data_dir)}
    for line in read(name):
        if line["settings"] == settings:
            return line
    line = {"settings": settings} | run()
    append(name, line)
    return line


def finished():
    """{kind of run: {its own settings as a tuple: line}}, of this seed and these steps."""
    own = {"transformer": ("skip", "rate"), "bigram": (), "stack": ("case",), "walk": ("start",)}
    shared = {"transformer": {"seed": seed, "steps": steps}, "bigram": {}}
    shared |= {"stack": {"seed": seed, "steps": stack_steps}, "walk": {"seed": seed}}
    found = {kind: {} for kind in own}
    for line in read(name):
        known, kind = line["settings"], line["settings"]["what"]
        if shared[kind].items() <= known.items():
            found[kind][tuple(known[key] for key in own[kind])] = line
    if len({line["settings"]["data"] for lines in found.values() for line in lines.values()}) > 1:
        raise SystemExit(f"{name}: its runs have different data")
    return found


def curve(losses):
    points = thinned([(i, loss) for i, loss in enumerate(losses, 1) if math.isfinite(loss)])
    last = losses[-100:]
    return {"curve": points, "steps": len(losses), "last": round(sum(last) / len(last), 4)}


# ------------------------------------------------------------------------------------------------
# One block of a transformer

CHARACTERS = 65
SKIPS = ("x + output", "output", "deleted")


class CharTransformer(nn.Module):
    """Eq. 1, with torch's default initialisation."""

    def __init__(self, skip, width=64, heads=2, context=64):
        super().__init__()
        self.skip, self.heads = skip, heads
        self.token, self.position = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        self.query, self.key, self.value, self.out_proj = (nn.Linear(width, width) for _ in "qkvo")
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, CHARACTERS)

    def attention(self, x):
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = (split(linear(x)) for linear in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def forward(self, idx):
        x = self.token(idx) + self.position.weight[: idx.size(1)]
        output = self.attention(x)
        if self.skip == "x + output":
            x = x + output
        elif self.skip == "output":
            x = output
        x = self.norm_1(x)
        x = self.norm_2(x + self.down(F.relu(self.up(x))))
        return self.head(x)


def characters():
    """A table (257,): bytes to ids 0-63 for the 64 most frequent, and 64 for the rest."""
    tokens = Windows(data_dir, "train", 1).shards[0]
    table = torch.full((257,), CHARACTERS - 1)
    table[np.bincount(tokens, minlength=257).argsort()[::-1][: CHARACTERS - 1].copy()] = (
        torch.arange(CHARACTERS - 1)
    )
    return table


def bigram(table):
    """The entropy of a character given the one before it, in nats."""
    ids = table.numpy()[Windows(data_dir, "train", 1).shards[0]]
    pairs = np.bincount(CHARACTERS * ids[:-1] + ids[1:], minlength=CHARACTERS**2)
    pairs = pairs.reshape(CHARACTERS, CHARACTERS)
    p = pairs / pairs.sum(1, keepdims=True).clip(1)
    seen = pairs > 0
    nats = -(pairs[seen] * np.log(p[seen])).sum() / pairs.sum()
    return {"entropy": round(float(nats), 4)}


def transformer():
    table = characters()

    def run(skip, rate):
        torch.manual_seed(seed)
        model = CharTransformer(skip)
        loss_of = lambda x, y: F.cross_entropy(model(table[x]).flatten(0, 1), table[y].flatten())
        losses = train(model, loss_of, batches(64, 32), rate, steps)
        named = model.named_parameters()
        norms = {n: None if p.grad is None else round(p.grad.norm().item(), 4) for n, p in named}
        return curve(losses) | {"gradients": norms}

    entropy = keep({"what": "bigram"}, lambda: bigram(table))["entropy"]
    print(f"entropy of a character given the one before: {entropy} nats")
    print(
        "| after attention | rate | last loss | parameters without a gradient |\n|---|---|---|---|"
    )
    for skip in SKIPS:
        for rate in (1e-3, 3e-4):
            settings = {"what": "transformer", "skip": skip, "rate": rate, "steps": steps}
            line = keep(settings | {"seed": seed}, lambda skip=skip, rate=rate: run(skip, rate))
            without = ", ".join(n for n, norm in line["gradients"].items() if norm is None)
            print(f"| {skip} | {rate:g} | {line['last']:.3f} | {without} |", flush=True)


# ------------------------------------------------------------------------------------------------
# Stacks of MLPs

GAINS = {"relu": math.sqrt(2), "gelu": 1.7}
STACKS = {  # layers, activation, start, norm and skip, rate, what is expected
    "A": (12, "relu", "kaiming", False, 1e-3, "plateau"),
    "B": (12, "relu", "uniform", False, 1e-3, "explosion"),
    "C": (30, "gelu", "kaiming", True, 3e-4, "smooth"),
    "24 layers": (24, "gelu", "kaiming", True, 3e-4, "smooth"),
    "2 layers": (2, "gelu", "kaiming", True, 3e-4, "smooth"),
}


class Stack(nn.Module):
    def __init__(self, layers, activation, start, normed, width=256):
        super().__init__()
        self.act, self.normed = getattr(F, activation), normed
        self.embed, self.inward = nn.Embedding(257, 32), nn.Linear(8 * 32, width)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(layers + 1))
        self.head = nn.Linear(width, 257)
        for linears, gain in ((self.up, 1.0), (self.down, GAINS[activation])):
            for linear in linears:
                INITS[start](linear.weight, 0.5, gain)  # 0.5: the bound of uniform
                nn.init.zeros_(linear.bias)
        for norm in self.norms:
            norm.reset_parameters()

    def forward(self, idx, layers=None):
        x = self.inward(self.embed(idx).flatten(1))  # (B, 8) to (B, width)
        for norm, up, down in zip(self.norms, self.up, self.down):
            f = down(self.act(up(norm(x) if self.normed else x)))
            x = x + f if self.normed else f
            if layers is not None:
                x.retain_grad()
                layers.append(x)
        return self.head(self.norms[-1](x) if self.normed else x)

    def loss(self, idx, targets):
        return F.cross_entropy(self(idx), targets[:, -1])


def verdict(losses):
    """explosion: a loss is not finite, or none of the first 50 is better than chance.
    spiky:     some tenth is at least 0.1 worse than the one before it.
    plateau:   the last tenth is less than 0.1 better than the sixth tenth.
    smooth:    none of these.
    """
    if len(losses) < stack_steps or not min(losses[:50]) < math.log(257):
        return "explosion"
    tenths = [np.mean(part) for part in np.array_split(losses, 10)]
    worst = max(after - before for before, after in zip(tenths, tenths[1:]))
    if worst >= 0.1:
        return "spiky"
    return "plateau" if tenths[5] - tenths[9] < 0.1 else "smooth"


def stacks():
    def run(layers, activation, start, normed, rate):
        torch.manual_seed(seed)
        model = Stack(layers, activation, start, normed)
        losses = train(model, model.loss, batches(8, 64), rate, stack_steps)
        return curve(losses) | {"first": round(losses[0], 4), "verdict": verdict(losses)}

    print("| stack | first loss | last | steps | verdict | expected |\n|---|---|---|---|---|---|")
    for case, (*shape, rate, expected) in STACKS.items():
        settings = {"what": "stack", "case": case, "shape": [*shape, rate], "steps": stack_steps}
        settings["seed"] = seed
        line = keep(settings, lambda shape=shape, rate=rate: run(*shape, rate))
        cells = [case, line["first"], line["last"], line["steps"], line["verdict"], expected]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for start in ("kaiming", "xavier", "uniform"):
        settings = {"what": "walk", "start": start, "seed": seed}
        line = keep(settings, lambda start=start: walk(start))
        ends = [line[key][i] for key in ("variance", "of the gradient") for i in (0, -1)]
        print(f"{start}: variance {ends[0]} to {ends[1]}, of the gradient {ends[2]} to {ends[3]}")


def walk(start):
    """Variances of 12 ReLU layers without norms and skips, before training."""
    torch.manual_seed(seed)
    model, layers = Stack(12, "relu", start, False), []
    x, y = next(batches(8, 64))
    F.cross_entropy(model(x, layers), y[:, -1]).backward()
    digits = lambda value: float(f"{value.item():.3g}")
    gradients = [digits(x.grad.var()) for x in layers]
    return {"variance": [digits(x.var()) for x in layers], "of the gradient": gradients}


if __name__ == "__main__":
    configure(globals(), argv=sys.argv[1:])
    parts = {"stacks": stacks, "transformer": transformer}
    for part in what.split(","):
        if part not in parts:
            raise SystemExit(f"what={what!r}: choose from {', '.join(parts)}")
        parts[part]()
