"""
When does a model learn to copy from its context, and which models never do?

    python runs/copying.py

Trains models at the judge's scale, with its settings, and measures a checkpoint every EVERY steps:
the loss of random characters the first time and when they repeat. A model copies once the
repetition costs less than COPIES times the first time. Seeds 1 and 2 are those of the judge, 11 to
13 those of runs/lead.py; models of 4 blocks with AdamW take the seeds that tune. Finished runs are
in results/copying.jsonl, and are not repeated.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor

import judge
import study
import torch

import depth
from checkpoint import load_model

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
    choice = changes or judge.tune(scale, mode, lambda runs: study.find("judge", runs))
    return judge.settings(scale, mode, choice, seed)


def measured(settings, folder):
    """[[step, loss of random characters, loss when they repeat]] of each checkpoint in folder."""
    characters, found = torch.arange(32, 127), []
    for path in sorted(folder.glob("ckpt_??????.pt")):
        state, model = load_model(str(path))
        found.append([state["step"], *study.short(depth.copying(model.eval(), characters))])
    return found


def train(mode, seed, changes):
    settings = settings_of(mode, seed, changes)
    name = study.name_of({"key": study.key(settings)} | study.place(settings))
    if name in study.finished("copying"):
        return
    folder = study.ROOT / "out" / "study" / f"copying-{name[0]}"
    device = study.free_devices().get()
    how = {"keep_interval": EVERY, "save_interval": EVERY}
    line = {"key": name[0], "settings": study.changed(settings)}
    line |= study.train(settings | how, device, folder, ()) | study.place(settings)
    line["copying"] = measured(settings, folder)
    study.free_devices().put(device)
    study.append("copying", line)
    study.say(f"{mode} seed {seed}: loss {line['loss']:.3f}, copies after {onset(line)} steps")
    shutil.rmtree(folder)


def onset(line):
    """The first measured step at which a model copies, or None."""
    steps = (step for step, first, again in line["copying"] if again < COPIES * first)
    return next(steps, None)


if __name__ == "__main__":
    with ThreadPoolExecutor(len(study.devices())) as pool:
        list(pool.map(lambda run: train(*run), RUNS))
