"""
NAG, the norm-agnostic residual (Figliolia & Millidge 2026, arXiv 2606.16112): the stream in two lanes per token, a
direction r with |r| = sqrt(d), which sublayers may only rotate, and s, the log of the rms norm that the stream would
have had, which becomes the inverse temperature of the logits. d is n_embd, l the 1-based sublayer, rms = |.|/sqrt(d).

    embed      e = E[token] - mean,  rho = rms(e):  r = e / rho,  s = log rho + g_enc                               (1)
    sublayer   f = F_l(r), with no norm before it
               f <- f - mean(f)                                                                                     (2)
               f <- f - (<f, r> / <r, r>) r                                                                         (3)
               u = f / rms(f)                                                                                       (4)
               m = ( sum_c softmax(p)_c sigmoid(<w_c, r> + b_c) )^beta,  a = alpha_l m                              (5)
               r <- (r + a u) / sqrt(1 + a^2),  s <- s + log(1 + a^2) / 2                                           (6)
    read out   logit_v = exp(s + g_dec) <r, w_v> / sqrt(d), the rows w_v of the head centred, then |w_v| = sqrt(d)  (7)

A sublayer turns its token by atan(a), by atan(alpha_l) at most.

Differs from the paper: r is divided by the rms it has and not by the sqrt(1 + a^2) it should have, so that it cannot
drift in low precision; g_dec starts where the first logits have a standard deviation of nag_first_logits at any depth;
the mixture in (5) is at least 1e-6, for the power's sake. Statistics and s are float32; r has the stream's dtype:
float32, or bfloat16 with bf16_stream and in a model that is bfloat16 itself.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from norms import NoEnds, PreNorm, Stream, refuse, upcast


def modulator(r, w, b, p, beta):
    """Eq. 5: how much of its rotation a sublayer grants a token, (..., 1). p: logits of the mixture's weights. Below
    1e-6 the clamp passes no gradient: a token shut out that far stays out until w or b move for others."""
    gates = torch.sigmoid(upcast(F.linear(r, w, b)))  # (..., C)
    mixture = (gates * p.softmax(-1)).sum(-1, keepdim=True)
    return mixture.clamp(min=1e-6) ** beta


def plain_rotate(r, s, f, a):
    """Eqs. 2, 3, 4 and 6 as on paper: the reference for rotate, which computes the same in one pass."""
    f = f - f.mean(-1, keepdim=True)  # (2)
    f = f - (f * r).sum(-1, keepdim=True) / (r * r).sum(-1, keepdim=True) * r  # (3)
    u = f / f.square().mean(-1, keepdim=True).sqrt()  # (4)
    r = r + a * u  # (6)
    r = r / r.square().mean(-1, keepdim=True).sqrt()  # the measured rms, in theory sqrt(1 + a^2)
    return r, s + 0.5 * torch.log(1 + a * a)


def rotate(r, s, f, a, eps=1e-12, centre=True, orthogonal=True):
    """plain_rotate in one pass over r and f, and without its divisions by zero.

    Equations 2 and 3 subtract multiples of 1 and of r from f. So five sums a token, <r,r>, <f,r>, <f,f> and the means,
    give every norm, and r' = A r + D f + E with three scalars a token: one read of r and f, one write of r'.

    The price: the norm of what remains of f is a difference, and only rounding where f is nearly parallel to 1 or to r.
    In float32 u is good to 1e-4 at an angle of 3 degrees. The norm counts as at least `least`, so updates within 0.6
    degrees turn r by less than a, and r stays on its sphere in any case. Summing the squares of what remains would be
    exact, but cost a second pass: half the time again.
    """
    R, f = upcast(r), upcast(f)
    rr, fr, ff = (x.mean(-1, keepdim=True) for x in (R * R, f * R, f * f))
    least = 1000 * torch.finfo(f.dtype).eps * ff
    mean = f.mean(-1, keepdim=True) if centre else 0.0
    fr = fr - mean * R.mean(-1, keepdim=True)  # (2)
    ff = ff - mean * mean
    c = fr / (rr + eps) if orthogonal else 0.0
    ff = (ff - c * fr).clamp(min=0)  # (3)
    fr = fr - c * rr
    k = a * torch.rsqrt(
        torch.maximum(ff, least) + eps
    )  # a u = k (f - mean - c r)                                 (4)
    square = (
        rr + 2 * k * fr + k * k * ff
    )  # mean square of r + a u: 1 + a^2 up to rounding, if u is orthogonal to r
    n = torch.rsqrt(square + eps)
    new = (n - n * k * c) * R + (n * k) * f - n * k * mean  # (6)
    return new.to(r.dtype), s + 0.5 * (torch.log1p(a * a) if orthogonal else torch.log(square))


class NAGEnds(NoEnds):
    def __init__(self, config):
        super().__init__(config)
        refuse(config, "nag", norm="rms")  # it has none
        if not config.qk_norm:
            refuse(config, "nag", norm_eps=1e-6)
        if not config.nag_directions:
            refuse(config, "nag", nag_beta=None)
        for name, least in (("nag_directions", 0), ("nag_beta", 1e-3), ("nag_first_logits", 1e-3)):
            if getattr(config, name) is not None and getattr(config, name) < least:
                raise ValueError(f"{name}={getattr(config, name)}: give at least {least}")
        self.g_enc = nn.Parameter(torch.empty(1)) if config.nag_lane else None
        self.g_dec, self.start, self.folded = (
            nn.Parameter(torch.empty(1)),
            start_of_g_dec(config),
            False,
        )

    def reset_parameters(self):
        if self.g_enc is not None:
            nn.init.zeros_(self.g_enc)
        nn.init.constant_(self.g_dec, self.start)

    def embed(self, e):
        w = upcast(e)
        w = w - w.mean(-1, keepdim=True)
        rho = torch.sqrt(w.square().mean(-1, keepdim=True) + 1e-12)  # (1)
        return Stream(
            (w / rho).to(e.dtype), rho.log() + (0.0 if self.g_enc is None else self.g_enc)
        )

    def readout(self, stream, head):
        w = head if self.folded else unit_rows(head)
        s = torch.zeros_like(stream.lane) if self.g_enc is None else stream.lane
        heat = torch.exp(s + self.g_dec) / math.sqrt(w.size(1))  # (7)
        return (upcast(stream.x) * heat).to(stream.x.dtype), w

    def additive(self, stream):
        return upcast(stream.x) * stream.lane.exp()


def unit_rows(head):
    w = upcast(head)
    w = w - w.mean(-1, keepdim=True)
    return (w * torch.rsqrt(w.square().mean(-1, keepdim=True) + 1e-12)).to(head.dtype)  # of (7)


def fold(model):
    """For inference, in place and for good: the rows of the head as (7) has them, once and not for every token"""
    if model.ends.folded:
        raise ValueError("the head is folded already")
    model.head.weight = nn.Parameter(
        unit_rows(model.head.weight.detach())
    )  # of its own, where it was the embedding's
    model.ends.folded = True
    return model.eval()


def start_of_g_dec(config):
    """Log of what the first logits' standard deviation is to be, less what s will have become: (1) and (6) at init"""
    if config.nag_first_logits is None:
        return -0.5 * math.log(config.n_embd)  # logits divided by d, all gains zero
    m = (
        0.5 ** (1.0 if config.nag_beta is None else config.nag_beta)
        if config.nag_directions
        else 1.0
    )
    m *= config.n_layer**-0.5 if config.branch_scale == "depth" else 1.0
    turns = [m * l**-config.nag_alpha_power for l in range(1, 2 * config.n_layer + 1)]
    s = (
        math.log(config.init_scale) + sum(0.5 * math.log1p(a * a) for a in turns)
        if config.nag_lane
        else 0.0
    )
    return math.log(config.nag_first_logits) - s


class NAG(nn.Module):
    settings = (
        "nag_alpha_power", "nag_directions", "nag_beta", "nag_centre", "nag_orthogonal", "nag_lane", "nag_first_logits",
    )  # fmt: skip
    ends = NAGEnds
    init_out = "plain"  # a scale that (4) would take out again

    def __init__(self, config, layer):
        super().__init__()
        C = config.nag_directions
        self.alpha = nn.Parameter(torch.empty(1))
        if C:
            self.w, self.b, self.p = (
                nn.Parameter(torch.empty(*shape)) for shape in ((C, config.n_embd), (C,), (C,))
            )
            if config.nag_beta is None:
                self.raw_beta = nn.Parameter(torch.empty(1))
        self.start, self.beta, self.modulated = (
            layer**-config.nag_alpha_power,
            config.nag_beta,
            C > 0,
        )
        self.parts = dict(centre=config.nag_centre, orthogonal=config.nag_orthogonal)
        self.register_buffer(
            "ramp", torch.ones(1)
        )  # train.py lets it grow from 0 over alpha_warmup_iters

    def reset_parameters(self):
        nn.init.constant_(self.alpha, self.start)
        if self.modulated:
            nn.init.normal_(self.w, std=self.w.size(1) ** -0.5)
            nn.init.zeros_(self.b)
            nn.init.zeros_(self.p)
            if self.beta is None:
                nn.init.constant_(self.raw_beta, math.log(math.e - 1))  # softplus of it is 1

    def turn(self, r):
        """Eq. 5: a for every token, (B, T, 1)"""
        a = self.ramp * self.alpha
        if not self.modulated:
            return a.expand(*r.shape[:-1], 1)
        beta = F.softplus(self.raw_beta) if self.beta is None else self.beta
        return a * modulator(r, self.w, self.b, self.p, beta)

    def read(self, stream):
        return stream.x, stream

    def write(self, stream, f, gate=1.0, turn=None):
        turn = self.turn(stream.x) if turn is None else turn  # mod.py's router has it already
        x, lane = rotate(stream.x, stream.lane, f, gate * turn, **self.parts)
        return stream._replace(x=x, lane=lane)


class Orthogonal(PreNorm):
    """x <- x + f - (<f, x> / <x, x>) x, f = F(Norm(x)): pre-norm with (3), the rung between (arXiv 2505.11881)"""

    def write(self, stream, f, gate=1.0):
        x, w = upcast(stream.x), upcast(f)
        c = (w * x).sum(-1, keepdim=True) / (x.square().sum(-1, keepdim=True) + 1e-12)
        return stream._replace(x=stream.x + (gate * (w - c * x)).to(stream.x.dtype))


RESIDUALS = {"nag": NAG, "orthogonal": Orthogonal}
