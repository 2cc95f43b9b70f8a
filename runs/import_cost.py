"""
What it costs to import a 1B Llama: the time against copying its files, and the peak memory.

    python runs/import_cost.py    writes results/speed/import_1b.json

The weights are random bfloat16 numbers in shards of 500 MB, in a temporary folder that needs 7 GB.
Copy and import run in turn, each in a process of its own, and end when the files are on disk. The
time to start Python and load torch does not count.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hf
from data import write_json
from machine import device_name
from model import GPTConfig

ROUNDS = 5
SHARD = 500e6  # bytes
SHAPE = {"n_layer": 16, "n_head": 32, "n_kv_head": 8, "n_embd": 2048, "n_hidden": 8192}
CONFIG = GPTConfig(**hf.SOURCE | SHAPE | {"vocab_size": 50304, "block_size": 2048})
TIMED = "import sys, time; source, to = sys.argv[1:]; {}; began = time.perf_counter(); {}; "
TIMED += "print(time.perf_counter() - began, file=sys.stderr)"
ON_DISK = "[os.fsync(os.open(entry.path, os.O_RDONLY)) for entry in os.scandir(to)]"
COMMANDS = {
    "copy": TIMED.format("import os, shutil", f"shutil.copytree(source, to); {ON_DISK}"),
    "import": TIMED.format("import hf", "hf.import_model(source, to)"),
}


def make(folder):
    """Write a model in the layout of Hugging Face. Returns its size in bytes."""
    from safetensors.torch import save_file

    os.makedirs(folder)
    index, shard, size, total = {}, {}, 0, 0
    wanted = list(hf.file_names(CONFIG).values())
    for i, (name, shape) in enumerate(wanted):
        shard[name] = torch.randn(shape, dtype=torch.bfloat16)
        size += shard[name].nbytes
        if size > SHARD or i == len(wanted) - 1:
            file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(shard, os.path.join(folder, file))
            index |= dict.fromkeys(shard, file)
            total, shard, size = total + size, {}, 0
    write_json(os.path.join(folder, "model.safetensors.index.json"), {"weight_map": index})
    keys = hf.to_keys(CONFIG, CONFIG.n_hidden, {}, torch.bfloat16)
    write_json(os.path.join(folder, "config.json"), keys)
    return total


def timed(code, source, to):
    """Seconds of code that writes the folder `to`, without the start of Python. Removes it."""
    command = [sys.executable, "-c", code, source, to]
    ran = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    shutil.rmtree(to)
    return float(ran.stderr.split()[-1])


def main():
    with tempfile.TemporaryDirectory() as at:
        source, to = os.path.join(at, "model"), os.path.join(at, "to")
        size = make(source)
        seconds = {name: [] for name in COMMANDS}
        for _ in range(ROUNDS):
            for name, code in COMMANDS.items():
                seconds[name].append(timed(code, source, to))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    ratios = [a / b for a, b in zip(seconds["import"], seconds["copy"])]
    report = {"device": device_name(torch.device("cpu")), "bytes": size, "shard_bytes": SHARD}
    report |= {"seconds": seconds, "ratio": statistics.quantiles(ratios, n=4)}
    report |= {"peak_bytes": peak * 1024}
    print(json.dumps(report, indent=1))
    write_json(str(ROOT / "results" / "speed" / "import_1b.json"), report)


if __name__ == "__main__":
    main()
