"""
What does it cost to turn a trained pre-norm model into a model of another residual mode?

    python runs/convert.py                            trains a pre-norm model of BASE first
    python runs/convert.py --base=out/plain/ckpt.pt   starts from this pre-norm model
    python runs/convert.py --rehearse=True            all of it at toy size; ignore its numbers

The control trains the pre-norm model further. Each conversion, and a new BHyT and a new NAG from
scratch, trains for the same number of steps. One factor on all learning rates is tuned
for each, on seed 0 and on one half of the validation split. The losses are on the other half, for
new seeds. Differences from the control are paired by seed, with 95% intervals.
Finished runs are in results/convert.jsonl, and are not repeated.
"""

import math
import statistics
import sys

import study
from study import ROOT, paired, plus_minus, table

import checkpoint
from configurator import configure

base: str | None = None  # checkpoint of a pre-norm model; None: one with the settings in BASE
steps = 200  # length of each run
seeds = 3  # seeds of the final runs: 1, 2, ...
rehearse = False  # all of it at toy size

BASE = {"n_embd": 64, "max_iters": 2000, "eval_interval": 2000}
COMMON = {"log_interval": 10, "compile": False}  # compiling takes longer than a run
TOY = {"n_layer": 2, "n_embd": 32, "block_size": 64, "max_iters": 60, "eval_interval": 60}
TOY |= {"eval_tokens": 1024}
FACTORS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the learning rates that trained the base
RATES = ("learning_rate", "embed_lr", "head_lr", "gate_lr", "min_lr")
STARTS = {  # name: (settings, whether it starts from the base)
    "pre-norm, continued": ({}, True),
    "bhyt": ({"residual": "bhyt", "convert": True}, True),
    "bhyt_exact": ({"residual": "bhyt_exact", "convert": True}, True),
    "nag": ({"residual": "nag", "convert": True}, True),
    "new bhyt": ({"residual": "bhyt"}, False),
    "new nag": ({"residual": "nag"}, False),
}
HEAD = ("start", "loss at step 0", "loss", "difference from the first", "factor on learning rates")


def the_base():
    """(path of the model to start from, relative to the repository; settings of its training)"""
    if base is not None:
        return base, checkpoint.load(ROOT / base)["settings"] | {"init_from": "scratch"}
    settings = COMMON | BASE | (TOY if rehearse else {})
    folder = f"out/study/base-{study.key(settings)}"
    return f"{folder}/{checkpoint.NEWEST}", study.DEFAULTS | settings


def train_base(path, settings):
    folder = (ROOT / path).parent
    if study.summary(folder) is None:
        study.train(study.changed(settings) | COMMON, study.devices()[0], folder, ())


def settings_of(path, before, start, factor, seed):
    """The settings of a run: those that trained the base (before), except for what differs."""
    own, from_base = STARTS[start]
    rates = {name: before[name] and before[name] * factor for name in RATES}  # some are None
    length = {"max_iters": steps, "eval_interval": steps, "data_dir": before["data_dir"]}
    split = {"seed": seed, "val_part": "report" if seed else "tune"}
    origin = {"init_from": path} if from_base else {}
    return study.changed(before) | COMMON | own | rates | length | split | origin


def rows(path, before, lines_of_runs):
    """The rows of the table, or none if a run is missing. lines_of_runs: study.run or find."""

    def lines_of(runs):
        found = lines_of_runs("rehearsal_convert" if rehearse else "convert", [*runs.values()])
        return dict(zip(runs, found))

    tried = [(start, factor) for start in STARTS for factor in FACTORS]
    tuning = lines_of({each: settings_of(path, before, *each, 0) for each in tried})
    if None in tuning.values():
        return
    losses = {each: line["loss"] or math.inf for each, line in tuning.items()}
    factors = {start: min(FACTORS, key=lambda f: losses[start, f]) for start in STARTS}
    numbers = range(1, seeds + 1)
    runs = [(start, factors[start], seed) for start in STARTS for seed in numbers]
    final = lines_of({each: settings_of(path, before, *each) for each in runs})
    if None in final.values():
        return
    for start, factor in factors.items():
        lines, control = ([final[s, factors[s], n] for n in numbers] for s in (start, [*STARTS][0]))
        found = [line["loss"] for line in lines]
        cells = ("diverged", "")
        if None not in found:
            difference = paired(found, [line["loss"] for line in control])
            cells = f"{statistics.mean(found):.4f}", plus_minus(difference)
        yield start, f"{statistics.mean(line['start'] for line in lines):.4f}", *cells, factor


if __name__ == "__main__":
    configure(globals(), argv=sys.argv[1:])
    path, before = the_base()
    if base is None:
        train_base(path, before)
    print(table(HEAD, rows(path, before, study.run)))
