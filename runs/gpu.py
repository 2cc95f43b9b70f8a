"""
What only a GPU can tell about speed, in a few minutes with 16 CPU cores.

    python runs/gpu.py --only=residual     the processes whose names start so
    python runs/gpu.py --only=step         others: forward, decoding, skipping
    python runs/gpu.py --only=race --nanogpt_model=PATH    ours and nanoGPT's; PATH: its model.py

It runs bench.py in several processes. These compile side by side, and then measure one after
another, while the machine is quiet. But the compiler chooses between kernels by timing them while
the others compile. The first mode of each process is pre-norm, and ratios are to it. Times
and the slowest kernels go to results/speed/gpu.json, where they replace older ones of the same
process, and what bench.py prints goes to out/gpu. All processes together need more than 140 GB of
the GPU's memory.

The residual of two sublayers is that of runs/h100.py, at eight times the batch: eight times the
bytes counted there, over these times, is the rate at which they move.
"""

import json
import sys
import time
from contextlib import redirect_stdout
from multiprocessing import get_context, parent_process
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from torch._inductor import config as inductor

import bench
import machine
from configurator import configure

only = ""  # the first letters of the names of some processes; empty: all
nanogpt_model: str | None = None  # race: as in bench.py
patience = 400  # seconds to compile, and to measure; a process that takes longer is ended

PLAIN = f"{ROOT}/config/plain.py --init_scale=0.02 --block_size=1024"
BLOCK = f"{PLAIN} --n_layer=2 --n_head=16 --n_kv_head=4 --n_embd=2048 --vocab_size=256"
STREAM = f"{BLOCK} --what=residual --batch_size=32 --rounds=25"
WIDE = f"{BLOCK} --what=train --n_hidden=8192 --activation=swiglu"
GPT2 = f"{PLAIN} --n_layer=12 --n_head=12 --n_embd=768 --vocab_size=50304"
BATCHED = f"{GPT2} --batch_size=32 --loss_chunk=8192"
RACE = f"{GPT2} --what=nanogpt --modes=prenorm,nag"
DECODE = f"{WIDE} --what=generate --n_layer=4 --new_tokens=128,512 --modes=prenorm,prenorm,bhyt,nag"
PROCESSES = {
    "residual: norms": f"{STREAM} --modes=prenorm,prenorm,none,postnorm,perinorm,lns",
    "residual: tanh": f"{STREAM} --modes=prenorm,dyt,derf,bhyt",
    "residual: others": f"{STREAM} --modes=prenorm,x0mix,orthogonal,keel,ngpt",
    "step, 2 x 2048: norms": f"{WIDE} --modes=prenorm,prenorm,bhyt,perinorm,lns",
    "step, 2 x 2048: tanh": f"{WIDE} --modes=prenorm,dyt,derf",
    "step, 2 x 2048: others": f"{WIDE} --modes=prenorm,x0mix,orthogonal,keel,ngpt",
    "step, 8 x 2048": f"{WIDE} --n_layer=8 --modes=prenorm,attnres,attnres_block",
    "step, 12 x 768: nag": f"{BATCHED} --what=train --modes=prenorm,prenorm,nag",
    "forward": f"{WIDE} --what=forward --modes=prenorm,prenorm,perinorm,bhyt,nag",
    "decoding": f"{DECODE} --batches_of=1",
    "decoding, 32 at once": f"{DECODE} --batches_of=32",
    "skipping": f"{BATCHED} --what=mod --modes=prenorm --rates=0,0.2,0.4",
    "race, 8 sequences": f"{RACE} --batch_size=8",
    "race, 32 sequences": f"{RACE} --batch_size=32",
}
SLOW = ("nag", "hc", "mhc", "ihc", "smhc", "wide", "attnres", "attnres_block")  # to compile
PROCESSES |= {f"residual: {mode}": f"{STREAM} --modes=prenorm,{mode}" for mode in SLOW}
PROCESSES |= {f"step, 2 x 2048: {mode}": f"{WIDE} --modes=prenorm,{mode}" for mode in SLOW}
DEVICE = "cuda"
FOLDER = ROOT / "out" / "gpu"  # what bench.py prints, and its numbers
RESULT = ROOT / "results" / "speed" / "gpu.json"


def kernels(run, most=12):
    """{kernel: [calls, milliseconds]} of one run: those that take longest."""
    with torch.profiler.profile() as profile:
        bench.seconds(run)
    found = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls, ms = found.get(event.name[:80], (0, 0.0))
            found[event.name[:80]] = calls + 1, ms + event.time_range.elapsed_us() / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:most])


def bench_in_turn(i, argv, speeds, out, ready, turn):
    """The process of one bench.py: it is ready when it has compiled, and measures when turn is i.

    speeds: what bench.floors returned before the processes started.
    """
    race, slowest = bench.race, {}

    def race_in_turn(candidates, rounds):
        if not ready.value:
            for run in candidates.values():
                run(), run()
            torch.cuda.empty_cache()
            ready.value = 1
            while turn.value != i:
                time.sleep(0.05)
                if not parent_process().is_alive():  # killed: nobody's turn comes any more
                    raise SystemExit(1)
        times = race(candidates, rounds)
        if not slowest:  # of the first race alone
            slowest.update((name, kernels(run)) for name, run in candidates.items())
        return times

    bench.race, bench.machine_speeds = race_in_turn, lambda: speeds
    inductor.compile_threads = 1  # a core for each process
    sys.argv = ["bench.py", *argv, f"--out={out}"]
    with open(out.with_suffix(".txt"), "w") as file, redirect_stdout(file):
        bench.main()
    out.write_text(json.dumps(json.loads(out.read_text()) | {"kernels": slowest}))


def main():
    configure(globals(), argv=sys.argv[1:])
    FOLDER.mkdir(parents=True, exist_ok=True)
    able = {name: argv for name, argv in PROCESSES.items() if nanogpt_model or RACE not in argv}
    chosen = {name: argv for name, argv in able.items() if name.startswith(only)}
    if not chosen and only.startswith("race"):
        raise SystemExit("race: give --nanogpt_model=PATH, the path of nanoGPT's model.py")
    if not chosen:
        raise SystemExit(f"only={only!r}: no name starts so: {', '.join(PROCESSES)}")
    machine.prepare_process(machine.pick_device(DEVICE))
    speeds = bench.floors(DEVICE, "bfloat16", 5)
    torch.cuda.empty_cache()
    report = json.loads(RESULT.read_text()) if RESULT.exists() else {}

    several, started, began = get_context("spawn"), [], time.monotonic()
    turn = several.RawValue("i", -1)
    for i, argv in enumerate(chosen.values()):
        out, ready = FOLDER / f"{i}.json", several.RawValue("b", 0)
        argv = [*argv.split(), f"--device={DEVICE}", f"--nanogpt_model={nanogpt_model}"]
        args = (i, argv, speeds, out, ready, turn)
        started.append((several.Process(target=bench_in_turn, args=args), ready, out))
        started[-1][0].start()

    compiling = lambda: [job for job, ready, _ in started if not ready.value and job.is_alive()]
    while compiling() and time.monotonic() - began < patience:
        time.sleep(0.5)
    for job in compiling():
        job.terminate()
    for i, (name, (job, _, out)) in enumerate(zip(chosen, started)):
        turn.value = i
        job.join(patience)
        why = f"exit code {job.exitcode}"
        if job.is_alive():
            why = f"not done after {patience} s"
            job.terminate()
            job.join(10)
        print(f"{name}: {f'failed, {why}' if job.exitcode != 0 else 'measured'}", flush=True)
        if job.exitcode != 0:
            continue
        found = json.loads(out.read_text())
        del found["settings"]
        report[name] = {"argv": chosen[name].removeprefix(f"{ROOT}/")} | found
        RESULT.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
