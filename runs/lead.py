"""
Does a mode's lead over pre-norm last with more tokens or blocks? Which parts of NAG matter?

    python runs/lead.py tokens    8 blocks of width 64, 1 to 16 MB: 2 to 33 bytes per parameter
    python runs/lead.py blocks    4 to 64 blocks of width 64, 4 MB
    python runs/lead.py nag       NAG with one part changed, 4 and 16 MB

Each mode uses the settings that runs/judge.py found for it, and is tuned first if there are none.
At other depths and for changes of NAG, the learning rate is tuned again. Each length is a separate
run with its own schedule. Differences are paired by seed, with 95% intervals. Finished runs are in
results/lead.jsonl, and are not repeated.
"""

import statistics
import sys
from functools import partial

import judge
import study
from study import paired

SEEDS = (11, 12, 13)  # new: judge.py tuned on 0 and judged on 1, 2, ...
NAG = {
    "nag": {},
    "gates at a quarter of the rate": {"gate_lr": 0.25},  # times the learning rate
    "gates at four times the rate": {"gate_lr": 4.0},
    "alpha from 1 / l": {"nag_alpha_power": 1.0},
    "not orthogonal": {"nag_orthogonal": False},
    "not modulated": {"nag_directions": 0},
    "4 directions": {"nag_directions": 4},
    "beta of 1": {"nag_beta": 1.0},
    "not centred": {"nag_centre": False},
    "no norm lane": {"nag_lane": False},
}
PLANS = {  # ({name: changes of NAG, or None: the mode itself}, what varies, its values)
    "tokens": (dict.fromkeys(("prenorm", "nag", "bhyt", "orthogonal", "ngpt")),
               "max_iters", (1000, 2000, 4000, 8000, 16000)),
    "blocks": (dict.fromkeys(("prenorm", "nag", "lns")), "n_layer", (4, 8, 16, 32, 64)),
    "nag": ({"prenorm": None} | NAG, "max_iters", (4000, 16000)),
}  # fmt: skip


def lines_of(runs, look=()):
    return study.run("lead", runs, look)


def tuned(name, change, scale, rates_around):
    """Settings of a mode, or of NAG with a change, with the best learning rate at this scale."""
    mode = name if change is None else "nag"
    chosen = judge.tune(study.parse([judge.SCALE]), mode, partial(study.run, "judge"))
    chosen |= change or {}
    if change and "gate_lr" in change:
        chosen["gate_lr"] = change["gate_lr"] * chosen["learning_rate"]
    rates = [chosen["learning_rate"] * times for times in rates_around]
    if len(rates) > 1:
        chosen = judge.best_rate(scale, mode, chosen, rates, lines_of)
    return {"residual": mode} | chosen


def runs_of(changes, axis, values):
    """{(name, value): [the settings of each seed]}"""
    scale, runs = study.parse([judge.SCALE]), {}
    for name, change in changes.items():
        for value in values:
            here = scale | {axis: value}
            shape = scale if axis == "max_iters" else here  # tuned once for all lengths
            as_judged = shape is scale and change is None
            own = tuned(name, change, shape, (1.0,) if as_judged else (0.5, 1.0, 2.0))
            runs[name, value] = [judge.settings(here, own["residual"], own, s) for s in SEEDS]
    return runs


def rows(runs, lines_of):
    """(name, value, mean loss, difference to pre-norm, half its interval)"""
    lines = iter(lines_of("lead", [each for of_seeds in runs.values() for each in of_seeds]))
    losses = {at: [next(lines)["loss"] for _ in SEEDS] for at in runs}
    for (name, value), found in losses.items():
        if None in found:
            yield name, value, None, None, None
        else:
            yield name, value, statistics.mean(found), *paired(found, losses["prenorm", value])


if __name__ == "__main__":
    if sys.argv[1:] not in [[plan] for plan in PLANS]:
        raise SystemExit(__doc__)
    for name, value, loss, difference, half in rows(runs_of(*PLANS[sys.argv[1]]), study.run):
        result = "diverged" if loss is None else f"{loss:.4f} {difference:+.4f} ± {half:.4f}"
        print(f"{name:<32} {value:>6} {result}")
