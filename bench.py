"""
Measure speed and memory. Candidates run in turn in one process.

    python bench.py --quick=True    four small parts: about two minutes, most of it compilation
    python bench.py --what=train --modes=prenorm,nag,bhyt --n_layer=12 --n_head=8 --n_embd=512
    python bench.py --what=forward,residual --modes=prenorm,prenorm,nag    prenorm twice: the noise
    python bench.py config/llama_3b.py --what=size    computes nothing, so it works on any machine

    forward     forward of one block, weights and stream in dtype
    residual    read and write of two sublayers without attention and MLP, forward and backward
    train       a training step of one micro-step, and the first one, which compiles unless the
                compiler's cache has the code
    nanogpt     the same step with AdamW, of nanoGPT's model (--nanogpt_model: the path of its
                model.py) and of ours, compiled block by block, as one graph, and on CUDA as one
                graph that CUDA replays
    memory      bytes of the weights, gradients and optimizer state, and the peak of a step
    generate    reading the prompt, and a token without a cache, both eager; decoding with a cache
                as one graph, compared with the time to read all weights once per token
    mod         forward and training step of the first mode by the share of tokens that skip
    size        parameters, FLOPs and memory of one model: set --residual, not --modes

Times are medians and quartiles over rounds. The printed ratio divides the printed medians. The file
has the quartiles, over rounds, of a candidate's time over the first candidate's time in the same
round: their median is less noisy, and can differ from the printed ratio.
"""

import importlib.util
import math
import os
import random
import statistics
import sys
import time
import weakref
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import machine
from attnres import group_size
from configurator import check, configure, overrides, read_settings
from data import make_folder, write_json
from generate import KVCache, compiled_step, next_token
from mod import routers
from model import GPT, MODEL_SETTINGS, RESIDUALS, GPTConfig, compile_options, settings_of_others
from norms import pick
from streams import whole

what = "forward,residual,train,memory,generate,mod"  # parts, separated by commas
modes = "prenorm,nag,bhyt"  # residual modes, separated by commas; ratios are to the first
batch_size = 8  # sequences per batch
optimizer = "muon"  # of a training step: muon or adamw
loss_chunk: int | None = None  # of a training step, as in train.py
recompute = False  # of a training step, as in train.py
nanogpt_model: str | None = None  # nanogpt: path of the file that defines its model
rates = "0,0.2,0.4,0.6"  # mod: shares of tokens that skip
prompt_tokens = 512  # generate: length of the prompt
new_tokens = "128,512"  # generate: numbers of new tokens
batches_of = "1,32"  # generate: numbers of sequences decoded at once
shard = "none"  # size: none or fsdp, as in train.py
ranks = 1  # size: number of processes
rounds = 7  # timed rounds, after 2 warm-up rounds
quick = False  # run four parts at a small size with few rounds
dtype = "auto"  # of autocast, and of tensors of forward, residual, generate; auto: as in train.py
device = "auto"  # cpu, mps, cuda, cuda:1, ...; auto: CUDA if there is any, then mps, then cpu
out = "out/bench.json"  # file for the results

SHAPE = "n_layer n_head n_embd block_size vocab_size".split()


# ------------------------------------------------------------------------------------------------
# Timing


def wait():
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def seconds(run):
    wait()
    began = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - began


def race(candidates, rounds):
    """Time each candidate once per round: {name: [seconds]}.

    A candidate can speed up or slow down the next one through the caches. So each pair of rounds
    has a new random order, which the second round of the pair reverses. The first pair warms up.
    """
    names, times = list(candidates), {name: [] for name in candidates}
    for turn in range(rounds + 2):
        order = random.Random(turn // 2).sample(names, len(names))
        for name in reversed(order) if turn % 2 else order:
            times[name].append(seconds(candidates[name]))
    return {name: t[2:] for name, t in times.items()}


def compare(title, candidates, rounds, note=lambda name, medians: ""):
    """Time the candidates. Print and return their times, and their ratios to the first.

    note(name, medians) returns text for the end of a line.
    """
    first, report = next(iter(candidates)), {}
    times = race(candidates, rounds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratios_of = f"ratio to {first} (quartiles of rounds)"
    print(f"\n{title:<28} {'median':>10} {'quartiles':>21}  {ratios_of}")
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4)
        ratios = statistics.quantiles((a / b for a, b in zip(t, times[first])), n=4)
        quartiles = f"{low * 1e3:.2f} - {high * 1e3:.2f} ms"
        ratio = f"{median / medians[first]:.3f}x ({ratios[0]:.3f} - {ratios[2]:.3f})"
        print(f"{name:<28} {median * 1e3:>7.2f} ms {quartiles:>21}  {ratio}  {note(name, medians)}")
        report[name] = {"seconds": t, "median": median, "quartiles": [low, high], "ratio": ratios}
    return report


def matrix_rate(flops, matmul):
    """A note for compare: FLOPs per second, relative to a large matrix product."""
    return lambda name, medians: f"{flops[name] / medians[name] / matmul:.0%} of the matrix rate"


def floors(device, dtype, rounds, small=False):
    """(bytes per second of a copy, reads and writes; FLOPs per second of a matrix product)

    small: use small tensors, which take less time.
    """
    on_gpu = device.startswith("cuda")
    n_bytes = 1 << (30 if on_gpu else 24 if small else 27)
    x = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copy = fastest(lambda: y.copy_(x), rounds)

    n = 8192 if on_gpu else 1024 if small else 2048
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in "ab")
    product = fastest(lambda: a @ b, rounds)
    return 2 * n_bytes / copy, 2 * n**3 / product


def fastest(run, rounds, times=10):
    """Seconds of a run, in the fastest of some rounds of so many runs."""
    return min(seconds(lambda: [run() for _ in range(times)]) for _ in range(rounds)) / times


def replayed(run, device):
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

    return lambda keeps=run: graph.replay()  # run has the tensors that the graph reads


# ------------------------------------------------------------------------------------------------
# Candidates


def configs(base, modes):
    """{name: config} of the modes. A mode may occur twice: the second is named "MODE again"."""
    named = {}
    for mode in modes.split(","):
        pick(RESIDUALS, mode, "residual")  # refuse an unknown mode
        name = mode + " again" if mode in named else mode
        if name in named:
            raise ValueError(f"{modes=}: {mode} occurs more than twice")
        named[name] = replace(base, residual=mode, **settings_of_others(mode))
    return named


def tokens(config, rows, device):
    return torch.randint(config.vocab_size, (rows, config.block_size), device=device)


def stepper(config, batch_size, device, dtype, optimizer="adamw", micro_steps=1, compile=True):
    """(function that runs one training step and returns its loss, model, optimizers)

    A step is that of train.py on one process: batch_size sequences in each of its micro-steps, then
    one step of the optimizers. All micro-steps have the same random tokens.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(config)
    if compile:
        model.compile_blocks()
    optimizers = model.optimizers(optimizer, 1e-4, {}, 0.0, getattr(torch, dtype))
    x = tokens(config, batch_size, device)
    return step_of(model, optimizers, x, device, dtype, micro_steps), model, optimizers


def step_of(model, optimizers, x, device, dtype, micro_steps=1):
    """The function that stepper returns. x: the tokens of each micro-step"""

    def step():
        total = 0.0
        for _ in range(micro_steps):
            with machine.autocast(device, dtype):
                loss = model(x, x)[1] / micro_steps
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=True)
        model.after_step()
        return total

    return step


def stepper_as_set(config, kind=None, compile=True):
    """stepper, with the settings at the top. kind: another optimizer than theirs"""
    how = config, batch_size, device, dtype, kind or optimizer
    step, model, optimizers = stepper(*how, compile=compile)
    model.loss_chunk, model.recompute = loss_chunk, recompute
    return step, model, optimizers


# ------------------------------------------------------------------------------------------------
# Parts


def forward(base, copy, matmul):
    runs, flops = {}, {}
    for name, config in configs(base, modes).items():
        runs[name], flops[name] = block_forward(config)
    return compare("forward, one block", runs, rounds, matrix_rate(flops, matmul))


def with_blocks(config, n_layer):
    """The config with another number of blocks. The blocks of attnres_block keep their size."""
    sized = {"attnres_size": group_size(config)} if config.residual == "attnres_block" else {}
    return replace(config, n_layer=n_layer, **sized)


def block_forward(config):
    """(function that runs the forward of one compiled block, its FLOPs)"""
    torch.manual_seed(0)
    model = GPT(with_blocks(config, 1)).to(device, getattr(torch, dtype)).eval()
    options = compile_options(config.residual, torch.device(device).type)
    block, rope = torch.compile(model.blocks[0], options=options), (model.cos, model.sin)
    positions = torch.arange(config.block_size, device=device)[:, None]
    embedded = model.embed(tokens(config, batch_size, device)).detach()
    stream = model.ends.embed(embedded).replace(at=positions)

    @torch.no_grad()
    def run():
        whole(block(stream, rope))  # with kernels, a write waits for the next block's read

    flops_per_token = sum(model.block_flops()[0]) / 3  # without the backward pass
    return replayed(run, device), batch_size * config.block_size * flops_per_token


def residual(base, copy, matmul):
    named = configs(base, modes)
    shape = (batch_size, base.block_size, base.n_embd)
    runs = {name: replayed(two_sublayers(of, shape, device, dtype), device)
            for name, of in named.items()}  # fmt: skip
    # Passes over the stream, forward + backward: pre-norm and BHyT 4 + 4, NAG 3 + 5 and one for w.
    floor = 2 * 8 * math.prod(shape) * getattr(torch, dtype).itemsize
    note = lambda name, medians: f"{floor / copy / medians[name]:.0%} of the copy rate"
    return compare("residual alone, one block", runs, rounds, note)


def handed(stream):
    """What a read hands to its write, if it does."""
    return () if stream.lane is None else (stream.lane,)


def writes_and_reads(attention, mlp, start):
    """A function of two outputs of sublayers and of start's tensors: write, read, write, read.

    start: a Stream that mlp.read has returned. A write comes first, because a read can return its
    input, and that input's gradients would be added outside the compiled graph. What the last read
    gives to its write is an output, too: without it, its gradients would be zeros. If that read
    returns the stream itself, the two outputs share one gradient, which saves one pass of about
    twenty.
    """

    def both(f1, f2, x, *others):
        *streams, maps = others if handed(start) else (*others, None)
        stream = start.replace(x=x, lane=maps, sources=tuple(streams) or start.sources)
        h1, stream = attention.read(mlp.write(stream, f1))
        h2, stream = mlp.read(attention.write(stream, f2))
        outputs = [h1, h2] if h2 is stream.x else [h1, h2, stream.x]
        return [*outputs, *(stream.sources if streams else ()), *handed(stream)]

    return both


def two_sublayers(config, shape, device, stream_dtype):
    """A function that runs writes_and_reads and its backward, on random (B, T, C)."""
    model = GPT(with_blocks(config, 2)).to(device)
    last = model.blocks[-1]  # the first one of keel differs
    attention, mlp = last.attn_residual, last.mlp_residual
    random = lambda *shape: torch.randn(shape, device=device).to(getattr(torch, stream_dtype))
    at = torch.arange(shape[1], device=device)[:, None]
    with torch.no_grad(), machine.autocast(device, dtype):
        _, start = mlp.read(model.ends.embed(random(*shape)).replace(at=at))
    streams = [start.x, *(x for x in start.sources if x is not start.x)]
    given = [random(*shape), random(*shape), *streams, *handed(start)]
    given = [x.clone().requires_grad_() for x in given]
    inputs = [*given, *attention.parameters(), *mlp.parameters()]

    both = writes_and_reads(attention, mlp, start)
    options = compile_options(config.residual, torch.device(device).type)
    compiled = torch.compile(both, options=options)
    with machine.autocast(device, dtype):
        grads = [torch.randn_like(y) for y in compiled(*given)]

    def run():
        with machine.autocast(device, dtype):
            outputs = compiled(*given)
        torch.autograd.grad(outputs, inputs, grads, allow_unused=True)

    return run


def train(base, copy, matmul):
    runs, flops, first = {}, {}, {}
    for name, config in configs(base, modes).items():
        runs[name], model, _ = stepper_as_set(config)
        flops[name] = batch_size * config.block_size * model.flops_per_token()
        first[name] = seconds(runs[name])
    rate = matrix_rate(flops, matmul)
    note = lambda name, medians: f"{rate(name, medians)}; the first step took {first[name]:.1f} s"
    title = f"a step of {batch_size} x {base.block_size}"
    report = compare(title, runs, rounds, note)
    return {name: row | {"first": first[name]} for name, row in report.items()}


def nanogpt(base, copy, matmul):
    runs = {"nanoGPT": nanogpt_step(base)}
    for name, config in configs(base, modes).items():
        runs[name] = stepper_as_set(config, "adamw")[0]
        runs[name + ", one graph"], model, _ = stepper_as_set(config, "adamw", compile=False)
        model.compile()
        if device.startswith("cuda"):
            runs[name + ", CUDA graphs"], model, _ = stepper_as_set(config, "adamw", compile=False)
            model.compile(mode="reduce-overhead")
    first = {name: seconds(run) for name, run in runs.items()}
    note = lambda name, medians: f"the first step took {first[name]:.1f} s"
    title = f"a step of {batch_size} x {base.block_size}, AdamW"
    return compare(title, runs, rounds, note)


def nanogpt_step(base):
    """A training step of nanoGPT's model and optimizer, compiled, with the shape of ours."""
    spec = importlib.util.spec_from_file_location("nanogpt", nanogpt_model)
    theirs = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt"] = theirs  # its dataclass looks for it
    spec.loader.exec_module(theirs)
    shape = {name: getattr(base, name) for name in SHAPE}
    config = theirs.GPTConfig(**shape, dropout=0.0, bias=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = theirs.GPT(config)
    kind = torch.device(device).type
    optimizers = [model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), kind)]
    model.after_step = lambda: None  # our models have one
    model.compile()
    return step_of(model, optimizers, tokens(base, batch_size, device), device, dtype)


def memory(base, copy, matmul):
    report = {}
    print("\nmemory of a training step")
    for name, config in configs(base, modes).items():
        _, report[name] = step_memory(config)
        sizes = ", ".join(f"{key} {n / 2**20:.0f} MiB" for key, n in report[name].items())
        print(f"{name:<28} {sizes}")
    return report


def step_memory(config):
    """(model, bytes of its weights, gradients and optimizer state, and of the peak of a step).

    Runs eager steps with fake tensors, which have shapes but no data. Compiled code keeps less.
    """
    with FakeTensorMode():
        step, model, optimizers = stepper_as_set(config, compile=False)
        step()  # creates the optimizers' state
        with LiveBytes(model, optimizers) as live:
            step()
    weights, state = 4 * model.num_params(), sum(x.nbytes for x in state_of(optimizers))
    sizes = {"weights": weights, "gradients": weights, "optimizer": state, "peak": live.peak}
    return model, sizes


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


def generate(base, copy, matmul):
    report, named = {}, configs(base, modes)
    numbers = [*map(int, new_tokens.split(","))]
    length = prompt_tokens + max(3, *numbers)  # generation() decodes 3
    for rows in map(int, batches_of.split(",")):
        runs = {name: generation(config, rows, length) for name, config in named.items()}
        buffer = torch.ones(next(iter(runs.values()))[-1] // 4, device=device)  # as many bytes
        title = f"prompt, {rows} at once"
        speed = lambda name, t, rows=rows: f"{rows * prompt_tokens / t[name]:.0f} tokens/s"
        prompts = {name: read for name, (read, *_) in runs.items()}
        report[title] = compare(title, prompts, rounds, speed)
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
    model.ends.fold(model)
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

    decode(3)  # compiles; on CUDA, the second step records the graph
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
    report = {title: compare(title, cached, rounds, note)}
    title = f"a token, no cache, {title}"
    speed = lambda name, medians: f"{rows / medians[name]:.1f} tokens/s"
    return report | {title: compare(title, plain, rounds, speed)}


def mod(base, copy, matmul):
    """Time the routing rule of training, which gathers the kept tokens.

    Sublayers skip different shares, from 0.1 above the rate to 0.1 below, as trained routers do.
    """
    config = next(iter(configs(base, modes).values()))
    router = "nag" if config.residual == "nag" else "learned"
    forwards, steps, flops = {}, {}, {}
    for rate in map(float, rates.split(",")):
        routing = dict(mod_on="both", mod_rate=rate, mod_router=router) if rate else {}
        step, model, _ = stepper_as_set(replace(config, **routing))
        found = routers(model)
        for one, more in zip(found, torch.linspace(-0.1, 0.1, len(found)).tolist()):
            one.share.fill_(min(1.0, 1 - rate + more))
            one.update_k()
        x = tokens(config, batch_size, device)

        @torch.no_grad()
        def run(model=model, x=x):
            with machine.autocast(device, dtype):
                model(x)

        step(), run()  # compile
        name = f"rate {rate:g}"
        forwards[name], steps[name], flops[name] = run, step, model.flops_per_token()
    first = next(iter(flops.values()))
    note = lambda name, medians: f"{flops[name] / first:.3f} of the FLOPs"
    of_forward = compare("forward", forwards, rounds, note)
    of_step = compare("training step", steps, rounds, note)
    report = {f"forward, {name}": row for name, row in of_forward.items()}
    return report | {f"step, {name}": row for name, row in of_step.items()}


def size(config, copy, matmul):
    """Parameters, FLOPs and memory of a training step, for the model of a config file."""
    model, report = step_memory(config)
    count, active = model.num_params(), model.num_params(active=True)
    report["a rank"] = report["peak"] + distribution_bytes(model, report)
    flops = model.flops_per_token()
    print(f"\n{config.residual}: {count:,} parameters, {active:,} of them used by a token")
    print(f"{flops:.4g} FLOPs per token, {flops * batch_size * config.block_size:.4g} a micro-step")
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


ALL = (forward, residual, train, nanogpt, memory, generate, mod, size)
PARTS = {part.__name__: part for part in ALL}
QUICK = "--what=forward,residual,train,generate --modes=prenorm,nag --n_layer=2 --rounds=3"
QUICK += " --batch_size=2 --prompt_tokens=64 --new_tokens=32 --batches_of=1"


is_count = lambda text: text.isdecimal() and int(text) > 0
is_share = lambda text: text.replace(".", "", 1).isdecimal() and float(text) < 1
RULES = (
    ("batch_size loss_chunk prompt_tokens ranks", lambda v: v > 0, "above 0"),
    ("rounds", lambda v: v > 2, "at least 3"),
    ("new_tokens batches_of", lambda v: all(map(is_count, v.split(","))), "numbers above 0"),
    ("rates", lambda v: all(map(is_share, v.split(","))), "shares below 1"),
)


def check_settings(base, settings, named):
    """The chosen parts. A bad value is an error before any work, and so is a setting of another
    mode. named: the settings of the command line.
    """
    check(settings, RULES)
    if not out or os.path.isdir(out):
        raise ValueError(f"{out=} is not the name of a file")
    pick({"adamw": 0, "muon": 0}, optimizer, "optimizer")
    pick({"none": 0, "fsdp": 0}, shard, "shard")
    chosen = [pick(PARTS, part, "what") for part in what.split(",")]
    if size in chosen and len(chosen) > 1:
        raise ValueError(f"{what=}: size goes alone")
    if mod in chosen and base.mod_on != "none":
        raise ValueError(f"what=mod sets mod_on by itself, from --rates: mod_on={base.mod_on!r}")
    if nanogpt in chosen and not os.path.exists(nanogpt_model or ""):
        raise ValueError(f"what=nanogpt: {nanogpt_model=} is not the path of nanoGPT's model.py")
    tried = [base] if what == "size" else configs(base, modes).values()
    with torch.device("meta"):
        for config in tried:
            GPT(replace(config, n_layer=1))
    everyone = [config.residual for config in tried]
    unused = sorted(settings_of_others(*everyone).keys() & named)
    if unused:
        raise ValueError(f"{', '.join(unused)}: no setting of {' or '.join(everyone)}")
    return chosen


def machine_speeds():
    """Measure and print (bytes per second of a copy, FLOPs per second of a matrix product)."""
    copy, matmul = floors(device, dtype, rounds, small=quick)
    name = machine.device_name(torch.device(device))
    peak = machine.peak_flops(name) if dtype == "bfloat16" else None
    share = f", {matmul / peak:.0%} of the data sheet's rate" if peak else ""
    print(f"copy {copy / 1e9:.1f} GB/s, {dtype} matrix product {matmul / 1e12:.2f} TFLOP/s{share}")
    return copy, matmul


def main():
    global device, dtype
    given = sys.argv[1:]
    here = os.path.dirname(os.path.abspath(__file__))
    others = read_settings(open(os.path.join(here, "train.py")).read())
    unused = {each for each in others if not each.startswith(("sft_", "lora_"))}
    read = partial(configure, globals(), GPTConfig, unused=unused)
    settings, asked = read(argv=given)
    named = {key for source, key, _ in overrides(given, {}) if source == "command line"}
    if quick and what != "size":
        settings, asked = read(argv=[*QUICK.split(), *given])
    if what != "size" and "residual" in named:  # a config file may set it
        raise SystemExit("bench.py: set --modes, not --residual, unless what=size")
    if what == "size":  # of a run on GPUs
        if "modes" in asked:
            raise SystemExit("bench.py: what=size shows one model: set --residual, not --modes")
        device, dtype = "cpu", "bfloat16" if dtype == "auto" else dtype
    device = str(machine.pick_device(device))
    dtype = machine.pick_dtype(dtype, torch.device(device).type)
    machine.prepare_process(device)
    base = GPTConfig(**{name: settings[name] for name in MODEL_SETTINGS})
    try:
        chosen = check_settings(base, settings, named)
    except ValueError as error:
        raise SystemExit(f"bench.py: {error}") from error
    compiles = any(part not in (memory, size) for part in chosen)
    if compiles and device == "cpu" and not machine.can_compile("cpu"):
        raise SystemExit("bench.py compiles: on a CPU it needs Linux and a C++ compiler (g++)")
    torch._dynamo.config.recompile_limit = 256  # one process compiles many modes
    torch._dynamo.config.fail_on_recompile_limit_hit = True

    name, threads = machine.device_name(torch.device(device)), torch.get_num_threads()
    report = {"settings": settings, "git": machine.commit(), "torch": torch.__version__}
    report |= {"device": name, "threads": threads, "dtype": dtype}
    print(f"{name}, torch {torch.__version__}, cores {machine.cores()}, threads {threads}, {dtype}")
    print(", ".join(f"{key} {settings[key]}" for key in SHAPE) + f", {batch_size} sequences")
    copy = matmul = None
    if what != "size":
        copy, matmul = machine_speeds()
        report |= {"copy_bytes_s": copy, "matmul_flops_s": matmul}
    make_folder(os.path.dirname(out))
    for part in chosen:
        report[part.__name__] = part(base, copy, matmul)
        write_json(out, report)


if __name__ == "__main__":
    main()
