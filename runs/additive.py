"""
The additive modes in a deep and narrow shape: 16 blocks of width 64, 250 steps of 2048 bytes.

    python runs/additive.py    half an hour on 2 cores; prints a table of RESULTS.md
"""

from sweep import sweep, table

COMMON = "config/plain.py --n_layer=16 --n_embd=64 --n_head=1 --init_scale=0.07 --device=cpu "
COMMON += "--max_iters=250 --compile=False --eval_interval=50 --eval_tokens=32768 --log_interval=10"
MODES = ["none", "postnorm", "prenorm", "perinorm", "lns", "dyt"]
variants = {mode: [f"--residual={mode}"] for mode in MODES}
depth = ["--what=depth", "--batch_size=8"]
table(sweep("additive", variants, [1e-3, 3e-3, 1e-2], [1, 2, 3], COMMON.split(), depth))
