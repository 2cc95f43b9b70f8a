"""
How does the difference from pre-norm change with more tokens or blocks? What do several streams
add? What does a mixture of depths cost?

    python runs/lead.py --what=tokens    8 blocks of width 64, 1 to 16 MB
    python runs/lead.py --what=blocks    4, 16 and 32 blocks of width 64, 4 MB; the judge trained 8
    python runs/lead.py --what=streams   what mhc and ihc owe to parameters, and to several streams
    python runs/lead.py --what=experts --optimizer=adamw    8 experts, by width / depth, 4 MB
    python runs/lead.py --what=mod       NAG with mixtures of depths and with fewer blocks, 4 MB

Says first how long it takes. Each mode uses the settings that runs/judge.py found for it, or is
tuned first if it was not judged. At other lengths and shapes, the learning rate is tuned again, as
the judge does. Runs of more than 8,000 steps use the rate that is best at 8,000, models with more
than 16 blocks that with 16. Each length is a separate run with its own schedule. Differences are
from pre-norm, or from the mode that is changed; they are paired by seed, with 95% intervals.
Finished runs are kept in out/lead.jsonl. These and the recorded ones in results/lead.jsonl are not
repeated. --record=True keeps new runs in results/, and leaves out those in out/.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product

import judge
import study
from stats import gap_of, plus_minus

from configurator import configure

what = ""  # tokens, blocks, streams, experts or mod
optimizer = "muon"  # or adamw
record = False  # keep results in results/, and read no others

SCALE = study.parse([judge.SCALE])
SEEDS = range(11, 17)  # new: judge.py judged on 1, 2, ...; some have only the first few
STREAMS = {
    "ihc with four streams": {"residual": "ihc", "hc_streams": 4},
    "prenorm as large as mhc": {"residual": "prenorm", "n_hidden": 352},
    "ihc with one stream": {"residual": "ihc", "hc_streams": 1},
}


def mixtures(rate):
    """{name: change} of mixtures of depths in which this share of tokens skips."""
    both = {"mod_on": "both", "mod_rate": rate}
    learned = {"mod_router": "learned"}
    changes = {
        "NAG's router": {},
        "NAG's router with fallback": {"mod_fallback": True},
        "learned router": learned,
        "learned router on pre-norm": learned | {"residual": "prenorm"},
        "random router": {"mod_router": "random"},
    }
    return {f"{name} {rate:g}": both | change for name, change in changes.items()}


FEWER = {f"nag with {n} blocks": {"n_layer": n} for n in (6, 5)}
LARGEST = {"max_iters": 8000, "n_layer": 16}  # of runs that tune
OTHER_RATES = {  # of pre-norm, because few tuning seeds cannot tell which rate is best
    f"prenorm at {words} the rate": {"residual": "prenorm", "learning_rate": times}
    for words, times in (("half", 0.5), ("twice", 2.0))
}
OF_EXPERTS = {  # by width / depth: 1.11M to 1.16M parameters, 0.51M to 0.54M of them active
    80: {"n_layer": 2, "n_embd": 160, "n_hidden": 160, "moe_experts": 8},
    19: {"n_layer": 5, "n_embd": 96, "n_hidden": 104, "moe_experts": 8},
}


def of(setting, *values):
    return {value: {setting: value} for value in values}


# A plan: ({name: its changes}, {value of what varies: its settings}).
# None: the name is a mode. Changes without a "residual" are changes of NAG; learning_rate is a
# multiple of the tuned one.
PLANS = {
    "tokens": (dict.fromkeys(("prenorm", "nag", "bhyt", "attnres", "mhc")) | OTHER_RATES,
               of("max_iters", 1000, 2000, 4000, 8000, 16000)),
    "blocks": (dict.fromkeys(("prenorm", "nag")), of("n_layer", 4, 16, 32)),
    "streams": (dict.fromkeys(("prenorm", "mhc")) | STREAMS, of("max_iters", 4000)),
    "experts": (dict.fromkeys(("prenorm", "nag")), OF_EXPERTS),
    "mod": ({"nag": None, "prenorm": None} | FEWER | mixtures(0.2) | mixtures(0.4),
            of("max_iters", 4000)),
}  # fmt: skip


def mode_of(name, change):
    return name if change is None else change.get("residual", "nag")


def base_of(changes, name):
    """The name that a name of a plan is compared with: the first one with its mode, or the first
    of all.
    """
    of_mode = [each for each, change in changes.items()
               if mode_of(each, change) == mode_of(name, changes[name])]  # fmt: skip
    return next(iter(changes)) if of_mode[0] == name else of_mode[0]


def as_judged(judged, mode, lines_of):
    """The settings that the judge found for a mode, on whatever machine; else it is tuned now."""
    with suppress(SystemExit):  # not finished, or on machines of several kinds
        return judge.tune(judged, mode, partial(study.find, "judge"))
    return judge.tune(judged, mode, partial(lines_of, "judge"))


def runs_of(name, change, at, lines_of, optimizer="muon"):
    """The settings of each seed of a mode, or of one with a change, at this length or shape.

    The learning rate is the best one there. Everything else was tuned at the judge's scale.
    lines_of: study.run, or one that only reads.
    """
    mode, judged = mode_of(name, change), SCALE | {"optimizer": optimizer}
    scale, chosen = judged | at, as_judged(judged, mode, lines_of)
    if scale != judged:
        smaller = scale | {key: min(scale[key], most) for key, most in LARGEST.items()}
        chosen = judge.rate_of_three(smaller, mode, chosen, partial(lines_of, "lead"))
    own = chosen | (change or {})
    if change and "learning_rate" in change:
        own["learning_rate"] *= chosen["learning_rate"]
    return [judge.settings(scale, mode, own, seed) for seed in SEEDS]


def main():
    configure(globals(), argv=sys.argv[1:])
    if what not in PLANS:
        raise SystemExit(f"what={what!r}: choose from {', '.join(PLANS)}")
    study.begin(record)
    changes, settings_of = PLANS[what]
    pairs = [*product(changes, settings_of)]

    def runs_at(lines_of, pair):
        name, value = pair
        return runs_of(name, changes[name], settings_of[value], lines_of, optimizer)

    def trained(lines_of):
        with ThreadPoolExecutor(len(study.devices())) as pool:
            runs = [*pool.map(partial(runs_at, lines_of), pairs)]
        found = iter(lines_of("lead", sum(runs, []), judge.LOOK))
        return {pair: [next(found) for _ in SEEDS] for pair in pairs}

    progress = study.Progress(study.to_train(trained))
    lines = trained(partial(study.run, progress=progress))
    for (name, value), ours in lines.items():
        base = base_of(changes, name)
        if name != base:
            gap = gap_of(ours, lines[base, value])
            study.say(f"{name} {value}: {plus_minus(gap)} from {base}")


if __name__ == "__main__":
    main()
