"""
The additive family: how a sublayer F reads the residual stream x and writes its output back.

    none       x <- Norm(F(x))                           an ablation: no skip                    (1)
    postnorm   x <- Norm(x + F(x))                       Vaswani et al. 2017, arXiv 1706.03762   (2)
    prenorm    x <- x + F(Norm(x))                       the baseline                            (3)
    perinorm   x <- x + Norm_out(F(Norm_in(x)))          Kim et al. 2025, arXiv 2502.02732       (4)
    lns        x <- x + F(Norm(x) / sqrt(b + 1))         Sun et al. 2025, arXiv 2502.05795       (5)
    dyt        x <- x + F(gamma tanh(alpha x) + beta)    Zhu et al. 2025, arXiv 2503.10622       (6)

b is the 0-based block. Each mode has two small modules. The residual, one per sublayer, has read
and write. The ends, one per model, turn the token embedding into a stream and the last stream into
the hidden states that the head multiplies.

Differs from the papers:
- Norms compute their statistics in float32, whatever the dtype of the stream.
- DyT always has its beta, as in its release. The setting `bias` does not remove it.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Stream(NamedTuple):
    x: Tensor  # (B, T, C) the residual; (B, T, n C) for n streams
    lane: Tensor | None = None  # (B, T, k) extra state of the mode: NAG's log norm in float32
    at: Tensor | None = None  # (T, 1) positions of the tokens
    sources: tuple = ()  # of Attention Residuals: earlier (B, T, C) with their masks, streams.py


def pick(table, name, setting):
    """Look up table[name]. An unknown name raises an error that lists the known ones."""
    if name not in table:
        raise ValueError(f"{setting}={name!r}: choose one of {', '.join(map(str, table))}")
    return table[name]


def refuse(config, residual, **only):
    """Raise if a setting that this mode ignores differs from the only value it may have."""
    for setting, value in only.items():
        if getattr(config, setting) != value:
            raise ValueError(f"residual={residual!r} does not use {setting}: leave it at {value!r}")


def gathered(x):
    """The full tensor if FSDP has sharded x, else x. Every rank must call this function."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def upcast(x):
    """Cast x to the dtype of its statistics: float64 if x is float64, else float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ------------------------------------------------------------------------------------------------
# Norms


class RMSNorm(nn.Module):
    """y = gain * x / sqrt(v + eps). v is mean(x^2) unless the caller passes an estimate of it."""

    def __init__(self, n_embd, eps=1e-6, bias=False):  # bias is for LayerNorm and ignored here
        super().__init__()
        self.gain = nn.Parameter(torch.empty(n_embd))
        self.eps = eps

    def reset_parameters(self):
        nn.init.ones_(self.gain)

    def forward(self, x, v=None):
        x_float = upcast(x)
        v = x_float.square().mean(-1, keepdim=True) if v is None else v
        return (x_float * torch.rsqrt(v + self.eps) * self.gain).to(x.dtype)


class LayerNorm(nn.Module):
    """y = gain * (x - mean(x)) / sqrt(var(x) + eps) + shift"""

    def __init__(self, n_embd, eps=1e-6, bias=False):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(n_embd))
        self.shift = nn.Parameter(torch.empty(n_embd)) if bias else None
        self.eps = eps

    def reset_parameters(self):
        nn.init.ones_(self.gain)
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, x):
        x_float = upcast(x)
        centred = x_float - x_float.mean(-1, keepdim=True)
        v = centred.square().mean(-1, keepdim=True)
        y = centred * torch.rsqrt(v + self.eps) * self.gain
        return (y if self.shift is None else y + self.shift).to(x.dtype)


class DyT(nn.Module):
    """y = gain * tanh(alpha x) + shift, with a learned scalar alpha: the inner part of Eq. 6"""

    def __init__(self, n_embd, alpha):
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(1))
        self.gain = nn.Parameter(torch.empty(n_embd))
        self.shift = nn.Parameter(torch.empty(n_embd))
        self.start = alpha

    def reset_parameters(self):
        nn.init.constant_(self.alpha, self.start)
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.shift)

    def forward(self, x):
        return (self.gain * torch.tanh(self.alpha * upcast(x)) + self.shift).to(x.dtype)


NORMS = {"rms": RMSNorm, "layer": LayerNorm, "none": nn.Identity}


def make_norm(config):
    return pick(NORMS, config.norm, "norm")(config.n_embd, config.norm_eps, config.bias)


# ------------------------------------------------------------------------------------------------
# Ends: embedding -> first stream, last stream -> hidden states for the head


class NoEnds(nn.Module):
    """The first stream is the embedding, and the head reads the last stream unchanged."""

    def __init__(self, config):
        super().__init__()

    def embed(self, e):
        return Stream(e)

    def readout(self, stream, head):  # head (V, C) is an argument because NAG normalises its rows
        return stream.x, head

    def additive(self, stream):
        """(B, T, C) in float32: what the final norm would read if the model ended here."""
        return upcast(stream.x)


class FinalNorm(NoEnds):
    def __init__(self, config):
        super().__init__(config)
        self.norm = make_norm(config)

    def readout(self, stream, head):
        return self.norm(stream.x), head


class PeriEnds(FinalNorm):
    def __init__(self, config):
        super().__init__(config)
        self.norm_in = make_norm(config)

    def embed(self, e):
        return Stream(self.norm_in(e))


class DyTEnds(NoEnds):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(1))
        self.norm = DyT(config.n_embd, config.dyt_alpha[2])

    def reset_parameters(self):
        nn.init.constant_(self.scale, math.sqrt(self.norm.gain.numel()))

    def embed(self, e):
        return Stream(self.scale.to(e.dtype) * e)

    def readout(self, stream, head):
        return self.norm(stream.x), head


# ------------------------------------------------------------------------------------------------
# Residuals. `layer` is the 1-based sublayer: 2b + 1 for the attention of block b, 2b + 2 its MLP


class PreNorm(nn.Module):
    settings = ()  # fields of GPTConfig that belong to this mode; other modes refuse them
    ends = FinalNorm
    init_out = "scaled"  # initialisation of the output projections if the setting init_out is None

    def __init__(self, config, layer):
        super().__init__()
        self.norm = make_norm(config)

    def read(self, stream):  # -> (sublayer input, stream)
        return self.norm(stream.x), stream

    def write(self, stream, f, gate=1.0):  # gate: a number or a tensor (B, T, 1) that multiplies f
        return stream._replace(x=stream.x + gate * f)  # Eq. 3


class PostNorm(PreNorm):
    ends = NoEnds
    init_out = "plain"

    def read(self, stream):
        return stream.x, stream

    def write(self, stream, f, gate=1.0):
        return stream._replace(x=self.norm(stream.x + gate * f))  # Eq. 2


class NoSkip(PostNorm):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, "none", branch_scale="one")  # there is no skip to scale the branch against

    def write(self, stream, f, gate=1.0):
        return stream._replace(x=(gate * self.norm(f)).to(stream.x.dtype))  # Eq. 1


class PeriNorm(PreNorm):
    ends = PeriEnds
    init_out = "plain"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.norm_out = make_norm(config)

    def write(self, stream, f, gate=1.0):
        return stream._replace(x=stream.x + gate * self.norm_out(f))  # Eq. 4


class LNS(PreNorm):
    init_out = "plain"  # the authors report that scaled output projections weaken LNS

    def __init__(self, config, layer):
        super().__init__(config, layer)
        # b + 1 is a tensor, not a number, so that one compiled block serves every depth
        self.register_buffer("depth", torch.tensor((layer + 1) // 2.0), persistent=False)

    def read(self, stream):
        h = self.norm(stream.x)
        return h * torch.rsqrt(self.depth).to(h.dtype), stream  # Eq. 5


class DyTResidual(PreNorm):
    settings = ("dyt_alpha",)
    ends = DyTEnds

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, "dyt", norm="rms")
        self.norm = DyT(config.n_embd, config.dyt_alpha[(layer - 1) % 2])  # Eq. 6


RESIDUALS = {
    "none": NoSkip,
    "postnorm": PostNorm,
    "prenorm": PreNorm,
    "perinorm": PeriNorm,
    "lns": LNS,
    "dyt": DyTResidual,
}
