"""
Measurements of the residual stream through depth, for eval.py and the log of train.py.

The stream of a mode is model.ends.additive(stream), (B, T, C): what the final norm would read if
the model ended here. For NAG it is the two lanes as one vector, for n streams the sum (plain
or learned) that the head reads, for Attention Residuals the head's weighted sum of sources, and for
x0mix the stream before Eq. 11. The head of gated reads each stream; here it is their plain sum.
Updates and rotations are from the end of one sublayer to that of the next.

The model needs no hooks: these functions run its blocks one by one. `batches` is a list of (inputs,
targets), (B, T) each. Results are plain numbers, one per block or one per sublayer.
"""

import copy
import math
from collections import defaultdict
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from attention import Attention
from mod import Router
from model import evaluate
from moe import MoE
from norms import upcast


@torch.no_grad()
def walk(model, x):
    """Yield (sublayer, residual, its input, stream before, stream after) for ids x (B, T).

    The model must be in eval mode.
    """
    rope = (model.cos[: x.size(1)], model.sin[: x.size(1)])
    sharded = isinstance(model, FSDPModule)
    if sharded:
        model.unshard()
    stream = model.begin(x, torch.arange(x.size(1), device=x.device))
    for b, block in enumerate(model.blocks):
        values = model.values(b, x)
        if sharded:
            block.unshard()
        attend = partial(block.attend, rope=rope, values=values)
        for sublayer, residual, run in (
            (block.attn, block.attn_residual, attend),
            (block.mlp, block.mlp_residual, block.feed),
        ):
            h, before = residual.read(stream)
            stream = run(stream)
            yield sublayer, residual, h, before, stream
        if sharded:
            block.reshard()


DEAD = 0.01  # |a| below this, a rotation of about half a degree, counts as no rotation


@torch.no_grad()
def gate_health(model, x):
    """NAG's gates on ids x (B, T): mean |a| of every sublayer, the share of all |a| below DEAD
    ("floor"), and the number of sublayers whose mean is below DEAD ("dead")."""
    training = model.training
    model.eval()
    a = torch.stack([residual.turn(before.x).abs() for _, residual, _, before, _ in walk(model, x)])
    model.train(training)
    mean = a.flatten(1).mean(1)  # (2 n_layer,), from (2 n_layer, B, T, 1)
    floor = float((a < DEAD).float().mean())
    return {"a": mean.tolist(), "floor": floor, "dead": int((mean < DEAD).sum())}


# ------------------------------------------------------------------------------------------------
# The stream


def degrees(x, y):
    """Mean angle between vectors, in a form that is accurate for small angles, unlike acos."""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return torch.rad2deg(2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))).mean()


def sink(attention, h, rope):
    """Attention weight on the first token, averaged over heads and over all later queries."""
    q, (k, _) = attention.query(h, rope), attention.key_value(h, rope)
    first = torch.zeros_like(k)  # as values: an output is then the weight on the first token
    first[:, :, 0] = 1.0
    how = dict(is_causal=True, scale=attention.softmax_scale, enable_gqa=True)
    return F.scaled_dot_product_attention(q, k, first, **how)[:, :, 1:].mean()


def entropy(M):
    """Mean entropy of the columns of |M| (..., n, n), each scaled to sum to 1: 0 to log n."""
    p = M.abs() / M.abs().sum(-2, keepdim=True)
    return -torch.special.xlogy(p, p).sum(-2).mean()


def describe(s, seen):
    """Append statistics of the vectors s (..., C), averaged over them, to the lists in seen."""
    centred = s - s.mean(-1, keepdim=True)
    variance = centred.square().mean(-1)
    rms = s.square().mean(-1).sqrt()
    largest = s.abs().amax(-1)
    seen["variance"].append(s.var(-1).mean())
    seen["norm"].append(s.norm(dim=-1).mean())
    seen["magnitude"].append(s.abs().mean())
    seen["max"].append(largest.mean())
    seen["max/rms"].append((largest / rms).mean())
    seen["kurtosis"].append((centred.pow(4).mean(-1) / variance.square()).mean())


def look(model, x, y):
    """Measure one batch. Returns ({quantity: tensor}, outcomes).

    A quantity has one value per sublayer or block. The quantities of describe start with one more
    value, for the embedding. "mixing entropy" is that of the matrices that mix n streams. "sources"
    is a matrix: the weights that each sublayer, and last the head, gives to its sources. The oldest
    source comes first, and later ones have weight 0. "load" is one too: in each block, the share of
    the choices of all tokens that each expert gets.
    "before MLP" is the mean square before each MLP, "predicted" what BHyT takes for it, and R2 the
    share of its variance over tokens that this explains.
    """
    seen, first = defaultdict(list), None
    rope = (model.cos[: x.size(1)], model.sin[: x.size(1)])
    for sublayer, residual, h, before, stream in walk(model, x):
        if first is None:  # here, where a sharded model has its parameters
            begun = model.begin(x, torch.arange(x.size(1), device=x.device))
            first = last = old = model.ends.additive(begun)
            describe(first, seen)
        new = model.ends.additive(stream)
        seen["rotation"].append(degrees(old, new))
        seen["update"].append(((new - old).square().mean(-1) / old.square().mean(-1)).sqrt().mean())
        seen["from embedding"].append(degrees(first, new))
        if residual.rotates:
            seen["alpha"].append(residual.alpha[0])
            seen["a"].append(residual.turn(before.x).abs().mean())
        mixing, weights = residual.mixing(before), residual.weights(before)
        if mixing is not None:
            seen["mixing entropy"].append(entropy(mixing))
        if weights is not None:
            seen["sources"].append(weights.flatten(0, -2).mean(0))
        if isinstance(sublayer, Attention):
            seen["sink"].append(sink(sublayer, h, rope))
            if residual.predicts:
                lane = before.lane if stream.lane is None else stream.lane  # None: it is pruned
                measured, predicted = upcast(stream.x).square().mean(-1), lane[..., 0]
                error = (measured - predicted).square().mean()
                seen["before MLP"].append(measured.mean())
                seen["predicted"].append(predicted.mean())
                seen["R2"].append(1 - error / measured.var(correction=0))
        else:
            describe(new, seen)
            if isinstance(sublayer, MoE):
                chosen = sublayer.route(h.flatten(0, -2))[1].flatten()
                seen["load"].append(chosen.bincount(minlength=sublayer.E) / len(chosen))
            seen["cosine"].append(F.cosine_similarity(last, new, dim=-1).mean())
            last = new
        old = new
    weights = model.ends.weights(stream)
    if weights is not None:  # the last row of the matrix: what the head reads
        seen["sources"].append(weights.flatten(0, -2).mean(0))
        seen["sources"] = list(nn.utils.rnn.pad_sequence(seen["sources"], batch_first=True))
    seen = {key: torch.stack(values) for key, values in seen.items()}
    return seen, outcomes(model, stream, y)


def outcomes(model, stream, y):
    """Three values per token, (3, B T): log rms of the last stream, entropy of logits, loss."""
    log_rms = model.ends.additive(stream).square().mean(-1).log() / 2
    hidden, head = model.ends.readout(stream, model.head.weight)
    chunk = model.loss_chunk or 2048  # tokens whose logits are in memory at a time
    entropy, loss = [], []
    for h, targets in zip(hidden.flatten(0, 1).split(chunk), y.flatten().split(chunk)):
        logp = model.logits(h, head).float().log_softmax(-1)
        entropy.append(-(logp.exp() * logp).sum(-1))
        loss.append(-logp.gather(-1, targets.clamp(min=0)[:, None])[:, 0])
    return torch.stack([log_rms.flatten(), torch.cat(entropy), torch.cat(loss)])


@torch.no_grad()
def depth(model, batches):
    """All measurements through depth."""
    n = sum(len(x) for x, _ in batches)
    sums, tokens = defaultdict(float), []
    for x, y in batches:
        seen, values = look(model, x, y)
        for key, value in seen.items():
            sums[key] = sums[key] + value * (len(x) / n)
        tokens.append(values[:, y.flatten() >= 0])
    report = {key: mean.tolist() for key, mean in sums.items()}

    norm, entropy, loss = torch.cat(tokens, dim=1).cpu()
    constant = norm.std() < 1e-4  # post-norm: equal norms have no correlation
    for name, other in (("norm and entropy", entropy), ("norm and loss", loss)):
        correlation = torch.corrcoef(torch.stack([norm, other]))[0, 1]
        report[name] = None if constant else float(correlation)
    return report


@torch.no_grad()
def copying(model, ids, rows=32):
    """Mean loss of random tokens [the first time, when they repeat]. ids: draw from these tokens.

    A model that has learned to copy from its context predicts the repetition. Windows have at most
    256 tokens, so that the logits of a long context and a large vocabulary fit in memory.
    """
    half = min(256, model.config.block_size) // 2
    known, generator = ids.unique(), torch.Generator().manual_seed(0)
    choice = torch.randint(len(known), (rows, half), generator=generator)
    x = known[choice.to(ids.device)].repeat(1, 2)
    logits = model(x)[0][:, :-1].float()
    loss = F.cross_entropy(logits.mT, x[:, 1:], reduction="none")
    return [float(part.mean()) for part in (loss[:, : half - 1], loss[:, half:])]


@torch.no_grad()
def leak(model):
    """How far logits move if only later tokens change, over the logits' std.

    0: the model is causal. Infinity: some logits are not finite, so nothing can be said. Rounding
    may change what a router chooses: if its logits seem to move, a copy in float64 decides.
    """
    T = min(128, model.config.block_size)
    ids = torch.randint(model.config.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([t for t in (0, 1, 3, 7, 15, 31, 32, 63) if t < T])
    later = torch.arange(T) > ends[:, None]  # (ends, T)
    device = model.embed.weight.device
    one = model(ids[:1].expand(len(ends), T).to(device))[0]
    other = model(torch.where(later, ids[1], ids[0]).to(device))[0]
    if not (one.isfinite().all() and other.isfinite().all()):
        return math.inf
    moved = float((one - other).abs().amax(-1).cpu()[~later].max())
    found = moved / float(one.std()) if moved > 0 else 0.0  # all logits may be equal: std is 0
    chooses = any(isinstance(module, (MoE, Router)) for module in model.modules())
    if found > 1e-4 and chooses and one.dtype != torch.float64:
        return leak(copy.deepcopy(model).to("cpu", torch.float64))  # some devices have no float64
    return found


@torch.no_grad()
def dropped(model, batches):
    """How much the loss rises without block 0, without block 1, and so on: n_layer numbers."""
    losses, complete = [], evaluate(model, batches)
    for block in model.blocks:
        block.forward = lambda stream, *others: stream
        losses.append(evaluate(model, batches) - complete)
        del block.forward  # the method of the class again
    return losses


def gradients(model, x, y):
    """The norm of the loss gradient with respect to the parameters of each block."""
    model.zero_grad()
    model(x, y)[1].backward()
    norms = []
    for block in model.blocks:
        grads = (p.grad for p in block.parameters() if p.grad is not None)
        norms.append(math.sqrt(sum(float(grad.square().sum()) for grad in grads)))
    model.zero_grad()
    return norms


# ------------------------------------------------------------------------------------------------
# Mixture of Depths


@torch.no_grad()
def skipping(model, batches, ids):
    """Which tokens skip under the causal rule, Eq. 3 of mod.py, at each sublayer with a router.

    Returns the share that skips each one and, for the text ids (T,), a map of 1 (runs) or 0.
    """

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
    text = torch.tensor([ids], device=batches[0][0].device)
    report = {"skipped": skipped.tolist(), "rate": float(skipped.mean())}
    return report | {"where": where, "tokens": ids, "map": runs(text)[:, 0].int().tolist()}
