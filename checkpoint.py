"""
Checkpoints on disk: what train.py saves, and what every other script reads.

    ckpt.pt          the newest
    ckpt_000500.pt   kept on request (keep_interval)
    ckpt_best.pt     the one with the lowest validation loss, on request (save_best)

A checkpoint is one file of tensors and plain values. Under FSDP, rank 0 gathers the tensors and
writes the same file, so a run can resume on any number of ranks. A file takes its name only when it
is complete on disk: an interrupted save leaves the previous checkpoint in place, and its unfinished
.tmp is removed by the next save. Files are read with weights_only=True, which never runs code.
"""

import glob
import os
import pickle
import shutil
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from data import atomic, file_sha256, make_folder, reason_of
from machine import gathered, shard_like
from model import GPT, MODEL_SETTINGS, RESIDUALS, GPTConfig

FORMAT = 5  # raise it when the content of a file or the meaning of a setting changes
USE_ITS_CODE = "use the code that wrote it: log.jsonl has its commit"
NEWEST = "ckpt.pt"
RATES = ("learning_rate", "gate_lr", "embed_lr", "head_lr")
FINE_TUNING = 0.1  # learning rates of all weights, as a share of those that trained the model
# fixed beside the model's settings except dropout; train.py fixes data and tokens per step
FIXED = {"seed", "optimizer", "sft_data", "lora_rank"}
SAVE_ERRORS = (OSError, RuntimeError)  # for example a full disk
READ_ERRORS = (*SAVE_ERRORS, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError)


# ------------------------------------------------------------------------------------------------
# Finding


def newest(out_dir):
    """The path of a run's newest checkpoint, or None."""
    path = os.path.join(out_dir, NEWEST)
    return path if os.path.exists(path) else None


def locate(path):
    """The checkpoint at path. A run's folder means its newest checkpoint."""
    path = os.path.normpath(path)
    if os.path.isdir(path):
        path = os.path.join(path, NEWEST)
    if not os.path.exists(path):
        others = sorted(glob.glob(f"{os.path.dirname(path) or '.'}/*/{NEWEST}"))
        known = f"; there is {', '.join(others)}" if others else ""
        raise SystemExit(f"{path}: no such checkpoint{known}")
    return path


def prepare_folder(path):
    """Make the folder of a new file. A file that exists is not overwritten."""
    if os.path.exists(path):
        raise SystemExit(f"{path} already exists: give another name")
    make_folder(os.path.dirname(path))


def copy_tokenizer(folder, to, names=("tokenizer.json", "tokenizer_config.json")):
    """Copy the tokenizer of an imported model, if there is one. It lies beside the checkpoint."""
    for name in names:
        path, new = os.path.join(folder, name), os.path.join(to, name)
        if os.path.exists(path) and not os.path.exists(new):
            with atomic(new) as file, open(path, "rb") as source:
                shutil.copyfileobj(source, file)
        elif os.path.exists(path) and file_sha256(path) != file_sha256(new):
            raise SystemExit(f"{new} belongs to another model: choose another folder")


# ------------------------------------------------------------------------------------------------
# Reading


def load(path):
    """The state in a checkpoint, with its "path". Its tensors stay on disk until they are used."""
    path = locate(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except READ_ERRORS as error:
        raise SystemExit(f"{path} is no checkpoint of train.py: {reason_of(error)}")
    if not isinstance(state, dict) or not {"config", "settings", "step"} <= set(state):
        raise SystemExit(f"{path} is no checkpoint of train.py: it lacks config, settings or step")

    found = state.get("format", 1)
    if found != FORMAT:
        raise SystemExit(f"{path} has format {found}, this code reads {FORMAT}: {USE_ITS_CODE}")
    differs = state["config"].keys() ^ MODEL_SETTINGS
    if differs:
        names = ", ".join(sorted(differs))
        raise SystemExit(f"{path} differs from this code in the settings {names}: {USE_ITS_CODE}")
    return state | {"path": path}


def load_model(path, device="cpu"):
    """Load a checkpoint as (state, model). The model is in eval mode, with adapters merged."""
    state = load(path)
    try:
        model = GPT(GPTConfig(**state["config"]))
    except ValueError as error:  # older code allowed it
        raise SystemExit(f"{state['path']} is refused ({error}): {USE_ITS_CODE}") from None
    model.loss_chunk = state["settings"].get("loss_chunk")
    load_weights(model, state)
    model.refresh()
    return state, model.to(device).eval()


def load_weights(model, state):
    """Load a checkpoint's weights, with adapters merged."""
    try:
        model.load_state_dict(merged(state) if state.get("lora") else state["model"])
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise SystemExit(f"{state['path']} does not fit its own settings: {reason}") from None


def base_of(state):
    """The checkpoint that the adapters in a checkpoint were trained on."""
    base = state["lora"]["base"]
    if not os.path.exists(base) or file_sha256(base) != state["lora"]["sha256"]:
        raise SystemExit(f"the adapters belong to {base}, which is gone or has changed")
    return load(base)


def merged(state):
    """The weights of the base with the adapters added: W + alpha / rank B A (lora.py)."""
    own, weights = state["model"], {**base_of(state)["model"]}
    scale = state["lora"]["alpha"] / state["lora"]["rank"]
    for name, x in own.items():
        layer, _, part = name.rpartition(".")
        if part == "A":
            update = scale * (own[layer + ".B"] @ x)
            weights[layer + ".weight"] = weights[layer + ".weight"] + update
        elif part != "B":
            weights[name] = x
    return weights


def find_start(out_dir, init_from, branch_from):
    """(the checkpoint that a run starts from or None, whether the run resumes), for train.py."""
    scratch = init_from in ("scratch", "auto")
    if branch_from is not None and not scratch:
        raise SystemExit(f"branch_from starts a new run, so init_from={init_from!r} cannot be set")
    if init_from == "resume" or (init_from == "auto" and newest(out_dir) is not None):
        return load(out_dir), True
    source = branch_from if scratch else init_from
    return None if source is None else load(source), False


def inherit(saved, settings, given, going_on):
    """All settings of a run that starts from a checkpoint.

    saved: what load returns. settings: all settings of this start. given: those that the user gave.
    A run that goes on (resumed or branched) keeps the settings of the checkpoint. Fine-tuning keeps
    the model and data_dir. It has a tenth of the learning rates, or with adapters all of them; an
    imported model has none. Settings given now override these; changing a fixed one is an error.
    """
    old = settings | dict.fromkeys(RATES) | saved["settings"] | saved["config"]
    if going_on:
        if "tokens_per_step" not in saved:
            raise SystemExit(f"{saved['path']} has no optimizer state: give it as init_from")
        kept = {key: old[key] for key in settings}
        fixed = FIXED | (MODEL_SETTINGS - {"dropout"})
    else:
        kept = settings | {key: old[key] for key in MODEL_SETTINGS | {"data_dir", "loss_chunk"}}
        share = 1.0 if settings["lora_rank"] else FINE_TUNING
        kept |= {key: old[key] and share * old[key] for key in RATES}
        fixed = MODEL_SETTINGS - {"dropout", "block_size"}
        predicts = RESIDUALS[old["residual"]].predicts
        if predicts and given.get("block_size", old["block_size"]) != old["block_size"]:
            kept["bhyt_context"] = old["bhyt_context"] or old["block_size"]  # keep the c it has
    kept |= {key: settings[key] for key in ("out_dir", "init_from", "branch_from")}

    changed = [key for key in given if key in fixed and given[key] != old[key]]
    if changed:
        differs = "; ".join(f"{key}={old[key]!r}, not {given[key]!r}" for key in changed)
        raise SystemExit(f"{saved['path']} was trained with {differs}")
    kept |= given
    if kept["learning_rate"] is None:
        raise SystemExit(f"{saved['path']} was imported, without a learning rate: give one")
    return kept


def restore(state, optimizers):
    """Load the optimizers' state. Under FSDP each rank keeps only its own part of each tensor."""
    for optimizer, kept in zip(optimizers, state["optimizers"]):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, entry in kept.items():
            kept[i] = {name: shard_like(x, params[i], from_rank=None) for name, x in entry.items()}
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": kept, "param_groups": groups})
        kept.clear()
        for entry in optimizer.state.values():  # what maps the file keeps it on the disk
            entry.update({name: x.clone() for name, x in entry.items()})


# ------------------------------------------------------------------------------------------------
# Writing


def on_rank_0(state):
    """The state without sharded tensors, for save. Every rank calls this.

    Rank 0 gets each of them whole, in the memory of its CPU; the others get None. A device holds
    one whole tensor at a time.
    """
    if isinstance(state, dict):
        return {key: on_rank_0(value) for key, value in state.items()}
    if isinstance(state, list):
        return [on_rank_0(value) for value in state]
    if isinstance(state, DTensor):
        whole = gathered(state)
        # a copy, also on a CPU: what is written has been part of no collective
        return whole.to("cpu", copy=True) if dist.get_rank() == 0 else None
    return state


def save(path, state):
    """Write a file. Only one process calls this."""
    # without checksums, which load does not check either: they take two thirds of the time
    torch.serialization.set_crc32_options(False)
    with atomic(path) as file:
        torch.save({**state, "format": FORMAT}, file)


def save_start(path, state, model):
    """Write a model and the rest of a loaded state, for --init_from. No run can resume from it."""
    copy_tokenizer(os.path.dirname(state["path"]), os.path.dirname(path) or ".")
    left_out = ("path", "optimizers", "tokens_per_step", "lora")
    state = {key: value for key, value in state.items() if key not in left_out}
    config = asdict(model.config)
    state |= {"model": model.state_dict(), "config": config}
    save(path, state | {"settings": state["settings"] | config})
