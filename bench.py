"""
The stopwatch: candidates side by side in one process, in changing order, as medians, quartiles and ratios to the first.

    python bench.py --quick=True               four parts, small: about two minutes, nearly all of it of compiling
    python bench.py --what=train --modes=prenorm,nag,bhyt --n_layer=12 --n_head=8 --n_embd=512 --block_size=512
    python bench.py --what=forward,residual --modes=prenorm,prenorm,nag      a mode against itself shows the noise

    forward    one block of each mode, the forward alone, weights and stream in dtype
    residual   what two sublayers do besides attention and MLP: read and write, forward and backward; what the compiler
               makes of it, in kernels (loops on a CPU) and bytes that they move
    train      a training step of each mode
    cold       the first training step, in a process of its own with nothing compiled before
    recipe     a training step as train.py does it by default, and what each part of that brings against plain float32
    memory     what a training step keeps for the backward, and the peak, with all that spends less of it
    generate   reading a prompt and a token without a cache, as eval.py does, eagerly; decoding with a cache, as one
               graph, against the time to read as many bytes as there are weights, once a token
    mod        a forward and a training step by the share of tokens that skip, beside the FLOPs that are executed
    data       prepare_c4.py's processes against the bare tokenizer, and reading a batch
"""

import logging
import os
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context

import torch
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache
from torch.distributed._tools.mem_tracker import MemTracker

from configurator import configure
from data import Loader, Windows, get_tokenizer, write_json
from generate import FOLDS, KVCache, compiled_step, next_token
from machine import commit, device_name, pick_device, prepare_process
from mod import routers
from model import GPT, GPTConfig, settings_of_others
from norms import Stream, pick
from prepare_c4 import batches, in_order, list_files, start_worker

what = "forward,residual,train,memory,generate,mod"  # parts, separated by commas
modes = "prenorm,nag,bhyt"  # residual modes to compare with the first, separated by commas
batch_size = 8  # sequences
rates = "0,0.2,0.4,0.6"  # mod: shares of tokens that skip
prompt_tokens = 512  # generate: length of the prompt
new_tokens = "128,512"  # generate: tokens decoded behind it
batches_of = "1,32"  # generate: sequences at once
data_dir = "data/python"  # data: shards to read batches from
tokenizer = "bytes"  # data: the tokenizer to measure, as in prepare_c4.py
megabytes = 10  # data: about so much text
rounds = 7  # timed rounds, after two that are not
quick = False  # four parts, a small shape, few rounds: does it run, and about how fast?
dtype = "bfloat16"  # autocast, and the stream of the part residual: bfloat16 or float32
device = "auto"  # cpu, mps, cuda, cuda:1, ...; auto: CUDA if there is any, then mps, then cpu
out = "bench.json"  # where the figures go


def sync():
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(run):
    sync()
    began = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - began


def replayed(run):
    """On a GPU, the run as one graph: kernels of microseconds would otherwise wait for the host, which is then timed"""
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
    """Seconds of each candidate, all of them in every round, every second round in another order and the one behind it
    in reverse: what one leaves in the caches helps or hinders the next, and none is always late"""
    names, times = list(candidates), {name: [] for name in candidates}
    for turn in range(rounds + 2):
        order = random.Random(turn // 2).sample(names, len(names))
        for name in reversed(order) if turn % 2 else order:
            times[name].append(seconds(candidates[name]))
    return {name: t[2:] for name, t in times.items()}


def compare(title, candidates, notes=None):
    """Print and return the times of each candidate and their ratio to the first's, round by round. notes: a function of
    a name and all medians"""
    times, report, first = race(candidates), {}, next(iter(candidates))
    medians = {name: statistics.median(t) for name, t in times.items()}
    print(f"\n{title:<28} {'median':>10} {'quartiles':>21}  time v. {first}")
    for name, t in times.items():
        low, median, high = statistics.quantiles(t, n=4)
        ratios = statistics.quantiles((a / b for a, b in zip(t, times[first])), n=4)
        print(
            f"{name:<28} {median * 1e3:>7.2f} ms {f'{low * 1e3:.2f} - {high * 1e3:.2f} ms':>21}"
            f"  {ratios[1]:.3f}x ({ratios[0]:.3f} - {ratios[2]:.3f})  {notes(name, medians) if notes else ''}"
        )
        report[name] = {"seconds": t, "median": median, "quartiles": [low, high], "ratio": ratios}
    return report


def floors():
    """Bytes a second that a copy moves, reading and writing, and FLOPs a second of a large matrix product"""
    cuda, times = device.startswith("cuda"), 10
    x = torch.ones(1 << (30 if cuda else 24 if quick else 27), dtype=torch.uint8, device=device)
    y, n = torch.empty_like(x), 8192 if cuda else 1024 if quick else 2048
    a, b = (torch.randn(n, n, device=device).to(getattr(torch, dtype)) for _ in "ab")
    copy = min(seconds(lambda: [y.copy_(x) for _ in range(times)]) for _ in range(rounds))
    matmul = min(seconds(lambda: [a @ b for _ in range(times)]) for _ in range(rounds))
    return times * 2 * x.numel() / copy, times * 2 * n**3 / matmul


# ---------------------------------------------------------------------------------------------------------------------
# What is compared


def configs(settings):
    """{name: the configuration of each mode}, the same mode twice under two names"""
    base, made = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)}), {}
    for mode in modes.split(","):
        made[mode + " again" * (mode in made)] = replace(
            base, residual=mode, **settings_of_others(mode)
        )
    return made


def autocast(on=None):
    return torch.autocast(
        device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16" if on is None else on
    )


def tokens(config, rows):
    return torch.randint(config.vocab_size, (rows, config.block_size), device=device)


def stepper(config, bfloat16=None, compile=True, fused=True, **spend):
    """A function that does one training step, its model and optimizer"""
    torch.manual_seed(0)
    model = GPT(config).to(device)
    for key, value in spend.items():
        setattr(model, key, value)
    if compile:
        model.compile_blocks()
    optimizer, x = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused),
        tokens(config, batch_size),
    )

    def step():
        with autocast(bfloat16):
            loss = model(x, x)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, model, optimizer


def adopt(settings):
    """Those of main's settings that a process of its own needs"""
    globals().update(settings)
    prepare_process(device)


def apart(part, *args):
    """What part(*args) comes to in a process of its own, made by one that has imported this file and done no more"""
    mine = {"device": device, "dtype": dtype, "batch_size": batch_size}
    with ProcessPoolExecutor(1, get_context("forkserver"), adopt, (mine,)) as pool:
        return pool.submit(part, *args).result()


# ---------------------------------------------------------------------------------------------------------------------
# The parts


def forward(settings, copy, matmul):
    """Time a block, and how much of it is matrix products"""
    runs, notes = {}, {}
    for name, config in configs(settings).items():
        torch.manual_seed(0)
        model = GPT(replace(config, n_layer=1)).to(device, getattr(torch, dtype)).eval()
        block, rope = torch.compile(model.blocks[0]), (model.cos, model.sin)
        e = model.embed(tokens(config, batch_size)).detach()
        stream = model.ends.embed(e)._replace(
            at=torch.arange(config.block_size, device=device)[:, None]
        )

        @torch.no_grad()
        def run(block=block, stream=stream, rope=rope):
            block(stream, rope)

        head = 2 * 3 * config.n_embd * config.vocab_size
        flops = batch_size * config.block_size * (model.flops_per_token() - head) / 3
        runs[name], notes[name] = replayed(run), flops / matmul
    return compare(
        "forward, one block",
        runs,
        lambda name, t: f"{notes[name] / t[name]:.0%} of the matrix rate",
    )


def counted(run):
    """What the compiler makes of the first run of something; None if it was compiled before"""
    log = logging.getLogger(
        "torch._inductor.compile_fx.__inductor_metrics"
    )  # while it listens, bytes are counted
    log.propagate = False
    log.setLevel(logging.INFO)
    metrics.reset()
    with fresh_cache():
        run()
    log.setLevel(logging.WARNING)
    kernels = metrics.generated_kernel_count
    return {"kernels": kernels, "bytes": metrics.num_bytes_accessed} if kernels else None


def residual(settings, copy, matmul):
    """Two sublayers without what they compute, forward and backward: write, read, write, read, so that what is read is
    never an input, whose gradient no graph could add. Where the last read is the stream itself its two gradients come
    as one, a pass of about twenty."""
    kinds, runs, made = configs(settings), {}, {}
    if "nag" in kinds:
        kinds["nag, no modulator"] = replace(kinds["nag"], nag_directions=0)
    shape = (batch_size, next(iter(kinds.values())).block_size, next(iter(kinds.values())).n_embd)
    for name, config in kinds.items():
        block = GPT(replace(config, n_layer=1)).to(device).blocks[0]
        x, f1, f2 = (
            torch.randn(shape, device=device).to(getattr(torch, dtype)).requires_grad_()
            for _ in range(3)
        )
        g, g_lane = torch.randn_like(x), torch.randn(*shape[:2], 1, device=device)
        lane = torch.zeros(*shape[:2], 1, device=device) if config.residual == "nag" else None
        at = torch.arange(shape[1], device=device)[:, None]
        inputs = [x, f1, f2, *block.attn_residual.parameters(), *block.mlp_residual.parameters()]

        @torch.compile
        def both(x, f1, f2, block=block, lane=lane, at=at):
            h1, stream = block.attn_residual.read(block.mlp_residual.write(Stream(x, lane, at), f1))
            h2, stream = block.mlp_residual.read(block.attn_residual.write(stream, f2))
            return (
                h1,
                h2,
                *([] if h2 is stream.x else [stream.x]),
                *([] if lane is None else [stream.lane]),
            )

        def run(both=both, inputs=inputs, grads=(g, g_lane)):
            with autocast():
                outputs = both(*inputs[:3])
            torch.autograd.grad(
                outputs, inputs, [grads[y.size(-1) == 1] for y in outputs], allow_unused=True
            )

        made[name] = (
            counted(run) or made[name.removesuffix(" again")]
        )  # they share what is compiled
        runs[name] = replayed(run)
    floor = (
        2 * 8 * x.numel() * x.element_size() / copy
    )  # 8 passes a sublayer: pre-norm and BHyT 4 + 4, NAG 3 + 6

    def note(name, t):
        of = made[name]
        return f"{floor / t[name]:.0%} of the copy rate; {of['kernels']} kernels, {of['bytes'] / 1e6:.0f} MB"

    report = compare("residual alone, one block", runs, note)
    return {name: of | made[name] for name, of in report.items()}


def train(settings, copy, matmul):
    """And what BHyT does between steps, every bhyt_interval of them"""
    runs, notes, refresh = {}, {}, {}
    for name, config in configs(settings).items():
        runs[name], model, _ = stepper(config)
        notes[name] = batch_size * config.block_size * model.flops_per_token() / matmul
        refresh[name] = min(seconds(model.refresh) for _ in range(3))

    def note(name, t):
        return f"{notes[name] / t[name]:.0%} of the matrix rate; a refresh takes {refresh[name] / t[name]:.2f} steps"

    report = compare("training step", runs, note)
    return {name: of | {"refresh": refresh[name]} for name, of in report.items()}


def first_steps(config):
    """Seconds of each"""
    with fresh_cache():
        step, *_ = stepper(config)
        return [seconds(step) for _ in range(3)]


def cold(settings, copy, matmul):
    report = {}
    print()
    for name, config in configs(settings).items():
        first, *later = apart(first_steps, config)
        report[name] = {"first": first, "later": min(later)}
        print(
            f"{name}, {config.n_layer} blocks: first step {first:.1f} s, a later one {min(later):.1f} s"
        )
    return report


def recipe(settings, copy, matmul):
    config = next(iter(configs(settings).values()))
    how = {
        "float32": dict(bfloat16=False, compile=False, fused=False),
        "bfloat16, fused": dict(bfloat16=True, compile=False),
        "and compiled": dict(bfloat16=True),
        "and the stream bfloat16": dict(bfloat16=True),
    }
    flops = batch_size * config.block_size * GPT(config).flops_per_token()
    steps = {
        name: stepper(replace(config, bf16_stream="stream" in name), **options)[0]
        for name, options in how.items()
    }
    return compare(
        "training step", steps, lambda name, t: f"{flops / t[name] / matmul:.0%} of the matrix rate"
    )


def saved(config, spend):
    """A training step, its model and optimizer, and the bytes that its forward keeps for the backward, weights in
    bfloat16 among them"""
    step, model, optimizer = stepper(config, compile=False, **spend)
    bytes_of, x = {}, tokens(config, batch_size)
    if model.recompute:  # what goes into each block, which no hook gets to see
        bytes_of["inputs"] = (
            config.n_layer * x.numel() * (config.n_embd * (2 if config.bf16_stream else 4) + 4)
        )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            bytes_of[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), autocast():
        model(x, x)
    return step, (model, optimizer), sum(bytes_of.values())


def needed(config, spend):
    """Bytes: kept by all blocks, by one more, and the peak of a second step"""
    deeper = saved(replace(config, n_layer=config.n_layer + 1), spend)[2]
    step, lasting, stays = saved(config, spend)
    step()  # the first fills the optimizer
    report = {"kept": stays, "kept a block": deeper - stays}
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        step()
        return report | {"peak": torch.cuda.max_memory_allocated()}
    tracker = MemTracker()  # of tensors that are alive; what the process holds is up to twice that
    tracker.track_external(*lasting)
    with tracker:
        step()
    return report | {"peak": tracker.get_tracker_snapshot("peak")[torch.device(device)]["Total"]}


def memory(settings, copy, matmul):
    """Eager, since a compiled block hides what it keeps"""
    options = {
        "": {},
        ", loss in 8 chunks": {"loss_chunk": batch_size * settings["block_size"] // 8},
    }
    options[", recompute"] = {"recompute": True}
    options[", both"] = options[", loss in 8 chunks"] | options[", recompute"]
    report = {}
    print(f"\n{'a training step':<28} {'kept':>10} {'a block':>10} {'peak':>10}")
    for name, config in configs(settings).items():
        for more, spend in options.items():
            report[name + more] = of = apart(needed, config, spend)  # MemTracker never lets go
            print(f"{name + more:<28} " + " ".join(f"{n / 2**20:>6.0f} MiB" for n in of.values()))
    return report


def generate(settings, copy, matmul):
    """Greedy, weights in dtype. Without a cache a token is a forward of all before it, here as many as on average."""
    report, news = {}, list(map(int, new_tokens.split(",")))
    longest = prompt_tokens + max(news)
    for rows in map(int, batches_of.split(",")):
        prompts, decoders, forwards, weights = (
            {},
            {new: {} for new in news},
            {new: {} for new in news},
            {},
        )
        for name, config in configs(settings).items():
            torch.manual_seed(0)
            model = (
                GPT(replace(config, block_size=longest)).to(device).to(getattr(torch, dtype)).eval()
            )
            weights[name] = sum(p.numel() * p.element_size() for p in model.parameters())
            if config.residual in FOLDS:
                FOLDS[config.residual](model)
            text = torch.randint(config.vocab_size, (rows, longest), device=device)
            step, cache = compiled_step(text.device), KVCache(model, rows, longest)

            @torch.no_grad()
            def read(model=model, prompt=text[:, :prompt_tokens], cache=cache):
                cache.at.zero_()
                return next_token(model, prompt, cache, 0, None, None, None)

            first = read()

            @torch.no_grad()
            def decode(new, model=model, token=first, cache=cache, step=step):
                cache.at.fill_(prompt_tokens)  # behind the prompt that was read
                for _ in range(new):
                    token = step(model, token, cache, 0, None, None, None).clone()

            @torch.no_grad()
            def again(new, model=model, text=text):
                return model(text[:, : prompt_tokens + new // 2], last=True)[0].argmax(-1)

            prompts[name] = read
            for new in news:
                decoders[new][name], forwards[new][name] = partial(decode, new), partial(again, new)

        buffer = torch.ones(next(iter(weights.values())) // 4, device=device)
        at_once = f"{rows} at once"
        report[f"prompt, {at_once}"] = compare(
            f"prompt, {at_once}",
            prompts,
            lambda name, t: f"{rows * prompt_tokens / t[name]:.0f} tokens/s",
        )
        for new in news:

            def bare(new=new):
                for _ in range(new):
                    buffer.sum()

            def note(name, t, new=new):
                if name == "the weights":
                    return f"{new * 4 * buffer.numel() / t[name] / 1e9:.1f} GB/s"
                floor = t["the weights"] * weights[name] / (4 * buffer.numel())
                return f"{new * rows / t[name]:.1f} tokens/s, {floor / t[name]:.0%} of reading the weights"

            key = f"{new} new, {at_once}"
            report[key] = compare(key, decoders[new] | {"the weights": bare}, note)
            key = f"a token, no cache, {new} new, {at_once}"
            report[key] = compare(
                key, forwards[new], lambda name, t: f"{rows / t[name]:.1f} tokens/s"
            )
    return report


def mod(settings, copy, matmul):
    """Training's rule, gathered, since that is what saves time when compiled; sublayers skip unequally, as they will"""
    config, report = next(iter(configs(settings).values())), {}
    forwards, steps, executed = {}, {}, {}
    for rate in map(float, rates.split(",")):
        on = dict(
            mod_on="both",
            mod_rate=rate,
            mod_router="nag" if config.residual == "nag" else "learned",
        )
        step, model, _ = stepper(replace(config, **on) if rate else config)
        found = routers(model)
        for router, more in zip(found, torch.linspace(-0.1, 0.1, len(found)).tolist()):
            router.share.fill_(1 - rate + more)
            router.settle()
        x = tokens(config, batch_size)

        @torch.no_grad()
        def run(model=model, x=x):
            with autocast():
                model(x)

        name = f"rate {rate:g}"
        forwards[name], steps[name], executed[name] = run, step, model.flops_per_token()
    share = lambda name, t: f"{executed[name] / executed[next(iter(executed))]:.3f} of the FLOPs"
    report |= {f"forward, {k}": v for k, v in compare("forward", forwards, share).items()}
    return report | {f"step, {k}": v for k, v in compare("training step", steps, share).items()}


def data(settings, copy, matmul):
    """Tokens a second of prepare_c4.py's processes together, against cores x one thread of the bare tokenizer"""
    files, cores = list_files("python")[0][: megabytes * 60], os.cpu_count()
    jobs = list(batches(files, lambda text: True, (0, 0)))
    texts = [text for job in jobs for _, _, text in job]
    encoding, report = get_tokenizer(tokenizer), {}
    with ProcessPoolExecutor(cores, get_context("spawn"), start_worker, (tokenizer,)) as pool:
        list(in_order(pool, jobs[: 2 * cores], 4 * cores))  # the processes are up
        for _ in range(rounds):
            began = time.perf_counter()
            count = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=1)))
            report.setdefault("bare", []).append(count / (time.perf_counter() - began))
            began = time.perf_counter()
            count = sum(
                len(ids) for results in in_order(pool, jobs, 4 * cores) for _, _, ids in results
            )
            report.setdefault("prepare", []).append(count / (time.perf_counter() - began))
    bare, ours = (statistics.median(report[k]) for k in ("bare", "prepare"))
    loader = Loader(Windows(data_dir, "train", settings["block_size"]), batch_size, 1, seed=1)
    report["loader_s"] = statistics.median(
        seconds(lambda: loader.fetch(step, 0)) for step in range(100)
    )
    print(f"a batch of {batch_size} x {settings['block_size']}: {report['loader_s'] * 1e3:.2f} ms")
    share = f"{ours / bare / cores:.0%} of {cores} x the bare rate"
    print(
        f"bare tokenizer, one thread: {bare / 1e6:.2f} M tokens/s; {cores} processes: {ours / 1e6:.2f}, {share}"
    )
    return report


PARTS = {
    part.__name__: part
    for part in (forward, residual, train, cold, recipe, memory, generate, mod, data)
}
QUICK = "--what=forward,residual,train,generate --modes=prenorm,nag --n_layer=2 --rounds=3 --batch_size=2"
QUICK += " --prompt_tokens=64 --new_tokens=32 --batches_of=1"


def main():
    given = sys.argv[1:]
    settings, _ = configure(globals(), GPTConfig, argv=given)
    if quick:
        settings, _ = configure(globals(), GPTConfig, argv=[*QUICK.split(), *given])
    adopt({"device": str(pick_device(device))})
    try:
        chosen = [pick(PARTS, part, "what") for part in what.split(",")]
        pick({"bfloat16": 0, "float32": 0}, dtype, "dtype")
        for config in configs(settings).values():
            GPT(replace(config, n_layer=1))
    except ValueError as error:  # of a name or a shape
        raise SystemExit(f"bench.py: {error}")
    torch._dynamo.config.recompile_limit = (
        256  # many modes are timed in one process, and each must be compiled
    )
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    name = device_name(torch.device(device))
    copy, matmul = floors()
    report = {
        "settings": settings, "git": commit(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "device": name, "copy_bytes_s": copy, "matmul_flops_s": matmul,
    }  # fmt: skip
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}")
    shape = "n_layer n_head n_embd block_size vocab_size".split()
    print(", ".join(f"{key} {settings[key]}" for key in shape) + f", {batch_size} sequences")
    print(f"copy {copy / 1e9:.1f} GB/s, matrix product {matmul / 1e12:.2f} TFLOP/s")
    for part in chosen:
        report[part.__name__] = part(settings, copy, matmul)
        write_json(out, report)


if __name__ == "__main__":
    main()
