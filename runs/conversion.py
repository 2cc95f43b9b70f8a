"""
What does it cost to turn a trained pre-norm model into a model of another residual mode?

    python runs/conversion.py                            trains a pre-norm model of BASE first
    python runs/conversion.py --base=out/plain/ckpt.pt   starts from this pre-norm model
    python runs/conversion.py --rehearse=True            all of it at toy size; ignore its numbers

The control trains the pre-norm model further. Each conversion, and a new BHyT and a new NAG from
scratch, trains for the same number of steps. One factor on all learning rates is tuned
for each, on seed 0 and on one half of the validation split. The losses are on the other half, for
new seeds. Differences from the control are paired by seed, with 95% intervals.
Finished runs are in results/convert.jsonl, and are not repeated.
"""

import os
import statistics
import subprocess
import sys

import study
from stats import gap_of, losses_of, plus_minus
from study import ROOT, table

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
    "bhyt": ({"residual": "bhyt"}, True),
    "bhyt_exact": ({"residual": "bhyt_exact"}, True),
    "nag": ({"residual": "nag"}, True),
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


def origin_of(path, start, seed):
    """The checkpoint that a run starts from: the base, or one converted from it; None: none."""
    own, from_base = STARTS[start]
    converted = f"{os.path.dirname(path)}/{own.get('residual')}-{seed}.pt"
    return (converted if own else path) if from_base else None


def convert_base(path):
    """Write the checkpoints that are converted from the base and missing."""
    for start in STARTS:
        for seed in range(seeds + 1):
            origin = origin_of(path, start, seed)
            if origin not in (None, path) and not (ROOT / origin).exists():
                how = (f"--residual={STARTS[start][0]['residual']}", f"--seed={seed}")
                command = [sys.executable, "convert.py", path, origin, *how]
                subprocess.run(command, cwd=ROOT, check=True)


def settings_of(path, before, start, factor, seed):
    """The settings of a run: those that trained the base (before), except for what differs."""
    own, _ = STARTS[start]
    rates = {name: before[name] and before[name] * factor for name in RATES}  # some are None
    length = {"max_iters": steps, "eval_interval": steps, "data_dir": before["data_dir"]}
    split = {"seed": seed, "val_part": "report" if seed else "tune"}
    origin = {"init_from": origin_of(path, start, seed)}
    origin = {key: value for key, value in origin.items() if value is not None}
    return study.changed(before) | COMMON | own | rates | length | split | origin


def rows(path, before, lines_of_runs):
    """Yield the rows of the table. lines_of_runs: study.run or study.find."""

    def lines_of(runs):
        settings = [settings_of(path, before, *each) for each in runs]
        name = "rehearsal_convert" if rehearse else "convert"
        return dict(zip(runs, lines_of_runs(name, settings)))

    tried = lines_of([(start, factor, 0) for start in STARTS for factor in FACTORS])
    losses = dict(zip(tried, losses_of(tried.values())))
    factors = {start: min(FACTORS, key=lambda f: losses[start, f, 0]) for start in STARTS}
    numbers = range(1, seeds + 1)
    final = lines_of([(start, factors[start], seed) for start in STARTS for seed in numbers])
    of = {start: [final[start, factors[start], seed] for seed in numbers] for start in STARTS}
    control = next(iter(of.values()))
    for start, lines in of.items():
        first = statistics.mean(line["start"] for line in lines)
        last = statistics.mean(losses_of(lines))
        gap = gap_of(lines, control)
        words = plus_minus(gap) if gap else "diverged"
        yield start, f"{first:.4f}", f"{last:.4f}", words, factors[start]


if __name__ == "__main__":
    configure(globals(), argv=sys.argv[1:])
    path, before = the_base()
    if base is None:
        train_base(path, before)
    convert_base(path)
    print(table(HEAD, rows(path, before, study.run)))
