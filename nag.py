"""
NAG, the norm-agnostic residual (Figliolia & Millidge 2026, arXiv 2606.16112).

Each token's stream has two lanes. Lane r is a direction with |r| = sqrt(d), and sublayers can only
rotate it. Lane s is the log of the rms norm that an additive stream would have, and it sets the
inverse temperature of the logits. d is n_embd, l the 1-based sublayer, rms(x) = |x| / sqrt(d).

    embed      e = E[token] - mean(E[token]),  rho = rms(e)
               r = e / rho,  s = log rho + g_enc                                                (1)
    sublayer   f = F_l(r), with no norm before it
               f <- f - mean(f)                                                                 (2)
               f <- f - (<f, r> / <r, r>) r                                                     (3)
               u = f / rms(f)                                                                   (4)
               m = (sum_c softmax(p)_c sigmoid(<w_c, r> + b_c))^beta,  a = alpha_l m            (5)
               r <- (r + a u) / sqrt(1 + a^2),  s <- s + log(1 + a^2) / 2                       (6)
    read out   logit_v = exp(s + g_dec) <r, w_v> / sqrt(d)                                      (7)
               where w_v is row v of the head, centred and then scaled to |w_v| = sqrt(d)

A sublayer rotates a token by the angle atan(a), and by atan(alpha_l) at most.

Differs from the paper:
- (6) divides by the measured rms of r + a u, so that r cannot drift in low precision.
- (5) clamps the mixture away from 0, where the power has an infinite gradient.
- g_dec is initialised so that the first logits have std nag_first_logits at any depth.
- s and all statistics are float32. r has the dtype of the stream, which may be bfloat16.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from norms import NoEnds, PreNorm, Stream, refuse, upcast

ALPHA_POWER = 0.5  # alpha of sublayer l starts at l^-ALPHA_POWER


def modulator(r, w, b, p, beta):
    """Eq. 5: m (..., 1), the factor on alpha_l for each token.

    r (..., d), w (C, d), b (C,) and the mixture logits p (C,). The clamp passes no gradient, so a
    token at the floor stays there until other tokens move w or b.
    """
    gates = torch.sigmoid(upcast(F.linear(r, w, b)))  # (..., C)
    mixture = (gates * p.softmax(-1)).sum(-1, keepdim=True)
    return mixture.clamp(min=1e-6) ** beta


def plain_rotate(r, s, f, a):
    """Eqs. 2, 3, 4 and 6 line by line: the reference for rotate."""
    f = f - f.mean(-1, keepdim=True)  # Eq. 2
    f = f - (f * r).sum(-1, keepdim=True) / (r * r).sum(-1, keepdim=True) * r  # Eq. 3
    u = f / f.square().mean(-1, keepdim=True).sqrt()  # Eq. 4
    r = r + a * u  # Eq. 6
    r = r / r.square().mean(-1, keepdim=True).sqrt()  # the measured rms replaces sqrt(1 + a^2)
    return r, s + 0.5 * torch.log(1 + a * a)


def rotate(r, s, f, a, eps=1e-12, centre=True, orthogonal=True):
    """Eqs. 2, 3, 4 and 6 in one pass over r and f, without the 0/0 of plain_rotate.

    Eqs. 2 and 3 subtract multiples of r and of a vector of ones from f. The means of r, f, r^2, f r
    and f^2 therefore give every norm, and the result is A r + D f + E with three scalars per token:
    one read of r and f, one write of the new r.

    The price is precision. The norm of f after Eqs. 2 and 3 is computed as a difference, which is
    mostly rounding error when f is nearly parallel to either. In float32, u is accurate to 1e-4
    at an angle of 3 degrees. Below about 0.6 degrees the floor `least` applies, and f rotates r by
    less than a, or not at all if f = 0; s grows as if by a. The new r is on its sphere at every
    angle. A second pass over f would be exact, but would take 50% more time.
    """
    r_float, f = upcast(r), upcast(f)
    rr, fr, ff = (x.mean(-1, keepdim=True) for x in (r_float * r_float, f * r_float, f * f))
    least = 1000 * torch.finfo(f.dtype).eps * ff

    mean = f.mean(-1, keepdim=True) if centre else 0.0
    fr = fr - mean * r_float.mean(-1, keepdim=True)  # Eq. 2
    ff = ff - mean * mean
    c = fr / (rr + eps) if orthogonal else 0.0
    ff = (ff - c * fr).clamp(min=0)  # Eq. 3
    fr = fr - c * rr

    k = a * torch.rsqrt(torch.maximum(ff, least) + eps)  # Eq. 4: a u = k (f - mean - c r)
    square = rr + 2 * k * fr + k * k * ff  # mean of (r + a u)^2; 1 + a^2 if u is orthogonal to r
    n = torch.rsqrt(square + eps)
    new = (n - n * k * c) * r_float + (n * k) * f - n * k * mean  # Eq. 6
    return new.to(r.dtype), s + 0.5 * (torch.log1p(a * a) if orthogonal else torch.log(square))


class NAGEnds(NoEnds):
    def __init__(self, config):
        super().__init__(config)
        refuse(config, "nag", norm="rms")  # NAG has no norm to choose
        if not config.qk_norm:
            refuse(config, "nag", norm_eps=1e-6)
        for name, least in (("nag_directions", 0), ("nag_first_logits", 1e-3)):
            value = getattr(config, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: give at least {least}")
        self.g_enc = nn.Parameter(torch.empty(1)) if config.nag_lane else None
        self.g_dec = nn.Parameter(torch.empty(1))
        self.start = start_of_g_dec(config)
        self.folded = False

    def reset_parameters(self):
        if self.g_enc is not None:
            nn.init.zeros_(self.g_enc)
        nn.init.constant_(self.g_dec, self.start)

    def embed(self, e):
        centred = upcast(e)
        centred = centred - centred.mean(-1, keepdim=True)
        rho = torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-12)
        s = rho.log() + (0.0 if self.g_enc is None else self.g_enc)
        return Stream((centred / rho).to(e.dtype), s)  # Eq. 1

    def readout(self, stream, head):
        w = head if self.folded else recomputed(head)
        s = torch.zeros_like(stream.lane) if self.g_enc is None else stream.lane
        scale = torch.exp(s + self.g_dec) / math.sqrt(w.size(1))  # Eq. 7
        return (upcast(stream.x) * scale).to(stream.x.dtype), w

    def additive(self, stream):
        return upcast(stream.x) * stream.lane.exp()


def recomputed(head):
    """unit_rows, computed again in the backward pass, because they are as large as the head."""
    return checkpoint(unit_rows, head, use_reentrant=False, preserve_rng_state=False)


def unit_rows(head):
    """The rows w_v of Eq. 7, (V, d)."""
    w = upcast(head)
    w = w - w.mean(-1, keepdim=True)
    return (w * torch.rsqrt(w.square().mean(-1, keepdim=True) + 1e-12)).to(head.dtype)


def fold(model):
    """Compute the head's rows of Eq. 7 once, for inference. In place; it cannot be undone."""
    if model.ends.folded:
        raise ValueError("the head is folded already")
    rows = unit_rows(model.head.weight.detach())
    model.head.weight = nn.Parameter(rows)  # a new parameter, so that a tied embedding stays
    model.ends.folded = True
    return model.eval()


def start_of_g_dec(config):
    """Initial g_dec: log of the wanted std of the first logits, minus s of Eqs. 1 and 6 at init."""
    if config.nag_first_logits is None:
        return -0.5 * math.log(config.n_embd)  # logits are exp(s) <r, w_v> / d
    m = 0.5 if config.nag_directions else 1.0
    m *= config.n_layer**-0.5 if config.branch_scale == "depth" else 1.0
    s = 0.0
    if config.nag_lane:
        layers = range(1, 2 * config.n_layer + 1)
        turns = [m * layer**-ALPHA_POWER for layer in layers]
        embedding = (config.embed_scale or config.init_scale) * (1 + config.smear) ** 0.5
        s = math.log(embedding) + sum(0.5 * math.log1p(a * a) for a in turns)
    return math.log(config.nag_first_logits) - s


class NAG(PreNorm):
    settings = (
        "nag_directions", "nag_centre", "nag_orthogonal", "nag_lane", "nag_first_logits",
    )  # fmt: skip
    ends = NAGEnds
    init_out = "plain"  # Eq. 4 removes any scale of the output
    rotates = True

    def __init__(self, config, layer):
        nn.Module.__init__(self)  # without PreNorm's norm
        C = config.nag_directions
        self.alpha = nn.Parameter(torch.empty(1))
        if C:
            self.w = nn.Parameter(torch.empty(C, config.n_embd))
            self.b = nn.Parameter(torch.empty(C))
            self.p = nn.Parameter(torch.empty(C))
            self.raw_beta = nn.Parameter(torch.empty(1))
        self.start = layer**-ALPHA_POWER
        self.modulated = C > 0
        self.parts = dict(centre=config.nag_centre, orthogonal=config.nag_orthogonal)
        self.register_buffer("ramp", torch.ones(1))  # train.py raises it over alpha_warmup_iters

    def reset_parameters(self):
        nn.init.constant_(self.alpha, self.start)
        if self.modulated:
            nn.init.normal_(self.w, std=self.w.size(1) ** -0.5)
            nn.init.zeros_(self.b)
            nn.init.zeros_(self.p)
            nn.init.constant_(self.raw_beta, math.log(math.e - 1))  # softplus(raw_beta) = 1

    def turn(self, r):
        """Eq. 5: a of every token, (B, T, 1)."""
        a = self.ramp * self.alpha
        if not self.modulated:
            return a.expand(*r.shape[:-1], 1)
        return a * modulator(r, self.w, self.b, self.p, F.softplus(self.raw_beta))

    def read(self, stream):
        return stream.x, stream

    def write(self, stream, f, gate=1.0, turn=None):
        turn = self.turn(stream.x) if turn is None else turn  # mod.py passes the turn of its router
        x, lane = rotate(stream.x, stream.lane, f, gate * turn, **self.parts)
        return stream.replace(x=x, lane=lane)


class Orthogonal(PreNorm):
    """x <- x + f - (<f, x> / <x, x>) x, f = F(Norm(x)): pre-norm plus Eq. 3 (arXiv 2505.11881)"""

    def write(self, stream, f, gate=1.0):
        x, f = upcast(stream.x), upcast(f)
        c = (f * x).sum(-1, keepdim=True) / (x.square().sum(-1, keepdim=True) + 1e-12)  # Eq. 3
        return stream.replace(x=stream.x + (gate * (f - c * x)).to(stream.x.dtype))


RESIDUALS = {"nag": NAG, "orthogonal": Orthogonal}
