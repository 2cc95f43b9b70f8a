"""
Mixture of Depths, 8 blocks of width 128 on the embedded corpus: which router loses least at which rate?

    python runs/mod_v_dense.py settings   rate 0.4: directions of the modulator, rate of the gates, budget, blocks
    python runs/mod_v_dense.py table      routers, each with the settings chosen there, rates 0.2 and 0.4, three seeds
    python runs/mod_v_dense.py isoflop    as many FLOPs as 516 dense steps: what is saved is spent on more of them
    python runs/mod_v_dense.py rates      4 blocks of width 64, 2000 steps: does the causal rule skip what it was asked?
"""

import json
import statistics
import sys

from sweep import ROOT, final_loss, sweep, table

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
    "nag": skipping(0.4, "nag", "--mod_fallback=True"),
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
    SETTINGS[f"prenorm_learned_{times}x"] = skipping(
        0.4, "learned", PRENORM, f"--gate_lr={times * 4e-3}"
    )
for change in ("budget=layer", "blocks=inner"):
    SETTINGS[f"nag_{change}"] = [*ROUTERS["nag"], f"--mod_{change}", *gates(4, 3)]
    SETTINGS[f"learned_{change}"] = skipping(0.4, "learned", f"--mod_{change}", *gates(4, 3))
    SETTINGS[f"prenorm_learned_{change}"] = skipping(
        0.4, "learned", PRENORM, f"--mod_{change}", "--gate_lr=1.2e-2"
    )


def tuned(router, rate=None):
    """The arguments of a router that came out best of the settings, at another rate"""
    tried = {name: final_loss(ROOT / f"results/mod_settings/{name}-0.004-1") for name in SETTINGS}
    tried = {  # with the ends out of it, less is skipped
        name: loss
        for name, loss in tried.items()
        if name.startswith(router + "_") and "blocks" not in name
    }
    if None in tried.values():
        raise SystemExit(
            f"the settings of {router} are not all tried: python runs/mod_v_dense.py settings"
        )
    return SETTINGS[min(tried, key=tried.get)] + ([] if rate is None else [f"--mod_rate={rate}"])


def compared():
    variants = {"dense": tuned("dense"), "prenorm_dense": [PRENORM]}
    for rate in (0.2, 0.4):
        variants |= {
            f"{router}_{rate}": tuned(router, rate)
            for router in (*ROUTERS, "prenorm_learned")
            if router != "dense"
        }
        variants[f"random_{rate}"] = [*skipping(rate, "random"), *tuned("dense")]
    for on in ("attention", "mlp"):
        variants |= {
            f"{router}_{on}_0.4": [*tuned(router), f"--mod_on={on}"]
            for router in ROUTERS
            if router != "dense"
        }
    return variants


def skipped(name, variant):
    """What validation tokens really skip, the mean over the runs"""
    reports = (
        json.load(open(file))["mod"]
        for file in (ROOT / f"results/{name}").glob(f"{variant}-0.004-*/eval.json")
    )
    return statistics.mean(report["rate"] for report in reports)


def spent(name, variant):
    """Training FLOPs, the mean over the runs"""
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
        print(
            f"| {variant} | {share} | {spent('mod_table', variant) / spent('mod_table', 'dense'):.3f} |"
        )


def isoflop():
    variants = {"dense": tuned("dense")}
    variants["dense_6_blocks"] = [*tuned("dense"), "--n_layer=6"]  # or save by having fewer blocks
    for rate in (0.1, 0.2, 0.25, 0.3, 0.4):
        variants[f"rate_{rate}"] = tuned("no_fallback", rate)
    table(sweep("isoflop", variants, [4e-3], [1, 2, 3], [*COMMON, "--flops_budget=1.19e13"], look))


def rates():
    small, both = [*COMMON, "--n_layer=4", "--n_embd=64", "--max_iters=2000"], ("nag", "learned")
    variants = {f"{router}_{rate}": skipping(rate, router) for rate in RATES for router in both}
    sweep("mod_rates", variants, [4e-3], [1], small, look)
    print("| asked | nag skips | learned skips |\n|---|---|---|")
    for rate in RATES:
        shares = [skipped("mod_rates", f"{router}_{rate}") for router in both]
        print(f"| {rate} | {shares[0]:.3f} | {shares[1]:.3f} |")


{"settings": settings, "table": routers, "isoflop": isoflop, "rates": rates}[sys.argv[1]]()
