"""
From a model, text: one token after the other, with keys and values kept. Any mode, dense or with experts, whether
tokens may skip or not: the forward is the one of model.py.
"""

import math
import sys

import torch

import bhyt
import nag

FOLDS = {
    "nag": nag.fold,
    "bhyt": bhyt.fold,
    "bhyt_exact": bhyt.fold,
}  # what a mode can work out before the first token


class KVCache:
    """Keys and values of every layer, at their full length from the start, so that no shape ever changes; how much of
    it is filled is a tensor, so that a compiled step knows no number that moves."""

    def __init__(self, model, batch, length):
        config, w = model.config, model.embed.weight
        autocast = torch.is_autocast_enabled(w.device.type)
        dtype = torch.get_autocast_dtype(w.device.type) if autocast else w.dtype
        shape = (batch, config.n_kv_head or config.n_head, length, config.n_embd // config.n_head)
        self.kv = [
            [torch.zeros(shape, dtype=dtype, device=w.device) for _ in "kv"]
            for _ in range(config.n_layer)
        ]
        self.at = torch.zeros((), dtype=torch.int64, device=w.device)
        for tensor in (
            self.at,
            *sum(self.kv, []),
        ):  # CUDA graphs write to what never moves, or not at all
            torch._dynamo.mark_static_address(tensor)


def sample(logits, temperature, top_k, top_p):
    """One id for each row of logits (B, V): (B, 1)"""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and top_p <= 0):
        raise ValueError(
            f"{temperature=}, {top_k=}, {top_p=}: temperature is at least 0, top_k at least 1, top_p above 0"
        )
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None:
        order = logits.argsort(descending=True)
        p = logits.softmax(-1).gather(-1, order)
        out = p.cumsum(-1) - p >= top_p  # the likeliest always stays
        logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -math.inf)
    return torch.multinomial(logits.softmax(-1), 1)


def next_token(model, new, cache, temperature, top_k, top_p, n_vocab):
    return sample(
        model(new, cache=cache, last=True)[0][:, -1, :n_vocab].float(), temperature, top_k, top_p
    )


def compiled_step(device):
    """next_token as one graph for the step of one token. On CUDA a CUDA graph, so that a step is one launch. On a CPU
    with products of a single row as sums of the compiler's, which read bfloat16 weights twice as fast as the library"""
    how = {"mode": "reduce-overhead"} if device.type == "cuda" else {}
    if device.type == "cpu":
        from torch._inductor.fx_passes import decompose_mem_bound_mm

        decompose_mem_bound_mm.cpu_max_other_dimension_decomposition = (
            sys.maxsize
        )  # of any size, not up to 2048 alone
        how = {"options": {"post_grad_fusion_options": {"decompose_mm_pass": {}}}}
    return torch.compile(next_token, fullgraph=True, dynamic=False, **how)


CHECK = 16  # steps between looks at whether every row has met the stop token, each of which waits for the device


@torch.no_grad()
def stream_tokens(
    model,
    idx,
    max_new_tokens,
    temperature=1.0,
    top_k=None,
    top_p=None,
    stop=None,
    n_vocab=None,
    compile=False,
):
    """Yield the next token of each row, (B, 1), max_new_tokens times, or less if every row has met the stop token: what
    comes behind a row's is that token again, CHECK times at most. temperature 0 is greedy; n_vocab: how many ids the
    tokenizer has, where the model's vocabulary is padded; compile: the step of one token, as one graph.
    When the window is full, the newest half of it is read again and generation goes on from there."""
    size, how = model.config.block_size, (temperature, top_k, top_p, n_vocab)
    step = compiled_step(idx.device) if compile else next_token
    cache = KVCache(model, idx.size(0), min(size, idx.size(1) + max_new_tokens))
    text, new, filled, done = (
        [idx],
        idx[:, -size:],
        0,
        torch.zeros_like(idx[:, :1], dtype=torch.bool),
    )
    for i in range(1, max_new_tokens + 1):
        if filled + new.size(1) > size:
            text, filled = [torch.cat(text, dim=1)[:, -max(1, size // 2) :]], 0
            new = text[0]
            cache.at.zero_()
        filled += new.size(1)
        new = (step if new.size(1) == 1 else next_token)(
            model, new, cache, *how
        ).clone()  # a graph reuses its output
        if stop is not None:
            new = new.masked_fill(done, stop)
            done = done | (new == stop)
        text.append(new)
        yield new
        if stop is not None and i % CHECK == 0 and done.all():
            return


def generate(model, idx, max_new_tokens, stop=None, **how):
    """The prompt with what stream_tokens yields behind it, (B, T + at most max_new_tokens)"""
    text = torch.cat((idx, *stream_tokens(model, idx, max_new_tokens, stop=stop, **how)), dim=1)
    if stop is None:
        return text
    before = (text[:, idx.size(1) :] == stop).cumsum(
        1
    ) == 0  # the tokens before each row's first stop
    return text[:, : idx.size(1) + 1 + int(before.sum(1).max())]
