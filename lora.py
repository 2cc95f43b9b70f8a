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

import checkpoint
from data import file_sha256
from model import GPT, GPTConfig

TARGETS = ("wq", "wk", "wv", "wo", "up", "gate", "down")  # the linears of a block


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


class Adapted(nn.Linear):
    def __init__(self, linear, rank, alpha, dropout):
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias  # the very same ones
        device = linear.weight.device
        self.A = nn.Parameter(
            nn.init.kaiming_uniform_(torch.empty(rank, self.in_features, device=device), 5**0.5)
        )
        self.B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        self.scale, self.drop, self.plain = alpha / rank, nn.Dropout(dropout), None

    def forward(self, x):
        y = super().forward(x)
        return (
            y
            if self.plain is not None
            else y + self.scale * F.linear(F.linear(self.drop(x), self.A), self.B)
        )  # (1)

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
    names, found = (
        targets.split(","),
        {n for n, m in model.blocks.named_modules() if type(m) is nn.Linear},
    )
    available = [name for name in TARGETS if any(n.endswith("." + name) for n in found)]
    for name in names:
        if name not in available:
            raise ValueError(
                f"lora_targets={targets!r}: {name!r} is not one of {', '.join(available)}"
            )
    model.requires_grad_(False)
    for module in [*model.blocks.modules()]:
        for name, linear in [*module.named_children()]:
            if name in names and type(linear) is nn.Linear:
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
    return {
        name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad
    }


def trained(model):
    """The state dict without what is frozen"""
    left_out = frozen(model)
    return {name: x for name, x in model.state_dict().items() if name not in left_out}


def digest(path):
    """sha256 of a checkpoint, a file or a folder."""
    if not os.path.isdir(path):
        return file_sha256(path)
    parts = [file_sha256(os.path.join(path, name)) for name in sorted(os.listdir(path))]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def load_state(model, state):
    """Load the weights of a checkpoint. One that holds only adapters names the checkpoint with the other weights."""
    lora = state.get("lora")
    if lora is None:
        try:
            model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise SystemExit(
                f"{state['path']} does not fit its own settings: {' '.join(str(error).split())}"
            )
        return
    if not os.path.exists(lora["base"]) or digest(lora["base"]) != lora["sha256"]:
        raise SystemExit(f"the adapters belong to {lora['base']}, which is gone or has changed")
    load_state(model, checkpoint.load(lora["base"]))
    adapt(model, lora["rank"], lora["alpha"], lora["dropout"], lora["targets"])
    missing, unexpected = model.load_state_dict(state["model"], strict=False)
    if unexpected or set(missing) != frozen(model):
        raise SystemExit(f"these adapters do not fit the model of {lora['base']}")


def load_model(path, device="cpu"):
    """(state, model) of a checkpoint: in eval mode, with its adapters merged."""
    state = checkpoint.load(path)
    model = GPT(GPTConfig(**state["config"]))
    model.loss_chunk = state["settings"].get("loss_chunk")
    load_state(model, state)
    for adapter in adapters(model):
        adapter.merge()
    model.requires_grad_()
    model.refresh()
    return state, model.to(device).eval()


def begin(model, state, wanted):
    """Load a checkpoint to fine-tune it, and add adapters if wanted["rank"] is above 0.

    Returns what the checkpoints of this run say about their adapters; None without adapters.
    """
    load_state(model, state)
    if not wanted["rank"]:
        return state.get("lora")
    if state.get("lora"):
        raise ValueError(
            f"{state['path']} holds adapters: merge them first with python lora.py {state['path']} TO"
        )
    adapt(model, **wanted)
    return wanted | {"base": os.path.abspath(state["path"]), "sha256": digest(state["path"])}


# ---------------------------------------------------------------------------------------------------------------------
# Conversations

ASK, ANSWER = (
    "User: {}\n\nAssistant:",
    " {}",
)  # the chat template; end-of-text before the first and behind every answer
VAL_SHARE = 0.1  # of the conversations, at least one, are kept for validation


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
            raise SystemExit(
                f"{source}: record {n} is not {{'conversations': ['question', 'answer', ...]}}"
            )
        if len(turns) > 1:
            yield turns


def split_conversations(source, split):
    """The conversations of "train" or "val", in the order of the file. Those with the smallest hashes are for val, so
    that a new conversation moves few others."""
    every = list(read_conversations(source))
    if len(every) < 2:
        raise SystemExit(
            f"{source}: {len(every)} conversations; at least 2 are needed, one each for train and val"
        )
    hashes = [
        hashlib.sha256("\n".join(turns).encode("utf-8", "surrogatepass")).hexdigest()
        for turns in every
    ]
    order = sorted(range(len(every)), key=lambda i: (hashes[i], i))
    val = set(order[: max(1, round(VAL_SHARE * len(every)))])
    return [turns for i, turns in enumerate(every) if (i in val) == (split == "val")]


class Conversations:
    """Conversations packed into rows (3, T): inputs, targets, and the number of the conversation each token is from.

    Attention is masked between the conversations of a row. Only answers are targets; all else, and the padding, has
    target -1. A conversation longer than a row is cut. (With mod.py, the tokens of a row do compete for who runs.)
    """

    def __init__(self, source, split, encoding, T):
        self.rows, self.T, room, self.kept, self.cut, self.dropped = [], T, 0, 0, 0, 0
        for turns in split_conversations(source, split):
            ids, own = encode(turns, encoding)
            x, y = ids[:-1][:T], [i if answer else -1 for i, answer in zip(ids, own)][1 : T + 1]
            if max(y) < 0:  # the answer begins after the cut
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
            raise SystemExit(
                f"{source}: all conversations for {split} are longer than block_size={T} before the answer"
            )
        self.sha256 = hashlib.sha256(np.stack(self.rows).tobytes()).hexdigest()

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
    """Write a checkpoint with its adapters merged, from which any run can start."""
    state, model = load_model(path)
    if state.pop("lora", None) is None:
        raise SystemExit(f"{path} has no adapters to merge")
    state["model"] = {
        k: v for k, v in model.state_dict().items() if k.rpartition(".")[2] not in ("A", "B")
    }
    state.pop("path")
    checkpoint.save(to, state | {"optimizers": []})


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
