"""
Mixtures of experts from wide to deep, with equal parameters: does NAG gain more in deep shapes?

    python runs/moe_ratio.py    five ratios of width over depth, 250 steps of 2048 bytes
"""

from sweep import COMMON, sweep, table

COMMON = [*COMMON, "--max_iters=250", "--n_head=4", "--init_scale=0.04", "--activation=swiglu"]
COMMON += ["--moe_experts=8", "--moe_top_k=2", "--moe_rate=1e-2"]
# {width over depth: (n_layer, n_embd, n_hidden)}: 8.3e6 parameters, 2.8e6 active, within 2.5%
SHAPES = {
    80: (3, 248, 424), 60: (4, 232, 328), 40: (5, 200, 312), 30: (6, 184, 280), 20: (8, 160, 240),
}  # fmt: skip

variants = {}
for ratio, (layers, width, hidden) in SHAPES.items():
    shape = [f"--n_layer={layers}", f"--n_embd={width}", f"--n_hidden={hidden}"]
    for mode in ("prenorm", "nag"):
        variants[f"{mode}_{ratio}"] = [*shape, f"--residual={mode}"]
table(sweep("moe_ratio", variants, [2e-3, 4e-3], [1, 2, 3], COMMON))
