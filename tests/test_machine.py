"""The tests of machines we do not have: what only a GPU runs, and the memory of large models.

`gpu` is a CPU that calls itself a GPU, so every branch for CUDA runs with real numbers.
"""

import glob
import json
import os
import signal
import sys
import threading
import time
import weakref
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import bench
import data as data_file
import generate
import machine
import streams
from model import GPT, RESIDUALS, GPTConfig
from norms import Stream
from test_all import (
    EXTRAS,
    HERE,
    PRELOAD,
    TINY,
    assert_close,
    cases,
    evaluated,
    few,
    log_of,
    on_forward,
    refuses,
    slow,
    train,
)

on_cpu = lambda x: "cpu" if str(x).startswith("cuda") else x
CUDA = {  # function of torch.cuda: what the fake GPU answers
    "is_available": True, "device_count": 8, "set_device": None, "synchronize": None,
    "is_bf16_supported": True, "get_device_name": "NVIDIA H100 80GB HBM3",
    "max_memory_allocated": 7 * 10**9, "reset_peak_memory_stats": None,
    "is_current_stream_capturing": False,
}  # fmt: skip


class OnCPU(TorchFunctionMode):
    """Runs on the CPU what asks for cuda. Keeps (device, non_blocking) of every copy to it."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        if func is torch.Tensor.to and str(args[1]).startswith("cuda"):
            self.copies.append((str(args[1]), kwargs.get("non_blocking", False)))
        moved = [on_cpu(x) if isinstance(x, (str, torch.device)) else x for x in args]
        if "device" in kwargs:
            kwargs = kwargs | {"device": on_cpu(kwargs["device"])}
        return func(*moved, **kwargs)


@pytest.fixture
def gpu(monkeypatch):
    asked, precision, autocast = {}, torch.get_float32_matmul_precision(), torch.autocast

    def fake(name, answer):
        asked[name] = []
        return lambda *args, **how: asked[name].append((*args, *how.values())) or answer

    for name, answer in CUDA.items():
        monkeypatch.setattr(torch.cuda, name, fake(name, answer))
    asked["pinned"], asked["autocast"] = [], []
    pin = lambda tensor: asked["pinned"].append(tensor.shape) or tensor
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)

    def cast(device_type, *args, **how):
        asked["autocast"].append(device_type)
        return autocast(on_cpu(device_type), *args, **how)

    monkeypatch.setattr(torch, "autocast", cast)
    none = lambda check_available=False: None  # AdamW asks; a CUDA build would look for a driver
    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    with OnCPU() as mode:
        yield SimpleNamespace(copies=mode.copies, **asked)
    torch.set_float32_matmul_precision(precision)


def test_a_gpu_is_found_named_and_prepared(gpu):
    device = machine.pick_device("auto", local_rank=3)
    machine.prepare_process(device)
    for name in ("cuda", "cuda:1", torch.device("cuda", 1)):
        machine.prepare_process(name)
    assert str(device) == "cuda:3" and gpu.set_device == [(3,), (0,), (1,), (1,)]
    assert torch.get_float32_matmul_precision() == "high"
    assert machine.pick_dtype("auto", "cuda") == "bfloat16" and machine.can_compile("cuda")
    assert gpu.is_bf16_supported == [(False,)]  # emulation does not count
    assert machine.device_name(device) == CUDA["get_device_name"]
    assert machine.peak_memory_gb(device) == 7


def test_auto_takes_the_best_device_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for cuda, mps, best in ((True, False, "cuda:1"), (False, True, "mps"), (False, False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=cuda: there)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=mps: there)
        assert str(machine.pick_device("auto", local_rank=1)) == best
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert str(machine.pick_device("cuda:1")) == "cuda:1"
    with pytest.raises(SystemExit, match="device='cuda:2': torch sees 2 CUDA devices"):
        machine.pick_device("cuda:2")
    with pytest.raises(SystemExit, match="device='cuda:2': torch sees 2 CUDA devices"):
        machine.pick_device("auto", local_rank=2)
    with pytest.raises(SystemExit, match="several processes need --device=cuda, one GPU each"):
        machine.pick_device("cuda:0", local_rank=1)
    assert machine.pick_dtype("auto", "mps") == "float32" and not machine.can_compile("mps")
    for name in ("eval.py", "bench.py", "train.py"):
        assert '\ndevice = "auto"' in open(os.path.join(HERE, name)).read()


@cases("name, teraflops", [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835),
    ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989),
    ("NVIDIA B200", 2250), ("NVIDIA GB200", 2500), ("NVIDIA A100-SXM4-80GB", 312),
    ("NVIDIA A10G", 70), ("NVIDIA A40", 150), ("NVIDIA L40S", 362), ("NVIDIA L4", 121),
    ("NVIDIA GeForce RTX 4090", 165), ("NVIDIA RTX 6000 Ada Generation", 364),
    ("NVIDIA GeForce RTX 3090", 71), ("NVIDIA H20", None), ("NVIDIA L40", None),
    ("NVIDIA A10", None), ("Tesla T4", None), ("AMD EPYC", None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None),
    ("NVIDIA GeForce RTX 3090 Ti", None),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
    ("NVIDIA A100-10C", None), ("GRID A100-1-5C", None), ("NVIDIA A40-8Q", None),
])  # fmt: skip
def test_the_peak_of_a_gpu_goes_by_its_name(name, teraflops):
    assert machine.peak_flops(name) == (teraflops and teraflops * 1e12)


def test_batches_for_a_gpu_are_pinned_and_copied_without_waiting(gpu, data):
    windows = data_file.Windows(data, "train", 16)
    loader = data_file.Loader(windows, 4, 1, seed=1, device=torch.device("cuda:1"))
    plain = data_file.Loader(windows, 4, 1, seed=1)
    for ours, theirs in zip(loader.batch(0, 0), plain.batch(0, 0)):
        assert torch.equal(ours, theirs)
    assert gpu.pinned[:2] == [(4, 16)] * 2 and gpu.copies == [("cuda:1", True)] * 2
    x, y = next(data_file.eval_batches(windows, [0, 1, 2], 4, torch.device("cuda:1")))
    assert gpu.copies[2:] == [("cuda:1", False)] * 2 and (y[3] == -1).all()


def test_a_run_and_its_evaluation_on_a_gpu_give_the_numbers_of_a_cpu(gpu, data, tmp_path):
    train(data, tmp_path / "gpu", device="cuda", dtype="bfloat16")
    assert {device for device, _ in gpu.copies} == {"cuda:0"}
    assert gpu.pinned and set(gpu.autocast) == {"cuda"}
    train(data, tmp_path / "cpu", dtype="bfloat16")
    ours, theirs = (log_of(tmp_path / name) for name in ("gpu", "cpu"))
    losses = lambda log: [(record.get("loss"), record["val_loss"]) for record in log.records]
    assert losses(ours) == losses(theirs)
    (header,), last = ours.headers, ours.records[-1]
    assert header["device"] == CUDA["get_device_name"] and last["mem_gb"] == 7
    assert last["mfu"] == pytest.approx(last["tok_s"] * header["flops_per_step"] / 128 / 989e12)
    reports = [
        evaluated(tmp_path / "gpu", "loss,depth,sample", device=device, max_new_tokens=4)
        for device in ("auto", "cpu")
    ]
    assert reports[0]["loss"] == reports[1]["loss"]


def test_several_gpus_talk_by_nccl_and_each_rank_has_its_own(gpu, data, tmp_path, monkeypatch):
    """With a process group whose collectives do nothing, as if every rank had the same."""
    seen, init = [], dist.init_process_group

    def start(backend, timeout, device_id):
        seen.append((backend, str(device_id)))
        assert timeout >= timedelta(hours=1)  # the others wait while rank 0 writes a checkpoint
        init("fake", rank=1, world_size=2, store=FakeStore())

    def wrap(model, device_ids, **how):
        seen.append(device_ids)
        return model

    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", wrap)
    for key, value in (("RANK", 1), ("LOCAL_RANK", 1), ("WORLD_SIZE", 2)):
        monkeypatch.setenv(key, str(value))
    try:
        train(data, tmp_path / "x", device="auto", total_batch_tokens=256)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert seen == [("nccl", "cuda:1"), [1]] and gpu.set_device == [(1,)]


def test_a_gpu_decodes_with_graphs_and_bench_waits_for_it(gpu, monkeypatch):
    compiled, order = {}, []
    monkeypatch.setattr(torch, "compile", lambda run, **how: compiled.update(how) or run)
    generate.compiled_step(torch.device("cuda:0"))
    assert compiled == {"fullgraph": True, "dynamic": False, "mode": "reduce-overhead"}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        bench.seconds(lambda: order.append(len(gpu.synchronize)))
    assert order == [1] and len(gpu.synchronize) == 2  # before it starts, and before the clock
    enter = lambda x: torch.autograd.profiler.record_function("fake")
    stream = lambda: SimpleNamespace(wait_stream=lambda other: None)
    graph = lambda: SimpleNamespace(replay=lambda: order.append("replay"))
    for name, fake in (("Stream", stream), ("current_stream", stream), ("CUDAGraph", graph)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "graph", enter)
    run = lambda: order.append("run")
    replay, known = bench.replayed(run, "cuda:0"), weakref.ref(run)
    del run
    assert known() is not None  # it has the tensors that the graph reads
    replay()
    assert order[1:] == ["run"] * 4 + ["replay"]  # three to warm up, one to record


# --- Devices of tensors ---------------------------------------------------------------------------


def steps_on_another_device(modes):
    """An error, or None, for a step and a generation in each mode and design with all tensors on a
    device that is not the CPU. Fake tensors have no data, but an operation checks their devices."""
    from torch.utils import backend_registration as backends

    class Module(backends._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    backends._setup_privateuseone_for_python_backend("other", Module())
    empty = lambda x: torch.empty(x.shape, dtype=x.dtype, device="other:0")
    errors = {}
    for mode in modes:
        router = "nag" if mode == "nag" else "learned"
        routed = dict(mod_on="both", mod_rate=0.4, mod_router=router)
        for more in (EXTRAS | {"moe_experts": 4, "tied": False, "bias": True}, routed):
            try:
                model = GPT(GPTConfig(**TINY | few(mode) | more))
            except ValueError as error:
                assert "does not use" in str(error)
                continue
            with FakeTensorMode():
                try:
                    step_on_another_device(model, empty, generates=more is not routed)
                except RuntimeError as error:
                    errors[f"{mode} {more}"] = str(error)
    return errors


def step_on_another_device(model, empty, generates):
    weights = {p: torch.nn.Parameter(empty(p)) for p in model.parameters()}
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, name, weights[p])
        for name, x in [*module.named_buffers(recurse=False)]:
            setattr(module, name, empty(x))
    x = torch.empty((2, 32), dtype=torch.int64, device="other:0")
    (optimizer,) = model.optimizers("adamw", 1e-3, {}, 0.1)
    model(x, x)[1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.after_step()
    model.refresh()
    if generates:  # with a mixture of depths, shapes depend on the data
        written = generate.generate(model.eval(), x[:, :4], 2)
        assert written.shape == (2, 6) and written.device == x.device


def test_no_mode_mixes_the_cpu_with_another_device():
    forks = get_context("forkserver")
    forks.set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(1, forks) as pool:  # a new device stays for good
        assert pool.submit(steps_on_another_device, [*RESIDUALS]).result() == {}


# --- bench.py: a training step, and the size of a model -------------------------------------------


@cases("kind", ["adamw", "muon"])
def test_micro_steps_of_bench_accumulate_one_gradient(kind):
    """Their tokens are the same, so the step is that of one micro-step, up to rounding."""
    found = []
    for micro_steps in (1, 4):
        how, forwards, updates = dict(micro_steps=micro_steps, compile=False), [], []
        step, model, optimizers = bench.stepper(GPTConfig(**TINY), 2, "cpu", "float32", kind, **how)
        model.register_forward_hook(lambda *call, seen=forwards: seen.append(1))
        for one in optimizers:
            one.register_step_post_hook(lambda *call, seen=updates: seen.append(1))
        losses = [float(step()) for _ in range(3)]
        assert len(forwards) == 3 * micro_steps and len(updates) == 3 * len(optimizers)
        assert losses[2] < losses[0]
        found.append((losses, [p.detach() for p in model.parameters()]))
    (one, weights), (four, others) = found
    assert four == pytest.approx(one, rel=1e-5)
    for p, q in zip(weights, others):
        assert_close(p, q, rtol=1e-4, atol=2e-5)


def test_bench_prints_the_ratio_of_its_medians_and_returns_those_of_the_rounds(monkeypatch, capsys):
    """The two can differ. Beside the medians, another ratio would look wrong."""
    times = {"a": [1.0, 2.0, 4.0], "b": [3.0, 1.0, 2.0]}
    monkeypatch.setattr(bench, "race", lambda candidates, rounds: times)
    report = bench.compare("a step", dict.fromkeys(times), 3)
    title, *lines = capsys.readouterr().out.strip().splitlines()
    assert title.endswith("ratio to a (quartiles of rounds)")
    assert report["b"]["median"] == report["a"]["median"] == 2.0
    assert report["b"]["ratio"][1] == 0.5 and "1.000x" in lines[1]


def run_bench(*argv, **settings):
    argv = ["bench.py", *argv, *(f"--{key}={value}" for key, value in settings.items())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        for name in vars(bench).copy():
            patch.setattr(bench, name, getattr(bench, name))  # configure changes its settings
        bench.main()
    return json.load(open(settings["out"]))


def test_bench_compares_a_mode_with_itself_only_once_and_needs_a_compiler(tmp_path, monkeypatch):
    config = GPTConfig(**TINY)
    assert [*bench.configs(config, "nag,lns,nag")] == ["nag", "lns", "nag again"]
    with pytest.raises(ValueError, match="nag occurs more than twice"):
        bench.configs(config, "nag,nag,nag")
    monkeypatch.setattr(machine, "has_compiler", lambda: False)
    how = TINY | dict(out=tmp_path / "x.json", modes="nag", batch_size=2, rounds=3, device="cpu")
    del how["residual"]
    with pytest.raises(SystemExit, match="on a CPU it needs Linux"):
        run_bench("--quick=True", **how, what="forward")
    whole = run_bench("--quick=True", **how, what="memory")["memory"]  # it does not compile
    least = run_bench("--quick=True", "--recompute=True", **how, what="memory")["memory"]
    assert least["nag"]["peak"] < whole["nag"]["peak"]


def test_a_shallower_model_keeps_the_groups_of_attention_residuals():
    deep = GPTConfig(**TINY | {"n_layer": 8, "residual": "attnres_block"})
    shallow = bench.with_blocks(deep, 2)
    assert (shallow.n_layer, shallow.attnres_size) == (2, 2)  # from 2 blocks it would be 1
    assert bench.with_blocks(replace(deep, residual="attnres"), 2).attnres_size is None


@cases("mode, n, lanes", [("prenorm", 1, 0), ("x0mix", 1, 0), ("nag", 1, 1), ("hc", 4, 1)])
def test_bench_gives_each_stream_a_tensor_of_its_own(mode, n, lanes, monkeypatch):
    """The embedding of x0mix, its source, is another tensor than the stream."""
    seen = []
    monkeypatch.setattr(torch, "compile", lambda run, **how: lambda *x: seen.append(x) or run(*x))
    monkeypatch.setattr(bench, "writes_and_reads", lambda attention, mlp, start: (
        lambda f1, f2, x, *streams: seen.append((x, *(streams or start.sources))) or [x + f1]
    ))  # fmt: skip
    config = GPTConfig(**TINY | {"residual": mode})
    bench.two_sublayers(config, (2, 32, 32), "cpu", "bfloat16")()
    given, read = seen[0], seen[1]
    assert len(given) == 2 + n + lanes
    assert all(x.dtype == torch.bfloat16 for x in given[: 2 + n])
    assert len({x.data_ptr() for x in (*given, *read)}) == 2 + n + lanes + (mode == "x0mix")


def test_bench_times_the_write_that_waits_after_a_block(monkeypatch):
    written, f, maps = [], torch.ones(2, 32, 32), torch.ones(2, 32, 20)
    waiting = Stream(torch.zeros(4, 2, 32, 32), sources=(f, maps))
    monkeypatch.setattr(torch, "compile", lambda block, **how: lambda *given: waiting)
    monkeypatch.setattr(streams.kernels, "write", lambda X, *given: written.append(given))
    for name, value in (("device", "cpu"), ("dtype", "float32"), ("batch_size", 2)):
        monkeypatch.setattr(bench, name, value)
    run, _ = bench.block_forward(GPTConfig(**TINY | {"residual": "hc"}))
    run()
    assert len(written) == 1 and written[0][0] is f


def tiny_size(tmp_path, *argv, **changes):
    how = TINY | dict(what="size", out=tmp_path / "size.json", batch_size=2, optimizer="adamw")
    how |= changes
    return run_bench(*argv, **how)["size"]


@cases("changes", [{}, {"optimizer": "muon"}, {"recompute": True}, {"loss_chunk": 16},
    {"moe_experts": 4}, {"residual": "hc"},
    {"residual": "prenorm", "norm": "layer", "dtype": "float32"},  # other --modes have no norm
])  # fmt: skip
def test_the_size_of_a_model_is_what_a_real_step_takes(tmp_path, changes):
    size = tiny_size(tmp_path, **changes)
    of_step = ("recompute", "loss_chunk", "optimizer")
    kind = changes.get("optimizer", "adamw")
    shape = {k: v for k, v in changes.items() if k not in (*of_step, "dtype")}
    muon, dtype = "optimizer" in changes, changes.get("dtype", "bfloat16")
    config = GPTConfig(**{**TINY, **shape})
    step, model, optimizers = bench.stepper(config, 2, "cpu", dtype, kind, compile=False)
    model.loss_chunk, model.recompute = changes.get("loss_chunk"), "recompute" in changes
    assert size["parameters"] == sum(p.numel() for p in model.parameters())
    assert size["flops_per_token"] == model.flops_per_token()
    step()
    assert size["optimizer"] == sum(x.nbytes for x in bench.state_of(optimizers))
    assert size["weights"] == sum(p.nbytes for p in model.parameters()) == size["gradients"]
    with bench.LiveBytes(model, optimizers) as live:
        step()
    assert size["peak"] == size["a rank"] == live.peak
    if muon:  # the tracker does not follow it
        return
    tracker = MemTracker()
    tracker.track_external(model, *optimizers)
    with tracker:
        step()
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert live.peak == pytest.approx(theirs, rel=0.02)


def test_the_size_of_a_rank_has_what_ranks_share_and_add(tmp_path):
    one, ddp = tiny_size(tmp_path), tiny_size(tmp_path, ranks=2)
    assert ddp["a rank"] - one["peak"] == one["gradients"]
    eight = tiny_size(tmp_path, ranks=8, shard="fsdp")
    saved = 7 / 8 * (one["weights"] + one["optimizer"])
    assert eight["a rank"] == pytest.approx(one["peak"] - saved + one["weights"])  # 2 of 2 blocks
    muon, matrices = tiny_size(tmp_path, optimizer="muon"), 4 * 2 * 12 * 32 * 32
    assert one["optimizer"] - muon["optimizer"] == pytest.approx(matrices, rel=0.01)
    refuses("no setting 'max_iters'", tiny_size, tmp_path, max_iters=3)
    refuses("sft_lima.py: there is no", tiny_size, tmp_path, f"{HERE}/config/sft_lima.py")


SIZES = {"llama_1b": (1.076e9, 6.658e9), "llama_3b": (2.973e9, 18.37e9)}  # parameters, FLOPs
CONFIGS = sorted(set(glob.glob(f"{HERE}/config/*.py")) - {f"{HERE}/config/sft_lima.py"})


def test_a_compiler_that_fails_says_how_to_do_without(data, tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise OSError("no compiler")

    broken_blocks = lambda model: [block.compile(backend=broken) for block in model.blocks]
    monkeypatch.setattr(GPT, "compile_blocks", broken_blocks)
    for interval in (0, 5):  # the first step, and the evaluation before it
        with pytest.raises(RuntimeError, match="try --compile=False"):
            train(data, tmp_path / str(interval), compile=True, eval_interval=interval)


def test_a_run_that_compiles_shows_signs_of_life_and_ends_at_once_on_ctrl_c(
    data, tmp_path, monkeypatch, capsys
):
    wait, actions = threading.Event.wait, []

    def takes_long(number, loss):
        actions.append(signal.getsignal(signal.SIGINT))
        time.sleep(0.05 if number == 1 else 0)
        return loss

    monkeypatch.setattr(threading.Event, "wait", lambda self, t=None: wait(self, t and 0.01))
    monkeypatch.setattr(GPT, "compile_blocks", lambda model: None)
    on_forward(monkeypatch, takes_long)
    threads = threading.active_count()
    train(data, tmp_path, compile=True, eval_interval=0)
    told = capsys.readouterr().out
    assert "--compile=False is faster for a short run\n0 s, graphs so far: " in told
    assert "so far" not in told.split("step 2/6")[1]
    assert threading.active_count() <= threads + 1  # the loader's
    assert actions[0] == signal.SIG_DFL and all(map(callable, actions[1:]))


@cases("path", [slow(path) if path.endswith("3b.py") else path for path in CONFIGS])
def test_the_size_of_every_config_is_known_without_its_memory(tmp_path, path):
    name = os.path.basename(path)[:-3]
    shallow = {} if name in SIZES else {"n_layer": 2}
    how = dict(what="size", out=tmp_path / "size.json") | shallow
    size = run_bench(path, "--quick=True", **how)["size"]
    if not shallow:
        found = size["parameters"], size["flops_per_token"]
        assert found == pytest.approx(SIZES[name], rel=1e-3)
    assert 16 * size["parameters"] <= size["peak"] + size["gradients"] < 1 << 38
