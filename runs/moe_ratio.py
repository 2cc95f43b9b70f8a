"""
Experts from wide to deep, with the same parameters and the same active ones: does NAG lead by more where it is deeper?

    python runs/moe_ratio.py      five ratios of width over depth, 250 steps of 2048 bytes on the embedded corpus
"""

from sweep import sweep, table

EXPERTS = "--n_head=4 --init_scale=0.04 --activation=swiglu --moe_experts=8 --moe_top_k=2 --moe_rate=1e-2".split()
SHAPES = {  # width over depth: (n_layer, n_embd, n_hidden); 8.3e6 parameters within 2%, 2.8e6 active within 2.5%
    80: (3, 248, 424), 60: (4, 232, 328), 40: (5, 200, 312), 30: (6, 184, 280), 20: (8, 160, 240),
}  # fmt: skip
COMMON = (
    "--max_iters=250 --device=cpu --save_interval=100 --log_interval=10 --eval_tokens=65536".split()
)
shapes = {
    f"{mode}_{ratio}": [
        *EXPERTS,
        f"--n_layer={layers}",
        f"--n_embd={width}",
        f"--n_hidden={hidden}",
        f"--residual={mode}",
    ]
    for ratio, (layers, width, hidden) in SHAPES.items()
    for mode in ("prenorm", "nag")
}
table(sweep("moe_ratio", shapes, [2e-3, 4e-3], [1, 2, 3], COMMON))
