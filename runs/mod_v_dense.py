"""
Compare routers of a mixture of depths, in 8 blocks of width 128.

    python runs/mod_v_dense.py settings    tune each router at rate 0.4 with one seed
    python runs/mod_v_dense.py table       tuned routers at rates 0.2 and 0.4 with 3 seeds
    python runs/mod_v_dense.py isoflop     train with the FLOPs of 516 dense steps at each rate
    python runs/mod_v_dense.py rates       requested and measured skip rates, 4 blocks, 2000 steps
"""

import json
import statistics
import sys

from sweep import COMMON, ROOT, final_loss, sweep, table

RATES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)


def skipping(rate, router, *more):
    return ["--mod_on=both", f"--mod_rate={rate}", f"--mod_router={router}", *more]


def gates(directions, times):
    """Directions of NAG's modulator, and the learning rate of the gates over that of the rest."""
    return [f"--nag_directions={directions}", f"--gate_lr={times * 4e-3}"]


def look(variant):
    return [] if "dense" in variant else ["--what=mod", "--depth_tokens=65536", "--batch_size=8"]


PRENORM = "--residual=prenorm"
ROUTERS = {
    "nag": skipping(0.4, "nag", "--mod_fallback=True"),
    "no_fallback": skipping(0.4, "nag", "--mod_fallback=False"),
    "learned": skipping(0.4, "learned"),
}
SETTINGS = {  # the same grid for each router; "dense" also tunes the random router
    f"{router}_{directions}_{times}x": [*args, *gates(directions, times)]
    for router, args in ({"dense": []} | ROUTERS).items()
    for directions in (1, 4, 32)
    for times in (1, 3)
}
for times in (1, 3):
    gate_lr = f"--gate_lr={times * 4e-3}"
    SETTINGS[f"prenorm_learned_{times}x"] = skipping(0.4, "learned", PRENORM, gate_lr)
for change in ("budget=layer", "blocks=inner"):
    SETTINGS[f"nag_{change}"] = [*ROUTERS["nag"], f"--mod_{change}", *gates(4, 3)]
    SETTINGS[f"learned_{change}"] = skipping(0.4, "learned", f"--mod_{change}", *gates(4, 3))
    args = (PRENORM, f"--mod_{change}", "--gate_lr=1.2e-2")
    SETTINGS[f"prenorm_learned_{change}"] = skipping(0.4, "learned", *args)


def tuned(router, rate=0.4):
    """A router's best arguments in the settings study, with mod_rate set to rate.

    blocks=inner is left out, because it skips less.
    """
    tried = {
        name: final_loss(ROOT / f"results/mod_settings/{name}-0.004-1")
        for name in SETTINGS
        if name.startswith(router + "_") and "blocks" not in name
    }
    if None in tried.values():
        first = "python runs/mod_v_dense.py settings"
        raise SystemExit(f"some settings of {router} have not run: run {first} first")
    args = SETTINGS[min(tried, key=tried.get)]
    return args if router == "dense" else [*args, f"--mod_rate={rate}"]


def compared():
    variants = {"dense": tuned("dense"), "prenorm_dense": [PRENORM]}
    for rate in (0.2, 0.4):
        for router in (*ROUTERS, "prenorm_learned"):
            variants[f"{router}_{rate}"] = tuned(router, rate)
        variants[f"random_{rate}"] = [*skipping(rate, "random"), *tuned("dense")]
    for on in ("attention", "mlp"):
        for router in ROUTERS:
            variants[f"{router}_{on}_0.4"] = [*tuned(router), f"--mod_on={on}"]
    return variants


def skipped(name, variant):
    """The share of validation tokens that a variant skips, averaged over its runs."""
    files = (ROOT / f"results/{name}").glob(f"{variant}-0.004-*/eval.json")
    return statistics.mean(json.load(open(file))["mod"]["rate"] for file in files)


def spent(name, variant):
    """Training FLOPs of a variant, averaged over its runs."""
    logs = (ROOT / f"results/{name}").glob(f"{variant}-0.004-*/log.jsonl")
    return statistics.mean(json.loads(log.read_text().splitlines()[-1])["flops"] for log in logs)


def settings():
    table(sweep("mod_settings", SETTINGS, [4e-3], [1], [*COMMON, "--max_iters=250"], look))


def routers():
    variants = compared()
    table(sweep("mod_table", variants, [4e-3], [1, 2, 3], [*COMMON, "--max_iters=500"], look))
    print("| variant | skipped | training FLOPs |\n|---|---|---|")
    for variant in variants:
        share = f"{skipped('mod_table', variant):.3f}" if look(variant) else "0"
        flops = spent("mod_table", variant) / spent("mod_table", "dense")
        print(f"| {variant} | {share} | {flops:.3f} |")


def isoflop():
    variants = {"dense": tuned("dense"), "dense_6_blocks": [*tuned("dense"), "--n_layer=6"]}
    for rate in (0.1, 0.2, 0.25, 0.3, 0.4):
        variants[f"rate_{rate}"] = tuned("no_fallback", rate)
    table(sweep("isoflop", variants, [4e-3], [1, 2, 3], [*COMMON, "--flops_budget=1.19e13"], look))


def rates():
    small, both = [*COMMON, "--n_layer=4", "--n_embd=64", "--max_iters=2000"], ("nag", "learned")
    variants = {f"{router}_{rate}": skipping(rate, router) for rate in RATES for router in both}
    sweep("mod_rates", variants, [4e-3], [1], small, look)
    print("| requested | nag skips | learned skips |\n|---|---|---|")
    for rate in RATES:
        shares = [skipped("mod_rates", f"{router}_{rate}") for router in both]
        print(f"| {rate} | {shares[0]:.3f} | {shares[1]:.3f} |")


{"settings": settings, "table": routers, "isoflop": isoflop, "rates": rates}[sys.argv[1]]()
