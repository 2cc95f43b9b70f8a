"""
BHyT among the norms, 16 blocks of width 128 on the embedded corpus, 250 steps of 2048 bytes.

    python runs/bhyt_v_norms.py table      each mode over a factor of 30 in the learning rate, the best with three seeds
    python runs/bhyt_v_norms.py refresh    c refreshed every step and every 100 steps
"""

import json
import statistics
import sys

from sweep import ROOT, final_loss, sweep, table

sys.path.insert(0, str(ROOT))
from plot import reached  # noqa: E402

COMMON = "--n_layer=16 --max_iters=250 --device=cpu --save_interval=100 --log_interval=10 --eval_tokens=65536".split()
LOOK = ["--what=depth", "--depth_tokens=4096", "--batch_size=8"]
MODES = ["prenorm", "prenorm_approx", "bhyt", "bhyt_exact", "perinorm", "lns", "dyt"]
UNIT = ["--residual=bhyt", "--bhyt_unit=True"]

jobs = {
    "table": lambda: sweep(
        "bhyt",
        {mode: [f"--residual={mode}"] for mode in MODES} | {"bhyt_unit": UNIT},
        [1e-3, 3e-3, 1e-2, 3e-2],
        [1, 2, 3],
        COMMON,
        LOOK,
    ),
    "refresh": lambda: sweep(
        "bhyt_refresh",
        {f"every_{interval}": [f"--bhyt_interval={interval}"] for interval in (1, 100)},
        [1e-2],
        [1, 2, 3],
        COMMON,
    ),
}
losses = jobs[sys.argv[1]]()
table(losses)
if sys.argv[1] == "table":
    best = {mode: min(by_lr, key=lambda lr: by_lr[lr][0]) for mode, by_lr in losses.items()}
    runs = {
        mode: sorted((ROOT / "results/bhyt").glob(f"{mode}-{lr:g}-*")) for mode, lr in best.items()
    }
    goal = max(map(final_loss, runs["prenorm"]))
    print(f"| mode | steps to {goal:.3f} | variance, last block over first |\n|---|---|---|")
    for mode, seeds in runs.items():
        steps = [step for run in seeds if (step := reached(run, goal, "step"))]
        missed = (
            f", not in {len(seeds) - len(steps)} of {len(seeds)}" if len(steps) < len(seeds) else ""
        )
        needed = f"{statistics.mean(steps):.0f}{missed}" if steps else "not reached"
        variances = [json.load(open(run / "eval.json"))["depth"]["variance"] for run in seeds]
        print(f"| {mode} | {needed} | {statistics.mean(v[-1] / v[1] for v in variances):.1f} |")
