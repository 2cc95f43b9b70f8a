"""The kernels of kernels.py against the plain lines, for test_kernels.py and test_cuda.py.

With TRITON_INTERPRET=1 Triton's interpreter runs them on CPU tensors. Else they run on a GPU.
Triton is interpreted from its import on or never, so this file has a process of its own.
"""

import copy
import os

import pytest
import torch
import torch.nn.functional as F

import attnres
import kernels
import nag
import norms
import prune
import streams
from bench import handed, writes_and_reads
from test_all import MOD, assert_close, cases, rms, shaken, some_ids, tiny

interpreter = pytest.importorskip("triton.runtime.interpreter")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
SIZES = [(61, d, 32) for d in (128, 768, 1000, 2048, 4096)]  # tokens, width, directions or sources
SIZES += [(61, 1000, 0)]
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="in float64")


def dot_of_bfloat16(self, a, b, d, *options):
    """The interpreter's tl.dot, which takes the bits of bfloat16 for integers. The interpreter also
    cuts float32 to bfloat16, and does not round: errors are larger than on a GPU."""
    a, b = (
        (x.data.astype("uint32") << 16).view("float32") if str(x.dtype.scalar) == "bf16" else x.data
        for x in (a, b)
    )
    return type(d)((a @ b).astype(d.data.dtype) + d.data, d.dtype.scalar)


kernels.LEAST_TOKENS, kernels.CHUNK = 1, 16  # so that few tokens have several sums
if DEVICE == "cpu":
    interpreter.InterpreterBuilder.create_dot = dot_of_bfloat16
    kernels.WARPS = 2  # so that each program has several tokens
    DTYPES += [(torch.float64, 1e-9)]
    SIZES = [(21, 24, 32), (16, 100, 5), (3, 520, 0)]


def use_kernels(monkeypatch, uses):
    for file in (nag, attnres, streams):
        monkeypatch.setattr(file, "on_cuda", lambda x: uses)


def randoms(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def close_to_float64(plain, fused, inputs, grads, dtype, close, statistics=()):
    """Outputs and gradients of both functions. statistics: the inputs that stay float32"""
    results, wide = [], norms.upcast(torch.zeros(0, dtype=dtype)).dtype
    for form, *cast in ((plain, torch.float64), (fused, DEVICE)):
        leaves = [x.to(wide if i in statistics else dtype) for i, x in enumerate(inputs)]
        leaves = [x.to(*cast).requires_grad_() for x in leaves]
        out = form(*leaves)
        given = [grad.to(dtype).to(y) for grad, y in zip(grads, out)]
        results.append([*out, *torch.autograd.grad(out, leaves, given)])
    for at, (expected, got) in enumerate(zip(*results)):
        error = (got.double().cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        assert error < close, (at, error)


# ------------------------------------------------------------------------------------------------
# NAG


def plain_write(r, s, f, a, w=None, constants=None, ramp=1.0, **parts):
    a = a * ramp
    if w is not None:
        b, p, raw = constants.split([len(w), len(w), 1])
        a = a * nag.modulator(F.linear(r, w), b, p, F.softplus(raw))
    return nag.rotate(r, s, f, a, **parts)


@cases("parts", [{}, dict(ramp=0.3), dict(centre=False), dict(orthogonal=False)])
@cases("N, d, C", SIZES)
@cases("dtype, close", DTYPES)
def test_the_write_of_nag_equals_float64(N, d, C, dtype, close, parts):
    token = (1, N, 1)
    r, f, s, a, *grads = randoms(
        (1, N, d), (1, N, d), token, (1,) if C else token, (1, N, d), token
    )
    inputs = [r / rms(r), s, f + 0.3, a]
    inputs += [x * d**-0.5 for x in randoms((C, d), seed=1)] + randoms((2 * C + 1,)) if C else []

    def fused(r, s, f, a, *modulator):
        ramp = {key: a.new_tensor(value) for key, value in parts.items() if key == "ramp"}
        return kernels.rotate(r, s, f, a, modulator or None, **parts | ramp)

    plain = lambda *inputs: plain_write(*inputs, **parts)
    close_to_float64(plain, fused, inputs, grads, dtype, close, (1, 3, 5))


@cases("dtype", [torch.float32, torch.bfloat16])
def test_the_write_of_nag_survives_inputs_that_would_divide_by_zero(dtype):
    r, f, a = randoms((1, 16, 64), (1, 16, 64), (1, 16, 1))
    r, f, s = (r / rms(r)).to(dtype), f.to(dtype), torch.zeros(1, 16, 1)
    parallel = [k * r for k in (1, -10, 100)] + [k * r + 1e-3 * f for k in (1, 100)]
    for update in (0 * f, torch.ones_like(f), 300 + 0.1 * f, 1e-6 * f, *parallel):
        results = []
        for form in (kernels.rotate, nag.rotate):
            place = DEVICE if form is kernels.rotate else "cpu"
            leaves = [x.clone().to(place).requires_grad_() for x in (r, update, a.float())]
            new, norm = form(leaves[0], s.to(place), *leaves[1:])
            grads = torch.autograd.grad(new.float().sum() + norm.sum(), leaves)
            assert all(x.isfinite().all() for x in (new, norm, *grads))
            assert (rms(new.float()) - 1).abs().max() < 0.01
            results.append((new.float().cpu(), norm.cpu()))
        assert_close(*results, rtol=0, atol=0.02)


# ------------------------------------------------------------------------------------------------
# Attention Residuals


READS = [(5, 24, 3, 3), (7, 1000, 4, 3), (1, 64, 9, 9)]
if DEVICE == "cuda":
    READS = [(700, d, older, older - 1) for d in (128, 768, 1000, 2048, 4096) for older in (2, 9)]
    READS += [(700, 2048, 33, 33)]


def mean_of(sources, q, gain):
    vs, rans = zip(*sources)
    masked = tuple(i for i, ran in enumerate(rans) if ran is not None)
    h = attnres.WeightedSum.apply(q, 1e-6, masked, *vs, *(rans[i] for i in masked))
    return gain * h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)


@cases("skipped", [0.0, 0.4])
@cases("N, d, older, shared", READS)
@cases("dtype, close", DTYPES)
def test_the_reads_of_attnres_equal_float64(N, d, older, shared, skipped, dtype, close):
    """Of the two sublayers of a block: the second one reads the first `shared` and a new source."""
    *vs, new = randoms(*[(1, N, d)] * (older + 1))
    g = torch.Generator().manual_seed(2)
    rans = [None] + [torch.rand(1, N, 1, generator=g) >= skipped for _ in range(older)]
    rans = rans if skipped else [None] * (older + 1)
    parameters = [x * d**-0.5 for x in randoms((d,), (d,), seed=3)] + randoms((d,), (d,), seed=4)
    if dtype == torch.float64:  # with other dtypes its large gradient would hide errors of others
        vs[1][0, 0] = 0

    def plain(*inputs):
        *vs, q, q2, gain, gain2 = inputs
        *old, newest = zip(vs, rans)
        return mean_of(old, q, gain), mean_of([*old[:shared], newest], q2, gain2)

    def fused(*inputs):
        *vs, q, q2, gain, gain2 = inputs
        there = [None if ran is None else ran.to(DEVICE) for ran in rans]
        *old, newest = zip(vs, there)
        y, ahead = kernels.read(old, q, 1e-6, gain, 1e-6, None, q2, shared)
        return y, kernels.read([newest], q2, 1e-6, gain2, 1e-6, ahead)[0]

    inputs, grads = [*vs, 2 * new, *parameters], randoms((1, N, d), (1, N, d), seed=5)
    close_to_float64(plain, fused, inputs, grads, dtype, close, range(older + 1, older + 5))


# ------------------------------------------------------------------------------------------------
# Models

ROUTER = MOD | dict(mod_router="learned")
KINDS = {
    "nag": {},
    "nag, other parts": dict(nag_centre=False, nag_orthogonal=False, branch_scale="depth"),
    "nag, its router": MOD,
    "nag, a learned router": ROUTER,
    "attnres": dict(residual="attnres"),
    "attnres, layer norm": dict(residual="attnres", norm="layer"),
    "attnres, a router": ROUTER | dict(residual="attnres"),
    "attnres_block": dict(residual="attnres_block", attnres_size=3, n_layer=3),
    "attnres_block, pruned": dict(residual="attnres_block", attnres_size=4, n_layer=3),
    "attnres_block, a router": ROUTER | dict(residual="attnres_block", attnres_size=3, n_layer=3),
    "hc": dict(residual="hc"),
    "hc, 3 streams": dict(residual="hc", hc_streams=3),
    "hc, a router": ROUTER | dict(residual="hc"),
    "mhc": dict(residual="mhc"),
    "mhc, a router": ROUTER | dict(residual="mhc"),
    "mhc, 1 stream": dict(residual="mhc", hc_streams=1),
    "mhc, 3 streams": dict(residual="mhc", hc_streams=3),
    "ihc": dict(residual="ihc"),
    "ihc, 1 stream": dict(residual="ihc", hc_streams=1),
    "ihc, 4 streams": dict(residual="ihc", hc_streams=4),
    "ihc, layer norm": dict(residual="ihc", norm="layer"),
    "ihc, no norm": dict(residual="ihc", norm="none"),
    "ihc, scaled": dict(residual="ihc", branch_scale="depth"),
    "ihc, wider": dict(residual="ihc", n_embd=72),
    "ihc, a router": ROUTER | dict(residual="ihc"),
    "smhc, 2 streams": dict(residual="smhc", hc_streams=2),
    "smhc, layer norm": dict(residual="smhc", norm="layer"),
    "smhc, a router": ROUTER | dict(residual="smhc"),
}


@on_cpu
@cases("kind", KINDS)
def test_a_model_with_kernels_equals_the_plain_one(monkeypatch, kind):
    """Kernels of attnres take a token at a time, others up to 32: 38 leave a tile partly empty."""
    tokens = 7 if "attnres" in kind else 19
    model, idx = shaken(tiny(**KINDS[kind])).double(), some_ids(2, tokens)
    model.recompute = kind in ("nag", "attnres", "ihc", "smhc, 2 streams")
    if "pruned" in kind:  # the embedding is then the only source of the second block
        prune.skip(model, [0], "sublayer")
    results = []
    for uses in (False, True):
        use_kernels(monkeypatch, uses)
        torch.manual_seed(0)  # of dropout
        _, loss = model(idx, idx.roll(-1, 1))
        grads = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
        results.append([loss, *grads])
    assert_close(*results, rtol=1e-8, atol=1e-10)


@on_cpu
@cases("stream", [torch.float32, torch.bfloat16])
@cases("residual", ["nag", "attnres"])
def test_kernels_keep_the_dtypes_of_the_plain_lines(monkeypatch, residual, stream):
    """The stream and f in one dtype or in two, under autocast, which casts NAG's products."""
    block = shaken(tiny(residual=residual)).blocks[0]
    x, f = randoms((1, 5, 32), (1, 5, 32))
    x, f, s = (x / rms(x)).to(stream), f.bfloat16(), torch.zeros(1, 5, 1)
    start, results = norms.Stream(x, s if residual == "nag" else None), []
    for uses in (False, True):
        use_kernels(monkeypatch, uses)
        with torch.autocast("cpu", torch.bfloat16):
            h, after = block.attn_residual.read(start)
            h2, after = block.mlp_residual.read(block.attn_residual.write(after, f))
        results.append([h, h2, after.x] + ([after.lane] if residual == "nag" else []))
    assert [y.dtype for y in results[0]] == [y.dtype for y in results[1]]
    for plain, ours in zip(*results):
        assert_close(ours, plain, rtol=0.02, atol=0.02)


# ------------------------------------------------------------------------------------------------
# Streams


def worst_error(mode, width, stream, output, place="cpu", compiled=lambda function: function):
    """Two sublayers against plain lines in float64: the largest error of an output or a gradient,
    relative to the largest number of each. stream and output: dtypes"""
    model = shaken(tiny(residual=mode, n_layer=1, n_embd=width, n_head=2))
    block, g, found = model.blocks[0], torch.Generator().manual_seed(0), []
    n = streams.count(model.config)
    random = lambda *size: torch.randn(size, generator=g, dtype=torch.float64)
    dtypes, sizes = [output, output, stream, torch.float32], ((), (), (n,))
    given = [random(*size, 2, 19, width).to(dtype) for size, dtype in zip(sizes, dtypes)]
    given[0][:, :3] = 0
    first, *others = given[2].double()
    start = copy.deepcopy(model).double().ends.embed(first).replace(sources=tuple(others))
    _, start = copy.deepcopy(block.mlp_residual).double().read(start)
    (maps,) = handed(start)
    given.append(maps.detach().float())
    grads = []
    for reference in (True, False):
        where = [("cpu", torch.float64) if reference else (place, dtype) for dtype in dtypes]
        leaves = [x.to(*to).requires_grad_() for x, to in zip(given, where)]
        parts = copy.deepcopy([block.attn_residual, block.mlp_residual])
        parts = [part.double() if reference else part.to(place) for part in parts]
        start = model.ends.embed(leaves[2][0].detach())
        start = start.replace(lane=leaves[3])
        streams_in = [*leaves[2]] if reference else leaves[2:3]
        assert start.x.shape == streams_in[0].shape
        out = compiled(writes_and_reads(*parts, start))(*leaves[:2], *streams_in, leaves[3])
        out = [*out[:2], torch.stack(out[2 : n + 2]), *out[n + 2 :]] if reference else out
        grads = grads or [random(*x.shape) for x in out]
        leaves += [p for part in parts for p in part.parameters()]
        weights = [grad.to(x) for grad, x in zip(grads, out)]
        how = dict(allow_unused=True, materialize_grads=True)
        back = torch.autograd.grad(out, leaves, weights, **how)
        found.append([x.detach().cpu().double() for x in (*out, *back)])
    errors = [(b - a).abs().max() / a.abs().max().clamp(min=1e-3) for a, b in zip(*found)]
    return max(errors).item()


PRECISIONS = [  # of the stream and of what sublayers write; the largest error
    (torch.float32, torch.float32, 2e-3),  # gradients through products round to TF32
    (torch.float32, torch.bfloat16, 1e-2),
    (torch.bfloat16, torch.bfloat16, 3e-2),
]


@on_cpu
@cases("mode, precision", [
    ("ihc", 0), ("smhc", 0), ("hc", 1), ("hc", 2), ("ihc", 2), ("mhc", 2), ("smhc", 2),
])  # fmt: skip
def test_streams_in_low_precision(mode, precision, monkeypatch):
    monkeypatch.setattr(streams, "on_cuda", lambda x: x.dtype != torch.float64)
    stream, output, close = PRECISIONS[precision]
    assert worst_error(mode, 72, stream, output) < close


def test_streams_keep_a_nan():
    """CUDA's NaN has all bits but the sign: rounding it would carry into the sign."""
    X, w = (x.float().to(DEVICE).requires_grad_() for x in randoms((2, 1, 5, 16), (3, 32)))
    _, y, *_ = kernels.Exchange.apply(X, None, None, w, None, None, kernels.NONE, 0.0, 0.0)
    grad = torch.zeros_like(y)
    grad[0, 3, 1] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    y.backward(grad)
    assert w.grad.isnan().any(1).tolist() == [False, True, False]
    assert X.grad.isnan().any(-1).any(0).tolist() == [[False, False, False, True, False]]


def test_streams_have_the_gradient_of_either_sum_alone():
    X, w = (x.float().to(DEVICE).requires_grad_() for x in randoms((2, 1, 5, 16), (3, 32)))
    how = None, None, kernels.NONE, 0.0, 0.0
    _, y, squares, *_ = kernels.Exchange.apply(X, None, None, w, *how)
    for found, plain in (
        (y, torch.cat([*X], -1) @ w.T),
        (squares, X.square().sum((0, -1))[..., None]),
    ):
        grad = randoms(found.shape)[0].to(found)
        ours, expected = (
            torch.autograd.grad(z, X, grad, retain_graph=True) for z in (found, plain)
        )
        assert_close(ours, expected, rtol=2e-3, atol=2e-3)


@on_cpu
@cases("streams, tokens, dims", [(4, 2, 4), (5, 2, 3), (4, 1, 3)])
def test_many_streams_and_few_tokens_take_the_plain_lines(monkeypatch, streams, tokens, dims):
    use_kernels(monkeypatch, True)
    monkeypatch.setattr(kernels, "LEAST_TOKENS", 2)
    model = tiny(residual="mhc", hc_streams=streams)
    assert model.ends.embed(torch.zeros(1, tokens, 32)).x.ndim == dims
