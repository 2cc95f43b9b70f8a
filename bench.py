"""
Measure speed and memory. Candidates run in turn in one process.

    python bench.py --quick=True    four small parts: about two minutes, most of it compilation
    python bench.py --what=train --modes=prenorm,nag,bhyt --n_layer=12 --n_head=8 --n_embd=512
    python bench.py --what=forward,residual --modes=prenorm,prenorm,nag    prenorm twice: the noise
    python bench.py --what=doctor   checks a new machine in two minutes, with sizes of its own
    python bench.py config/llama_3b.py --what=size    computes nothing, so it works on any machine

    forward     forward of one block, weights and stream in dtype
    residual    read and write of two sublayers without attention and MLP, forward and backward,
                with the kernels (loops on a CPU) that the compiler makes and the bytes they move
    train       a training step
    cold        the first training step in a new process, with nothing compiled before
    recipe      a training step, from plain float32 to train.py's default part by part
    memory      bytes that a training step keeps for the backward pass, and the peak
    generate    reading the prompt, and a token without a cache, both eager; decoding with a cache
                as one graph, compared with the time to read all weights once per token
    mod         forward and training step by the share of tokens that skip, with executed FLOPs
    data        tokenisation by prepare_c4.py compared with the bare tokenizer; reading a batch
    size        parameters, FLOPs and memory of one model: set --residual, not --modes
    doctor      hardware, software, an eager step of every mode, compiled steps compared with eager
                ones, and what is slower than expected

Times are medians and quartiles over rounds. Ratios are relative to the first candidate.
"""

import logging
import math
import os
import platform
import random
import statistics
import sys
import time
import weakref
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from configurator import configure, settings_of
from data import Loader, Windows, get_tokenizer, write_json
from generate import FOLDS, KVCache, compiled_step, next_token
from machine import (
    autocast,
    can_compile,
    commit,
    cores,
    device_name,
    features,
    memory_bytes,
    peak_flops,
    pick_device,
    pick_dtype,
    prepare_process,
)
from mod import routers
from model import GPT, RESIDUALS, GPTConfig, settings_of_others
from norms import pick
from prepare_c4 import batches, in_order, list_files, start_worker

what = "forward,residual,train,memory,generate,mod"  # parts, separated by commas
modes = "prenorm,nag,bhyt"  # residual modes, separated by commas; ratios are to the first
batch_size = 8  # sequences per batch
rates = "0,0.2,0.4,0.6"  # mod: shares of tokens that skip
prompt_tokens = 512  # generate: length of the prompt
new_tokens = "128,512"  # generate: numbers of new tokens
batches_of = "1,32"  # generate: numbers of sequences decoded at once
data_dir = "data/python"  # data: folder with the shards to read
tokenizer = "bytes"  # data: tokenizer, as in prepare_c4.py
megabytes = 10  # data: text to tokenise, approximately
optimizer = "muon"  # size: muon or adamw
loss_chunk: int | None = None  # size: as in train.py
recompute = False  # size: as in train.py
shard = "none"  # size: none or fsdp, as in train.py
ranks = 1  # size: number of processes
rounds = 7  # timed rounds, after 2 warm-up rounds
quick = False  # run four parts at a small size with few rounds
dtype = "bfloat16"  # bfloat16 or float32: autocast, and tensors of forward, residual and generate
device = "auto"  # cpu, mps, cuda, cuda:1, ...; auto: CUDA if there is any, then mps, then cpu
out = "bench.json"  # file for the results


# ------------------------------------------------------------------------------------------------
# Timing


def seconds(run):
    kind = device.split(":")[0]
    sync = getattr(torch, kind).synchronize if kind in ("cuda", "mps") else lambda: None
    sync()
    began = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - began


def replayed(run):
    """On CUDA, record run as a CUDA graph, so that short kernels do not wait for the host."""
    if not device.startswith("cuda"):
        return run
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def race(candidates):
    """Time each candidate once per round: {name: [seconds]}.

    A candidate can speed up or slow down the next one through the caches. So each pair of rounds
    has a new random order, which the second round of the pair reverses.
    """
    names, times = list(candidates), {name: [] for name in candidates}
    for turn in range(rounds + 2):
        order = random.Random(turn // 2).sample(names, len(names))
        for name in reversed(order) if turn % 2 else order:
            times[name].append(seconds(candidates[name]))
    return {name: t[2:] for name, t in times.items()}


def compare(title, candidates, note=lambda name, medians: ""):
    """Time the candidates. Print and return their times, and their ratios to the first by round.

    note(name, medians) returns text for the end of a line.
    """
    first, report = next(iter(candidates)), {}
    times = race(candidates)
    medians = {name: statistics.median(t) for name, t in times.items()}
    print(f"\n{title:<28} {'median':>10} {'quartiles':>21}  time v. {first}")
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4)
        ratios = statistics.quantiles((a / b for a, b in zip(t, times[first])), n=4)
        quartiles = f"{low * 1e3:.2f} - {high * 1e3:.2f} ms"
        ratio = f"{ratios[1]:.3f}x ({ratios[0]:.3f} - {ratios[2]:.3f})  {note(name, medians)}"
        print(f"{name:<28} {median * 1e3:>7.2f} ms {quartiles:>21}  {ratio}")
        report[name] = {"seconds": t, "median": median, "quartiles": [low, high], "ratio": ratios}
    return report


def matrix_rate(flops, matmul):
    """A note for compare: FLOPs per second, relative to a large matrix product."""
    return lambda name, medians: f"{flops[name] / medians[name] / matmul:.0%} of the matrix rate"


def floors():
    """(bytes per second of a copy, reads and writes; FLOPs per second of a matrix product)"""
    times, n_bytes = 10, 1 << (30 if device.startswith("cuda") else 24 if quick else 27)
    x = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copy = min(seconds(lambda: [y.copy_(x) for _ in range(times)]) for _ in range(rounds))
    return times * 2 * n_bytes / copy, matmul_speed(dtype)


def matmul_speed(precision):
    """FLOPs per second of a matrix product in bfloat16 or float32."""
    times, n = 10, 8192 if device.startswith("cuda") else 1024 if quick else 2048
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, precision)) for _ in "ab")
    fastest = min(seconds(lambda: [a @ b for _ in range(times)]) for _ in range(rounds))
    return times * 2 * n**3 / fastest


# ------------------------------------------------------------------------------------------------
# Candidates


def configs(settings):
    """{name: config} of the modes. The second occurrence of a mode is named "MODE again"."""
    base = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    named = {}
    for mode in modes.split(","):
        pick(RESIDUALS, mode, "residual")  # refuse an unknown mode
        name = mode + " again" if mode in named else mode
        named[name] = replace(base, residual=mode, **settings_of_others(mode))
    return named


def cast(precision=None):
    return autocast(device.split(":")[0], precision or dtype)


def tokens(config, rows):
    return torch.randint(config.vocab_size, (rows, config.block_size), device=device)


def stepper(config, precision=None, compile=True, fused=True, muon=False, **attributes):
    """(function that runs one training step and returns its loss, model, optimizers)

    attributes are set on the model: loss_chunk, recompute.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)
    for key, value in attributes.items():
        setattr(model, key, value)
    if compile:
        model.compile_blocks()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)]
    if muon:
        kind = getattr(torch, precision or dtype)
        optimizers = model.optimizers("muon", 1e-4, {}, 0.0, dtype=kind)
    x = tokens(config, batch_size)

    def step():
        with cast(precision):
            loss = model(x, x)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.after_step()
        return loss.detach()

    return step, model, optimizers


def adopt(settings):
    """Set these globals, and prepare the process for the device."""
    globals().update(settings)
    prepare_process(device)


def in_new_process(function, *args):
    """Call a function in a new process, forked from one that has only imported this file."""
    settings = {"device": device, "dtype": dtype, "batch_size": batch_size}
    with ProcessPoolExecutor(1, get_context("forkserver"), adopt, (settings,)) as pool:
        return pool.submit(function, *args).result()


# ------------------------------------------------------------------------------------------------
# Parts


def forward(settings, copy, matmul):
    runs, flops = {}, {}
    for name, config in configs(settings).items():
        runs[name], flops[name] = block_forward(config)
    return compare("forward, one block", runs, matrix_rate(flops, matmul))


def block_forward(config):
    """(function that runs the forward of one compiled block, its FLOPs)"""
    torch.manual_seed(0)
    model = GPT(replace(config, n_layer=1)).to(device, getattr(torch, dtype)).eval()
    block, rope = torch.compile(model.blocks[0]), (model.cos, model.sin)
    positions = torch.arange(config.block_size, device=device)[:, None]
    embedded = model.embed(tokens(config, batch_size)).detach()
    stream = model.ends.embed(embedded).replace(at=positions)

    @torch.no_grad()
    def run():
        block(stream, rope)

    head = 2 * 3 * config.n_embd * config.vocab_size
    flops_per_token = (model.flops_per_token() - head) / 3  # without the backward pass
    return replayed(run), batch_size * config.block_size * flops_per_token


@contextmanager
def compiler_counters():
    """Yield a dict for the kernels that are compiled inside, and the bytes that they move."""
    counts = {}
    log = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
    log.propagate = False
    log.setLevel(logging.INFO)  # the compiler counts bytes only for this logger
    metrics.reset()
    with fresh_cache():
        yield counts
    log.setLevel(logging.WARNING)
    counts.update(kernels=metrics.generated_kernel_count, bytes=metrics.num_bytes_accessed)


def residual(settings, copy, matmul):
    named, runs, counts = configs(settings), {}, {}
    if "nag" in named:
        named["nag, no modulator"] = replace(named["nag"], nag_directions=0)
    shape = (batch_size, settings["block_size"], settings["n_embd"])
    for name, config in named.items():
        run = two_sublayers(config, shape)
        with compiler_counters() as counts[name]:
            run()
        if not counts[name]["kernels"]:  # it reused the compiled code of the same mode
            counts[name] = counts[name.removesuffix(" again")]
        runs[name] = replayed(run)
    # Passes over the stream, forward + backward: pre-norm and BHyT 4 + 4, NAG 3 + 6.
    floor = 2 * 8 * math.prod(shape) * getattr(torch, dtype).itemsize

    def note(name, medians):
        share = f"{floor / copy / medians[name]:.0%} of the copy rate"
        return f"{share}; {counts[name]['kernels']} kernels, {counts[name]['bytes'] / 1e6:.0f} MB"

    report = compare("residual alone, one block", runs, note)
    return {name: row | counts[name] for name, row in report.items()}


def two_sublayers(config, shape):
    """A function that runs write, read, write, read, and their backward, on random (B, T, C).

    It starts with a write, because a read can return its input, and that input's gradients would be
    added outside the compiled graph. The read before it only gives the stream what the write needs.
    If the last read returns the stream itself, the two outputs share one gradient, which saves one
    pass of about twenty.
    """
    model = GPT(replace(config, n_layer=1)).to(device)
    attention, mlp = model.blocks[0].attn_residual, model.blocks[0].mlp_residual
    random_stream = lambda: torch.randn(shape, device=device).to(getattr(torch, dtype))
    with torch.no_grad():
        start = model.ends.embed(random_stream()).replace(
            at=torch.arange(shape[1], device=device)[:, None]
        )
    x, f1, f2 = (x.requires_grad_() for x in (start.x, random_stream(), random_stream()))
    inputs = [x, f1, f2, *attention.parameters(), *mlp.parameters()]

    def both(x, f1, f2):
        _, stream = mlp.read(start.replace(x=x))
        h1, stream = attention.read(mlp.write(stream, f1))
        h2, stream = mlp.read(attention.write(stream, f2))
        outputs = [h1, h2] if h2 is stream.x else [h1, h2, stream.x]
        return outputs if start.lane is None else [*outputs, stream.lane]

    with cast(), torch.no_grad():
        grads = [torch.randn_like(y) for y in both(x, f1, f2)]
    compiled = torch.compile(both)

    def run():
        with cast():
            outputs = compiled(x, f1, f2)
        torch.autograd.grad(outputs, inputs, grads, allow_unused=True)

    return run


def train(settings, copy, matmul):
    """Time training steps, and BHyT's refresh, which train.py calls every bhyt.INTERVAL steps."""
    runs, flops, refresh = {}, {}, {}
    for name, config in configs(settings).items():
        runs[name], model, _ = stepper(config)
        flops[name] = batch_size * config.block_size * model.flops_per_token()
        refresh[name] = min(seconds(model.refresh) for _ in range(3))
    rate = matrix_rate(flops, matmul)

    def note(name, medians):
        return f"{rate(name, medians)}; a refresh takes {refresh[name] / medians[name]:.2f} steps"

    report = compare("training step", runs, note)
    return {name: row | {"refresh": refresh[name]} for name, row in report.items()}


def first_steps(config):
    """Seconds of the first three training steps, with an empty compiler cache."""
    with fresh_cache():
        step, *_ = stepper(config)
        return [seconds(step) for _ in range(3)]


def cold(settings, copy, matmul):
    report = {}
    print()
    for name, config in configs(settings).items():
        first, *later = in_new_process(first_steps, config)
        report[name] = {"first": first, "later": min(later)}
        times = f"first step {first:.1f} s, a later one {min(later):.1f} s"
        print(f"{name}, {config.n_layer} blocks: {times}")
    return report


def recipe(settings, copy, matmul):
    config = next(iter(configs(settings).values()))
    options = {
        "float32": dict(precision="float32", compile=False, fused=False),
        "bfloat16, fused": dict(precision="bfloat16", compile=False),
        "and compiled": dict(precision="bfloat16"),
        "and the stream bfloat16": dict(precision="bfloat16"),
        "compiled, Muon": dict(precision="bfloat16", muon=True),
    }
    step_flops = batch_size * config.block_size * GPT(config).flops_per_token()
    stream = lambda name: replace(config, bf16_stream="stream" in name)
    steps = {name: stepper(stream(name), **chosen)[0] for name, chosen in options.items()}
    return compare("training step", steps, matrix_rate(dict.fromkeys(steps, step_flops), matmul))


def memory(settings, copy, matmul):
    """Measure eager steps, because hooks cannot see the tensors that a compiled block keeps."""
    chunks = {"loss_chunk": batch_size * settings["block_size"] // 8}
    recompute = {"recompute": True}
    options = {"": {}, ", loss in 8 chunks": chunks, ", recompute": recompute}
    options[", both"] = chunks | recompute
    report = {}
    print(f"\n{'a training step':<28} {'kept':>10} {'a block':>10} {'peak':>10}")
    for name, config in configs(settings).items():
        for suffix, attributes in options.items():
            # Each measurement has its own process, where nothing is left of the one before.
            row = report[name + suffix] = in_new_process(step_memory, config, attributes)
            sizes = " ".join(f"{n / 2**20:>6.0f} MiB" for n in row.values())
            print(f"{name + suffix:<28} {sizes}")
    return report


def step_memory(config, attributes):
    """Bytes kept for the backward pass by all blocks and by one more block, and the peak."""
    deeper = kept_bytes(replace(config, n_layer=config.n_layer + 1), attributes)[-1]
    step, model, optimizer, kept = kept_bytes(config, attributes)
    report = {"kept": kept, "kept a block": deeper - kept}
    step()  # creates the optimizer's state
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        step()
        return report | {"peak": torch.cuda.max_memory_allocated()}
    with LiveBytes(model, optimizer) as live:  # the process can hold up to twice that
        step()
    return report | {"peak": live.peak}


def state_of(optimizers):
    """All tensors of the optimizers' state."""
    entries = [entry for optimizer in optimizers for entry in optimizer.state.values()]
    return [x for entry in entries for x in entry.values()]


class LiveBytes(TorchDispatchMode):
    """The bytes of all tensors now, and their peak: model, optimizers, and what the block makes.

    Fake tensors count as if they had data.
    """

    def __init__(self, model, optimizers):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()
        self.add((*model.parameters(), *model.buffers(), state_of(optimizers)))

    def add(self, tensors):
        tree_map_only(Tensor, self.add_storage, tensors)
        self.peak = max(self.peak, self.now)

    def add_storage(self, tensor):
        storage = tensor.untyped_storage()
        key, n_bytes = storage._cdata, storage.nbytes()  # fake tensors have no data_ptr
        if key not in self.known:
            self.known.add(key)
            self.now += n_bytes
            weakref.finalize(storage, self.remove, key, n_bytes)

    def remove(self, key, n_bytes):
        self.known.remove(key)
        self.now -= n_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.add(out)
        return out


def kept_bytes(config, attributes):
    """(training step, model, optimizer, bytes that a forward pass keeps for the backward pass)

    The bytes include bfloat16 copies of weights, but not the weights themselves.
    """
    step, model, optimizer = stepper(config, compile=False, **attributes)
    kept, x = {}, tokens(config, batch_size)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def keep_stream(block, args):
        tree_map_only(Tensor, pack, args[0])

    if model.recompute:  # the hooks below do not see the stream that a block is recomputed from
        for block in model.blocks:
            block.register_forward_pre_hook(keep_stream)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast():
        model(x, x)
    return step, model, optimizer, sum(kept.values())


def generate(settings, copy, matmul):
    report, named = {}, configs(settings)
    numbers = [*map(int, new_tokens.split(","))]
    length = prompt_tokens + max(numbers)
    for rows in map(int, batches_of.split(",")):
        runs = {name: generation(config, rows, length) for name, config in named.items()}
        buffer = torch.ones(next(iter(runs.values()))[-1] // 4, device=device)  # as many bytes
        title = f"prompt, {rows} at once"
        speed = lambda name, t, rows=rows: f"{rows * prompt_tokens / t[name]:.0f} tokens/s"
        report[title] = compare(title, {name: read for name, (read, *_) in runs.items()}, speed)
        for new in numbers:
            report |= compare_decoding(runs, rows, new, buffer)
    return report


def generation(config, rows, length):
    """(read the prompt, decode(new) with a cache, uncached(new), bytes of the weights)

    Decoding is greedy, weights are in dtype. uncached makes one token from half of the new tokens,
    which is the average length.
    """
    torch.manual_seed(0)
    model = GPT(replace(config, block_size=length)).to(device).to(getattr(torch, dtype)).eval()
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    unread = {m.weight for m in tables} - {model.head.weight}  # a step reads one row of each table
    weights = [p for p in model.parameters() if p not in unread]
    weight_bytes = sum(p.numel() * p.element_size() for p in weights)
    if config.residual in FOLDS:
        FOLDS[config.residual](model)
    text = torch.randint(config.vocab_size, (rows, length), device=device)
    step, cache = compiled_step(text.device), KVCache(model, rows, length, static=True)

    @torch.inference_mode()
    def read():
        cache.rewind()
        return next_token(model, text[:, :prompt_tokens], cache, 0, None, None, None)

    first = read()

    @torch.inference_mode()
    def decode(new):
        cache.rewind(prompt_tokens)  # continue after the prompt
        token = first
        for _ in range(new):
            token = step(model, token, cache, 0, None, None, None).clone()

    @torch.inference_mode()
    def uncached(new):
        return model(text[:, : prompt_tokens + new // 2], last=True)[0].argmax(-1)

    return read, decode, uncached, weight_bytes


def compare_decoding(runs, rows, new, buffer):
    """Time decoding of new tokens with and without a cache. buffer is as large as the weights."""
    buffer_bytes = 4 * buffer.numel()

    def read_weights():
        for _ in range(new):
            buffer.sum()

    def note(name, medians):
        if name == "the weights":
            return f"{new * buffer_bytes / medians[name] / 1e9:.1f} GB/s"
        floor = medians["the weights"] * runs[name][-1] / buffer_bytes
        speed = f"{new * rows / medians[name]:.1f} tokens/s"
        return f"{speed}, {floor / medians[name]:.0%} of reading the weights"

    cached = {name: partial(decode, new) for name, (_, decode, *_) in runs.items()}
    cached["the weights"] = read_weights
    plain = {name: partial(uncached, new) for name, (_, _, uncached, _) in runs.items()}
    title = f"{new} new, {rows} at once"
    report = {title: compare(title, cached, note)}
    title = f"a token, no cache, {title}"
    speed = lambda name, medians: f"{rows / medians[name]:.1f} tokens/s"
    return report | {title: compare(title, plain, speed)}


def mod(settings, copy, matmul):
    """Time the routing rule of training, which gathers the kept tokens.

    Sublayers skip different shares, from 0.1 above the rate to 0.1 below, as trained routers do.
    """
    config = next(iter(configs(settings).values()))
    router = "nag" if config.residual == "nag" else "learned"
    forwards, steps, flops = {}, {}, {}
    for rate in map(float, rates.split(",")):
        routing = dict(mod_on="both", mod_rate=rate, mod_router=router) if rate else {}
        step, model, _ = stepper(replace(config, **routing))
        found = routers(model)
        for one, more in zip(found, torch.linspace(-0.1, 0.1, len(found)).tolist()):
            one.share.fill_(1 - rate + more)
            one.update_k()
        x = tokens(config, batch_size)

        @torch.no_grad()
        def run(model=model, x=x):
            with cast():
                model(x)

        name = f"rate {rate:g}"
        forwards[name], steps[name], flops[name] = run, step, model.flops_per_token()
    first = next(iter(flops.values()))
    note = lambda name, medians: f"{flops[name] / first:.3f} of the FLOPs"
    report = {f"forward, {k}": row for k, row in compare("forward", forwards, note).items()}
    return report | {f"step, {k}": v for k, v in compare("training step", steps, note).items()}


def data(settings, copy, matmul):
    """Tokens per second of the bare tokenizer on one core and of prepare_c4.py on all cores."""
    files, workers = list_files("python")[0][: megabytes * 60], cores()
    jobs = list(batches(files, lambda text: text, (0, 0)))
    texts = [text for job in jobs for _, _, text in job]
    encoding = get_tokenizer(tokenizer)
    report = {"bare": [], "prepare": []}  # tokens per second in each round
    with ProcessPoolExecutor(workers, get_context("spawn"), start_worker, (tokenizer,)) as pool:
        list(in_order(pool, jobs[: 2 * workers], 4 * workers))  # start the processes
        for _ in range(rounds):
            began = time.perf_counter()
            count = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=1)))
            report["bare"].append(count / (time.perf_counter() - began))
            began = time.perf_counter()
            results = in_order(pool, jobs, 4 * workers)
            count = sum(len(ids) for documents in results for _, _, ids in documents)
            report["prepare"].append(count / (time.perf_counter() - began))
    bare, ours = (statistics.median(report[key]) for key in ("bare", "prepare"))
    T = settings["block_size"]
    loader = Loader(Windows(data_dir, "train", T), batch_size, 1, seed=1)
    times = [seconds(partial(loader.fetch, step, 0)) for step in range(100)]
    report["loader_s"] = statistics.median(times)
    print(f"a batch of {batch_size} x {T}: {report['loader_s'] * 1e3:.2f} ms")
    share = f"{ours / bare / workers:.0%} of {workers} x the bare rate"
    speeds = f"{bare / 1e6:.2f} M tokens/s; {workers} processes: {ours / 1e6:.2f}"
    print(f"bare tokenizer, one thread: {speeds}, {share}")
    return report


def size(settings, copy, matmul):
    """Parameters, FLOPs and memory of a training step, for the model of a config file.

    Runs eager steps with fake tensors, which have shapes but no data. Compiled code keeps less.
    """
    config = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    with FakeTensorMode():
        attributes = {"loss_chunk": loss_chunk, "recompute": recompute}
        muon = optimizer == "muon"
        step, model, optimizers = stepper(config, compile=False, muon=muon, **attributes)
        step()  # creates the optimizers' state
        with LiveBytes(model, optimizers) as live:
            step()
    count, active = model.num_params(), model.num_params(active=True)
    state = sum(x.nbytes for x in state_of(optimizers))
    report = {"weights": 4 * count, "gradients": 4 * count, "optimizer": state, "peak": live.peak}
    report["a rank"] = report["peak"] + distribution_bytes(model, report)
    flops = model.flops_per_token()
    print(f"\n{config.residual}: {count:,} parameters, {active:,} of them used by a token")
    print(
        f"{flops:.4g} FLOPs per token, {flops * batch_size * config.block_size:.4g} per micro-step"
    )
    print(", ".join(f"{key} {n / 2**30:.2f} GiB" for key, n in report.items()))
    return {"parameters": count, "active": active, "flops_per_token": flops, **report}


def distribution_bytes(model, report):
    """How much more memory a rank needs than a single process. Under FSDP usually less than zero.

    FSDP divides weights and optimizer state, but a rank gathers the weights outside the blocks and
    those of two blocks, because it prefetches one. DDP copies the gradients into buckets.
    """
    if ranks == 1:
        return 0
    if shard == "none":
        return report["gradients"]
    block = max(sum(4 * p.numel() for p in block.parameters()) for block in model.blocks)
    gathered = report["weights"] - len(model.blocks) * block + 2 * block
    return gathered - round((1 - 1 / ranks) * (report["weights"] + report["optimizer"]))


# Time of an eager training step at DOCTOR's size, relative to prenorm, on a CPU; others: about 1.
EAGER = {"nag": 1.5, "ngpt": 1.3, "hc": 2.2, "mhc": 3.8, "attnres": 1.4, "attnres_block": 1.4}
SLOW = 2  # a mode is slower than expected if it takes this many times as long as EAGER says


def doctor(settings, copy, matmul):
    place = torch.device(device)
    memory, compiler = memory_bytes(place), can_compile(place.type)
    print(f"Python {platform.python_version()}, {cores()} cores, {', '.join(features(place))}")
    print("memory: " + (f"{memory / 2**30:.1f} GiB" if memory else "unknown"))
    print("torch.compile: " + ("yes" if compiler else "no"))
    problems, named = problems_of_machine(copy, matmul), configs(settings)
    steps = {name: stepper(config, compile=False)[0] for name, config in named.items()}
    losses = {name: [float(step()) for _ in range(3)] for name, step in steps.items()}
    first = next(iter(steps))

    def note(name, medians):
        ratio, marks = medians[name] / medians[first], ""
        if not all(map(math.isfinite, losses[name])):
            problems.append(f"{name}: the loss is not finite; try --dtype=float32, then report it")
            marks += "  loss not finite"
        if ratio > SLOW * EAGER.get(name, 1) / EAGER.get(first, 1):
            hint = "run again; if it stays, look at --what=residual"
            problems.append(f"{name}: slower than expected, {ratio:.1f}x {first}; {hint}")
            marks += "  slower than expected"
        return f"loss {losses[name][0]:.4f}{marks}"

    report = {"losses": losses, "eager": compare("eager training step", steps, note)}
    for name in [name for name in ("prenorm", "nag") if name in named] if compiler else []:
        report[name] = compiled_and_eager(name, named[name], steps[name], losses[name], problems)
    print()
    for problem in problems:
        print(f"- {problem}")
    print("see the lines above" if problems else "no problems: all is as expected")
    return report | {"problems": problems}


def problems_of_machine(copy, matmul):
    """Lines that say what slows this machine down, and what to do about it."""
    on_cpu, threads = device == "cpu", torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    peak = peak_flops(device_name(torch.device(device)))
    plain = matmul_speed("float32")
    checks = (
        (on_cpu and threads < cores(), f"torch uses {threads} of {cores()} cores: set "
         f"OMP_NUM_THREADS={cores()}"),
        (load > cores() / 2, f"other processes run: the load is {load:.1f} on {cores()} cores; "
         "stop them, or do not trust these times"),
        (not can_compile(torch.device(device).type), "torch.compile does not work here: on a CPU, "
         "use Linux and install g++; train.py runs without it"),
        (copy < 5e9, f"slower than expected: a copy moves {copy / 1e9:.1f} GB/s; look for other "
         "processes"),
        (dtype == "bfloat16" and matmul < plain, "slower than expected: bfloat16 has "
         f"{matmul / plain:.2f} of float32's matrix rate; give train.py --dtype=float32"),
        (peak and matmul < 0.5 * peak, f"slower than expected: {matmul / (peak or 1):.0%} of the "
         "data sheet's matrix rate; look at nvidia-smi for power limits and other processes"),
    )  # fmt: skip
    return [line for holds, line in checks if holds]


def compiled_and_eager(name, config, eager, losses, problems):
    """Compare compiled code with eager code: the losses of three steps, and the time of a step."""
    step, *_ = stepper(config)
    began = time.perf_counter()
    compiled = [float(step()) for _ in range(3)]
    first = time.perf_counter() - began
    difference = max(abs(a - b) for a, b in zip(losses, compiled))
    close = 0.02 if dtype == "bfloat16" else 1e-4
    if not difference < close:
        problems.append(f"{name}: compiled differs by {difference:.2g}; use --compile=False")
    report = compare(f"{name}, training step", {"eager": eager, "compiled": step})
    print(f"compiled: losses differ by {difference:.2g}; the first three steps took {first:.0f} s")
    ratio = report["compiled"]["ratio"][1]
    if ratio > 1.2:
        slower = f"compiled is slower than expected, {ratio:.1f}x eager"
        problems.append(f"{name}: {slower}; run again, or use --compile=False")
    return report | {"difference": difference, "first": first}


ALL = (forward, residual, train, cold, recipe, memory, generate, mod, data, size, doctor)
PARTS = {part.__name__: part for part in ALL}
QUICK = "--what=forward,residual,train,generate --modes=prenorm,nag --n_layer=2 --rounds=3"
QUICK += " --batch_size=2 --prompt_tokens=64 --new_tokens=32 --batches_of=1"
DOCTOR = "--quick=True --n_layer=2 --n_head=2 --n_embd=64 --block_size=64 --batch_size=4 --rounds=9"
DOCTOR += " --modes=" + ",".join(sorted(RESIDUALS, key="prenorm".__ne__))  # prenorm is the first


def unused_settings():
    """Settings of train.py that config files may hold, and that no part of this file needs."""
    names = settings_of(os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py"))
    return {name for name in names if not name.startswith(("sft_", "lora_"))}


def main():
    given = sys.argv[1:]
    read = partial(configure, globals(), GPTConfig, unused=unused_settings())
    settings, _ = read(argv=given)
    if what == "doctor":
        auto = pick_dtype("auto", pick_device(device).type)
        settings, _ = read(argv=[*DOCTOR.split(), f"--dtype={auto}", *given])
    elif quick:
        settings, _ = read(argv=[*QUICK.split(), *given])
    adopt({"device": "cpu" if what == "size" else str(pick_device(device))})
    try:
        chosen = [pick(PARTS, part, "what") for part in what.split(",")]
        pick({"bfloat16": 0, "float32": 0}, dtype, "dtype")
        pick({"adamw": 0, "muon": 0}, optimizer, "optimizer")
        pick({"none": 0, "fsdp": 0}, shard, "shard")
        with torch.device("meta"):
            for config in configs(settings).values():
                GPT(replace(config, n_layer=1))
    except ValueError as error:
        raise SystemExit(f"bench.py: {error}") from error
    torch._dynamo.config.recompile_limit = 256  # one process compiles many modes
    torch._dynamo.config.fail_on_recompile_limit_hit = True

    name, threads = device_name(torch.device(device)), torch.get_num_threads()
    report = {"settings": settings, "git": commit(), "torch": torch.__version__, "threads": threads}
    report["device"], copy, matmul = name, None, None
    print(f"{name}, torch {torch.__version__}, {threads} threads, {dtype}")
    shape = "n_layer n_head n_embd block_size vocab_size".split()
    print(", ".join(f"{key} {settings[key]}" for key in shape) + f", {batch_size} sequences")
    if what != "size":
        copy, matmul = floors()
        report |= {"copy_bytes_s": copy, "matmul_flops_s": matmul}
        print(f"copy {copy / 1e9:.1f} GB/s, matrix product {matmul / 1e12:.2f} TFLOP/s")
    for part in chosen:
        report[part.__name__] = part(settings, copy, matmul)
        write_json(out, report)


if __name__ == "__main__":
    main()
