"""
Causal attention with rotary positions (Su et al. 2021, arXiv 2104.09864) and grouped queries, where
several query heads share one key and value head (Ainslie et al. 2023, arXiv 2305.13245).

    position t rotates the pair (x_i, x_{i+D/2}) of q and k by the angle t rope_base^(-2i/D)    (1)
    y = softmax(q k^T / sqrt(D)) v, over the keys that the mask allows                          (2)
    v = W_V h + gate E'[token] in every second block, as value_embeds asks                      (3)
    rope_scaling slows the angles of (1), for contexts longer than in training:
    (c,)              every angle is divided by c                                               (4)
    (c, lo, hi, L)    as in Llama 3: in L positions, an angle of less than lo turns is divided
                      by c, one of more than hi turns is kept, and others are interpolated      (5)

Mixture of Depths computes some of the queries only (mod.py). On CUDA these return to their places
for the scores: causal attention over all T, without a mask, takes less time than the scores of some
queries with one. Decoding reads keys and values from a cache (generate.py). Fine-tuning packs
several documents into a row and masks between them.

Differs from the papers: (1) pairs feature i with i + D/2, where Su et al. pair neighbours.

Sizes in comments: B batch, T time, C n_embd, H n_head, G n_kv_head, D head width, L cache length.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import norms
from norms import RMSNorm

FLASH = ("cuda",)  # devices whose attention without a mask is much faster than with one


def head_width(config):
    return config.head_dim or config.n_embd // config.n_head


def scaled(freq, rope_scaling):
    """Eq. 4 or 5: the angles per position, freq (D/2,), for a longer context."""
    if len(rope_scaling) == 1:
        return freq / rope_scaling[0]  # Eq. 4
    factor, low, high, length = rope_scaling
    turns = length * freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * freq + (1 - keep) * freq / factor  # Eq. 5


def rotary_table(config):
    """cos and sin of the angles of Eq. 1, (block_size, D/2) each, in float32."""
    half = head_width(config) // 2
    freq = config.rope_base ** (-torch.arange(half).float() / half)
    if config.rope_scaling is not None:
        freq = scaled(freq, config.rope_scaling)
    angle = torch.arange(config.block_size).float()[:, None] * freq
    return angle.cos(), angle.sin()


def rotary(x, rope):
    """Eq. 1 for x (B, heads, T, D), with rope = (cos, sin) of shape (T, D/2)."""
    cos, sin = rope
    a, b = norms.upcast(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def select(x, index):
    """y[b, i] = x[b, index[b, i]], or 0 where the index is -1. x (B, T, ...), index (B, k)."""
    shape = (*index.shape, *x.shape[2:])
    if x.size(1) == 0:  # gather rejects indices into an empty dimension
        return x.new_zeros(shape)
    index = index.view(*index.shape, *[1] * (x.dim() - 2))  # (B, k, 1, ...)
    return x.gather(1, index.clamp(min=0).long().expand(shape)).masked_fill(index < 0, 0)


class GatherRows(torch.autograd.Function):
    """select, with a gather in the backward pass too: parallel, and deterministic on a GPU."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return select(x, index)

    @staticmethod
    def backward(ctx, grad):
        return select(grad, *ctx.saved_tensors), None, None


def gather_rows(x, rows):
    """Gather tokens: x (B, T, ...) -> (B, k, ...).

    rows is (index, inverse). index (B, k) lists the tokens to take. inverse (B, T) is the place of
    each token in that list, or -1. With the two swapped, the same call scatters k tokens back to
    (B, T, ...) and fills the other places with zeros.
    """
    return GatherRows.apply(x, *rows)


class Attention(nn.Module):
    def __init__(self, config, b=0):
        super().__init__()
        C, D = config.n_embd, head_width(config)
        both = (config.bias, config.bias)
        biases = {None: both, "none": (False, False), "qkv": (True, False), "all": (True, True)}
        bias, out_bias = biases[config.attn_bias]
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head
        self.dropout = config.dropout
        self.wq = nn.Linear(C, self.n_head * D, bias)
        self.wk = nn.Linear(C, self.n_kv_head * D, bias)
        self.wv = nn.Linear(C, self.n_kv_head * D, bias)
        self.wo = nn.Linear(self.n_head * D, C, out_bias)
        self.joint = config.qk_norm_joint
        of_q, of_k = (self.n_head * D, self.n_kv_head * D) if self.joint else (D, D)
        self.q_norm = RMSNorm(of_q, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(of_k, config.norm_eps) if config.qk_norm else nn.Identity()
        takes_values = config.value_embeds and (config.n_layer - 1 - b) % 2 == 0  # last block too
        self.value_gate = nn.Parameter(torch.empty(self.n_kv_head)) if takes_values else None
        self.softmax_scale = 1 / math.sqrt(D)

    def reset_parameters(self):
        if self.value_gate is not None:
            nn.init.ones_(self.value_gate)

    def query(self, h, rope):
        q = self.normed(self.q_norm, self.wq(h))
        return rotary(q, rope)  # (B, H, T, D)

    def key_value(self, h, rope, values=None):
        k = rotary(self.normed(self.k_norm, self.wk(h)), rope)
        v = self.heads(self.wv(h))
        if values is not None:
            v = (v + self.value_gate[:, None, None] * self.heads(values)).to(v.dtype)  # Eq. 3
        return k, v  # (B, G, T, D) each

    def normed(self, norm, x):
        return self.heads(norm(x)) if self.joint else norm(self.heads(x))

    def heads(self, x):
        return x.unflatten(-1, (-1, self.wq.out_features // self.n_head)).transpose(1, 2)

    def forward(self, h, rope, docs=None, cache=None, rows=None, values=None):
        """h (B, T, C) -> (B, T, C), or (B, k, C) for the k queries that rows names (gather_rows).

        docs (B, T) numbers the documents of a row; a token attends only within its document.
        cache is (keys, values, positions, filled): (B, G, L, D) twice, the T positions to fill, and
        whether that fills the keys to their end: a single token then sees all and needs no mask.
        """
        k, v = self.key_value(h, rope, values)
        T, filled = h.size(1), True
        if cache is None:
            at = torch.arange(T, device=h.device)  # positions of the queries among the keys
        else:
            past_k, past_v, at, filled = cache
            k = past_k.index_copy_(2, at, k.to(past_k.dtype))
            v = past_v.index_copy_(2, at, v.to(past_v.dtype))
        alone = cache is None and docs is None  # each query sees all earlier tokens of its row
        in_place = rows is not None and alone and h.device.type in FLASH
        sees_all = filled and T == 1
        causal = filled and k.size(2) == T and docs is None and (rows is None or in_place)
        query_docs = docs
        if rows is not None:
            h = gather_rows(h, rows)
            at = at[rows[0]]
            rope = tuple(table[rows[0]][:, None] for table in rope)
            query_docs = None if docs is None else gather_rows(docs, rows)
        mask = None
        if not (causal or sees_all):
            mask = torch.arange(k.size(2), device=k.device) <= at[..., None]  # (T, L) or (B, k, L)
            mask = mask if docs is None else mask & (query_docs[:, :, None] == docs[:, None, :])
            mask = mask if mask.dim() == 2 else mask[:, None]
        q = self.query(h, rope).to(k.dtype)
        if in_place:
            q = gather_rows(q.transpose(1, 2), rows[::-1]).transpose(1, 2)  # (B, H, T, D)
        groups = self.n_head // self.n_kv_head
        if mask is not None and groups > 1:  # CUDA's fast kernels with a mask take no groups
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        dropout = self.dropout * self.training
        if torch.compiler.is_compiling() and q.device.type == "cpu" and not dropout:
            in_order = cache is None and rows is None
            chunk = 128 if in_order else k.size(2)
            y = cpu_attention(q, k, v, mask, chunk, self.softmax_scale)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal,
                scale=self.softmax_scale, enable_gqa=k.size(1) != self.n_head,
            )  # fmt: skip
        y = y.transpose(1, 2).flatten(2)
        return self.wo(gather_rows(y, rows) if in_place else y)


def cpu_attention(q, k, v, mask, chunk, scale):
    """Eq. 2 in plain operations that the compiler can fuse: twice as fast as SDPA on a CPU.

    q (B, H, n, D), k and v (B, G, T, D) -> (B, H, n, D). A mask of None means causal, with queries
    for the last n tokens. If n = T, queries run in chunks, and a chunk skips the keys after its
    last query. The bounds are rounded, because whole tiles save more time than the extra scores
    cost. With a mixture of depths, n changes in training, so no bound is computed from n.
    """
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    n, T, out = q.size(2), k.size(2), []
    at = torch.arange(T, device=q.device)
    chunks = -(-T // chunk)
    cuts = [i * T // chunks // 16 * 16 for i in range(chunks)] + [T]
    parts = [(start, end, T - (T - end) // 32 * 32) for start, end in zip(cuts, cuts[1:])]
    for start, end, keys in parts if n == T else [(0, n, T)]:
        causal = at[:keys] <= at[start:end, None] + (T - n)
        seen = causal if mask is None else mask[..., start:end, :keys]
        bias = torch.where(seen, 0.0, -math.inf)  # kernels that read booleans are slow
        scores = norms.upcast(q[:, :, start:end] @ k[:, :, :keys].mT) * scale + bias
        out.append(scores.softmax(-1).to(q.dtype) @ v[:, :, :keys])
    return torch.cat(out, 2)
