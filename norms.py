"""
The additive family: how a sublayer F reads the residual stream x and how its output joins it.

    none       x <- Norm(F(x))                        the ablation: post-norm without the skip
    postnorm   x <- Norm(x + F(x))                    Vaswani et al. 2017
    prenorm    x <- x + F(Norm(x))                    the baseline
    perinorm   x <- x + Norm_out(F(Norm_in(x)))       Kim et al. 2025, arXiv 2502.02732
    lns        x <- x + F(Norm(x) / sqrt(b + 1))      Sun et al. 2025, arXiv 2502.05795, b = 0-based block
    dyt        x <- x + F(gamma * tanh(alpha x) + beta)   Zhu et al. 2025, arXiv 2503.10622

A mode is two small modules. The residual, one per sublayer, has read and write. The ends, one per model, turn the
token embedding into a stream and the last stream into what the head multiplies. Everything else is model.py.

Differs from the papers: DyT's optional channel-wise beta is kept, as in its release, whatever `bias` says; a norm's
statistics are always taken in float32, whatever the stream's dtype.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Stream(NamedTuple):
    x: Tensor  # (B, T, C) the residual
    lane: Tensor | None = None  # (B, T, 1) float32: what a mode carries beside it, if anything
    at: Tensor | None = None  # (T, 1) positions of the tokens


def pick(table, name, setting):
    """The entry of that name, or an error that lists the names there are."""
    if name not in table:
        raise ValueError(f"{setting}={name!r}: choose one of {', '.join(map(str, table))}")
    return table[name]


def refuse(config, residual, **only):
    """Raise where a mode would ignore a setting that somebody turned."""
    for setting, value in only.items():
        if getattr(config, setting) != value:
            raise ValueError(f"residual={residual!r} does not use {setting}: leave it at {value!r}")


def gathered(x):
    """A tensor that FSDP has cut up, whole on every rank, all of which must call this; any other as it is"""
    return x.full_tensor() if isinstance(x, DTensor) else x


def upcast(x):
    """x in the dtype of its statistics: float32, or float64 where the stream itself has it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---------------------------------------------------------------------------------------------------------------------
# Norms


class RMSNorm(nn.Module):
    """y = gain * x / sqrt(v + eps), v = mean(x^2), or what is known of it"""

    def __init__(
        self, n_embd, eps=1e-6, bias=False
    ):  # bias: LayerNorm's, ignored here as in every RMSNorm
        super().__init__()
        self.gain = nn.Parameter(torch.empty(n_embd))
        self.eps = eps

    def reset_parameters(self):
        nn.init.ones_(self.gain)

    def forward(self, x, v=None):
        w = upcast(x)
        v = w.square().mean(-1, keepdim=True) if v is None else v
        return (w * torch.rsqrt(v + self.eps) * self.gain).to(x.dtype)


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
        w = upcast(x)
        w = w - w.mean(-1, keepdim=True)
        y = w * torch.rsqrt(w.square().mean(-1, keepdim=True) + self.eps) * self.gain
        return (y if self.shift is None else y + self.shift).to(x.dtype)


class DyT(nn.Module):
    """y = gain * tanh(alpha x) + shift, alpha a learned scalar"""

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


# ---------------------------------------------------------------------------------------------------------------------
# Ends: embedding -> stream, stream -> what the head multiplies


class NoEnds(nn.Module):
    """The stream is the embedding; the head reads the stream as it is."""

    def __init__(self, config):
        super().__init__()

    def embed(self, e):
        return Stream(e)

    def readout(self, stream, head):  # head: the (V, C) weight, for modes that normalise its rows
        return stream.x, head

    def additive(self, stream):  # x as a stream that only adds would have it, to be looked at
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


# ---------------------------------------------------------------------------------------------------------------------
# Residuals: layer is the 1-based sublayer, 2b + 1 for the attention of 0-based block b, 2b + 2 for its MLP


class PreNorm(nn.Module):
    settings = ()  # fields of GPTConfig that belong to this mode; other modes refuse them
    ends = FinalNorm
    init_out = (
        "scaled"  # how the output projections start, unless the setting of that name says otherwise
    )

    def __init__(self, config, layer):
        super().__init__()
        self.norm = make_norm(config)

    def read(self, stream):  # -> what the sublayer sees, and the stream it saw it in
        return self.norm(stream.x), stream

    def write(self, stream, f, gate=1.0):  # gate: 1, the branch scale, or a tensor, per token
        return stream._replace(x=stream.x + gate * f)


class PostNorm(PreNorm):
    ends = NoEnds
    init_out = "plain"

    def read(self, stream):
        return stream.x, stream

    def write(self, stream, f, gate=1.0):
        return stream._replace(x=self.norm(stream.x + gate * f))


class NoSkip(PostNorm):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(
            config, "none", branch_scale="one"
        )  # there is no stream that a branch could be too large for

    def write(self, stream, f, gate=1.0):
        return stream._replace(x=(gate * self.norm(f)).to(stream.x.dtype))


class PeriNorm(PreNorm):
    ends = PeriEnds
    init_out = "plain"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.norm_out = make_norm(config)

    def write(self, stream, f, gate=1.0):
        return stream._replace(x=stream.x + gate * self.norm_out(f))


class LNS(PreNorm):
    init_out = "plain"  # its authors: the 1/sqrt(2B) start of the output projections weakens it

    def __init__(self, config, layer):
        super().__init__(config, layer)
        # b + 1 as a tensor, not a number: one compiled block then serves every depth
        self.register_buffer("depth", torch.tensor((layer + 1) // 2.0), persistent=False)

    def read(self, stream):
        h = self.norm(stream.x)
        return h * torch.rsqrt(self.depth).to(h.dtype), stream


class DyTResidual(PreNorm):
    settings = ("dyt_alpha",)
    ends = DyTEnds

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, "dyt", norm="rms")
        self.norm = DyT(config.n_embd, config.dyt_alpha[(layer - 1) % 2])


RESIDUALS = {
    "none": NoSkip,
    "postnorm": PostNorm,
    "prenorm": PreNorm,
    "perinorm": PeriNorm,
    "lns": LNS,
    "dyt": DyTResidual,
}
