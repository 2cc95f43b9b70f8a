"""
Attention Residuals (arXiv 2603.15031): a sublayer reads a weighted sum of all earlier outputs.

F is a sublayer, C = n_embd, and rms(x)^2 = mean(x^2) + eps. All sources v_0 ... v_m stay apart.
Each sublayer has a learned query w and gain g, and so has the end of the model:

    sources    attnres: v_0 = embedding, v_i = output of sublayer i
               attnres_block: v_0 = embedding, v_i = sum of the outputs of block i, which is
               attnres_size sublayers; the last block is a source from its first sublayer on
    sublayer   p = softmax_i(<w * g, v_i> / rms(v_i)),  f = F(Norm(sum_i p_i v_i))               (1)

w starts at 0, so a sublayer first reads the mean of its sources: not pre-norm.

Cost: sublayer l of attnres reads l sources, so the reads grow with the square of the depth;
attnres_block bounds the number of sources. All readers share the sources, so a step keeps about as
much as pre-norm for its backward pass. The number of sources differs by depth, so the blocks of a
model cannot share one compiled graph: compilation takes time in proportion to depth.

On CUDA the kernels of kernels.py read. The first sublayer of a block of the model reads the sources
that both sublayers share once for the two.

With Mixture of Depths, an output that a token skipped is masked in Eq. 1, because a source of zeros
would still take weight.

Differs from the paper:
- Eq. 1 is float32, whatever the dtype of the stream. On CUDA, the sum that two sublayers share is
  kept in the dtype of the stream between their reads.
- attnres keeps each output in its own dtype, such as bfloat16. Sums have the dtype of the stream.
"""

import math

import torch
from torch import nn

import kernels
from norms import FinalNorm, PreNorm, RMSNorm, fusing, learns, on_cuda, scales, upcast

# A source is (v, ran): v (B, T, C), and ran (B, T, 1) tells the tokens that have it, or is None if
# all do. Stream.x and Stream.lane are the newest source, which still grows


def sources_of(stream):
    return (*stream.sources, (stream.x, stream.lane))


def scores(sources, query, eps):
    """s_i = <query, v_i> / rms(v_i) and 1 / rms(v_i), each (B, T, sources) in float32."""
    products, inverse = [], []
    for v, _ in sources:
        v = upcast(v)
        products.append((v * query).sum(-1, keepdim=True))
        inverse.append(torch.rsqrt(v.square().mean(-1, keepdim=True) + eps))
    inverse = torch.cat(inverse, -1)
    return torch.cat(products, -1) * inverse, inverse


def weights(s, sources):
    """p of Eq. 1, (B, T, sources): the softmax of s over the sources that a token has."""
    columns = zip(s.split(1, -1), (ran for _, ran in sources))
    columns = [s_i if ran is None else s_i.masked_fill(~ran, -math.inf) for s_i, ran in columns]
    return torch.cat(columns, -1).softmax(-1)


def mix(sources, p):
    """sum_i p_i v_i of Eq. 1, (B, T, C) in float32."""
    return sum(p_i * upcast(v) for p_i, (v, _) in zip(p.split(1, -1), sources))


class WeightedSum(torch.autograd.Function):
    """Eq. 1 without F and Norm, and its gradient. With s_i the scores and o the gradient:

        d_i = p_i (<o, v_i> - sum_j p_j <o, v_j>) / rms(v_i)
        dv_i = p_i o + d_i (query - s_i v_i / (C rms(v_i))),  dquery = sum over tokens, i of d_i v_i

    The backward that autograd would make sums over all tokens once for each source.
    """

    @staticmethod
    def forward(ctx, query, eps, masked, *given):
        sources = pairs(masked, given)
        s, inverse = scores(sources, query, eps)
        p = weights(s, sources)
        ctx.masked = masked
        ctx.save_for_backward(query, s, inverse, p, *given)
        return mix(sources, p)

    @staticmethod
    def backward(ctx, o):
        query, s, inverse, p, *given = ctx.saved_tensors
        sources = pairs(ctx.masked, given)
        a = torch.cat([(o * upcast(v)).sum(-1, keepdim=True) for v, _ in sources], -1)
        d = p * (a - (p * a).sum(-1, keepdim=True)) * inverse
        grads = []
        tokens = zip(sources, *(x.split(1, -1) for x in (p, d, d * s * inverse / o.size(-1))))
        for (v, _), p_i, d_i, shrink in tokens:
            grads.append((p_i * o + d_i * query - shrink * upcast(v)).to(v.dtype))
        grad_query = mix(sources, d).flatten(0, -2).sum(0)
        return grad_query, None, None, *grads, *[None] * len(ctx.masked)


def pairs(masked, given):
    """The sources. given: v_0, ..., v_m, and ran of those whose numbers are in masked."""
    n = len(given) - len(masked)
    ran = dict(zip(masked, given[n:]))
    return [(v, ran.get(i)) for i, v in enumerate(given[:n])]


def query_of(reader):
    """w * g of Eq. 1, in float32. reader: a sublayer's residual, or the ends."""
    return upcast(reader.w * reader.source_norm.gain)


def weighted_sum(stream, reader):
    """sum_i p_i v_i of Eq. 1, (B, T, C) in float32."""
    sources = sources_of(stream)
    vs, rans = zip(*sources)
    if not learns(reader.w, reader.source_norm.gain, *vs):
        return mix(sources, reader.weights(stream))
    masked = tuple(i for i, ran in enumerate(rans) if ran is not None)
    given = (*vs, *(rans[i] for i in masked))
    return WeightedSum.apply(query_of(reader), reader.source_norm.eps, masked, *given)


def weights_of(reader, stream):
    """p of Eq. 1, (B, T, number of sources), for reads and for depth.py."""
    sources = sources_of(stream)
    s, _ = scores(sources, query_of(reader), reader.source_norm.eps)
    return weights(s, sources)


def fused(sources, reader, *shared):
    """Norm of Eq. 1 by a Triton kernel, and what it leaves for the second sublayer of a block"""
    norm = reader.norm
    gain, eps = (upcast(norm.gain), norm.eps) if type(norm) is RMSNorm else (None, 0.0)
    h, left = kernels.read(sources, query_of(reader), reader.source_norm.eps, gain, eps, *shared)
    return (norm(h) if gain is None else h), left


class AttnResEnds(FinalNorm):
    weights = weights_of

    def __init__(self, config):
        super().__init__(config)
        self.w = nn.Parameter(torch.empty(config.n_embd))
        self.source_norm = RMSNorm(config.n_embd, config.norm_eps)

    def reset_parameters(self):
        nn.init.zeros_(self.w)

    def readout(self, stream, head):
        sources = sources_of(stream)
        if on_cuda(stream.x):
            h, _ = fused(sources, self)
        else:
            h = self.norm(self.additive(stream))
        return h.to(sources[0][0].dtype), head

    def additive(self, stream):
        return weighted_sum(stream, self)


class AttnRes(PreNorm):
    ends = AttnResEnds
    weights = weights_of
    cuda_options = fusing(reads=8, operations=100)

    def __init__(self, config, layer, size=1):
        super().__init__(config, layer)
        self.w = nn.Parameter(torch.empty(config.n_embd))
        self.source_norm = RMSNorm(config.n_embd, config.norm_eps)
        self.size = size  # sublayers in a block of sources
        self.begins = (layer - 1) % size == 0  # this sublayer is the first of its block
        self.layer, self.second = layer, None

    def reset_parameters(self):
        nn.init.zeros_(self.w)

    @staticmethod
    def equip(block, config):
        block.attn_residual.second = (block.mlp_residual,)  # a tuple, so that it is no submodule

    def read(self, stream):
        sources = sources_of(stream)
        if on_cuda(stream.x):
            h, stream = self.fused_read(stream)
        else:
            h = self.norm(weighted_sum(stream, self))
        return h.to(sources[0][0].dtype), stream

    def fused_read(self, stream):
        """read, without the cast. ahead: (layer, number n, (o, lse)) of the first n sources."""
        layer, n, known = stream.ahead or (None, 0, None)
        if layer != self.layer:
            n, known = 0, None
        shared = len(stream.sources) + self.begins  # the newest source grows if no block begins
        if self.second is None or shared == 0:  # 0: sublayer 1 is pruned, and the embedding grows
            h, _ = fused(sources_of(stream)[n:], self, known)
            return h, stream.replace(ahead=())
        (second,) = self.second
        h, left = fused(sources_of(stream), self, None, query_of(second), shared)
        return h, stream.replace(ahead=(second.layer, shared, left))

    def write(self, stream, f, gate=1.0):
        if scales(gate):
            f = gate * f  # times 1 would be a copy, which takes a kernel
        if not self.begins:
            return stream.replace(x=(stream.x + f).to(stream.x.dtype), lane=None)
        sources = sources_of(stream)
        dtype = f.dtype if self.size == 1 else sources[0][0].dtype  # sums need the stream's dtype
        return stream.replace(x=f.to(dtype), lane=None, sources=sources)

    def skip(self, old, new, runs):
        """The stream new for the tokens that run, (B, T, 1). Others add nothing to old. For mod.py.

        If a block begins, its sum is masked for those that skip, until one of its sublayers runs.
        """
        if self.begins:
            return new.replace(x=torch.where(runs, new.x, 0.0), lane=runs)
        lane = None if old.lane is None else old.lane | runs
        return new.replace(x=torch.where(runs, new.x, old.x), lane=lane)


def group_size(config):
    """The sublayers of a block of attnres_block."""
    return config.attnres_size or math.ceil(2 * config.n_layer / 8)


class BlockAttnRes(AttnRes):
    settings = ("attnres_size",)

    def __init__(self, config, layer):
        super().__init__(config, layer, group_size(config))


RESIDUALS = {"attnres": AttnRes, "attnres_block": BlockAttnRes}
