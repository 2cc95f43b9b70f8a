"""
How well do bhyt and prenorm_approx predict the variance before each MLP?

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
from bhyt import RESIDUALS
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


@torch.no_grad()
def measure(model, batches):
    """Measured and predicted variance before each MLP, and R2: lists by block."""
    parts = []
    for x, _ in batches:
        before_mlp = [s for sublayer, *_, s in walk(model, x) if isinstance(sublayer, Attention)]
        pairs = [(s.x.square().mean(-1), s.lane[..., 0]) for s in before_mlp]
        parts.append(torch.stack([torch.stack(pair) for pair in pairs]))  # (n_layer, 2, B, T)
    measured, predicted = torch.cat(parts, dim=2).double().unbind(1)
    both = {"measured": measured, "predicted": predicted}
    means = {name: of.mean((1, 2)).tolist() for name, of in both.items()}
    return means | {"R2": [r2(*of_block) for of_block in zip(predicted, measured)]}


def main():
    configure(globals(), argv=sys.argv[1:])
    state, model = load_model(out_dir)
    name = model.config.residual
    predict = [mode for mode, of in RESIDUALS.items() if of.predicts]
    if name not in predict:
        modes = ", ".join(predict)
        raise SystemExit(f"residual={name!r} predicts no variance: give a run of {modes}")
    windows = Windows(data_dir or state["settings"]["data_dir"], "val", model.config.block_size)
    batches = list(eval_batches(windows, spread(windows, tokens), 1, "cpu"))
    report = measure(model, batches)
    print(f"R2 {statistics.mean(report['R2']):.2f}")
    write_json(os.path.join(out_dir, "variance.json"), report)


if __name__ == "__main__":
    main()
