"""
Triton kernels for CUDA. Each one is a drop-in for a function of a concept's file, whose plain lines
stay there: they are the reference, and what a CPU runs. Equations have that file's numbers.

A pass is one read or write of a tensor (N, C), with N tokens. Statistics are float32, or float64 if
the tensor is. Triton's interpreter has run these kernels and they compile for an H100, but no GPU
has run them yet: with norms.KERNELS = False CUDA runs the plain lines, compiled.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # available is False
    triton, tl = SimpleNamespace(jit=lambda kernel: kernel), SimpleNamespace(constexpr=None)

available = hasattr(triton, "cdiv") and torch.version.hip is None  # AMD's Triton has no "tf32x3"


@triton.jit
def up(x):
    """Cast to the dtype of statistics, as norms.upcast."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


interpreted = type(up).__name__ == "InterpretedFunction"
if not (torch.cuda.is_available() or interpreted):
    triton_op = lambda *name, **how: lambda function: function  # it imports the compiler: 2 seconds


# ------------------------------------------------------------------------------------------------
# Streams: X (n, N, C) for N tokens, in the modes hc, mhc, ihc and smhc of streams.py.
#
# Passes, each one read or write of a tensor (N, C):
#
#     exchange            write of one sublayer, read of the next: X n, f 1; new X n, h 1
#     Maps backward       gradients of h_pre and of the norm, compiled lines: new X n, that of h 1
#                         (smhc, whose h_pre is given: h 1, that of h 1)
#     exchange backward   X n, f 1, gradients of new X n and of h 1; of X n, of f 1. It writes new X
#                         again, into registers
#     maps                a few numbers a token; Sinkhorn's backward keeps 39 n more while it runs
#
# That is 30 passes a sublayer if n = 4, or 27 in smhc, beside maps and partial sums of gradients.
# What a program reads again, and W, should come from the L2 and count as nothing. For large C the
# L2 may be too small for that.
#
# h is rounded to its dtype before its norm and after it; the plain lines round it once.
#
# The gradient of h has two parts. `Maps` sends one to h_pre, which must be known before the maps'
# own gradients. `Exchange` gets the other, and all gradients of X, in one pass. In smhc h_pre is an
# input of `Exchange`, which sends both parts.
#
# With rho = 1 / rms(h), a norm gives rho gain h. Its gradient g becomes rho gain g - rho^3 q h / C,
# where q = <gain g, h>: `Maps` computes q, and sends it to `Exchange` as if it were the gradient of
# rho.

MOST_STREAMS = 4  # with more of them, threads would need more registers than there are
TOKENS = 32  # of a program that makes maps
CHUNK = 1024  # tokens of a part of a sum of gradients
LEAST_TOKENS = 4096  # with fewer, as in a default run, a GPU should wait for the CPU (not timed)
NONE, GIVEN, SIGMOID, TANH = 0, 1, 2, 3  # h_pre: none, the first in lane, of mhc, of Eq. 3


@triton.jit
def place(rows, live, columns, C: tl.constexpr):
    """Where a tile is in (N, C), and which of its numbers there are."""
    return rows[:, None] * C + columns, live[:, None] & (columns < C)


@triton.jit
def tiles(X, at, size, mask, n: tl.constexpr):
    """A tile of each stream."""
    xs = ()
    for i in tl.static_range(n):
        xs = xs + (up(tl.load(X + i * size + at, mask, 0.0)),)
    return xs


@triton.jit
def numbers(P, rows, stride, live, first: tl.constexpr, count: tl.constexpr):
    """P[rows, first + i] for i < count: vectors (BT, 1)."""
    found = ()
    for i in tl.static_range(count):
        found = found + (up(tl.load(P + rows * stride + first + i, live, 0.0))[:, None],)
    return found


@triton.jit
def weighted(weights, xs, n: tl.constexpr):
    total = weights[0] * xs[0]
    for i in tl.static_range(1, n):
        total += weights[i] * xs[i]
    return total


@triton.jit
def written(X, F, Lane, rows, live, at, size, mask, n: tl.constexpr, E: tl.constexpr):
    """A tile of f, h_post, and a tile of each stream after the write, rounded as it is stored. E:
    numbers of a row of Lane, which are h_post, (h_post, M) or (h_pre, h_post, M)."""
    ahead: tl.constexpr = n if E > n + n * n else 0
    mixes: tl.constexpr = E > n
    f, post, new = up(tl.load(F + at, mask, 0.0)), numbers(Lane, rows, E, live, ahead, n), ()
    for k in tl.static_range(n):
        new = new + (post[k] * f,)
    for j in tl.static_range(n):
        x, before, new = up(tl.load(X + j * size + at, mask, 0.0)), new, ()
        M = numbers(Lane, rows, E, live, ahead + n + j * n, n if mixes else 0)
        for k in tl.static_range(n):
            if mixes:
                new = new + (before[k] + M[k] * x,)
            else:
                new = new + (before[k] + x if j == k else before[k],)
    stored = ()
    for k in tl.static_range(n):
        stored = stored + (up(new[k].to(X.dtype.element_ty)),)
    return f, post, stored


@triton.jit
def product(x, w, total, half: tl.constexpr):
    """total + x w. half: x holds numbers of bfloat16, so that two such parts of w are enough"""
    if half:
        x, high = x.to(tl.bfloat16), w.to(tl.bfloat16)
        total = tl.dot(x, high, total)
        return tl.dot(x, (w - high).to(tl.bfloat16), total)
    else:
        return tl.dot(x, w, total, input_precision="tf32x3", out_dtype=total.dtype)


@triton.jit
def rounded(x):
    """float32 rounded to TF32, as PyTorch's products of float32 do here. tl.dot would cut it."""
    if x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True) + 0x1000
        return tl.where(x == x, (bits & -0x2000).to(tl.float32, bitcast=True), x)
    else:
        return x


@triton.jit
def rough_product(x, w, total):
    """total + x w, for rounded x and w"""
    return tl.dot(x, w, total, input_precision="tf32", out_dtype=total.dtype)


@triton.jit
def squashed(y, scale, s, b, tanh: tl.constexpr):
    """(tanh(z), s tanh(z) + b) or (z, s z + b), where z = y scale"""
    z = y * scale
    if tanh:
        z = 2 / (1 + tl.exp(-2 * z)) - 1
    return z, s * z + b


@triton.jit
def exchange_kernel(
    X, F, Lane, W, SB, Gain, Out, Y, Squares, Pre, Rho, H, N,
    eps: tl.constexpr, norm_eps: tl.constexpr, C: tl.constexpr, n: tl.constexpr, R: tl.constexpr,
    RP: tl.constexpr, K: tl.constexpr, E: tl.constexpr, n_s: tl.constexpr, source: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """W has R rows, of K streams each. If K = 1, each stream has R products and a square of its
    own. SB: s, which has n_s numbers, then b."""
    writes: tl.constexpr = F is not None
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    live, rows = rows < N, rows.to(tl.int64)
    size, row = tl.cast(N, tl.int64) * C, tl.arange(0, RP)
    zero = up(tl.zeros((BT, BC), X.dtype.element_ty))
    ys, squares, length = (tl.zeros((BT, RP), zero.dtype),) * (n // K), (zero,) * (n // K), zero
    if source == 1:
        pre = numbers(Lane, rows, E, live, 0, n)

    for c in range(0, C, BC):
        columns = c + tl.arange(0, BC)
        at, mask = place(rows, live, columns, C)
        if writes:
            _, _, xs = written(X, F, Lane, rows, live, at, size, mask, n, E)
            for k in tl.static_range(n):
                tl.store(Out + k * size + at, xs[k].to(Out.dtype.element_ty), mask)
        else:
            xs = tiles(X, at, size, mask, n)
        if R > 0:
            half: tl.constexpr = X.dtype.element_ty == tl.bfloat16
            for i in tl.static_range(n):
                if i < K:
                    w = W + row[None, :] * (K * C) + i * C + columns[:, None]
                    w = up(tl.load(w, (row < R)[None, :] & (columns < C)[:, None], 0.0))
                ys = ys[1:] + (product(xs[i], w, ys[0], half),)  # in turn, if there are several
                squares = squares[1:] + (squares[0] + xs[i] * xs[i],)
        if source == 1:
            h = weighted(pre, xs, n)
            length += h * h
            tl.store(H + at, h.to(H.dtype.element_ty), mask)

    if R > 0:
        sums = ()
        for i in tl.static_range(n // K):
            of_y = Y + rows[:, None] * (n // K * R) + i * R + row
            tl.store(of_y, ys[i], live[:, None] & (row < R))
            sums = sums + (tl.sum(squares[i], 1),)
            tl.store(Squares + rows * (n // K) + i, sums[i], live)
    if source >= 2:  # h_pre of Eq. 3 or 4
        tanh: tl.constexpr = source == 3
        s, pre = tl.load(SB), ()
        for i in tl.static_range(n):
            y_i = tl.sum(tl.where(row == (0 if tanh else i), ys[i if tanh else 0], 0.0), 1)
            scale = tl.rsqrt(sums[i if tanh else 0] / (K * C) + eps)
            b = tl.load(SB + n_s + (i * R if tanh else i))
            _, h_pre = squashed(y_i, scale, s, b, tanh)
            if not tanh:
                h_pre = 1 / (1 + tl.exp(-h_pre)) + eps
            pre = pre + (h_pre[:, None],)
        tl.debug_barrier()  # other threads wrote what this one reads
        for c in range(0, C, BC):
            columns = c + tl.arange(0, BC)
            at, mask = place(rows, live, columns, C)
            h = weighted(pre, tiles(Out if writes else X, at, size, mask, n), n)
            length += h * h
            tl.store(H + at, h.to(H.dtype.element_ty), mask)
    if source >= 1:
        for i in tl.static_range(n):
            tl.store(Pre + rows[:, None] * n + i, pre[i], live[:, None])
    if Gain is not None:
        rho = tl.rsqrt(tl.sum(length, 1) / C + norm_eps)
        tl.store(Rho + rows, rho, live)
        tl.debug_barrier()
        for c in range(0, C, BC):
            columns = c + tl.arange(0, BC)
            at, mask = place(rows, live, columns, C)
            gain = up(tl.load(Gain + columns, columns < C, 0.0))
            h = up(tl.load(H + at, mask, 0.0)) * rho[:, None] * gain
            tl.store(H + at, h.to(H.dtype.element_ty), mask)


@triton.jit
def exchange_backward_kernel(
    X, F, Lane, W, Gain, Pre, Rho, Q, Grad_new, Grad_h, Grad_y, Grad_squares,
    Grad_x, Grad_f, Grad_lane, Parts, N, chunk,
    C: tl.constexpr, n: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, K: tl.constexpr,
    E: tl.constexpr, given: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    writes: tl.constexpr = F is not None
    reads: tl.constexpr = Grad_h is not None
    normed: tl.constexpr = reads and Gain is not None
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    zero = up(tl.zeros((BT, BC), Grad_x.dtype.element_ty))
    row, size = tl.arange(0, RP), tl.cast(N, tl.int64) * C
    ahead: tl.constexpr = n if E > n + n * n else 0  # of h_post in Lane
    if R > 0:
        ws, offset = (), row[:, None] * (K * C) + columns
        sums = (up(tl.zeros((RP, BC), W.dtype.element_ty)),) * K
        used = (row < R)[:, None] & (columns < C)
        for i in tl.static_range(K):
            ws = ws + (rounded(up(tl.load(W + offset + i * C, used, 0.0))),)
    if normed:
        gain = up(tl.load(Gain + columns, columns < C, 0.0))
        of_gain = gain * 0
    first = tl.program_id(1) * chunk
    for start in range(first, tl.minimum(first + chunk, N), BT):
        rows = start + tl.arange(0, BT)
        live, rows = rows < N, rows.to(tl.int64)
        at, mask = place(rows, live, columns, C)
        lane = Grad_lane + (tl.program_id(0) * N + rows) * E
        if writes:
            f, post, new = written(X, F, Lane, rows, live, at, size, mask, n, E)
        else:
            new = tiles(X, at, size, mask, n)
        if reads:
            pre, u = numbers(Pre, rows, n, live, 0, n), up(tl.load(Grad_h + at, mask, 0.0))
            if normed:
                rho = tl.load(Rho + rows, live, 0.0)
                k = rho * rho * rho * tl.load(Q + rows, live, 0.0) / C
                h, u = weighted(pre, new, n), rho[:, None] * u
                of_gain += tl.sum(u * h, 0)
                u = u * gain - k[:, None] * h
        if R > 0:
            twice = numbers(Grad_squares, rows, n // K, live, 0, n // K)
        grads = ()
        for i in tl.static_range(n):
            grad = up(tl.load(Grad_new + i * size + at, mask, 0.0))
            if reads:
                grad += pre[i] * u
            if given:
                tl.store(lane + i, tl.sum(u * new[i], 1), live)
            elif ahead > 0 or (E > 0 and not writes):  # without a write, a lane has n numbers
                tl.store(lane + i, tl.sum(zero, 1), live)
            if R > 0:
                if i < n // K:
                    of_y = Grad_y + rows[:, None] * (n // K * R) + i * R + row
                    grad_y = rounded(tl.load(of_y, live[:, None] & (row < R), 0.0))
                grad += 2 * twice[i if K == 1 else 0] * new[i]
                grad = rough_product(grad_y, ws[i if K > 1 else 0], grad)
                more = rough_product(tl.trans(grad_y), rounded(new[i]), sums[0])
                sums = sums[1:] + (more,)  # in turn, if there are several
            grads = grads + (grad,)
        if writes:
            tl.store(Grad_f + at, weighted(post, grads, n).to(Grad_f.dtype.element_ty), mask)
            lane += ahead
            for k in tl.static_range(n):
                tl.store(lane + k, tl.sum(grads[k] * f, 1), live)
            if E > n:
                mixed = ()
                for j in tl.static_range(n):
                    x = up(tl.load(X + j * size + at, mask, 0.0))  # again: registers are few
                    M = numbers(Lane, rows, E, live, ahead + n + j * n, n)
                    for k in tl.static_range(n):
                        tl.store(lane + n + j * n + k, tl.sum(x * grads[k], 1), live)
                    mixed = mixed + (weighted(M, grads, n),)
                grads = mixed
        for i in tl.static_range(n):
            tl.store(Grad_x + i * size + at, grads[i].to(Grad_x.dtype.element_ty), mask)
    of_w: tl.constexpr = R * K * C  # in each part: the sums for W, then those for the gain
    part = Parts + tl.program_id(1) * (of_w + C if normed else of_w)
    if normed:
        tl.store(part + of_w + columns, of_gain, columns < C)
    if R > 0:
        for i in tl.static_range(K):
            tl.store(part + offset + i * C, sums[i], used)


@triton.jit
def sinkhorn(
    logits, used, Factors, of_step, step, kept, iters, eps: tl.constexpr, keeps: tl.constexpr
):
    """(M, the softmax) of Eq. 5. Factors: 1 / (sum + eps) of each step, if a backward follows"""
    p = tl.exp(logits - tl.max(tl.where(used, logits, -1e30), 2)[:, :, None])
    p /= tl.maximum(tl.sum(p, 2), 1e-30)[:, :, None]
    M = tl.where(used, p + eps, 0.0)
    columns = 1 / (tl.sum(M, 1) + eps)
    M *= columns[:, None, :]
    if keeps:
        tl.store(Factors + of_step, columns, kept)
    for i in range(1, iters):
        rows = 1 / (tl.sum(M, 2) + eps)
        M *= rows[:, :, None]
        columns = 1 / (tl.sum(M, 1) + eps)
        M *= columns[:, None, :]
        if keeps:
            tl.store(Factors + (2 * i - 1) * step + of_step, rows, kept)
            tl.store(Factors + 2 * i * step + of_step, columns, kept)
    return M, p


@triton.jit
def sinkhorn_backward(grad, M, p, Factors, of_step, step, kept, iters):
    """The gradient of the logits. A step back multiplies by the sum again."""
    tl.debug_barrier()
    for i in range(1, iters):
        back = Factors + 2 * (iters - i) * step + of_step
        factor = tl.load(back, kept, 1.0)
        grad = factor[:, None, :] * (grad - tl.sum(grad * M, 1)[:, None, :])
        M /= factor[:, None, :]
        factor = tl.load(back - step, kept, 1.0)
        grad = factor[:, :, None] * (grad - tl.sum(grad * M, 2)[:, :, None])
        M /= factor[:, :, None]
    factor = tl.load(Factors + of_step, kept, 1.0)
    grad = factor[:, None, :] * (grad - tl.sum(grad * M, 1)[:, None, :])
    return p * (grad - tl.sum(grad * p, 2)[:, :, None])


@triton.jit
def of_squashed(grad, z, y, scale, s, tanh: tl.constexpr):
    """The gradients of y, of scale and of s, before their sums"""
    of_z = s * grad
    if tanh:
        of_z *= 1 - z * z
    return of_z * scale, of_z * y, grad * z


@triton.jit
def maps_kernel(
    Y, Squares, SB, Grad_pre, Grad_lane, Lane, Grad_y, Grad_squares, Factors, Parts, N,
    iters, eps: tl.constexpr, C: tl.constexpr, n: tl.constexpr, n2: tl.constexpr, R: tl.constexpr,
    E: tl.constexpr, n_s: tl.constexpr, mixes: tl.constexpr, tanh: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Maps of BT tokens, or with Grad_lane the gradients of what they are made of. E: numbers of a
    row of Lane, which starts with h_pre if E = R. Parts: the gradients of SB, which is s and b,
    summed over these tokens."""
    B = SB + n_s
    backward: tl.constexpr = Grad_lane is not None
    joined: tl.constexpr = E == R
    stride: tl.constexpr = n + 2 if tanh else 1  # of the entries of streams in Y and b
    post: tl.constexpr = 1 if tanh else n  # where h_post is there
    mix: tl.constexpr = 2 if tanh else 2 * n  # where M is
    token, one = (tl.program_id(0) * BT + tl.arange(0, BT))[:, None], tl.arange(0, n2)
    live, own = token < N, one < n
    kept = live & own
    token, step = token.to(tl.int64), tl.cast(N, tl.int64) * n
    of_stream = token * n + one
    of_sum, summed = (of_stream, kept) if tanh else (token, live)
    size: tl.constexpr = C if tanh else n * C
    scale = tl.rsqrt(tl.load(Squares + of_sum, summed, 0.0) / size + eps)

    s_pre, s_post = up(tl.load(SB)), up(tl.load(SB + 1))
    at = token * R + one * stride
    y_pre, y_post = tl.load(Y + at, kept, 0.0), tl.load(Y + at + post, kept, 0.0)
    b_pre = up(tl.load(B + one * stride, own, 0.0))
    b_post = up(tl.load(B + one * stride + post, own, 0.0))
    z_pre, h_pre = squashed(y_pre, scale, s_pre, b_pre, tanh)
    z_post, h_post = squashed(y_post, scale, s_post, b_post, tanh)
    if not tanh:  # the maps of mhc
        h_pre, h_post = 1 / (1 + tl.exp(-h_pre)), 1 / (1 + tl.exp(-h_post))
    if mixes:
        used, inside = kept[:, :, None] & own, own[:, None] & own
        s_mix = up(tl.load(SB if tanh else SB + 2))
        square = one[:, None] * (n + 2 if tanh else n) + one + mix
        b_mix = up(tl.load(B + square, inside, 0.0))
        y_mix = tl.load(Y + token[:, :, None] * R + square, used, 0.0)
        z_mix, M = squashed(y_mix, scale[:, :, None], s_mix, b_mix, tanh)
        if not tanh:
            M = tl.where(used, M, float("-inf"))
            M, p = sinkhorn(M, used, Factors, of_stream, step, kept, iters, eps, backward)
        of_M = token[:, :, None] * E + (E - n * n) + one[:, None] * n + one
    of_pre, of_post = of_stream, token * E + one
    if joined:
        Grad_pre, of_pre, of_post = Grad_lane, of_post, of_post + n

    if not backward:
        if not tanh:
            h_pre, h_post = h_pre + eps, 2 * h_post
        if joined:
            tl.store(Lane + of_pre, h_pre, kept)
        tl.store(Lane + of_post, h_post, kept)
        if mixes:
            tl.store(Lane + of_M, M, used)
    else:
        g_pre = tl.load(Grad_pre + of_pre, kept, 0.0)
        g_post = tl.load(Grad_lane + of_post, kept, 0.0)
        if not tanh:
            g_pre *= h_pre * (1 - h_pre)
            g_post *= 2 * h_post * (1 - h_post)
        of_y, of_scale, of_s_pre = of_squashed(g_pre, z_pre, y_pre, scale, s_pre, tanh)
        tl.store(Grad_y + at, of_y, kept)
        of_y, more, of_s_post = of_squashed(g_post, z_post, y_post, scale, s_post, tanh)
        tl.store(Grad_y + at + post, of_y, kept)
        of_scale += more
        of_s = Parts + tl.program_id(0) * (n_s + R)
        of_b = of_s + n_s
        tl.store(of_b + one * stride, tl.sum(g_pre, 0), own)
        tl.store(of_b + one * stride + post, tl.sum(g_post, 0), own)
        of_first = tl.sum(of_s_pre)
        tl.store(of_s + 1, tl.sum(of_s_post))
        if mixes:
            g = tl.load(Grad_lane + of_M, used, 0.0)
            if not tanh:
                g = sinkhorn_backward(g, M, p, Factors, of_stream, step, kept, iters)
            of_y, more, of_s_mix = of_squashed(g, z_mix, y_mix, scale[:, :, None], s_mix, tanh)
            of_scale += tl.sum(more, 2)
            tl.store(Grad_y + token[:, :, None] * R + square, of_y, used)
            tl.store(of_b + square, tl.sum(g, 0), inside)
            if tanh:
                of_first += tl.sum(of_s_mix)
            else:
                tl.store(of_s + 2, tl.sum(of_s_mix))
        tl.store(of_s, of_first)
        if not tanh:
            of_scale = tl.sum(of_scale, 1)[:, None]
        of_squares = -0.5 / size * of_scale * scale * scale * scale
        tl.store(Grad_squares + of_sum, of_squares, summed)


def contiguous(x):
    return None if x is None else x.contiguous()


def power_above(count, least=16):
    return max(least, triton.next_power_of_2(count))


@triton_op("residual::exchange", mutates_args={})
def exchange_op(
    X: Tensor, f: Tensor | None, lane: Tensor | None, w: Tensor | None, sb: Tensor | None,
    gain: Tensor | None, source: int, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n, *shape, C = X.shape
    N, R = math.prod(shape), 0 if w is None else w.size(0)
    K, E = 1 if w is None else w.size(-1) // C, 0 if lane is None else lane.size(-1)
    dtype = torch.promote_types(X.dtype, torch.float32)
    # with other sizes, or num_stages=3, a thread needs more registers than there are; not timed
    BT, num_warps = (32, 8) if R <= 16 else (16, 4)
    empty = lambda wanted, *size: X.new_empty(*size if wanted else (0,), dtype=dtype)
    y, squares = empty(R, *shape, n // K * R), empty(R, *shape, n // K)
    pre, rho = empty(source, *shape, n), empty(gain is not None, *shape, 1)
    n_s = 0 if sb is None else len(sb) - y.size(-1)
    new = X.new_empty(0 if f is None else X.shape)
    h = X.new_empty((*shape, C) if source else 0)
    wrap_triton(exchange_kernel)[(triton.cdiv(N, BT),)](
        X, f, lane, w, sb, gain, new, y, squares, pre, rho, h, N, eps, norm_eps, C, n, R,
        power_above(R), K, E, n_s, source, BT, min(32, power_above(C)),
        num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    return new, y, squares, pre, rho, h


@triton_op("residual::exchange_backward", mutates_args={})
def exchange_backward_op(
    X: Tensor, f: Tensor | None, lane: Tensor | None, w: Tensor | None,
    gain: Tensor | None, pre: Tensor, rho: Tensor, q: Tensor, grad_new: Tensor,
    grad_h: Tensor | None, grad_y: Tensor, grad_squares: Tensor, given: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of X and f, parts of lane's, and parts of W's and the gain's, which share a tensor.
    The sum of all parts is the gradient."""
    n, *shape, C = X.shape
    N, R = math.prod(shape), 0 if w is None else w.size(0)
    K, E = 1 if w is None else w.size(-1) // C, 0 if lane is None else lane.size(-1)
    BC = min(64, power_above(C))  # at N = 4096, C = 2048: 128 programs, 132 SMs
    across, along = triton.cdiv(C, BC), triton.cdiv(N, CHUNK)
    dtype = torch.promote_types(X.dtype, torch.float32)
    empty = lambda wanted, *size: X.new_empty(*size if wanted else (0,), dtype=dtype)
    grad_x = torch.empty_like(X)
    grad_f = X.new_empty(0) if f is None else torch.empty_like(f)
    grad_lane = empty(lane is not None, across, *shape, E)
    of_w = R * K * C
    parts = empty(True, along, of_w if gain is None or grad_h is None else of_w + C)
    wrap_triton(exchange_backward_kernel)[(across, along)](
        X, f, lane, w, gain, pre, rho, q, grad_new, grad_h, grad_y, grad_squares,
        grad_x, grad_f, grad_lane, parts, N, CHUNK,
        C, n, R, power_above(R), K, E, given, 16, BC, num_warps=8, num_stages=1,
    )  # fmt: skip
    return grad_x, grad_f, grad_lane, parts


def write(X, f, maps):
    """The new X. maps: h_post, (h_post, M) or (h_pre, h_post, M)"""
    return Exchange.apply(X, f, maps, None, None, None, NONE, 0.0, 0.0)[0]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, f, lane, w, sb, gain, source, eps, norm_eps):
        X, f, lane = map(contiguous, (X, f, lane))
        new, *found = exchange_op(X, f, lane, w, sb, gain, source, eps, norm_eps)
        new = X.view_as(X) if f is None else new
        y, squares, pre, rho, h = found
        ctx.given = source == GIVEN
        ctx.save_for_backward(X, f, lane, w, gain, pre, rho)
        ctx.mark_non_differentiable(pre)
        return new, *found

    @staticmethod
    def backward(ctx, grad_new, grad_y, grad_squares, _, q, grad_h):
        X, f, lane, w, gain, pre, rho = ctx.saved_tensors
        if not pre.numel():  # there is no h
            grad_h = None
        grads = map(contiguous, (q, grad_new, grad_h, grad_y, grad_squares))
        found = exchange_backward_op(X, f, lane, w, gain, pre, rho, *grads, ctx.given)
        grad_x, grad_f, *parts = found
        grad_lane, rest = (part.sum(0) if part.numel() else None for part in parts)
        grad_w = None if w is None else rest[: w.numel()].view_as(w)
        grad_gain = None if gain is None or grad_h is None else rest[-len(gain) :]
        grad_f = None if f is None else grad_f
        return grad_x, grad_f, grad_lane, grad_w, None, grad_gain, *[None] * 3


def of_read(grad, X, pre, rho, gain):
    """From the gradient of h: that of h_pre, and q"""
    xs, u = X.to(pre.dtype).unbind(), grad.to(pre.dtype)
    u = u if gain is None else gain * u
    along = [(u * x).sum(-1, keepdim=True) for x in xs]  # <u, X_i>
    if gain is None:
        return torch.cat(along, -1), None
    pres = pre.split(1, -1)
    q = sum(p * a for p, a in zip(pres, along))
    h = sum(p * x for p, x in zip(pres, xs))
    inside = [(h * x).sum(-1, keepdim=True) for x in xs]  # <h, X_i>
    k = rho**3 * q / X.size(-1)
    return torch.cat([rho * a - k * b for a, b in zip(along, inside)], -1), q


@triton_op("residual::maps", mutates_args={})
def maps_op(
    y: Tensor, squares: Tensor, sb: Tensor, grad_pre: Tensor | None, grad_lane: Tensor | None,
    joined: bool, n: int, C: int, tanh: bool, iters: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(h_post, M), or if joined (h_pre, h_post, M). With grad_lane the gradients of y and squares,
    and partial sums of sb's. The others are empty."""
    *shape, R = y.shape
    N, E = math.prod(shape), R if joined else R - n
    backward, mixes, programs = grad_lane is not None, R > 2 * n, triton.cdiv(N, TOKENS)
    empty = lambda wanted, *size: y.new_empty(size if wanted else 0)
    lane, parts = empty(not backward, *shape, E), empty(backward, programs, len(sb))
    of_y, of_squares = empty(backward, *y.shape), empty(backward, *squares.shape)
    factors = empty(backward and mixes and not tanh, 2 * iters - 1, N, n)
    wrap_triton(maps_kernel)[(programs,)](
        y, squares, sb, grad_pre, grad_lane, lane, of_y, of_squares, factors, parts, N,
        iters, eps, C, n, power_above(n, 1), R, E, len(sb) - R, mixes, tanh, TOKENS, num_warps=4,
    )  # fmt: skip
    return lane, of_y, of_squares, parts


class Maps(torch.autograd.Function):
    """h, and the maps of Eqs. 4 and 5 of streams.py, or of Eqs. 2 and 3, from what Exchange
    returns. Exchange gets the gradient of h, and q."""

    @staticmethod
    def forward(ctx, X, y, squares, pre, rho, h, gain, sb, source, iters, eps):
        ctx.how = source == GIVEN, len(X), X.size(-1), source == TANH, iters, eps
        ctx.save_for_backward(X, y, squares, pre, rho, h if source == GIVEN else None, gain, sb)
        return h.view_as(h), maps_op(y, squares, sb, None, None, *ctx.how)[0]

    @staticmethod
    def backward(ctx, grad_h, grad_lane):
        X, y, squares, pre, rho, h, gain, sb = ctx.saved_tensors
        grad_pre = q = None
        if h is None:
            grad_pre, q = of_read(grad_h, X, pre, rho, gain)
        elif gain is not None:
            q = (grad_h.to(pre.dtype) * h).sum(-1, keepdim=True) / rho
        given = y, squares, sb, grad_pre, grad_lane.contiguous()
        _, grad_y, grad_squares, parts = maps_op(*given, *ctx.how)
        return None, grad_y, grad_squares, None, q, grad_h, None, parts.sum(0), None, None, None


# ------------------------------------------------------------------------------------------------
# NAG: the write of a sublayer, Eqs. 2 to 6 of nag.py

ROWS, SPAN = 16, 512  # of the tile that a program works on at a time: rows, and bytes of a row


@triton.jit
def tile(ptr, row, at, N, D: tl.constexpr):
    """ptr[row, at], and 0 outside of (N, D)"""
    where, inside = place(row, row < N, at, D)
    return tl.load(ptr + where, inside, 0.0)


@triton.jit
def column(ptr, row, N):
    return up(tl.load(ptr + row, row < N, 0.0))


@triton.jit
def put(ptr, row, at, N, D: tl.constexpr, values):
    where, inside = place(row, row < N, at, D)
    tl.store(ptr + where, values, mask=inside)


@triton.jit
def modulated(products, b_ptr, C: tl.constexpr):
    """Eq. 5: the sigmoids, softmax(p), the mixture, beta = softplus(raw) and m. b_ptr: b, p, raw"""
    one = tl.arange(0, products.shape[1])
    b = up(tl.load(b_ptr + one, mask=one < C, other=0.0))
    p = up(tl.load(b_ptr + C + one, mask=one < C, other=-float("inf")))
    raw = up(tl.load(b_ptr + 2 * C))
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
def rotate_forward(r_ptr, s_ptr, f_ptr, a_ptr, ramp_ptr, w_ptr, b_ptr,
                   new_ptr, lane_ptr, products_ptr, N, EACH: tl.constexpr,
                   D: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr,
                   EPS: tl.constexpr, CENTRE: tl.constexpr, ORTHOGONAL: tl.constexpr,
                   ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Three passes: read r and f, write the new r. The second loop finds r and f in the cache."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = tl.arange(0, PADDED)
    mean = up(tl.zeros((ROWS,), r_ptr.dtype.element_ty))
    m, rr, rf, ff = mean, mean, mean, mean
    products = tl.zeros((ROWS, PADDED), mean.dtype)
    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = up(tile(r_ptr, row, at, N, D)), up(tile(f_ptr, row, at, N, D))
        mean += tl.sum(x, 1)
        m += tl.sum(y, 1)
        rr += tl.sum(x * x, 1)
        rf += tl.sum(x * y, 1)
        ff += tl.sum(y * y, 1)
        if C:
            w = tile(w_ptr, one, at, C, D)
            xw = x.to(w.dtype)
            products = tl.dot(xw, w.T, products, input_precision="ieee", out_dtype=mean.dtype)

    a = column(a_ptr, row * EACH, N)
    if ramp_ptr is not None:
        a *= tl.load(ramp_ptr)
    if C:
        products = products.to(w_ptr.dtype.element_ty)
        put(products_ptr, row, one, N, C, products)
        sigmoid, q, mixture, beta, gate = modulated(up(products), b_ptr, C)
        a *= gate
    m, c, rg, gg, h, k, square, n, bend = lengths(
        mean / D, m / D, rr / D, rf / D, ff / D, a, EPS, CENTRE, ORTHOGONAL
    )
    growth = tl.log(1 + a * a if ORTHOGONAL else square) / 2
    tl.store(lane_ptr + row, column(s_ptr, row, N) + growth, mask=row < N)
    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = up(tile(r_ptr, row, at, N, D)), up(tile(f_ptr, row, at, N, D))
        g = y - m[:, None] - c[:, None] * x
        put(new_ptr, row, at, N, D, n[:, None] * (x + k[:, None] * g))  # Eq. 6


@triton.jit
def rotate_backward(r_ptr, f_ptr, a_ptr, ramp_ptr, w_ptr, b_ptr,
                    products_ptr, of_new_ptr, of_lane_ptr,
                    of_r_ptr, of_f_ptr, of_a_ptr, of_products_ptr, parts_ptr, N, EACH: tl.constexpr,
                    D: tl.constexpr, C: tl.constexpr, PADDED: tl.constexpr,
                    EPS: tl.constexpr, CENTRE: tl.constexpr, ORTHOGONAL: tl.constexpr,
                    ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Computes the same as nag.Rotation.backward, then the gradients of Eq. 5.

    Five passes: it reads r, f and the gradient of the new r, and writes the gradients of r and f.
    parts (2 C + 2, programs): the gradients of b, p, raw_beta and a, summed over the tokens of each
    program.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = tl.arange(0, PADDED)
    mean = up(tl.zeros((ROWS,), r_ptr.dtype.element_ty))
    m, rr, rf, ff, in_r, in_f, in_1 = mean, mean, mean, mean, mean, mean, mean
    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = up(tile(r_ptr, row, at, N, D)), up(tile(f_ptr, row, at, N, D))
        of_new = up(tile(of_new_ptr, row, at, N, D))
        mean += tl.sum(x, 1)
        m += tl.sum(y, 1)
        rr += tl.sum(x * x, 1)
        rf += tl.sum(x * y, 1)
        ff += tl.sum(y * y, 1)
        in_r += tl.sum(of_new * x, 1)
        in_f += tl.sum(of_new * y, 1)
        in_1 += tl.sum(of_new, 1)

    a = column(a_ptr, row * EACH, N)
    if ramp_ptr is not None:
        a *= tl.load(ramp_ptr)
    if C:
        products = up(tile(products_ptr, row, one, N, C))
        sigmoid, q, mixture, beta, gate = modulated(products, b_ptr, C)
        a *= gate
    mean, in_r, in_f, in_1, rr = mean / D, in_r / D, in_f / D, in_1 / D, rr / D
    m, c, rg, gg, h, k, square, n, bend = lengths(
        mean, m / D, rr, rf / D, ff / D, a, EPS, CENTRE, ORTHOGONAL
    )
    of_lane = column(of_lane_ptr, row, N)
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
    if ramp_ptr is not None:
        of_a *= tl.load(ramp_ptr)
    tl.store(parts + P * (2 * C + 1), tl.sum(of_a, 0))
    if EACH:
        tl.store(of_a_ptr + row, of_a, mask=row < N)

    for start in tl.range(0, D, COLUMNS, num_stages=3):
        at = start + tl.arange(0, COLUMNS)
        x, y = up(tile(r_ptr, row, at, N, D)), up(tile(f_ptr, row, at, N, D))
        of_new = up(tile(of_new_ptr, row, at, N, D))
        g = y - m[:, None] - c[:, None] * x
        of_z = n[:, None] * of_new + t[:, None] * (x + k[:, None] * g)
        of_g = k[:, None] * of_z - bent[:, None] * g
        of_r = of_z - c[:, None] * of_g + v[:, None] * (g - c[:, None] * x)
        of_f = of_g + v[:, None] * x
        if CENTRE:
            of_f -= shift[:, None]
        if C:
            w = tile(w_ptr, one, at, C, D)
            of_r = tl.dot(of_products, w, of_r, input_precision="ieee", out_dtype=mean.dtype)
        put(of_r_ptr, row, at, N, D, of_r)
        put(of_f_ptr, row, at, N, D, of_f)


def how_to_launch(r, a, w, eps, centre, orthogonal):
    """The grid of a kernel of NAG, and what it takes besides tensors."""
    N, D, C = r.numel() // r.size(-1), r.size(-1), 0 if w is None else len(w)
    columns = min(SPAN // r.element_size(), power_above(D), max(16, 8192 // power_above(C)))
    return (triton.cdiv(N, ROWS),), dict(
        N=N, EACH=int(a.numel() > 1), D=D, C=C, PADDED=power_above(C), EPS=eps, CENTRE=centre,
        ORTHOGONAL=orthogonal, ROWS=ROWS, COLUMNS=columns, num_warps=8,
    )  # fmt: skip


@triton_op("residual::rotate", mutates_args=())
def rotated(
    r: Tensor, s: Tensor, f: Tensor, a: Tensor, ramp: Tensor | None, w: Tensor | None,
    constants: Tensor | None, eps: float, centre: bool, orthogonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The new r and s, and the products of r with the rows of w"""
    products = r.new_empty(0) if w is None else w.new_empty(*r.shape[:-1], len(w))
    out = torch.empty_like(r), torch.empty_like(s), products
    grid, how = how_to_launch(r, a, w, eps, centre, orthogonal)
    wrap_triton(rotate_forward)[grid](r, s, f, a, ramp, w, constants, *out, **how)
    return out


@triton_op("residual::rotate_backward", mutates_args=())
def rotated_backward(
    r: Tensor, f: Tensor, a: Tensor, ramp: Tensor | None, w: Tensor | None,
    constants: Tensor | None, products: Tensor, of_new: Tensor, of_lane: Tensor,
    eps: float, centre: bool, orthogonal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of r, f, a and the products, and parts"""
    programs, C = triton.cdiv(of_lane.numel(), ROWS), 0 if w is None else len(w)
    out = [*map(torch.empty_like, (r, f, a, products)), a.new_empty(2 * C + 2, programs)]
    tensors = r, f, a, ramp, w, constants, products, of_new, of_lane, *out
    grid, how = how_to_launch(r, a, w, eps, centre, orthogonal)
    wrap_triton(rotate_backward)[grid](*tensors, **how)
    return tuple(out)


class Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, r, s, f, a, ramp, w, constants, *options):
        new, lane, products = rotated(r, s, f, a, ramp, w, constants, *options)
        ctx.save_for_backward(r, f, a, ramp, w, constants, products)
        ctx.options = options
        return new, lane

    @staticmethod
    def backward(ctx, of_new, of_lane):
        r, _, a, _, w, *_ = saved = ctx.saved_tensors
        given = of_new.contiguous(), of_lane.contiguous()
        of_r, of_f, of_a, of_products, parts = rotated_backward(*saved, *given, *ctx.options)
        total = parts.sum(1)
        of_a = total[-1:].view_as(a) if a.numel() == 1 else of_a
        of_modulator = None, None
        if w is not None:
            of_w = of_products.flatten(0, -2).T @ r.flatten(0, -2).to(w.dtype)  # one more pass
            of_modulator = of_w, total[:-1]
        return of_r, of_lane, of_f, of_a, None, *of_modulator, None, None, None


def rotate(r, s, f, a, modulator=None, ramp=None, eps=1e-12, centre=True, orthogonal=True):
    """nag.rotate, where a is multiplied by ramp, and by m of Eq. 5 if modulator is w and, in one
    tensor, b, p and beta before softplus.
    """
    w, constants = (None, None) if modulator is None else modulator
    if w is not None and torch.is_autocast_enabled(r.device.type):  # as for other products
        w = w.to(torch.get_autocast_dtype(r.device.type))
    a = a if a.numel() == 1 else a.expand_as(s).contiguous()
    inputs = r.contiguous(), s.contiguous(), f.contiguous(), a, ramp, w, constants
    return Rotate.apply(*inputs, eps, centre, orthogonal)


# ------------------------------------------------------------------------------------------------
# Attention Residuals: the read of a sublayer, Eq. 1 of attnres.py
#
# The two sublayers of a block share all sources but the newest. The first one reads them once for
# both: besides its own sum it leaves the second one's sum o over the shared sources, and
# lse = log sum_i exp(score_i). The second one takes (o, lse) as one more source, with score lse.

WARPS = 2048  # of all programs of the backward kernel. Each leaves a part of the sums over tokens


@triton.jit
def vector(ptr, start, at, D: tl.constexpr, AGAIN: tl.constexpr = False):
    """ptr[start + at], and 0 from D on"""
    policy: tl.constexpr = "evict_last" if AGAIN else ""
    return up(tl.load(ptr + (start + at), at < D, 0.0, eviction_policy=policy))


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
    """Reads o and each source once. Writes o2 and y = Norm(h), or y = h if there is no gain.

    scores (sources + 1 + SHARED, N): one row for each source, one for their logsumexp, and one for
    each source that the second sublayer shares.
    """
    M: tl.constexpr = len(vs)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    start = row * D
    q = vector(q_ptr, 0, at, D)
    top, total, acc = tl.full((), -float("inf"), q.dtype), tl.full((), 0.0, q.dtype), q * 0
    top2, total2, acc2 = top, total, acc
    if SHARED:
        q2 = vector(q2_ptr, 0, at, D)
    if o_ptr is not None:
        top, total, acc = tl.load(lse_ptr + row), total + 1, vector(o_ptr, start, at, D)
    for i in tl.static_range(M):
        v = vector(vs[i], start, at, D)
        ran = None if ran_ptr is None else ran_ptr + i * N + row
        score = scores_ptr + (i * N + row)
        top, total, acc = add_source(v, q, ran, score, top, total, acc, D, EPS)
        if i < SHARED:
            score += (M + 1) * N
            top2, total2, acc2 = add_source(v, q2, ran, score, top2, total2, acc2, D, EPS)
    y = acc / total
    tl.store(scores_ptr + (M * N + row), top + tl.log(total))
    if gain_ptr is not None:
        y *= vector(gain_ptr, 0, at, D) / tl.sqrt(tl.sum(y * y, 0) / D + NORM_EPS)
    tl.store(y_ptr + (start + at), y, at < D)
    if SHARED:
        tl.store(o2_ptr + (start + at), acc2 / total2, at < D)
        tl.store(lse2_ptr + row, top2 + tl.log(total2))


@triton.jit
def of_source(v, q, of_sum, delta, inv, lse, score_ptr):
    """What a reader adds to the gradients of v, inv v and q. of_sum: the gradient of its sum."""
    score = tl.load(score_ptr)
    p = tl.exp(score - lse)
    of_score = p * (tl.sum(of_sum * v, 0) - delta) * inv
    return p * of_sum + of_score * q, of_score * tl.where(p > 0, score, 0.0), of_score * v


@triton.jit
def read_backward(vs, of_vs, q_ptr, q2_ptr, gain_ptr, o_ptr, lse_ptr, lse2_ptr, scores_ptr,
                  of_y_ptr, of_o2_ptr, of_lse2_ptr, of_o_ptr, of_lse_ptr, parts_ptr,
                  N, D: tl.constexpr, BLOCK: tl.constexpr,
                  SHARED: tl.constexpr, EPS: tl.constexpr, NORM_EPS: tl.constexpr):  # fmt: skip
    """Reads o, each source, and the gradients of y and o2. Writes the gradients of o and of each
    source.

    The second loop over the sources finds them in the cache. parts (2 or 3, programs, D): the
    gradients of q, the gain and q2, summed over the tokens of each program.
    """
    M: tl.constexpr = len(vs)
    at = tl.arange(0, BLOCK)
    q = vector(q_ptr, 0, at, D)
    of_q = q * 0
    of_q2, of_gain = of_q, of_q
    if SHARED:
        q2 = vector(q2_ptr, 0, at, D)
    for token in range(tl.program_id(0), N, tl.num_programs(0)):
        row = token + tl.full((), 0, tl.int64)
        start, scores = row * D, scores_ptr + row
        lse, h = tl.load(scores + M * N), q * 0
        o2 = h
        if SHARED:
            lse2 = tl.load(lse2_ptr + row)
        for i in tl.static_range(M):
            v = vector(vs[i], start, at, D, AGAIN=True)
            h += tl.exp(tl.load(scores + i * N) - lse) * v
            if i < SHARED:
                o2 += tl.exp(tl.load(scores + (M + 1 + i) * N) - lse2) * v
        if o_ptr is not None:
            o, p = vector(o_ptr, start, at, D), tl.exp(tl.load(lse_ptr + row) - lse)
            h += p * o
        of_h = vector(of_y_ptr, start, at, D)
        if gain_ptr is not None:
            n = 1 / tl.sqrt(tl.sum(h * h, 0) / D + NORM_EPS)
            of_gain += of_h * n * h
            of_h *= n * vector(gain_ptr, 0, at, D)
            of_h -= n * n * h * (tl.sum(of_h * h, 0) / D)
        delta = tl.sum(of_h * h, 0)
        if SHARED:
            of_o2 = vector(of_o2_ptr, start, at, D)
            delta2 = tl.sum(of_o2 * o2, 0) - tl.load(of_lse2_ptr + row)
        if o_ptr is not None:
            tl.store(of_o_ptr + (start + at), p * of_h, at < D)
            tl.store(of_lse_ptr + row, p * (tl.sum(of_h * o, 0) - delta))
        for i in tl.static_range(M):
            v = vector(vs[i], start, at, D)
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
    """The constants that both kernels take."""
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
