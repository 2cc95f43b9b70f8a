"""
Does a mode's lead over pre-norm last with more tokens or blocks? Which parts of NAG matter?

    python runs/lead.py --what=tokens    8 blocks of width 64, 1 to 16 MB (4 MB: the judge's runs)
    python runs/lead.py --what=blocks    4 to 64 blocks of width 64, 4 MB
    python runs/lead.py --what=nag       NAG with one part changed, 4 and 16 MB
    python runs/lead.py --what=tokens --names=nag --values=1000,8000    a part of it

Each mode uses the settings that runs/judge.py found for it, or is tuned first if it was not judged.
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

from configurator import configure

what = "tokens"  # tokens, blocks or nag
names: str | None = None  # only these modes or changes, separated by commas, and pre-norm
values: str | None = None  # only these steps or numbers of blocks, in this order

SEEDS = (11, 12, 13)  # new: judge.py tuned on 0 and judged on 1, 2, ...
NAG = {
    "nag": {},
    "gates at a quarter of the rate": {"gate_lr": 0.25},  # times the learning rate
    "gates at four times the rate": {"gate_lr": 4.0},
    "alpha starts at 1 / l": {"nag_alpha_power": 1.0},
    "not orthogonal": {"nag_orthogonal": False},
    "not modulated": {"nag_directions": 0},
    "4 directions": {"nag_directions": 4},
    "beta fixed at 1": {"nag_beta": 1.0},
    "not centred": {"nag_centre": False},
    "no norm lane": {"nag_lane": False},
}
AROUND = (0.5, 1.0, 2.0)  # learning rates to try, as multiples of the judge's
PLANS = {  # {name: changes of NAG, or None: the mode itself}, what varies, its values, rates to try
    "tokens": (dict.fromkeys(("prenorm", "nag", "bhyt", "orthogonal", "ngpt")),
               "max_iters", (1000, 2000, 8000, 16000), (1.0,)),  # 4000: the judge's runs
    "blocks": (dict.fromkeys(("prenorm", "nag", "lns")), "n_layer", (4, 8, 16, 32, 64), AROUND),
    "nag": ({"prenorm": None} | NAG, "max_iters", (4000, 16000), AROUND),
}  # fmt: skip


def tuned(name, change, scale, rates_around, lines_of):
    """Settings of a mode, or of NAG with a change, with the best learning rate at this scale."""
    mode = name if change is None else "nag"
    chosen = judge.tune(study.parse([judge.SCALE]), mode, partial(lines_of, "judge"))
    chosen |= change or {}
    if change and "gate_lr" in change:
        chosen["gate_lr"] = change["gate_lr"] * chosen["learning_rate"]
    rates = [chosen["learning_rate"] * times for times in rates_around]
    if len(rates) > 1:
        chosen = judge.best_rate(scale, mode, chosen, rates, partial(lines_of, "lead"))
    return {"residual": mode} | chosen


def part(plan):
    """A plan with only the names and values asked for."""
    changes, axis, full, rates_around = plan
    wanted = ("prenorm", *names.split(",")) if names else changes
    some = [int(value) for value in values.split(",")] if values else full
    unknown = {*wanted} - {*changes} | {*some} - {*full}
    if unknown:
        choices = ", ".join(map(str, (*changes, *full)))
        raise SystemExit(f"{', '.join(map(str, unknown))}: choose from {choices}")
    return {name: changes[name] for name in wanted}, axis, some, rates_around


def runs_of(changes, axis, values, rates_around, lines_of):
    """{(name, value): [the settings of each seed]}. lines_of: study.run, or one that only reads."""
    scale, runs = study.parse([judge.SCALE]), {}
    for value in values:
        for name, change in changes.items():
            here = scale | {axis: value}
            shape = scale if axis == "max_iters" else here  # tuned once for all lengths
            own = tuned(name, change, shape, rates_around, lines_of)
            runs[name, value] = [judge.settings(here, own["residual"], own, s) for s in SEEDS]
    return runs


def rows(runs, lines_of):
    """(name, value, mean loss, difference to pre-norm, half its interval) where all have finished.

    The last three are None if a run diverged.
    """
    lines = iter(lines_of("lead", [each for of_seeds in runs.values() for each in of_seeds]))
    found = {at: [next(lines) for _ in SEEDS] for at in runs}
    losses = {at: [line["loss"] for line in of] for at, of in found.items() if None not in of}
    for (name, value), ours in losses.items():
        if ("prenorm", value) in losses:
            theirs = losses["prenorm", value]
            whole = None not in (*ours, *theirs)
            numbers = (statistics.mean(ours), *paired(ours, theirs)) if whole else [None] * 3
            yield name, value, *numbers


def main():
    configure(globals(), argv=sys.argv[1:])
    if what not in PLANS:
        raise SystemExit(f"what={what!r}: choose from {', '.join(PLANS)}")
    for name, value, loss, difference, half in rows(
        runs_of(*part(PLANS[what]), study.run), study.run
    ):
        result = "diverged" if loss is None else f"{loss:.4f} {difference:+.4f} ± {half:.4f}"
        print(f"{name:<32} {value:>6} {result}")


if __name__ == "__main__":
    main()
