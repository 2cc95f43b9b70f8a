"""
Fine-tuning: low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) and conversations.

    y = W x + b + (alpha / rank) B A x                                                          (1)
        W and b are frozen; A (rank, in) starts random, B (out, rank) at zero

Differs from the paper: A starts uniform, as nn.Linear does, where the paper has a Gaussian.

    python train.py config/sft_lima.py --init_from=out/ckpt.pt --out_dir=out/sft  # saves adapters
    python lora.py out/sft/ckpt.pt out/merged.pt  # merges them into a complete checkpoint
"""

import hashlib
import json
import os
import sys
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import checkpoint
from configurator import usage
from data import file_sha256, reason_of, start_of_text
from norms import pick

ALPHA = 16.0  # an adapter's output is multiplied by ALPHA / rank
TARGETS = "wq,wk,wv,wo"  # the linears that get an adapter: names from LINEARS
LINEARS = ("wq", "wk", "wv", "wo", "up", "gate", "down")


# ------------------------------------------------------------------------------------------------
# Adapters


class Adapted(nn.Linear):
    def __init__(self, linear, rank, alpha):
        has_bias = linear.bias is not None
        super().__init__(linear.in_features, linear.out_features, has_bias, device="meta")
        self.weight, self.bias = linear.weight, linear.bias  # shared, not copied
        device = linear.weight.device
        A = torch.empty(rank, self.in_features, device=device)
        self.A = nn.Parameter(nn.init.kaiming_uniform_(A, 5**0.5))
        self.B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        self.scale = alpha / rank

    def forward(self, x):
        added = F.linear(F.linear(x, self.A), self.B)
        return super().forward(x) + self.scale * added  # Eq. 1

    @property
    def merged(self):
        """W with the adapter added, for code that reads weights instead of outputs."""
        return self.weight + self.scale * (self.B @ self.A)


def adapt(model, rank, alpha, targets):
    """Freeze the model and add an adapter to each linear named in targets, such as "wq,wv"."""
    names = targets.split(",")
    found = {n.rpartition(".")[2] for n, m in model.blocks.named_modules() if type(m) is nn.Linear}
    available = {name: name for name in LINEARS if name in found}  # experts are no linears
    for name in names:
        pick(available, name, "lora.TARGETS")
    model.requires_grad_(False)
    for module in [*model.blocks.modules()]:
        for name, linear in [*module.named_children()]:
            if name in names and type(linear) is nn.Linear:
                setattr(module, name, Adapted(linear, rank, alpha))


def trained(model):
    """The state dict without the frozen parameters."""
    parameters = model.named_parameters(remove_duplicate=False)  # tied ones under each name
    left_out = {name for name, p in parameters if not p.requires_grad}
    return {name: x for name, x in model.state_dict().items() if name not in left_out}


def load_state(model, state):
    """Load a checkpoint to continue its run. Its adapters, if it has any, stay apart."""
    lora = state.get("lora")
    if lora is not None:
        adapt(model, lora["rank"], lora["alpha"], lora["targets"])
        both = checkpoint.base_of(state)["model"] | state["model"]
        state = state | {"model": both, "lora": None}
    checkpoint.load_weights(model, state)


def begin(model, state, rank):
    """Load a checkpoint to fine-tune it, and add adapters if rank is above 0.

    Returns the description of the adapters for this run's checkpoints; None without adapters.
    """
    path = state["path"]
    if state.get("lora"):
        raise ValueError(f"{path} holds adapters: merge them first: python lora.py {path} OUT.pt")
    checkpoint.load_weights(model, state)
    if not rank:
        return None
    wanted = {"rank": rank, "alpha": ALPHA, "targets": TARGETS}
    adapt(model, **wanted)
    return wanted | {"base": os.path.abspath(path), "sha256": file_sha256(path)}


# ------------------------------------------------------------------------------------------------
# Conversations

# the chat template; end-of-text comes before the first question and after every answer
ASK = "User: {}\n\nAssistant:"
ANSWER = " {}"
VAL_SHARE = 0.1  # share of the different conversations for validation, at least one


def encode(turns, encoding):
    """Token ids of a conversation, and a flag for each: whether it belongs to an answer.

    Question and answer are encoded together: some tokenizers put a space before each text.
    """
    ids = [*start_of_text(encoding)]
    is_answer = [False] * len(ids)
    for question, answer in zip(turns[::2], turns[1::2]):
        question, answer = ASK.format(question), ANSWER.format(answer)
        asked = encoding.encode_ordinary(question)
        both = [*encoding.encode_ordinary(question + answer), encoding.eot_token]
        ids += both
        is_answer += ([False] * len(asked) + [True] * len(both))[: len(both)]
    return ids, is_answer


def read_conversations(source):
    """Yield conversations: lists of alternating user and assistant turns.

    source: a file of JSON lines, here or on the hub, or a dataset on the hub. Each record has
    LIMA's {"conversations": [...]}.
    """
    source, hub_file = str(source), str(source).startswith("hf://")
    try:
        if os.path.exists(source):
            records = [*filter(str.strip, open(source, encoding="utf-8"))]
        elif not hub_file and ("/" not in source or source.endswith((".json", ".jsonl"))):
            raise SystemExit(f"sft_data={source!r}: no such file, and no OWNER/NAME")
        else:
            from datasets import load_dataset

            where = {"path": "json", "data_files": source} if hub_file else {"path": source}
            records = load_dataset(**where, split="train")
    except Exception as error:  # the hub's errors have no common class
        reason = reason_of(error)
        hint = "; HF_TOKEN may help, or the path of a file: hf://datasets/OWNER/NAME/FILE.jsonl"
        hint = "" if os.path.exists(source) else hint
        raise SystemExit(f"{source} cannot be read: {reason}{hint}") from None
    for n, record in enumerate(records):
        if isinstance(record, str):  # a line of a file
            with suppress(ValueError):
                record = json.loads(record)
        turns = record.get("conversations") if isinstance(record, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
            expected = "{'conversations': ['question', 'answer', ...]}"
            raise SystemExit(f"{source}: record {n} is not {expected}")
        if len(turns) > 1:
            yield turns


def split_conversations(source, split):
    """The conversations of "train" or "val", in file order. Those with the smallest hashes are for
    validation: adding a conversation changes the split of few others, and copies stay together."""
    conversations = list(read_conversations(source))
    texts = ("\n".join(turns).encode("utf-8", "surrogatepass") for turns in conversations)
    hashes = [hashlib.sha256(text).hexdigest() for text in texts]
    order = sorted({*hashes})
    if (n := len(order)) < 2:
        raise SystemExit(f"{source}: {n} different conversations, at least 2 are needed")
    val = set(order[: max(1, round(VAL_SHARE * n))])
    pairs = zip(conversations, hashes)
    return [turns for turns, digest in pairs if (digest in val) == (split == "val")]


class Conversations(list):
    """Conversations packed into rows (3, T): inputs, targets, and the number of the conversation.

    Attention is masked between the conversations of a row. Targets are -1, which the loss ignores,
    for everything except answers, including padding. Conversations longer than a row are cut.
    Mixture of Depths still picks its k tokens from the whole row, across conversations.
    """

    def __init__(self, source, split, encoding, T):
        super().__init__()
        self.T = T
        self.kept, self.cut, self.dropped = 0, 0, 0
        room = 0  # free tokens in the last row
        for turns in split_conversations(source, split):
            ids, is_answer = encode(turns, encoding)
            x = ids[:-1][:T]
            y = [i if answer else -1 for i, answer in zip(ids, is_answer)][1 : T + 1]
            if max(y) < 0:  # the answer begins after the cut
                self.dropped += 1
                continue
            self.kept += 1
            self.cut += len(ids) > T + 1
            if len(x) > room:
                self.append(np.stack([np.zeros(T, int), np.full(T, -1), np.zeros(T, int)]))
                room = T
            row = self[-1]
            row[:, T - room : T - room + len(x)] = x, y, [row[2].max() + 1] * len(x)
            room -= len(x)
        if not self:
            raise SystemExit(f"{source}: no answer for {split} begins within block_size={T} tokens")
        self.sha256 = hashlib.sha256(np.stack(self).tobytes()).hexdigest()


def shares_of(batches, world):
    """Weights of the micro-batches' mean losses, (micro-steps,), by their number of answer tokens.

    With gradients averaged over ranks, they give the mean over all answer tokens of the step.
    """
    counts = torch.stack([(y >= 0).sum() for _, y, _ in batches]).float()
    total = counts.sum()
    if world > 1:
        torch.distributed.all_reduce(total)
    return counts * world / total


def main(path, to):
    """Write a checkpoint with its adapters merged, for --init_from."""
    checkpoint.prepare_folder(to)
    state, model = checkpoint.load_model(path)
    if state.get("lora") is None:
        raise SystemExit(f"{path} has no adapters to merge")
    checkpoint.save_start(to, state, model)
    print(f"{to}: the model with its adapters merged")


if __name__ == "__main__":
    usage(__doc__, sys.argv, len(sys.argv) == 3)
    main(*sys.argv[1:])
