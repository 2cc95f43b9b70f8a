"""
Causal attention: rotary positions (Su et al. 2021, arXiv 2104.09864), keys and values shared by groups of query heads
(Ainslie et al. 2023, arXiv 2305.13245). Queries may be those of some tokens only (Mixture of Depths), keys those of a
cache that is filled in place (generate.py), and documents packed into one row do not see each other (fine-tuning).

Names of tensors in comments: B batch, T time, C n_embd, H n_head, G n_kv_head, D = C / H, L length of the cache.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import norms
from norms import RMSNorm


def rotary_table(config, device):
    """cos and sin of position times frequency, (block_size, D/2) each, in float32"""
    half = config.n_embd // config.n_head // 2
    freq = config.rope_base ** (-torch.arange(half, device=device).float() / half)
    angle = torch.arange(config.block_size, device=device).float()[:, None] * freq
    return angle.cos(), angle.sin()


def rotary(x, rope):
    """Rotate each pair (x_i, x_{i+D/2}) by its angle."""
    cos, sin = rope  # (T, D/2)
    a, b = norms.upcast(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def select(x, index):
    """y[b, i] = x[b, index[b, i]], or 0 where the index is -1. x (B, T, ...), index (B, k)."""
    if x.size(1) == 0:  # no token runs
        return x.new_zeros(*index.shape, *x.shape[2:])
    wide = index.view(*index.shape, *[1] * (x.dim() - 2))
    return x.gather(1, wide.clamp(min=0).expand(*index.shape, *x.shape[2:])).masked_fill(
        wide < 0, 0
    )


class GatherRows(torch.autograd.Function):
    """select, whose backward is a gather too: parallel, and deterministic on a GPU."""

    @staticmethod
    def forward(ctx, x, index, inverse):
        ctx.save_for_backward(inverse)
        return select(x, index)

    @staticmethod
    def backward(ctx, grad):
        return select(grad, *ctx.saved_tensors), None, None


def gather_rows(x, rows):
    """Gather tokens: x (B, T, ...) -> (B, k, ...).

    rows: (index (B, k) of the tokens to take, inverse (B, T): the place of each token among them, or -1).
    With the two swapped it scatters them back to (B, T, ...), with zeros for the others.
    """
    return GatherRows.apply(x, *rows)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, D, bias = config.n_embd, config.n_embd // config.n_head, config.bias
        self.n_head, self.n_kv_head, self.dropout = (
            config.n_head,
            config.n_kv_head or config.n_head,
            config.dropout,
        )
        self.wq = nn.Linear(C, self.n_head * D, bias)
        self.wk = nn.Linear(C, self.n_kv_head * D, bias)
        self.wv = nn.Linear(C, self.n_kv_head * D, bias)
        self.wo = nn.Linear(self.n_head * D, C, bias)
        self.q_norm, self.k_norm = (
            RMSNorm(D, config.norm_eps) if config.qk_norm else nn.Identity() for _ in "qk"
        )

    def query(self, h, rope):
        return rotary(self.q_norm(self.heads(self.wq(h))), rope)  # (B, H, T, D)

    def key_value(self, h, rope):
        return rotary(self.k_norm(self.heads(self.wk(h))), rope), self.heads(
            self.wv(h)
        )  # (B, G, T, D) each

    def heads(self, x):
        return x.unflatten(-1, (-1, self.wq.out_features // self.n_head)).transpose(1, 2)

    def forward(self, h, rope, docs=None, cache=None, rows=None):
        """docs (B, T): a token attends only to tokens with its number. rows: the queries to compute, see gather_rows."""
        k, v = self.key_value(h, rope)
        at = torch.arange(h.size(1), device=h.device)  # positions of the queries among the keys
        if cache is not None:
            past_k, past_v, at = (
                cache  # (B, G, L, D) twice, and the T positions that are being filled
            )
            k, v = (
                past_k.index_copy_(2, at, k.to(past_k.dtype)),
                past_v.index_copy_(2, at, v.to(past_v.dtype)),
            )
        query_docs, mask = docs, None
        if rows is not None:
            h, at, rope = (
                gather_rows(h, rows),
                at[rows[0]],
                tuple(table[rows[0]][:, None] for table in rope),
            )
            query_docs = None if docs is None else gather_rows(docs, rows)
        if not (cache is None and rows is None and docs is None):
            mask = torch.arange(k.size(2), device=k.device) <= at[..., None]  # (T, L) or (B, k, L)
            mask = mask if docs is None else mask & (query_docs[:, :, None] == docs[:, None, :])
            mask = mask if mask.dim() == 2 else mask[:, None]
        q, dropout = self.query(h, rope).to(k.dtype), self.dropout * self.training
        if torch.compiler.is_compiling() and q.device.type == "cpu" and not dropout:
            y = cpu_attention(q, k, v, mask, 128 if cache is None else k.size(2))
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None,
                enable_gqa=self.n_kv_head != self.n_head,
            )  # fmt: skip
        return self.wo(y.transpose(1, 2).flatten(2))  # (B, T, C)


def cpu_attention(q, k, v, mask, chunk):
    """scaled_dot_product_attention, causal or with a mask that is, for the compiler to make kernels of, in half the
    time of the library's on a CPU: a chunk of queries after the other, so that most of what is hidden is not computed.
    The n queries are those of n of the T tokens, in order, so that the first j of them see at most T - n + j keys.
    Products of whole tiles are faster by more than what they compute in vain: hence the rounding to 16 and 32."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    n, T, out = q.size(2), k.size(2), []
    chunks, at = (
        -(-T // chunk),
        torch.arange(T, device=q.device),
    )  # as many whatever n is, for n moves and T does not
    cuts = [i * n // chunks // 16 * 16 for i in range(chunks)] + [n]
    for start, end in zip(cuts, cuts[1:]):
        keys = torch.sym_min(T, -(-(T - n + end) // 32) * 32)
        seen = at[:keys] <= at[start:end, None] if mask is None else mask[..., start:end, :keys]
        scores = norms.upcast(q[:, :, start:end] @ k[:, :, :keys].mT) * q.size(3) ** -0.5
        out.append(scores.masked_fill(~seen, -math.inf).softmax(-1).to(q.dtype) @ v[:, :, :keys])
    return torch.cat(out, 2)
