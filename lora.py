"""
Fine-tuning: low-rank adapters in place of the weights (LoRA, Hu et al. 2021, arXiv 2106.09685), and conversations in
place of plain text.

    y = W x + b + (alpha / rank) B A dropout(x)     W and b frozen, A (rank, in) random, B (out, rank) from zero     (1)

    python train.py config/sft_lima.py --init_from=out/ckpt.pt --out_dir=out/sft        the adapters alone are saved
    python lora.py out/sft/ckpt.pt out/merged.pt                                        merged into a whole checkpoint
"""

import hashlib
import json
import os
import sys
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from prepare_c4 import atomic, validates

TARGETS = ("wq", "wk", "wv", "wo", "up", "gate", "down")  # the linears of a block


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


class Adapted(nn.Linear):
    def __init__(self, linear, rank, alpha, dropout):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias  # the very same ones
        device = linear.weight.device
        self.A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, self.in_features, device=device), 5**0.5))
        self.B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        self.scale, self.drop, self.plain = alpha / rank, nn.Dropout(dropout), None

    def forward(self, x):
        y = super().forward(x)
        return y if self.plain is not None else y + self.scale * F.linear(F.linear(self.drop(x), self.A), self.B)  # (1)

    @torch.no_grad()
    def merge(self):
        """Have W do what W and the adapter did; W itself is kept, so that unmerge gives back its every bit."""
        self.plain = self.weight.clone()
        self.weight += self.scale * (self.B @ self.A)

    @torch.no_grad()
    def unmerge(self):
        self.weight.copy_(self.plain)
        self.plain = None


def adapt(model, rank, alpha, dropout, targets):
    """Freeze the model and give the linears named in targets, "wq,wv" for instance, an adapter each."""
    names, found = targets.split(","), {n for n, m in model.blocks.named_modules() if type(m) is nn.Linear}
    there = [name for name in TARGETS if any(n.endswith("." + name) for n in found)]
    stacked = {id(linear) for m in model.blocks.modules() for linear in getattr(m, "stacks", ())}
    for name in names:
        if name not in there:
            raise ValueError(f"lora_targets={targets!r}: {name!r} is not one of {', '.join(there)}")
    model.requires_grad_(False)
    for module in [*model.blocks.modules()]:
        for name, linear in [*module.named_children()]:
            if name in names and type(linear) is nn.Linear:
                if id(linear) in stacked:
                    raise ValueError(f"lora_targets={targets!r}: {name} holds experts, which take no adapters")
                setattr(module, name, Adapted(linear, rank, alpha, dropout))


def adapters(model):
    return [module for module in model.modules() if isinstance(module, Adapted)]


@contextmanager
def merged(model):
    """The adapters merged for a while, for what reads weights and not outputs; nothing where there are none"""
    for module in adapters(model):
        module.merge()
    yield
    for module in adapters(model):
        module.unmerge()


def frozen(model):
    """Names of the parameters that do not learn"""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}


def trained(model):
    """The state dict without what is frozen"""
    left_out = frozen(model)
    return {name: x for name, x in model.state_dict().items() if name not in left_out}


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_state(model, state):
    """Load a checkpoint of train.py, together with the one that its adapters, if these are all it has, belong to."""
    how = state.get("lora")
    if how is None:
        model.load_state_dict(state["model"])
        return
    if not os.path.exists(how["base"]) or digest(how["base"]) != how["sha256"]:
        raise SystemExit(f"the adapters belong to {how['base']}, which is gone or another file by now")
    load_state(model, torch.load(how["base"], map_location="cpu", weights_only=True))
    adapt(model, how["rank"], how["alpha"], how["dropout"], how["targets"])
    missing, unexpected = model.load_state_dict(state["model"], strict=False)
    if unexpected or set(missing) != frozen(model):
        raise SystemExit(f"these adapters do not fit the model of {how['base']}")


def begin(model, state, path, resume, how):
    """Load the checkpoint at path and, if rank is above 0, train adapters: those that it has when resuming, else new
    ones. Returns what a checkpoint says of them, None where there are none."""
    load_state(model, state)
    old = state.get("lora")
    if resume and how != {k: v for k, v in (old or how | {"rank": 0}).items() if k in how}:
        raise ValueError(f"{path} was trained with {old or 'no adapters'}, not with {how}")
    if resume or not (old or how["rank"]):
        return old
    if old:
        raise ValueError(f"{path} holds adapters: merge them first with python lora.py {path} TO")
    adapt(model, **how)
    return how | {"base": os.path.abspath(path), "sha256": digest(path)}


# ---------------------------------------------------------------------------------------------------------------------
# Conversations

ASK, ANSWER = "User: {}\n\nAssistant:", " {}"  # the chat template; end-of-text before the first and behind every answer
VAL_SHARE = 0.1  # of the conversations, chosen by a hash of their text, that is kept for validation


def encode(turns, encoding):
    """Ids of a conversation, and which of them are the assistant's"""
    ids, own = [encoding.eot_token], [False]
    for question, answer in zip(turns[::2], turns[1::2]):
        asked = encoding.encode_ordinary(ASK.format(question))
        answered = [*encoding.encode_ordinary(ANSWER.format(answer)), encoding.eot_token]
        ids, own = ids + asked + answered, own + [False] * len(asked) + [True] * len(answered)
    return ids, own


def read_conversations(source):
    """Lists of turns, the user's and the assistant's in alternation: LIMA's records {"conversations": [...]}"""
    if os.path.exists(source):
        records = map(json.loads, filter(str.strip, open(source, encoding="utf-8")))
    elif str(source).endswith((".json", ".jsonl")):
        raise SystemExit(f"{source}: no such file")
    else:
        from datasets import load_dataset

        records = load_dataset(source, split="train")
    for n, record in enumerate(records):
        turns = record.get("conversations")
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            raise SystemExit(f"{source}: record {n} is not {{'conversations': ['question', 'answer', ...]}}")
        if len(turns) > 1:
            yield turns


class Conversations:
    """Rows (3, T) of inputs, targets and numbers of conversations: as many whole ones as fit behind each other, of
    which none attends to another. Only answers are targets; everything else, and what fills the row up, is -1. What is
    longer than a row is cut. (The tokens of a row do compete for who runs under mod in training.)"""

    def __init__(self, source, split, encoding, T):
        self.rows, self.T, room, self.kept, self.cut, self.dropped = [], T, 0, 0, 0, 0
        for turns in read_conversations(source):
            if validates("\n".join(turns), VAL_SHARE) != (split == "val"):
                continue
            ids, own = encode(turns, encoding)
            x, y = ids[:-1][:T], [i if mine else -1 for i, mine in zip(ids, own)][1 : T + 1]
            if max(y) < 0:  # nothing of the answer is left
                self.dropped += 1
                continue
            self.kept, self.cut = self.kept + 1, self.cut + (len(ids) > T + 1)
            if len(x) > room:
                self.rows.append(np.stack([np.zeros(T, int), np.full(T, -1), np.zeros(T, int)]))
                room = T
            at = slice(T - room, T - room + len(x))
            self.rows[-1][:, at] = x, y, [self.rows[-1][2].max() + 1] * len(x)
            room -= len(x)
        if not self.rows:
            raise SystemExit(f"{source}: no conversation for {split}, of which {VAL_SHARE:.0%} are for val")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def shares_of(batches, world):
    """What the mean loss of each micro-batch counts in the mean over the step's answers, on all ranks together"""
    counts = torch.stack([(y >= 0).sum() for _, y, _ in batches]).float()
    total = counts.sum()
    if world > 1:
        torch.distributed.all_reduce(total)
    return counts * world / total


def main(path, to):
    """A checkpoint with its adapters merged, of the kind that any run can start from"""
    from eval import load

    state, model = load(path)
    if state.pop("lora", None) is None:
        raise SystemExit(f"{path} has no adapters to merge")
    state["model"] = {k: v for k, v in model.state_dict().items() if k.rpartition(".")[2] not in ("A", "B")}
    with atomic(to) as file:
        torch.save(state | {"optimizers": []}, file)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
