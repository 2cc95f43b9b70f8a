"""
Is the baseline a straw man? prenorm at nanoGPT's byte-level CPU shape, 300 steps of 4096 tokens, two learning rates.

    python runs/baseline.py      a quarter of an hour on 2 cores
"""

from sweep import sweep, table

losses = sweep(
    "baseline",
    {"prenorm": []},
    learning_rates=[1e-3, 3e-3],
    seeds=[1],
    common=[
        "config/byte_6x384.py",
        "--residual=prenorm",
        "--log_interval=25",
        "--save_interval=50",
        "--device=cpu",
    ],
)
table(losses)
