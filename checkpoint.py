"""
Checkpoints on disk: what train.py saves, and what every other script reads.

    file             folder, under FSDP: every rank writes its own part of the tensors
    ckpt.pt          ckpt_000500/    the newest
    ckpt_000500.pt   kept_000500/    kept on request (keep_interval)
    ckpt_best.pt     best_000500/    the one with the lowest validation loss, on request (save_best)

A checkpoint holds tensors and plain values. Reading one never runs code from it: files are read
with weights_only=True, and the index of a folder is JSON. A checkpoint takes its name only when
it is complete on disk, so an interrupted save leaves the previous one in place.
"""

import glob
import json
import os
import pickle
import re
import shutil
import warnings
from dataclasses import fields

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as load_parts
from torch.distributed.checkpoint import save as save_parts
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from data import atomic, file_sha256, write_json
from model import RESIDUALS, GPTConfig
from norms import shard_like

FORMAT = 3  # the format that save writes; migrate also reads formats 1 and 2
LATER_THAN_2 = {  # settings of the model that format 2 lacks, and what they were then
    "smear": 0, "value_embeds": False, "logit_cap": None, "embed_scale": None, "head_scale": None,
}  # fmt: skip
NEWEST = "ckpt.pt"
FIXED = {"seed", "optimizer", "sft_data", "lora_rank"}  # and the model; the rest may change
SAVE_ERRORS = (OSError, RuntimeError, CheckpointException)  # for example a full disk
READ_ERRORS = (*SAVE_ERRORS, ValueError, LookupError, TypeError, EOFError, pickle.UnpicklingError)


# ------------------------------------------------------------------------------------------------
# Finding


def newest(out_dir):
    """The path of a run's newest complete checkpoint, or None."""
    file = os.path.join(out_dir, NEWEST)
    folders = [
        p
        for p in glob.glob(os.path.join(out_dir, "ckpt_*"))
        if re.fullmatch(r"ckpt_\d+", os.path.basename(p))
    ]
    folder = max(folders, key=step_of, default=None)
    if folder is None or not os.path.exists(file):
        return folder or (file if os.path.exists(file) else None)
    return folder if step_of(folder) > read_file(file)["step"] else file


def copy_tokenizer(folder, to):
    """Copy the tokenizer of an imported model, if there is one. It lies beside the checkpoint."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path, new = os.path.join(folder, name), os.path.join(to, name)
        if os.path.exists(path) and not os.path.exists(new):
            shutil.copyfile(path, new)
        elif os.path.exists(path) and file_sha256(path) != file_sha256(new):
            raise SystemExit(f"{new} belongs to another model: choose another folder")


def step_of(folder):
    return int(folder.rpartition("_")[2])


def locate(path):
    """The checkpoint at path. A run's folder means its newest checkpoint."""
    path = os.path.normpath(path)
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "state.pt")):
        path = newest(path) or os.path.join(path, NEWEST)
    if not os.path.exists(path):
        raise SystemExit(f"{path}: no such checkpoint")
    return path


# ------------------------------------------------------------------------------------------------
# Reading


def read_file(path):
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except READ_ERRORS as error:
        raise SystemExit(f"{path} is no checkpoint of train.py: {describe(error)}")
    if not isinstance(state, dict) or not {"config", "settings", "step"} <= set(state):
        raise SystemExit(f"{path} is no checkpoint of train.py: it lacks config, settings or step")
    return state


def load(path):
    """The state in a checkpoint, with its "path". For the optimizers of a folder, see restore."""
    path = locate(path)
    if os.path.isdir(path):
        state = read_file(os.path.join(path, "state.pt"))
        state["model"] = read_tensors(path, "model")
    else:
        state = read_file(path)
    return migrate(state, path) | {"path": path}


def migrate(state, path):
    """Bring an older format up to date where that is safe; else refuse it in one line."""
    version, config, settings = state.get("format", 1), state["config"], state["settings"]
    has = f"{path} has format {version}"
    if version > FORMAT:
        raise SystemExit(f"{has}, this code reads up to {FORMAT}: update the code")
    if version == 1:
        if isinstance(settings.get("warmup_iters"), float):  # was a share of all steps
            settings |= {"warmup_share": settings["warmup_iters"], "warmup_iters": 50}
        removed = {"bhyt_causal": False, "bhyt_gain_aware": config.get("bhyt_unit", False)}
        config = {k: v for k, v in config.items() if k not in removed or v != removed[k]}
        if config.get("moe_experts"):
            experts = f"moe_experts={config['moe_experts']}"
            raise SystemExit(f"{has} and {experts}: experts had another layout then")
    if version < 3:
        config = LATER_THAN_2 | config
        settings = {"embed_lr": None, "head_lr": None, "momentum_warmup_iters": 0} | settings
        if config["residual"] != "ngpt":  # the defaults that None stood for have changed
            for name, value in (("weight_decay", 0.1), ("warmup_iters", 50)):
                settings[name] = value if settings.get(name) is None else settings[name]
        if config.get("moe_experts") and settings.get("optimizer") == "muon":
            raise SystemExit(f"{has} and optimizer='muon': AdamW trained the experts then")
    known = {field.name: field.default for field in fields(GPTConfig)}
    for name, value in config.items():
        if name not in known:
            raise SystemExit(f"{has} and {name}={value!r}, which this code no longer has")
    return state | {"config": known | config, "settings": settings}


def inherit(saved, settings, given, going_on):
    """All settings of a run that starts from a checkpoint.

    saved: what load returns. settings: all settings of this start. given: those that the user gave.
    A run that goes on (resumed or branched) keeps the settings of the checkpoint. Fine-tuning keeps
    the model and data_dir. Settings given now override these; changing a fixed one is an error.
    """
    model = {field.name for field in fields(GPTConfig)}
    old = settings | saved["settings"] | saved["config"]
    if going_on:
        if "tokens_per_step" not in saved:
            asks = "give it as init_from, with another out_dir"
            raise SystemExit(f"{saved['path']} has no optimizer state: {asks}")
        kept = {key: old[key] for key in settings}
        fixed = FIXED | (model - {"dropout"})
    else:
        kept = settings | {key: old[key] for key in model | {"data_dir", "loss_chunk"}}
        fixed = model - {"dropout", "block_size"}
        predicts = RESIDUALS[old["residual"]].predicts
        if predicts and given.get("block_size", old["block_size"]) != old["block_size"]:
            kept["bhyt_context"] = old["bhyt_context"] or old["block_size"]  # keep the c it has
    kept |= {key: settings[key] for key in ("out_dir", "init_from", "branch_from")}

    changed = [key for key in given if key in fixed and given[key] != old[key]]
    if changed:
        differs = "; ".join(f"{key}={old[key]!r}, not {given[key]!r}" for key in changed)
        raise SystemExit(f"{saved['path']} was trained with {differs}")
    return kept | given


def restore(state, optimizers):
    """Load the optimizers' state. Under FSDP each rank takes its own part."""
    for i, optimizer in enumerate(optimizers):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if "optimizers" in state:
            kept = state["optimizers"][i]
            for j, entry in kept.items():
                kept[j] = {name: shard_like(x, params[j]) for name, x in entry.items()}
        else:
            kept = {}
            for key, x in read_tensors(state["path"], f"optimizers.{i}", params).items():
                j, _, name = key.partition(".")
                kept.setdefault(int(j), {})[name] = x
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": kept, "param_groups": groups})


# ------------------------------------------------------------------------------------------------
# Writing


def save(path, state):
    """Write a file. Only one process calls this."""
    # without checksums, which read_file does not check either: they take two thirds of the time
    torch.serialization.set_crc32_options(False)
    with atomic(path) as file:
        torch.save({**state, "format": FORMAT}, file)


def save_sharded(path, state):
    """Write a folder. Every rank calls this and writes its part of the tensors."""
    main, tmp = dist.get_rank() == 0, path + ".tmp"
    if main:
        shutil.rmtree(tmp, ignore_errors=True)
        os.makedirs(tmp)
    dist.barrier()
    tensors = {f"model.{name}": x for name, x in state["model"].items()}
    for i, of_optimizer in enumerate(state["optimizers"]):
        for j, entry in of_optimizer.items():
            tensors |= {f"optimizers.{i}.{j}.{name}": x for name, x in entry.items()}
    save_parts(tensors, storage_writer=Writer(tmp, thread_count=1))
    if main:
        save(
            os.path.join(tmp, "state.pt"),
            {k: v for k, v in state.items() if k not in ("model", "optimizers")},
        )
        remove(path)  # it exists if the run restarted from an older checkpoint
        os.rename(tmp, path)
    dist.barrier()


def remove(path):
    """Remove a checkpoint. A folder is renamed first, so a kill never leaves a partial one."""
    if os.path.isdir(path):
        os.rename(path, path + ".old.tmp")
        shutil.rmtree(path + ".old.tmp")
    elif os.path.exists(path):
        os.remove(path)


def remove_older(out_dir, path):
    """Remove other checkpoints of the same kind as path, and leftovers of killed saves."""
    kind = r"best_\d+" if os.path.basename(path).startswith("best") else r"ckpt\.pt|ckpt_\d+"
    for name in os.listdir(out_dir):
        other = os.path.join(out_dir, name)
        if name.endswith(".tmp"):
            shutil.rmtree(other) if os.path.isdir(other) else os.remove(other)
        elif other != path and re.fullmatch(kind, name):
            remove(other)


# ------------------------------------------------------------------------------------------------
# The index of a folder: where the parts of each tensor are. JSON, because pickles can run code.


class Writer(FileSystemWriter):
    def finish(self, metadata, results):
        where = {part.index: part.storage_data for of_rank in results for part in of_rank}
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            parts = []
            for chunk in tensor.chunks:
                at = where[MetadataIndex(name, chunk.offsets)]
                parts.append(
                    [[*chunk.offsets], [*chunk.sizes], at.relative_path, at.offset, at.length]
                )
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "size": [*tensor.size], "parts": parts}
        write_json(os.path.join(self.path, "index.json"), index)


class Reader(FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        tensors, where = {}, {}
        for name, tensor in read_index(self.path).items():
            chunks = []
            for offsets, sizes, file, offset, length in tensor["parts"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                where[MetadataIndex(name, offsets)] = _StorageInfo(file, offset, length)
            properties = TensorProperties(dtype=tensor["dtype"])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor["size"]), chunks)
        return Metadata(state_dict_metadata=tensors, storage_data=where)


def read_index(folder):
    """{tensor name: {dtype, size, parts: [offsets, sizes, file, offset in the file, bytes]}}"""
    try:
        index = json.load(open(os.path.join(folder, "index.json")))
        for tensor in index.values():
            tensor["dtype"] = getattr(torch, tensor["dtype"])
            assert isinstance(tensor["dtype"], torch.dtype), f"{tensor['dtype']} is no dtype"
            for _, _, file, _, _ in tensor["parts"]:
                assert os.path.basename(file) == file, f"{file!r} is not in the folder"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError) as error:
        raise SystemExit(f"{folder} is no checkpoint of train.py: index.json: {error}")
    return index


def read_tensors(folder, prefix, params=None):
    """{NAME: tensor} for the tensors PREFIX.NAME of a folder.

    params: the list that the number in names such as "3.exp_avg" indexes. A tensor of its
    parameter's shape is sharded like the parameter, so each rank reads only its own part.
    """
    tensors = {}
    try:
        for key, tensor in read_index(folder).items():
            name = key.removeprefix(prefix + ".")
            if name != key:
                p = None if params is None else params[int(name.partition(".")[0])]
                if isinstance(p, DTensor) and list(p.shape) == tensor["size"]:
                    tensors[key] = torch.empty_like(p)
                else:
                    tensors[key] = torch.empty(tensor["size"], dtype=tensor["dtype"])
        with warnings.catch_warnings():
            # torch warns that reading is not distributed: each rank reads by itself
            warnings.simplefilter("ignore")
            load_parts(tensors, storage_reader=Reader(folder), no_dist=True)
    except READ_ERRORS as error:
        raise SystemExit(f"{folder} is no complete checkpoint: {describe(error)}")
    return {name.removeprefix(prefix + "."): x for name, x in tensors.items()}


def describe(error):
    """The first line of an error. If torch wraps the errors of ranks, that of the first rank."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return (str(error).splitlines() or [type(error).__name__])[0]
