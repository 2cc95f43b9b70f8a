"""
How the cost of a training step grows with depth, width and context, as a multiple of the machine's
floor. Needs a quiet machine.

    python runs/growth.py    writes results/speed/growth.json, and growth.png in the same folder

The floor estimates the least time of a step: its FLOPs at the speed of a large matmul, plus its
memory traffic at the speed of a copy. The traffic is 28 bytes per parameter (gradient, AdamW) and
16 passes over the stream per block. All modes are divided by BHyT's floor. The widths have 8 heads,
the other shapes 2. The first step includes compilation, from an empty cache.
"""

import json
import os
import statistics
import sys
from dataclasses import replace

import torch
from torch._inductor.utils import fresh_cache

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(ROOT)

import bench
from machine import device_name, pick_device, pick_dtype, prepare_process
from model import GPTConfig

MODES = ("prenorm", "nag", "bhyt")
DEFAULT = GPTConfig()
AXES = {
    "n_layer": (8, 16, 32, 64),
    "n_embd": (128, 256, 512, 1024),
    "block_size": (128, 512, 2048),
}
TOKENS = 2048  # of a step
PATH = os.path.join(ROOT, "results", "speed", "growth.json")


def measure(config, copy, matmul):
    """{mode: {first: seconds of the first step, step: of a later one, over_floor: step / floor}}"""
    bench.batch_size = TOKENS // config.block_size
    torch._dynamo.reset()  # else the code of another size, in memory, is used again
    steps, first, report = {}, {}, {}
    with fresh_cache():
        for mode in MODES:
            steps[mode], model, _ = bench.stepper(replace(config, residual=mode))
            first[mode] = bench.seconds(steps[mode])
        times = bench.race(steps)
    stream = 16 * 4 * TOKENS * config.n_embd * config.n_layer
    floor = TOKENS * model.flops_per_token() / matmul + (28 * model.num_params() + stream) / copy
    for mode, of_mode in times.items():
        step = statistics.median(of_mode)
        report[mode] = {"first": first[mode], "step": step, "over_floor": step / floor}
    return report


def main():
    bench.device = str(pick_device("auto"))
    bench.dtype = pick_dtype("auto", bench.device.split(":")[0])
    prepare_process(bench.device)
    torch._dynamo.config.recompile_limit = 256
    copy, matmul = bench.floors()
    report = {"device": device_name(torch.device(bench.device)), "dtype": bench.dtype}
    report |= {"threads": torch.get_num_threads(), "copy_bytes_s": copy, "matmul_flops_s": matmul}
    for axis, values in AXES.items():
        report[axis] = {}
        for value in values:
            config = replace(
                DEFAULT, **{axis: value}, **({"n_head": 8} if axis == "n_embd" else {})
            )
            report[axis][value] = row = measure(config, copy, matmul)
            words = [
                f"{mode} {r['over_floor']:.2f}, first {r['first']:.0f} s" for mode, r in row.items()
            ]
            print(f"{axis} {value}: {'; '.join(words)}", flush=True)
            with open(PATH, "w") as file:
                json.dump(report, file, indent=1)
    draw(report)


def draw(report):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for place, axis in zip(axes, AXES):
        values = [*report[axis]]
        for mode in MODES:
            place.plot(
                values, [report[axis][v][mode]["over_floor"] for v in values], "o-", label=mode
            )
        place.set(xlabel=axis, xscale="log")
        place.set_xticks(values, map(str, values))
        place.minorticks_off()
    axes[0].set(ylabel="step / floor", ylim=0)
    axes[0].legend(frameon=False)
    figure.savefig(PATH.replace(".json", ".png"), dpi=150)


if __name__ == "__main__":
    main()
