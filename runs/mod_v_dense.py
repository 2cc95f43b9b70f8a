"""
Mixture of Depths, 8 blocks of width 128 on the embedded corpus: which router loses least at which rate?

    python runs/mod_v_dense.py settings   rate 0.4: directions of the modulator, rate of the gates, budget, blocks
    python runs/mod_v_dense.py table      routers, each with the settings chosen there, rates 0.2 and 0.4, three seeds
    python runs/mod_v_dense.py isoflop    as many FLOPs as 500 dense steps: what is saved is spent on more of them
    python runs/mod_v_dense.py rates      4 blocks of width 64, 2000 steps: does the causal rule skip what it was asked?
"""

import json
import statistics
import sys

from sweep import ROOT, sweep, table

COMMON = "--device=cpu --save_interval=100 --log_interval=10 --eval_tokens=65536".split()
RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def skipping(rate, router, *more, on="both"):
    return [f"--mod_on={on}", f"--mod_rate={rate}", f"--mod_router={router}", *more]


def gates(directions, times):
    return [f"--nag_directions={directions}", f"--gate_lr={times * 4e-3}"]


def look(variant):
    return [] if "dense" in variant else ["--what=mod", "--depth_tokens=65536", "--batch_size=8"]


ROUTERS = {  # each is tuned on the same grid; the random one takes what is best without a router
    "dense": [],
    "nag": skipping(0.4, "nag"),
    "no_fallback": skipping(0.4, "nag", "--mod_fallback=False"),
    "learned": skipping(0.4, "learned"),
}
SETTINGS = {
    f"{router}_{directions}_{times}x": [*args, *gates(directions, times)]
    for router, args in ROUTERS.items()
    for directions in (1, 4, 32)
    for times in (1, 3)
}
PRENORM = "--residual=prenorm"
for times in (1, 3):
    SETTINGS[f"prenorm_learned_{times}x"] = skipping(0.4, "learned", PRENORM, f"--gate_lr={times * 4e-3}")
for change in ("budget=layer", "blocks=inner"):
    SETTINGS[f"nag_{change}"] = skipping(0.4, "nag", f"--mod_{change}", *gates(4, 3))
    SETTINGS[f"learned_{change}"] = skipping(0.4, "learned", f"--mod_{change}", *gates(4, 3))
    SETTINGS[f"prenorm_learned_{change}"] = skipping(0.4, "learned", PRENORM, f"--mod_{change}", "--gate_lr=1.2e-2")


best = {"dense": gates(4, 3), "nag": gates(4, 3), "no_fallback": gates(4, 3), "learned": gates(4, 3)}


def compared():
    variants = {"dense": best["dense"], "prenorm_dense": [PRENORM]}
    for rate in (0.2, 0.4):
        variants |= {
            f"nag_{rate}": skipping(rate, "nag", *best["nag"]),
            f"no_fallback_{rate}": skipping(rate, "nag", "--mod_fallback=False", *best["no_fallback"]),
            f"learned_{rate}": skipping(rate, "learned", *best["learned"]),
            f"random_{rate}": skipping(rate, "random", *best["dense"]),
            f"prenorm_learned_{rate}": skipping(rate, "learned", PRENORM),
        }
    for on in ("attention", "mlp"):
        variants |= {f"{r}_{on}_0.4": skipping(0.4, r, *best[r], on=on) for r in ("nag", "learned")}
    return variants


def skipped(name, variant):
    """What validation tokens really skip, the mean over the runs"""
    reports = (json.load(open(file))["mod"] for file in (ROOT / f"results/{name}").glob(f"{variant}-0.004-*/eval.json"))
    return statistics.mean(report["rate"] for report in reports)


if sys.argv[1] == "settings":
    table(sweep("mod_settings", SETTINGS, [4e-3], [1], [*COMMON, "--max_iters=250"], look))
elif sys.argv[1] == "table":
    table(sweep("mod_table", compared(), [4e-3], [1, 2, 3], [*COMMON, "--max_iters=500"], look))
    print("| variant | skipped |\n|---|---|")
    for variant in compared():
        print(f"| {variant} | {skipped('mod_table', variant):.3f} |" if look(variant) else f"| {variant} | 0 |")
elif sys.argv[1] == "isoflop":
    variants = {"dense": best["dense"]}
    for rate in (0.1, 0.2, 0.25, 0.3, 0.4):
        variants |= {f"{router}_{rate}": skipping(rate, router, *best[router]) for router in ("nag", "learned")}
    table(sweep("isoflop", variants, [4e-3], [1, 2, 3], [*COMMON, "--flops_budget=1.19e13"], look))
else:
    small = [*COMMON, "--n_layer=4", "--n_embd=64", "--max_iters=2000"]
    sweep("mod_rates", {f"{r}_{rate}": skipping(rate, r) for rate in RATES for r in ("nag", "learned")},
          [4e-3], [1], small, look)  # fmt: skip
    print("| asked | nag skips | learned skips |\n|---|---|---|")
    for rate in RATES:
        print(
            f"| {rate} | " + " | ".join(f"{skipped('mod_rates', f'{r}_{rate}'):.3f}" for r in ("nag", "learned")) + " |"
        )
