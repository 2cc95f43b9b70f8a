"""
Triton kernels for CUDA. Each one is a drop-in for a function of a concept's file, whose plain lines
stay there: they are the reference, and what a CPU runs. Equations have that file's numbers.

A pass is one read or write of the stream (N, D), N tokens. Statistics are float32, or float64 if
the stream is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

# ------------------------------------------------------------------------------------------------
# NAG: the write of a sublayer, Eqs. 2 to 6 of nag.py

ROWS, SPAN = 16, 512  # of the tile that a program works on at a time: rows, and bytes of a row


@triton.jit
def tile(ptr, row, at, N, D: tl.constexpr, WIDE: tl.constexpr, AGAIN: tl.constexpr = False):
    """ptr[row, at], and 0 outside of (N, D)"""
    inside = (row[:, None] < N) & (at[None, :] < D)
    policy: tl.constexpr = "evict_last" if AGAIN else ""
    x = tl.load(ptr + (row[:, None] * D + at[None, :]), inside, 0.0, eviction_policy=policy)
    return x.to(WIDE)


@triton.jit
def column(ptr, row, N, WIDE: tl.constexpr, AGAIN: tl.constexpr = False):
    policy: tl.constexpr = "evict_last" if AGAIN else ""
    return tl.load(ptr + row, row < N, 0.0, eviction_policy=policy).to(WIDE)


@triton.jit
def put(ptr, row, at, N, D: tl.constexpr, values):
    inside = (row[:, None] < N) & (at[None, :] < D)
    tl.store(ptr + (row[:, None] * D + at[None, :]), values, mask=inside)


@triton.jit
def modulated(products, b_ptr, p_ptr, raw_ptr, C: tl.constexpr, WIDE: tl.constexpr,
              PADDED: tl.constexpr):  # fmt: skip
    """Eq. 5: the sigmoids, softmax(p), the mixture, beta = softplus(raw) and m"""
    one = tl.arange(0, PADDED)
    b = tl.load(b_ptr + one, mask=one < C, other=0.0).to(WIDE)
    p = tl.load(p_ptr + one, mask=one < C, other=-float("inf")).to(WIDE)
    raw = tl.load(raw_ptr).to(WIDE)
    beta = tl.maximum(raw, 0.0) + tl.log(1 + tl.exp(-tl.abs(raw)))
    q = tl.exp(p - tl.max(p, 0))
    q /= tl.sum(q, 0)
    sigmoid = 1 / (1 + tl.exp(-(products + b[None, :])))
    mixture = tl.sum(sigmoid * q[None, :], 1)
    return sigmoid, q, mixture, beta, tl.exp(beta * tl.log(tl.maximum(mixture, 1e-6)))


@triton.jit
def lengths(mean, m, rr, rf, ff, a, EPS: tl.constexpr, CENTRE: tl.constexpr,
            ORTHOGONAL: tl.constexpr):  # fmt: skip
    """The scalars of a token, as in nag.Rotation.forward"""
    least = ff * (1000 * 2.0**-52 if ff.dtype == tl.float64 else 1000 * 2.0**-23)
    m = m if CENTRE else m * 0
    rg, gg = rf - m * mean, ff - m * m  # <r, g> and <g, g> after Eq. 2
    c = rg / (rr + EPS) if ORTHOGONAL else rg * 0
    gg = tl.maximum(gg - c * rg, 0.0)  # Eq. 3
    rg = rg - c * rr
    h = 1 / tl.sqrt(tl.maximum(gg, least) + EPS)  # Eq. 4: u = h g
    k = a * h
    square = rr + 2 * k * rg + k * k * gg  # <z, z>
    n = 1 / tl.sqrt(square + EPS)
    bend = tl.where(gg > least, k * h * h, 0.0)
    return m, c, rg, gg, h, k, square, n, bend


@triton.jit
def rotate_forward(r_ptr, s_ptr, f_ptr, a_ptr, w_ptr, b_ptr, p_ptr, raw_ptr,
                   new_ptr, lane_ptr, products_ptr, N, EACH: tl.constexpr,
                   D: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr,
                   EPS: tl.constexpr,
                   CENTRE: tl.constexpr, ORTHOGONAL: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Three passes: read r and f, write the new r. The second loop finds r and f in the cache."""
    WIDE: tl.constexpr = tl.float64 if r_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = tl.arange(0, PADDED)
    mean = tl.zeros((ROWS,), WIDE)
    m, rr, rf, ff = mean, mean, mean, mean
    products = tl.zeros((ROWS, PADDED), WIDE)
    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = tile(r_ptr, row, at, N, D, WIDE), tile(f_ptr, row, at, N, D, WIDE)
        mean += tl.sum(x, 1)
        m += tl.sum(y, 1)
        rr += tl.sum(x * x, 1)
        rf += tl.sum(x * y, 1)
        ff += tl.sum(y * y, 1)
        if C:
            w = tile(w_ptr, one, at, C, D, w_ptr.dtype.element_ty)
            xw = x.to(w.dtype)
            products = tl.dot(xw, w.T, products, input_precision="ieee", out_dtype=WIDE)

    a = column(a_ptr, row * EACH, N, WIDE)
    if C:
        products = products.to(w_ptr.dtype.element_ty)
        put(products_ptr, row, one, N, C, products)
        sigmoid, q, mixture, beta, gate = modulated(
            products.to(WIDE), b_ptr, p_ptr, raw_ptr, C, WIDE, PADDED
        )
        a *= gate
    m, c, rg, gg, h, k, square, n, bend = lengths(
        mean / D, m / D, rr / D, rf / D, ff / D, a, EPS, CENTRE, ORTHOGONAL
    )
    growth = tl.log(1 + a * a if ORTHOGONAL else square) / 2
    tl.store(lane_ptr + row, column(s_ptr, row, N, WIDE) + growth, mask=row < N)
    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = tile(r_ptr, row, at, N, D, WIDE), tile(f_ptr, row, at, N, D, WIDE)
        g = y - m[:, None] - c[:, None] * x
        put(new_ptr, row, at, N, D, n[:, None] * (x + k[:, None] * g))  # Eq. 6


@triton.jit
def rotate_backward(r_ptr, f_ptr, a_ptr, w_ptr, b_ptr, p_ptr, raw_ptr,
                    products_ptr, of_new_ptr, of_lane_ptr,
                    of_r_ptr, of_f_ptr, of_a_ptr, of_products_ptr, parts_ptr, N, EACH: tl.constexpr,
                    D: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr,
                    EPS: tl.constexpr,
                    CENTRE: tl.constexpr, ORTHOGONAL: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Five passes: read r, f and the gradient of the new r, write those of r and f. As in
    nag.Rotation.backward, and then Eq. 5 backwards. parts (2 C + 2, programs): sums of
    the gradients of b, p, raw_beta and a over the tokens of a program.
    """
    WIDE: tl.constexpr = tl.float64 if r_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = tl.arange(0, PADDED)
    mean = tl.zeros((ROWS,), WIDE)
    m, rr, rf, ff, in_r, in_f, in_1 = mean, mean, mean, mean, mean, mean, mean
    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = tile(r_ptr, row, at, N, D, WIDE), tile(f_ptr, row, at, N, D, WIDE)
        of_new = tile(of_new_ptr, row, at, N, D, WIDE)
        mean += tl.sum(x, 1)
        m += tl.sum(y, 1)
        rr += tl.sum(x * x, 1)
        rf += tl.sum(x * y, 1)
        ff += tl.sum(y * y, 1)
        in_r += tl.sum(of_new * x, 1)
        in_f += tl.sum(of_new * y, 1)
        in_1 += tl.sum(of_new, 1)

    a = column(a_ptr, row * EACH, N, WIDE)
    if C:
        products = tile(products_ptr, row, one, N, C, WIDE)
        sigmoid, q, mixture, beta, gate = modulated(
            products, b_ptr, p_ptr, raw_ptr, C, WIDE, PADDED
        )
        a *= gate
    mean, in_r, in_f, in_1, rr = mean / D, in_r / D, in_f / D, in_1 / D, rr / D
    m, c, rg, gg, h, k, square, n, bend = lengths(
        mean, m / D, rr, rf / D, ff / D, a, EPS, CENTRE, ORTHOGONAL
    )
    of_lane = column(of_lane_ptr, row, N, WIDE)
    in_g = in_f - m * in_1 - c * in_r
    t = -n * n * n * (in_r + k * in_g)
    if not ORTHOGONAL:
        t += tl.where(row < N, of_lane / square, 0.0) / D
    z_in_r = n * in_r + t * (rr + k * rg)
    z_in_g = n * in_g + t * (rg + k * gg)
    bent = bend * z_in_g
    v = (bent * rg - k * z_in_r) / (rr + EPS) if ORTHOGONAL else rg * 0
    shift = k * (n * in_1 + t * (1 - k * c) * mean) + (bent * c + v) * mean
    of_a = D * h * z_in_g
    if ORTHOGONAL:
        of_a += of_lane * a / (1 + a * a)

    parts, P = parts_ptr + tl.program_id(0), tl.num_programs(0)
    if C:
        of_mixture = tl.where(mixture >= 1e-6, of_a * a * beta / mixture, 0.0)
        of_sigmoid = of_mixture[:, None] * q[None, :]
        of_products = of_sigmoid * sigmoid * (1 - sigmoid)
        put(of_products_ptr, row, one, N, C, of_products)
        of_q = tl.sum(of_mixture[:, None] * sigmoid, 0)
        of_beta = tl.sum(of_a * a * tl.log(tl.maximum(mixture, 1e-6)), 0)
        tl.store(parts + P * one, tl.sum(of_products, 0), mask=one < C)
        tl.store(parts + P * (C + one), q * (of_q - tl.sum(of_q * q, 0)), mask=one < C)
        tl.store(parts + P * 2 * C, of_beta * (1 - tl.exp(-beta)))
        of_a *= gate
        of_products = of_products.to(w_ptr.dtype.element_ty)
    tl.store(parts + P * (2 * C + 1), tl.sum(of_a, 0))
    if EACH:
        tl.store(of_a_ptr + row, of_a, mask=row < N)

    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = tile(r_ptr, row, at, N, D, WIDE), tile(f_ptr, row, at, N, D, WIDE)
        of_new = tile(of_new_ptr, row, at, N, D, WIDE)
        g = y - m[:, None] - c[:, None] * x
        of_z = n[:, None] * of_new + t[:, None] * (x + k[:, None] * g)
        of_g = k[:, None] * of_z - bent[:, None] * g
        of_r = of_z - c[:, None] * of_g + v[:, None] * (g - c[:, None] * x)
        of_f = of_g + v[:, None] * x
        if CENTRE:
            of_f -= shift[:, None]
        if C:
            w = tile(w_ptr, one, at, C, D, w_ptr.dtype.element_ty)
            of_r = tl.dot(of_products, w, of_r, input_precision="ieee", out_dtype=WIDE)
        put(of_r_ptr, row, at, N, D, of_r)
        put(of_f_ptr, row, at, N, D, of_f)


def launch(kernel, tensors, a, w, eps, centre, orthogonal):
    """Run a kernel of NAG over all tokens."""
    r = tensors[0]
    N, D, C = r.numel() // r.size(-1), r.size(-1), 0 if w is None else len(w)
    wrap_triton(kernel)[(triton.cdiv(N, ROWS),)](
        *tensors, N, EACH=int(a.numel() > 1), D=D, C=C, PADDED=max(16, triton.next_power_of_2(C)),
        num_warps=8, EPS=eps, CENTRE=centre, ORTHOGONAL=orthogonal,
        ROWS=ROWS, COLUMNS=min(SPAN // r.element_size(), max(16, triton.next_power_of_2(D))),
    )  # fmt: skip


@triton_op("residual::rotate", mutates_args=())
def rotated(
    r: Tensor, s: Tensor, f: Tensor, a: Tensor, w: Tensor | None, b: Tensor | None,
    p: Tensor | None, raw: Tensor | None, eps: float, centre: bool, orthogonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The new r and s, and the products of r with the rows of w"""
    products = r.new_empty(0) if w is None else w.new_empty(*r.shape[:-1], len(w))
    out = torch.empty_like(r), torch.empty_like(s), products
    launch(rotate_forward, (r, s, f, a, w, b, p, raw, *out), a, w, eps, centre, orthogonal)
    return out


@triton_op("residual::rotate_backward", mutates_args=())
def rotated_backward(
    r: Tensor, f: Tensor, a: Tensor, w: Tensor | None, b: Tensor | None, p: Tensor | None,
    raw: Tensor | None, products: Tensor, of_new: Tensor, of_lane: Tensor,
    eps: float, centre: bool, orthogonal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of r, f, a and the products, and parts"""
    programs, C = triton.cdiv(of_lane.numel(), ROWS), 0 if w is None else len(w)
    out = [*map(torch.empty_like, (r, f, a, products)), a.new_empty(2 * C + 2, programs)]
    tensors = r, f, a, w, b, p, raw, products, of_new, of_lane, *out
    launch(rotate_backward, tensors, a, w, eps, centre, orthogonal)
    return tuple(out)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, s, f, a, w, b, p, raw, *options):
        new, lane, products = rotated(r, s, f, a, w, b, p, raw, *options)
        ctx.save_for_backward(r, f, a, w, b, p, raw, products)
        ctx.options = options
        return new, lane

    @staticmethod
    def backward(ctx, of_new, of_lane):
        r, _, a, w, *_ = saved = ctx.saved_tensors
        given = of_new.contiguous(), of_lane.contiguous()
        of_r, of_f, of_a, of_products, parts = rotated_backward(*saved, *given, *ctx.options)
        total = parts.sum(1)
        of_a = total[-1:].view_as(a) if a.numel() == 1 else of_a
        of_modulator = None, None, None, None
        if w is not None:
            of_w = of_products.flatten(0, -2).T @ r.flatten(0, -2).to(w.dtype)  # one more pass
            C = len(w)
            of_modulator = of_w, total[:C], total[C : 2 * C], total[2 * C : 2 * C + 1]
        return of_r, of_lane, of_f, of_a, *of_modulator, None, None, None


def rotate(r, s, f, a, modulator=None, eps=1e-12, centre=True, orthogonal=True):
    """nag.rotate, where a is multiplied by m of Eq. 5 if modulator is (w, b, p, raw_beta).

    It takes 3 passes, and 5 backward, and one for the gradient of w.
    """
    w, *others = (None,) * 4 if modulator is None else modulator
    if w is not None and torch.is_autocast_enabled(r.device.type):  # as for other products
        w = w.to(torch.get_autocast_dtype(r.device.type))
    a = a if a.numel() == 1 else a.expand_as(s).contiguous()
    inputs = r.contiguous(), s.contiguous(), f.contiguous(), a, w, *others
    return Rotate.apply(*inputs, eps, centre, orthogonal)


# ------------------------------------------------------------------------------------------------
# Attention Residuals: the read of a sublayer, Eq. 1 of attnres.py
#
# The two sublayers of a block share all sources but the newest. The first one reads them once for
# both: besides its own sum it leaves the second one's sum o over the shared sources, and
# lse = log sum_i exp(score_i). The second one takes (o, lse) as one more source, with score lse.

WARPS = 2048  # of all programs of the backward kernel. Each leaves a part of the sums over tokens


@triton.jit
def vector(ptr, start, at, D: tl.constexpr, WIDE: tl.constexpr, AGAIN: tl.constexpr = False):
    """ptr[start + at], and 0 from D on"""
    policy: tl.constexpr = "evict_last" if AGAIN else ""
    return tl.load(ptr + (start + at), at < D, 0.0, eviction_policy=policy).to(WIDE)


@triton.jit
def add_source(v, q, ran_ptr, score_ptr, top, total, acc, D: tl.constexpr, EPS: tl.constexpr):
    """One step of the softmax: acc / total is the weighted sum so far, and top the largest score"""
    score = tl.sum(q * v, 0) / tl.sqrt(tl.sum(v * v, 0) / D + EPS)
    if ran_ptr is not None:
        score = tl.where(tl.load(ran_ptr), score, -float("inf"))
    tl.store(score_ptr, score)
    new = tl.maximum(top, score)
    keep, e = tl.exp(top - new), tl.exp(score - new)
    return new, total * keep + e, acc * keep + e * v


@triton.jit
def read_forward(vs, ran_ptr, q_ptr, q2_ptr, gain_ptr, o_ptr, lse_ptr,
                 y_ptr, o2_ptr, lse2_ptr, scores_ptr, N, D: tl.constexpr, BLOCK: tl.constexpr,
                 SHARED: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr):  # fmt: skip
    """Reads each source once, and o. Writes y = Norm(h), or h if there is no gain, and o2.

    scores (sources + 1 + SHARED, N): of the sources, the lse of all, those of the second sublayer
    """
    WIDE: tl.constexpr = tl.float64 if q_ptr.dtype.element_ty == tl.float64 else tl.float32
    M: tl.constexpr = len(vs)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start = row * D
    q = vector(q_ptr, 0, at, D, WIDE)
    top, total, acc = tl.full((), -float("inf"), WIDE), tl.full((), 0.0, WIDE), q * 0
    top2, total2, acc2 = top, total, acc
    if SHARED:
        q2 = vector(q2_ptr, 0, at, D, WIDE)
    if o_ptr is not None:
        top, total, acc = tl.load(lse_ptr + row), total + 1, vector(o_ptr, start, at, D, WIDE)
    for i in tl.static_range(M):
        v = vector(vs[i], start, at, D, WIDE)
        ran = None if ran_ptr is None else ran_ptr + i * N + row
        score = scores_ptr + (i * N + row)
        top, total, acc = add_source(v, q, ran, score, top, total, acc, D, EPS)
        if i < SHARED:
            score += (M + 1) * N
            top2, total2, acc2 = add_source(v, q2, ran, score, top2, total2, acc2, D, EPS)
    y = acc / total
    tl.store(scores_ptr + (M * N + row), top + tl.log(total))
    if gain_ptr is not None:
        y *= vector(gain_ptr, 0, at, D, WIDE) / tl.sqrt(tl.sum(y * y, 0) / D + NORM_EPS)
    tl.store(y_ptr + (start + at), y, at < D)
    if SHARED:
        tl.store(o2_ptr + (start + at), acc2 / total2, at < D)
        tl.store(lse2_ptr + row, top2 + tl.log(total2))


@triton.jit
def of_source(v, q, of_sum, delta, inv, lse, score_ptr):
    """What a reader adds to the gradients of v, of inv v and of q. of_sum is that of its sum."""
    score = tl.load(score_ptr)
    p = tl.exp(score - lse)
    of_score = p * (tl.sum(of_sum * v, 0) - delta) * inv
    return p * of_sum + of_score * q, of_score * tl.where(p > 0, score, 0.0), of_score * v


@triton.jit
def read_backward(vs, of_vs, q_ptr, q2_ptr, gain_ptr, o_ptr, lse_ptr, lse2_ptr, scores_ptr,
                  of_y_ptr, of_o2_ptr, of_lse2_ptr, of_o_ptr, of_lse_ptr, parts_ptr,
                  N, D: tl.constexpr, BLOCK: tl.constexpr,
                  SHARED: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr):  # fmt: skip
    """Reads each source, o, and the gradients of y and o2; writes those of each source and of o.

    The second loop over the sources finds them in the cache. parts (2 or 3, programs, D): sums of
    the gradients of q, the gain and q2 over the tokens of a program.
    """
    WIDE: tl.constexpr = tl.float64 if q_ptr.dtype.element_ty == tl.float64 else tl.float32
    M: tl.constexpr = len(vs)
    at = tl.arange(0, BLOCK)
    q = vector(q_ptr, 0, at, D, WIDE)
    of_q = q * 0
    of_q2, of_gain = of_q, of_q
    if SHARED:
        q2 = vector(q2_ptr, 0, at, D, WIDE)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        row = token + tl.full((), 0, tl.int64)
        start, scores = row * D, scores_ptr + row
        lse, h = tl.load(scores + M * N), q * 0
        o2 = h
        if SHARED:
            lse2 = tl.load(lse2_ptr + row)
        for i in tl.static_range(M):
            v = vector(vs[i], start, at, D, WIDE, AGAIN=True)
            h += tl.exp(tl.load(scores + i * N) - lse) * v
            if i < SHARED:
                o2 += tl.exp(tl.load(scores + (M + 1 + i) * N) - lse2) * v
        if o_ptr is not None:
            o, p = vector(o_ptr, start, at, D, WIDE), tl.exp(tl.load(lse_ptr + row) - lse)
            h += p * o
        of_h = vector(of_y_ptr, start, at, D, WIDE)
        if gain_ptr is not None:
            n = 1 / tl.sqrt(tl.sum(h * h, 0) / D + NORM_EPS)
            of_gain += of_h * n * h
            of_h *= n * vector(gain_ptr, 0, at, D, WIDE)
            of_h -= n * n * h * (tl.sum(of_h * h, 0) / D)
        delta = tl.sum(of_h * h, 0)
        if SHARED:
            of_o2 = vector(of_o2_ptr, start, at, D, WIDE)
            delta2 = tl.sum(of_o2 * o2, 0) - tl.load(of_lse2_ptr + row)
        if o_ptr is not None:
            tl.store(of_o_ptr + (start + at), p * of_h, at < D)
            tl.store(of_lse_ptr + row, p * (tl.sum(of_h * o, 0) - delta))
        for i in tl.static_range(M):
            v = vector(vs[i], start, at, D, WIDE)
            inv = 1 / tl.sqrt(tl.sum(v * v, 0) / D + EPS)
            of_v, along, more = of_source(v, q, of_h, delta, inv, lse, scores + i * N)
            of_q += more
            if i < SHARED:
                score = scores + (M + 1 + i) * N
                of_v2, along2, more = of_source(v, q2, of_o2, delta2, inv, lse2, score)
                of_v, along, of_q2 = of_v + of_v2, along + along2, of_q2 + more
            tl.store(of_vs[i] + (start + at), of_v - along * inv / D * v, at < D)
    part, P = parts_ptr + tl.program_id(0) * D + at, tl.num_programs(0) * D
    tl.store(part, of_q, at < D)
    tl.store(part + P, of_gain, at < D)
    if SHARED:
        tl.store(part + 2 * P, of_q2, at < D)


def warps(D):
    return min(8, max(1, triton.next_power_of_2(D) // 256))


def constants(q, shared, eps, norm_eps):
    """Those of both kernels"""
    D = len(q)
    block = dict(D=D, BLOCK=triton.next_power_of_2(D), num_warps=warps(D))
    return block | dict(SHARED=shared, EPS=eps, NORM_EPS=norm_eps)


@custom_op("residual::read", mutates_args=())
def read_op(
    vs: list[Tensor], ran: Tensor | None, q: Tensor, q2: Tensor | None,
    gain: Tensor | None, o: Tensor | None, lse: Tensor | None,
    shared: int, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    y, o2, lse2, scores = out = outputs_of_read(vs, ran, q, q2, gain, o, lse, shared, eps, norm_eps)
    N = scores.size(1)
    read_forward[(N,)](
        tuple(vs), ran, q, q2, gain, o, lse, *out, N, **constants(q, shared, eps, norm_eps)
    )
    return out


@read_op.register_fake
def outputs_of_read(vs, ran, q, q2, gain, o, lse, shared, eps, norm_eps):
    first = vs[0] if o is None else o  # has the dtype of the stream
    y = torch.empty_like(first, dtype=q.dtype if gain is None else first.dtype)
    N = first.numel() // first.size(-1)
    o2, lse2 = (first, N) if shared else (first[:0], 0)
    scores = q.new_empty(len(vs) + 1 + shared, N)
    return y, torch.empty_like(o2), q.new_empty(lse2), scores


@custom_op("residual::read_backward", mutates_args=())
def read_backward_op(
    vs: list[Tensor], q: Tensor, q2: Tensor | None, gain: Tensor | None, o: Tensor | None,
    lse: Tensor | None, lse2: Tensor, scores: Tensor, of_y: Tensor, of_o2: Tensor,
    of_lse2: Tensor, shared: int, eps: float, norm_eps: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the sources, o and lse, and parts"""
    out = outputs_of_read_backward(
        vs, q, q2, gain, o, lse, lse2, scores, of_y, of_o2, of_lse2, shared, eps, norm_eps
    )
    *of_vs, of_o, of_lse, parts = out
    read_backward[(parts.size(1),)](
        tuple(vs), tuple(of_vs), q, q2, gain, o, lse, lse2, scores, of_y, of_o2, of_lse2,
        of_o, of_lse, parts, scores.size(1), **constants(q, shared, eps, norm_eps),
    )  # fmt: skip
    return out


@read_backward_op.register_fake
def outputs_of_read_backward(vs, q, q2, gain, o, lse, lse2, scores, *rest):
    programs = min(scores.size(1), max(1, WARPS // warps(len(q))))
    sums = [q.new_empty(0) if x is None else torch.empty_like(x) for x in (o, lse)]
    return [*map(torch.empty_like, vs), *sums, q.new_empty(2 + (q2 is not None), programs, len(q))]


def keep(ctx, inputs, output):
    vs, _, q, q2, gain, o, lse, *ctx.options = inputs
    ctx.save_for_backward(q, q2, gain, o, lse, output[2], output[3], *vs)


def backward(ctx, of_y, of_o2, of_lse2, of_scores):
    q, q2, gain, o, lse, lse2, scores, *vs = ctx.saved_tensors
    given = of_y.contiguous(), of_o2.contiguous(), of_lse2.contiguous()
    *of_vs, of_o, of_lse, parts = read_backward_op(
        vs, q, q2, gain, o, lse, lse2, scores, *given, *ctx.options
    )
    of_q, of_gain, *of_q2 = parts.sum(1)
    of_q2, of_gain = of_q2[0] if of_q2 else None, None if gain is None else of_gain
    of_o, of_lse = (None, None) if o is None else (of_o, of_lse)
    return of_vs, None, of_q, of_q2, of_gain, of_o, of_lse, None, None, None


read_op.register_autograd(backward, setup_context=keep)


def read(sources, q, eps, gain, norm_eps, ahead=None, q2=None, shared=0):
    """(Norm(h), (o2, lse2)) of Eq. 1 for pairs (v, ran) and the query q = w g, in float32.

    gain: that of the RMSNorm, or None for h itself. ahead: (o, lse) of sources that are not in the
    list. q2: the query of the second sublayer, for which o2 sums the first `shared` sources.
    """
    vs = [v.contiguous() for v, _ in sources]
    rans, ran = [ran for _, ran in sources], None
    if any(ran is not None for ran in rans):  # (sources, B, T, 1)
        everywhere = torch.ones_like(vs[0][..., :1], dtype=torch.bool)
        ran = torch.stack([everywhere if ran is None else ran for ran in rans])
    o, lse = (None, None) if ahead is None else ahead
    y, o2, lse2, _ = read_op(vs, ran, q, q2, gain, o, lse, shared, eps, norm_eps)
    return y, (o2, lse2)
