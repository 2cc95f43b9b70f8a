"""NAG, BHyT, experts and mixtures of depths beyond their equations. See test_all.py."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bhyt
import depth
import generate
import mod
import moe
import nag
import prune
from attnres import AttnRes
from model import RESIDUALS
from test_all import (
    MOD,
    assert_close,
    cases,
    centred,
    every_mode,
    logits_and_gradients,
    mean_square,
    rms,
    routed,
    shaken,
    slow,
    some_ids,
    tiny,
    with_routers,
    without_parallel,
)

# --- NAG ------------------------------------------------------------------------------------------


def some_lanes(*shape, dtype=torch.float64, seed=0):
    """A direction, its log norm, a sublayer's output and the tangent of an angle, for rotate"""
    g = torch.Generator().manual_seed(seed)
    r, f = (torch.randn(*shape, generator=g, dtype=torch.float64) for _ in "rf")
    s, a = (torch.rand(*shape[:-1], 1, generator=g, dtype=torch.float64) for _ in "sa")
    return [x.to(dtype).requires_grad_() for x in (r / rms(r), s, f + 0.3, a)]


def test_nag_keeps_its_norm_in_bfloat16_over_256_sublayers():
    r, s = some_lanes(2, 8, 64)[0].bfloat16(), torch.zeros(2, 8, 1)
    for layer in range(256):
        f = some_lanes(2, 8, 64, seed=layer)[2].bfloat16()
        r, s = nag.rotate(r, s, f, torch.tensor(0.7))
        assert (r.dtype, s.dtype) == (torch.bfloat16, torch.float32)
        assert (rms(r.float()) - 1).abs().max() < 0.01
    assert_close(s, torch.full_like(s, 128 * math.log(1 + 0.7**2)), rtol=1e-5, atol=0)


@cases("centre", [True, False])
@cases("orthogonal", [True, False])
def test_the_gradient_of_a_rotation_is_that_of_finite_differences(centre, orthogonal):
    r, _, f, a = some_lanes(3, 5, 16)
    turned = lambda r, f, a: nag.Rotation.apply(1.7 * r, f, a, 1e-12, centre, orthogonal)
    assert torch.autograd.gradcheck(turned, (r, f, a))


@cases("dtype", [torch.float32, torch.bfloat16])
def test_nag_survives_inputs_that_would_divide_by_zero(dtype):
    r, _, f, a = (x.detach() for x in some_lanes(4096, 1, 64, dtype=dtype))
    s, zero = torch.zeros(4096, 1, 1), torch.zeros_like(f)
    parallel = [k * r for k in (1, 2, -3, 10, -10, 100)] + [k * r + 1e-3 * f for k in (1, -10, 100)]
    for update in (zero, torch.ones_like(f), 300 + 0.1 * f, 1e-6 * f, *parallel):
        leaves = [x.clone().requires_grad_() for x in (r, update, a)]
        new, norm = nag.rotate(leaves[0], s, *leaves[1:])
        grads = torch.autograd.grad(new.float().sum() + norm.sum(), leaves)
        assert all(x.isfinite().all() for x in (new, norm, *grads))
        assert (rms(new.float()) - 1).abs().max() < 0.01
    assert nag.rotate(zero, s, f, a)[0].isfinite().all()
    assert not nag.rotate(zero, s, zero, a)[0].any()
    w, p, b = torch.zeros(4, 64, dtype=dtype), torch.zeros(4), torch.full((4,), -1e4, dtype=dtype)
    m = nag.modulator(F.linear(r, w), b.requires_grad_(), p, torch.tensor(0.3))  # every gate closed
    assert m.max().item() == pytest.approx(1e-6**0.3, rel=1e-5)
    assert torch.autograd.grad(m.sum(), b)[0].isfinite().all()
    for changes in (dict(init_out="zero"), {}):
        model, idx = tiny(n_layer=8, **changes).to(dtype), some_ids()
        model.embed.weight.data[3] = model.embed.weight.data[4]  # two equal tokens
        _, _, grads = logits_and_gradients(model, idx, idx.roll(-1, 1))
        assert torch.nn.utils.get_total_norm(grads).isfinite()
    model.embed.weight.data[:3] = 0.5  # centring makes constant rows 0
    assert model(idx)[0].isfinite().all()


@cases("degrees", [90, 30, 3, 1, 179, 0.3, 0.01])
def test_nag_in_float32_has_the_documented_precision_near_a_parallel_update(degrees):
    cosine = math.cos(math.radians(degrees))
    r, s, f, a = (x.detach() for x in some_lanes(64, 1, 256))
    r, across = centred(r) / rms(centred(r)), without_parallel(centred(f), centred(r))
    update = cosine * r + math.sqrt(1 - cosine**2) * across / rms(across)
    low = [x.float() for x in (r, s, update, a)]
    (exact, s), (ours, t) = nag.plain_rotate(*(x.double() for x in low)), nag.rotate(*low)
    assert (rms(ours) - 1).abs().max() < 2e-3 and (s - t).abs().max() < 1e-6
    if degrees > 0.6:
        assert rms(ours - exact).max() < min(1e-3, 3e-7 / (1 - cosine**2))
    else:  # it rotates in the right direction, but less
        assert (rms(ours.double() - low[0]) < rms(exact - low[0])).all()


@cases("changes", [
    dict(n_layer=1, n_embd=128), dict(n_layer=8), dict(n_layer=64, init_scale=0.1),
    dict(nag_directions=0), dict(nag_lane=False), dict(tied=False), dict(branch_scale="depth"),
    dict(nag_first_logits=0.6),
    dict(smear=4, n_embd=256, embed_scale=0.8, tied=False),
])  # fmt: skip
def test_nag_starts_its_logits_at_the_same_size_at_any_depth(changes):
    model, idx = tiny(**(dict(n_layer=32, n_embd=64) | changes)), some_ids()
    wanted, (*_, stream) = model.config.nag_first_logits, [*depth.walk(model, idx)][-1]
    heat = model.ends.g_dec + (stream.lane if model.config.nag_lane else 0)
    close = 0.07 if model.config.smear else 0.03  # the first tokens have fewer tokens to smear
    assert heat.exp().mean().item() == pytest.approx(wanted, rel=close)
    own = F.one_hot(idx, 64).bool()  # with tied matrices a token's own logit stands out
    assert model(idx)[0][~own].std().item() == pytest.approx(wanted, rel=1 / 3)
    assert tiny(nag_first_logits=None).ends.g_dec.item() == pytest.approx(-math.log(32) / 2)


def test_gate_health_counts_closed_gates():
    model, idx, dropping = shaken(tiny()).eval(), some_ids(), shaken(tiny(dropout=0.5)).train()
    assert depth.gate_health(dropping, idx) == depth.gate_health(dropping, idx)
    assert dropping.training
    model.blocks[0].mlp_residual.alpha.data.zero_()
    model.blocks[1].attn_residual.constants.data[: model.config.nag_directions] = -100
    health = depth.gate_health(model, idx)
    assert health["dead"] == 2 and health["floor"] == 0.5 and len(health["a"]) == 4
    first, second, *_ = (depth.degrees(old.x, new.x) for *_, old, new in depth.walk(model, idx))
    assert first.item() == pytest.approx(math.degrees(math.atan(health["a"][0])), rel=0.02)
    assert second < 1e-3


# --- BHyT -----------------------------------------------------------------------------------------


def test_the_cheap_tanh_is_tanh(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # else it is torch.tanh
    z = [torch.linspace(-12, 12, 200001), torch.logspace(-30, 10, 1000), torch.tensor([0.0, -1e30])]
    z = torch.cat(z).requires_grad_()
    t, exact = bhyt.Tanh.apply(z), torch.tanh(z.detach().double())
    t.sum().backward()
    assert (t - exact).abs().max() < 4e-7 and (z.grad - (1 - exact**2)).abs().max() < 8e-7
    assert_close(t, exact.float(), rtol=1e-6, atol=0)
    assert t.abs().max() <= 1 and bhyt.Tanh.apply(torch.tensor([math.nan])).isnan()
    wide = torch.randn(9, dtype=torch.float64).requires_grad_()
    assert torch.equal(bhyt.Tanh.apply(wide), torch.tanh(wide))
    assert torch.autograd.gradcheck(bhyt.Tanh.apply, wide)


def test_bhyt_has_its_initial_values_a_learned_or_frozen_lambda_and_a_saved_c():
    for learned in (True, False):
        model = tiny(residual="bhyt", bhyt_learned=learned, bhyt_lambda=(2.0, 1.0, 0.5))
        block, idx = model.blocks[0], some_ids()
        residuals = block.attn_residual, block.mlp_residual, model.ends
        assert [residual.norm.lam.item() for residual in residuals] == [2.0, 1.0, 0.5]
        model(idx, idx.roll(-1, 1))[1].backward()
        gradients = [p.grad for name, p in model.named_parameters() if "lam" in name]
        assert len(gradients) == 5 * learned and all(gradients)
    assert {"blocks.0.attn_residual.c", "blocks.1.attn_residual.c"} <= set(model.state_dict())
    for unit, size in ((True, 1.0), (False, 0.2)):  # of attention's initial inputs
        norm = tiny(residual="bhyt", bhyt_unit=unit).blocks[0].attn_residual.norm
        assert norm(torch.randn(64, 32)).std().item() == pytest.approx(size, rel=0.05)


@torch.no_grad()
def test_depth_tells_how_well_bhyt_predicts_the_variance():
    model, idx = shaken(tiny(residual="bhyt")).eval(), some_ids()
    seen, *_ = depth.look(model, idx, idx)
    middles = [after for _, residual, *_, after in depth.walk(model, idx) if residual.first]
    for i, stream in enumerate(middles):
        measured, predicted = mean_square(stream.x).flatten(), stream.lane.flatten()
        errors, spread = (predicted - measured).square().sum(), measured - measured.mean()
        own = measured.mean(), predicted.mean(), 1 - errors / spread.square().sum()
        found = tuple(seen[name][i] for name in ("before MLP", "predicted", "R2"))
        assert_close(found, own, rtol=1e-4, atol=1e-4)
    assert len(seen["R2"]) == model.config.n_layer
    assert "R2" not in depth.look(tiny(residual="bhyt_exact").eval(), idx, idx)[0]
    prune.skip(model, [0], "sublayer")  # attention; its MLP then measures for itself
    pruned = depth.look(model, idx, idx)[0]["R2"]
    assert len(pruned) == model.config.n_layer and pruned[0] > 1 - 1e-5 > pruned[1]


@torch.no_grad()
@cases("tied", [True, False])
def test_folding_for_generation_keeps_the_text(tied):
    model, idx = routed(residual="nag", tied=tied), some_ids()
    look = lambda: (model(idx)[0], generate.generate(model, idx[:, :4], 20, temperature=0))
    expected, embedding = look(), model.embed.weight.clone()
    model.ends.fold(model)
    assert model.ends.folded
    assert_close((*look(), model.embed.weight), (*expected, embedding), rtol=1e-5, atol=1e-5)


# --- Mixture of experts, mixture of depths --------------------------------------------------------


def test_grouped_products_and_gradients_equal_a_loop_over_groups():
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((10, 4), (4, 3, 4)))
    ends = torch.tensor([3, 3, 9, 10], dtype=torch.int32)  # the second group is empty
    parts = [x[:3] @ w[0].T, x[3:9] @ w[2].T, x[9:] @ w[3].T]
    assert_close(moe.grouped(x, w, ends), torch.cat(parts))
    assert torch.autograd.gradcheck(lambda x, w: moe.grouped(x, w, ends), (x, w))
    x, w = (torch.randn(*s).bfloat16().requires_grad_() for s in ((10, 16), (4, 8, 16)))
    kernel, loop = (form(x, w, ends) for form in (moe.grouped, moe.grouped_loop))
    grads = [torch.autograd.grad(y.square().sum(), (x, w)) for y in (kernel, loop)]
    assert_close((kernel, *grads[0]), (loop, *grads[1]), rtol=2e-2, atol=2e-2)


def test_the_balance_loss_equals_its_formula_and_recomputation_does_not_change_it(monkeypatch):
    monkeypatch.setattr(moe, "RATE", 0.5)
    a, b = (tiny(moe_experts=4, moe_balance=how) for how in ("loss", "bias"))
    idx, experts = some_ids(8), moe.layers(a)
    expected = b(idx, idx)[1]
    for layer, (_, _, h, _, _) in zip(experts, [*depth.walk(a, idx)][1::2]):
        s = layer.router(h.flatten(0, 1)).softmax(-1)
        share = F.one_hot(s.topk(2).indices, 4).float().mean((0, 1))
        expected = expected + 0.5 * 4 * (share * s.mean(0)).sum()
    for a.recompute in (False, True):
        loss = a(idx, idx)[1]
        penalties = [layer.penalty for layer in experts]
        loss.backward()
        assert_close(loss, expected)
        assert all(old is layer.penalty for old, layer in zip(penalties, experts))  # no leaks
    assert torch.equal(a.eval()(idx, idx)[1], b.eval()(idx, idx)[1])  # no penalty in evaluation
    unused = 2 * 2 * (2 * 32 * 128)  # two of four experts, in two blocks
    assert a.num_params() - a.num_params(active=True) == unused


@every_mode
def test_one_expert_per_token_gives_the_router_a_gradient_or_is_refused(residual, monkeypatch):
    one = dict(residual=residual, moe_experts=4, moe_top_k=1)

    def share(**more):
        """The router's gradient, measured by that of its expert's matrix."""
        mlp = (model := shaken(tiny(**one, **more)).double()).blocks[0].mlp
        model(some_ids(), some_ids(seed=2))[1].backward()
        return float(mlp.router.weight.grad.norm() / mlp.up.grad.norm())

    rescales = RESIDUALS[residual].rescales
    if rescales:
        with pytest.raises(ValueError, match="set moe_top_k=2 or moe_shared"):
            tiny(**one)
        assert share(moe_shared=16) > 1e-2
        monkeypatch.setattr(RESIDUALS[residual], "rescales", False)
    found = share()
    assert found < 1e-4 if rescales else found > 1e-2


def test_the_bias_balances_experts(monkeypatch):
    monkeypatch.setattr(moe, "RATE", 0.02)
    how = dict(moe_experts=4, residual="prenorm")
    models = [tiny(**how).to(dtype) for dtype in (None, torch.bfloat16)]
    for model in models:
        model.blocks[0].mlp.router.weight.data[0] *= 8  # the favourite of some tokens
        model(some_ids(20))  # 640 tokens: more than bfloat16 can count
    load, low = (moe.balance(moe.layers(model)) for model in models)
    assert_close(load, low, atol=0.02, rtol=0)
    (model, _), idx, experts, worst = models, some_ids(8), moe.layers(models[0]), []
    for _ in range(100):
        model(idx)
        load = moe.balance(experts)
        assert_close(load.sum(1), torch.ones(2))
        worst.append(load[0].max().item())
    assert worst[-1] < 0.3 < worst[0]
    kept = experts[0].bias.clone()
    model.eval()(idx)
    assert not moe.balance(experts).any() and torch.equal(kept, experts[0].bias)


@with_routers
def test_gathering_running_tokens_equals_masking_and_so_do_gradients(changes, monkeypatch):
    model, idx = routed(**changes).double().train(), some_ids(3)
    gathered = logits_and_gradients(model, idx, idx.roll(-1, 1))
    for (name, _), grad in zip(model.named_parameters(), gathered[2]):
        assert "router.w" not in name or grad.abs().max() > 1e-5  # scores are part of the output
    # now all tokens are computed, and the router's write masks those that were not chosen
    monkeypatch.setattr(mod.Router, "run_rows", lambda router, run, h, rows: run(h, None))
    masked = logits_and_gradients(model, idx, idx.roll(-1, 1))
    assert_close(gathered, masked, rtol=1e-9, atol=1e-12)
    if changes.get("mod_router") != "random":  # training looks ahead, and evaluation does not
        other = torch.cat([idx[:, :16], (idx[:, 16:] + 1) % 64], 1)
        assert not torch.equal(model(other)[0][:, :16], masked[0][:, :16])


@torch.no_grad()
@with_routers
def test_a_token_runs_or_skips_as_documented(changes):
    model, idx, computed, shares = routed(**changes).double(), some_ids(), [], []
    for block in model.blocks:
        count = lambda mlp, args, y: computed.append(args[0][..., 0].numel())
        block.mlp.register_forward_hook(count)
        for residual in (block.attn_residual, block.mlp_residual):
            residual.ramp = torch.tensor(0.3)  # only NAG reads it
    for i, (sublayer, residual, h, before, after) in enumerate(depth.walk(model, idx)):
        block, skips = model.blocks[i // 2], before.x
        if getattr(residual, "begins", False):  # of Attention Residuals: a new sum, not yet begun
            skips = torch.zeros_like(skips)
        router, s = (block.attn_router, block.mlp_router)[i % 2], block.scale
        if router.kind == "nag":
            turn = residual.turn(before.x)
            q = torch.atan((s * turn).abs()) / torch.atan((s * 0.3 * residual.alpha).abs())
        elif router.kind == "learned":
            q = torch.sigmoid(h @ router.w + router.b)[..., None]
        else:
            q = router.table[:, None].expand(2, 32, 1)
        if router.v is not None:  # fallback: skipping tokens rotate as much, towards v
            u = without_parallel(centred(router.v), skips)
            skips = skips + turn * u / rms(u)
            skips = skips / rms(skips)
        f = sublayer(h, (model.cos, model.sin)) if i % 2 == 0 else sublayer(h)
        ran = residual.write(before, f, s * q if router.kind == "learned" else s)
        assert_close(after.x, torch.where(q >= router.tau, ran.x, skips), rtol=1e-6, atol=1e-6)
        if after.lane is not None and router.v is None and not isinstance(residual, AttnRes):
            old = before.ahead[0] if before.ahead else before.lane  # smhc keeps it there
            assert_close(after.lane, torch.where(q >= router.tau, ran.lane, old))
        shares.append((q < router.tau).double().mean().item())
    assert 0 < np.mean(shares) < 1
    assert depth.skipping(model, [(idx, idx)], [1])["skipped"] == pytest.approx(shares)
    computed.clear()
    with mod.switched(model, "collect"):
        model(idx)
    assert computed == [round((1 - share) * 64) for share in shares[1::2]]


def test_routers_are_where_the_settings_say():
    for kind, names in (
        ("attention", ["attn_router"]), ("mlp", ["mlp_router"]),
        ("both", ["attn_router", "mlp_router"]),
    ):  # fmt: skip
        model = tiny(n_layer=4, mod_on=kind, mod_rate=0.5)
        routers = [getattr(block, name) for block in model.blocks for name in names]
        assert mod.routers(model) == routers and None not in routers


@cases("shared", [True, False])
def test_tau_and_k_follow_from_the_scores(shared):
    routers = mod.routers(tiny(n_layer=3, mod_on="both", mod_rate=0.3))
    q = torch.rand(6, 100000) ** torch.arange(1, 7)[:, None]
    for router, row in zip(routers, q):
        router.count(row[None])
    mod.balance(routers, shared, 0.3)
    for router, row in zip(routers, q):
        exact = np.quantile(q if shared else row, 0.3)
        assert router.tau.item() == pytest.approx(exact, abs=2e-3)
        assert router.k == pytest.approx(32 * (row >= exact).float().mean().item(), abs=0.6)
    assert sum(router.k for router in routers) == pytest.approx(0.7 * 32 * 6, abs=3)  # rounded


def test_a_checkpoint_sums_the_scores_of_all_ranks_and_leaves_those_of_each_alone(monkeypatch):
    model = tiny(**MOD)
    model(some_ids())
    monkeypatch.setattr(mod.dist, "all_reduce", lambda scores: scores.mul_(2))  # two equal ranks
    before = {name: x.clone() for name, x in model.named_buffers() if name.endswith(".fresh")}
    saved = mod.scores_of_all_ranks(model, world=2)
    assert_close(saved, {name: 2 * x for name, x in before.items()})
    assert all(torch.equal(model.get_buffer(name), x) for name, x in before.items())
    assert all(x.sum() == 2 * 32 for x in before.values())


@cases("compile", [False, True])
def test_a_forward_that_is_recomputed_counts_all_scores_twice(compile, quick_compiler):
    counts = {}
    for recompute in (False, True):
        model = tiny(**MOD)
        model.recompute = recompute
        if compile:
            model.compile_blocks()
        for seed in (1, 2):  # two micro-steps
            model(*[some_ids(seed=seed)] * 2)[1].backward()
        counts[recompute] = torch.stack([router.fresh for router in mod.routers(model)])
    assert torch.equal(counts[True], 2 * counts[False])  # so shares and thresholds stay
    assert counts[False].sum(1).tolist() == [2 * 2 * 32] * len(counts[False])


@cases("rate", [0.1, 0.35, 0.6])
def test_a_model_can_be_calibrated_to_another_rate(rate):
    model, x = routed(mod_on="both", mod_rate=0.2), some_ids(64, seed=9)
    mod.calibrate(model, [some_ids(64, seed=seed) for seed in range(4)], True, rate)
    assert depth.skipping(model, [(x, x)], [1])["rate"] == pytest.approx(rate, abs=0.02)


@cases("backend", ["aot_eager", slow("inductor")])
def test_experts_are_chosen_in_float32_and_may_be_left_without_tokens(backend, monkeypatch):
    experts, h = moe.layers(shaken(tiny(moe_experts=4)))[0], torch.randn(64, 32)
    seen, results, real = [], [], torch.Tensor.topk
    experts.bias[2] = -10.0
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", lambda s, k: seen.append(s.detach()) or real(s, k))
        experts(h)
        with torch.autocast("cpu", torch.bfloat16):
            experts(h)
    assert seen[0].dtype == seen[1].dtype == torch.float32 and torch.equal(*seen)
    experts.load.zero_()
    for run in (experts, torch.compile(experts, backend=backend)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(h).float().square().sum()
        results.append([loss, *torch.autograd.grad(loss, [*experts.parameters()])])
    assert experts.load[2] == 0 and experts.load.sum() == 2 * 2 * 64
    for eager, compiled in zip(*results):
        assert (eager - compiled).norm() < 0.05 * eager.norm()
