"""
The verdict on a residual mode: is it better than pre-norm, by how much, and how sure is that?

    python runs/judge.py --residual=nag                 on two cores, half an hour
    python runs/judge.py --residual=nag,hc              several modes; all: every mode
    python runs/judge.py config/gpt2_124m.py --residual=nag    at another scale, on GPUs
    python runs/judge.py --residual=nag --rehearse=True        all of it at toy size, in a minute

1. Tune both modes alike: seed 0, a quarter of the steps, half of the validation split. Tune the
   learning rate first, and extend its grid while the best value is at an edge. Then tune the
   initialisation of the output projections, the gates' learning rate and the embeddings' rate.
2. Train both with new seeds for all steps. Evaluate on the other half of the validation split.
3. Differences are paired by seed, with 95% t-intervals. If an interval contains 0, the verdict is
   "undecided".
4. For equal time, steps of each mode are timed in turn. The baseline is also trained for fewer and
   more steps, to estimate its loss after the time that the mode takes.

Finished runs are in results/judge.jsonl. They are not repeated when you restart the command or
judge another mode. Other arguments are config files and settings of train.py.
"""

import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial

import study
import torch
from study import ROOT, at_length, paired

from configurator import configure
from model import GPT, RESIDUALS, GPTConfig
from norms import pick

residual = "nag"  # modes to judge, separated by commas; all: every mode
baseline = "prenorm"  # the mode to compare with
seeds = 3  # seeds of the final runs: 1, 2, ...
tune_share = 0.25  # length of a tuning run, as a share of the whole
rehearse = False  # all of it at toy size
name = "judge"  # name of the file in results/

OWN = ("residual", "baseline", "seeds", "tune_share", "rehearse", "name")
SCALE = str(ROOT / "config" / "judge_8x64.py")
TOY = "--n_layer=2 --n_embd=32 --block_size=64 --max_iters=24 --eval_tokens=2048 --log_interval=4"
TOY += " --compile=False"
RATES = (4e-3, 8e-3, 1.6e-2)
LENGTHS = (0.7, 1.4, 2.0)  # lengths of extra baseline runs, as shares of the whole
TUNED = ("learning_rate", "init_out", "gate_lr", "embed_lr")
TUNE_TOKENS = 131072  # validation tokens of a tuning run
LOOK = ("--what=depth", "--depth_tokens=4096", "--batch_size=8")


# ------------------------------------------------------------------------------------------------
# The runs


def short(scale, mode, choice):
    """The settings of a tuning run."""
    steps = max(1, round(scale["max_iters"] * tune_share))
    fixed = {"residual": mode, "seed": 0, "val_part": "tune", "eval_tokens": TUNE_TOKENS}
    return scale | fixed | choice | {"max_iters": steps, "eval_interval": steps}


def full(scale, mode, choice, seed, length=1.0):
    """The settings of a final run."""
    steps = round(length * scale["max_iters"])
    fixed = {"residual": mode, "seed": seed, "val_part": "report"}
    return scale | fixed | choice | {"max_iters": steps, "eval_interval": steps}


def best(choices, scale, mode, progress):
    """The choice with the lowest loss of a tuning run."""
    lines = study.run(name, [short(scale, mode, each) for each in choices], progress=progress)
    losses = [math.inf if line["loss"] is None else line["loss"] for line in lines]
    return choices[losses.index(min(losses))]


def tune(scale, mode, progress):
    """Tune one setting at a time. Returns {setting: best value}."""
    find = partial(best, scale=scale, mode=mode, progress=progress)
    rates, chosen = list(RATES), None
    while chosen is None or (chosen["learning_rate"] in (rates[0], rates[-1]) and len(rates) < 7):
        if chosen is not None:
            lowest = chosen["learning_rate"] == rates[0]
            rates = [rates[0] / 2, *rates] if lowest else [*rates, rates[-1] * 2]
        chosen = find([{"learning_rate": rate} for rate in rates])

    chosen = find([chosen, *(chosen | {"init_out": start} for start in other_starts(scale, mode))])
    if has_gates(mode):
        gates = [chosen | {"gate_lr": chosen["learning_rate"] * times} for times in (0.25, 4)]
        chosen = find([chosen, *gates])
    return find([chosen, chosen | {"embed_lr": 0.025}])


def shape_of(scale):
    return {field.name: scale[field.name] for field in fields(GPTConfig) if field.name in scale}


def other_starts(scale, mode):
    """Initialisations of the output projections that the mode allows, except its default."""
    for start in ("scaled", "plain", "zero"):
        try:
            with torch.device("meta"):
                GPT(GPTConfig(**shape_of(scale) | {"residual": mode, "init_out": start}))
        except ValueError:
            continue
        if start != RESIDUALS[mode].init_out:
            yield start


def has_gates(mode):
    with torch.device("meta"):
        return bool(GPT(GPTConfig(residual=mode)).param_groups()["gates"])


def train(scale, mode, progress):
    """Tune a mode and train its seeds. Returns (tuned settings, lines)."""
    choice = tune(scale, mode, progress)
    runs = [full(scale, mode, choice, seed) for seed in range(1, seeds + 1)]
    first = study.run(name, runs[:1], LOOK, progress=progress)  # also measured through depth
    lines = first + study.run(name, runs[1:], progress=progress)
    if mode == baseline:
        lengths = [full(scale, mode, choice, 1, length) for length in LENGTHS]
        study.run(name, lengths, progress=progress)
    return choice, lines


# ------------------------------------------------------------------------------------------------
# The verdict


def verdict(difference, half):
    if abs(difference) <= half:
        return "undecided"
    return "better" if difference < 0 else "worse"


def row(mode, choice, lines, ratio, lengths):
    """A row of the table. lengths: {share of all steps: loss} of the baseline with seed 1."""
    ours, theirs = ([line["loss"] for line in each] for each in lines)
    if None in ours:
        return f"| {mode} | {ours.count(None)} of {len(ours)} runs diverged | | | | | | |"
    gain = at_length(ratio, lengths) - lengths[1.0]  # change of the baseline's loss in that time
    at_tokens, at_time = paired(ours, theirs), paired(ours, [loss + gain for loss in theirs])
    tuned = " ".join(f"{k}={v:g}" if type(v) is float else f"{k}={v}" for k, v in choice.items())
    cells = [mode, f"{statistics.mean(ours):.4f}"]
    cells += [f"{at_tokens[0]:+.4f} ± {at_tokens[1]:.4f}", verdict(*at_tokens), f"{ratio:.2f}"]
    cells += [f"{at_time[0]:+.4f} ± {at_time[1]:.4f}", verdict(*at_time), tuned]
    return f"| {' | '.join(cells)} |"


def head():
    cells = ("mode", "loss", "difference", "verdict", "step time / pre-norm's")
    cells += ("difference at equal time", "verdict at equal time", "tuned")
    return f"| {' | '.join(cells)} |\n{'|---' * len(cells)}|"


def timed(scale, modes):
    """What study.race compares: {mode: settings}, the baseline first."""
    return {mode: scale | {"residual": mode} for mode in dict.fromkeys([baseline, *modes])}


def plan(scale, modes):
    """A Progress for all runs. Prints how long they will take, from a short run of the baseline."""
    one = [short(scale, baseline, {})] * 9
    one += [full(scale, baseline, {}, seed) for seed in range(1, seeds + 1)]
    finished = sum(study.cost(line["settings"]) for line in study.read(name) if "key" in line)
    total = sum(map(study.cost, one)) * (1 + len(modes)) * 1.05
    left = max(total - finished, study.cost(one[0]))
    steps = left / study.cost(one[0] | {"max_iters": 1})
    hours = steps * study.probe(one[-1]) / len(study.devices()) / 3600
    print(f"about {hours:.1f} hours, if all modes are as fast as {baseline}", flush=True)
    return study.Progress(left)


def main():
    own = [arg for arg in sys.argv[1:] if arg[2:].partition("=")[0] in OWN]
    rest = [arg for arg in sys.argv[1:] if arg not in own]
    configure(globals(), argv=own)
    globals().update(name=f"rehearsal_{name}" if rehearse else name)
    files = [arg for arg in rest if not arg.startswith("--")] or [SCALE]
    given = [arg for arg in rest if arg.startswith("--")]
    scale = study.parse([*files, *(TOY.split() if rehearse else []), *given])
    modes = [*RESIDUALS] if residual == "all" else residual.split(",")
    modes = [mode for mode in modes if pick(RESIDUALS, mode, "residual") and mode != baseline]

    progress, everyone = plan(scale, modes), [baseline, *modes]
    with ThreadPoolExecutor(len(study.devices())) as pool:
        trained = dict(zip(everyone, pool.map(partial(train, scale, progress=progress), everyone)))

    choice, theirs = trained[baseline]
    more = study.run(name, [full(scale, baseline, choice, 1, length) for length in LENGTHS])
    lengths = {1.0: theirs[0]["loss"]} | dict(zip(LENGTHS, [line["loss"] for line in more]))
    ratios = study.race(name, timed(scale, everyone))
    print(head())
    for mode in modes:
        choice, ours = trained[mode]
        print(row(mode, choice, (ours, theirs), ratios[mode][1], lengths))


if __name__ == "__main__":
    main()
