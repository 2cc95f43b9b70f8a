"""
The recipe: Muon against its equations, the exact polar factor and torch's own implementation; the
activations; how decoding saves time.
"""

import math
import os
import re
import shutil
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import data as data_file
import generate
import machine
import mod
import model as model_file
import muon
from attention import cpu_attention
from model import GPT
from test_all import (
    EXTRAS,
    MOD,
    assert_close,
    cases,
    forked,
    free_port,
    log_of,
    on_forward,
    refuses,
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
    """In training, k changes. A context above 128 has several chunks of attention, but not if
    queries are chosen.
    """
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
            of = model.blocks[0]
            some = (of.attn.wo.weight, of.mlp.down.weight, of.attn_residual.w)
            found.append((loss, *torch.autograd.grad(loss, some)))
        close = dict(rtol=0.03, atol=0.03 * found[0][1].abs().max().item())
        assert_close(found[0][:2], found[1][:2], **close)
        for ours, eager_one in zip(found[1][2:], found[0][2:]):
            assert (ours - eager_one).norm() < 0.1 * eager_one.norm()  # 0.08: another choice


# --- Settings of train.py ------------------------------------------------------------------------


def test_a_run_ends_if_a_shard_has_changed(data, tmp_path, monkeypatch):
    folder, verify = shutil.copytree(data, tmp_path / "data"), data_file.Windows.verify
    with open(folder / "train_00001.bin", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(bytes([7, 0]))
    monkeypatch.setattr(data_file.Windows, "verify", lambda windows: verify(windows).join())
    refuses("train_00001.bin has changed", train, folder, tmp_path / "out")


@cases("given, able, expected", [(None, True, True), (None, False, False), (False, True, False)])
def test_a_run_compiles_if_the_machine_can(data, tmp_path, monkeypatch, given, able, expected):
    called, move = [], machine.over_ranks
    monkeypatch.setattr(machine, "over_ranks", lambda *how: called.append("moves") or move(*how))
    monkeypatch.setattr(machine, "can_compile", lambda kind: able)
    monkeypatch.setattr(machine, "has_compiler", lambda: True)
    monkeypatch.setattr(GPT, "compile_blocks", lambda model: called.append("compiles"))
    train(data, tmp_path, compile=given, max_iters=1, eval_interval=0)
    assert log_of(tmp_path).headers[0]["resolved"]["compile"] == expected
    assert called == ["moves", *["compiles"] * expected]  # with the options of that device


def test_the_seed_decides_windows_and_with_step_and_rank_the_dropout(data, tmp_path, monkeypatch):
    drawn, real = [], data_file.Loader.indices
    for seed, rank in ((1, 0), (2, 0), (1, 1)):
        asked = {}
        spied = lambda self, step, micro, asked=asked: asked.setdefault(
            step, real(self, step, micro)
        )
        with monkeypatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setattr(data_file.Loader, "indices", spied)
            on_forward(patch, lambda number, loss: drawn.append(torch.rand(()).item()) or loss)
            train(data, tmp_path / f"{seed}{rank}", seed=seed, max_iters=3, eval_interval=0)
        own = data_file.Loader(data_file.Windows(data, "train", 32), 4, 1, seed, rank)
        assert all(asked[step] == own.indices(step, 0) for step in range(3))
    assert len({*drawn}) == 9


def test_log_lines_have_the_speed_since_the_last_one(data, tmp_path, monkeypatch, capsys):
    clock = [0.0]  # steps 1 to 3 take 10 s, later ones 20 s
    spend = lambda number, loss: clock.append(10.0 if number < 4 else 20.0) or loss
    on_forward(monkeypatch, spend)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(clock))
    train(data, tmp_path, max_iters=8, log_interval=3, eval_interval=0)
    assert log_of(tmp_path).steps == [3, 6, 8]
    assert [r["tok_s"] for r in log_of(tmp_path).records] == pytest.approx([12.8, 6.4, 6.4])
    assert re.findall(r"ETA (\S+)", capsys.readouterr().out) == ["0:50", "0:40", "0:00"]


def test_without_clipping_the_losses_are_those_of_a_bound_out_of_reach(data, tmp_path):
    for clip in (0, 1e9):
        train(data, tmp_path / str(clip), grad_clip=clip, eval_interval=0)
    assert log_of(tmp_path / "0").losses == log_of(tmp_path / str(1e9)).losses


def test_dyt_has_its_three_initial_alphas():
    model = tiny(residual="dyt", dyt_alpha=(0.9, 0.4, 0.2))
    parts = model.blocks[1].attn_residual, model.blocks[1].mlp_residual, model.ends
    assert [part.norm.alpha.item() for part in parts] == pytest.approx([0.9, 0.4, 0.2])


def test_swiglu_has_two_thirds_of_the_units():
    assert tiny(activation="swiglu", n_embd=48).blocks[0].mlp.up.out_features == 128


@cases("dtype", [torch.float32, torch.bfloat16])
def test_muon_moves_less_and_less_as_a_gradient_fades(dtype):
    """The gradients of an expert without tokens are 0, and its momentum decays for ever."""
    for scale in 10.0 ** -np.arange(9, 20):
        for shape in ((1, 64, 96), (1, 16, 128)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * scale
            assert muon.polar(x.to(dtype)).norm() < 10, scale
    assert muon.polar(x.to(dtype)).norm() < 1e-3
