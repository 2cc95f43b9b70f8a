"""
Check the baseline: pre-norm at nanoGPT's byte-level CPU shape, 300 steps of 4096 bytes.

    python runs/baseline.py    a quarter of an hour on 2 cores
"""

from sweep import sweep, table

COMMON = ["config/byte_6x384.py", "--log_interval=25", "--save_interval=50", "--device=cpu"]
table(sweep("baseline", {"prenorm": ["--residual=prenorm"]}, [1e-3, 3e-3], [1], COMMON))
