"""
BHyT's theory beside measurements, for a trained bhyt, bhyt_exact or prenorm_approx (arXiv 2601.09719).

    python runs/bhyt_theory.py --out_dir=out/bhyt      prints tables; writes variance.json and two figures to out_dir

predicted.png: the variance before each MLP, as measured, as bhyt.py predicts it (Theorem 3.4), and between the bounds
of the recursion (Theorem 3.5). bounded.png: the variance of each tanh's output, between its bounds (Lemma B.2).
"""

import math
import os
import sys

import numpy as np
import torch
import torch.nn.functional as F

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from attention import Attention  # noqa: E402
from bhyt import RESIDUALS, BoundedTanh, attention_gain  # noqa: E402
from configurator import configure  # noqa: E402
from data import Windows, eval_batches, spread, write_json  # noqa: E402
from depth import walk  # noqa: E402
from lora import load_model  # noqa: E402

out_dir = "out"  # the run; its newest checkpoint is read
data_dir: str | None = None  # shards with a val split; None: those it was trained on
tokens = 16384  # of validation text, evenly spaced over the split


def fit(predicted, measured):
    """How well one vector predicts another."""
    error = (predicted - measured).square().mean()
    ranks = [x.argsort().argsort().double() for x in (predicted, measured)]
    pearson, spearman = (
        torch.corrcoef(torch.stack([*pair]))[0, 1] for pair in ((predicted, measured), ranks)
    )
    r2 = 1 - error / measured.var(correction=0)
    return {
        "RMSE": float(error.sqrt()),
        "R2": float(r2),
        "Pearson": float(pearson),
        "Spearman": float(spearman),
    }


def added_variance(block, T, gain_aware):
    """What the attention of a block is predicted to add to the variance (Theorem 3.4), with or without the gain."""
    residual, attn = block.attn_residual, block.attn
    w_v = attn.wv.weight * residual.norm.gain if gain_aware else attn.wv.weight
    c = attention_gain(w_v, attn.wo.weight, attn.n_head, attn.n_kv_head, T)
    return block.scale**2 * c * norm_variance(residual.norm)


def bounded(residual):
    return isinstance(residual.norm, BoundedTanh)


def norm_variance(norm):
    """The variance of a norm's output before its gain; of a bounded tanh, the upper bound."""
    return (
        (norm.lam / norm.kappa) ** 2 if isinstance(norm, BoundedTanh) else norm.gain.square().mean()
    )


@torch.no_grad()
def mlp_variance(mlp, gain, spread):
    """Mean square of an MLP's output, for inputs that are independent normals of variance spread * gain^2.

    Hidden units count as uncorrelated. They are not, and least so with relu: some percent. The expectation over a
    normal is Gauss-Hermite quadrature.
    """
    nodes, weights = (
        torch.tensor(v, dtype=torch.float32) for v in np.polynomial.hermite_e.hermegauss(32)
    )

    def std(linear):
        return (spread * (linear.weight * gain).square().sum(1)).sqrt().cpu()  # of each hidden unit

    activated = mlp.up if mlp.gate is None else mlp.gate
    hidden = (mlp.act(std(activated)[:, None] * nodes).square() * weights).sum(1) / weights.sum()
    hidden = hidden if mlp.gate is None else hidden * std(mlp.up).square()
    return float((mlp.down.weight.square().sum(0).cpu() * hidden).sum() / mlp.down.out_features)


def grow(v, added, rho):
    """The variance of x + f, where rho is the correlation of the two."""
    return v + added + 2 * rho * math.sqrt(v * added)


@torch.no_grad()
def recursion(model, start, rho):
    """Theorem 3.5: the variance before every MLP, for the least and the most that a norm's output can have."""
    grown = {"least": [], "most": []}
    for bound, values in grown.items():
        v = start
        for b, block in enumerate(model.blocks):
            first, second = block.attn_residual.norm, block.mlp_residual.norm
            shares = [
                1.0 if bound == "most" else float(torch.tanh(n.lam) / n.lam) ** 2
                for n in (first, second)
            ]
            added = float(added_variance(block, model.config.block_size, gain_aware=True))
            v = grow(v, added * shares[0], rho[2 * b])
            values.append(v)
            out = mlp_variance(block.mlp, second.gain, float(norm_variance(second)) * shares[1])
            v = grow(v, block.scale**2 * out, rho[2 * b + 1])
    return grown


@torch.no_grad()
def measure(model, batches):
    """The variance before each MLP, measured and predicted; for BHyT also what its norms put out, and the theory."""
    parts, of_norms, n = (
        [],
        torch.zeros(3, 2 * model.config.n_layer),
        sum(len(x) for x, _ in batches),
    )
    for x, _ in batches:
        squares = []
        for i, (sublayer, residual, _, before, after) in enumerate(walk(model, x)):
            v = before.x.square().mean(-1, keepdim=True)
            if isinstance(sublayer, Attention):
                squares.append(torch.stack([v[..., 0], after.x.square().mean(-1)]))
            if bounded(residual):
                norm = residual.norm
                known = (
                    v if before.lane is None else before.lane
                )  # predicted, before the MLP of bhyt
                z = before.x * torch.rsqrt(known + norm.eps)
                out = torch.tanh(norm.lam / norm.kappa * z)
                rho = F.cosine_similarity(before.x, after.x - before.x, dim=-1).mean()
                saturated = (z.abs() > norm.kappa).float().mean()
                of_norms[:, i] += torch.stack([saturated, out.square().mean(), rho]).cpu() * len(x)
        parts.append(torch.stack(squares))  # (n_layer, 2, B, T)
    before, after = torch.cat(parts, dim=2).double().unbind(1)
    T, gain_aware = model.config.block_size, model.config.bhyt_unit
    added = torch.stack([added_variance(block, T, gain_aware) for block in model.blocks])
    predicted = before + added.view(-1, 1, 1)
    fits = [fit(p.flatten(), m.flatten()) for p, m in zip(predicted, after)]
    report = {"measured": after.mean((1, 2)).tolist(), "predicted": predicted.mean((1, 2)).tolist()}
    report |= {key: [f[key] for f in fits] for key in fits[0]}
    if bounded(model.blocks[0].attn_residual):
        norms = [
            norm
            for block in model.blocks
            for norm in (block.attn_residual.norm, block.mlp_residual.norm)
        ]
        report["saturated"], report["output"], report["rho"] = (of_norms / n).tolist()
        report["output, at most"] = [float(norm.lam / norm.kappa) ** 2 for norm in norms]
        report["output, at least"] = [
            float(torch.tanh(norm.lam) / norm.kappa) ** 2 for norm in norms
        ]
        if not model.config.moe_experts:
            report["recursion"] = recursion(model, float(before[0].mean()), report["rho"])
    return report


def draw(report, name):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(report["measured"], label="measured")
    axes.plot(report["predicted"], "--", label="predicted")
    if "recursion" in report:
        least, most = report["recursion"]["least"], report["recursion"]["most"]
        axes.fill_between(range(len(least)), least, most, color="0.8", label="recursion")
    axes.set(xlabel="block", ylabel="variance before the MLP", yscale="log", title=name)
    axes.legend(frameon=False)
    figure.savefig(os.path.join(out_dir, "predicted.png"), dpi=150)
    if "output" not in report:
        return
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for first, kind, mark in ((0, "attention", "o"), (1, "MLP", "s")):
        measured, least, most = (
            report[k][first::2] for k in ("output", "output, at least", "output, at most")
        )
        axes.fill_between(
            range(len(least)), least, most, color=("0.85", "0.7")[first], label=f"{kind}: bounds"
        )
        axes.plot(measured, mark + "-", label=f"{kind}: measured")
    axes.set(xlabel="block", ylabel="variance of the tanh's output", yscale="log", title=name)
    axes.legend(frameon=False)
    figure.savefig(os.path.join(out_dir, "bounded.png"), dpi=150)


def main():
    configure(globals(), argv=sys.argv[1:])
    state, model = load_model(out_dir)
    name = model.config.residual
    if name not in RESIDUALS:
        raise SystemExit(
            f"residual={name!r} predicts no variance: give a run of {', '.join(RESIDUALS)}"
        )
    windows = Windows(data_dir or state["settings"]["data_dir"], "val", model.config.block_size)
    batches = [(x, y) for x, y in eval_batches(windows, spread(windows, tokens), 1, "cpu")]
    report = measure(model, batches)
    for key in ("RMSE", "R2", "Pearson", "Spearman"):
        print(f"{key} {sum(report[key]) / len(report[key]):.4g}")
    if "saturated" in report:
        print(f"inputs beyond lambda: {max(report['saturated']):.3%} at most")
    write_json(os.path.join(out_dir, "variance.json"), report)
    draw(report, name)


if __name__ == "__main__":
    main()
