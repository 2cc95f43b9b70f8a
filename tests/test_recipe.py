"""
The recipe: Muon against its equations, the exact polar factor and torch's own implementation; the
activations; how decoding saves time.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import generate
import mod
import model as model_file
import muon
from attention import cpu_attention
from test_all import (
    EXTRAS,
    MOD,
    assert_close,
    cases,
    forked,
    free_port,
    routed,
    some_ids,
    tiny,
    train,
)

EXACT = ((15 / 8, -10 / 8, 3 / 8),) * 20  # converges to 1 from any singular value below 1.5
SHAPES = [(16, 16), (8, 40), (40, 8), (12, 20)]


def matrix(shape, singular_values):
    """U S V^T with random U and V, and the two"""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.linalg.qr(torch.randn(n, n, generator=generator).double())[0]
    n, u, v = min(shape), draw(shape[0]), draw(shape[1])
    return u[:, :n] @ torch.diag(singular_values) @ v[:, :n].T, u[:, :n], v[:, :n]


@cases("shape", SHAPES)
def test_polar_changes_the_singular_values_alone(shape, monkeypatch):
    s = torch.logspace(-1.7, 0, min(shape), dtype=torch.float64)
    x, u, v = matrix(shape, 7 * s)
    found = u.T @ muon.polar(x[None])[0] @ v
    assert 0.73 < found.diagonal().min() and found.diagonal().max() < 1.27
    assert_close(found, torch.diag(found.diagonal()), rtol=0, atol=1e-9)
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    low, high = muon.polar(noise.bfloat16()), muon.polar(noise)
    assert low.dtype == torch.bfloat16 and (low - high).norm() < 0.25 * high.norm()
    assert muon.polar(0 * x[None]).abs().max() == 0
    monkeypatch.setattr(muon, "POLAR_EXPRESS", EXACT)
    assert_close(muon.polar(x[None])[0], u @ v.T, rtol=0, atol=1e-6)


def test_each_polynomial_is_the_best_for_the_interval_that_the_one_before_leaves():
    x = np.linspace(0.01, 1, 10001)
    for a, b, c in muon.POLAR_EXPRESS:
        y = a * x + b * x**3 + c * x**5
        assert y.min() + y.max() == pytest.approx(2, abs=1e-3)  # the error is as large both ways
        x = np.linspace(y.min(), y.max(), 10001)
    assert y.min() > 0.73


def trained(kind, shape, steps=4, **how):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    optimizer = kind([p], lr=0.1, **how)
    for step in range(steps):
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return p.detach()


@cases("shape", SHAPES)
def test_a_step_is_that_of_torch_with_both_polar_factors_exact(shape, monkeypatch):
    monkeypatch.setattr(muon, "POLAR_EXPRESS", EXACT)
    theirs = dict(ns_coefficients=EXACT[0], ns_steps=20, adjust_lr_fn="match_rms_adamw")
    ours = trained(muon.Muon, shape)
    theirs = trained(torch.optim.Muon, shape, **theirs)  # in bfloat16
    assert (ours - theirs).norm() < 0.03 * (ours - trained(muon.Muon, shape, steps=0)).norm()


def sharded_steps(rank, port, path):
    """Two steps of Muon on two ranks: saves the weights, and the size of each stack of a rank."""
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", address, rank=rank, world_size=2)
    torch.manual_seed(0)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    shapes = [(8, 40)] * 3 + [(8, 8)]
    params = [distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for shape in shapes]
    counts, polar = [], muon.polar
    muon.polar = lambda x: counts.append(len(x)) or polar(x)
    optimizer = muon.Muon([torch.nn.Parameter(p) for p in params], lr=0.1)
    for _ in range(2):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = distribute_tensor(torch.randn(p.shape), mesh, [Shard(0)])
        optimizer.step()
    full = [p.full_tensor() for p in optimizer.param_groups[0]["params"]]
    torch.save({"counts": counts, "params": full}, f"{path}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_each_rank_of_fsdp_orthogonalises_a_part_of_the_matrices(tmp_path):
    forked(sharded_steps, (free_port(), str(tmp_path)), 2)
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert [each["counts"] for each in found] == [[2, 1] * 2, [1] * 2]
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(8, 40)] * 3 + [(8, 8)]]
    optimizer = muon.Muon(params, lr=0.1)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    for each in found:
        assert_close(each["params"], [p.detach() for p in params], rtol=1e-5, atol=1e-5)


def test_the_momentum_of_training_rises(data, tmp_path, monkeypatch):
    momenta = [muon.momentum_at(step) for step in (0, 150, 300, 900)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95])
    seen, real = [], muon.Muon.nesterov
    spied = lambda self, p, mu: seen.append(mu) or real(self, p, mu)
    monkeypatch.setattr(muon.Muon, "nesterov", spied)
    monkeypatch.setattr(muon, "WARMUP", 4)
    train(data, tmp_path, optimizer="muon", max_iters=6)
    of_steps = seen[:: len(seen) // 6]  # all matrices of a step have the same
    assert of_steps == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95, 0.95])


def test_stacks_are_updated_matrix_by_matrix():
    experts = trained(muon.Muon, (3, 8, 20), momentum=0.5, weight_decay=0.2)
    torch.manual_seed(0)
    start = torch.randn(3, 8, 20)
    for e in range(3):
        p = torch.nn.Parameter(start[e].clone())
        other = torch.nn.Parameter(torch.zeros(8, 20))  # shares the stack
        optimizer = muon.Muon([p, other], lr=0.1, momentum=0.5, weight_decay=0.2)
        for step in range(4):
            gradient = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(step))
            p.grad, other.grad = gradient[e], gradient[e - 1]
            optimizer.step()
        assert_close(p.detach(), experts[e], rtol=1e-2, atol=1e-3)


def test_relu_has_the_values_and_gradients_of_torchs():
    z = torch.linspace(-2, 2, 32).double().requires_grad_()  # without 0, where there is a kink
    assert torch.autograd.gradcheck(model_file.Relu.apply, z)
    edge = torch.tensor([0.0, math.inf, -math.inf]).requires_grad_()
    (ours, grad), (theirs, expected) = (
        (y, torch.autograd.grad(y.sum(), edge)[0])
        for y in (model_file.Relu.apply(edge), F.relu(edge))
    )
    assert torch.equal(ours, theirs) and torch.equal(grad, expected)
    assert model_file.Relu.apply(torch.tensor(math.nan)).isnan()


def test_eager_decoding_runs_no_mlp_for_a_token_that_skips_it():
    model, idx, calls = routed(**MOD), some_ids(1, T=4), []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, args, y: calls.append(module))
    for tau, expected in ((2.0, 0), (0.0, 2)):
        for router in mod.routers(model):
            router.tau.fill_(tau)
        cache = generate.KVCache(model, 1, 4)
        parts = [model(one, cache=cache)[0] for one in idx.split(1, dim=1)]
        assert len(calls) == expected * 4
        assert_close(torch.cat(parts, 1), model(idx)[0], rtol=1e-4, atol=1e-5)
        calls.clear()


def test_decoding_leaves_the_number_of_threads_alone(monkeypatch):
    model, seen, length = tiny(), [], 4
    model.register_forward_hook(lambda *args: seen.append(torch.get_num_threads()))
    each = model.num_params(active=True) * 2  # products for a token of two texts
    for small, counts in ((each + 1, [2, 1]), (length * each + 1, [1, 1]), (0, [2, 2])):
        monkeypatch.setattr(generate, "SMALL", small)
        with generate.threads(2):
            for _ in generate.stream_tokens(model, some_ids(T=length), 2):
                assert torch.get_num_threads() == 2
        assert seen == counts  # for the prompt, and for a token
        seen.clear()


@cases("queries, keys", [(300, 300), (256, 256), (19, 32), (3, 300), (190, 300)])
def test_attention_for_the_compiler_equals_sdpa(queries, keys):
    torch.manual_seed(0)
    shapes = [(2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)]
    q, k, v = inputs = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    some = torch.randperm(keys)[:queries].sort().values  # some tokens, in order
    rows = torch.stack([some, torch.arange(keys)[-queries:]])  # and the last ones
    mask = (torch.arange(keys) <= rows[..., None])[:, None] if queries < keys else None
    ours = cpu_attention(q, k, v, mask, 128, 8**-0.5)
    theirs = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    grads = [torch.autograd.grad((y * y.detach()).sum(), inputs) for y in (ours, theirs)]
    assert_close((ours, grads[0]), (theirs, grads[1]))
    end = cpu_attention(q[:, :, -3:], k, v, None, 128, 8**-0.5)  # the last tokens, without a mask
    mask = torch.arange(keys) <= torch.arange(keys)[-3:, None]
    assert_close(end, F.scaled_dot_product_attention(q[:, :, -3:], k, v, mask, enable_gqa=True))


def test_each_block_may_have_graphs_of_its_own():
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=8):
        tiny(n_layer=6).compile_blocks()
        assert torch._dynamo.config.recompile_limit == 8 * 6


@pytest.mark.slow
def test_a_compiled_mixture_of_depths_follows_k():
    """In training, k changes. Contexts above 128 have several chunks of attention."""
    shape = dict(block_size=256, n_layer=1, n_embd=64, residual="nag", mod_on="both", mod_rate=0.4)
    eager, compiled = (tiny(**shape, **EXTRAS).train() for _ in range(2))
    compiled.compile_blocks()
    idx = some_ids(T=256)
    for k in (256, 154, 161, 147, 190):  # one graph for 256, one for all others
        found = []
        for model in (eager, compiled):
            for router in mod.routers(model):
                router.k = k
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(idx, idx)[1]
            (grad,) = torch.autograd.grad(loss, model.blocks[0].attn.wo.weight)
            found.append((loss, grad))
        assert_close(*found, rtol=0.03, atol=0.03 * found[0][1].abs().max().item())
