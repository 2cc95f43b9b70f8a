"""
How much loss does it cost to skip sublayers or blocks of a trained model?

    python runs/prune.py --out_dir=out/default    writes results/prune.jsonl

For rates up to one half, and each unit and rule of prune.py: the validation loss, and the share of
the FLOPs left. Scores are measured on training windows.
"""

import json
import os
import sys
from itertools import product

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)  # before this folder, which has a prune.py too

import prune
from checkpoint import load_model
from configurator import configure
from data import Windows, eval_batches, spread
from machine import autocast, commit, device_name, pick_device, pick_dtype, prepare_process
from model import evaluate

out_dir = "out/default"  # folder of the run
data_dir: str | None = None  # folder with shards; None: as in training
score_tokens = 32768  # training tokens that score the units
eval_tokens = 65536  # validation tokens for the loss, evenly spaced
batch_size = 8  # windows per batch
results = "results/prune.jsonl"  # the file to write

RATES = [i / 16 for i in range(9)]
SEEDS = {"angle": (0,), "norm": (0,), "random": (1, 2, 3)}


def plans(model, batches):
    """{(unit, rule, seed, share of the units that are skipped): their indices}"""
    found = {}
    for unit, rule in product(prune.UNITS, prune.RULES):
        for seed in SEEDS[rule]:
            scores = prune.scores(model, batches, unit, rule, seed)
            for indices in (prune.lowest(scores, rate) for rate in RATES):
                found[unit, rule, seed, len(indices) / len(scores)] = indices
    return found


def main():
    configure(globals(), argv=sys.argv[1:])
    device = pick_device("auto")
    prepare_process(device)
    dtype, (state, model) = pick_dtype("auto", device.type), load_model(out_dir, device)
    folder, T = data_dir or state["settings"]["data_dir"], model.config.block_size
    if folder is None:
        raise SystemExit(f"{out_dir} was imported without shards: give --data_dir")
    train, val = (Windows(folder, split, T) for split in ("train", "val"))
    batches = [x for x, _ in eval_batches(train, spread(train, score_tokens), batch_size, device)]
    val_batches = [*eval_batches(val, spread(val, eval_tokens), batch_size, device)]
    same = {"run": out_dir, "step": state["step"], "data": val.sha256[:8], "git": commit()}
    same |= {"device": device_name(device), "dtype": dtype}
    whole, lines = model.flops_per_token(), []
    with autocast(device.type, dtype):
        for plan, indices in plans(model, batches).items():
            prune.skip(model, indices, plan[0])
            line = same | dict(zip(("unit", "rule", "seed", "rate"), plan))
            line |= {"skipped": prune.names(indices, plan[0])}
            line |= {"flops": prune.flops_per_token(model) / whole}
            line |= {"loss": evaluate(model, val_batches)}
            print("{unit:<9} {rule:<7} {seed} {rate:.3f} {loss:.4f}".format(**line))
            lines.append(line)
    with open(results, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
