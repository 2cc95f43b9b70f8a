"""What needs a GPU: compiled code against float64 on the CPU. `make slow` skips it without one."""

import copy

import pytest
import torch

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
SKIPS = {"nag's router": MOD, "learned router": MOD | {"mod_router": "learned"}}
EXPERTS = dict(moe_experts=4, moe_top_k=2, moe_shared=1, activation="swiglu")
KINDS = {mode: {"residual": mode} for mode in RESIDUALS} | SKIPS
KINDS |= {"experts": EXPERTS, "extras": EXTRAS, "grouped queries": dict(n_head=4, n_kv_head=2)}


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
        y = bhyt.bounded_tanh(x, mean_square(x), x.new_full((1,), 2.0), gamma[0].to(x), 10.0)
        return y.to(f.dtype)

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


def loss_and_gradients(model, idx, targets, dtype="float32"):
    with machine.autocast(idx.device.type, dtype):
        loss = model(idx, targets)[1]
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return loss.item(), [grad.cpu().double() for grad in grads]


def distance(ours, theirs):
    """The size of the difference of two lists of gradients, relative to the second."""
    ours, theirs = (torch.cat([grad.flatten() for grad in grads]) for grads in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm())


@cases("kind", KINDS)
def test_on_cuda_a_compiled_step_equals_float64(kind):
    torch._dynamo.reset()
    model = shaken(tiny(**KINDS[kind]))
    idx, targets = some_ids(4), some_ids(4, seed=2)
    loss, grads = loss_and_gradients(copy.deepcopy(model).double(), idx, targets)
    for dtype, close in (("float32", 2e-3), ("bfloat16", 0.2)):
        ours = copy.deepcopy(model).to(DEVICE)
        ours.compile_blocks()
        got = loss_and_gradients(ours, idx.to(DEVICE), targets.to(DEVICE), dtype)
        assert got[0] == pytest.approx(loss, rel=close / 10), dtype
        assert distance(got[1], grads) < close, dtype


@cases("mode", ["prenorm", "nag", "bhyt", "ihc", "attnres"])
def test_on_cuda_compiled_decoding_equals_the_full_forward(mode):
    model = shaken(tiny(residual=mode, n_kv_head=1)).to(DEVICE).eval()
    prompt = some_ids(3, 8).to(DEVICE)
    text = generate.generate(model, prompt, 20, temperature=0, compile=True)
    with torch.no_grad():
        best = model(text[:, :-1])[0].argmax(-1)
    assert torch.equal(text[:, 8:], best[:, 7:])


def test_on_cuda_experts_repeat_and_masks_have_a_fast_kernel():
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
    assert loss == again[0] and torch.equal(load, again[1]) and distance(grads, again[2]) < 1e-3

    q = torch.randn(2, 4, 16, 64, device=DEVICE, dtype=torch.bfloat16)
    k = torch.randn(2, 4, 32, 64, device=DEVICE, dtype=torch.bfloat16)
    mask = torch.rand(2, 1, 16, 32, device=DEVICE) < 0.7
    slow_path = 0
    assert torch._fused_sdp_choice(q, k, k, mask, 0.0, False) != slow_path


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
