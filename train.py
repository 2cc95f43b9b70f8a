"""
Train a language model: read this file from top to bottom, it is the whole story.

    python train.py                                                          the default: minutes on any machine
    python train.py config/byte_6x384.py --learning_rate=3e-3                settings from a file, then from here
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py    one process a GPU
"""

import json
import math
import os
import pickle
import platform
import re
import resource
import shutil
import signal
import sys
import time
from dataclasses import asdict, fields
from itertools import repeat

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import lora
import mod
import moe
from configurator import commit, configure, cpu_name, echo
from depth import gate_health
from eval import can_compile, computes_bfloat16, count_windows, eval_batches, evaluate, ready
from model import GPT, GPTConfig
from nag import NAG
from norms import gathered
from prepare_c4 import Loader, Windows, atomic, meta_tokenizer

# where things are
data_dir = "data/python"  # shards that prepare_c4.py made
out_dir = "out"  # checkpoints and log.jsonl
init_from = "scratch"  # scratch; resume from out_dir; auto: resume if there is something to; or a checkpoint's path
# how long, and on how much
max_iters = 700  # optimizer steps
flops_budget: float | None = None  # training FLOPs, in place of max_iters: the first step that reaches them is the last
batch_size = 8  # sequences a micro-step on each rank
gradient_accumulation_steps = 1  # micro-steps that make a step, over all ranks together
total_batch_tokens: int | None = None  # tokens a step; derives gradient_accumulation_steps where given
seed = 1337  # of initialisation, data order and dropout
# optimizer
optimizer = "adamw"  # adamw, or muon for the matrices and adamw for the rest
learning_rate = 4e-3  # at its highest
gate_lr: float | None = None  # of the residual's scalars and gates; None: learning_rate
alpha_warmup_iters = 0  # nag: steps over which its rotations grow from none to full
bhyt_interval = 100  # bhyt, prenorm_approx: steps between refreshes of the c that predicts a variance
weight_decay = 0.1  # of matrices and embeddings; nothing else decays
beta1 = 0.9  # adamw
beta2 = 0.95  # adamw
grad_clip = 1.0  # largest norm of the whole gradient; 0: any
schedule = "cosine"  # how the learning rate falls: cosine, or wsd: constant, then linear over the last wsd_share
wsd_share = 0.2  # wsd: share of the steps that decay
warmup_iters: int | float = 50  # steps of linear warm-up; a float is a share of all steps
lr_decay_iters: int | None = None  # step at which the learning rate reaches min_lr; None: the last
min_lr: float | None = None  # where the learning rate ends; None: a tenth of learning_rate
max_bad_steps = 5  # give up after so many steps in a row with a loss or gradient that is not finite
# fine-tuning
sft_data: str | None = None  # conversations to train on, a .jsonl in LIMA's format or a name on the hub; None: data_dir
lora_rank = 0  # of adapters that are trained in place of the weights; 0: none
lora_alpha = 16.0  # lora: what an adapter adds counts lora_alpha / lora_rank
lora_dropout = 0.0  # lora: on what the adapters read
lora_targets = "wq,wk,wv,wo"  # lora: linears that get one; also up, gate, down
# what is seen and kept
eval_interval = 100  # steps between evaluations; 0: never
eval_tokens = 65536  # validation tokens, the same ones every time
log_interval = 1  # steps between lines
log_grad_norms = False  # also the gradient norm of every parameter, before clipping
save_interval = 100  # steps between writes of ckpt.pt; the last step is always written; 0: only that
keep_interval = 0  # steps between checkpoints that stay, ckpt_000250.pt and so on; 0: none
wandb_log = False  # send the records to wandb as well
wandb_project = "residual"  # project there
# machine
device = "auto"  # cpu, cuda, cuda:1, ...; auto: cuda where there is one
dtype = "auto"  # float32 or bfloat16 autocast; auto: bfloat16 where the hardware computes in it
compile: bool | None = None  # torch.compile each block; None: on CUDA, and on Linux CPUs that have g++
loss_chunk: int | None = None  # tokens whose logits are in memory at a time; None: all
recompute = False  # keep what goes into each block and make the rest again in the backward: a third more time
shard = "none"  # none: every rank holds all (DDP); fsdp: every rank holds a share of each block (FSDP2)

settings = configure(globals(), GPTConfig, argv=sys.argv[1:])


def fail(message):
    """Bad input ends in one line, before anything is written."""
    raise SystemExit(f"train.py: {message}")


# ---------------------------------------------------------------------------------------------------------------------
# Who and where: one process, or one of many that torchrun started

rules = (
    ("optimizer", lambda v: v in ("adamw", "muon"), "adamw or muon"),
    ("schedule", lambda v: v in ("cosine", "wsd"), "cosine or wsd"),
    ("shard", lambda v: v in ("none", "fsdp"), "none or fsdp"),
    ("dtype", lambda v: v in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"),
    ("device", lambda v: re.fullmatch(r"auto|cpu|cuda(:\d+)?", v), "auto, cpu, cuda or cuda:N"),
    ("device", lambda v: v in ("auto", "cpu") or torch.cuda.is_available(), "auto or cpu: torch sees no CUDA device"),
    ("max_iters batch_size gradient_accumulation_steps", lambda v: v > 0, "above 0"),
    ("log_interval max_bad_steps bhyt_interval loss_chunk", lambda v: v > 0, "above 0"),
    ("learning_rate eval_tokens flops_budget total_batch_tokens lr_decay_iters wsd_share", lambda v: v > 0, "above 0"),
    ("seed weight_decay grad_clip beta1 beta2 gate_lr warmup_iters alpha_warmup_iters", lambda v: v >= 0, "at least 0"),
    ("eval_interval save_interval keep_interval lora_rank", lambda v: v >= 0, "at least 0"),
    ("lora_dropout", lambda v: 0 <= v < 1, "a share, below 1"),
    ("beta1 beta2 wsd_share", lambda v: v <= 1, "at most 1"),
    ("warmup_iters", lambda v: isinstance(v, int) or v <= 1, "a number of steps, or a share of at most 1"),
    ("min_lr", lambda v: 0 <= v <= learning_rate, f"from 0 to learning_rate={learning_rate}"),
)
for keys, holds, what in rules:
    for key in keys.split():
        if settings[key] is not None and not holds(settings[key]):
            fail(f"{key}={settings[key]!r}: must be {what}")

rank, local_rank, world = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
main = rank == 0
if device == "auto":
    device = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(f"cuda:{local_rank}" if device == "cuda" else device)
ready(device)
if dtype == "auto":
    dtype = "bfloat16" if computes_bfloat16(device.type) else "float32"
if alpha_warmup_iters and settings["residual"] != "nag":
    fail(f"alpha_warmup_iters={alpha_warmup_iters} needs residual='nag', the only mode that has it")
if bhyt_interval != 100 and settings["residual"] not in ("bhyt", "prenorm_approx"):
    fail(f"bhyt_interval={bhyt_interval} needs residual='bhyt' or 'prenorm_approx', the modes that predict a variance")
if sft_data is not None and settings["bhyt_causal"]:
    fail("bhyt_causal counts tokens from the start of a row, where sft_data packs several conversations: leave it out")
if settings["bf16_stream"] and dtype == "float32":
    fail("bf16_stream=True needs dtype='bfloat16'")
if shard == "fsdp" and world == 1:
    fail("shard='fsdp' needs several processes: start it with torchrun")
if compile is None:
    compile = can_compile(device.type)
if compile and device.type == "cpu" and shutil.which("g++") is None:
    fail("compile=True needs a C++ compiler on a CPU: install g++, or --compile=False")
autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")

# ---------------------------------------------------------------------------------------------------------------------
# Data and model

try:
    config = GPTConfig(**{field.name: settings[field.name] for field in fields(GPTConfig)})
    torch.manual_seed(seed)
    model = GPT(config)
    model.loss_chunk, model.recompute = loss_chunk, recompute
except ValueError as error:
    fail(error)

micro_tokens = batch_size * config.block_size
if total_batch_tokens is not None:
    gradient_accumulation_steps = total_batch_tokens // micro_tokens
tokens_per_step = total_batch_tokens or gradient_accumulation_steps * micro_tokens
if tokens_per_step % (micro_tokens * world):
    shape = f"{world} ranks x {batch_size} sequences x {config.block_size} tokens"
    fail(f"{tokens_per_step} tokens a step do not divide over {shape}: change batch_size or the accumulation")
micro_steps = tokens_per_step // (micro_tokens * world)  # of each rank

train_windows, val_windows = (Windows(data_dir, split, config.block_size) for split in ("train", "val"))
meta = train_windows.meta
if meta["vocab_size"] > config.vocab_size:
    fail(f"{data_dir} has token ids up to {meta['vocab_size'] - 1}: set --vocab_size={meta['vocab_size']} or more")
if sft_data is not None:
    pretraining, encoding = val_windows, meta_tokenizer(data_dir, meta)
    train_windows, val_windows = (
        lora.Conversations(sft_data, split, encoding, config.block_size) for split in ("train", "val")
    )
loader = Loader(train_windows, batch_size, micro_steps, seed, rank, world, device)

flops_per_step = expected_flops = tokens_per_step * model.flops_per_token()
ckpt_path, log_path = os.path.join(out_dir, "ckpt.pt"), os.path.join(out_dir, "log.jsonl")
if init_from == "auto":
    init_from = "resume" if os.path.exists(ckpt_path) else "scratch"
step, flops, bad_steps, best_val_loss, saved, adapters = 0, 0.0, 0, math.inf, None, None
if not lora_rank and (lora_alpha, lora_dropout, lora_targets) != (16.0, 0.0, "wq,wk,wv,wo"):
    fail("lora_alpha, lora_dropout and lora_targets need lora_rank above 0")
if lora_rank and (shard == "fsdp" or init_from == "scratch"):
    fail(f"lora_rank={lora_rank} adapts a model that is there: give init_from a checkpoint, and shard='none'")
if init_from != "resume" and (os.path.exists(ckpt_path) or os.path.exists(log_path)):
    fail(f"{out_dir} already holds a run: --init_from=resume goes on with it, --out_dir=... starts another")
if init_from != "scratch":
    path = ckpt_path if init_from == "resume" else init_from
    if not os.path.exists(path):
        fail(f"{path}: no such checkpoint; init_from is scratch, resume, auto or a checkpoint's path")
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        fail(f"{path} is no checkpoint of train.py: {str(error).splitlines()[0]}")
    free = {"dropout", "init", "init_scale", "init_out"} | (set() if init_from == "resume" else {"block_size"})
    now, then = asdict(config), asdict(GPTConfig()) | saved["config"]  # as old a checkpoint as it may be
    if init_from == "resume":  # what decides which data comes next, and what the optimizer remembers, has to stay
        now |= {"seed": seed, "optimizer": optimizer, "tokens_per_step": tokens_per_step, "sft_data": sft_data}
        then = {**then, "sft_data": None, **saved["settings"], "tokens_per_step": saved["tokens_per_step"]}
    differs = [f"{k}={then[k]!r}, not {v!r}" for k, v in now.items() if v != then[k] and k not in free]
    if differs:
        fail(f"{path} was trained with {'; '.join(differs)}")
    if saved["meta"]["tokenizer_sha256"] != meta["tokenizer_sha256"]:
        fail(f"{path} was trained on another tokenizer than that of {data_dir}")
    how = {"rank": lora_rank, "alpha": lora_alpha, "dropout": lora_dropout, "targets": lora_targets}
    try:
        adapters = lora.begin(model, saved, path, init_from == "resume", how)
    except ValueError as error:
        fail(error)
    flops_per_step = tokens_per_step * model.flops_per_token()
    if init_from == "resume":
        step, bad_steps, best_val_loss = saved["step"], saved["bad_steps"], saved["best_val_loss"]
        flops, expected_flops = saved["flops"], saved.get("expected_flops", expected_flops)
    elif lora_rank:
        expected_flops = flops_per_step
if flops_budget is not None:
    max_iters = math.ceil(flops_budget / expected_flops)

# ---------------------------------------------------------------------------------------------------------------------
# Over the ranks, and compiled

if world > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
if compile:
    model.compile_blocks()
net = model  # what is called in training
if shard == "fsdp":  # float32 shards are gathered, so that the numbers are those of DDP
    mesh = dist.init_device_mesh(device.type, (world,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
else:
    model.to(device)
    if world > 1:
        net = DDP(model, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False)


def sync_gradients(on):
    """Set before the forward: average over ranks only behind the last micro-step."""
    if shard == "fsdp":
        model.set_requires_gradient_sync(on)
    elif world > 1:
        net.require_backward_grad_sync = on


def finished():
    return step >= max_iters if flops_budget is None else flops >= flops_budget


def learning_rate_factor(step):
    """Share of the peak learning rate at a step: warm-up, then cosine or a linear end, down to min_lr"""
    if flops_budget is not None:  # in steps as dear as was expected at the start
        step = flops / expected_flops
    last, floor = lr_decay_iters or max_iters, 0.1 if min_lr is None else min_lr / learning_rate
    warm = warmup_iters if isinstance(warmup_iters, int) else round(warmup_iters * last)
    if step < warm:
        return (step + 1) / (warm + 1)
    if schedule == "wsd":
        return 1 - (1 - floor) * min(1, max(0, 1 - (last - step) / (wsd_share * last)))
    done = min(1, (step - warm) / max(1, last - warm))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def whole(x):
    """A state dict as the main process writes it: tensors whole and on the CPU. Under FSDP every rank must call it."""
    if isinstance(x, dict):
        return {k: whole(v) for k, v in x.items()}
    if not isinstance(x, torch.Tensor):
        return x
    x = gathered(x)
    return x.detach().cpu() if main else None


def laid_out(x, p):
    """What the optimizer keeps for parameter p, sharded as p is"""
    alike = isinstance(p, DTensor) and isinstance(x, torch.Tensor) and x.shape == p.shape
    return distribute_tensor(x.to(device), p.device_mesh, p.placements) if alike else x


def ramp_alpha(step):
    """Let NAG's rotations have their share of full size."""
    for module in model.modules():
        if isinstance(module, NAG):
            module.ramp.fill_(min(1.0, (step + 1) / max(1, alpha_warmup_iters)))


ramp_alpha(step)
routers, experts = mod.routers(model), moe.layers(model)
if not main:  # what was saved is what all ranks had scored
    for router in routers:
        router.fresh.zero_()
optimizers = model.optimizers(optimizer, learning_rate, gate_lr, weight_decay, (beta1, beta2))
if init_from == "resume":
    for opt, state in zip(optimizers, saved["optimizers"], strict=True):
        params = [p for group in opt.param_groups for p in group["params"]]
        state = {i: {k: laid_out(v, params[i]) for k, v in entry.items()} for i, entry in state.items()}
        opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})
del saved

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints and the log


def save(name):
    state = {
        "model": whole(lora.trained(model)), "optimizers": [whole(opt.state_dict()["state"]) for opt in optimizers],
        "config": asdict(config), "settings": settings, "meta": meta,
        "step": step, "tokens_per_step": tokens_per_step, "bad_steps": bad_steps, "best_val_loss": best_val_loss,
        "flops": flops, "expected_flops": expected_flops, "lora": adapters,
    }  # fmt: skip
    state["model"] |= mod.scores_of_all_ranks(model, world)
    if main:
        try:
            with atomic(os.path.join(out_dir, name)) as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:
            fail(f"step {step} could not be saved as {name}, the checkpoints before it are intact: {error}")
    if world > 1:
        dist.barrier()


def run_header():
    """What ran, so that a result can be had again from its log alone"""
    groups = {key: sum(model.get_parameter(n).numel() for n in names) for key, names in model.param_groups().items()}
    groups = {"active": model.num_params(active=True), **groups} if moe.layers(model) else groups
    groups |= {"trained": sum(p.numel() for p in model.parameters() if p.requires_grad)} if lora_rank else {}
    return {
        "settings": settings, "from_step": step, "git": commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__}, "device": device_name,
        "threads": torch.get_num_threads(), "world": world, "dtype": dtype, "compile": compile,
        "params": {"all": model.num_params(), **groups},
        "tokens_per_step": tokens_per_step, "flops_per_step": flops_per_step, "max_iters": max_iters,
    }  # fmt: skip


def log(record):
    if main:
        with open(log_path, "a") as file:
            file.write(json.dumps(record) + "\n")
        if wandb_log and "step" in record:
            wandb.log(record, step=record["step"])


PEAKS = {  # dense bf16 FLOP/s from the data sheets; a device that is not here has no MFU
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A40": 150e12,
    "A10G": 70e12, "L4": 121e12, "RTX 6000 Ada": 364e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip
device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
peak = next((flops for name, flops in PEAKS.items() if re.search(rf"\b{name}\b", device_name)), None)


def peak_memory_gb():
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "linux" else 1e9)


header = run_header()
if main:
    os.makedirs(out_dir, exist_ok=True)
    if os.path.exists(log_path):  # what was logged behind the checkpoint, or torn by a kill, is about to be done again
        lines = [line for line in open(log_path) if line.endswith("\n")]
        with atomic(log_path) as file:
            file.write("".join(line for line in lines if json.loads(line).get("step", -1) <= (step or -1)).encode())
    echo(settings)
    print("parameters: " + ", ".join(f"{count:,} {group}" for group, count in header["params"].items()))
    for split, rows in (("train", train_windows), ("val", val_windows)) if sft_data is not None else ():
        print(
            f"{split}: {rows.kept} conversations in {len(rows)} rows, {rows.cut} of them cut; {rows.dropped} too long"
        )
    print(f"{device_name}, {dtype}, compile={compile}; {max_iters} steps of {flops_per_step:.3g} FLOPs and")
    print(f"{tokens_per_step} tokens = {world} ranks x {micro_steps} micro-steps x {batch_size} x {config.block_size}")
    if wandb_log:
        import wandb

        wandb.init(project=wandb_project, name=out_dir, config=settings)
if init_from != "resume":
    save("ckpt.pt")  # so that there is something to resume from the first moment on
log({"run": header})

# ---------------------------------------------------------------------------------------------------------------------
# The loop

stopping = False  # a signal says so at any time, the end of a step looks


def on_signal(number, frame):
    global stopping
    stopping = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C means now; launchers may repeat a SIGTERM


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, on_signal)


def validate():
    """What goes into the record: the validation loss and, for NAG, what its gates do on the first validation batch"""
    with autocast:
        seen = {"val_loss": evaluate(model, val_windows, eval_tokens, batch_size, device, rank, world)}
        if sft_data is not None:  # val_loss is that of answers; this is what fine-tuning forgets
            seen["pretraining_loss"] = evaluate(model, pretraining, eval_tokens, batch_size, device, rank, world)
        if config.residual == "nag":
            windows = val_windows if sft_data is None else pretraining
            x, _ = next(eval_batches(windows, count_windows(windows, eval_tokens), batch_size, device))
            seen["gates"] = gate_health(model, x)
            if main and step >= alpha_warmup_iters and seen["gates"]["dead"] > 0.1 * 2 * config.n_layer:
                print(f"warning: {seen['gates']['dead']} of {2 * config.n_layer} sublayers turn next to nothing")
    return seen


def due(interval):
    return interval > 0 and step % interval == 0


def show(record, eta):
    if main:
        val = "" if record["val_loss"] is None else f" | val {record['val_loss']:.4f}"
        val += f" | of the pretraining data {record['pretraining_loss']:.4f}" if "pretraining_loss" in record else ""
        mfu = "" if record["mfu"] is None else f" | mfu {record['mfu']:.1%}"
        bad = f" | not finite, skipped: {bad_steps} in a row" if bad_steps else ""
        minutes, seconds = divmod(round(eta), 60)
        loss, norm = record["loss"] or math.nan, record["grad_norm"] or math.nan
        print(
            f"step {step}/{max_iters} | loss {loss:.4f}{val} | lr {record['lr']:.2e} | norm {norm:.2f}{bad} | "
            f"{record['tok_s']:,.0f} tok/s{mfu} | {record['mem_gb']:.1f} GB | ETA {minutes}:{seconds:02d}",
            flush=True,
        )


if step == 0 and eval_interval:
    seen = validate()
    log({"step": 0, "tokens": 0, "flops": 0} | seen)
    if main:
        print(f"step 0 | val {seen['val_loss']:.4f}")

stopped, busy, since = False, 0.0, step
while not finished() and not stopped:
    began = time.perf_counter()
    factor = learning_rate_factor(step)
    for group in (group for opt in optimizers for group in opt.param_groups):
        group["lr"] = group["peak"] * factor
    if step < alpha_warmup_iters:
        ramp_alpha(step)
    if step % bhyt_interval == 0:
        with lora.merged(model):
            model.refresh()
    torch.manual_seed(hash((seed, step, rank)))  # dropout too is a function of the step: no state to save
    status = torch.zeros(2, device=device)  # the loss, and whether this rank was told to stop
    batches, shares = (loader.batch(step, micro) for micro in range(micro_steps)), repeat(1 / micro_steps)
    if sft_data is not None:  # a micro-step counts by its answers
        batches = [*batches]
        shares = lora.shares_of(batches, world)
    for micro, (batch, share) in enumerate(zip(batches, shares)):
        sync_gradients(micro == micro_steps - 1)
        with autocast:
            loss = net(*batch)[1] * share
        loss.backward()
        status[0] += loss.detach()
    status[1] = stopping
    if world > 1:
        dist.all_reduce(status)
    named = [(n, p) for n, p in model.named_parameters() if log_grad_norms and p.requires_grad]
    norms = {n: gathered(p.grad.norm()) for n, p in named}
    norm = gathered(torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf))
    loss, stopped, norm = torch.cat((status / world, norm.view(1))).tolist()  # a step's one wait for the device
    good = math.isfinite(loss) and math.isfinite(norm)
    if good:
        for opt in optimizers:
            opt.step()
        bad_steps = 0
    else:  # an update cannot be taken back, so it waits until its gradient is known to be good
        bad_steps += 1
    step, flops = step + 1, flops + flops_per_step
    load = moe.balance(experts, world) if experts else None
    if routers and (step == 1 or step % mod.BALANCE == 0):
        mod.balance(routers, config.mod_budget == "global", config.mod_rate, world)
        flops_per_step = tokens_per_step * model.flops_per_token()
    record = {
        "step": step, "tokens": step * tokens_per_step, "flops": flops,
        "loss": loss if good else None, "val_loss": None, "grad_norm": norm if good else None, "bad_steps": bad_steps,
        "lr": learning_rate * factor, "tok_s": None, "mfu": None, "mem_gb": peak_memory_gb(),
    }  # fmt: skip
    for opt in optimizers:
        opt.zero_grad(set_to_none=True)
    busy += time.perf_counter() - began
    last = bool(stopped) or finished()
    if due(eval_interval) or (eval_interval and finished()):
        record |= validate()
        record |= {"load": load.tolist()} if experts else {}  # share of the tokens that each expert had in this step
        record |= {"ran": [router.k / router.T for router in routers]} if routers else {}  # share that each let run
    if last or bad_steps or record["val_loss"] is not None or due(log_interval):
        record["tok_s"] = (step - since) * tokens_per_step / busy
        record["mfu"] = record["tok_s"] / tokens_per_step * flops_per_step / (peak * world) if peak else None
        if norms:
            record["grad_norms"] = {n: float(norm) for n, norm in norms.items()}
        show(record, eta=busy / (step - since) * (max_iters - step))
        log(record)
        since, busy = step, 0.0
    if bad_steps >= max_bad_steps:
        what = f"{bad_steps} steps in a row, up to step {step}, had a loss or gradient that is not finite"
        fail(f"{what}; the last good checkpoint is untouched: resume it with a lower learning_rate")
    if (record["val_loss"] or math.inf) < best_val_loss:
        best_val_loss = record["val_loss"]
        save("ckpt_best.pt")
    if due(keep_interval) and not bad_steps:
        save(f"ckpt_{step:06d}.pt")
    if (due(save_interval) or last) and not bad_steps:  # in a bad streak the last good one stays
        save("ckpt.pt")

if main and stopped:
    state = "not saved in a bad streak" if bad_steps else "saved"
    print(f"stopped by a signal at step {step}, {state}: --init_from=resume goes on")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
