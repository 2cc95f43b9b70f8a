"""The tests of the rivals: goldens of independent implementations, and limits. See test_all.py."""

import re

import pytest
import torch
import torch.nn.functional as F

import depth
import lora
import norms
from model import GPT, GPTConfig
from test_all import (
    assert_close,
    cases,
    checkpoint,
    data,
    golden,
    log_of,
    ranks,
    resume,
    shaken,
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
        "suv": ["mlp.up_scale.s", "mlp.gate_scale.s"],
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
    model = GPT(GPTConfig(residual="ngpt", **shape)).double().eval()
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
        losses, state = log_of(tmp_path / name).losses, lora.load_model(tmp_path / name)[1]
        assert losses == pytest.approx(log_of(tmp_path / "one").losses, abs=close)
        assert off_the_sphere(state.state_dict()) < 1e-6
        assert_close(state.state_dict(), one, rtol=1e-2, atol=10 * close)


@torch.no_grad()
def test_a_gate_multiplies_the_step_of_ngpt_and_all_stays_on_the_sphere():
    residual = tiny(residual="ngpt", ngpt_alpha=0.3).blocks[0].attn_residual
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


def test_a_mode_s_own_weight_decay_and_warm_up_hold_unless_others_are_given(data, tmp_path):
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
    assert other == [0.1, 50, pytest.approx(4e-3 / 51)]
    resume(tmp_path / "ngpt", max_iters=7)
    assert log_of(tmp_path / "ngpt").headers[-1]["resolved"]["weight_decay"] == 0.0


@torch.no_grad()
def test_adapters_of_ngpt_and_what_they_adapt_are_left_alone():
    model = shaken(tiny(residual="ngpt"))
    lora.adapt(model, 2, 4.0, 0.0, "wq,wo,down")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    model.after_step()
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.requires_grad_()
    model.after_step()
    assert off_the_sphere(model.state_dict()) < 1e-6
