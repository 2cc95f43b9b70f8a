"""
The stopwatch: candidates side by side in one process, in rotating order, as medians, quartiles and ratios.

    python bench.py --what=train --n_layer=6 --n_head=6 --n_embd=384 --batch_size=16
    python bench.py --what=data
"""

import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context

import torch

from configurator import configure
from model import GPT, GPTConfig
from prepare_c4 import Loader, Windows, batches, get_tokenizer, in_order, list_files, start_worker, write_json

what = "train"  # which part: train, a whole training step; data, the tokeniser of prepare_c4.py
data_dir = "data/python"  # shards to train on
batch_size = 8  # sequences a step
tokenizer = "bytes"  # data: the tokenizer to measure, as in prepare_c4.py
megabytes = 10  # data: about so much text
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


def race(steps, rows):
    """Seconds of each step, all of them in every round, each round beginning with another"""
    names, times = list(steps), {name: [] for name in steps}
    for turn, batch in enumerate(rows):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            steps[name](*batch)
            times[name].append(time.perf_counter() - began)
    return {name: t[2:] for name, t in times.items()}


def train(settings):
    """A training step as train.py does it by default, and what each part of that brings, against plain float32"""
    config = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    loader = Loader(Windows(data_dir, "train", config.block_size), batch_size, 1, seed=1)
    rows, loads = [], []
    for step in range(rounds + 2):  # read here and now, not ahead in another thread as in training
        began = time.perf_counter()
        rows.append(loader.fetch(step, 0))
        loads.append(time.perf_counter() - began)
    loading = statistics.median(loads)
    steps = {
        "float32": candidate(config, bfloat16=False, compile=False, fused=False),
        "bfloat16, fused": candidate(config, bfloat16=True, compile=False, fused=True),
        "and compiled": candidate(config, bfloat16=True, compile=True, fused=True),
    }
    times, report = race(steps, rows), {"loader_s": loading}
    flops = batch_size * config.block_size * GPT(config).flops_per_token()
    print(f"{'step':<20} {'median':>9} {'quartiles':>19} {'GFLOP/s':>8} {'v. float32':>10}")
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4)
        ratio = statistics.median(a / b for a, b in zip(times["float32"], t))
        spread = f"{low * 1e3:.0f} - {high * 1e3:.0f} ms"
        print(f"{name:<20} {median * 1e3:>6.0f} ms {spread:>19} {flops / median / 1e9:>8.0f} {ratio:>9.2f}x")
        report[name] = {"seconds": t, "median": median, "quartiles": [low, high], "speedup": ratio}
    share = loading / min(statistics.median(t) for t in times.values())
    print(f"loader: {loading * 1e3:.2f} ms a batch, {share:.2%} of the fastest step")
    return report


def data(settings):
    """Tokens a second of prepare_c4.py's processes together, against cores x one thread of the bare tokenizer"""
    files, cores = list_files("python")[0][: megabytes * 60], os.cpu_count()
    jobs = list(batches(files, lambda text: True, (0, 0)))
    texts = [text for job in jobs for _, _, text in job]
    encoding, report = get_tokenizer(tokenizer), {}
    with ProcessPoolExecutor(cores, get_context("spawn"), start_worker, (tokenizer,)) as pool:
        list(in_order(pool, jobs[: 2 * cores], 4 * cores))  # the processes are up
        for turn in range(rounds):
            began = time.perf_counter()
            tokens = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=1)))
            report.setdefault("bare", []).append(tokens / (time.perf_counter() - began))
            began = time.perf_counter()
            tokens = sum(len(ids) for results in in_order(pool, jobs, 4 * cores) for _, _, ids in results)
            report.setdefault("prepare", []).append(tokens / (time.perf_counter() - began))
    bare, ours = (statistics.median(report[k]) for k in ("bare", "prepare"))
    share = f"{ours / bare / cores:.0%} of {cores} x the bare rate"
    print(f"bare tokenizer, one thread: {bare / 1e6:.2f} M tokens/s; {cores} processes: {ours / 1e6:.2f}, {share}")
    return report


def main():
    settings = configure(globals(), GPTConfig, argv=sys.argv[1:])
    if what not in ("train", "data"):
        raise SystemExit(f"what={what!r}: choose train or data")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    report = {"settings": settings, "torch": torch.__version__, "threads": torch.get_num_threads()}
    report[what] = (train if what == "train" else data)(settings)
    write_json(out, report)


if __name__ == "__main__":
    main()
