"""
The additive family: how a sublayer F reads the residual stream x and writes its output back.

    none       x <- Norm(F(x))                           an ablation: no skip                    (1)
    postnorm   x <- Norm(x + F(x))                       Vaswani et al. 2017, arXiv 1706.03762   (2)
    prenorm    x <- x + F(Norm(x))                       the baseline                            (3)
    perinorm   x <- x + Norm_out(F(Norm_in(x)))          Kim et al. 2025, arXiv 2502.02732       (4)
    lns        x <- x + F(Norm(x) / sqrt(b + 1))         Sun et al. 2025, arXiv 2502.05795       (5)
    dyt        x <- x + F(gamma tanh(alpha x) + beta)    Zhu et al. 2025, arXiv 2503.10622       (6)
    deepnorm   x <- Norm((2B)^(1/4) x + F(x))            Wang et al. 2022, arXiv 2203.00555      (7)
    rezero     x <- x + a F(Norm(x)), a from 0           Bachlechner et al., arXiv 2003.04887    (8)
    mixln      (2) in the first blocks, then (3)         Li et al. 2024, arXiv 2412.13795        (9)
    x0mix      x <- lambda x + mu x_0 before each block, and (3) in it; x_0 = Norm(embedding)   (10)
               the head reads Norm(x - nu x_m); x_m is the stream after block B // 2            (11)

    outnorm    x <- x + Norm(F(x))                       OLMo 2, 2025, arXiv 2501.00656         (12)
    derf       x <- x + F(gamma erf(alpha x + s) + beta)    Chen et al. 2025, arXiv 2512.10938  (13)
    keel       x <- Norm(2B x + F(Norm_in(x)))           Chen & Wei 2026, arXiv 2601.19895      (14)

b is the 0-based block, and B is n_layer. a and Greek letters are learned. Each mode has two small
modules. The residual, one per sublayer, has read and write. The ends, one per model, turn the token
embedding into a stream and the last stream into the hidden states that the head multiplies.

Notes, and differences from the papers:
- Norms compute their statistics in float32, whatever the dtype of the stream.
- perinorm also normalises the embedding, as its paper does.
- DyT multiplies the embedding by a learned scalar. Its release starts it at sqrt(C), which gives
  embeddings of std 0.02 a std near 1. Here it starts where the first stream has std 1: at sqrt(C),
  our larger embeddings would saturate most tanh.
- deepnorm scales the start of v, o, up, down and gate; q and k start as in the other modes.
- DyT always has its beta, as in its release. The setting `bias` does not remove it.
- derf has the ends of dyt, alpha from 0.5 and s from 0 everywhere.
- keel has the ends and the plain start of post-norm. Its first sublayer is pre-norm, and its second
  has 1 in place of 2B, as in a public implementation; we could not read this in the paper.
- ReZero has one a for each sublayer and a norm; the paper has one for each block and no norm.
- x0mix comes from modded-nanogpt and nanochat (2024 to 2026), not from a paper. It starts as in
  nanochat: lambda from 1.15 to 1.05 over the blocks, mu from 0.20 to 0.05, nu = 0.2. Its norms have
  gains.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

import kernels

KERNELS = True  # on CUDA, the designs that have kernels in kernels.py use them
POST_SHARE = 0.25  # mixln: the share of the blocks that are post-norm, from the first one on


class Stream(NamedTuple):
    x: Tensor  # (B, T, C) the residual, or the first of n streams
    lane: Tensor | None = None  # (B, T, k) extra state of the mode: NAG's log norm in float32
    at: Tensor | None = None  # (T, 1) positions of the tokens
    sources: tuple = ()  # other streams, or earlier states: streams.py, attnres.py, X0Mix
    ahead: tuple = ()  # what a read leaves for later: attnres.py, smhc in streams.py

    def replace(self, **new):
        """A copy with new fields. torch 2.11 does not compile NamedTuple._replace."""
        x, lane, at, sources, ahead = self
        get = new.get
        changed = get("x", x), get("lane", lane), get("at", at)
        return Stream(*changed, get("sources", sources), get("ahead", ahead))


def scales(gate):
    """Whether a write has to multiply by its gate: a tensor, or a number that is not 1."""
    return torch.is_tensor(gate) or gate != 1


def pick(table, name, setting):
    """Look up table[name]. An unknown name raises an error that lists the known ones."""
    if name not in table:
        raise ValueError(f"{setting}={name!r}: choose one of {', '.join(map(str, table))}")
    return table[name]


def refuse(config, **only):
    """Raise if a setting that this mode ignores differs from the only value it may have."""
    for setting, value in only.items():
        if getattr(config, setting) != value:
            mode = config.residual
            raise ValueError(f"residual={mode!r} does not use {setting}: leave it at {value!r}")


def refuse_norm(config):
    """refuse for a mode without a norm: one may be left on queries and keys, with its norm_eps."""
    refuse(config, norm="rms")
    if not config.qk_norm:
        refuse(config, norm_eps=1e-6)


def mlps(block):
    """The MLP of a block, or its experts and the MLP that all tokens pass if there is one."""
    shared = getattr(block.mlp, "shared", None)
    return [block.mlp] if shared is None else [block.mlp, shared]


def readers(block):
    """What reads the stream in a block: layers of the attention, and of the MLP or experts."""
    attn = block.attn
    found = [getattr(mlp, name, None) for mlp in mlps(block) for name in ("router", "up", "gate")]
    return [attn.wq, attn.wk, attn.wv], [layer for layer in found if layer is not None]


def weight_of(layer):
    """The weight (out, in) of a linear. Experts are the parameter (E, out, in) itself."""
    return getattr(layer, "weight", layer)


def upcast(x):
    """Cast x to the dtype of its statistics: float64 if x is float64, else float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def learns(*tensors):
    """Whether a gradient is wanted. If not, call no autograd.Function with a varying number of
    inputs: compiled, torch 2.13 would drop ctx at one of these numbers.
    """
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def on_cuda(x):
    """Whether kernels.py runs for x."""
    return KERNELS and kernels.available and x.is_cuda


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


class LayerNorm(RMSNorm):
    """y = gain * (x - mean(x)) / sqrt(var(x) + eps) + shift"""

    def __init__(self, n_embd, eps=1e-6, bias=False):
        super().__init__(n_embd, eps)
        self.shift = nn.Parameter(torch.empty(n_embd)) if bias else None

    def reset_parameters(self):
        super().reset_parameters()
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(self, x):
        x_float = upcast(x)
        y = super().forward(x_float - x_float.mean(-1, keepdim=True))
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


class Derf(DyT):
    """y = gain * erf(alpha x + s) + shift, with learned scalars alpha and s: inside Eq. 13"""

    def __init__(self, n_embd, alpha=0.5):
        super().__init__(n_embd, alpha)
        self.s = nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.s)

    def forward(self, x):
        bounded = torch.erf(self.alpha * upcast(x) + self.s)
        return (self.gain * bounded + self.shift).to(x.dtype)


NORMS = {"rms": RMSNorm, "layer": LayerNorm, "none": nn.Identity}


def make_norm(config):
    return NORMS[config.norm](config.n_embd, config.norm_eps, config.bias)


# ------------------------------------------------------------------------------------------------
# Ends: embedding -> first stream, last stream -> hidden states for the head


class NoEnds(nn.Module):
    """The first stream is the embedding, and the head reads the last stream unchanged."""

    decays = ()  # as in PreNorm

    def __init__(self, config):
        super().__init__()

    def embed(self, e):
        return Stream(e)

    def forward(self, stream, head):  # what model.compile_blocks compiles
        return self.readout(stream, head)

    def readout(self, stream, head):  # head (V, C) is an argument because NAG normalises its rows
        return stream.x, head

    def additive(self, stream):
        """(B, T, C) in float32: what the final norm would read if the model ended here.

        For x0mix, without the subtraction of Eq. 11.
        """
        return upcast(stream.x)

    def weights(self, stream):
        """The weights (B, T, sources) that the head gives to its sources, or None. For depth.py."""

    def after_step(self, model):
        """Change the model's weights after an optimizer step, such as nGPT's Eq. 1."""

    def fold(self, model):
        """Compute once what each token would compute again from the head. It cannot be undone."""


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


def embedding_std(config):
    """The initial std of the embedding that `embed` of the ends gets."""
    return (config.embed_scale or config.init_scale) * math.sqrt(1 + config.smear)


class DyTEnds(FinalNorm):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(1))
        self.norm = DyT(config.n_embd, config.dyt_alpha[2])
        self.start = 1 / embedding_std(config)

    def reset_parameters(self):
        nn.init.constant_(self.scale, self.start)

    def embed(self, e):
        return Stream(self.scale.to(e.dtype) * e)


class DerfEnds(DyTEnds):
    def __init__(self, config):
        super().__init__(config)
        self.norm = Derf(config.n_embd)


class X0Ends(PeriEnds):
    def __init__(self, config):
        super().__init__(config)
        self.nu = nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        nn.init.constant_(self.nu, 0.2)

    def embed(self, e):
        x_0 = self.norm_in(e)
        return Stream(x_0, sources=(x_0,))  # and later x_m

    def readout(self, stream, head):
        x_m = stream.sources[1] if len(stream.sources) > 1 else stream.x
        return self.norm((stream.x - self.nu * x_m).to(stream.x.dtype)), head  # Eq. 11


def fusing(reads, operations):
    """Options of torch.compile: what is used more than once is computed again, up to these limits.

    With the compiler's own limits, the backward passes of some modes store float32 copies of the
    stream. `python runs/h100.py` counts them.
    """
    limits = {"realize_reads_threshold": reads, "realize_opcount_threshold": operations}
    return limits | {"realize_acc_reads_threshold": 2 * reads}


# ------------------------------------------------------------------------------------------------
# Residuals. `layer` is the 1-based sublayer: 2b + 1 for the attention of block b, 2b + 2 its MLP


class PreNorm(nn.Module):
    """Eq. 3. Every other mode derives from this class and changes what it needs.

    read and write define a mode. The rest has defaults that change nothing.
    """

    settings = ()  # fields of GPTConfig that belong to this mode; other modes refuse them
    ends = FinalNorm
    init_out = "scaled"  # initialisation of the output projections if the setting init_out is None
    attention = None  # a subclass of attention.Attention in its place
    warmup_iters = 20  # where train.py's setting is None
    decays = ()  # names of its parameters that have weight decay
    rotates = False  # whether it has turn, alpha and ramp, as NAG does
    predicts = False  # whether refresh does anything
    rescales = False  # whether write normalises f itself, so that no factor of f counts
    cuda_options = {}  # of torch.compile, for CUDA: see fusing

    def __init__(self, config, layer):
        super().__init__()
        self.norm = make_norm(config)

    def read(self, stream):  # -> (sublayer input, stream)
        return self.norm(stream.x), stream

    def write(self, stream, f, gate=1.0):  # gate: a number or a tensor (B, T, 1) that multiplies f
        return stream.replace(x=stream.x + gate * f)  # Eq. 3

    @staticmethod
    def equip(block, config):
        """Add modules to a new block."""

    @staticmethod
    def init_sublayers(block, config):
        """Change the initial weights of a block."""

    def refresh(self, attention):
        """Recompute what this residual derives from the weights of its block's attention."""

    def skip(self, old, new, runs):
        """The stream after mod.py: new for the tokens that run (B, T, 1), old for the others."""
        lane = None if new.lane is None else torch.where(runs, new.lane, old.lane)
        return new.replace(x=torch.where(runs, new.x.to(old.x.dtype), old.x), lane=lane)

    def mixing(self, stream):
        """The matrices (B, T, n, n) that mix n streams, or None. For depth.py."""

    def weights(self, stream):
        """The weights (B, T, sources) that read gives to its sources, or None. For depth.py."""


class PostNorm(PreNorm):
    ends = NoEnds
    init_out = "plain"
    alpha = 1  # the weight of the stream: larger in Eqs. 7 and 14

    def read(self, stream):
        return stream.x, stream

    def write(self, stream, f, gate=1.0):
        return stream.replace(x=self.norm(self.alpha * stream.x + gate * f))  # Eqs. 2, 7 and 14


class NoSkip(PostNorm):
    rescales = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, branch_scale="one")  # there is no skip to scale the branch against

    def write(self, stream, f, gate=1.0):
        return stream.replace(x=(gate * self.norm(f)).to(stream.x.dtype))  # Eq. 1


class PeriNorm(PreNorm):
    ends = PeriEnds
    init_out = "plain"
    rescales = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.norm_out = make_norm(config)

    def write(self, stream, f, gate=1.0):
        return stream.replace(x=stream.x + gate * self.norm_out(f))  # Eq. 4


class OutNorm(PostNorm):
    ends = FinalNorm
    rescales = True

    def write(self, stream, f, gate=1.0):
        return stream.replace(x=stream.x + gate * self.norm(f))  # Eq. 12


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
        refuse_norm(config)
        self.norm = DyT(config.n_embd, config.dyt_alpha[(layer - 1) % 2])  # Eq. 6


class DerfResidual(PreNorm):
    ends = DerfEnds

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse_norm(config)
        self.norm = Derf(config.n_embd)  # Eq. 13


class Keel(PostNorm):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.norm_in = make_norm(config)
        self.alpha = 2 * config.n_layer if layer > 2 else 1
        if layer == 1:
            self.norm = nn.Identity()

    def read(self, stream):
        return self.norm_in(stream.x), stream


class DeepNorm(PostNorm):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, init_out=None)  # because init_sublayers has its own scale
        self.alpha = (2 * config.n_layer) ** 0.25

    @staticmethod
    def init_sublayers(block, config):
        """Xavier times (8B)^(-1/4), for W_v, W_o and the matrices of the MLP or of the experts."""
        layers = [block.attn.wv, block.attn.wo]
        layers += [m for mlp in mlps(block) for m in (mlp.up, mlp.gate, mlp.down) if m is not None]
        for weight in map(weight_of, layers):
            std = (2 / (weight.size(-1) + weight.size(-2))) ** 0.5
            nn.init.normal_(weight, std=std * (8 * config.n_layer) ** -0.25)


class ReZero(PreNorm):
    init_out = "plain"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.a = nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        nn.init.zeros_(self.a)

    def write(self, stream, f, gate=1.0):
        x = stream.x + gate * (self.a * f)  # Eq. 8
        return stream.replace(x=x.to(stream.x.dtype))


class MixLN(PreNorm):
    init_out = "plain"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.post = (layer - 1) // 2 < POST_SHARE * config.n_layer

    def read(self, stream):
        return (stream.x if self.post else self.norm(stream.x)), stream

    def write(self, stream, f, gate=1.0):
        x = stream.x + gate * f
        return stream.replace(x=self.norm(x) if self.post else x)  # Eq. 9


class X0Mix(PreNorm):
    ends = X0Ends

    def __init__(self, config, layer):
        super().__init__(config, layer)
        b = (layer - 1) // 2
        depth = b / max(1, config.n_layer - 1)
        self.starts = (1.15 - 0.10 * depth, 0.20 - 0.15 * depth)
        self.mix = nn.Parameter(torch.empty(2)) if layer % 2 == 1 else None  # before each block
        self.after_middle = b == config.n_layer // 2 + 1

    def reset_parameters(self):
        if self.mix is not None:
            self.mix.copy_(torch.tensor(self.starts))

    def read(self, stream):
        if self.mix is not None:
            x_0, x = stream.sources[0], stream.x
            sources = (x_0, x) if self.after_middle else stream.sources
            # slices: with self.mix[0], a number, bfloat16 would not become float32
            x = (self.mix[:1] * x + self.mix[1:] * x_0).to(x.dtype)  # Eq. 10
            stream = stream.replace(x=x, sources=sources)
        return self.norm(stream.x), stream


RESIDUALS = {
    "none": NoSkip, "postnorm": PostNorm, "prenorm": PreNorm, "perinorm": PeriNorm, "lns": LNS,
    "dyt": DyTResidual, "derf": DerfResidual, "deepnorm": DeepNorm, "keel": Keel,
    "rezero": ReZero, "mixln": MixLN, "x0mix": X0Mix, "outnorm": OutNorm,
}  # fmt: skip
