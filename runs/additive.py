"""
The additive family on the embedded corpus: 16 blocks of width 128, 500 steps of 2048 tokens.

    python runs/additive.py      two and a half hours on one core, less on more; prints the table of README
"""

from sweep import sweep, table

modes = ["none", "postnorm", "prenorm", "perinorm", "lns", "dyt"]
losses = sweep(
    "additive",
    {mode: [f"--residual={mode}"] for mode in modes},
    learning_rates=[1e-3, 3e-3, 1e-2],
    seeds=[1, 2, 3],
    common=["--n_layer=16", "--max_iters=500", "--log_interval=25", "--save_interval=100", "--device=cpu"],
    then=["--what=depth", "--batch_size=8"],
)
table(losses)
