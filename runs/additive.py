"""
The additive family, deep and narrow, on the embedded corpus: 16 blocks of width 64, 250 steps of 2048 bytes.

    python runs/additive.py      half an hour on 2 cores; prints the table of README
"""

from sweep import sweep, table

modes = ["none", "postnorm", "prenorm", "perinorm", "lns", "dyt"]
losses = sweep(
    "additive",
    {mode: [f"--residual={mode}"] for mode in modes},
    learning_rates=[1e-3, 3e-3, 1e-2],
    seeds=[1, 2, 3],
    common="--n_layer=16 --n_embd=64 --n_head=1 --init_scale=0.07 --max_iters=250 --device=cpu --compile=False "
    "--eval_interval=50 --eval_tokens=32768 --log_interval=10".split(),
    then=["--what=depth", "--batch_size=8"],
)
table(losses)
