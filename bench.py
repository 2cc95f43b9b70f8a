"""
The stopwatch: candidates side by side in one process, in rotating order, as medians, quartiles and ratios.

    python bench.py --what=train --n_layer=6 --n_head=6 --n_embd=384 --batch_size=16
    python bench.py --what=modes --modes=prenorm,nag --n_layer=12 --n_head=8 --n_embd=512 --block_size=512
    python bench.py --what=data
"""

import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from multiprocessing import get_context

import torch

from configurator import configure
from model import GPT, GPTConfig, settings_of_others
from prepare_c4 import Loader, Windows, batches, get_tokenizer, in_order, list_files, start_worker, write_json

what = "train"  # which part: train, a training step against float32; modes, one of each mode; data, the tokenizer
modes = "prenorm,nag"  # modes: the residual modes to compare, separated by commas, with the first
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
        model.compile_blocks()
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


def training_batches(config):
    """A batch for each round, and what loading one takes, here and now and not ahead in another thread"""
    loader = Loader(Windows(data_dir, "train", config.block_size), batch_size, 1, seed=1)
    rows, loads = [], []
    for step in range(rounds + 2):
        began = time.perf_counter()
        rows.append(loader.fetch(step, 0))
        loads.append(time.perf_counter() - began)
    return rows, statistics.median(loads)


def compare(steps, rows, flops):
    """Times of each step and its ratio to the first, round by round"""
    times, report, first = race(steps, rows), {}, next(iter(steps))
    print(f"{'step':<20} {'median':>9} {'quartiles':>21} {'GFLOP/s':>8}  time v. {first}")
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4)
        ratios = statistics.quantiles((a / b for a, b in zip(t, times[first])), n=4)
        spread = f"{low * 1e3:.0f} - {high * 1e3:.0f} ms"
        print(
            f"{name:<20} {median * 1e3:>6.0f} ms {spread:>21} {flops[name] / median / 1e9:>8.0f}"
            f"  {ratios[1]:.3f}x ({ratios[0]:.3f} - {ratios[2]:.3f})"
        )
        report[name] = {"seconds": t, "median": median, "quartiles": [low, high], "ratio": ratios}
    return report


def train(settings):
    """A training step as train.py does it by default, and what each part of that brings, against plain float32"""
    config = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    rows, loading = training_batches(config)
    steps = {
        "float32": candidate(config, bfloat16=False, compile=False, fused=False),
        "bfloat16, fused": candidate(config, bfloat16=True, compile=False, fused=True),
        "and compiled": candidate(config, bfloat16=True, compile=True, fused=True),
    }
    flops = batch_size * config.block_size * GPT(config).flops_per_token()
    report = compare(steps, rows, dict.fromkeys(steps, flops))
    share = loading / min(times["median"] for times in report.values())
    print(f"loader: {loading * 1e3:.2f} ms a batch, {share:.2%} of the fastest step")
    return report | {"loader_s": loading}


def each_mode(settings):
    """A training step of every mode at the same shape, each as train.py does it by default"""
    base = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    configs = {mode: replace(base, residual=mode, **settings_of_others(mode)) for mode in modes.split(",")}
    steps = {mode: candidate(config, bfloat16=True, compile=True, fused=True) for mode, config in configs.items()}
    flops = {mode: batch_size * base.block_size * GPT(config).flops_per_token() for mode, config in configs.items()}
    return compare(steps, training_batches(base)[0], flops)


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
    parts = {"train": train, "modes": each_mode, "data": data}
    if what not in parts:
        raise SystemExit(f"what={what!r}: choose one of {', '.join(parts)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    report = {"settings": settings, "torch": torch.__version__, "threads": torch.get_num_threads()}
    try:
        report[what] = parts[what](settings)
    except ValueError as error:  # of a name or a shape
        raise SystemExit(f"bench.py: {error}")
    write_json(out, report)


if __name__ == "__main__":
    main()
