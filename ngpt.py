"""
nGPT, the normalised transformer: the stream and the matrices live on the unit sphere
(Loshchilov et al. 2024, arXiv 2410.01131).

unit(x) = x / |x|. d is n_embd, D is the width of a head. The product of two vectors is by element.

    weights    unit rows: embeddings, head, W_q, W_k, W_v, W_up, W_gate, whose input is the stream
               unit columns: W_o, W_down, whose output is the stream
               restored after every optimizer step, and once at the start                       (1)
               (so init_scale, embed_scale and head_scale have no effect on them)
    sublayer   h <- unit(g + |alpha| (unit(F(h)) - g)) with g = unit(h), alpha (d,)             (2)
    attention  q <- s_qk unit(q) and k <- s_qk unit(k) for each head, after the rotation,
               and softmax(sqrt(D) q k^T) v                                                     (3)
    MLP        u <- sqrt(d) s_u u for u = W_up h, v <- sqrt(d) s_v v for v = W_gate h,
               and then W_down(u silu(v)), or W_down(act(u)) where there is no gate             (4)
    read out   logit_v = (s_z)_v <h, w_v>                                                       (5)

h is a unit vector, so g equals h up to rounding and dropout. As in the release, (2) still divides
by |h|. Without smear this changes the gradient of the embedding, whose rows then enter the stream
as they are.

Adam's steps have the size of the learning rate, so a parameter's size sets how fast it can change.
alpha, s_qk and s_z are stored near 1 / sqrt(d), the size of a matrix entry, and used as

    alpha = ALPHA sqrt(d) alpha^,  s_qk = sqrt(d) s_qk^,  s_z = sqrt(d) s_z^                    (6)
    where alpha^, s_qk^ and s_z^ start at 1 / sqrt(d); s_u and s_v start at 1

A step of Adam thus changes s_z by about sqrt(d) times the learning rate, and logits start in
[-1, 1]. In short runs this limits the loss; a higher gate_lr, the rate of s_z and alpha, helps.

No norm of the stream has a gain. By default there is no weight decay or warm-up, and the head has
its own matrix; config/plain.py sets all three. The gate of mod.py and branch_scale multiply alpha,
because (2) would remove them from F. "The stream" of depth.py is h, of norm 1. Biases and the
routers of mod.py and moe.py are not on the sphere. Experts share one s_u and s_v; a shared expert
has its own.

Adapters (lora.py): (1) skips frozen weights and the adapters. A merged matrix is off the sphere and
is used as it is; training that goes on from it restores (1) after the first step.

Differs from the paper and its release:
- (3) rotates as attention.py does. The released rotary embedding is not a rotation. s_qk comes
  after the rotation, as in the release: where it differs within a rotated pair of features, scores
  depend on the absolute positions too.
- With qk_norm, the default of model.py, q and k pass an RMSNorm with a gain before the rotation.
- The value embeddings of model.py, which the paper does not have, get unit rows as well.
- With grouped queries, query heads and key heads have an s_qk each; the paper has no such heads.
- (4) has sqrt(d) on u too, as in the release; the paper has it on v only.
- ALPHA is 0.05 at any depth, as in the release; the paper's text has 1 / n_layer.
- With the smear of model.py, which adds rows of the embedding, the first stream is unit(e).
- unit(x) divides by 1e-6 where |x| is smaller. Statistics are float32.
"""

import math

import torch
from torch import nn

from attention import Attention, head_width
from norms import NoEnds, PreNorm, Stream, mlps, refuse, upcast, weight_of

ALPHA = 0.05  # the first step from the stream towards a sublayer's output


def unit(x):
    """x / |x| along the last dimension, in the dtype of x"""
    x_float = upcast(x)
    square = x_float.square().sum(-1, keepdim=True)
    return (x_float * torch.rsqrt(square.clamp(min=1e-12))).to(x.dtype)


class UnitHeads(nn.Module):
    """Eq. 3 for the queries or keys x (B, heads, T, D)"""

    def __init__(self, heads, config):
        super().__init__()
        D = head_width(config)
        self.s = nn.Parameter(torch.empty(heads * D))
        self.heads, self.root = heads, math.sqrt(config.n_embd)

    def reset_parameters(self):
        nn.init.constant_(self.s, 1 / self.root)

    def forward(self, x):
        s = self.root * self.s.view(self.heads, 1, -1)  # (heads, 1, D)
        return (s * unit(upcast(x))).to(x.dtype)


class UnitAttention(Attention):
    """Attention with Eq. 3"""

    def __init__(self, config, b):
        super().__init__(config, b)
        self.q_scale = self.k_scale = UnitHeads(self.n_head, config)
        if self.n_kv_head != self.n_head:
            self.k_scale = UnitHeads(self.n_kv_head, config)
        self.softmax_scale = math.sqrt(head_width(config))

    def query(self, h, rope):
        return self.q_scale(super().query(h, rope))

    def key_value(self, h, rope, values=None):
        k, v = super().key_value(h, rope, values)
        return self.k_scale(k), v


class ScaledActivation(nn.Module):
    """Eq. 4, in the place of the activation of an MLP: z is v if there is a gate, else u."""

    def __init__(self, mlp, config):
        super().__init__()
        hidden = weight_of(mlp.up).size(-2)
        self.act, self.root = mlp.act, math.sqrt(config.n_embd)
        self.s_u = nn.Parameter(torch.empty(hidden))
        self.s_v = None if mlp.gate is None else nn.Parameter(torch.empty(hidden))

    def reset_parameters(self):
        nn.init.ones_(self.s_u)
        if self.s_v is not None:
            nn.init.ones_(self.s_v)

    def forward(self, z):
        if self.s_v is None:
            return self.act((self.root * self.s_u * z).to(z.dtype))
        inner = self.act((self.root * self.s_v * z).to(z.dtype))
        return (self.root * self.s_u * inner).to(z.dtype)  # the MLP multiplies this by u


class NGPTEnds(NoEnds):
    def __init__(self, config):
        super().__init__(config)
        # Eqs. 1 and 2 remove any scale, and Eq. 3 that of the norm of queries and keys
        refuse(config, norm="rms", norm_eps=1e-6, init_out=None)
        self.s_z = nn.Parameter(torch.empty(config.vocab_size))
        self.root = math.sqrt(config.n_embd)
        self.smeared = config.smear > 0

    def reset_parameters(self):
        nn.init.constant_(self.s_z, 1 / self.root)

    def embed(self, e):
        return Stream(unit(upcast(e)).to(e.dtype) if self.smeared else e)

    def readout(self, stream, head):
        return stream.x, self.root * self.s_z[:, None] * head  # Eq. 5

    @torch.no_grad()
    def after_step(self, model):
        """Eq. 1, in place. A sharded weight is a DTensor, which sums its columns over all ranks."""
        rows, columns = [model.embed, *model.value_embeds.values()], []  # that have norm 1
        if not model.config.tied:
            rows.append(model.head)
        for block in model.blocks:
            attn = block.attn
            rows += [attn.wq, attn.wk, attn.wv]
            columns += [attn.wo]
            for mlp in mlps(block):
                rows += [mlp.up] if mlp.gate is None else [mlp.up, mlp.gate]
                columns += [mlp.down]
        for layers, axis in ((rows, -1), (columns, -2)):
            for weight in map(weight_of, layers):
                if weight.requires_grad:
                    length = torch.linalg.vector_norm(weight, dim=axis, keepdim=True)
                    weight.div_(length.clamp(min=1e-6))


class NGPT(PreNorm):
    ends = NGPTEnds
    init_out = "plain"
    attention = UnitAttention
    rescales = True
    warmup_iters = 0

    def __init__(self, config, layer):
        nn.Module.__init__(self)  # without PreNorm's norm
        self.alpha = nn.Parameter(torch.empty(config.n_embd))
        self.root = math.sqrt(config.n_embd)
        self.factor = ALPHA * self.root

    def reset_parameters(self):
        nn.init.constant_(self.alpha, 1 / self.root)

    @staticmethod
    def equip(block, config):
        """Give the MLPs of a block the scales of Eq. 4."""
        for mlp in mlps(block):
            mlp.act = ScaledActivation(mlp, config)

    def read(self, stream):
        return stream.x, stream

    def write(self, stream, f, gate=1.0):
        g, f = unit(upcast(stream.x)), unit(upcast(f))
        alpha = gate * self.factor * self.alpha.abs()  # Eq. 6
        return stream.replace(x=unit(g + alpha * (f - g)).to(stream.x.dtype))  # Eq. 2


RESIDUALS = {"ngpt": NGPT}
