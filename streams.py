"""
More than one residual stream: Hyper-Connections and what grew out of them.

F is a sublayer, f its output, C = n_embd, and rms(x)^2 = mean(x^2) + eps, where eps is EPS in
Eqs. 4 to 6, else norm_eps.

Hyper-Connections keep n streams X (n, C) for each token. Maps, in most modes made from X, read,
write and mix them:

    begin      X_i = embedding, for all i
    sublayer   f = F(Norm(h_pre^T X)),  X <- M^T X + h_post f^T                                  (1)
    end        Norm(h), where h is the sum of the streams for hc, and Eq. 6 for mhc and ihc

    hc         arXiv 2409.19606.  t_i = tanh(W X_i / rms(X_i)), with n + 2 entries               (2)
               (h_pre_i, h_post_i, M_i) = a_i + (s_1, s_2, s_1, ..., s_1) t_i                    (3)
               with row i of M; a, s and W are learned, here and below
    mhc        arXiv 2512.24880.  z = vec(X) / rms(vec(X)),  y = W z, split into three           (4)
               h_pre = sigmoid(s_1 y_1 + b_1) + eps,  h_post = 2 sigmoid(s_2 y_2 + b_2),
               M = Sinkhorn(softmax(s_3 y_3 + b_3) + eps): columns divided by (sum + eps), then
               19 times rows and columns. Columns sum to 1, rows almost                          (5)
               end: h = sum_i (sigmoid(s y + b) + eps)_i X_i, with its own W, s and b            (6)
    ihc        mhc without mixing: M = I, and y of Eq. 4 has two parts, for h_pre and h_post
    smhc       single-pass mhc, from the code of DeepSeek-V4.1-Flash. The maps are those of mhc, but
               a sublayer reads with the h_pre that the previous sublayer made:
               f = F(Norm(pre^T X)),  X as in Eq. 1,  pre <- h_pre(X before the write)           (7)
               begin: pre = (1, 0, ..., 0); end: h = pre^T X, with the last pre
    gated      from the code of Qwen3.8-Flash-Next. z_i = RMSNorm_i(X_i). D has n_embd / SHARE rows,
               each U_i has C rows. h = mean_i sigmoid(U_i silu(D vec(z) / n)) * z_i            (8)
               X_i <- X_i + 2 sigmoid(<w_i, vec(z)> / n) F(h)                                   (9)
               end: h of Eq. 8 with its own gains, D and U, and no final norm
    wide       NVIDIA's Nemotron, Megatron-LM #6716. The maps are constants of the sublayer:
               f = F(Norm(sum_i sigmoid(rho_i) X_i))                                            (10)
               X_i <- (0.9 + 0.1 sigmoid(kappa_i)) X_i + 2 sigmoid(beta_i) f                    (11)
               end: the sum of Eq. 10 with its own rho, then Norm

First values: in hc M = I, h_post = 1, s = 0.01, W = 0, and sublayer l reads stream l mod n. In wide
the read is the mean, X_i keeps 0.999, and beta from -0.01 to 0.01 parts the streams. mhc_start sets
the maps of mhc, ihc and smhc. W is random. At "prenorm" the s are 0, h_pre reads the mean, h_post
is 1 and M is near I: the model equals pre-norm, to about 1e-5. At "paper" the s are 0.01, and at
"deepseek", as in the code of DeepSeek-V4, they are 1; the b are 0 in both. Equal streams with zero
maps would stay equal for ever; a random W parts them once the s move.

Cost: n streams take n times the reads and writes of the stream, and `recompute` keeps n times the
bytes (with kernels n + 1 times). wide has no products, and smhc can write, make the next maps and
read in one pass over X.

With Mixture of Depths, a token that skips a sublayer mixes nothing and writes nothing. In smhc it
hands on the pre that it got.

Differs from the papers:
- Maps are float32, whatever the dtype of the stream; products with gated's D and U are not.
- Eq. 2 has an RMSNorm without a gain, because W can learn one.
- The start of W in mhc is ours (W z has variance 1), and so is b = 0 at "paper".
- In smhc the start of the maps is that of mhc. In gated U starts at 0, so all gates are 1/2, and
  D z and <w_i, z> start with variance 1; the random w parts the streams. wide has n = 3 in its
  source.
- ihc has 2 streams by default: a step is faster, and we see no sure difference from 4. The others
  have 4.
"""

import math
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

import kernels
import norms
from norms import FinalNorm, PreNorm, RMSNorm, Stream, fusing, learns, mlps, on_cuda, upcast

EPS = 1e-6  # of Eqs. 4, 5 and 6
ITERS = 20  # of Eq. 5: times that columns are scaled
STARTS = {"prenorm": 0.0, "paper": 0.01, "deepseek": 1.0}  # mhc_start: first s
SHARE = 8  # gated: D and U have the rank n_embd / SHARE, at least 1
NEAR = 5.0  # mhc_start "prenorm": M starts with e^NEAR on its diagonal for each 1 beside it


def count(config):
    """The number of streams: the setting, or the mode's default. None: not a mode of this file."""
    mode = RESIDUALS.get(config.residual)
    return mode and (config.hc_streams or mode.n_streams)


def reads_mean(n):
    """The b at which sigmoid(b) = 1 / n, nearly: EPS keeps it finite at n = 1."""
    return -math.log(n - 1 + EPS)


# ------------------------------------------------------------------------------------------------
# Hyper-Connections: functions of the streams X, n tensors (B, T, C). The kernel that
# writes one tensor (B, T, n C) would compute all n streams for each element, and keep one.
#
# Maps are lists of (B, T, 1): compiled, they are part of the pass over X that uses them.


class Products(torch.autograd.Function):
    """W vec(X), in float32, if W is (rows, n C). If W is (rows, C): W X_i for all i.

    Each product is a tensor (B, T, 1). In compiled code it is a sum in the same pass over X as what
    read does next; a matrix product would be a pass of its own. The gradient of W is a matrix
    product in the dtype of X.
    """

    @staticmethod
    def forward(ctx, w, *X):
        ctx.save_for_backward(w, *X)
        return products(w, X)

    @staticmethod
    def backward(ctx, *grads):
        w, *X = ctx.saved_tensors
        grad_X, grad_columns, grads = [], [], iter(grads)
        for xs, columns in groups(X, w):
            of_rows = [next(grads) for _ in w]
            grad = torch.cat(of_rows, -1)
            for x, column in zip(xs, columns):
                if torch.compiler.is_compiling():
                    grad_x = dot(of_rows, upcast(column).unbind())
                else:
                    grad_x = grad @ upcast(column)
                grad_X.append(grad_x.to(x.dtype))
                product = grad.flatten(0, -2).T.to(x.dtype) @ x.flatten(0, -2)
                grad_columns.append(product.to(w.dtype))
        grad_w = torch.cat(grad_columns, -1).unflatten(-1, (-1, w.size(-1))).sum(-2)
        return grad_w, *grad_X


def multiply(w, X):
    return Products.apply(w, *X) if learns(w, *X) else products(w, X)


def products(w, X):
    """What Products computes."""
    found = []
    for xs, columns in groups(X, w):
        if torch.compiler.is_compiling():
            floats, rows = [*map(upcast, xs)], zip(*[upcast(c).unbind() for c in columns])
            found += [dot(floats, row).sum(-1, keepdim=True) for row in rows]
        else:
            with torch.autocast(X[0].device.type, enabled=False):
                y = sum(F.linear(upcast(x), upcast(c)) for x, c in zip(xs, columns))
            found += y.split(1, -1)
    return tuple(found)


def groups(X, w):
    """[(streams, the columns of W for each)]: all streams at once, or each one with all of W."""
    columns = w.split(X[0].size(-1), -1)
    return [(X, columns)] if len(columns) == len(X) else [((x,), columns) for x in X]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def entries(p, x):
    """The entries of p, each (B, T, 1): one sum over all tokens gives all their gradients."""
    return p.flatten().expand(*x.shape[:-1], -1).split(1, -1)


def inverse_rms(X, eps):
    """1 / rms(vec(X)), (B, T, 1)."""
    return torch.rsqrt(sum(upcast(x).square() for x in X).mean(-1, keepdim=True) / len(X) + eps)


class Sinkhorn(torch.autograd.Function):
    """M (n, n, ...) of Eq. 5, from A = softmax + eps. Tokens are last: a vector instruction handles
    one entry of many tokens.

    M_ij = u_i A_ij v_j, and only these factors change. With q = A v, a row becomes
    u' = u / (u q + eps), so du'/dq = -u'^2 and du'/du = eps (u' / u)^2; columns alike.
    """

    @staticmethod
    def forward(ctx, A, iters, eps):
        ctx.save_for_backward(A)
        ctx.how = iters, eps
        *_, u, v = factors(A, iters, eps)
        return u * A * v

    @staticmethod
    def backward(ctx, grad):
        (A,), (iters, eps) = ctx.saved_tensors, ctx.how
        found = factors(A, iters, eps)
        u, v = found[-2:]
        grad_A = u * grad * v
        before = (grad * A * v).sum(1, keepdim=True)  # gradients of the last two factors
        last = (u * grad * A).sum(0, keepdim=True)
        for k in range(len(found) - 1, 1, -1):
            grad_q = -last * found[k].square()
            grad_A = grad_A + grad_q * found[k - 1]
            of_same = last * eps * (found[k] / found[k - 2]).square()
            last, before = before + (grad_q * A).sum(1 - k % 2, keepdim=True), of_same
        return grad_A, None, None


def factors(A, iters, eps):
    """1 and 1, then v, u, v, u, ..., v: v is (1, n, ...), u is (n, 1, ...)"""
    found = [torch.ones_like(A[:1]), torch.ones_like(A[:, :1])]
    for k in range(2 * iters - 1):
        same, other = found[-2:]
        found.append(same / (same * (A * other).sum(k % 2, keepdim=True) + eps))
    return found


def mhc_maps(X, w, sb, iters, eps=EPS):
    """Eqs. 4 and 5: h_pre and h_post, lists of n, and M, n lists of n. M is None without s_3."""
    n, scale = len(X), inverse_rms(X, eps)
    y = [y_i * scale for y_i in multiply(w, X)]
    s_and_b = entries(sb, X[0])
    (s_pre, s_post, *s_mix), b = s_and_b[: -len(w)], s_and_b[-len(w) :]
    pre = [torch.sigmoid(s_pre * y_i + b_i) + eps for y_i, b_i in zip(y[:n], b)]
    post = [2 * torch.sigmoid(s_post * y_i + b_i) for y_i, b_i in zip(y[n : 2 * n], b[n:])]
    if not s_mix:
        return pre, post, None
    logits = [s_mix[0] * y_i + b_i for y_i, b_i in zip(y[2 * n :], b[2 * n :])]
    A = torch.stack(logits).unflatten(0, (n, n)).softmax(1) + eps
    M = Sinkhorn.apply(A, iters, eps)
    return pre, post, [row.unbind() for row in M.unbind()]


def mhc_end(X, w, sb, eps=EPS):
    """Eq. 6: (B, T, C)"""
    y, scale = multiply(w, X), inverse_rms(X, eps)
    s, *b = entries(sb, X[0])
    return read(X, [torch.sigmoid(s * y_i * scale + b_i) + eps for y_i, b_i in zip(y, b)])


def read(X, pre):
    """h_pre^T X of Eq. 1: (B, T, C) in float32."""
    return dot(pre, map(upcast, X))


def write(X, M, post, f):
    """The new X of Eq. 1. post may hold a gate on f (B, T, C). M: None if it is I."""
    floats = [upcast(x) for x in X]
    mixed = floats if M is None else [dot(column, floats) for column in zip(*M)]
    return [(x + h * f).to(X[0].dtype) for x, h in zip(mixed, post)]


def gated_read(z, down, up):
    """Eq. 8, (B, T, C) in float32. z: (B, T, n, C)"""
    low = F.linear(z.flatten(-2), down.to(z.dtype)) / z.size(-2)
    gates = torch.sigmoid(upcast(F.linear(F.silu(low), up.to(low.dtype))))
    return (gates.unflatten(-1, z.shape[-2:]) * upcast(z)).mean(-2)


def gated_post(z, w):
    """The factors of f in Eq. 9: n tensors (B, T, 1)."""
    return [2 * torch.sigmoid(y / z.size(-2)) for y in multiply(w, [z.flatten(-2)])]


def wide_read(X, rho):
    """The sum of Eq. 10: (B, T, C) in float32."""
    return read(X, entries(torch.sigmoid(rho), X[0]))


def wide_write(X, kappa_beta, f):
    """The new X of Eq. 11."""
    factors = entries(torch.sigmoid(kappa_beta), X[0])
    kept = [0.9 + 0.1 * factor for factor in factors[: len(X)]]
    post = [2 * factor for factor in factors[len(X) :]]
    return [(k * upcast(x) + h * f).to(x.dtype) for k, x, h in zip(kept, X, post)]


# ------------------------------------------------------------------------------------------------
# Hyper-Connections: the modes. Stream.x is X_1, and Stream.sources are X_2 ... X_n.
#
# On CUDA, kernels.py reads and writes the streams of hc, mhc, ihc and smhc, if there are at most
# MOST_STREAMS and at least LEAST_TOKENS, in one tensor: Stream.x is X (n, B, T, C). There a write
# waits for the next read, compiled or not, and that read does both in one pass: until then
# Stream.sources are f and the maps h_post, (h_post, M) or (h_pre, h_post, M), a tensor (B, T, n),
# n + n^2 or 2 n + n^2.


def stacked(stream):
    return stream.x.ndim == 4


def whole(stream):
    """The tensors that hold the streams, after the write that waits."""
    if stacked(stream) and stream.sources:
        return (kernels.write(stream.x, *stream.sources),)
    return stream.x, *stream.sources


def streams_of(stream):
    X = whole(stream)
    return X[0].unbind() if stacked(stream) else X


class HCEnds(FinalNorm):
    has_kernels = True

    def __init__(self, config):
        super().__init__(config)
        self.n = count(config)

    def embed(self, e):  # without clone, the first block would need a compiled graph of its own
        fit = self.n <= kernels.MOST_STREAMS and e[..., 0].numel() >= kernels.LEAST_TOKENS
        if self.has_kernels and on_cuda(e) and fit:
            return Stream(e.expand(self.n, *e.shape).clone(memory_format=torch.contiguous_format))
        return Stream(e, sources=tuple(e.clone() for _ in range(self.n - 1)))

    def readout(self, stream, head):
        return self.norm(self.additive(stream)).to(stream.x.dtype), head

    def additive(self, stream):
        return sum(map(upcast, streams_of(stream)))


class MHCEnds(HCEnds):
    decays = ("w",)

    def __init__(self, config):
        super().__init__(config)
        self.w = nn.Parameter(torch.empty(self.n, self.n * config.n_embd))
        self.sb = nn.Parameter(torch.empty(1 + self.n))  # s, b
        self.start = config.mhc_start

    def reset_parameters(self):
        nn.init.normal_(self.w, std=self.w.size(1) ** -0.5)
        self.sb[0] = STARTS[self.start]
        self.sb[1:] = reads_mean(self.n) if self.start == "prenorm" else 0.0

    def additive(self, stream):
        return mhc_end(streams_of(stream), self.w, self.sb)


class Streams(PreNorm):
    """What all modes with n streams share."""

    settings = ("hc_streams",)
    n_streams = 4  # default of hc_streams
    # on an H200 the compiler's joint kernel for sums of rows and of columns took 25 of 30 ms in ihc
    cuda_options = fusing(reads=16, operations=100) | {"triton.mix_order_reduction": False}

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.n = count(config)

    def fetch(self, stream, source, w, sb, eps):
        """read with kernels: (h, the stream, maps for write), made from W vec(X), s and b. If the
        source is GIVEN, h is read with the first n numbers of the last maps, or of the lane, and
        the maps begin with the next h_pre."""
        rms = type(self.norm) is RMSNorm
        gain, norm_eps = (self.norm.gain, self.norm.eps) if rms else (None, 0.0)
        f, lane = stream.sources or (None, stream.lane if source == kernels.GIVEN else None)
        how = (w, sb, gain, source, eps, norm_eps)
        X, *found = kernels.Exchange.apply(stream.x, f, lane, *how)
        h, maps = kernels.Maps.apply(X, *found, gain, sb, source, ITERS, eps)
        return h if rms else self.norm(h), stream.replace(x=X, sources=()), maps

    def skip(self, old, new, runs):
        pairs = zip(whole(new), whole(old))
        x, *others = (torch.where(runs, x, before) for x, before in pairs)
        return new.replace(x=x, sources=tuple(others))


class Connections(Streams):
    """Maps that are made from X. A subclass defines `maps`, and for kernels `fetch_maps`."""

    decays = ("w",)  # parameters that decay: model.param_groups puts them in "maps"
    before_post = 0  # numbers of the lane before h_post

    def read(self, stream, pre=None):
        """pre: the map to read with, if not the own one. The lane then begins with the own one."""
        if stacked(stream):
            h, stream, lane = self.fetch_maps(stream)
            return h, stream.replace(lane=lane)
        X = streams_of(stream)
        own, post, M = self.maps(X)
        h = self.norm(read(X, pre or own)).to(stream.x.dtype)
        for_write = [*post, *chain(*(M or ()))]  # together (B, T, n), or n + n^2
        return h, stream.replace(lane=torch.cat([*own, *for_write] if pre else for_write, -1))

    def write(self, stream, f, gate=1.0):
        n, at, maps = self.n, self.before_post, stream.lane
        if stacked(stream):
            if norms.scales(gate):
                before, post, M = maps.tensor_split((at, at + n), -1)
                maps = torch.cat([before, gate * post, M], -1)
            return stream.replace(lane=None, sources=(f, maps))
        maps = maps[..., at:].split(1, -1)
        M = [maps[i : i + n] for i in range(n, len(maps), n)] or None
        x, *others = write(streams_of(stream), M, [gate * h for h in maps[:n]], f)
        return stream.replace(x=x, lane=None, sources=tuple(others))

    def mixing(self, stream):
        """The M (B, T, n, n) of a stream that read has returned, or None. For depth.py."""
        M = stream.lane[..., self.before_post + self.n :]
        return M.unflatten(-1, (self.n, self.n)) if M.size(-1) else None


class HC(Connections):
    ends = HCEnds

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.first, self.eps = layer % self.n, config.norm_eps
        self.w = nn.Parameter(torch.empty(self.n + 2, config.n_embd))
        self.sa = nn.Parameter(torch.empty(2 + self.n * (self.n + 2)))  # s, a
        self.uses = {"w": self.n}  # for model.matmul_flops: every stream is multiplied by W

    @staticmethod
    def init_sublayers(block, config):
        """Output projections start times sqrt(n), because the end sums n streams."""
        for layer in (block.attn.wo, *(mlp.down for mlp in mlps(block))):
            norms.weight_of(layer).mul_(math.sqrt(count(config)))

    def reset_parameters(self):
        nn.init.zeros_(self.w)
        self.sa[:2] = 0.01
        a = self.sa[2:].unflatten(0, (self.n, -1))
        a[:, 0] = 0  # h_pre
        a[self.first, 0] = 1
        a[:, 1] = 1  # h_post
        nn.init.eye_(a[:, 2:])  # M

    def maps(self, X):
        """Eqs. 2 and 3: h_pre and h_post, lists of n, and M, n lists of n."""
        s_1, s_2, *a = entries(self.sa, X[0])
        s = (s_1, s_2, *[s_1] * self.n)
        a, y = iter(a), iter(multiply(self.w, X))
        pre, post, M = [], [], []
        for x in X:
            scale = inverse_rms([x], self.eps)
            t = [torch.tanh(next(y) * scale) for _ in s]
            h_pre, h_post, *row = (next(a) + s_i * t_i for s_i, t_i in zip(s, t))
            pre.append(h_pre)
            post.append(h_post)
            M.append(row)
        return pre, post, M

    def fetch_maps(self, stream):
        return self.fetch(stream, kernels.TANH, self.w, self.sa, self.eps)


class MHC(Connections):
    settings = ("hc_streams", "mhc_start")
    ends = MHCEnds
    n_maps = 3  # h_pre, h_post and M
    source = kernels.SIGMOID  # of the h_pre that kernels read with

    def __init__(self, config, layer):
        super().__init__(config, layer)
        rows = sum((self.n, self.n, self.n * self.n)[: self.n_maps])
        self.w = nn.Parameter(torch.empty(rows, self.n * config.n_embd))
        self.sb = nn.Parameter(torch.empty(self.n_maps + rows))  # s, b
        self.start = config.mhc_start
        self.before_post = self.n if self.source == kernels.GIVEN else 0

    def reset_parameters(self):
        nn.init.normal_(self.w, std=self.w.size(1) ** -0.5)
        nn.init.zeros_(self.sb)
        s, b = self.sb.split([self.n_maps, len(self.w)])
        s.fill_(STARTS[self.start])
        if self.start == "prenorm":
            b[: self.n] = reads_mean(self.n)
            if self.n_maps == 3:
                b[2 * self.n :] = NEAR * torch.eye(self.n).flatten()

    def maps(self, X):
        return mhc_maps(X, self.w, self.sb, ITERS)

    def fetch_maps(self, stream):
        return self.fetch(stream, self.source, self.w, self.sb, EPS)


class IHC(MHC):
    n_maps = 2  # h_pre and h_post
    n_streams = 2


def pre_of(stream, n):
    """The map that the next sublayer of smhc reads with, (B, T, n)."""
    return stream.sources[1][..., :n] if stacked(stream) and stream.sources else stream.lane


class SMHCEnds(HCEnds):
    def embed(self, e):  # a lane without a gradient would need a compiled graph of its own
        first = torch.eye(1, self.n, dtype=upcast(e[:0]).dtype, device=e.device)
        return super().embed(e).replace(lane=first + 0 * e[..., :1])

    def additive(self, stream):
        return read(streams_of(stream), pre_of(stream, self.n).split(1, -1))


class SMHC(MHC):
    """Stream.lane is pre, (B, T, n). Between read and write it is (h_pre, h_post, M), and
    Stream.ahead is (pre,), for skip. A write that waits for kernels holds all maps, and no lane."""

    ends = SMHCEnds
    source = kernels.GIVEN  # Eq. 7

    def read(self, stream):
        pre = pre_of(stream, self.n)
        h, stream = super().read(stream, pre.split(1, -1))  # Eq. 7
        return h, stream.replace(ahead=(pre,))

    def write(self, stream, f, gate=1.0):
        new = super().write(stream, f, gate).replace(ahead=())
        if stacked(stream):
            return new
        h_pre = stream.lane[..., : self.n].contiguous()  # or blocks would not share a graph
        return new.replace(lane=h_pre)

    def skip(self, old, new, runs):
        pre = torch.where(runs, pre_of(new, self.n), *old.ahead)
        return super().skip(old, new, runs).replace(lane=pre)


def stream_norms(config):
    return nn.ModuleList(RMSNorm(config.n_embd, config.norm_eps) for _ in range(count(config)))


def normed(modules, X):
    """z of Eq. 8: (B, T, n, C)"""
    return torch.stack([norm(x) for norm, x in zip(modules, X)], -2)


def gate_matrices(config):
    """D and U of Eq. 8."""
    rank, size = max(1, config.n_embd // SHARE), count(config) * config.n_embd
    return nn.Parameter(torch.empty(rank, size)), nn.Parameter(torch.empty(size, rank))


class GatedEnds(HCEnds):
    """`additive`, which depth.py measures, is the plain sum. The head reads each stream."""

    has_kernels = False  # its products are matrix products
    decays = ("d", "u")

    def __init__(self, config):
        super().__init__(config)
        self.norm = stream_norms(config)
        self.d, self.u = gate_matrices(config)

    def reset_parameters(self):
        nn.init.normal_(self.d, std=self.d.size(1) ** -0.5)
        nn.init.zeros_(self.u)

    def readout(self, stream, head):
        z = normed(self.norm, streams_of(stream))
        return gated_read(z, self.d, self.u).to(stream.x.dtype), head


class Gated(Connections):
    ends = GatedEnds
    decays = ("d", "u", "w")

    def __init__(self, config, layer):
        super().__init__(config, layer)
        norms.refuse(config, norm="rms")
        self.norm = stream_norms(config)
        self.d, self.u = gate_matrices(config)
        self.w = nn.Parameter(torch.empty(self.n, self.d.size(1)))

    def reset_parameters(self):
        for random in (self.d, self.w):
            nn.init.normal_(random, std=self.w.size(1) ** -0.5)
        nn.init.zeros_(self.u)

    def read(self, stream):
        z = normed(self.norm, streams_of(stream))
        h = gated_read(z, self.d, self.u).to(stream.x.dtype)  # Eq. 8
        return h, stream.replace(lane=torch.cat(gated_post(z, self.w), -1))  # write is Eq. 9


class WideEnds(HCEnds):
    has_kernels = False  # compiled, wide moves less: it has no products

    def __init__(self, config):
        super().__init__(config)
        self.rho = nn.Parameter(torch.empty(self.n))

    def reset_parameters(self):
        nn.init.constant_(self.rho, reads_mean(self.n))

    def additive(self, stream):
        return wide_read(streams_of(stream), self.rho)


class Wide(Streams):
    ends = WideEnds

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.constants = nn.Parameter(torch.empty(3 * self.n))  # rho, kappa, beta

    def reset_parameters(self):
        rho, kappa, beta = self.constants.chunk(3)
        rho.fill_(reads_mean(self.n))
        kappa.fill_(math.log(99))  # X_i keeps 0.999
        beta.copy_(torch.linspace(-0.01, 0.01, self.n))  # this parts the streams

    def read(self, stream):
        h = wide_read(streams_of(stream), self.constants[: self.n])  # Eq. 10
        return self.norm(h).to(stream.x.dtype), stream

    def write(self, stream, f, gate=1.0):
        X = streams_of(stream)
        x, *others = wide_write(X, self.constants[self.n :], gate * f)  # Eq. 11
        return stream.replace(x=x, sources=tuple(others))


RESIDUALS = {
    "hc": HC, "mhc": MHC, "ihc": IHC, "smhc": SMHC, "gated": Gated, "wide": Wide,
}  # fmt: skip
