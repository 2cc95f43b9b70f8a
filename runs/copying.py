"""
When does a model learn to copy from its context, and which models never do?

    python runs/copying.py

Trains models at the judge's scale, and measures the loss of random characters every EVERY steps:
the first time, and when they repeat. A model copies once the repetition costs less than COPIES
times the first time. Models of 8 blocks have Muon and the judge's settings, with seeds of the
judge (1, 2) and of runs/lead.py (11 to 13). Models of 4 blocks have AdamW and the seeds that tune.
Finished runs are in results/copying.jsonl, and are not repeated.
"""

import signal
import sys
from functools import partial

import judge
import study
import torch

import depth
from checkpoint import load_model
from configurator import configure

EVERY = 100
COPIES = 0.75
HALF = {"learning_rate": 0.008}  # half of pre-norm's rate, and the rate of the other three
SHALLOW = {"n_layer": 4, "optimizer": "adamw"}
RATES = {"prenorm": 0.004, "nag": 0.016}  # of SHALLOW: the best for seed 0
RUNS = [("prenorm", seed, {}) for seed in (11, 12, 13, 1, 2)]
RUNS += [("prenorm", seed, HALF) for seed in (12, 1)]
RUNS += [(mode, seed, {}) for seed in (12, 1, 2) for mode in ("nag", "ihc", "attnres")]
RUNS += [(mode, seed, SHALLOW | {"learning_rate": RATES[mode]})
         for seed in judge.TUNING for mode in RATES]  # fmt: skip


def settings_of(mode, seed, changes):
    scale = study.parse([judge.SCALE])
    choice = changes or judge.tune(scale, mode, partial(study.find, "judge"))
    kept = {"keep_interval": EVERY, "save_interval": EVERY}
    return judge.settings(scale, mode, choice, seed) | kept


def measured(folder):
    """[[step, loss of random characters, loss when they repeat]] of each checkpoint in folder."""
    characters, found = torch.arange(32, 127), []
    for path in sorted(folder.glob("ckpt_??????.pt")):
        state, model = load_model(str(path))
        found.append([state["step"], *study.short(depth.copying(model.eval(), characters))])
    return {"copying": found}


def copies(first, again):
    """Whether a model with these losses copies."""
    return again < COPIES * first


def onset(line):
    """The first measured step at which a model copies, or None."""
    return next((step for step, *losses in line["copying"] if copies(*losses)), None)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, study.stop)
    configure(globals(), argv=sys.argv[1:])  # there are no settings: only --help
    plan = [settings_of(*each) for each in RUNS]
    for settings, line in zip(plan, study.run("copying", plan, measured)):
        print(f"{study.described(settings, plan)}: copies after {onset(line)} steps")
