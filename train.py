"""
Train a language model. Read this file from top to bottom.

    python prepare_c4.py && python train.py                    the default: 3 minutes on 2 cores
    python train.py config/byte_6x384.py --learning_rate=3e-3  settings: a file, then overrides
    torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py    one process per GPU
"""

import json
import math
import os
import platform
import shlex
import signal
import statistics
import sys
import time
import uuid
from dataclasses import asdict
from datetime import timedelta
from itertools import repeat
from threading import Event, Thread

import torch
import torch.distributed as dist

import bhyt
import checkpoint
import data
import lora
import machine
import mod
import moe
import muon
import streams
from configurator import check, configure, echo
from depth import gate_health
from model import GPT, MODEL_SETTINGS, RESIDUALS, GPTConfig, evaluate, init_out

# where things are
data_dir = "data/python"  # shards that prepare_c4.py made
out_dir = "out"  # checkpoints and log.jsonl
init_from = "scratch"  # scratch, resume (in out_dir), auto (either) or a checkpoint to fine-tune
branch_from: str | None = None  # a checkpoint to continue in a new out_dir, optimizer included
# length and batch
max_iters = 1500  # optimizer steps
flops_budget: float | None = None  # training FLOPs, in place of max_iters
batch_size = 4  # the most sequences per rank in a micro-step
total_batch_tokens: int | None = None  # tokens per step; None: batch_size sequences
seed = 1337  # seed of initialisation, data order and dropout
# optimizer
optimizer = "muon"  # muon for the matrices and adamw for the rest, or adamw for all
learning_rate = 8e-3  # peak learning rate
gate_lr: float | None = None  # peak for scalars, gates, routers of mod.py; None: learning_rate
embed_lr: float | None = 0.1  # peak for the embeddings; None: learning_rate
head_lr: float | None = 0.02  # peak for a head that is not tied; None: learning_rate
alpha_warmup_iters = 0  # nag: steps over which its rotations grow from zero to full
weight_decay: float | None = None  # of all but gains, biases, scalars and gates; None: 0
grad_clip = 1.0  # largest norm of the whole gradient; 0: no clipping
schedule = "wsd"  # decay of the learning rate: cosine, or wsd: constant, then linear decay
wsd_share = 0.65  # wsd: share of the steps that decay
warmup_iters: float | None = None  # linear warm-up: steps, or below 1 a share; None: the mode's
min_lr: float | None = None  # final learning rate; None: a tenth of learning_rate
# fine-tuning
sft_data: str | None = None  # conversations: a .jsonl in LIMA's format, here or hf://, or a name
lora_rank = 0  # rank of adapters that train in place of the weights; 0: none
# evaluation, logging and saving
eval_interval = 300  # steps between evaluations; 0: never
eval_tokens: int | None = 98304  # validation tokens, spread over the split; None: all of it
val_part = "all"  # of the validation split: all, or one half of its windows: tune or report
log_interval = 1  # steps between log lines
save_interval: int | None = None  # steps between saves; 0: start and end; None: each 30 s or so
keep_interval = 0  # steps between checkpoints that are kept, from step 0 on; 0: none
save_best = False  # also keep the checkpoint with the lowest validation loss
wandb_log = False  # send the records to wandb as well
# machine
device = "auto"  # cpu, mps, cuda, cuda:1, ...; auto: CUDA if there is any, then mps, then cpu
dtype = "auto"  # float32 or bfloat16 autocast; auto: bfloat16 if the hardware supports it
compile: bool | None = None  # torch.compile blocks and readout; None: on CUDA, Linux with g++
loss_chunk: int | None = None  # tokens whose logits are in memory at a time; None: all
recompute = False  # keep only the input of each block and recompute the rest
shard = "none"  # none: every rank holds the model (DDP); fsdp: a share of each block (FSDP2)

settings, given = configure(globals(), GPTConfig, argv=sys.argv[1:])


def fail(message):
    """End the run with a one-line message."""
    raise SystemExit(f"train.py: {message}")


# ------------------------------------------------------------------------------------------------
# Settings: the checkpoint's, if the run starts from one. Settings given now override them.

MAX_BAD_STEPS = 5  # stop after so many steps in a row with a non-finite loss or gradient
ABOVE_0 = "max_iters batch_size log_interval loss_chunk learning_rate eval_tokens flops_budget"
ABOVE_0 += " total_batch_tokens wsd_share block_size"
AT_LEAST_0 = "seed weight_decay grad_clip gate_lr embed_lr head_lr warmup_iters alpha_warmup_iters"
AT_LEAST_0 += " eval_interval save_interval keep_interval lora_rank"
RULES = (
    ("optimizer", lambda v: v in ("adamw", "muon"), "adamw or muon"),
    ("schedule", lambda v: v in ("cosine", "wsd"), "cosine or wsd"),
    ("shard", lambda v: v in ("none", "fsdp"), "none or fsdp"),
    ("val_part", lambda v: v in ("all", "tune", "report"), "all, tune or report"),
    (ABOVE_0, lambda v: 0 < v < math.inf, "above 0, and finite"),
    (AT_LEAST_0, lambda v: 0 <= v < math.inf, "at least 0, and finite"),
    ("wsd_share", lambda v: v <= 1, "at most 1"),
    ("seed", lambda v: v < 2**63, "below 2**63"),
    ("warmup_iters", lambda v: v < 1 or v == round(v), "whole steps, or a share of all below 1"),
    ("min_lr", lambda v: 0 <= v <= learning_rate, "from 0 to learning_rate"),
)


def check_settings():
    """Fail if a setting has no valid value, or needs another one."""
    check(settings, RULES)
    turns = config.residual in RESIDUALS and RESIDUALS[config.residual].rotates
    penalised = compile and config.moe_experts > 0 and config.moe_balance == "loss"
    budget_decides = flops_budget is not None and "flops_budget" not in given  # a checkpoint's
    needs = (  # (what is asked for, whether it is possible, what it needs)
        (f"{alpha_warmup_iters=}", turns or not alpha_warmup_iters, "residual='nag'"),
        ("bf16_stream=True", dtype == "bfloat16" or not config.bf16_stream, "dtype='bfloat16'"),
        (f"{max_iters=}", not budget_decides or "max_iters" not in given, "flops_budget=None"),
        (f"{wsd_share=}", schedule == "wsd" or "wsd_share" not in given, "schedule='wsd'"),
        ("save_best=True", eval_interval > 0 or not save_best, "eval_interval above 0"),
        (f"{head_lr=}", not config.tied or given.get("head_lr") is None, "tied=False"),
        ("shard='fsdp'", world > 1 or shard != "fsdp", "several processes: use torchrun"),
        ("recompute=True", not (recompute and penalised), "compile=False or moe_balance='bias'"),
        (f"{embed_lr=}", not lora_rank or given.get("embed_lr") is None, "lora_rank=0"),
        (f"{head_lr=}", not lora_rank or given.get("head_lr") is None, "lora_rank=0"),
        (f"{gate_lr=}", not lora_rank or given.get("gate_lr") is None, "lora_rank=0"),
        (f"{lora_rank=}", shard == "none" or not lora_rank, "shard='none'"),
        (f"{lora_rank=}", saved is not None or not lora_rank, "a trained model: give init_from"),
    )
    for asked, possible, needed in needs:
        if not possible:
            fail(f"{asked} needs {needed}")
    if compile and device.type == "cpu" and not machine.has_compiler():
        fail("compile=True needs a C++ compiler on a CPU: install g++, or --compile=False")
    counts = flops_budget is None and "max_iters" in given
    if going_on and counts and max_iters < saved["step"]:
        fail(f"{max_iters=}: {saved['path']} is at step {saved['step']} already")
    if not out_dir:
        fail("out_dir is empty: give a folder")
    if not resuming and (checkpoint.newest(out_dir) or os.path.exists(log_path)):
        fail(f"{out_dir} already holds a run: continue with --init_from=resume or change --out_dir")


rank = int(os.environ.get("RANK", 0))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
is_main = rank == 0
log_path = os.path.join(out_dir, "log.jsonl")
saved, resuming = checkpoint.find_start(out_dir, init_from, branch_from)
going_on = resuming or branch_from is not None  # from the checkpoint's step and optimizer state
if saved is not None:
    settings = checkpoint.inherit(saved, settings, given, going_on)
    globals().update({key: settings[key] for key in settings.keys() - MODEL_SETTINGS})
device = machine.pick_device(device, local_rank)
dtype = machine.pick_dtype(dtype, device.type)
compile = machine.can_compile(device.type) if compile is None else compile
config = GPTConfig(**{name: settings[name] for name in MODEL_SETTINGS})
check_settings()

# ------------------------------------------------------------------------------------------------
# Data and model


def divide_batch():
    """(tokens per step, sequences per micro-step and rank, micro-steps per rank)"""
    T = config.block_size
    tokens = total_batch_tokens or batch_size * T
    if going_on:
        before = saved["tokens_per_step"]
        if "total_batch_tokens" in given and tokens != before:
            fail(f"{saved['path']} was trained with tokens_per_step={before}, not {tokens}")
        tokens = before
    share = tokens // (T * world)  # sequences of each rank
    if share * T * world != tokens or not share:
        fail(f"{tokens} tokens a step do not divide over {world} ranks in sequences of {T} tokens")
    return tokens, *data.micro_batches(share, batch_size)


def open_data():
    """(training data, validation data, validation split of the pretraining data, meta.json)

    The third is for fine-tuning. It is None for an imported model without shards.
    """
    meta, T, val = None if saved is None else saved["meta"], config.block_size, None
    if data_dir is not None:
        train, val = (data.Windows(data_dir, split, T) for split in ("train", "val"))
        meta = train.meta if meta is None else meta
        train.refuse_other_tokenizer(meta, config.vocab_size)
        meta = meta if data.is_imported(meta) else train.meta
    elif sft_data is None:
        fail(f"{saved['path']} was imported without shards: give --sft_data or --data_dir")
    if sft_data is None:
        return train, val, None, meta
    if not meta["tokenizer"]:
        fail(f"this model was imported without tokenizer.json: cannot read {sft_data}")
    folder = os.path.dirname(saved["path"]) if data.is_imported(meta) else data_dir
    encoding = data.meta_tokenizer(folder, meta)
    splits = [lora.Conversations(sft_data, split, encoding, T) for split in ("train", "val")]
    return *splits, val, meta


tokens_per_step, sequences, micro_steps = divide_batch()
train_windows, val_windows, pretraining, meta = open_data()
data_sha256 = {"train": train_windows.sha256, "val": val_windows.sha256}
if going_on and saved["data"] != data_sha256:
    splits = " and ".join(k for k, v in data_sha256.items() if saved["data"].get(k) != v)
    fail(f"{saved['path']} was trained on other data: the shards of {splits} differ")

torch.manual_seed(seed)
adapters = None if saved is None else saved.get("lora")
try:
    builds = is_main or shard == "none"  # under FSDP the other ranks get their shares from rank 0
    with torch.device("cpu" if builds else "meta"):
        model = GPT(config)
    if going_on and builds:
        lora.load_state(model, saved)
    elif saved is not None and builds:
        adapters = lora.begin(model, saved, lora_rank)
except ValueError as error:
    fail(error)
if gate_lr is not None and not model.param_groups()["gates"]:
    fail(f"{gate_lr=}: a model with residual={config.residual!r} has no gates")
model.loss_chunk, model.recompute = loss_chunk, recompute
config.hc_streams = streams.count(config)  # the checkpoint has the number, not a default

weight_decay = weight_decay or 0.0
warmup_iters = RESIDUALS[config.residual].warmup_iters if warmup_iters is None else warmup_iters
if local_rank == 0 and sft_data is None:
    train_windows.verify()  # in the background: a shard that has changed ends the run
loader = data.Loader(train_windows, sequences, micro_steps, seed, rank, world, device)
val_indices = data.spread(val_windows, eval_tokens, val_part)

# ------------------------------------------------------------------------------------------------
# Distribution over ranks, compilation, optimizers

machine.prepare_process(device)
if world > 1:
    # while rank 0 writes a checkpoint the others wait: NCCL's 10 minutes are too few for 40 GB
    gpu, library = (device, "nccl") if device.type == "cuda" else (None, "gloo")
    dist.init_process_group(library, timeout=timedelta(hours=2), device_id=gpu)
net = machine.over_ranks(model, device, world, shard)  # what the training step calls
if compile:
    model.compile_blocks()  # with options for the device that the model is on now

routers, experts = mod.routers(model), moe.layers(model)
if not is_main:  # a checkpoint has the sum of all ranks' scores: only rank 0 keeps it
    for router in routers:
        router.fresh.zero_()
        router.update_k()
rates = {"gates": gate_lr, "embeddings": embed_lr, "head": head_lr}
rates = {key: rate for key, rate in rates.items() if rate is not None}
precision = getattr(torch, dtype)
optimizers = model.optimizers(optimizer, learning_rate, rates, weight_decay, precision)
if going_on:
    checkpoint.restore(saved, optimizers)

step, flops, bad_steps, best_val_loss, run_id = 0, 0.0, 0, math.inf, uuid.uuid4().hex
flops_per_step = expected_flops = tokens_per_step * model.flops_per_token()
if going_on:
    step, bad_steps = saved["step"], saved["bad_steps"]
    flops, expected_flops = saved["flops"], saved["expected_flops"]
if resuming:
    run_id = saved["run_id"]
    of_best = ("val_part", "eval_tokens", "save_best")
    same = all(saved["settings"].get(k) == settings[k] for k in of_best)
    best_val_loss = saved["best_val_loss"] if same else math.inf
if flops_budget is not None:
    max_iters = math.ceil(flops_budget / expected_flops)
elif resuming and is_main and max_iters > saved["settings"]["max_iters"]:
    print(f"the schedule now ends at step {max_iters}: a rate that had begun to fall rises again;")
    print("to decay from the constant part of wsd instead, give a kept checkpoint as --branch_from")
if 0 < warmup_iters < 1:  # in steps from now on, also for a run that resumes and takes longer
    warmup_iters = settings["warmup_iters"] = round(warmup_iters * max_iters)
warmup_iters = round(warmup_iters)

origin = None if saved is None else saved["path"]
saved = None  # frees the memory


# ------------------------------------------------------------------------------------------------
# Checkpoints and the log

save_seconds, last_save = 0.0, time.monotonic()


def save(kind):
    """Write a checkpoint: the newest, one to be kept, or the best. Every rank calls this."""
    global save_seconds, last_save
    began = time.monotonic()
    names = {"newest": checkpoint.NEWEST, "kept": f"ckpt_{step:06d}.pt", "best": "ckpt_best.pt"}
    path = os.path.join(out_dir, names[kind])
    state = {
        "model": {**lora.trained(model), **mod.scores_of_all_ranks(model, world)},
        "optimizers": [opt.state_dict()["state"] for opt in optimizers],
        "config": asdict(config), "settings": settings, "meta": meta, "data": data_sha256,
        "step": step, "flops": flops, "bad_steps": bad_steps, "best_val_loss": best_val_loss,
        "tokens_per_step": tokens_per_step, "expected_flops": expected_flops,
        "lora": adapters, "run_id": run_id,
    }  # fmt: skip
    try:
        state = checkpoint.on_rank_0(state)
        if is_main:
            checkpoint.save(path, state)
    except checkpoint.SAVE_ERRORS as error:
        fail(f"step {step} could not be saved as {path}, older checkpoints are intact: {error}")
    if world > 1:
        dist.barrier()
    if kind == "newest":  # the others must not put it off
        save_seconds, last_save = time.monotonic() - began, time.monotonic()


def saves_by_time():
    """Whether 30 seconds, and 100 times what ckpt.pt's last save took, have passed since it."""
    return save_interval is None and time.monotonic() - last_save >= max(30.0, 100 * save_seconds)


def run_header():
    """The first line of the log: everything needed to repeat the run."""
    counts = {"all": model.num_params()}
    if experts:
        counts["active"] = model.num_params(active=True)
    groups = model.param_groups()
    for key, names in groups.items():
        counts[key] = sum(model.get_parameter(n).numel() for n in names)
    if lora_rank:
        counts["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    learns = {n for n, p in model.named_parameters() if p.requires_grad}
    rate_of = lambda key: rates.get(key, learning_rate) if learns & {*groups[key]} else None
    resolved = {
        "init_out": init_out(config), "hc_streams": config.hc_streams,
        "weight_decay": weight_decay, "warmup_iters": warmup_iters,
        "gate_lr": rate_of("gates"), "embed_lr": rate_of("embeddings"), "head_lr": rate_of("head"),
        "min_lr": 0.1 * learning_rate if min_lr is None else min_lr, "dtype": dtype,
        "compile": compile, "sequences": sequences, "micro_steps": micro_steps,
        "eval_windows": len(val_indices), "max_bad_steps": MAX_BAD_STEPS,
    }  # fmt: skip
    return {
        "settings": settings, "resolved": resolved, "from_step": step, "from": origin,
        "run_id": run_id, "data": data_sha256, "git": machine.commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "device": name_of_device, "threads": torch.get_num_threads(), "world": world,
        "params": counts, "tokens_per_step": tokens_per_step, "flops_per_step": flops_per_step,
        "max_iters": max_iters,
    }  # fmt: skip


def log(record):
    if is_main:
        try:
            with open(log_path, "a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # a full disk
            fail(f"{log_path} cannot be written, checkpoints are intact: {error.strerror}")
        if wandb_log and "step" in record:
            wandb.log(record, step=record["step"])


def cut_log():
    """Drop the records of steps that will be repeated, and lines damaged by a crash."""
    kept = [r for r in data.json_lines(log_path) if r.get("step", -1) <= (step or -1)]
    with data.atomic(log_path) as file:
        file.writelines(json.dumps(record).encode() + b"\n" for record in kept)


def announce(header):
    """Print a summary of the header: settings, parameters, data, device and batch."""
    echo(settings)
    if going_on:
        print(f"resumed at step {step} of {origin}")
    elif origin is not None:
        print(f"fine-tuning {origin}: its learning rates decide those that are not given")
    counts = ", ".join(f"{count:,} {group}" for group, count in header["params"].items())
    print(f"parameters: {counts}")
    if sft_data is not None:
        for split, rows in (("train", train_windows), ("val", val_windows)):
            kept = f"{rows.kept} conversations in {len(rows)} rows"
            print(f"{split}: {kept}, {rows.cut} of them cut; {rows.dropped} too long")
    a_step, rows = tokens_per_step // config.block_size, len(train_windows)
    if a_step > rows:
        often = f"each of the {rows} rows of training data comes {a_step / rows:.3g} times a step"
        print(f"{often}: with --total_batch_tokens={rows * config.block_size} it comes once")
    some = lambda n, things: f"{n} {things}" + "s" * (n != 1)
    threads = f", {some(torch.get_num_threads(), 'thread')}" if device.type == "cpu" else ""
    print(f"{name_of_device}{threads}, {dtype}, compile={compile}")
    batch = f"{some(world, 'rank')} x {some(micro_steps, 'micro-step')} x {sequences}"
    batch = f"{tokens_per_step} tokens = {batch} x {config.block_size}"
    print(f"{max_iters} steps of {flops_per_step:.3g} FLOPs and {batch}")


# ------------------------------------------------------------------------------------------------
# One step


def learning_rate_factor():
    """The learning rate as a share of its peak: warm-up, then cosine or wsd, down to min_lr."""
    at = step if flops_budget is None else flops / expected_flops
    floor = 0.1 if min_lr is None else min_lr / learning_rate
    rising = min(1.0, (at + 1) / (warmup_iters + 1))
    if schedule == "wsd":
        falling = 1 - (1 - floor) * min(1, max(0, 1 - (max_iters - at) / (wsd_share * max_iters)))
        return min(rising, falling)
    if at < warmup_iters:
        return rising
    done = min(1, (at - warmup_iters) / max(1, max_iters - warmup_iters))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


def ramp_alpha():
    """Scale NAG's rotations during the warm-up of alpha."""
    share = min(1.0, (step + 1) / max(1, alpha_warmup_iters))
    for block in model.blocks:
        for residual in (block.attn_residual, block.mlp_residual):
            if residual.rotates:
                residual.ramp.fill_(share)


def prepare_step(factor):
    for group in (group for opt in optimizers for group in opt.param_groups):
        group["lr"] = group["peak"] * factor
        if "momentum" in group:
            group["momentum"] = muon.momentum_at(step)
    if step < alpha_warmup_iters:
        ramp_alpha()
    if step % bhyt.INTERVAL == 0:
        model.refresh()
    torch.manual_seed(hash((seed, step, rank)))  # dropout depends on the step: no state to save


def gradients():
    """Accumulate the gradient of one step.

    Returns (loss, norm, stop, save) as Python numbers, the same on all ranks. stop: some rank got a
    signal. save: a save by time is due on rank 0.
    """
    batches = (loader.batch(step, micro) for micro in range(micro_steps))
    shares = repeat(1 / micro_steps)
    if sft_data is not None:  # weigh each micro-step by its answers' tokens
        batches = [*batches]
        shares = lora.shares_of(batches, world)
    status = torch.zeros(3, device=device)  # loss, stop, save
    for micro, (batch, share) in enumerate(zip(batches, shares)):
        last = micro == micro_steps - 1  # only then average over ranks; must precede the forward
        if shard == "fsdp":
            model.set_requires_gradient_sync(last)
        elif world > 1:
            net.require_backward_grad_sync = last

        with machine.autocast(device.type, dtype):
            loss = net(*batch)[1] * share
        loss.backward()
        status[0] += loss.detach()
    status[1], status[2] = stopping, is_main and saves_by_time()
    if world > 1:
        dist.all_reduce(status)
    status[0] /= world
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip or math.inf)
    norm = machine.gathered(norm)
    values = torch.cat((status, norm.view(1))).tolist()  # the only device sync of a step
    loss, stop, save_now, norm = values
    return loss, norm, stop > 0, save_now > 0


def compiling(run):
    """run(), which compiles in the first step: a line every 15 seconds shows that it goes on."""
    done, began = Event(), time.monotonic()

    def report():
        while not done.wait(15):
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            print(f"{time.monotonic() - began:.0f} s, graphs so far: {graphs}")

    if compile and is_main and step == first_step:
        Thread(target=report, daemon=True).start()
    try:
        return run()
    except torch._dynamo.exc.TorchDynamoException as error:
        raise RuntimeError("torch.compile failed: try --compile=False") from error
    finally:
        done.set()


def balance_load(good):
    """Balance the experts and update the routers. Returns the experts' shares of the tokens. With
    adapters, experts are frozen, and so is the choice among them.

    good: whether the step was finite. If not, what was counted since the last balance is dropped.
    """
    global flops_per_step
    counts = [router.fresh for router in routers] + [layer.load for layer in experts]
    for count in () if good else counts:
        count.zero_()
    load = moe.balance(experts, world, move=not lora_rank) if experts else None
    if routers and good and (step == 1 or step % mod.BALANCE == 0):
        mod.balance(routers, config.mod_budget == "global", config.mod_rate, world)
        flops_per_step = tokens_per_step * model.flops_per_token()
    return load


def validate():
    """Validation losses; for modes that rotate, also the health of the gates on one batch."""

    def loss_on(windows, indices):
        batches = data.eval_batches(windows, indices, sequences, device, rank, world)
        return evaluate(model, batches, world)

    with machine.autocast(device.type, dtype):
        seen = {"val_loss": loss_on(val_windows, val_indices)}
        text, indices = val_windows, val_indices
        if pretraining is not None:  # val_loss covers answers; this shows forgetting
            text, indices = pretraining, data.spread(pretraining, eval_tokens, val_part)
            seen["pretraining_loss"] = loss_on(text, indices)
        if RESIDUALS[config.residual].rotates:
            x = next(data.eval_batches(text, indices, sequences, device))[0]
            seen["gates"] = gate_health(model, x)
            dead, all_of_them = seen["gates"]["dead"], 2 * config.n_layer
            if is_main and step >= alpha_warmup_iters and dead > 0.1 * all_of_them:
                print(f"warning: {dead} of {all_of_them} sublayers hardly rotate the stream")
    return seen


def keep_best(val_loss):
    """Note the validation loss, and save the checkpoint if it is the best so far and wanted."""
    global best_val_loss
    if (val_loss or math.inf) < best_val_loss:
        best_val_loss = val_loss
        if save_best:
            save("best")


def show(record, eta):
    if not is_main:
        return
    known = lambda key, form: "" if record.get(key) is None else form.format(record[key])
    loss, norm = record["loss"] or math.nan, record["grad_norm"] or math.nan
    parts = (
        f"step {step}/{max_iters}", f"loss {loss:.4f}", known("val_loss", "val {:.4f}"),
        known("pretraining_loss", "pretraining data {:.4f}"), f"lr {record['lr']:.2e}",
        f"norm {norm:.2f}", bad_steps and f"not finite, skipped: {bad_steps} in a row",
        f"{record['tok_s']:,.0f} tok/s", known("mfu", "mfu {:.1%}"), known("mem_gb", "{:.1f} GB"),
        "" if eta is None else "ETA {}:{:02d}".format(*divmod(round(eta), 60)),
    )  # fmt: skip
    print(" | ".join(filter(None, parts)))


# ------------------------------------------------------------------------------------------------
# The loop

stopping = False  # set by a signal at any time and read in every step
first_step = step


def on_signal(number, frame):
    global stopping
    stopping = True
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if is_main:  # a print could interrupt another one
        os.write(2, b"\nstopping after this step; a second Ctrl-C ends at once\n")


def on_signals(action):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


# while it compiles, a signal ends a run at once: there is nothing to save
on_signals(signal.SIG_DFL if compile else on_signal)


def finished():
    return step >= max_iters if flops_budget is None else flops >= flops_budget


def due(interval):
    return bool(interval) and step % interval == 0


name_of_device = machine.device_name(device)
peak = machine.peak_flops(name_of_device)
ramp_alpha()
header = run_header()
if is_main:
    data.make_folder(out_dir)
    if origin is not None:
        checkpoint.copy_tokenizer(os.path.dirname(origin), out_dir)
    if os.path.exists(log_path):
        cut_log()
    announce(header)
    if wandb_log:
        try:
            import wandb
        except ImportError:
            fail("wandb_log=True needs a package: pip install wandb")

        wandb.init(project="residual", name=out_dir, config=settings, id=run_id, resume="allow")
if not resuming:
    save("newest")  # from now on there is a checkpoint to resume from
if step == 0 and keep_interval:
    save("kept")
log({"run": header})
if compile and is_main and not finished():
    print("compiling: 20 seconds to several minutes; --compile=False is faster for a short run")
if step == 0 and eval_interval:
    seen = compiling(validate)
    log({"step": 0, "tokens": 0, "flops": 0} | seen)
    if is_main:
        print(f"step 0 | val {seen['val_loss']:.4f}")
    keep_best(seen["val_loss"])

stopped, busy, since, last_save = False, 0.0, step, time.monotonic()
wanting = []  # in the first steps: how many threads of this machine want to run
while not finished() and not stopped:
    began, factor = time.perf_counter(), learning_rate_factor()
    prepare_step(factor)
    loss, norm, stopped, save_now = compiling(gradients)
    good = math.isfinite(loss) and math.isfinite(norm)
    bad_steps = 0 if good else bad_steps + 1
    for opt in optimizers:
        if good:  # an update cannot be undone, so skip it if the loss or gradient is not finite
            opt.step()
        opt.zero_grad(set_to_none=True)
    if good:
        model.after_step()
    if compile and step == first_step:
        on_signals(on_signal)
    step, flops = step + 1, flops + flops_per_step
    load = balance_load(good)
    busy += time.perf_counter() - began
    if is_main and device.type == "cpu" and torch.get_num_threads() > 1 and step <= first_step + 20:
        wanting.append(machine.threads_that_want_to_run())
        if len(wanting) == 20 and statistics.mean(wanting) > os.cpu_count() + 0.5:
            print("other programs use these cores: with OMP_NUM_THREADS=1 steps may be faster")

    record = {
        "step": step, "tokens": step * tokens_per_step, "flops": flops, "bad_steps": bad_steps,
        "loss": loss if good else None, "val_loss": None, "grad_norm": norm if good else None,
        "lr": learning_rate * factor, "tok_s": None, "mfu": None,
        "mem_gb": machine.peak_memory_gb(device),
    }  # fmt: skip
    if due(eval_interval) or (eval_interval and finished()):
        record |= validate()
        if experts:
            record["load"] = load.tolist()
        if routers:
            record["ran"] = [router.k / router.T for router in routers]  # share of tokens that ran
    if stopped or finished() or bad_steps or record["val_loss"] is not None or due(log_interval):
        record["tok_s"] = (step - since) * tokens_per_step / busy
        if peak:
            record["mfu"] = (step - since) / busy * flops_per_step / (peak * world)
        compiled = compile and since == first_step  # then the time says nothing about other steps
        left = max(0, max_iters - step)
        show(record, eta=None if compiled else busy / (step - since) * left)
        log(record)
        since, busy = step, 0.0

    if bad_steps >= MAX_BAD_STEPS:
        bad = f"loss or gradient was not finite in {bad_steps} steps in a row, up to step {step}"
        fail(f"{bad}: resume with a lower rate, or give a kept checkpoint as --branch_from")
    if not bad_steps:
        keep_best(record["val_loss"])
        if due(keep_interval):
            save("kept")
    if stopped or finished() or not bad_steps and (save_now or due(save_interval)):
        save("newest")

where = f"--out_dir={shlex.quote(out_dir)}"
if is_main and stopped:
    launcher = "python" if world == 1 else f"torchrun --standalone --nproc_per_node={world}"
    command = f"{launcher} train.py {where} --init_from=resume"
    print(f"stopped by a signal at step {step}, saved; to continue: {command}")
elif is_main:
    path = os.path.join(out_dir, checkpoint.NEWEST)
    print(f"the run is complete, {path} is saved: python eval.py {where}")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
