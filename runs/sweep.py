"""
Runs of train.py, as many at a time as there are cores, one thread each: every variant at every learning rate, then each
variant's best learning rate with more seeds. Whatever is already logged is skipped, so a script that calls this can be
killed and started again. A log is results/NAME/VARIANT-LR-SEED/log.jsonl.
"""

import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent


def final_loss(run):
    """Validation loss at the end of a run; infinity if it diverged; None if it is not finished"""
    log = run / "log.jsonl"
    records = (
        [json.loads(line) for line in log.open() if line.endswith("\n")] if log.exists() else []
    )
    if not records or "step" not in records[-1]:
        return None
    header, last = next(r["run"] for r in records if "run" in r), records[-1]
    if last.get("bad_steps", 0) >= header["settings"]["max_bad_steps"]:
        return math.inf
    budget = header["settings"].get("flops_budget")
    finished = last["flops"] >= budget if budget else last["step"] >= header["max_iters"]
    return last["val_loss"] if finished else None


def refuse_mixed_data(runs):
    """A table may only hold runs on the same data. Another machine's Python makes another data/python."""
    data = {}
    for run in runs:
        with (run / "log.jsonl").open() as log:
            header = next(json.loads(line)["run"] for line in log if '"run"' in line)
        data.setdefault(str(header.get("data")), run)
    if len(data) > 1:
        names = " and ".join(run.name for run in data.values())
        raise SystemExit(
            f"{names} were trained on different data: move the old runs away to do them again"
        )


def train(run, args, then):
    common = dict(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    out, loss = f"--out_dir={run.relative_to(ROOT)}", final_loss(run)
    if loss is None:
        subprocess.run([sys.executable, "train.py", *args, out, "--init_from=auto"], **common)
        loss = final_loss(run)
        if loss is None:
            raise SystemExit(f"{run.name} was not finished: what train.py says of it is above")
        print(run.name, loss, flush=True)
    if then and not (run / "eval.json").exists() and loss < math.inf:
        subprocess.run([sys.executable, "eval.py", out, *then], check=True, **common)


def sweep(name, variants, learning_rates, seeds, common=(), then=()):
    """variants: {name: arguments of train.py}; then: arguments of eval.py, or a function from the variant to them.
    Returns {variant: {lr: [loss of each seed]}}."""

    def run(variant, lr, seed):
        return ROOT / "results" / name / f"{variant}-{lr:g}-{seed}"

    def args(variant, lr, seed):
        return [*common, *variants[variant], f"--learning_rate={lr}", f"--seed={seed}"]

    def job(at):
        train(run(*at), args(*at), then(at[0]) if callable(then) else then)

    def best(variant):
        return min(learning_rates, key=lambda lr: final_loss(run(variant, lr, seeds[0])))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        grid = [(variant, lr, seeds[0]) for lr in learning_rates for variant in variants]
        list(pool.map(job, grid))
        more = [(variant, best(variant), seed) for seed in seeds[1:] for variant in variants]
        list(pool.map(job, more))
    refuse_mixed_data([run(*at) for at in grid + more])
    return {
        v: {
            lr: [x for s in seeds if (x := final_loss(run(v, lr, s))) is not None]
            for lr in learning_rates
        }
        for v in variants
    }


def table(losses):
    """One line a variant: the loss at each learning rate, and mean and spread over the seeds of the best"""
    rates = list(next(iter(losses.values())))
    print("| variant | " + " | ".join(f"lr {lr:g}" for lr in rates) + " | best: mean ± std (n) |")
    print("|---" * (len(rates) + 2) + "|")
    for variant, by_lr in losses.items():
        top = min(by_lr.values(), key=lambda x: x[0])
        spread = f" ± {statistics.stdev(top):.3f}" if len(top) > 1 else ""
        cells = " | ".join(f"{x[0]:.3f}" for x in by_lr.values())
        print(f"| {variant} | {cells} | {statistics.mean(top):.3f}{spread} ({len(top)}) |")
