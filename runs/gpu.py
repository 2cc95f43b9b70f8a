"""
What only a machine with a GPU can measure: about ten minutes with 16 CPU cores.

    python runs/gpu.py --what=residual   reads and writes of the stream, which h100.py counts
    python runs/gpu.py --what=steps      training steps, forwards, generation, mixtures of depths
    python runs/gpu.py --what=losses     train 12 blocks of width 256, and pre-norm also for longer

The first two run bench.py in several processes. These compile side by side, and then measure one
after another, on a quiet machine. The first mode of each process is pre-norm, and ratios are to it.
The numbers go to results/speed/gpu_WHAT.json. The third trains several models at a time on one GPU:
each learning rate is tuned with one seed, as in judge.py, then new seeds train. Finished runs are
in results/gpu.jsonl, and are not repeated.
"""

import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import get_context
from threading import BrokenBarrierError, Event

import judge
import study
import torch
from stats import gap_of, plus_minus
from study import ROOT

import bench
import machine
from configurator import configure

what = "residual"  # residual, steps or losses

PLAIN = f"{ROOT}/config/plain.py --init_scale=0.02 --block_size=1024"
BLOCK = f"{PLAIN} --n_layer=2 --n_head=16 --n_kv_head=4 --n_embd=2048 --vocab_size=256"
STREAM = f"{BLOCK} --batch_size=32 --rounds=25"
WIDE = f"{BLOCK} --n_hidden=8192 --activation=swiglu"
DEEP = f"{PLAIN} --n_layer=64 --n_head=10 --n_embd=640 --vocab_size=256 --batch_size=2"
GPT2 = f"{PLAIN} --n_layer=12 --n_head=12 --n_embd=768 --vocab_size=50304"
LLAMA = f"{WIDE} --n_layer=16 --n_head=32 --n_kv_head=8 --vocab_size=50304 --new_tokens=128,512"
SMALL = "--n_layer=12 --n_head=4 --n_embd=256 --block_size=512 --batch_size=64"
PROCESSES = {  # name: what bench.py does there, the modes, more arguments
    "residual": {
        modes: ("residual", f"prenorm,{modes}", STREAM)
        for modes in (
            "prenorm,none,postnorm,perinorm,outnorm,lns", "dyt,derf,deepnorm,keel,rezero",
            "mixln,x0mix,orthogonal,ngpt", "nag,bhyt,bhyt_exact,prenorm_approx",
            "attnres,attnres_block,hc", "ihc,mhc",
        )
    },
    "steps": {
        "2 x 2048, norms": ("train", "prenorm,prenorm,bhyt,bhyt_exact,perinorm,lns,dyt", WIDE),
        "2 x 2048, nag": ("train", "prenorm,nag", WIDE),
        "2 x 2048, streams": ("train", "prenorm,hc,ihc", WIDE),
        "2 x 2048, mhc": ("train", "prenorm,mhc", WIDE),
        "2 x 2048, sources": ("train", "prenorm,attnres,attnres_block", WIDE),
        "64 x 640": ("train", "prenorm,prenorm,nag,bhyt", DEEP),
        "12 x 768": ("train", "prenorm,prenorm,nag,bhyt", GPT2),
        "12 x 768, streams": ("train", "prenorm,ihc", GPT2),
        "12 x 256": ("train", "prenorm,nag,ihc", SMALL),
        "forward": ("forward", "prenorm,prenorm,perinorm,bhyt,bhyt_exact,nag", WIDE),
        "generation of 1": ("generate", "prenorm,nag,bhyt", f"{LLAMA} --batches_of=1 --rounds=3"),
        "generation of 32": ("generate", "prenorm,nag,bhyt", f"{LLAMA} --batches_of=32 --rounds=3"),
        "mixture, prenorm": ("mod", "prenorm", GPT2),
        "mixture, nag": ("mod", "nag", f"{GPT2} --rates=0,0.4"),
    },
}  # fmt: skip
DEVICE = "cuda"
PATIENCE = 300  # seconds to wait for other processes to compile

SCALE = study.parse(f"{SMALL} --max_iters=600 --log_interval=10 --eval_tokens=None".split())
RATES = {"muon": (0.008, 0.016, 0.032), "adamw": (0.002, 0.004, 0.008)}
MODES = (("prenorm", "muon"), ("nag", "muon"), ("ihc", "muon"), ("prenorm", "adamw"))
MODES += (("nag", "adamw"),)
LONGER = 1.4  # pre-norm also trains for so many times the steps
SEEDS = 3
AT_A_TIME = 4  # runs on one GPU


def meet(ready):
    """Wait for the other processes. If one of them does not come, go on without it."""
    try:
        ready.wait(PATIENCE)
    except BrokenBarrierError:
        print("not all processes have compiled")


def bench_in_turn(argv, speeds, log, ready, turn):
    """The process of one bench.py. It measures once all have compiled, while no other measures.

    speeds: those of a copy and of a matrix product, which are measured before.
    """
    race, arrived = bench.race, Event()

    def race_in_turn(candidates, rounds):
        if not arrived.is_set():
            for run in candidates.values():
                run(), run()
            torch.cuda.empty_cache()
            arrived.set()
            meet(ready)
            turn.acquire()
        return race(candidates, rounds)

    bench.race, bench.machine_speeds = race_in_turn, lambda: speeds
    sys.argv = ["bench.py", *argv]
    with open(log, "w") as file, redirect_stdout(file):
        try:
            bench.main()
        finally:
            turn.release() if arrived.is_set() else meet(ready)


def speeds_of(processes):
    folder = ROOT / "out" / "gpu"
    folder.mkdir(parents=True, exist_ok=True)
    machine.prepare_process(DEVICE)
    speeds = bench.floors(DEVICE, "bfloat16", 5)
    torch.cuda.empty_cache()
    several, started = get_context("spawn"), {}
    ready, turn = several.Barrier(len(processes)), several.Lock()
    for i, (name, (part, modes, more)) in enumerate(processes.items()):
        out, log = folder / f"{i}.json", folder / f"{i}.txt"
        argv = [*more.split(), f"--what={part}", f"--modes={modes}", f"--device={DEVICE}"]
        how = ([*argv, f"--out={out}"], speeds, log, ready, turn)
        started[name] = several.Process(target=bench_in_turn, args=how), part, argv, out, log
        started[name][0].start()

    report = {"device": machine.device_name(torch.device(DEVICE)), "torch": torch.__version__}
    report |= {"git": machine.commit(), "copy_bytes_s": speeds[0], "matmul_flops_s": speeds[1]}
    for name, (job, part, argv, out, log) in started.items():
        job.join()
        print(f"\n{name}\n{log.read_text()}", flush=True)
        if not job.exitcode:
            measured = json.loads(out.read_text())[part]
            report[name] = {"argv": " ".join(argv), "measured": measured}
    path = ROOT / "results" / "speed" / f"gpu_{what}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")


def losses():
    """Train, and print the differences from pre-norm with the same optimizer, paired by seed."""
    study.devices = lambda: [f"{DEVICE}:0"] * AT_A_TIME
    lines_of = partial(study.run, "gpu")

    def runs_of(pair):
        mode, optimizer = pair
        scale = SCALE | {"optimizer": optimizer}
        chosen = judge.best_rate(scale, mode, {}, RATES[optimizer], lines_of, 1.0)
        runs = {(*pair, 1.0): judge.of_seeds(scale, mode, chosen, SEEDS)}
        if mode == "prenorm":
            runs[*pair, LONGER] = judge.of_seeds(scale, mode, chosen, SEEDS, LONGER)
        return runs

    with ThreadPoolExecutor(len(MODES)) as pool:
        runs = {name: of for found in pool.map(runs_of, MODES) for name, of in found.items()}
    found = iter(lines_of(sum(runs.values(), [])))
    lines = {name: [next(found) for _ in range(SEEDS)] for name in runs}
    for (mode, optimizer, length), ours in lines.items():
        mean = statistics.mean(line["loss"] for line in ours)
        gap = gap_of(ours, lines["prenorm", optimizer, 1.0])
        print(f"{mode} {optimizer} {length}: {mean:.4f} {plus_minus(gap)}")


def main():
    configure(globals(), argv=sys.argv[1:])
    if what not in (*PROCESSES, "losses"):
        raise SystemExit(f"what={what!r}: choose residual, steps or losses")
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device")
    losses() if what == "losses" else speeds_of(PROCESSES[what])


if __name__ == "__main__":
    main()
