"""
BHyT among the norms, 16 blocks of width 128 on the embedded corpus, 250 steps of 2048 bytes.

    python runs/bhyt_v_norms.py table      each mode over a factor of 30 in the learning rate, the best with three seeds
    python runs/bhyt_v_norms.py refresh    c refreshed every step, every 100 steps, never, and computed otherwise
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
        {mode: [f"--residual={mode}"] for mode in MODES} | {"bhyt_unit": UNIT},
        [1e-3, 3e-3, 1e-2, 3e-2],
        [1, 2, 3],
        COMMON,
        LOOK,
    ),
    "refresh": lambda: sweep(
        "bhyt_refresh",
        {f"every_{interval}": [f"--bhyt_interval={interval}"] for interval in (1, 100, 1000)} | BHYT,
        [3e-3],
        [1, 2, 3],
        COMMON,
        ["--what=variance", "--depth_tokens=8192", "--batch_size=8"],
    ),
}
table(jobs[sys.argv[1]]())
