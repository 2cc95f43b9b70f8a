"""
The stopwatch: candidates side by side in one process, in rotating order, as medians, quartiles and ratios.

    python bench.py --n_layer=6 --n_head=6 --n_embd=384 --batch_size=16      train.py's defaults v. plain float32

This first version has one part, a whole training step.
"""

import json
import statistics
import sys
import time
from dataclasses import fields

import torch

from configurator import configure
from model import GPT, GPTConfig
from prepare_c4 import Loader, Windows

data_dir = "data/python"  # shards to train on
batch_size = 8  # sequences a step
rounds = 7  # timed rounds, after two that are not
out = "bench.json"  # where the figures go


def candidate(config, bfloat16, compile, fused):
    """A function that does one training step on the CPU"""
    torch.manual_seed(0)
    model = GPT(config)
    if compile:
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)

    def step(x, y):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            loss = model(x, y)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def race(steps, batches):
    """Seconds of each step, all of them in every round, each round beginning with another"""
    names, times = list(steps), {name: [] for name in steps}
    for turn, batch in enumerate(batches):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            steps[name](*batch)
            times[name].append(time.perf_counter() - began)
    return {name: t[2:] for name, t in times.items()}


def main():
    settings = configure(globals(), GPTConfig, argv=sys.argv[1:])
    config = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    loader = Loader(Windows(data_dir, "train", config.block_size), batch_size, 1, seed=1)
    began = time.perf_counter()
    batches = [loader.batch(step, 0) for step in range(rounds + 2)]
    loading = (time.perf_counter() - began) / len(batches)
    steps = {
        "float32": candidate(config, bfloat16=False, compile=False, fused=False),
        "bfloat16": candidate(config, bfloat16=True, compile=False, fused=True),
        "bfloat16, compiled": candidate(config, bfloat16=True, compile=True, fused=True),
    }
    times = race(steps, batches)
    flops = batch_size * config.block_size * GPT(config).flops_per_token()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {batch_size} x {config.block_size} tokens")
    print(f"{'step':<20} {'median':>9} {'quartiles':>19} {'GFLOP/s':>8} {'v. float32':>10}")
    report = {"settings": settings, "torch": torch.__version__, "threads": torch.get_num_threads(), "loader_s": loading}
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4)
        ratio = statistics.median(a / b for a, b in zip(times["float32"], t))
        spread = f"{low * 1e3:.0f} - {high * 1e3:.0f} ms"
        print(f"{name:<20} {median * 1e3:>6.0f} ms {spread:>19} {flops / median / 1e9:>8.0f} {ratio:>9.2f}x")
        report[name] = {"seconds": t, "median": median, "quartiles": [low, high], "speedup": ratio}
    share = loading / min(statistics.median(t) for t in times.values())
    print(f"loader: {loading * 1e3:.2f} ms a batch, {share:.2%} of the fastest step")
    with open(out, "w") as file:
        json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
