"""
Compare BHyT's theory (arXiv 2601.09719) with a trained bhyt, bhyt_exact or prenorm_approx.

    python runs/bhyt_theory.py --out_dir=out/bhyt    prints means over the blocks

It writes variance.json to out_dir: the variance before each MLP, measured and as predicted by
bhyt.py (Theorem 3.4); for BHyT also the variance of each tanh's output and its bounds (Lemma B.2).
"""

import os
import sys

import torch

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from attention import Attention
from bhyt import KAPPA, RESIDUALS, BoundedTanh, attention_gain
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
    """What attention adds to the variance of the stream (Theorem 3.4). gain_aware: with W_V's gain.

    A tanh's output has at most this variance before its gain. RMSNorm's has its gain's mean square.
    """
    norm, attn = block.attn_residual.norm, block.attn
    w_v = attn.wv.weight * norm.gain if gain_aware else attn.wv.weight
    c = attention_gain(w_v, attn.wo.weight, attn.n_head, attn.n_kv_head, T)
    bounded = isinstance(norm, BoundedTanh)
    output = (norm.lam / KAPPA) ** 2 if bounded else norm.gain.square().mean()
    return block.scale**2 * c * output


def tanh_moments(residual, before):
    """(share of saturated inputs, mean square of the tanh's output)"""
    norm = residual.norm
    v = before.x.square().mean(-1, keepdim=True) if before.lane is None else before.lane
    z = before.x * torch.rsqrt(v + norm.eps)
    out = torch.tanh(norm.lam / KAPPA * z)
    return torch.stack([(z.abs() > KAPPA).float().mean(), out.square().mean()]).cpu()


@torch.no_grad()
def measure(model, batches):
    """Measured and predicted variance before each MLP. BHyT adds moments and bounds of its norms.

    Values are lists by block, or by sublayer for the norms.
    """
    parts, moments = [], torch.zeros(2, 2 * model.config.n_layer)
    for x, _ in batches:
        squares = []
        for i, (sublayer, residual, _, before, after) in enumerate(walk(model, x)):
            if isinstance(sublayer, Attention):
                squares.append(torch.stack([s.x.square().mean(-1) for s in (before, after)]))
            if isinstance(residual.norm, BoundedTanh):
                moments[:, i] += tanh_moments(residual, before) * len(x)
        parts.append(torch.stack(squares))  # (n_layer, 2, B, T)
    before, after = torch.cat(parts, dim=2).double().unbind(1)

    T, gain_aware = model.blocks[0].attn_residual.T, model.config.bhyt_unit
    added = torch.stack([added_variance(block, T, gain_aware) for block in model.blocks])
    predicted = before + added.view(-1, 1, 1)
    fits = [fit(p.flatten(), m.flatten()) for p, m in zip(predicted, after)]
    report = {"measured": after.mean((1, 2)).tolist(), "predicted": predicted.mean((1, 2)).tolist()}
    report |= {key: [f[key] for f in fits] for key in fits[0]}
    norms = [r.norm for block in model.blocks for r in (block.attn_residual, block.mlp_residual)]
    if isinstance(norms[0], BoundedTanh):
        report["saturated"], report["output"] = (moments / before.size(1)).tolist()
        report["output, at most"] = [float(n.lam / KAPPA) ** 2 for n in norms]
        report["output, at least"] = [float(torch.tanh(n.lam) / KAPPA) ** 2 for n in norms]
    return report


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


if __name__ == "__main__":
    main()
