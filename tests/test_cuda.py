"""What needs a GPU: compiled steps against float64 on the CPU, decoding, experts, masks, resuming.

`make slow` skips these tests without a GPU. With 14 cores and the name of each test as it ends, in
about five minutes: python -m pytest tests/test_cuda.py -n 14 -v
"""

import copy

import pytest
import torch
from kernel_checks import PRECISIONS, worst_error
from test_kernels import run_python

import bench
import bhyt
import generate
import machine
import moe
import nag
import norms
from model import RESIDUALS
from test_all import (
    EXTRAS,
    MOD,
    cases,
    log_of,
    mean_square,
    resume,
    rms,
    shaken,
    some_ids,
    tiny,
    train,
)

DEVICE = "cuda"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
LEARNED = MOD | {"mod_router": "learned", "residual": "prenorm"}
EXPERTS = dict(moe_experts=4, moe_top_k=3, moe_shared=1, activation="swiglu")
KINDS = {mode: {"residual": mode} for mode in RESIDUALS}
KINDS["attnres_block"] = dict(residual="attnres_block", attnres_size=2)  # 1 would be attnres
KINDS |= {"nag's router": MOD, "learned router": LEARNED}
ROUTED = ("hc", "mhc", "ihc", "smhc", "wide", "attnres")
KINDS |= {f"{mode}, learned router": LEARNED | {"residual": mode} for mode in ROUTED}
KINDS |= {"experts": EXPERTS, "extras": EXTRAS, "grouped queries": dict(n_head=4, n_kv_head=2)}


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    torch._dynamo.reset()  # else a second width compiles for all widths
    torch.set_float32_matmul_precision("highest")


@cases("kind", ["any", "parallel", "zero"])
@cases("dtype, close", [(torch.float32, 2e-4), (torch.bfloat16, 5e-2)])
@cases("d", [128, 768, 1000, 2048, 4096])
def test_on_cuda_fused_code_equals_float64(d, dtype, close, kind):
    g = torch.Generator().manual_seed(0)
    r, f, grad, gamma = torch.randn(4, 64, d, generator=g, dtype=torch.float64)
    f = {"any": f, "parallel": 3 * r / rms(r) + 0.5 * f, "zero": 0 * f}[kind]

    def turned(r, f):
        lane = norms.upcast(r.new_zeros(64, 1))
        return nag.rotate(r, lane, f, lane + 0.3)[0]

    def bounded(x, f):
        x = norms.upcast(x + f)
        y = bhyt.Tanh.apply(2.0 / bhyt.KAPPA * torch.rsqrt(mean_square(x) + 1e-6) * x)
        return (gamma[0].to(x) * y).to(f.dtype)

    for function in (turned, bounded):
        results = []
        for form, *place in ((function, torch.float64), (torch.compile(function), DEVICE, dtype)):
            inputs = [x.to(dtype).to(*place).requires_grad_() for x in (r / rms(r), f)]
            out = form(*inputs)
            grads = torch.autograd.grad(out, inputs, grad.to(dtype).to(out))
            results.append([out, *(grads[:1] if kind == "zero" else grads)])
        for expected, got in zip(*results):
            error = (got.double().cpu() - expected).abs().max() / expected.abs().max()
            assert error < close, (function.__name__, error)


@cases("mode", ["hc", "mhc", "ihc", "smhc"])
@cases("stream, output, close", PRECISIONS)
@cases("d", [128, 768, 1000, 2048, 4096])
def test_on_cuda_the_kernels_of_the_streams_equal_float64(d, stream, output, close, mode):
    assert worst_error(mode, d, stream, output, DEVICE, torch.compile) < close


@cases("which", ["of_nag", "of_attnres", "streams_keep or streams_have"])
def test_on_cuda_kernels_equal_float64(which):
    run_python("-m", "pytest", "tests/kernel_checks.py", "-q", "-x", "-k", which)


def loss_and_gradients(model, idx, targets, dtype="float32"):
    with machine.autocast(idx.device.type, dtype):
        loss = model(idx, targets)[1]
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.item(), [grad.cpu().double() for grad in grads]


def worst(ours, theirs):
    """The largest error of a parameter's gradient, relative to its size or to 1% of all."""
    least = 0.01 * torch.stack([grad.norm() for grad in theirs]).norm()
    pairs = zip(ours, theirs)
    return max(float((a - b).norm() / b.norm().clamp(min=least)) for a, b in pairs)


@cases("kind", KINDS)
def test_on_cuda_a_compiled_step_equals_float64(kind):
    model = shaken(tiny(**KINDS[kind]))
    order = torch.rand(4, 64, generator=torch.Generator().manual_seed(3)).argsort()
    idx, targets = order[:, :32], order[:, 32:]  # each token once: top-k breaks ties as it likes
    loss, grads = loss_and_gradients(copy.deepcopy(model).double(), idx, targets)
    rounded = 0.4 if "router" in kind else 0.1  # rounding changes which tokens a router takes
    for dtype, of_loss, of_grads in (("float32", 1e-5, 1e-3), ("bfloat16", 2e-3, rounded)):
        ours = copy.deepcopy(model).to(DEVICE)
        ours.compile_blocks()
        got = loss_and_gradients(ours, idx.to(DEVICE), targets.to(DEVICE), dtype)
        assert got[0] == pytest.approx(loss, rel=of_loss), dtype
        assert worst(got[1], grads) < of_grads, dtype


@cases("mode, rows", [
    ("prenorm", 3), ("nag", 3), ("nag", 1), ("bhyt", 3), ("ihc", 3), ("ihc", 1), ("attnres", 3),
    ("attnres", 1)])  # fmt: skip
def test_on_cuda_compiled_decoding_equals_the_full_forward(mode, rows):
    """Of given text: text that a model generates with one embedding for both ends repeats."""
    model = shaken(tiny(residual=mode, n_kv_head=1, tied=False)).to(DEVICE).eval()
    text, greedy = some_ids(rows, 28).to(DEVICE), (0, None, None, None)
    step = generate.compiled_step(text.device)
    cache = generate.KVCache(model, rows, 28, static=True)
    with torch.inference_mode():
        generate.next_token(model, text[:, :8], cache, *greedy)
        got = [step(model, text[:, t : t + 1], cache, *greedy).clone() for t in range(8, 28)]
        assert torch.equal(torch.cat(got, 1), model(text)[0].argmax(-1)[:, 8:])


def test_on_cuda_experts_repeat():
    model = shaken(tiny(**EXPERTS)).to(DEVICE)
    model.compile_blocks()
    idx, targets = some_ids(4).to(DEVICE), some_ids(4, seed=2).to(DEVICE)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss, grads = loss_and_gradients(model, idx, targets, "bfloat16")
        load = torch.stack([layer.load for layer in moe.layers(model)])
        for layer in moe.layers(model):
            layer.load.zero_()
        found.append((loss, load, grads))
    (loss, load, grads), again = found
    # the sum over three experts has no fixed order
    assert loss == pytest.approx(again[0], rel=1e-3) and worst(grads, again[2]) < 0.05
    assert (load - again[1]).abs().sum() <= 4


def test_on_cuda_masks_have_a_fast_kernel():
    shape = dict(device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    q, k = torch.randn(2, 12, 614, 64, **shape), torch.randn(2, 12, 1024, 64, **shape)
    mask = torch.rand(2, 1, 614, 1024, device=DEVICE) < 0.7
    chosen = torch._fused_sdp_choice(q, k, k, mask, 0.0, False)
    assert chosen != torch.nn.attention.SDPBackend.MATH.value


def test_on_cuda_a_recorded_run_keeps_its_tensors():
    y = torch.zeros(2**20, device=DEVICE)

    def record():
        x = torch.ones_like(y)
        return bench.replayed(lambda: y.add_(x), DEVICE)

    replay, before = record(), float(y[0])
    others = [torch.full_like(y, 7.0) for _ in range(8)]  # they would take freed memory
    replay()
    assert float(y[0]) == before + 1 and len(others) == 8


def test_on_cuda_a_run_resumes_where_it_stopped(data, tmp_path):
    how = dict(device=DEVICE, compile=True, dtype="bfloat16", keep_interval=3)
    train(data, tmp_path / "whole", **how)
    expected = log_of(tmp_path / "whole").losses
    half = tmp_path / "half"
    half.mkdir()
    for name in ("log.jsonl", "ckpt_000003.pt"):
        place = half / name.replace("_000003", "")
        place.write_bytes((tmp_path / "whole" / name).read_bytes())
    resume(half)
    assert log_of(half).losses == pytest.approx(expected, rel=1e-3)
