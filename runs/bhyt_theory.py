"""
Compare BHyT's theory (arXiv 2601.09719) with a trained bhyt, bhyt_exact or prenorm_approx.

    python runs/bhyt_theory.py --out_dir=out/bhyt    prints means over the blocks

It writes variance.json and two figures to out_dir. predicted.png has the variance before each MLP:
measured, as predicted by bhyt.py (Theorem 3.4), and the bounds of the recursion (Theorem 3.5).
bounded.png has the variance of the output of each tanh, and its bounds (Lemma B.2).
"""

import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from attention import Attention
from bhyt import RESIDUALS, BoundedTanh, attention_gain
from checkpoint import load_model
from configurator import configure
from data import Windows, eval_batches, spread, write_json
from depth import walk

out_dir = "out"  # folder of the run; its newest checkpoint is read
data_dir: str | None = None  # folder with the shards; None: the one that the run was trained on
tokens = 16384  # validation tokens, evenly spaced over the split


def fit(predicted, measured):
    """How well one vector predicts another."""
    error = (predicted - measured).square().mean()
    correlation = lambda x, y: float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    ranks = [x.argsort().argsort().double() for x in (predicted, measured)]
    return {
        "RMSE": float(error.sqrt()),
        "R2": float(1 - error / measured.var(correction=0)),
        "Pearson": correlation(predicted, measured),
        "Spearman": correlation(*ranks),
    }


def added_variance(block, T, gain_aware):
    """The variance that the attention of a block adds to the stream, by Theorem 3.4.

    gain_aware includes the gain of the norm in W_V. T is the context length.
    """
    residual, attn = block.attn_residual, block.attn
    w_v = attn.wv.weight * residual.norm.gain if gain_aware else attn.wv.weight
    c = attention_gain(w_v, attn.wo.weight, attn.n_head, attn.n_kv_head, T)
    return block.scale**2 * c * norm_variance(residual.norm)


def norm_variance(norm):
    """The variance of a norm's output that the prediction assumes.

    For a bounded tanh it is the upper bound before the gain, for RMSNorm the mean square of the
    gain.
    """
    if isinstance(norm, BoundedTanh):
        return (norm.lam / norm.kappa) ** 2
    return norm.gain.square().mean()


@torch.no_grad()
def mlp_variance(mlp, gain, spread):
    """Mean square of an MLP's output, for independent normal inputs of variance spread * gain^2.

    It assumes uncorrelated hidden units. The error of this is a few percent, largest with relu.
    Gauss-Hermite quadrature gives the expectation over a normal distribution.
    """
    quadrature = np.polynomial.hermite_e.hermegauss(32)
    nodes, weights = (torch.tensor(v, dtype=torch.float32) for v in quadrature)

    def std(linear):  # (hidden units,)
        return (spread * (linear.weight * gain).square().sum(1)).sqrt().cpu()

    activated = mlp.up if mlp.gate is None else mlp.gate
    hidden = (mlp.act(std(activated)[:, None] * nodes).square() * weights).sum(1) / weights.sum()
    hidden = hidden if mlp.gate is None else hidden * std(mlp.up).square()
    return float((mlp.down.weight.square().sum(0).cpu() * hidden).sum() / mlp.down.out_features)


def grow(v, added, rho):
    """The variance of x + f from the variances v of x and added of f, and their correlation rho."""
    return v + added + 2 * rho * math.sqrt(v * added)


@torch.no_grad()
def recursion(model, start, rho):
    """Theorem 3.5: lower and upper bound of the variance before each MLP."""
    bounds = {"least": [], "most": []}
    for bound, values in bounds.items():
        v = start
        for b, block in enumerate(model.blocks):
            norms = block.attn_residual.norm, block.mlp_residual.norm
            shares = [1.0, 1.0]
            if bound == "least":
                shares = [float(torch.tanh(norm.lam) / norm.lam) ** 2 for norm in norms]
            added = float(added_variance(block, block.attn_residual.T, gain_aware=True))
            v = grow(v, added * shares[0], rho[2 * b])
            values.append(v)
            spread = float(norm_variance(norms[1])) * shares[1]
            out = mlp_variance(block.mlp, norms[1].gain, spread)
            v = grow(v, block.scale**2 * out, rho[2 * b + 1])
    return bounds


def tanh_moments(residual, before, after):
    """(share of saturated inputs, mean square of the tanh's output, correlation of x and update)"""
    norm = residual.norm
    v = before.x.square().mean(-1, keepdim=True) if before.lane is None else before.lane
    z = before.x * torch.rsqrt(v + norm.eps)
    out = torch.tanh(norm.lam / norm.kappa * z)
    rho = F.cosine_similarity(before.x, after.x - before.x, dim=-1).mean()
    return torch.stack([(z.abs() > norm.kappa).float().mean(), out.square().mean(), rho]).cpu()


@torch.no_grad()
def measure(model, batches):
    """Measured and predicted variance before each MLP. BHyT adds moments and bounds of its norms.

    Values are lists by block, or by sublayer for the norms.
    """
    parts, moments = [], torch.zeros(3, 2 * model.config.n_layer)
    for x, _ in batches:
        squares = []
        for i, (sublayer, residual, _, before, after) in enumerate(walk(model, x)):
            if isinstance(sublayer, Attention):
                squares.append(torch.stack([s.x.square().mean(-1) for s in (before, after)]))
            if isinstance(residual.norm, BoundedTanh):
                moments[:, i] += tanh_moments(residual, before, after) * len(x)
        parts.append(torch.stack(squares))  # (n_layer, 2, B, T)
    before, after = torch.cat(parts, dim=2).double().unbind(1)

    T, gain_aware = model.blocks[0].attn_residual.T, model.config.bhyt_unit
    added = torch.stack([added_variance(block, T, gain_aware) for block in model.blocks])
    predicted = before + added.view(-1, 1, 1)
    fits = [fit(p.flatten(), m.flatten()) for p, m in zip(predicted, after)]
    report = {"measured": after.mean((1, 2)).tolist(), "predicted": predicted.mean((1, 2)).tolist()}
    report |= {key: [f[key] for f in fits] for key in fits[0]}
    if not isinstance(model.blocks[0].attn_residual.norm, BoundedTanh):
        return report

    norms = [r.norm for block in model.blocks for r in (block.attn_residual, block.mlp_residual)]
    report["saturated"], report["output"], report["rho"] = (moments / before.size(1)).tolist()
    report["output, at most"] = [float(n.lam / n.kappa) ** 2 for n in norms]
    report["output, at least"] = [float(torch.tanh(n.lam) / n.kappa) ** 2 for n in norms]
    if not model.config.moe_experts:
        report["recursion"] = recursion(model, float(before[0].mean()), report["rho"])
    return report


def save(axes, ylabel, title, file):
    axes.set(xlabel="block", ylabel=ylabel, yscale="log", title=title)
    axes.legend(frameon=False)
    axes.figure.savefig(os.path.join(out_dir, file), dpi=150)


def draw(report, name):
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(report["measured"], label="measured")
    axes.plot(report["predicted"], "--", label="predicted")
    if "recursion" in report:
        least, most = report["recursion"]["least"], report["recursion"]["most"]
        axes.fill_between(range(len(least)), least, most, color="0.8", label="recursion")
    save(axes, "variance before the MLP", name, "predicted.png")
    if "output" not in report:
        return
    _, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for first, kind, mark, grey in ((0, "attention", "o", "0.85"), (1, "MLP", "s", "0.7")):
        keys = ("output", "output, at least", "output, at most")
        measured, least, most = (report[key][first::2] for key in keys)
        axes.fill_between(range(len(least)), least, most, color=grey, label=f"{kind}: bounds")
        axes.plot(measured, mark + "-", label=f"{kind}: measured")
    save(axes, "variance of the tanh's output", name, "bounded.png")


def main():
    configure(globals(), argv=sys.argv[1:])
    state, model = load_model(out_dir)
    name = model.config.residual
    if name not in RESIDUALS:
        modes = ", ".join(RESIDUALS)
        raise SystemExit(f"residual={name!r} predicts no variance: give a run of {modes}")
    windows = Windows(data_dir or state["settings"]["data_dir"], "val", model.config.block_size)
    batches = list(eval_batches(windows, spread(windows, tokens), 1, "cpu"))
    report = measure(model, batches)
    for key in ("RMSE", "R2", "Pearson", "Spearman"):
        print(f"{key} {sum(report[key]) / len(report[key]):.4g}")
    if "saturated" in report:
        print(f"inputs beyond lambda: {max(report['saturated']):.3%} at most")
    write_json(os.path.join(out_dir, "variance.json"), report)
    draw(report, name)


if __name__ == "__main__":
    main()
