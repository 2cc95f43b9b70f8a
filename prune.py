"""
Skip whole sublayers or blocks of a trained model, without training (Gromov et al. 2024,
arXiv 2403.17887).

A unit is a sublayer or a block. x is the stream before it and y the stream after it, see depth.py.
The units with the lowest scores are skipped. A score is one of

    angle     d(x, y) = arccos(<x, y> / (|x| |y|)) / pi                                          (1)
    norm      |y - x| / |x|                                                                      (2)
    random    a random number: a control

(1) and (2) are averaged over the tokens of some batches. All scores come from the whole model, so
they do not depend on what else is skipped.

A skipped unit returns the stream unchanged and computes nothing, except that its value embeddings
are still looked up. Two modes need a note:

    x0mix           The mixing before a block is skipped with the attention of the block. So is the
                    storing of x_m, in one block. The head then uses the last stream as x_m.
    attnres_block   If the first sublayer of a block of sources is skipped, the others add to the
                    source before.

Differs from the paper:
- The paper skips n consecutive blocks: those with the lowest (1) between the first one's input and
  the last one's output. Here each unit has its own score, and the units may be anywhere.
- The paper takes (1) at the last token of a sequence. We average over all tokens.
- The paper then trains adapters to repair the model. Here nothing is trained.
- Sublayers as units, (2) and the control are ours.
"""

from itertools import chain, islice, pairwise

import torch

from depth import degrees, walk
from norms import pick

UNITS = {"sublayer": 1, "block": 2}  # name: number of sublayers in a unit


def angle(x, y):
    return degrees(x, y) / 180  # Eq. 1, accurate for small angles too


def change(x, y):
    return ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean()  # Eq. 2


RULES = {"angle": angle, "norm": change, "random": None}  # name: score of the streams (x, y)


@torch.no_grad()
def scores(model, batches, unit="sublayer", rule="angle", seed=0):
    """The score of each unit, (units,). batches is a list of ids (B, T).

    The model must be in eval mode. seed is for the rule "random".
    """
    size, score = pick(UNITS, unit, "prune_unit"), pick(RULES, rule, "prune_by")
    if score is None:
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.rand(2 * len(model.blocks) // size, generator=generator, device="cpu")
    total = 0.0
    for x in batches:
        first = model.begin(x, torch.arange(x.size(1), device=x.device))
        last_sublayers = islice(walk(model, x), size - 1, None, size)  # one of each unit
        streams = chain([first], (after for *_, after in last_sublayers))
        pairs = pairwise(map(model.ends.additive, streams))
        total = total + len(x) * torch.stack([score(*pair) for pair in pairs])
    return total / sum(map(len, batches))


SUBLAYERS = ("attend", "feed")  # the methods of a block


def skip(model, indices, unit):
    """Skip these units and no others."""
    for b, block in enumerate(model.blocks):
        for i, method in enumerate(SUBLAYERS, 2 * b):
            vars(block).pop(method, None)  # use the method of the class again
            if i // UNITS[unit] in indices:
                setattr(block, method, lambda stream, *others, **more: stream)


def skips(block):
    """Whether a block skips its attention, and its MLP."""
    return tuple(method in vars(block) for method in SUBLAYERS)


def flops_per_token(model):
    """GPT.flops_per_token without the sublayers that are skipped."""
    total = model.flops_per_token()
    for block, flops in zip(model.blocks, model.block_flops()):
        total -= sum(of for of, skipped in zip(flops, skips(block)) if skipped)
    return total


def prune(model, batches, rate, unit="sublayer", rule="angle", seed=0):
    """Skip a share `rate` of the units, and no others. Returns the indices of these units."""
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate}: give a share, 0 to 1")
    skip(model, (), "block")  # scores are of the whole model
    order = scores(model, batches, unit, rule, seed).argsort(stable=True).tolist()
    indices = sorted(order[: round(rate * len(order))])
    skip(model, indices, unit)
    return indices


def names(indices, unit):
    """What the units are called: attn 3, mlp 3 or block 3."""
    if unit == "block":
        return [f"block {i}" for i in indices]
    return [f"{('attn', 'mlp')[i % 2]} {i // 2}" for i in indices]
