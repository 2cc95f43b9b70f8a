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

alpha_l, w, b, p, beta > 0, g_enc and g_dec are learned; alpha_l starts at l^(-1/2).

A sublayer rotates a token by the angle atan(a), and by atan(alpha_l) at most. On CUDA a kernel of
kernels.py computes (2) to (6) at once.

Differs from the paper:
- (6) divides by the measured rms of r + a u, so that r cannot drift in low precision.
- (4) has a floor, below about 0.6 degrees between f and r: see rotate.
- (5) clamps the mixture away from 0, where the power has an infinite gradient.
- e in (1) also has the embeddings of earlier tokens, if smear is above 0.
- g_dec is initialised so that the first logits have std nag_first_logits at any depth, if there is
  no alpha_warmup_iters and no token skips a sublayer.
- s and all statistics are float32, but not <w_c, r>, which is a matrix product like others. r has
  the dtype of the stream, which may be bfloat16.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import kernels
import norms
from norms import NoEnds, PreNorm, Stream, embedding_std, fusing, on_cuda, upcast

ALPHA_POWER = 0.5  # alpha of sublayer l starts at l^-ALPHA_POWER


def modulator(products, b, p, beta):
    """Eq. 5: m (..., 1), the factor on alpha_l for each token.

    products <w_c, r> (..., C), b (C,) and the mixture logits p (C,). The clamp passes no gradient,
    so a token at the floor stays there until other tokens move the parameters.
    """
    gates = torch.sigmoid(upcast(products) + b)  # (..., C)
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
    and f^2 therefore give every norm: one read of r and f, one write of the new r. Its backward
    pass reads r, f and the gradient once.

    The price is precision. The norm of f after Eqs. 2 and 3 is computed as a difference, which is
    mostly rounding error when f is nearly parallel to either. In float32, u is accurate to 1e-4 at
    an angle of 3 degrees. Below about 0.6 degrees the floor `least` applies, and f rotates r by
    less than atan(a), or not at all if f = 0; s grows as if by atan(a). The new r is on its sphere
    at every angle. A second pass over f would be exact, but would take 50% more time.
    """
    a = a.expand_as(s)
    new, square = Rotation.apply(r, f, a, eps, centre, orthogonal)
    return new, s + 0.5 * (torch.log1p(a * a) if orthogonal else torch.log(square))


class Rotation(torch.autograd.Function):
    """rotate without s: g = f - m - c r, z = r + k g, and the new r is n z.

    <x, y> is the mean of x y over the features. of_z is the gradient of z, and so on.
    """

    @staticmethod
    def forward(ctx, r, f, a, eps, centre, orthogonal):
        x, y = upcast(r), upcast(f)
        mean, m, rr, rf, ff = (v.mean(-1, keepdim=True) for v in (x, y, x * x, x * y, y * y))
        least = 1000 * torch.finfo(ff.dtype).eps * ff

        m = m if centre else torch.zeros_like(m)
        rg, gg = rf - m * mean, ff - m * m  # <r, g> and <g, g> after Eq. 2
        c = rg / (rr + eps) if orthogonal else torch.zeros_like(m)
        gg = (gg - c * rg).clamp(min=0)  # Eq. 3
        rg = rg - c * rr

        h = torch.rsqrt(torch.maximum(gg, least) + eps)  # Eq. 4: u = h g
        k = a * h
        square = rr + 2 * k * rg + k * k * gg  # <z, z>, which is 1 + a^2 if g is orthogonal to r
        n = torch.rsqrt(square + eps)
        new = n * (x + k * (y - m - c * x))  # Eq. 6

        # dk/dg = -bend g / d; at the floor 0: what `least` adds is 1% of the gradient at most
        bend = torch.where(gg > least, k * h * h, 0.0)
        ctx.save_for_backward(r, f, mean, m, rr, c, rg, gg, h, k, n, bend)
        ctx.parts = eps, centre, orthogonal
        # compiled by torch 2.11, a cast to the same dtype loses the gradient
        return new if new.dtype == r.dtype else new.to(r.dtype), square

    @staticmethod
    def backward(ctx, grad, of_square):
        r, f, mean, m, rr, c, rg, gg, h, k, n, bend = ctx.saved_tensors
        eps, centre, orthogonal = ctx.parts
        x, y, of_new = upcast(r), upcast(f), upcast(grad)
        d = r.size(-1)
        in_r, in_f, in_1 = (v.mean(-1, keepdim=True) for v in (of_new * x, of_new * y, of_new))

        in_g = in_f - m * in_1 - c * in_r  # <of_new, g>
        t = 2 * of_square / d - n * n * n * (in_r + k * in_g)  # of_z = n of_new + t z
        z_in_r = n * in_r + t * (rr + k * rg)  # <of_z, r>
        z_in_g = n * in_g + t * (rg + k * gg)
        w = bend * z_in_g  # of_g = k of_z - w g
        v = (w * rg - k * z_in_r) / (rr + eps) if orthogonal else 0.0  # of_c / (d <r, r>)

        g = y - m - c * x
        of_z = n * of_new + t * (x + k * g)
        of_g = k * of_z - w * g
        of_r = of_z - c * of_g + v * (g - c * x)
        of_f = of_g + v * x
        if centre:  # minus the mean of of_f, with -c mean for that of g
            of_f = of_f - k * (n * in_1 + t * (1 - k * c) * mean) - (w * c + v) * mean
        return of_r.to(r.dtype), of_f.to(f.dtype), d * h * z_in_g, None, None, None


class NAGEnds(NoEnds):
    def __init__(self, config):
        super().__init__(config)
        norms.refuse_norm(config)
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
        w = head
        if not self.folded:  # computed again in the backward pass: it is as large as the head
            w = checkpoint(unit_rows, head, use_reentrant=False, preserve_rng_state=False)
        s = torch.zeros_like(stream.lane) if self.g_enc is None else stream.lane
        scale = torch.exp(s + self.g_dec) / math.sqrt(w.size(1))  # Eq. 7
        return (upcast(stream.x) * scale).to(stream.x.dtype), w

    def additive(self, stream):
        return upcast(stream.x) * stream.lane.exp()

    def fold(self, model):
        rows = unit_rows(model.head.weight.detach())
        model.head.weight = nn.Parameter(rows)  # a new parameter, so that a tied embedding stays
        self.folded = True


def unit_rows(head):
    """The rows w_v of Eq. 7, (V, d)."""
    w = upcast(head)
    w = w - w.mean(-1, keepdim=True)
    return (w * torch.rsqrt(w.square().mean(-1, keepdim=True) + 1e-12)).to(head.dtype)


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
        s = math.log(embedding_std(config)) + sum(0.5 * math.log1p(a * a) for a in turns)
    return math.log(config.nag_first_logits) - s


class NAG(PreNorm):
    settings = (
        "nag_directions", "nag_centre", "nag_orthogonal", "nag_lane", "nag_first_logits",
    )  # fmt: skip
    ends = NAGEnds
    init_out = "plain"  # Eq. 4 removes any scale of the output
    rotates = rescales = True
    cuda_options = fusing(reads=16, operations=150)

    def __init__(self, config, layer):
        nn.Module.__init__(self)  # without PreNorm's norm
        C = config.nag_directions
        self.alpha = nn.Parameter(torch.empty(1))
        if C:
            self.w = nn.Parameter(torch.empty(C, config.n_embd))
            self.constants = nn.Parameter(torch.empty(2 * C + 1))  # b, p, and beta before softplus
        self.start = layer**-ALPHA_POWER
        self.modulated = C > 0
        self.parts = dict(centre=config.nag_centre, orthogonal=config.nag_orthogonal)
        self.register_buffer("ramp", torch.ones(1))  # train.py raises it over alpha_warmup_iters

    def reset_parameters(self):
        nn.init.constant_(self.alpha, self.start)
        if self.modulated:
            nn.init.normal_(self.w, std=self.w.size(1) ** -0.5)
            nn.init.zeros_(self.constants)
            self.constants[-1] = math.log(math.e - 1)  # beta = 1

    def turn(self, r):
        """Eq. 5: a of every token, (B, T, 1)"""
        a = self.ramp * self.alpha
        if not self.modulated:
            return a.expand(*r.shape[:-1], 1)
        b, p, raw_beta = self.constants.split([len(self.w), len(self.w), 1])
        return a * modulator(F.linear(r, self.w), b, p, F.softplus(raw_beta))

    def read(self, stream):
        return stream.x, stream

    def write(self, stream, f, gate=1.0, turn=None):
        r, s = stream.x, stream.lane
        if on_cuda(r):
            a, ramp = (self.alpha, self.ramp) if turn is None else (turn, None)
            a = gate * a if norms.scales(gate) else a
            modulated = self.modulated and turn is None
            factor = (self.w, self.constants) if modulated else None
            x, lane = kernels.rotate(r, s, f, a, factor, ramp, **self.parts)
            return stream.replace(x=x, lane=lane)
        turn = self.turn(r) if turn is None else turn  # mod.py passes that of its router
        x, lane = rotate(r, s, f, gate * turn, **self.parts)
        return stream.replace(x=x, lane=lane)


class Orthogonal(PreNorm):
    """x <- x + f - (<f, x> / <x, x>) x, f = F(Norm(x)): pre-norm plus Eq. 3 (arXiv 2505.11881)"""

    def write(self, stream, f, gate=1.0):
        x, f = upcast(stream.x), upcast(f)
        c = (f * x).sum(-1, keepdim=True) / (x.square().sum(-1, keepdim=True) + 1e-12)  # Eq. 3
        return stream.replace(x=stream.x + (gate * (f - c * x)).to(stream.x.dtype))


RESIDUALS = {"nag": NAG, "orthogonal": Orthogonal}
