"""
BHyT compared with other norms, in 16 blocks of width 128, 250 steps of 2048 bytes.

    python runs/bhyt_v_norms.py table      each mode at four learning rates, the best with 3 seeds
    python runs/bhyt_v_norms.py refresh    c refreshed in each step, or every 100 steps
"""

import json
import statistics
import sys

from sweep import COMMON, LOOK, ROOT, final_loss, sweep, table

sys.path.insert(0, str(ROOT))
from plot import reached

COMMON = [*COMMON, "--n_layer=16", "--max_iters=250"]
MODES = ["prenorm", "prenorm_approx", "bhyt", "bhyt_exact", "perinorm", "lns", "dyt"]


def compare():
    variants = {mode: [f"--residual={mode}"] for mode in MODES}
    variants["bhyt_unit"] = ["--residual=bhyt", "--bhyt_unit=True"]
    losses = sweep("bhyt", variants, [1e-3, 3e-3, 1e-2, 3e-2], [1, 2, 3], COMMON, LOOK)
    table(losses)
    runs = {}
    for mode, by_lr in losses.items():
        best = min(by_lr, key=lambda lr: by_lr[lr][0])
        runs[mode] = sorted((ROOT / "results/bhyt").glob(f"{mode}-{best:g}-*"))
    goal = max(map(final_loss, runs["prenorm"]))
    print(f"| mode | steps to {goal:.3f} | variance, last block over first |\n|---|---|---|")
    for mode, seeds in runs.items():
        steps = [step for run in seeds if (step := reached(run, goal, "step"))]
        missed = len(seeds) - len(steps)
        needed = f"{statistics.mean(steps):.0f}" if steps else "not reached"
        needed += f", not in {missed} of {len(seeds)}" if steps and missed else ""
        variances = [json.load(open(run / "eval.json"))["depth"]["variance"] for run in seeds]
        print(f"| {mode} | {needed} | {statistics.mean(v[-1] / v[1] for v in variances):.1f} |")


def refresh():
    variants = {f"every_{n}": ["--residual=bhyt", f"--bhyt_interval={n}"] for n in (1, 100)}
    table(sweep("bhyt_refresh", variants, [1e-2], [1, 2, 3], COMMON))


{"table": compare, "refresh": refresh}[sys.argv[1]]()
