"""The machine: device, dtype and compiler, several ranks, and facts about it for the log."""

import ctypes
import inspect
import os
import platform
import re
import shutil
import subprocess
import sys
from functools import cache, partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

try:
    import resource
except ImportError:  # Windows does not have it
    resource = None

PEAK_FLOPS = {  # dense bfloat16 FLOP/s from the data sheets; other devices get no MFU
    "GB200": 2500e12, "B200": 2250e12,
    "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12,
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "A40": 150e12, "A10G": 70e12, "L4": 121e12,
    "RTX 6000 Ada": 364e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
# names of other chips, and of parts of one (MIG, or a virtual GPU such as A100-10C)
NOT_THE_CARD = r"\b(Laptop|Max-Q|Ti|D|MIG)\b|-\d+[ABCQ]\b"


def pick_device(name, local_rank=0):
    """The torch.device of a setting. auto: CUDA if there is any, else Apple's mps, else the CPU."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise SystemExit(f"device={name!r}: must be auto, cpu, mps, cuda or cuda:N")
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name.startswith("cuda") and not cuda:
        raise SystemExit(f"device={name!r}: torch sees no CUDA device: use --device=auto")
    if name == "mps" and not mps:
        raise SystemExit("device='mps': torch sees no Apple GPU: use --device=auto")
    if name.startswith("cuda:") and local_rank > 0:
        raise SystemExit(f"device={name!r}: several processes need --device=cuda, one GPU each")
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    if name == "cuda":
        name = f"cuda:{local_rank}"
    if name.startswith("cuda:") and int(name[5:]) >= torch.cuda.device_count():
        raise SystemExit(f"device={name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def prepare_process(device):
    """Set what a process needs before it computes on a device, and show each line at once.

    glibc returns the memory of freed tensors to the system. On a CPU, new tensors then cause
    thousands of page faults in a training step. Two thresholds make glibc keep the memory.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has no buffer
        sys.stdout.reconfigure(line_buffering=True, errors="replace")  # also in a pipe
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
        torch.set_float32_matmul_precision("high")  # float32 products round inputs to TF32
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 30) and mallopt(-1, 1 << 30)  # M_MMAP_THRESHOLD, then M_TRIM_THRESHOLD


def pick_dtype(name, device_type):
    """float32 or bfloat16, for autocast. auto: bfloat16 if the hardware multiplies in it."""
    if name not in ("auto", "float32", "bfloat16"):
        raise SystemExit(f"dtype={name!r}: must be auto, float32 or bfloat16")
    if name != "auto":
        return name
    if device_type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # torch has only private checks for CPUs
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast and device_type != "mps" else "float32"


def autocast(device, dtype):
    enabled = dtype == "bfloat16"
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=enabled)


def has_compiler():
    """Whether there is the C++ compiler that torch.compile needs on a CPU."""
    return shutil.which("g++") is not None


def can_compile(device_type):
    """Whether torch.compile works: on CUDA, and on Linux CPUs that have a C++ compiler."""
    if device_type == "cpu":
        return sys.platform == "linux" and has_compiler()
    return device_type == "cuda"


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = open("/proc/cpuinfo").read() if os.path.exists("/proc/cpuinfo") else ""
    return re.findall(r"model name\s*: (.*)", cpuinfo + f"model name : {platform.processor()}")[0]


def cores():
    """The number of cores that this process may use."""
    known = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
    return len(os.sched_getaffinity(0)) if known else os.cpu_count()


def threads_that_want_to_run():
    """On this machine now, of all programs; 0 if the system does not say. OpenMP's threads wait for
    each other in every operation: with fewer cores than such threads, a step is many times slower.
    """
    loads = "/proc/loadavg"
    return int(open(loads).read().split()[3].split("/")[0]) if os.path.exists(loads) else 0


def gathered(x):
    """The full tensor if FSDP has sharded x, else x. Every rank must call this function."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def shard_like(x, p, from_rank):
    """This rank's part of x if FSDP has sharded p and x has p's shape, else x.

    from_rank: the rank that has x. None: every rank has it, and nothing is sent.
    """
    if not isinstance(p, DTensor) or x.shape != p.shape:
        return x
    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=from_rank)


@torch.no_grad()
def over_ranks(model, device, world, shard):
    """Move a model to the device of this rank. Returns what a training step calls."""
    if shard == "fsdp":  # gathers parameters in float32, to match DDP
        shard_over_ranks(model, device)
        return model
    model.to(device)
    if world == 1:
        return model
    devices = [device.index] if device.type == "cuda" else None
    wrap = torch.nn.parallel.DistributedDataParallel
    new = "forward_sync_buffers"  # its name since torch 2.13
    known = inspect.signature(wrap).parameters
    return wrap(model, device_ids=devices, **{new if new in known else "broadcast_buffers": False})


def shard_over_ranks(model, device):
    """Give every rank its share of the model that rank 0 has built (FSDP2).

    The other ranks call this with a model on the meta device: only rank 0 ever has all weights.
    """
    if dist.get_rank() > 0:
        model.to_empty(device="cpu")  # takes no memory until it is written to
        if model.config.tied:
            model.head.weight = model.embed.weight
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model.blocks, model):
        whole = {name: p.detach() for name, p in module.named_parameters()}
        fully_shard(module, mesh=mesh)
        for name, p in module.named_parameters():
            p.copy_(shard_like(whole[name], p, from_rank=0))
    for x in model.buffers():
        dist.broadcast(x, src=0)


def peak_flops(name):
    """Dense bfloat16 FLOP/s of a device by its name, or None. The longest key that fits counts."""
    if re.search(NOT_THE_CARD, name):
        return None
    found = [key for key in PEAK_FLOPS if re.search(rf"\b{key}\b", name)]
    return PEAK_FLOPS[max(found, key=len)] if found else None


def peak_memory_gb(device):
    """The most memory that this process has used so far; None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    if resource is None:
        return None
    unit = 1024 if sys.platform == "linux" else 1  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


@cache
def commit():
    """The git commit of this directory, +changes if its code differs; empty without git."""
    if shutil.which("git") is None:
        return ""
    here = os.path.dirname(os.path.abspath(__file__))
    ask = partial(subprocess.run, cwd=here, capture_output=True, text=True)
    changes = ask(["git", "status", "--porcelain", "--untracked-files=no", "*.py"]).stdout
    return ask(["git", "rev-parse", "HEAD"]).stdout.strip() + ("+changes" if changes else "")
