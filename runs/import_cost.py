"""
What it costs to import a 1B Llama: the time against copying its files, and the peak memory.

    python runs/import_cost.py    writes results/speed/import_1b.json

The weights are random bfloat16 numbers in shards of 500 MB, in a temporary folder that needs 7 GB.
Copy and import run in turn, each in a process of its own, and end when the files are on disk.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
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
COPY = (
    "import os, shutil, sys; shutil.copytree(*sys.argv[1:]);"
    "[os.fsync(os.open(entry.path, os.O_RDONLY)) for entry in os.scandir(sys.argv[2])]"
)


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


def timed(command, to):
    """Seconds of a command, which writes the folder `to`. Removes this folder."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    shutil.rmtree(to)
    return seconds


def main():
    with tempfile.TemporaryDirectory() as at:
        source, to = os.path.join(at, "model"), os.path.join(at, "to")
        size = make(source)
        commands = {
            "copy": ("-c", COPY, source, to),
            "python and its imports": (
                "-c",
                "import sys, os; os.mkdir(sys.argv[1]); import hf",
                to,
            ),
            "import": ("hf.py", "import", source, f"--out_dir={to}"),
        }
        seconds = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, command in commands.items():
                seconds[name].append(timed(command, to))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    ratios = [a / b for a, b in zip(seconds["import"], seconds["copy"])]
    report = {"device": device_name(torch.device("cpu")), "bytes": size, "seconds": seconds}
    report |= {"ratio": statistics.quantiles(ratios, n=4), "peak_bytes": peak * 1024}
    print(json.dumps(report, indent=1))
    write_json(str(ROOT / "results" / "speed" / "import_1b.json"), report)


if __name__ == "__main__":
    main()
