"""
Train each variant at each learning rate, then the best rate of each variant with more seeds.

It runs one train.py per core at a time, with one thread each. It skips finished runs, so a study
can be stopped and started again. Logs: results/NAME/VARIANT-LR-SEED/log.jsonl.
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
COMMON = "config/plain.py --residual=nag --device=cpu --save_interval=100 --log_interval=10 "
COMMON = (COMMON + "--eval_interval=200 --eval_tokens=65536").split()
LOOK = ["--what=depth", "--depth_tokens=4096", "--batch_size=8"]


def final_loss(run):
    """Final validation loss of a run; infinity if it diverged, None if it is not finished."""
    log = run / "log.jsonl"
    lines = log.open() if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    if not records or "step" not in records[-1]:
        return None
    header, last = next(r["run"] for r in records if "run" in r), records[-1]
    if last.get("bad_steps", 0) >= header["settings"]["max_bad_steps"]:
        return math.inf
    budget = header["settings"].get("flops_budget")
    finished = last["flops"] >= budget if budget else last["step"] >= header["max_iters"]
    return last["val_loss"] if finished else None


def refuse_mixed_data(runs):
    """Refuse runs on different data. For example, data/python depends on the Python version."""
    data = {}
    for run in runs:
        with (run / "log.jsonl").open() as log:
            header = next(json.loads(line)["run"] for line in log if '"run"' in line)
        data.setdefault(str(header.get("data")), run)
    if len(data) > 1:
        different = " and ".join(run.name for run in data.values())
        different += " were trained on different data"
        raise SystemExit(f"{different}: move the old runs away to train them again")


def train(run, args, eval_args):
    """Train one run, or continue it, then evaluate it."""
    common = dict(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    out, loss = f"--out_dir={run.relative_to(ROOT)}", final_loss(run)
    if loss is None:
        subprocess.run([sys.executable, "train.py", *args, out, "--init_from=auto"], **common)
        loss = final_loss(run)
        if loss is None:
            raise SystemExit(f"{run.name} did not finish: see the message of train.py above")
        print(run.name, loss, flush=True)
    if eval_args and not (run / "eval.json").exists() and loss < math.inf:
        subprocess.run([sys.executable, "eval.py", out, *eval_args], check=True, **common)


def sweep(name, variants, learning_rates, seeds, common=(), then=()):
    """Train all runs of a study. Returns {variant: {learning rate: [loss of each seed]}}.

    variants is {name: arguments of train.py}. common are arguments for all of them. then are the
    arguments of eval.py, or a function that returns them for the name of a variant.
    """

    def run(variant, lr, seed):
        return ROOT / "results" / name / f"{variant}-{lr:g}-{seed}"

    def job(at):
        variant, lr, seed = at
        args = [*common, *variants[variant], f"--learning_rate={lr}", f"--seed={seed}"]
        train(run(*at), args, then(variant) if callable(then) else then)

    def best(variant):
        return min(learning_rates, key=lambda lr: final_loss(run(variant, lr, seeds[0])))

    def losses(variant, lr):
        finals = [final_loss(run(variant, lr, seed)) for seed in seeds]
        return [loss for loss in finals if loss is not None]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        grid = [(variant, lr, seeds[0]) for lr in learning_rates for variant in variants]
        list(pool.map(job, grid))
        more = [(variant, best(variant), seed) for seed in seeds[1:] for variant in variants]
        list(pool.map(job, more))
    refuse_mixed_data([run(*at) for at in grid + more])
    return {variant: {lr: losses(variant, lr) for lr in learning_rates} for variant in variants}


def table(losses):
    """Print one line per variant: the loss at each rate, mean and deviation at the best rate."""
    rates = list(next(iter(losses.values())))
    print("| variant | " + " | ".join(f"lr {lr:g}" for lr in rates) + " | best: mean ± std (n) |")
    print("|---" * (len(rates) + 2) + "|")
    for variant, by_lr in losses.items():
        best = min(by_lr.values(), key=lambda seeds: seeds[0])
        spread = f" ± {statistics.stdev(best):.3f}" if len(best) > 1 else ""
        cells = " | ".join(f"{seeds[0]:.3f}" for seeds in by_lr.values())
        print(f"| {variant} | {cells} | {statistics.mean(best):.3f}{spread} ({len(best)}) |")
