"""
Mixture of Depths on NAG, 8 blocks of width 128 on the embedded corpus: which router loses least at which rate?

    python runs/mod_v_dense.py table      both routers and a random one, rates 0.2 and 0.4, and the dense model
    python runs/mod_v_dense.py settings   what could make NAG's geometry the better router, at rate 0.4
"""

import sys

from sweep import sweep, table

COMMON = "--max_iters=500 --device=cpu --save_interval=100 --log_interval=10 --eval_tokens=65536".split()
LOOK = ["--what=mod", "--depth_tokens=8192", "--batch_size=8"]


def skipping(rate, router, *more):
    return ["--mod_on=both", f"--mod_rate={rate}", f"--mod_router={router}", *more]


TABLE = {"dense": []} | {
    f"{router}_{rate}": skipping(rate, router) for rate in (0.2, 0.4) for router in ("nag", "learned")
}
TABLE |= {"random_0.4": skipping(0.4, "random")}
SETTINGS = {
    "layer": skipping(0.4, "nag", "--mod_budget=layer"),
    "learned_layer": skipping(0.4, "learned", "--mod_budget=layer"),
    "no_fallback": skipping(0.4, "nag", "--mod_fallback=False"),
    "one_direction": skipping(0.4, "nag", "--nag_directions=1"),
    "four_directions": skipping(0.4, "nag", "--nag_directions=4"),
    "gates_3x": skipping(0.4, "nag", "--gate_lr=1.2e-2"),
    "four_and_3x": skipping(0.4, "nag", "--nag_directions=4", "--gate_lr=1.2e-2"),
    "inner_blocks": skipping(0.4, "nag", "--mod_blocks=inner"),
}
variants, seeds = {"table": (TABLE, [1, 2, 3]), "settings": (SETTINGS, [1])}[sys.argv[1]]
then = LOOK if sys.argv[1] == "settings" else []
table(sweep(f"mod_{sys.argv[1]}", variants, [4e-3], seeds, COMMON, then))
