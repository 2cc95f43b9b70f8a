"""
Every residual mode once: is one of them broken? 8 blocks of width 64, 1,000 steps of 2048 bytes.

    python runs/rivals.py    prints a table

One seed and three learning rates: too little to say which mode is better.
"""

from sweep import sweep, table

MODES = "none postnorm prenorm perinorm lns dyt deepnorm rezero mixln x0mix nag orthogonal bhyt "
MODES += "bhyt_exact prenorm_approx ngpt hc mhc attnres attnres_block"
COMMON = "config/plain.py --n_embd=64 --max_iters=1000 --device=cpu "
COMMON += "--eval_interval=250 --log_interval=25"
EXTRA = {
    "ngpt": ["--weight_decay=0.0", "--warmup_iters=0"],  # as in its paper
    "attnres": ["--compile=False"],  # many graphs: compilation would take longer than training
    "attnres_block": ["--compile=False"],
}

variants = {mode: [f"--residual={mode}", *EXTRA.get(mode, [])] for mode in MODES.split()}
table(sweep("rivals", variants, [8e-3, 4e-3, 1.6e-2], [1], COMMON.split()))
