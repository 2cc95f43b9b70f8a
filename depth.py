"""
What a model's stream does on its way through depth. Every question walks the blocks from outside, so that no forward
has a line of it: batches are lists of (inputs, targets), answers are plain numbers, by block or by sublayer.
"""

import math
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

import bhyt
from attention import Attention
from norms import wide


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
        for sublayer, residual in ((block.attn, block.attn_residual), (block.mlp, block.mlp_residual)):
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
    return {"a": mean.tolist(), "floor": float((a < DEAD).float().mean()), "dead": int((mean < DEAD).sum())}


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
    scores = wide(q @ k.mT) / q.size(-1) ** 0.5  # (B, H, T, T)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=h.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)[:, :, 1:, 0].mean()


def shape_of(s, seen):
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
            first = behind = old
            shape_of(first, seen)
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
            shape_of(new, seen)
            seen["cosine"].append(F.cosine_similarity(behind, new, dim=-1).mean())
            behind = new
    logp = F.linear(*model.ends.readout(stream, model.head.weight)).float().log_softmax(-1)
    entropy, loss = -(logp.exp() * logp).sum(-1), -logp.gather(-1, y[..., None])[..., 0]
    best, guess = logp.max(-1)
    of_tokens = torch.stack([new.square().mean(-1).log() / 2, entropy, loss, best.exp(), (guess == y).float()])
    return {k: torch.stack(v) for k, v in seen.items()}, torch.stack(preferred), of_tokens.flatten(1)


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
    report, towards = {key: mean.tolist() for key, mean in sums.items()}, F.normalize(preferred, dim=-1)
    report["similarity"] = (towards @ towards.T).tolist()
    norm, entropy, loss, confidence, right = torch.cat(of_tokens, dim=1)
    flat = norm.std() < 1e-4  # post-norm's is the same for all tokens
    for name, other in (("norm and entropy", entropy), ("norm and loss", loss)):
        report[name] = None if flat else float(torch.corrcoef(torch.stack([norm, other]))[0, 1])
    report["by norm"] = means_by(norm.argsort().argsort() * 10 // len(norm), norm=norm, entropy=entropy, loss=loss)
    report["calibration"] = means_by((confidence * 10).long().clamp(max=9), confidence=confidence, accuracy=right)
    gap = [abs(c - a) * s for c, a, s in zip(*(report["calibration"][k] for k in ("confidence", "accuracy", "share")))]
    report["calibration error"] = sum(gap)
    return report


def means_by(group, **values):
    """Means over the tokens of each group, of those that have any, and the share of the tokens that they are"""
    count = torch.bincount(group)
    there = count > 0
    means = {k: (torch.bincount(group, v.double()) / count)[there].tolist() for k, v in values.items()}
    return means | {"share": (count / len(group))[there].tolist()}


@torch.no_grad()
def dropped(model, batches):
    """How much the loss rises when a block is left out, one after the other"""

    def loss():
        return sum(float(model(x, y)[1]) * len(x) for x, y in batches) / sum(len(x) for x, _ in batches)

    blocks, losses, whole = model.blocks, [], loss()
    for b in range(len(blocks)):
        model.blocks = nn.ModuleList([*blocks[:b], *blocks[b + 1 :]])
        losses.append(loss() - whole)
    model.blocks = blocks
    return losses


def gradients(model, x, y):
    """The norm of the gradient of the loss for the parameters of each block"""
    model.zero_grad()
    model(x, y)[1].backward()
    squares = [sum(float(p.grad.square().sum()) for p in b.parameters() if p.grad is not None) for b in model.blocks]
    model.zero_grad()
    return [math.sqrt(square) for square in squares]


# ---------------------------------------------------------------------------------------------------------------------
# BHyT's prediction


def fit(predicted, measured):
    """How well one vector predicts another"""

    def correlation(x, y):
        return float(torch.corrcoef(torch.stack([x, y]))[0, 1])

    error = (predicted - measured).square().mean()
    ranks = [x.argsort().argsort().double() for x in (predicted, measured)]
    return {
        "RMSE": float(error.sqrt()), "R2": float(1 - error / measured.var(correction=0)),
        "Pearson": correlation(predicted, measured), "Spearman": correlation(*ranks),
    }  # fmt: skip


def added_variance(block, T):
    """What the attention of a BHyT or prenorm_approx block is predicted to add at each position: {variant: (T,)}"""
    norm, attn = block.attn_residual.norm, block.attn
    shape = attn.n_head, attn.n_kv_head, T
    c = bhyt.attention_gain(attn.wv.weight, attn.wo.weight, *shape)
    aware = bhyt.attention_gain(attn.wv.weight * norm.gain, attn.wo.weight, *shape)
    bounded, causal = hasattr(norm, "lam"), T / torch.arange(1, T + 1, device=c.device)
    spread = (norm.lam / norm.kappa) ** 2 if bounded else norm.gain.square().mean()
    paper, aware = (block.scale**2 * x.expand(T) for x in (c * spread, aware * spread if bounded else aware))
    return {"paper": paper, "gain aware": aware, "causal": paper * causal, "both": aware * causal}


@torch.no_grad()
def mlp_variance(mlp, gain, spread):
    """Mean square of an MLP's output features, were its inputs independent normals of variance spread * gain^2, and its
    hidden units uncorrelated (which they are not, relu's least of all: some percent)"""
    nodes, weights = (torch.tensor(v, dtype=torch.float32) for v in np.polynomial.hermite_e.hermegauss(32))

    def std(linear):
        return (spread * (linear.weight * gain).square().sum(1)).sqrt().cpu()  # of each hidden unit

    through = mlp.up if mlp.gate is None else mlp.gate
    hidden = (mlp.act(std(through)[:, None] * nodes).square() * weights).sum(1) / weights.sum()
    hidden = hidden if mlp.gate is None else hidden * std(mlp.up).square()
    return float((mlp.down.weight.square().sum(0).cpu() * hidden).sum() / mlp.down.out_features)


def recursion(model, start, rho):
    """The paper's Theorem 3.5: the variance before every MLP, where each sublayer adds some a, between the bounds of a
    norm's output (for inputs below kappa standard deviations). rho: how what is added correlates with the stream"""

    def grow(v, a, rho):
        return v + a + 2 * rho * math.sqrt(v * a)

    grown = {"least": [], "most": []}
    for bound, values in grown.items():
        v = start
        for b, block in enumerate(model.blocks):
            norms = (block.attn_residual.norm, block.mlp_residual.norm)
            spreads = [(float(n.lam) / n.kappa if bound == "most" else math.tanh(n.lam) / n.kappa) ** 2 for n in norms]
            added = added_variance(block, model.config.block_size)["gain aware"][0] * spreads[0]
            v = grow(v, float(added / (norms[0].lam / norms[0].kappa) ** 2), rho[2 * b])
            values.append(v)
            v = grow(v, block.scale**2 * mlp_variance(block.mlp, norms[1].gain, spreads[1]), rho[2 * b + 1])
    return grown


@torch.no_grad()
def variance(model, batches):
    """The mean square of a token's stream before the MLP, against its prediction, block by block. For BHyT also, norm
    by norm, the share of inputs beyond lambda, the variance of the output between its bounds, and the recursion."""
    parts, of_norms, n = [], torch.zeros(3, 2 * model.config.n_layer), sum(len(x) for x, _ in batches)
    for x, _ in batches:
        squares = []
        for i, (sublayer, residual, _, before, stream) in enumerate(walk(model, x)):
            v = before.x.square().mean(-1, keepdim=True)
            if isinstance(sublayer, Attention):
                squares.append(torch.stack([v[..., 0], stream.x.square().mean(-1)]))
            if isinstance(residual.norm, bhyt.BoundedTanh):
                known = v if before.lane is None else before.lane  # predicted, before the MLP of bhyt
                z, kappa = before.x * torch.rsqrt(known + residual.norm.eps), residual.norm.kappa
                out = torch.tanh(residual.norm.lam / kappa * z)
                rho = F.cosine_similarity(before.x, stream.x - before.x, dim=-1).mean()
                of_norm = torch.stack([(z.abs() > kappa).float().mean(), out.square().mean(), rho])
                of_norms[:, i] += of_norm.cpu() * len(x)
        parts.append(torch.stack(squares))  # (n_layer, 2, B, T)
    before, behind = torch.cat(parts, dim=2).double().unbind(1)
    report = {"measured": behind.mean((1, 2)).tolist()}
    added = [added_variance(block, x.size(1)) for block in model.blocks]
    for variant in added[0]:
        predicted = before + torch.stack([a[variant] for a in added])[:, None]
        fits = [fit(p.flatten(), m.flatten()) for p, m in zip(predicted, behind)]
        report[variant] = {"predicted": predicted.mean((1, 2)).tolist(), **{k: [f[k] for f in fits] for k in fits[0]}}
    norms = [norm for block in model.blocks for norm in (block.attn_residual.norm, block.mlp_residual.norm)]
    if isinstance(norms[0], bhyt.BoundedTanh):
        report["saturated"], report["output"], report["rho"] = (of_norms / n).tolist()
        report["output, at most"] = [(float(norm.lam) / norm.kappa) ** 2 for norm in norms]
        report["output, at least"] = [(math.tanh(norm.lam) / norm.kappa) ** 2 for norm in norms]
        if not model.config.moe_experts:
            report["recursion"] = recursion(model, float(before[0].mean()), report["rho"])
    return report


# ---------------------------------------------------------------------------------------------------------------------
# Mixture of Depths


@torch.no_grad()
def skipping(model, batches, ids):
    """Who skips what under the causal rule: the share that skips each sublayer that has a router, and for one text
    which of its tokens ran where"""

    def runs(x):
        chosen = []
        for i, (_, residual, h, before, _) in enumerate(walk(model, x)):
            block = model.blocks[i // 2]
            router = (block.attn_router, block.mlp_router)[i % 2]
            if router is not None:
                chosen.append(router.choose(router.score(h, before, residual, block.scale))[1])
        return torch.stack(chosen)  # (routers, B, T)

    n = sum(len(x) for x, _ in batches)
    skipped = sum((~runs(x)).float().mean((1, 2)) * (len(x) / n) for x, _ in batches)
    where = [f"{kind} {b}" for b, block in enumerate(model.blocks) for kind in ("attn", "mlp")
             if getattr(block, kind + "_router") is not None]  # fmt: skip
    map_of = runs(torch.tensor([ids], device=batches[0][0].device))[:, 0].int().tolist()
    report = {"skipped": skipped.tolist(), "rate": float(skipped.mean())}
    return report | {"where": where, "tokens": ids, "map": map_of}
