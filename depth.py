"""
What a model's stream does on its way through depth. Every question walks the blocks from outside, so that no forward
has a line of it: batches are lists of (inputs, targets), answers are plain numbers, by block or by sublayer.
"""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from attention import Attention
from norms import upcast


@torch.no_grad()
def walk(model, x):
    """The forward in eval mode, by sublayer: (sublayer, its residual, what it read, the stream before and behind)"""
    rope, sharded = (model.cos[: x.size(1)], model.sin[: x.size(1)]), isinstance(model, FSDPModule)
    if sharded:
        model.unshard()
    stream = model.begin(x, torch.arange(x.size(1), device=x.device))
    for block in model.blocks:
        if sharded:
            block.unshard()
        for sublayer, residual in (
            (block.attn, block.attn_residual),
            (block.mlp, block.mlp_residual),
        ):
            h, before = residual.read(stream)
            stream = block.attend(stream, rope) if sublayer is block.attn else block.feed(stream)
            yield sublayer, residual, h, before, stream
        if sharded:
            block.reshard()


DEAD = 0.01  # a NAG sublayer that turns by less than this, some half a degree, does nothing


@torch.no_grad()
def gate_health(model, x):
    """NAG on one batch: mean |a| of every sublayer, the share of all turns that are below DEAD, the sublayers whose
    mean is"""
    training = model.training
    model.eval()
    a = torch.stack([residual.turn(before.x).abs() for _, residual, _, before, _ in walk(model, x)])
    model.train(training)
    mean = a.flatten(1).mean(1)  # of (2 n_layer, B, T, 1)
    return {
        "a": mean.tolist(),
        "floor": float((a < DEAD).float().mean()),
        "dead": int((mean < DEAD).sum()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The stream


def degrees(x, y):
    """Angle between vectors, averaged; exact for small ones, as the arc cosine is not"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return torch.rad2deg(2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))).mean()


def sink(attention, h, rope):
    """Attention that goes to the first token, averaged over heads and all queries that could look elsewhere"""
    q, (k, _) = attention.query(h, rope), attention.key_value(h, rope)
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scores = upcast(q @ k.mT) / q.size(-1) ** 0.5  # (B, H, T, T)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=h.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)[:, :, 1:, 0].mean()


def describe(s, seen):
    """The size and the shape of the vectors s (..., C) over their features, averaged, into seen"""
    centred, square = s - s.mean(-1, keepdim=True), s.square().mean(-1)
    variance, largest = centred.square().mean(-1), s.abs().amax(-1)
    seen["variance"].append(s.var(-1).mean())
    seen["norm"].append(s.norm(dim=-1).mean())
    seen["magnitude"].append(s.abs().mean())
    seen["max"].append(largest.mean())
    seen["max/rms"].append((largest / square.sqrt()).mean())
    seen["kurtosis"].append((centred.pow(4).mean(-1) / variance.square()).mean())


def look(model, x, y):
    """One batch: {quantity: its mean behind the embedding and every block, or for every sublayer or attention}; the
    mean direction of every sublayer's update (2 n_layer, C); and of every token the log of the last stream's rms, the
    entropy of the prediction, the loss, the probability of the likeliest token and whether it was right"""
    seen, preferred, first = defaultdict(list), [], None
    for sublayer, residual, h, before, stream in walk(model, x):
        old, new = model.ends.additive(before), model.ends.additive(stream)
        if first is None:
            first = last = old
            describe(first, seen)
        seen["rotation"].append(degrees(old, new))
        seen["update"].append(((new - old).square().mean(-1) / old.square().mean(-1)).sqrt().mean())
        seen["from embedding"].append(degrees(first, new))
        preferred.append(F.normalize(new - old, dim=-1).flatten(0, 1).mean(0))
        if hasattr(residual, "turn"):
            seen["alpha"].append(residual.alpha[0])
            seen["a"].append(residual.turn(before.x).abs().mean())
        if isinstance(sublayer, Attention):
            seen["sink"].append(sink(sublayer, h, (model.cos[: x.size(1)], model.sin[: x.size(1)])))
        else:
            describe(new, seen)
            seen["cosine"].append(F.cosine_similarity(last, new, dim=-1).mean())
            last = new
    logp = F.linear(*model.ends.readout(stream, model.head.weight)).float().log_softmax(-1)
    entropy, loss = -(logp.exp() * logp).sum(-1), -logp.gather(-1, y[..., None])[..., 0]
    best, guess = logp.max(-1)
    of_tokens = torch.stack(
        [new.square().mean(-1).log() / 2, entropy, loss, best.exp(), (guess == y).float()]
    )
    return (
        {k: torch.stack(v) for k, v in seen.items()},
        torch.stack(preferred),
        of_tokens.flatten(1),
    )


@torch.no_grad()
def depth(model, batches):
    """What the stream does through depth; for NAG, the additive stream that its lanes stand for"""
    sums, n, preferred, of_tokens = defaultdict(float), sum(len(x) for x, _ in batches), 0.0, []
    for x, y in batches:
        seen, directions, scalars = look(model, x, y)
        for key, values in seen.items():
            sums[key] = sums[key] + values * (len(x) / n)
        preferred = preferred + directions * (len(x) / n)
        of_tokens.append(scalars)
    report, towards = (
        {key: mean.tolist() for key, mean in sums.items()},
        F.normalize(preferred, dim=-1),
    )
    report["similarity"] = (towards @ towards.T).tolist()
    norm, entropy, loss, confidence, right = torch.cat(of_tokens, dim=1)
    flat = norm.std() < 1e-4  # post-norm's is the same for all tokens
    for name, other in (("norm and entropy", entropy), ("norm and loss", loss)):
        report[name] = None if flat else float(torch.corrcoef(torch.stack([norm, other]))[0, 1])
    report["by norm"] = means_by(
        norm.argsort().argsort() * 10 // len(norm), norm=norm, entropy=entropy, loss=loss
    )
    report["calibration"] = means_by(
        (confidence * 10).long().clamp(max=9), confidence=confidence, accuracy=right
    )
    gap = [
        abs(c - a) * s
        for c, a, s in zip(*(report["calibration"][k] for k in ("confidence", "accuracy", "share")))
    ]
    report["calibration error"] = sum(gap)
    return report


def means_by(group, **values):
    """Means over the tokens of each group, of those that have any, and the share of the tokens that they are"""
    count = torch.bincount(group)
    filled = count > 0
    means = {
        k: (torch.bincount(group, v.double()) / count)[filled].tolist() for k, v in values.items()
    }
    return means | {"share": (count / len(group))[filled].tolist()}


@torch.no_grad()
def dropped(model, batches):
    """How much the loss rises when a block is left out, one after the other"""

    def loss():
        return sum(float(model(x, y)[1]) * len(x) for x, y in batches) / sum(
            len(x) for x, _ in batches
        )

    blocks, losses, complete = model.blocks, [], loss()
    for b in range(len(blocks)):
        model.blocks = nn.ModuleList([*blocks[:b], *blocks[b + 1 :]])
        losses.append(loss() - complete)
    model.blocks = blocks
    return losses


def gradients(model, x, y):
    """The norm of the gradient of the loss for the parameters of each block"""
    model.zero_grad()
    model(x, y)[1].backward()
    squares = [
        sum(float(p.grad.square().sum()) for p in b.parameters() if p.grad is not None)
        for b in model.blocks
    ]
    model.zero_grad()
    return [math.sqrt(square) for square in squares]


# ---------------------------------------------------------------------------------------------------------------------
# Mixture of Depths


@torch.no_grad()
def skipping(model, batches, ids):
    """Who skips what under the causal rule: the share that skips each sublayer that has a router, and for one text
    which of its tokens ran where"""

    def runs(x):
        ran = []
        for i, (_, residual, h, before, _) in enumerate(walk(model, x)):
            block = model.blocks[i // 2]
            router = (block.attn_router, block.mlp_router)[i % 2]
            if router is not None:
                ran.append(router.score(h, before, residual, block.scale) >= router.tau)
        return torch.stack(ran)  # (routers, B, T)

    n = sum(len(x) for x, _ in batches)
    skipped = sum((~runs(x)).float().mean((1, 2)) * (len(x) / n) for x, _ in batches)
    where = [f"{kind} {b}" for b, block in enumerate(model.blocks) for kind in ("attn", "mlp")
             if getattr(block, kind + "_router") is not None]  # fmt: skip
    map_of = runs(torch.tensor([ids], device=batches[0][0].device))[:, 0].int().tolist()
    report = {"skipped": skipped.tolist(), "rate": float(skipped.mean())}
    return report | {"where": where, "tokens": ids, "map": map_of}
