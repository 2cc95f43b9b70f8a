"""The tests of the rivals: goldens of independent implementations, and limits. See test_all.py."""

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import attnres
import depth
import lora
import mod
import ngpt
import norms
import streams as streams_file
from checkpoint import load_model
from model import RESIDUALS, GPTConfig
from test_all import (
    EXTRAS,
    MOD,
    TINY,
    assert_close,
    cases,
    checkpoint,
    evaluated,
    few,
    golden,
    log_of,
    logits_and_gradients,
    ranks,
    resume,
    routed,
    shaken,
    slow,
    some_ids,
    tiny,
    train,
    unit,
)

# --- nGPT -----------------------------------------------------------------------------------------


def parameters_of_the_golden(z, kind):
    """The tensors "kind.*" of the release of nGPT, under our names"""
    stored = 1 / (z["base_scale"] * z["normalised.transformer.wte.weight"].size(1) ** 0.5)
    stored = 1 / stored if kind == "grad" else stored  # 1, where base_scale is 1 / sqrt(n_embd)
    names = {
        "transformer.wte.weight": ["embed.weight"], "lm_head.weight": ["head.weight"],
        "sz": ["ends.s_z"], "attn_alpha": ["attn_residual.alpha"],
        "mlp_alpha": ["mlp_residual.alpha"], "sqk": ["attn.q_scale.s"],
        "suv": ["mlp.act.s_u", "mlp.act.s_v"],
        "c_fc.weight": ["mlp.up.weight", "mlp.gate.weight"],
        "mlp_c_proj.weight": ["mlp.down.weight"],
        "query.weight": ["attn.wq.weight"], "key.weight": ["attn.wk.weight"],
        "value.weight": ["attn.wv.weight"], "att_c_proj.weight": ["attn.wo.weight"],
    }  # fmt: skip
    found = {}
    for key, x in z.items():
        if key.startswith(kind + "."):
            block, name = re.fullmatch(rf"{kind}\.(?:transformer\.h\.(\d+)\.)?(.*)", key).groups()
            x = x * stored if name in ("sz", "sqk", "attn_alpha", "mlp_alpha") else x
            at = "" if block is None else f"blocks.{block}."
            found |= {at + our: part for our, part in zip(names[name], x.chunk(len(names[name])))}
    return found


def test_ngpt_equals_the_golden_of_its_release():
    z = golden("ngpt")
    raw, normalised, grads = (parameters_of_the_golden(z, k) for k in ("raw", "normalised", "grad"))
    (V, C), hidden = normalised["embed.weight"].shape, len(normalised["blocks.0.mlp.up.weight"])
    shape = dict(n_layer=len(z["streams"]), n_head=int(z["n_head"]), n_embd=C, n_hidden=hidden)
    shape |= dict(vocab_size=V, block_size=z["idx"].size(1), tied=False, activation="swiglu")
    model = tiny(residual="ngpt", **shape).double().eval()
    model.cos.fill_(1), model.sin.zero_()  # its positions are left out
    ours = dict(model.named_parameters())
    for state in (raw, normalised):  # the first one ends up as the second
        assert state.keys() == ours.keys()
        for name, p in ours.items():
            p.data.copy_(state[name])
        model.after_step()
        assert_close({n: p.data for n, p in ours.items()}, normalised, rtol=1e-9, atol=1e-9)
    streams = [after.x for *_, after in depth.walk(model, z["idx"])][1::2]
    assert_close(torch.stack(streams), z["streams"], rtol=1e-9, atol=1e-9)
    logits, _ = model(z["idx"])
    loss = F.cross_entropy(logits.mT, z["targets"])  # the model's own is in float32
    assert_close((logits, loss), (z["logits"], z["loss"]), rtol=1e-9, atol=1e-9)
    found = dict(zip(ours, torch.autograd.grad(loss, [*ours.values()])))
    assert_close(found, grads, rtol=1e-9, atol=1e-9)


def off_the_sphere(state):
    """How far rows, or columns of what writes to the stream, are from norm 1: the worst case"""
    axes = dict.fromkeys(("embed", "head", "wq", "wk", "wv", "up", "gate"), -1)
    axes |= dict.fromkeys(("wo", "down"), -2)
    kinds = {name: name.removesuffix(".weight").rpartition(".")[2] for name in state}
    kinds = {n: "embed" if n.startswith("value_embeds.") else k for n, k in kinds.items()}
    off = {n: (state[n].norm(dim=axes[k]) - 1).abs().max() for n, k in kinds.items() if k in axes}
    assert len(off) >= 2 + 6 * 2
    return max(off.values()).item()


@cases("more", [
    {}, dict(activation="swiglu", tied=False, n_head=4, n_kv_head=2, optimizer="muon"),
    dict(activation="swiglu", moe_experts=3, moe_shared=16),
])  # fmt: skip
def test_matrices_of_ngpt_are_on_the_sphere_after_every_step(data, tmp_path, more):
    train(data, tmp_path, residual="ngpt", keep_interval=1, save_interval=0, **more)
    states = [checkpoint(path)["model"] for path in sorted(tmp_path.glob("ckpt_*.pt"))]
    assert len(states) == 7 and max(map(off_the_sphere, states)) < 1e-6
    for name in ("embed.weight", "blocks.0.attn.wo.weight", "blocks.1.attn_residual.alpha"):
        assert all(not torch.equal(a[name], b[name]) for a, b in zip(states, states[1:]))
    resume(tmp_path, max_iters=8)
    assert off_the_sphere(checkpoint(tmp_path)["model"]) < 1e-6
    assert off_the_sphere(shaken(tiny(residual="ngpt")).state_dict()) > 0.1  # it would show


@cases("more, close", [
    (dict(activation="swiglu", n_head=4, n_kv_head=2), 1e-4), (dict(moe_experts=3), 3e-3)
])  # fmt: skip
def test_ngpt_over_ranks_has_the_curve_of_one_process(data, tmp_path, more, close):
    """A rank of two has half of the rows of wo and down, and sums their columns over both."""
    how = dict(residual="ngpt", total_batch_tokens=256, **more)
    train(data, tmp_path / "one", **how)
    ranks(data, tmp_path / "ddp", **how)
    ranks(data, tmp_path / "fsdp", **how, shard="fsdp")
    one = checkpoint(tmp_path / "one")["model"]
    for name in ("ddp", "fsdp"):
        losses, state = log_of(tmp_path / name).losses, load_model(tmp_path / name)[1]
        assert losses == pytest.approx(log_of(tmp_path / "one").losses, abs=close)
        assert off_the_sphere(state.state_dict()) < 1e-6
        assert_close(state.state_dict(), one, rtol=1e-2, atol=10 * close)


@torch.no_grad()
def test_a_gate_multiplies_the_step_of_ngpt_and_all_stays_on_the_sphere(monkeypatch):
    monkeypatch.setattr(ngpt, "ALPHA", 0.3)
    residual = tiny(residual="ngpt").blocks[0].attn_residual
    assert_close(residual.alpha, torch.full((32,), 32**-0.5))
    residual.alpha *= torch.randn(32)
    h, f = unit(torch.randn(2, 3, 5, 32))
    for gate in (0.0, 0.5, torch.rand(3, 5, 1)):
        alpha = gate * 0.3 * 32**0.5 * residual.alpha.abs()
        new = residual.write(norms.Stream(h), 7 * f, gate).x  # the size of f does not count
        assert_close(new, unit((1 - alpha) * h + alpha * f))
    assert residual.write(norms.Stream(h), 0 * f).x.isfinite().all()
    model = tiny(residual="ngpt", tied=False, bf16_stream=True)
    with torch.autocast("cpu", torch.bfloat16):
        *_, (*_, last) = depth.walk(model.eval(), some_ids())
    assert (last.x.float().norm(dim=-1) - 1).abs().max() < 0.01


def test_the_sink_of_ngpt_is_that_of_its_scaled_scores():
    model, rope = shaken(tiny(residual="ngpt")), (torch.ones(32, 8), torch.zeros(32, 8))
    attention, h = model.blocks[0].attn, unit(torch.randn(2, 32, 32))
    (k, v), first = attention.key_value(h, rope), (torch.arange(32) == 0).float()[:, None]
    weights = F.scaled_dot_product_attention(
        attention.query(h, rope), k, first.expand_as(v), is_causal=True, scale=4.0
    )
    assert_close(depth.sink(attention, h, rope), weights[:, :, 1:, 0].mean())


def test_a_mode_s_own_warm_up_holds_unless_another_is_given(data, tmp_path):
    def run(name, **how):
        train(data, tmp_path / name, **dict(weight_decay=None, warmup_iters=None) | how)
        log, state = log_of(tmp_path / name), checkpoint(tmp_path / name)
        resolved, first = log.headers[0]["resolved"], log.records[1]["lr"]
        assert log.headers[0]["settings"]["weight_decay"] == how.get("weight_decay")
        return resolved["weight_decay"], resolved["warmup_iters"], first, state

    *ngpt, state = run("ngpt", residual="ngpt")
    assert ngpt == [0.0, 0, 4e-3]
    *given, _ = run("given", residual="ngpt", weight_decay=0.2, warmup_iters=3)
    assert given == [0.2, 3, 1e-3]
    *other, _ = run("lns", residual="lns")
    assert other == [0.0, 20, pytest.approx(4e-3 / 21)]
    resume(tmp_path / "ngpt", max_iters=7)
    assert log_of(tmp_path / "ngpt").headers[-1]["resolved"]["weight_decay"] == 0.0


@torch.no_grad()
def test_adapters_of_ngpt_and_what_they_adapt_are_left_alone():
    model = shaken(tiny(residual="ngpt"))
    lora.adapt(model, 2, 4.0, "wq,wo,down")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.after_step()
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.requires_grad_()
    model.after_step()
    assert off_the_sphere(model.state_dict()) < 1e-6


# --- Leaks ---------------------------------------------------------------------------------------


@cases("changes", [
    dict(residual="prenorm"), dict(residual="nag"), dict(residual="nag", **MOD),
    dict(residual="hc", **MOD, mod_router="learned"),
])  # fmt: skip
def test_eval_finds_a_leak_only_where_routing_looks_ahead(changes):
    model = routed(**changes | EXTRAS)
    assert depth.leak(model) < 1e-5
    with mod.switched(model, "look_ahead"):
        assert (depth.leak(model) > 1e-3) == ("mod_on" in changes)


# --- Small ones -----------------------------------------------------------------------------------


@cases("backend, what", [
    ("aot_eager", "products"), ("aot_eager", "route"),
    slow("inductor", "products"), slow("inductor", "route"),
])  # fmt: skip
def test_compiled_gradients_of_float32_products_are_float32(backend, what):
    """Under bfloat16 autocast. torch's default repeats autocast in the compiled backward."""
    model = tiny(residual="mhc", moe_experts=4)
    model.compile_blocks()  # sets how backwards are compiled
    x, w = torch.randn(4, 8, 32), torch.randn(6, 32)
    layer = model.blocks[0].mlp
    weight = w if what == "products" else layer.router.weight

    def run(x, weight):
        if what == "products":
            return torch.cat(streams_file.Products.apply(weight, x), -1)
        return layer.route(x.flatten(0, 1))[0]

    found = []
    for function in (run, torch.compile(run, backend=backend)):
        leaves = [x.clone().requires_grad_(), weight.requires_grad_()]
        with torch.autocast("cpu", torch.bfloat16):
            y = function(*leaves)
        found.append(torch.autograd.grad((y * y.detach()).sum(), leaves))
    for ours, theirs in zip(*found):
        assert (ours - theirs).norm() < 1e-5 * ours.norm()


def test_rezero_starts_as_the_identity():
    model, idx = tiny(residual="rezero"), some_ids()
    (*_, before, _), *_, (*_, last) = depth.walk(model, idx)
    assert torch.equal(before.x, last.x)
    model(idx, idx)[1].backward()
    assert all(block.attn_residual.a.grad != 0 for block in model.blocks)


@torch.no_grad()
@cases("share, like", [(0.0, "prenorm"), (1.0, "postnorm")])
def test_mixln_ends_at_prenorm_and_postnorm(share, like, monkeypatch):
    """From the same weights. At share 1 it is post-norm with a final norm."""
    monkeypatch.setattr(norms, "POST_SHARE", share)
    ours, other = tiny(residual="mixln"), tiny(residual=like)
    shaken(ours)
    other.load_state_dict(ours.state_dict(), strict=False)
    hidden, _ = other.hidden(some_ids())
    expected = ours.ends.norm(hidden) if like == "postnorm" else hidden
    assert_close(ours.hidden(some_ids())[0], expected)


@cases("residual", ["dyt", "derf"])
def test_bounded_functions_start_unsaturated(residual):
    """With a scalar of sqrt(C), 80% of their outputs would be within 1% of the bounds."""
    wide = dict(n_embd=256, vocab_size=1000, tied=False, embed_scale=0.8, smear=4)
    model = tiny(residual=residual, **wide)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, args: seen.append(args[0].x))
    model(torch.randint(1000, (4, 32)))
    assert seen[0][:, 4:].std().item() == pytest.approx(1, rel=0.05)


def test_deepnorm_starts_as_its_paper_says():
    for changes in (dict(activation="swiglu"), dict(moe_experts=2, activation="swiglu")):
        block = tiny(residual="deepnorm", n_embd=256, n_hidden=512, **changes).blocks[0]
        gain = (8 * 2) ** -0.25
        for matrix, fans in ((block.attn.wv, 512), (block.attn.wo, 512), (block.mlp.up, 768),
                             (block.mlp.gate, 768), (block.mlp.down, 768)):  # fmt: skip
            std = getattr(matrix, "weight", matrix).std().item()
            assert std == pytest.approx(gain * (2 / fans) ** 0.5, rel=0.02)
        assert block.attn.wq.weight.std().item() == pytest.approx(0.05, rel=0.02)


def test_x0mix_starts_as_nanochat():
    model = tiny(residual="x0mix", n_layer=4)
    mixes = [block.attn_residual.mix.tolist() for block in model.blocks]
    assert [first for first, _ in mixes] == pytest.approx(
        [1.15, 1.15 - 0.1 / 3, 1.15 - 0.2 / 3, 1.05]
    )
    assert [second for _, second in mixes] == pytest.approx([0.20, 0.15, 0.10, 0.05])
    assert model.ends.nu.item() == pytest.approx(0.2)
    *_, (*_, last) = depth.walk(model, some_ids())
    after_third = [after for *_, after in depth.walk(model, some_ids())][5]
    assert torch.equal(last.sources[1], after_third.x)


# --- Hyper-Connections, Attention Residuals -------------------------------------------------------


@cases("kind", ["mhc", "ihc"])
def test_hyper_connections_equal_the_golden_with_gradients(kind):
    z, close = golden(kind), dict(rtol=0, atol=1e-9)
    names = "x fn base scale head_fn head_base head_scale W".split()
    x, fn, base, scale, *head, W = leaves = [z[name].requires_grad_() for name in names]
    eps = z["eps"].item()
    xs, iters = x.unbind(-2), int(z["iters"]) if kind == "mhc" else 0
    pre, post, M = streams_file.mhc_maps(xs, fn, torch.cat([scale, base]), iters, eps)
    maps = {"post": torch.cat(post, -1)}
    if kind == "mhc":
        maps["comb"] = torch.stack([torch.cat(row, -1) for row in M], -2)
    else:
        maps["pre"] = torch.cat(pre, -1)
    h = streams_file.read(xs, pre)
    f = torch.tanh(h @ W)
    ys = streams_file.write(xs, M, post, f)
    out = streams_file.mhc_end(ys, head[0], torch.cat([head[2], head[1]]), eps)
    y = torch.stack(ys, -2)
    for name, ours in dict(**maps, h=h, f=f, y=y, out=out).items():
        assert_close(ours, z[name], **close, msg=lambda text, name=name: f"{name}: {text}")
    for name, grad in zip(names, torch.autograd.grad(out, leaves, z["g"])):
        text = lambda text, name=name: f"gradient of {name}: {text}"
        assert_close(grad, z["grad_" + name], **close, msg=text)


@cases("kind", ["smhc", "gated", "wide"])
def test_three_sublayers_equal_the_golden_with_gradients(kind):
    z, close = golden(kind), dict(rtol=0, atol=1e-9)
    names = [key.removeprefix("grad.") for key in z if key.startswith("grad.")]
    p = {name: z[name].requires_grad_() for name in names}
    X = p["X"].unbind(-2)
    n, C, file = len(X), X[0].size(-1), streams_file
    pre = torch.eye(n, dtype=torch.float64)[0].expand(*X[0].shape[:-1], -1).split(1, -1)

    def normed(layer):
        gains = p[f"gain.{layer}"].split(C)
        z = [x * file.inverse_rms([x], 1e-6) * gain for x, gain in zip(X, gains)]
        return torch.stack(z, -2)

    def gated(layer):
        return file.gated_read(normed(layer), p[f"down.{layer}"], p[f"up.{layer}"])

    for i in range(sum(name.startswith("W.") for name in names)):
        layer = lambda *keys, i=i: [p[f"{key}.{i}"] for key in keys]
        run = lambda h, i=i: torch.tanh(h @ p[f"W.{i}"])
        if kind == "smhc":
            fn, *sb = layer("fn", "scale", "base")
            new, post, M = file.mhc_maps(X, fn, torch.cat(sb), file.ITERS)
            X, pre = file.write(X, M, post, run(file.read(X, pre))), new
        elif kind == "gated":
            post = file.gated_post(normed(i), *layer("inject"))
            X = file.write(X, None, post, run(gated(i)))
        else:
            f = run(file.wide_read(X, *layer("read")))
            X = file.wide_write(X, torch.cat(layer("keep", "write")), f)
    if kind == "wide":
        out = file.wide_read(X, p["read.end"])
    else:
        out = file.read(X, pre) if kind == "smhc" else gated("end")
    assert_close(out, z["out"], **close)
    for name, grad in zip(names, torch.autograd.grad(out, [*p.values()], z["g"])):
        text = lambda text, name=name: f"gradient of {name}: {text}"
        assert_close(grad, z["grad." + name], **close, msg=text)


def test_wide_starts_with_the_mean_of_parted_streams_and_keeps_999_of_1000():
    wide = tiny(residual="wide", hc_streams=3).blocks[0].attn_residual
    rho, kappa, beta = wide.constants.detach().chunk(3)
    assert_close(torch.sigmoid(rho), torch.full((3,), 1 / 3))
    assert_close(0.9 + 0.1 * torch.sigmoid(kappa), torch.full((3,), 0.999))
    assert_close(beta, torch.tensor([-0.01, 0.0, 0.01]))


@torch.no_grad()
@cases("residual, key", [("attnres", "full"), ("attnres_block", "block")])
def test_attention_residuals_equal_the_golden(residual, key):
    z, close = golden("attnres"), dict(rtol=0, atol=1e-9)
    layers, C = z["w"].shape
    shape = dict(n_layer=layers, n_embd=C, norm="none", norm_eps=z["eps"].item())
    config = GPTConfig(**{**TINY, "residual": residual, **shape})
    if residual == "attnres_block":
        config.attnres_size = int(z["size"])
    mode = RESIDUALS[residual]
    modules = [mode(config, layer + 1).double() for layer in range(layers)]
    ends = mode.ends(config).double()
    for module, w, g in zip([*modules, ends], [*z["w"], z["w_out"]], [*z["g"], z["g_out"]]):
        module.w.copy_(w)
        module.source_norm.gain.copy_(g)
    stream = ends.embed(z["e"].view(1, 1, C))
    for module, W, expected in zip(modules, z["W"], z[key + "_h"]):
        h, stream = module.read(stream)
        assert_close(h[0, 0], expected, **close)
        last, stream = module.weights(stream), module.write(stream, torch.tanh(h @ W.T))
    assert_close(last[0, 0], z[key + "_weights_last"], **close)
    assert_close(ends.readout(stream, None)[0][0, 0], z[key + "_out"], **close)


def residuals(model):
    return [each for b in model.blocks for each in (b.attn_residual, b.mlp_residual)]


def test_hc_reads_another_stream_in_each_sublayer_first_and_gated_starts_without_gates():
    for layer, residual in enumerate(residuals(tiny(residual="hc", n_layer=3)), 1):
        pre, post, *M = residual.sa[2:].unflatten(0, (4, 6)).T
        assert torch.equal(pre, F.one_hot(torch.tensor(layer % 4), 4).float())
        assert torch.equal(post, torch.ones(4)) and torch.equal(torch.stack(M), torch.eye(4))
        assert residual.sa[:2].tolist() == pytest.approx([0.01] * 2) and not residual.w.any()
    for residual in residuals(tiny(residual="gated")):
        assert residual.d.any() and residual.w.any() and not residual.u.any()


@cases("residual", ["mhc", "ihc", "smhc"])
def test_mhc_starts_as_prenorm_and_its_streams_part_in_training(residual):
    idx, (model, plain) = some_ids(), (tiny(residual=mode) for mode in (residual, "prenorm"))
    model.load_state_dict(plain.state_dict(), strict=False)  # the maps stay
    assert_close(model(idx)[0], plain(idx)[0], rtol=1e-4, atol=1e-5)
    optimizers = model.optimizers("adamw", 1e-3, {}, 0.1)

    def apart():
        """The rms of the last streams about their mean, over that of the mean"""
        *_, (*_, last) = depth.walk(model, idx)
        X = torch.stack(streams_file.streams_of(last), -2).detach()
        return ((X - X.mean(-2, keepdim=True)).norm() / X.mean(-2).norm() / 2).item()

    assert apart() < 1e-5
    for _ in range(10):
        model(idx, idx.roll(-1, 1))[1].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert apart() > 1e-3


@cases("start, scale", [("prenorm", 0.0), ("paper", 0.01), ("deepseek", 1.0)])
def test_the_matrices_of_mhc_have_columns_that_sum_to_1(start, scale):
    model = tiny(residual="mhc", mhc_start=start)
    scalars = [part.sb[: part.n_maps] for block in model.blocks
               for part in (block.attn_residual, block.mlp_residual)]  # fmt: skip
    scalars.append(model.ends.sb[:1])
    assert len(scalars) == 5 and all((p == torch.tensor(scale)).all() for p in scalars)
    for change in (lambda model: model, shaken):
        for _, residual, _, before, _ in depth.walk(change(model), some_ids()):
            M = residual.mixing(before)
            assert M.shape == (2, 32, 4, 4) and M.dtype == torch.float32 and M.min() > 0
            assert (M.sum(-2) - 1).abs().max() < 1e-5 and (M.sum(-1) - 1).abs().max() < 1e-2


@cases("residual, size", [("attnres", 1), ("attnres_block", 3)])
def test_attention_residuals_without_queries_read_the_mean_of_their_sources(residual, size):
    how = dict(attnres_size=size) if size > 1 else {}
    model, idx, outputs = tiny(residual=residual, norm="none", **how), some_ids(), []
    begin, *steps = depth.walk(model, idx)
    for i, (sublayer, _, h, before, after) in enumerate([begin, *steps]):  # noqa: B007
        outputs = outputs or [before.x]
        blocks = [sum(outputs[1:][j : j + size]) for j in range(0, i, size)]
        assert_close(h, torch.stack([outputs[0], *blocks]).mean(0))
        outputs.append(sublayer(h, (model.cos, model.sin)) if i % 2 == 0 else sublayer(h))
    blocks = [sum(outputs[1:][j : j + size]) for j in range(0, 4, size)]
    assert_close(model.ends.additive(after), torch.stack([outputs[0], *blocks]).mean(0))


def test_the_depth_report_has_the_mixing_of_streams_and_the_weights_of_sources():
    report = lambda model: depth.depth(model.eval(), [(some_ids(), some_ids(seed=2))])
    start = report(tiny(residual="mhc", mhc_start="paper"))["mixing entropy"]
    assert start == pytest.approx([math.log(4)] * 4, rel=1e-3)  # all entries of M near 1 / 4
    assert report(tiny(residual="hc"))["mixing entropy"] == pytest.approx([0] * 4, abs=1e-5)
    for residual, size in (("attnres", 1), ("attnres_block", 3)):
        how = dict(attnres_size=size) if size > 1 else {}
        model = shaken(tiny(residual=residual, **how))
        p, counts = np.array(report(model)["sources"]), [1 + -(-i // size) for i in range(5)]
        assert p.shape == (5, counts[-1]) and np.allclose(p.sum(1), 1)
        assert all((row[:n] > 0).all() and not row[n:].any() for row, n in zip(p, counts))


@torch.no_grad()
@cases("residual, size", [("attnres", None), ("attnres_block", 1), ("attnres_block", 3)])
def test_an_output_that_a_token_skips_gets_no_weight(residual, size):
    """A source of several sublayers counts for a token that runs any of them."""
    model = routed(residual=residual, attnres_size=size, mod_router="learned", n_layer=4, **MOD)
    *_, (*_, last) = depth.walk(model, some_ids())
    p, sources = model.ends.weights(last), attnres.sources_of(last)
    assert_close(p.sum(-1), torch.ones(2, 32))
    (embedding, all_tokens), *others = sources
    assert all_tokens is None and 0 < torch.cat([ran for _, ran in others]).float().mean() < 1
    for i, (v, ran) in enumerate(others, 1):
        assert ((p[..., i, None] > 0) == ran).all() and not (v * ~ran).any()


# --- All rivals -----------------------------------------------------------------------------------

WITH_SOURCES = (  # their Stream.sources are not empty
    "hc", "mhc", "ihc", "smhc", "gated", "wide", "attnres", "attnres_block", "x0mix",
)  # fmt: skip


@cases("residual", [*WITH_SOURCES, "keel", "derf"])
def test_sharded_over_two_ranks_they_have_the_curve_of_one_process(data, tmp_path, residual):
    how = dict(few(residual), total_batch_tokens=256)
    train(data, tmp_path / "one", **how)
    ranks(data, tmp_path / "two", **how, shard="fsdp")
    for name in ("one", "two"):  # one process can continue them
        resume(tmp_path / name, max_iters=8, shard="none")
    one, two = (log_of(tmp_path / name).losses for name in ("one", "two"))
    assert len(two) == 8 and two == pytest.approx(one, abs=1e-4)
    evaluated(tmp_path / "two", "loss,depth", eval_tokens=512, depth_tokens=512)


@cases("residual", ["ngpt", *WITH_SOURCES])
def test_recomputation_changes_no_gradient(residual):
    model, idx = shaken(tiny(residual=residual, n_layer=4, dropout=0.1)), some_ids()
    expected = logits_and_gradients(model, idx, idx.roll(-1, 1))
    model.recompute = True
    assert_close(logits_and_gradients(model, idx, idx.roll(-1, 1)), expected, rtol=1e-4, atol=1e-6)


def test_a_block_of_sources_counts_again_once_all_tokens_run_one_of_its_sublayers():
    how = dict(residual="attnres_block", attnres_size=3, n_layer=3, mod_on="mlp", mod_rate=0.4)
    model, masked = shaken(tiny(**how, mod_router="learned")).eval(), []
    for router in mod.routers(model):
        router.tau.fill_(2.0)  # every token skips every MLP, and sublayer 4 begins a block
    for *_, stream in depth.walk(model, some_ids()):
        masked.append(stream.lane is not None and not bool(stream.lane.any()))
    assert masked == [False, False, False, True, False, False]


@torch.no_grad()
@cases("residual", ["hc", "ihc", "smhc", "gated", "wide"])
def test_a_token_that_skips_every_sublayer_keeps_its_streams_and_its_pre(residual):
    how = dict(residual=residual, mod_on="both", mod_rate=0.4, mod_router="learned")
    model = shaken(tiny(**how)).eval()
    for router in mod.routers(model):
        router.tau.fill_(2.0)
    (_, _, _, first, _), *_, (*_, last) = depth.walk(model, some_ids())
    kept = zip(streams_file.streams_of(last), streams_file.streams_of(first))
    assert all(torch.equal(after, before) for after, before in kept)
    if residual == "smhc":
        assert torch.equal(last.lane, torch.eye(4)[0].expand(2, 32, 4))


@cases("n", [1, 2, 3, 4])
def test_compiled_code_without_gradients_takes_any_number_of_streams_and_sources(n):
    """Compiled, torch 2.13 drops ctx of an autograd.Function at one number of inputs."""
    g = torch.Generator().manual_seed(n)
    X = [torch.randn(1, 4, 8, generator=g) for _ in range(n)]
    w, reader = torch.randn(3, 8 * n, generator=g), tiny(residual="attnres", n_embd=8).ends
    stream = norms.Stream(X[-1], sources=tuple((x, None) for x in X[:-1]))

    def both(*inputs):
        products = torch.cat(streams_file.multiply(w, inputs), -1)
        return products, attnres.weighted_sum(stream, reader)

    with torch.no_grad():
        compiled = torch.compile(both, backend="eager", fullgraph=True)(*X)
        assert_close(compiled, both(*X), rtol=1e-5, atol=1e-6)
