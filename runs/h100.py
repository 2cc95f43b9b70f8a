"""
What compiled code would move on an H100, counted on a machine without a GPU.

    python runs/h100.py --modes=prenorm,nag,bhyt     two sublayers' residual, forward and backward
    python runs/h100.py --what=step                  training steps of two blocks

Inductor writes the kernels for sm_90, Triton compiles all of them, and Inductor counts the bytes
that each one reads and writes: the same numbers on every machine. A pass is one read or write of
the stream (4, 1024, 2048). The numbers leave out the time of launches, caches, cuBLAS and NCCL.

It counts the kernels that compiled code launches. A step's embedding and optimizers are not
compiled. Of a step it also counts calls of compiled code, and masks: attentions with a mask, and
softmaxes, because such an attention may be written as one. The loss and each router of experts have
a softmax, too.

Tensors are fake: they have shapes and no data. It needs g++ and `pip install triton==3.9.0`.
"""

import ctypes
import importlib.util
import itertools
import json
import logging
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import configure

what = "residual"  # residual: reads and writes of the stream alone; step: a training step
modes = "all"  # separated by commas: all, or names with changes such as nag:nag_directions=0
stream = "bfloat16"  # residual: dtype of all inputs; a step has train.py's: float32 and bfloat16
out: str | None = None  # a .json file for the numbers

SHAPE = (4, 1024, 2048)
BLOCK = dict(n_layer=8, n_head=16, n_kv_head=4, n_embd=2048, block_size=1024, vocab_size=256)
READS = ((2, 2), (9, 9), (1, 0))  # of Attention Residuals: sources, and those that are shared
# a line that starts a kernel: of Triton, of cuBLAS, or another one of PyTorch
LAUNCH = re.compile(r"\w\.run\(|extern_kernels\.\w+\(|torch\.ops\.(aten|residual)\.[\w.]+\(")
MASKED = re.compile(r"softmax|(?<!flash_)attention(?!_backward)")  # that of flash has no mask
GUARD = """
#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
bool at::accelerator::isAccelerator(c10::DeviceType) { return false; }
"""


def load_guard():
    """Give the CPU build of torch a device guard for CUDA. Before torch is imported."""
    (torch_folder,) = importlib.util.find_spec("torch").submodule_search_locations
    folder = tempfile.mkdtemp()
    command = ["g++", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-", "-o", "guard.so"]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
    subprocess.run(command, input=GUARD, text=True, cwd=folder, check=True)
    ctypes.CDLL(f"{torch_folder}/lib/libc10.so", ctypes.RTLD_GLOBAL)
    ctypes.CDLL(f"{folder}/guard.so", ctypes.RTLD_GLOBAL)


load_guard()
import torch

DEVICE = SimpleNamespace(  # facts about an H100 SXM that Inductor asks for
    name="H100", major=9, minor=0, gcnArchName="", uuid="", is_integrated=False,
    is_multi_gpu_board=0, pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
    multi_processor_count=132, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    regs_per_multiprocessor=2**16, warp_size=32, shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10, shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20, total_memory=79 * 2**30,
)  # fmt: skip
ANSWERS = {  # what functions of torch.cuda return
    "is_available": True, "is_initialized": False, "is_bf16_supported": True, "_lazy_init": None,
    "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
    "get_device_properties": DEVICE, "get_device_capability": (9, 0), "get_device_name": "H100",
    "_exchange_device": 0, "_maybe_exchange_device": 0, "memory_allocated": 0,
    "mem_get_info": (DEVICE.total_memory, DEVICE.total_memory), "manual_seed_all": None,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
    "current_stream": SimpleNamespace(cuda_stream=0), "is_current_stream_capturing": False,
}  # fmt: skip
for name, answer in ANSWERS.items():  # before Inductor is imported
    setattr(torch.cuda, name, lambda *args, answer=answer, **more: answer)
torch.accelerator.is_available = lambda: False  # else Dynamo asks for its stream

try:
    import triton
    from triton.backends.compiler import GPUTarget
except ImportError:
    raise SystemExit("this needs triton: pip install triton==3.9.0")
from torch._inductor import config as inductor
from torch._inductor import metrics
from torch._inductor.ir import UserDefinedTritonKernel
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.scheduler import BaseSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode

import bench
import kernels
import mod
from machine import autocast
from model import GPT, RESIDUALS, GPTConfig

TARGET = GPUTarget("cuda", 90, 32)
plain_bytes_of_each = BaseSchedulerNode.get_read_write_buffer_accesses
plain_call = CompiledFxGraph.__call__
plain_attention = torch.nn.functional.scaled_dot_product_attention
spills = []  # of each compiled kernel: bytes of registers that a thread keeps in memory
calls = []  # of compiled code: (launches, softmaxes and attentions with a mask)
ours = {}  # {a kernel of kernels.py: the largest numbers of resources, and the lowest occupancy}


def flash_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
    """The kernel that CUDA takes without a mask."""
    if attn_mask is not None or q.dtype == torch.float32:
        return plain_attention(q, k, v, attn_mask, dropout_p, is_causal, **more)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, dropout_p, is_causal, scale=more.get("scale"))[0]


def resources(compiled):
    """Of a compiled kernel: registers and spilled bytes of a thread, bytes of shared memory of a
    program, and the share of an SM's warps that can run at a time."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True).stdout
    registers = max(map(int, re.findall(r"REG:(\d+)", told)))
    spilled = sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", told)))
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps

    of_warp = 256 * math.ceil(registers * DEVICE.warp_size / 256)  # registers come in such pieces
    most = DEVICE.max_threads_per_multi_processor // DEVICE.warp_size
    of_shared = DEVICE.shared_memory_per_multiprocessor // (shared + 1024)  # 1 KiB is reserved
    programs = min(most // warps, DEVICE.regs_per_multiprocessor // (of_warp * warps), of_shared)
    return registers, spilled, shared, programs * warps / most


def keep(name, found):
    """Note the resources of a kernel of kernels.py."""
    before = ours.get(name, found)
    ours[name] = [*map(max, found[:3], before), min(found[3], before[3])]


def compile_only(self, *args, **kwargs):
    """In place of loading each kernel onto the device."""
    self._precompile_worker()
    for result in self.compile_results:
        found = resources(result.kernel)
        spills.append(found[1])
        if hasattr(kernels, self.fn.__name__):
            keep(self.fn.__name__, found)


def compile_reads():
    """Compile the kernels of Attention Residuals for a first sublayer, and for a second one with
    tokens that skip. Inductor's code calls them, but does not contain them."""
    pointer = "*fp32" if stream == "float32" else "*bf16"
    numbers = dict(D=SHAPE[-1], BLOCK=SHAPE[-1], EPS=1e-6, NORM_EPS=1e-6)
    both = kernels.read_forward, kernels.read_backward
    how = dict(num_warps=kernels.warps(SHAPE[-1]))
    for (count, shared), kernel in itertools.product(READS, both):
        types = dict.fromkeys(kernel.arg_names, "*fp32") | {"N": "i32", "ran_ptr": "*i1"}
        types |= dict.fromkeys(("vs", "of_vs"), (pointer,) * count)
        of_stream = ("y_ptr", "o_ptr", "o2_ptr", "of_y_ptr", "of_o_ptr", "of_o2_ptr")
        types |= dict.fromkeys(of_stream, pointer)
        absent = ("ran_ptr", "o_ptr", "lse_ptr") if shared else ("q2_ptr",)
        fixed = numbers | dict.fromkeys(absent) | {"SHARED": shared}
        fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
        types = {n: "constexpr" if n in fixed else types[n] for n in kernel.arg_names}
        lists = [at for at, kind in enumerate(types.values()) if isinstance(kind, tuple)]
        aligned = [(at,) for at, kind in enumerate(types.values()) if kind[0] == "*"]
        aligned += itertools.product(lists, range(count))
        aligned = dict.fromkeys(aligned, [["tt.divisibility", 16]])
        source = triton.compiler.ASTSource(kernel, types, fixed, aligned)
        keep(kernel.__name__, resources(triton.compile(source, TARGET, how)))


def bytes_of_each(self, include_reads, include_writes):
    """Inductor counts what a kernel of kernels.py writes twice: as an input, and as changed. Such a
    kernel reads or writes each of its tensors once; what it reads again right away is in the L2."""
    found = plain_bytes_of_each(self, include_reads, include_writes)
    if isinstance(self.node, UserDefinedTritonKernel):
        changed = {output.get_name() for output in self.get_outputs()}
        found = {name: count for name, count in found.items() if name not in changed}
    return found


def count_and_call(self, inputs):
    """In place of a call of compiled code: also counts its launches, and what may have a mask."""
    lines = [line for line in self.source_code.splitlines() if not line.lstrip().startswith("#")]
    targets = [str(node.target) for node in self._original_gm.graph.nodes]
    launches = sum(len([*LAUNCH.finditer(line)]) for line in lines)
    calls.append((launches, sum(bool(MASKED.search(target)) for target in targets)))
    return plain_call(self, inputs)


def stand_in():
    """Let the compiler believe in an H100."""
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    FakeTensorMode.avoid_device_init = True
    torch.nn.functional.scaled_dot_product_attention = flash_attention
    torch.nn.Module.to = lambda self, *args, **more: self  # fake parameters start on the device
    torch.Tensor.unflatten = torch._C.TensorBase.unflatten  # Dynamo cannot trace super() in it
    mod.Router.update_k = lambda self: setattr(self, "k", round((1 - self.rate) * self.T))

    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: TARGET))
    triton_helpers.set_driver_to_gpu = lambda: None
    triton_heuristics.CachingAutotuner.precompile = compile_only
    triton_heuristics.StaticTritonCompileResult.can_statically_launch = lambda *args, **more: None
    BaseSchedulerNode.get_read_write_buffer_accesses = bytes_of_each
    CompiledFxGraph.__call__ = count_and_call
    inductor.compile_threads = 1  # what is replaced here holds in this process only
    inductor.wrap_inductor_compiled_regions = True  # a call of compiled code runs no kernel
    inductor.force_disable_caches = True
    inductor.shape_padding = False  # it would time products
    inductor.triton.autotune_pointwise = False  # one configuration for each kernel, to be quick
    inductor.joint_graph_constant_folding = False  # it would compute constants on the device
    name = "torch._inductor.compile_fx.__inductor_metrics"
    logging.getLogger(name).setLevel(logging.INFO)  # else no bytes are counted
    torch._dynamo.config.recompile_limit = 256
    bench.dtype = "bfloat16"  # of autocast


def read_and_write(config):
    """Two sublayers of a mode without attention and MLP: two writes and two reads."""
    run = bench.two_sublayers(config, SHAPE, "cuda:0", stream)
    calls.clear()  # it has run the forward once
    run()


def training_step(config):
    model = GPT(bench.with_blocks(config, 2))
    model.compile_blocks()
    ids = torch.randint(config.vocab_size, SHAPE[:2])
    with autocast("cuda", "bfloat16"):
        model(ids, ids)[1].backward()


def measured(run, config):
    """Compile, and say what came out: a dict."""
    spills.clear()
    ours.clear()
    calls.clear()
    metrics.reset()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with FakeTensorMode(), torch.device("cuda:0"):
        run(config)
    if what == "residual" and config.residual == "attnres":
        compile_reads()
    itemsize = getattr(torch, stream).itemsize if what == "residual" else 4
    one_pass = math.prod(SHAPE) * itemsize
    passes = round(metrics.num_bytes_accessed / one_pass, 2)
    launches, masks = map(sum, zip(*calls))
    found = {"passes": passes, "kernels": launches}
    breaks = torch._dynamo.utils.counters["graph_break"]
    found |= {"spill": max(spills, default=0), "breaks": len(breaks)}
    if what == "step":
        found |= {"calls": len(calls), "masks": masks}
    return found | ({"ours": dict(ours)} if ours else {})


def cases():
    """(name, config) of everything to compile. A name is a mode, with or without changes."""
    names = ([*RESIDUALS] if name == "all" else [name] for name in modes.split(","))
    for name in itertools.chain(*names):
        mode, *changes = name.split(":")
        if mode not in RESIDUALS:
            raise SystemExit(f"modes={mode!r}: choose from {', '.join(RESIDUALS)}")
        changed = {key: json.loads(value) for key, value in (each.split("=") for each in changes)}
        yield name, GPTConfig(**BLOCK | changed, residual=mode)


def main():
    configure(globals(), argv=sys.argv[1:])
    if what not in ("residual", "step"):
        raise SystemExit(f"what={what!r}: choose residual or step")
    stand_in()
    run, report = read_and_write if what == "residual" else training_step, {}
    for name, config in cases():
        report[name] = found = measured(run, config)
        told = "  ".join(f"{key} {value}" for key, value in found.items())
        print(f"{name:<28} {told}", flush=True)
    if out:
        Path(out).write_text(json.dumps({"torch": torch.__version__, "modes": report}, indent=1))
    broken = [name for name, found in report.items() if found["breaks"] or found["spill"] > 1024]
    if broken and what == "step":
        raise SystemExit(f"graph breaks, or spills above 1024 bytes: {', '.join(broken)}")


if __name__ == "__main__":
    main()
