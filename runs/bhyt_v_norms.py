"""
BHyT among the norms, 16 blocks of width 128 on the embedded corpus, 250 steps of 2048 bytes, 500 in the table.

    python runs/bhyt_v_norms.py table       seven modes, the best learning rate of each with three seeds
    python runs/bhyt_v_norms.py refresh     c refreshed every step, every 100 steps, never, and computed otherwise
    python runs/bhyt_v_norms.py stability   DyT, BHyT and RMSNorm over a factor of 30 in the learning rate
"""

import sys

from sweep import sweep, table

COMMON = ["config/bhyt_16x128.py", "--device=cpu", "--save_interval=100", "--log_interval=10", "--eval_tokens=65536"]
LOOK = ["--what=depth", "--depth_tokens=4096", "--batch_size=8"]
MODES = ["prenorm", "prenorm_approx", "bhyt", "bhyt_exact", "perinorm", "lns", "dyt"]
UNIT = ["--residual=bhyt", "--bhyt_unit=True", "--bhyt_gain_aware=True"]
BHYT = {"gain_aware": ["--bhyt_gain_aware=True"], "causal": ["--bhyt_causal=True"], "unit": UNIT}

jobs = {
    "table": lambda: sweep(
        "bhyt",
        {mode: [f"--residual={mode}", "--max_iters=500"] for mode in MODES} | {"bhyt_unit": [*UNIT, "--max_iters=500"]},
        [2e-3, 4e-3, 8e-3, 16e-3],
        [1, 2, 3],
        COMMON,
        LOOK,
    ),
    "refresh": lambda: sweep(
        "bhyt_refresh",
        {f"every_{interval}": [f"--bhyt_interval={interval}"] for interval in (1, 100, 1000)} | BHYT,
        [4e-3],
        [1, 2, 3],
        COMMON,
        ["--what=variance", "--depth_tokens=8192", "--batch_size=8"],
    ),
    "stability": lambda: sweep(
        "bhyt_stability",
        {mode: [f"--residual={mode}"] for mode in ("prenorm", "bhyt", "dyt")} | {"bhyt_unit": UNIT},
        [1e-3, 3e-3, 1e-2, 3e-2],
        [1],
        COMMON,
        LOOK,
    ),
}
table(jobs[sys.argv[1]]())
