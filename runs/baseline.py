"""
Is the baseline a straw man? prenorm at nanoGPT's byte-level CPU shape, 300 steps of 4096 tokens, three learning rates.

    python runs/baseline.py      half an hour on two cores
"""

from sweep import sweep, table

losses = sweep(
    "baseline",
    {"prenorm": []},
    learning_rates=[2e-3, 4e-3, 1e-3],
    seeds=[1],
    common=["config/byte_6x384.py", "--residual=prenorm", "--log_interval=25", "--save_interval=50", "--device=cpu"],
)
table(losses)
