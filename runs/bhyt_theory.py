"""
How well do bhyt, bhyt_exact and prenorm_approx predict the variance before each MLP?

    python runs/bhyt_theory.py --out_dir=out/bhyt    prints the mean R2 of the blocks

It writes variance.json to out_dir: for each block the mean of the measured variances, that of the
variances predicted as in bhyt.py (Theorem 3.4 of arXiv 2601.09719), and R2 over tokens.
"""

import os
import statistics
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


def r2(predicted, measured):
    """The share of the variance of measured that predicted explains."""
    error = (predicted - measured).square().mean()
    return float(1 - error / measured.var(correction=0))


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


@torch.no_grad()
def measure(model, batches):
    """Measured and predicted variance before each MLP, and R2: lists by block."""
    parts = []
    for x, _ in batches:
        squares = []
        for sublayer, _, _, before, after in walk(model, x):
            if isinstance(sublayer, Attention):
                squares.append(torch.stack([s.x.square().mean(-1) for s in (before, after)]))
        parts.append(torch.stack(squares))  # (n_layer, 2, B, T)
    before, after = torch.cat(parts, dim=2).double().unbind(1)

    T, gain_aware = model.blocks[0].attn_residual.T, model.config.bhyt_unit
    added = torch.stack([added_variance(block, T, gain_aware) for block in model.blocks])
    predicted = before + added.view(-1, 1, 1)
    means = {"measured": after.mean((1, 2)).tolist(), "predicted": predicted.mean((1, 2)).tolist()}
    return means | {"R2": [r2(*of_block) for of_block in zip(predicted, after)]}


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
    print(f"R2 {statistics.mean(report['R2']):.2f}")
    write_json(os.path.join(out_dir, "variance.json"), report)


if __name__ == "__main__":
    main()
