"""The kernels of kernels.py against the plain lines, for test_kernels.py and test_cuda.py.

With TRITON_INTERPRET=1 Triton's interpreter runs them on CPU tensors. Else they run on a GPU.
Triton is interpreted from its import on or never, so this file has a process of its own.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from triton.runtime import interpreter

import attnres
import kernels
import nag
import norms
from test_all import (
    MOD,
    assert_close,
    cases,
    golden,
    logits_and_gradients,
    rms,
    shaken,
    some_ids,
    tiny,
)

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)]
SIZES = [(64, d, 32) for d in (128, 768, 1000, 2048, 4096)]  # tokens, width, directions or sources
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="in float64")


def dot_of_bfloat16(self, a, b, d, *options):
    """The interpreter's tl.dot, which takes the bits of bfloat16 for integers"""
    a, b = (
        (x.data.astype("uint32") << 16).view("float32") if str(x.dtype.scalar) == "bf16" else x.data
        for x in (a, b)
    )
    return type(d)((a @ b).astype(d.data.dtype) + d.data, d.dtype.scalar)


if DEVICE == "cpu":
    interpreter.InterpreterBuilder.create_dot = dot_of_bfloat16
    kernels.WARPS = 2  # so that each program has several tokens
    DTYPES += [(torch.float64, 1e-9)]
    SIZES = [(21, 24, 32), (16, 100, 5), (3, 520, 0)]


@pytest.fixture
def fused(monkeypatch):
    """The model takes the kernels."""
    use_kernels(monkeypatch, True)


def use_kernels(monkeypatch, uses):
    for file in (nag, attnres):
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


def plain_write(r, s, f, a, w=None, b=None, p=None, raw=None, **parts):
    if w is not None:
        r, products = nag.Project.apply(r, w)
        a = a * nag.modulator(products, b, p, F.softplus(raw))
    return nag.rotate(r, s, f, a, **parts)


@cases("parts", [{}, dict(centre=False), dict(orthogonal=False)])
@cases("N, d, C", SIZES)
@cases("dtype, close", DTYPES)
def test_the_write_of_nag_equals_float64(N, d, C, dtype, close, parts):
    token = (1, N, 1)
    r, f, s, a, *grads = randoms(
        (1, N, d), (1, N, d), token, (1,) if C else token, (1, N, d), token
    )
    inputs = [r / rms(r), s, f + 0.3, a]
    inputs += (
        [x * d**-0.5 for x in randoms((C, d), seed=1)] + randoms((C,), (C,), (1,)) if C else []
    )

    def fused(r, s, f, a, *modulator):
        return kernels.rotate(r, s, f, a, modulator or None, **parts)

    plain = lambda *inputs: plain_write(*inputs, **parts)
    close_to_float64(plain, fused, inputs, grads, dtype, close, (1, 3, 5, 6, 7))


@on_cpu
def test_the_write_of_nag_equals_the_golden():
    z = golden("nag")
    r, f = (z[key].requires_grad_() for key in ("direction", "branch_out"))
    factor = z["mod_weight"], z["mod_bias"], z["mod_logits"], torch.log(torch.expm1(z["beta"]))
    direction, norm = kernels.rotate(r, z["log_norm"], f, z["alpha"], factor, eps=0.0)
    ours = direction, norm, *torch.autograd.grad(direction, (r, f), z["grad_out"])
    keys = ("new_direction", "new_log_norm", "grad_direction", "grad_branch_out")
    assert_close(ours, tuple(z[key] for key in keys), rtol=0, atol=1e-9)


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


@on_cpu
@torch.no_grad()
@cases("residual, key", [("attnres", "full"), ("attnres_block", "block")])
def test_the_reads_of_attnres_equal_the_golden(fused, residual, key):
    z = golden("attnres")
    layers, C = z["w"].shape
    shape = dict(n_layer=layers // 2, n_embd=C, norm="none", norm_eps=z["eps"].item())
    sizes = dict(attnres_size=int(z["size"])) if residual == "attnres_block" else {}
    model = tiny(**shape, residual=residual, **sizes).double()
    modules = [of for block in model.blocks for of in (block.attn_residual, block.mlp_residual)]
    for module, w, g in zip([*modules, model.ends], [*z["w"], z["w_out"]], [*z["g"], z["g_out"]]):
        module.w.copy_(w)
        module.source_norm.gain.copy_(g)
    stream = model.ends.embed(z["e"].view(1, 1, C))
    for module, W, expected in zip(modules, z["W"], z[key + "_h"]):
        h, stream = module.read(stream)
        assert_close(h[0, 0], expected, rtol=0, atol=1e-9)
        stream = module.write(stream, torch.tanh(h @ W.T))
    assert_close(model.ends.readout(stream, None)[0][0, 0], z[key + "_out"], rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------------
# Models

KINDS = {
    "nag": {},
    "nag, other parts": dict(nag_centre=False, nag_orthogonal=False, branch_scale="depth"),
    "nag, its router": MOD,
    "nag, a learned router": MOD | dict(mod_router="learned"),
    "attnres": dict(residual="attnres"),
    "attnres, layer norm": dict(residual="attnres", norm="layer"),
    "attnres, a router": MOD | dict(residual="attnres", mod_router="learned"),
    "attnres_block": dict(residual="attnres_block", attnres_size=3, n_layer=3),
    "attnres_block, a router": MOD
    | dict(residual="attnres_block", attnres_size=3, n_layer=3, mod_router="learned"),
}


@on_cpu
@cases("kind", KINDS)
def test_a_model_with_kernels_equals_the_plain_one(monkeypatch, kind):
    model, idx = shaken(tiny(**KINDS[kind])).double(), some_ids(2, 16)
    model.recompute = kind in ("nag", "attnres")
    results = []
    for uses in (False, True):
        use_kernels(monkeypatch, uses)
        results.append(logits_and_gradients(model, idx, idx.roll(-1, 1)))
    assert_close(*results, rtol=1e-7, atol=1e-9)


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
