"""
Experts from wide to deep, with the same parameters and the same active ones: does NAG lead by more where it is deeper?

    python runs/moe_ratio.py      five ratios of width over depth, 250 steps of 2048 bytes on the embedded corpus
"""

from sweep import sweep, table

COMMON = "--max_iters=250 --device=cpu --save_interval=100 --log_interval=10 --eval_tokens=65536".split()
shapes = {
    f"{mode}_{ratio}": ["config/moe_tiny.py", f"config/moe_tiny_{ratio}.py", f"--residual={mode}"]
    for ratio in (80, 60, 40, 30, 20)
    for mode in ("prenorm", "nag")
}
table(sweep("moe_ratio", shapes, [2e-3, 4e-3], [1, 2, 3], COMMON))
