"""
Generate text token by token with a KV cache. It uses the forward of model.py, so every residual
mode works, with or without experts and Mixture of Depths.
"""

import math
import sys
from contextlib import contextmanager

import torch

from attention import head_width


class KVCache:
    """Keys and values of every layer, allocated at full length.

    kv: n_layer pairs (B, G, length, D). at: the number of filled positions. Eager code attends to
    these only. static is for a compiled step, which would recompile for every new Python number:
    at is then a tensor, and a step reads all positions under a mask, so that shapes never change.
    """

    def __init__(self, model, batch, length, static=False):
        config, w = model.config, model.embed.weight
        autocast = torch.is_autocast_enabled(w.device.type)
        dtype = torch.get_autocast_dtype(w.device.type) if autocast else w.dtype
        shape = (batch, config.n_kv_head or config.n_head, length, head_width(config))
        self.kv = [
            [torch.zeros(shape, dtype=dtype, device=w.device) for _ in "kv"]
            for _ in range(config.n_layer)
        ]
        self.ids = torch.full((batch, config.smear + length), config.vocab_size, device=w.device)
        self.at, self.static = 0, static
        if static:
            self.at = torch.zeros((), dtype=torch.int64, device=w.device)
            for tensor in (self.at, self.ids, *sum(self.kv, [])):  # CUDA graphs: fixed addresses
                torch._dynamo.mark_static_address(tensor)

    def layer(self, b, positions):
        """Keys, values, positions to fill, and whether these end the keys, for Attention."""
        if self.static:
            return (*self.kv[b], positions, False)
        end = self.at + len(positions)
        return (*[tensor[:, :, :end] for tensor in self.kv[b]], positions, True)

    def rewind(self, at=0):
        """Keep the first `at` positions."""
        self.at = self.at.fill_(at) if self.static else at


def sample(logits, temperature, top_k, top_p):
    """Sample one id per row: (B, V) -> (B, 1)."""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and top_p <= 0):
        raise ValueError(f"{temperature=} is below 0, {top_k=} below 1 or {top_p=} not above 0")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None:
        order = logits.argsort(descending=True)
        p = logits.softmax(-1).gather(-1, order)
        removed = p.cumsum(-1) - p >= top_p  # never the likeliest token
        removed = torch.zeros_like(removed).scatter(-1, order, removed)
        logits = logits.masked_fill(removed, -math.inf)
    waits = torch.empty_like(logits).exponential_()
    return (logits.softmax(-1) / waits).argmax(-1, keepdim=True)  # the first event of a race


def next_token(model, new, cache, temperature, top_k, top_p, n_vocab):
    logits = model(new, cache=cache, last=True)[0][:, -1, :n_vocab].float()
    return sample(logits, temperature, top_k, top_p)


def compiled_step(device):
    """next_token compiled as one graph, for one new token per row and a static cache.

    On CUDA it is a CUDA graph: one launch per step. On a CPU, the compiler turns products with a
    single row into reductions, which read bfloat16 weights twice as fast as the library does.
    The first call checks everything that the graph depends on. Later calls do not, because a
    stream changes none of it and the checks take longer than the graph of a small model.
    """
    options = {"mode": "reduce-overhead"} if device.type == "cuda" else {}
    if device.type == "cpu":
        from torch._inductor.fx_passes import decompose_mem_bound_mm

        # the default limits the size of the matrix
        decompose_mem_bound_mm.cpu_max_other_dimension_decomposition = sys.maxsize
        fusions = {"post_grad_fusion_options": {"decompose_mm_pass": {}}}
        options = {"options": {**fusions, "size_asserts": False}}  # a sixth of a small model's step
    compiled = torch.compile(next_token, fullgraph=True, dynamic=False, **options)
    checked = False

    def step(*args):
        nonlocal checked
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=checked):
            checked = True
            return compiled(*args)

    return step


SMALL = 4e6  # products of a step below which waking more CPU threads costs more than it saves


@contextmanager
def threads(count):
    """In a with block: use this number of CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.inference_mode()
def stream_tokens(
    model, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None, compile=False
):
    """Yield the next token of each row of idx (B, T), as (B, 1), up to max_new_tokens times.

    temperature: 0 is greedy. n_vocab: the number of ids the tokenizer has, if the model's
    vocabulary is padded. compile: use compiled_step. The tokens are inference tensors, which a
    training step refuses: clone them for one.
    When the context is full, its newest half becomes the new prompt.
    """
    size = model.config.block_size
    options = (temperature, top_k, top_p, n_vocab)
    step = compiled_step(idx.device) if compile else next_token
    length = min(size, idx.size(1) + max_new_tokens)
    cache = KVCache(model, idx.size(0), length, static=compile)
    params, all_threads = model.num_params(active=True), torch.get_num_threads()
    text, new, filled = [idx], idx[:, -size:], 0
    for _ in range(max_new_tokens):
        if filled + new.size(1) > size:
            new = torch.cat(text, dim=1)[:, -max(1, size // 2) :]
            text, filled = [new], 0
            cache.rewind()
        filled += new.size(1)
        run = step if new.size(1) == 1 else next_token
        with threads(1 if params * new.numel() < SMALL else all_threads):
            new = run(model, new, cache, *options).clone()  # a CUDA graph reuses its output
        text.append(new)
        yield new


def generate(model, idx, max_new_tokens, **options):
    """idx (B, T) followed by the tokens of stream_tokens."""
    return torch.cat((idx, *stream_tokens(model, idx, max_new_tokens, **options)), dim=1)
