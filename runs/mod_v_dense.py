"""
Mixture of Depths, 8 blocks of width 128 on the embedded corpus: which router loses least at which rate?

    python runs/mod_v_dense.py settings   rate 0.4: directions of the modulator, rate of the gates, budget, blocks
    python runs/mod_v_dense.py table      routers, rates 0.2 and 0.4, three seeds
    python runs/mod_v_dense.py rates      4 blocks of width 64, 2000 steps: does the causal rule skip what it was asked?
"""

import json
import sys

from sweep import ROOT, sweep, table

COMMON = "--device=cpu --save_interval=100 --log_interval=10 --eval_tokens=65536".split()
LOOK = ["--what=mod", "--depth_tokens=65536", "--batch_size=8"]


def skipping(rate, router, *more, on="both"):
    return [f"--mod_on={on}", f"--mod_rate={rate}", f"--mod_router={router}", *more]


ROUTERS = {  # each is tuned on the same grid
    "dense": [],
    "nag": skipping(0.4, "nag"),
    "no_fallback": skipping(0.4, "nag", "--mod_fallback=False"),
    "learned": skipping(0.4, "learned"),
}
SETTINGS = {
    f"{router}_{directions}_{times}x": [*args, f"--nag_directions={directions}", f"--gate_lr={times * 4e-3}"]
    for router, args in ROUTERS.items()
    for directions in (1, 4, 32)
    for times in (1, 3)
}
SETTINGS |= {
    "nag_layer": skipping(0.4, "nag", "--mod_budget=layer"),
    "learned_layer": skipping(0.4, "learned", "--mod_budget=layer"),
    "nag_inner": skipping(0.4, "nag", "--mod_blocks=inner"),
    "learned_inner": skipping(0.4, "learned", "--mod_blocks=inner"),
    "prenorm_learned_3x": skipping(0.4, "learned", "--residual=prenorm", "--gate_lr=1.2e-2"),
}


def compared():
    variants = {"dense": [], "prenorm_dense": ["--residual=prenorm"]}
    for rate in (0.2, 0.4):
        variants |= {
            f"nag_{rate}": skipping(rate, "nag"),
            f"no_fallback_{rate}": skipping(rate, "nag", "--mod_fallback=False"),
            f"learned_{rate}": skipping(rate, "learned"),
            f"random_{rate}": skipping(rate, "random"),
            f"prenorm_learned_{rate}": skipping(rate, "learned", "--residual=prenorm"),
        }
    for on in ("attention", "mlp"):
        variants |= {f"{router}_{on}_0.4": skipping(0.4, router, on=on) for router in ("nag", "learned")}
    return variants


def rates():
    """One line a rate: what validation tokens really skip, overall"""
    asked, small = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), ["--n_layer=4", "--n_embd=64", "--max_iters=2000"]
    variants = {f"{router}_{rate}": skipping(rate, router) for router in ("nag", "learned") for rate in asked}
    sweep("mod_rates", variants, [4e-3], [1], [*COMMON, *small], LOOK)
    print("| asked for | nag skips | learned skips |\n|---|---|---|")
    for rate in asked:
        runs = (ROOT / f"results/mod_rates/{router}_{rate}-0.004-1/eval.json" for router in ("nag", "learned"))
        print(f"| {rate} | " + " | ".join(f"{json.load(open(run))['mod']['rate']:.3f}" for run in runs) + " |")


if sys.argv[1] == "settings":
    table(sweep("mod_settings", SETTINGS, [4e-3], [1], [*COMMON, "--max_iters=250"], LOOK))
elif sys.argv[1] == "rates":
    rates()
else:
    table(sweep("mod_table", compared(), [4e-3], [1, 2, 3], [*COMMON, "--max_iters=500"], LOOK))
