"""The tests: each concept against something independent. python -m pytest -q test_all.py"""

import base64
import dataclasses
import glob
import gzip
import itertools
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import bhyt
import checkpoint as checkpoints
import configurator
import data as data_file
import depth
import eval as ask
import generate
import lora
import machine
import mod
import model as model_file
import moe
import nag
import norms
import plot
import prepare_c4
from attention import cpu_attention
from model import GPT, RESIDUALS, GPTConfig

HERE = os.path.dirname(os.path.abspath(__file__))
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64)
TINY_RUN = (
    "--n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --max_iters=6 --warmup_iters=2 "
    "--eval_tokens=512 --eval_interval=3 --log_interval=1 --device=cpu --dtype=float32 --compile=False"
).split()


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **changes}))


def some_ids(rows=2, T=32, vocab=64, seed=1):
    return torch.randint(vocab, (rows, T), generator=torch.Generator().manual_seed(seed))


def shaken(model):
    """Move every parameter off its start, so that no gain is 1 and no output projection is small."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for experts in moe.layers(model):
            experts.bias.normal_(std=0.1)
    model.refresh()
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Settings

SCRIPT = '''
"""A script."""
import sys
CONSTANT = 3
steps = 10  # how many
rate = 0.5  # how fast
name = "a"  # what
deep = False  # whether
pair = (1, 2)  # which
budget: float | None = None  # how much
settings = configure(globals())
later = 1
'''


@dataclasses.dataclass
class Shape:
    width: int = 4  # how wide


def configure(tmp_path, *argv):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    namespace = {"__file__": str(path), "__doc__": "A script."}
    return configurator.configure(namespace, Shape, argv=list(argv))[0], namespace


def test_settings_take_values_of_their_type(tmp_path):
    argv = "--steps=1e3 --rate=1 --name=b=c --deep=True --pair=(3,4) --budget=2 --width=8".split()
    values, namespace = configure(tmp_path, *argv)
    assert values == dict(
        steps=1000, rate=1.0, name="b=c", deep=True, pair=(3, 4), budget=2.0, width=8
    )
    assert (
        type(values["steps"]) is int
        and type(values["rate"]) is float
        and namespace["steps"] == 1000
    )
    assert "width" not in namespace
    assert configure(tmp_path, "--budget=1", "--budget=None")[0]["budget"] is None
    assert configure(tmp_path, "--name=7")[0]["name"] == "7"
    assert configure(tmp_path)[0]["steps"] == 10


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--step=3", "no setting 'step'; the nearest is 'steps'"),
        ("--later=3", "no setting 'later'"),
        ("--CONSTANT=4", "no setting 'CONSTANT'"),
        ("--steps=1.5", "steps expects int, got 1.5 (float)"),
        ("--steps=True", "steps expects int, got True (bool)"),
        ("--steps=None", "steps expects int, got None"),
        ("--deep=1", "deep expects bool, got 1 (int)"),
        ("--budget=lots", "budget expects float or None, got 'lots' (str)"),
        ("--steps", "--steps: write it as --key=value"),
        ("nowhere.py", "nowhere.py: no such config file"),
    ],
)
def test_settings_refuse_with_a_line_that_says_what_to_do(tmp_path, argv, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        configure(tmp_path, argv)


def test_config_files_are_read_and_never_run(tmp_path):
    file = tmp_path / "x.py"
    file.write_text('"""Settings"""\nsteps = 5\nwidth = 6\n')
    values, _ = configure(tmp_path, str(file), "--steps=7")
    assert values["steps"] == 7 and values["width"] == 6
    for text, message in (
        ("stps = 5", "x.py: there is no setting 'stps'"),
        ("steps = open('y')", "x.py, line 1: expected key"),
    ):
        file.write_text(text)
        with pytest.raises(SystemExit, match=re.escape(message)):
            configure(tmp_path, str(file))


def test_help_shows_every_setting_with_default_and_comment(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        configure(tmp_path, "--help")
    text = capsys.readouterr().out
    assert not stop.value.code
    for part in ("--steps=10", "how many", "--budget=None", "how much", "--width=4", "how wide"):
        assert part in text


@pytest.mark.parametrize("script", ["train.py", "eval.py", "bench.py", "prepare_c4.py"])
def test_every_setting_is_declared_once_and_has_a_comment(script):
    settings = configurator.read_settings(open(os.path.join(HERE, script)).read())
    assert settings and all(s.comment for s in settings.values())
    shape = configurator.read_settings(open(model_file.__file__).read(), of="GPTConfig")
    assert list(shape) == [f.name for f in dataclasses.fields(GPTConfig)] and all(
        s.comment for s in shape.values()
    )
    if script == "train.py":
        assert not set(settings) & set(shape)


@pytest.mark.parametrize("path", sorted(glob.glob(os.path.join(HERE, "config", "*.py"))))
def test_every_config_builds_its_model(path):
    namespace = {"__file__": os.path.join(HERE, "train.py")}
    values, _ = configurator.configure(namespace, GPTConfig, argv=[path])
    config = GPTConfig(**{f.name: values[f.name] for f in dataclasses.fields(GPTConfig)})
    with torch.device("meta"):
        assert GPT(config).num_params() > 1e6


def test_the_width_depth_ladder_of_experts_has_equal_parameters():
    text, counts = open(os.path.join(HERE, "config", "moe_840m.py")).read(), []
    shapes = re.findall(r"^(\d+)  (--.*)$", text, re.M)
    for ratio, argv in [*shapes, ("40", "")]:
        argv = [os.path.join(HERE, "config", "moe_840m.py"), *argv.split()]
        values, _ = configurator.configure(
            {"__file__": os.path.join(HERE, "train.py")}, GPTConfig, argv=argv
        )
        config = GPTConfig(**{f.name: values[f.name] for f in dataclasses.fields(GPTConfig)})
        assert config.n_embd / config.n_layer == pytest.approx(int(ratio), rel=0.035)
        with torch.device("meta"):
            models = [GPT(dataclasses.replace(config, residual=r)) for r in ("prenorm", "nag")]
        counts.append([model.num_params(active) for model in models for active in (False, True)])
    assert len(counts) == 5 and all(max(count) / min(count) < 1.02 for count in zip(*counts))


# ---------------------------------------------------------------------------------------------------------------------
# The model against one written again from the equations, in float64


def naive(model, idx):
    """The forward from the formulas, token by token and head by head, on the project's parameters"""
    c, P = (
        model.config,
        {n: p.detach().double() for n, p in (*model.named_parameters(), *model.named_buffers())},
    )
    C, D, G = c.n_embd, c.n_embd // c.n_head, c.n_kv_head or c.n_head

    def norm(x, at):
        if c.norm == "none":
            return x
        if c.norm == "layer":
            x = x - x.sum(-1, keepdim=True) / C
        y = P[at + ".gain"] * x / torch.sqrt((x * x).sum(-1, keepdim=True) / C + c.norm_eps)
        return y + P[at + ".shift"] if at + ".shift" in P else y

    def dyt(x, at):
        return P[at + ".gain"] * torch.tanh(P[at + ".alpha"] * x) + P[at + ".shift"]

    def linear(x, at):
        y = x @ P[at + ".weight"].T
        return y + P[at + ".bias"] if at + ".bias" in P else y

    def turn(v, t, at):
        if c.qk_norm:
            v = P[at] * v / torch.sqrt((v * v).mean(-1, keepdim=True) + c.norm_eps)
        out = torch.empty_like(v)
        for i in range(D // 2):
            a = t * c.rope_base ** (-2 * i / D)
            out[..., i] = v[..., i] * math.cos(a) - v[..., i + D // 2] * math.sin(a)
            out[..., i + D // 2] = v[..., i + D // 2] * math.cos(a) + v[..., i] * math.sin(a)
        return out

    def attention(h, b):
        at, T = f"blocks.{b}.attn", h.size(1)
        q, k, v = (linear(h, f"{at}.w{x}") for x in "qkv")
        y = torch.zeros_like(q)
        for head in range(c.n_head):
            own, shared = (
                slice(head * D, head * D + D),
                slice((head * G // c.n_head) * D, (head * G // c.n_head) * D + D),
            )
            Q = torch.stack([turn(q[:, t, own], t, f"{at}.q_norm.gain") for t in range(T)], 1)
            K = torch.stack([turn(k[:, t, shared], t, f"{at}.k_norm.gain") for t in range(T)], 1)
            for t in range(T):
                p = torch.softmax((Q[:, t, None] * K[:, : t + 1]).sum(-1) / math.sqrt(D), -1)
                y[:, t, own] = (p[..., None] * v[:, : t + 1, shared]).sum(1)
        return linear(y, f"{at}.wo")

    def mlp(h, b):
        at = f"blocks.{b}.mlp"
        act = {
            "gelu": lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))), "relu": lambda z: z.clamp(min=0),
            "silu": lambda z: z / (1 + torch.exp(-z)), "swiglu": lambda z: z / (1 + torch.exp(-z)),
        }[c.activation]  # fmt: skip

        def through(h, w):
            up = h @ w["up"].T
            return (act(h @ w["gate"].T) * up if c.activation == "swiglu" else act(up)) @ w[
                "down"
            ].T

        if not c.moe_experts:
            up = linear(h, at + ".up")
            return linear(
                act(linear(h, at + ".gate")) * up if c.activation == "swiglu" else act(up),
                at + ".down",
            )
        out, parts = torch.zeros_like(h), [n for n in ("up", "gate", "down") if f"{at}.{n}" in P]
        for i, t in itertools.product(range(h.size(0)), range(h.size(1))):  # token by token
            share = torch.softmax(P[at + ".router.weight"] @ h[i, t], 0)
            chosen = torch.argsort(share + P[at + ".bias"], descending=True)[: c.moe_top_k].tolist()
            for e in chosen:
                weight = share[e] / sum(share[j] for j in chosen) if len(chosen) > 1 else share[e]
                out[i, t] += weight * through(h[i, t], {n: P[f"{at}.{n}"][e] for n in parts})
        shared = {n: P.get(f"{at}.shared.{n}.weight") for n in parts}
        return out + through(h, shared) if c.moe_shared else out

    def rms(v):
        return torch.sqrt((v * v).sum(-1, keepdim=True) / v.size(-1))

    def nag(f, at):  # SPEC's textbook form: centre, orthogonalise, normalise, modulate, rotate
        nonlocal x, lane
        if c.nag_centre:
            f = f - f.sum(-1, keepdim=True) / C
        if c.nag_orthogonal:
            f = f - x * (f * x).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True)
        a = s * P[at + ".alpha"]
        if c.nag_directions:
            gates = 1 / (1 + torch.exp(-(x @ P[at + ".w"].T + P[at + ".b"])))
            share = P[at + ".p"].exp() / P[at + ".p"].exp().sum()
            beta = torch.log(1 + P[at + ".raw_beta"].exp()) if c.nag_beta is None else c.nag_beta
            a = a * (gates * share).sum(-1, keepdim=True) ** beta
        moved = x + a * f / rms(f)
        lane = lane + torch.log(rms(moved))
        x = moved / rms(moved)

    def mean_square(v):
        return (v * v).sum(-1, keepdim=True) / C

    def bounded(v, at):
        return P[at + ".gain"] * torch.tanh(
            P[at + ".lam"] * math.sqrt(1 - c.bhyt_p) * x / torch.sqrt(v + c.norm_eps)
        )

    def scaled(v, at):
        return P[at + ".gain"] * x / torch.sqrt(v + c.norm_eps)

    def bhyt_block(
        b,
    ):  # SPEC: the variance before attention is measured, the one before the MLP predicted, or not
        nonlocal x
        first, second = (f"blocks.{b}.{name}_residual.norm" for name in ("attn", "mlp"))
        normed, v = scaled if c.residual == "prenorm_approx" else bounded, mean_square(x)
        gain, lam = P[first + ".gain"], P.get(first + ".lam")
        x = x + s * attention(normed(v, first), b)
        if c.residual == "bhyt_exact":
            v = mean_square(x)
        else:
            w_v = (
                P[f"blocks.{b}.attn.wv.weight"]
                .view(G, 1, D, C)
                .expand(G, c.n_head // G, D, C)
                .reshape(C, C)
            )
            product = P[f"blocks.{b}.attn.wo.weight"] @ w_v
            k = (product * (gain if c.bhyt_unit else 1)).square().sum() / (c.block_size * C)
            spread = gain.square().mean() if lam is None else (lam * math.sqrt(1 - c.bhyt_p)) ** 2
            v = v + s * s * k * spread
        x = x + s * mlp(normed(v, second), b)

    def without_parallel(f):
        return f - x * (f * x).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True)

    x = P["embed.weight"][idx]
    if c.residual == "nag":
        x = x - x.sum(-1, keepdim=True) / C
        lane, x = torch.log(rms(x)) + P.get("ends.g_enc", 0), x / rms(x)
    x = (
        norm(x, "ends.norm_in")
        if c.residual == "perinorm"
        else P["ends.scale"] * x
        if c.residual == "dyt"
        else x
    )
    s = 1 / math.sqrt(c.n_layer) if c.branch_scale == "depth" else 1
    for b, (f, name) in itertools.product(range(c.n_layer), ((attention, "attn"), (mlp, "mlp"))):
        at = f"blocks.{b}.{name}_residual.norm"
        if c.residual in bhyt.RESIDUALS:
            if name == "attn":
                bhyt_block(b)
            continue
        if c.residual == "nag":
            nag(f(x, b), at[:-5])
            continue
        x = {
            "none": lambda: norm(s * f(x, b), at), "postnorm": lambda: norm(x + s * f(x, b), at),
            "prenorm": lambda: x + s * f(norm(x, at), b),
            "perinorm": lambda: x + s * norm(f(norm(x, at), b), at + "_out"),
            "lns": lambda: x + s * f(norm(x, at) / math.sqrt(b + 1), b), "dyt": lambda: x + s * f(dyt(x, at), b),
            "orthogonal": lambda: x + s * without_parallel(f(norm(x, at), b)),
        }[c.residual]()  # fmt: skip
    if c.residual in bhyt.RESIDUALS and c.bhyt_lambda[2]:
        x = bounded(mean_square(x), "ends.norm")
    elif c.residual in ("prenorm", "perinorm", "lns", "orthogonal", *bhyt.RESIDUALS):
        x = norm(x, "ends.norm")
    x = dyt(x, "ends.norm") if c.residual == "dyt" else x
    W = P["embed.weight" if c.tied else "head.weight"]
    if c.residual == "nag":
        W = W - W.mean(-1, keepdim=True)
        x, W = (
            x * torch.exp(P["ends.g_dec"] + (lane if c.nag_lane else 0)) / math.sqrt(C),
            W / rms(W),
        )
    return x @ W.T


VARIANTS = [
    *[dict(residual=r) for r in RESIDUALS],
    *[dict(residual=r, norm=n) for r in ("prenorm", "postnorm", "perinorm", "lns") for n in ("layer", "none")],
    dict(residual="prenorm", norm="layer", bias=True), dict(activation="relu"), dict(activation="silu"),
    dict(activation="swiglu", tied=False),
    dict(n_head=4, n_kv_head=2, qk_norm=True), dict(residual="perinorm", branch_scale="depth", n_layer=3),
    dict(branch_scale="depth"), dict(nag_centre=False), dict(nag_orthogonal=False), dict(nag_directions=0),
    dict(nag_beta=2.0), dict(nag_lane=False), dict(tied=False),
    *[dict(residual=r, n_head=4, n_kv_head=2) for r in bhyt.RESIDUALS],
    dict(residual="bhyt", bhyt_unit=True, n_head=4, n_kv_head=1),
    dict(residual="bhyt", bhyt_lambda=(1.0, 0.5, 0.3), bhyt_p=0.9), dict(residual="bhyt_exact", bhyt_learned=False),
    dict(residual="bhyt", branch_scale="depth", norm_eps=0.1), dict(moe_experts=4), dict(moe_experts=3, moe_top_k=1),
    dict(residual="prenorm", moe_experts=4, moe_shared=24, activation="swiglu", n_hidden=16),
    dict(nag_centre=False, nag_orthogonal=False, nag_directions=0, nag_lane=False),
]  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_model_equals_the_equations(changes):
    model = shaken(tiny(**{"n_embd": 16, **changes})).double()
    model.refresh()
    D, base = model.config.n_embd // model.config.n_head, model.config.rope_base
    angle = torch.tensor(
        [[t * base ** (-2 * i / D) for i in range(D // 2)] for t in range(32)], dtype=torch.float64
    )
    torch.testing.assert_close(model.cos.float(), angle.cos().float())
    model.cos, model.sin = angle.cos(), angle.sin()  # the model keeps these in float32
    idx = some_ids(T=7)
    torch.testing.assert_close(model(idx)[0], naive(model, idx), rtol=1e-9, atol=1e-9)


def test_loss_is_the_mean_cross_entropy_and_ignores_minus_one():
    model, idx = tiny(), some_ids()
    targets = idx.roll(-1, 1)
    targets[0, :5] = -1
    logits, loss = model(idx, targets)
    p = logits.softmax(-1)
    picked = [
        -p[b, t, targets[b, t]].log() for b in range(2) for t in range(32) if targets[b, t] >= 0
    ]
    torch.testing.assert_close(loss, torch.stack(picked).mean())
    assert model(idx)[1] is None


@pytest.mark.parametrize("residual", ["nag", "bhyt"])
@pytest.mark.parametrize(
    "how", [dict(loss_chunk=7), dict(recompute=True), dict(loss_chunk=100, recompute=True)], ids=str
)
def test_what_spends_less_memory_changes_no_number(residual, how):
    model, x, y = (
        shaken(tiny(residual=residual, dropout=0.2)).train(),
        some_ids(3),
        some_ids(3, seed=2),
    )
    y[0, :5] = -1

    kept = []

    def gradients():
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel()) or t, lambda t: t
        ):
            loss = model(x, y)[1]
        return loss, torch.autograd.grad(loss, [p for p in model.parameters()], allow_unused=True)

    loss, grads = gradients()
    before, largest = sum(kept), max(kept)
    kept.clear()
    for key, value in how.items():
        setattr(model, key, value)
    again, others = gradients()
    assert sum(kept) < before * (0.7 if "recompute" in how else 1) and max(kept) <= largest
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(grads, others):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_dyt_equals_the_golden():
    z = np.load(os.path.join(HERE, "goldens", "dyt.npz"))
    dyt = norms.DyT(32, 1.0)
    with torch.no_grad():
        for name, key in (("alpha", "alpha"), ("gain", "gamma"), ("shift", "beta")):
            getattr(dyt, name).copy_(torch.from_numpy(z[key]))
    torch.testing.assert_close(
        dyt(torch.from_numpy(z["x"])), torch.from_numpy(z["out"]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "norm, reference", [(norms.RMSNorm, F.rms_norm), (norms.LayerNorm, F.layer_norm)]
)
def test_norms_take_their_statistics_in_float32_and_keep_the_dtype(norm, reference):
    x = torch.randn(5, 64, dtype=torch.float64) * 1e-3
    module = norm(64, eps=1e-6).double()
    module.reset_parameters()
    torch.testing.assert_close(module(x), reference(x, (64,), eps=1e-6), rtol=1e-12, atol=1e-12)
    y = module.bfloat16()(x.bfloat16())
    exact = reference(x.bfloat16().float(), (64,), eps=1e-6)
    assert (
        y.dtype == torch.bfloat16 and (y.float() - exact).abs().max() <= exact.abs().max() * 2**-8
    )


@pytest.mark.parametrize("residual", RESIDUALS)
def test_no_logit_sees_a_later_token(residual):
    model, idx = shaken(tiny(residual=residual)).eval(), some_ids()
    before = model(idx)[0]
    for t in (0, 1, 3, 7, 15, 30):
        other = idx.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1 + t) % 64
        torch.testing.assert_close(model(other)[0][:, : t + 1], before[:, : t + 1])


@pytest.mark.parametrize("changes", [dict(residual=r) for r in RESIDUALS], ids=str)
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 3, 1, 3], [12]], ids=str)
def test_cached_decoding_equals_the_full_forward(changes, chunks):
    model, idx = shaken(tiny(**changes, n_head=4, n_kv_head=2, qk_norm=True)).eval(), some_ids(T=12)
    with torch.no_grad():
        full = model(idx)[0]
        cache = generate.KVCache(model, 2, 20)
        parts = [model(part, cache=cache)[0] for part in idx.split(chunks, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)


def test_generate():
    model, idx = shaken(tiny()), some_ids(T=4)
    text = idx
    for _ in range(20):
        text = torch.cat((text, model(text)[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(generate.generate(model, idx, 20, temperature=0), text)
    assert torch.equal(generate.generate(model, idx, 20, top_k=1), text)
    assert torch.equal(generate.generate(model, idx, 20, top_p=1e-6), text)
    assert generate.generate(model, idx, 100, temperature=0).shape == (
        2,
        104,
    )  # far past the window of 32
    assert generate.generate(model, idx, 50, n_vocab=10, temperature=5.0)[:, 4:].max() < 10
    stop = int(text[0, 6])
    out = generate.generate(model, idx[:1], 20, temperature=0, stop=stop)
    assert torch.equal(out, text[:1, : text[0, 4:].tolist().index(stop) + 5])
    assert len(list(generate.stream_tokens(model, idx, 5))) == 5
    both = torch.cat(
        [*generate.stream_tokens(model, idx[:1].expand(2, -1), 30, temperature=0, stop=stop)], 1
    )
    assert (
        both.size(1) == generate.CHECK
        and (both[:, text[0, 4:].tolist().index(stop) :] == stop).all()
    )
    assert generate.generate(tiny(block_size=1), idx, 3).shape == (2, 7)
    for how in (dict(top_k=0), dict(top_p=0.0), dict(temperature=-1.0)):
        with pytest.raises(ValueError, match="top_k at least 1"):
            generate.generate(model, idx, 1, **how)


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(residual="bhyt"), dict(mod_on="both", mod_rate=0.3, moe_experts=4)],
    ids=str,
)
def test_a_compiled_step_decodes_as_an_eager_one_and_is_compiled_once(changes):
    model, idx = shaken(tiny(**changes)).eval(), some_ids(T=4)
    torch._dynamo.reset()
    expected = generate.generate(model, idx, 40, temperature=0)  # past the window
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(generate.generate(model, idx, 40, temperature=0, compile=True), expected)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_bfloat16_stream_is_bfloat16_all_the_way_and_nearly_the_same(residual):
    low, idx, dtypes = shaken(tiny(residual=residual, bf16_stream=True)), some_ids(), []
    high = shaken(tiny(residual=residual))
    for block in low.blocks:
        block.register_forward_hook(lambda module, args, stream: dtypes.append(stream.x.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        (a, one), (b, two) = (m(idx, idx.roll(-1, 1)) for m in (low, high))
    one.backward()
    assert set(dtypes) == {torch.bfloat16} and (a - b).abs().max() < 0.2 * b.std()
    assert abs(one - two) < 0.01 and all(p.grad.isfinite().all() for p in low.parameters())


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_folded_head_of_nag_gives_the_same_logits(tied):
    model, idx = shaken(tiny(tied=tied)).eval(), some_ids()
    expected, embedding = model(idx)[0], model.embed.weight.clone()
    rows = nag.fold(model).head.weight
    assert torch.equal(model(idx)[0], expected) and torch.equal(model.embed.weight, embedding)
    torch.testing.assert_close(rows.mean(1), torch.zeros(64), atol=1e-6, rtol=0)
    torch.testing.assert_close(rows.square().mean(1), torch.ones(64))
    with pytest.raises(ValueError, match="folded already"):
        nag.fold(model)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20000, 4)
    torch.manual_seed(0)

    def shares(**how):
        how = dict(temperature=1.0, top_k=None, top_p=None) | how
        return torch.bincount(generate.sample(logits, **how)[:, 0], minlength=4) / 20000

    def near(p):
        return pytest.approx(p, abs=0.02)

    assert shares().tolist() == near([0.5, 0.3, 0.15, 0.05])
    assert shares(top_k=2).tolist() == near([0.625, 0.375, 0, 0])
    assert shares(top_p=0.7).tolist() == near([0.625, 0.375, 0, 0])
    assert shares(temperature=0.5).tolist() == near(
        [x / 0.365 for x in (0.25, 0.09, 0.0225, 0.0025)]
    )


@pytest.mark.parametrize("residual", RESIDUALS)
def test_every_parameter_is_initialised_and_in_one_group(residual):
    model = tiny(
        residual=residual,
        norm="rms" if residual in ("dyt", "nag", *bhyt.RESIDUALS) else "layer",
        bias=True,
        qk_norm=True,
        activation="swiglu",
    )
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)
    model.init_weights()
    assert all(p.isfinite().all() for p in model.parameters())
    groups = model.param_groups()
    names = [n for group in groups.values() for n in group]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    assert all(model.get_parameter(n).ndim == 2 for n in groups["matrices"] + groups["embeddings"])
    assert all(model.get_parameter(n).ndim == 1 for n in groups["vectors"])
    assert len(groups["gates"]) == {"dyt": 6, "nag": 2 + 4 * 5, "bhyt": 4, "bhyt_exact": 4}.get(
        residual, 0
    )


def test_a_parameter_without_a_rule_is_an_error():
    model = tiny()
    model.blocks[0].extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="blocks.0.extra"):
        model.init_weights()


@pytest.mark.parametrize(
    "how, std",
    [
        (dict(init="normal", init_scale=0.05), 0.05),
        (dict(init="kaiming", activation="relu"), math.sqrt(2 / 256)),
        (dict(init="kaiming", activation="gelu"), 1.7 / 16),
        (dict(init="xavier"), math.sqrt(2 / (256 + 1024))),
        (dict(init="uniform", init_scale=0.5), 0.5 / math.sqrt(3)),
    ],
    ids=str,
)
def test_initial_weights_have_the_variance_they_should(how, std):
    model = tiny(n_embd=256, **how)
    assert model.blocks[0].mlp.up.weight.std().item() == pytest.approx(std, rel=0.02)
    down = {
        out: tiny(n_embd=256, residual="lns", init_out=out, **how).blocks[0].mlp.down.weight
        for out in ("plain", "scaled", "zero")
    }
    torch.testing.assert_close(down["scaled"], down["plain"] / 2)  # sqrt(2 n_layer) = 2
    assert not down["zero"].any()
    assert torch.equal(
        tiny(n_embd=256, residual="prenorm", **how).blocks[0].mlp.down.weight, down["scaled"]
    )
    assert torch.equal(
        tiny(n_embd=256, residual="lns", **how).blocks[0].mlp.down.weight, down["plain"]
    )


FLIPS = dict(
    n_layer=3, n_head=4, n_kv_head=1, n_embd=64, n_hidden=48, vocab_size=65, residual="lns", norm="layer", norm_eps=0.1,
    activation="swiglu", qk_norm=True, rope_base=100.0, bf16_stream=True, tied=False, bias=True, dropout=0.5,
    init="xavier", init_scale=0.1, init_out="plain", branch_scale="depth", dyt_alpha=(2.0, 0.1, 0.3),
    nag_alpha_power=0.1,
    bhyt_context=8, bhyt_p=0.9, bhyt_lambda=(1.0, 0.5, 0.5), bhyt_learned=False, bhyt_unit=True,
    moe_experts=4, moe_top_k=1, moe_shared=8, moe_balance="loss", moe_rate=0.5, mod_on="both", mod_rate=0.5,
    mod_router="learned", mod_budget="layer", mod_fallback=True, mod_blocks="inner",
    nag_directions=4, nag_beta=2.0, nag_centre=False, nag_orthogonal=False, nag_lane=False, nag_first_logits=None,
)  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(GPTConfig)])
def test_every_model_setting_changes_something(field):
    if field == "block_size":
        with pytest.raises(ValueError, match="33 tokens do not fit into block_size=32"):
            tiny()(some_ids(T=33))
        return
    base = dict(
        residual={"dyt": "dyt", "nag": "nag", "bhyt": "bhyt", "mod": "nag"}.get(
            field.partition("_")[0], "prenorm"
        )
    )
    change = {field: FLIPS[field]}
    if field.startswith("moe_") and field != "moe_experts":
        base |= dict(moe_experts=4, moe_balance="loss")
        change |= dict(moe_balance="bias") if field == "moe_balance" else {}
    if field == "mod_on":
        change |= dict(mod_rate=0.5)
    elif field.startswith("mod_"):
        base |= dict(mod_on="mlp", mod_rate=0.3, n_layer=3)
    one, two = tiny(**base), tiny(**{**base, **change})
    if field == "residual":
        base |= dict(norm="rms")
    if field == "mod_budget":  # nor this before the first balance
        for m in (one, two):
            m(some_ids())
            mod.balance(mod.routers(m), m.config.mod_budget == "global", 0.3)
    idx = some_ids()
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=field == "bf16_stream"):
        losses = [m(idx, idx.roll(-1, 1))[1].item() for m in (one, two)]
    assert one.num_params() != two.num_params() or losses[0] != losses[1]


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(residual="prenrm"), "residual='prenrm': choose one of none, postnorm, prenorm"),
        (dict(residual="prenorm", norm="batch"), "norm='batch': choose one of rms, layer, none"),
        (dict(activation="tanh"), "activation='tanh': choose one of gelu"),
        (dict(init="zeros"), "init='zeros': choose one of normal"),
        (dict(init_out="small"), "init_out='small': choose one of scaled"),
        (dict(branch_scale="two"), "branch_scale='two': choose one of one, depth"),
        (dict(residual="dyt", norm="layer"), "residual='dyt' does not use norm"),
        (dict(residual="none", branch_scale="depth"), "residual='none' does not use branch_scale"),
        (dict(n_head=3), "n_embd=32 does not divide into n_head=3 heads"),
        (dict(n_head=32), "is odd"),
        (dict(n_head=4, n_kv_head=3), "n_head=4 query heads do not divide over n_kv_head=3"),
        (dict(n_layer=0), "n_layer=0"),
        (dict(dropout=1.0), "dropout=1.0"),
        (dict(dyt_alpha=(1.0,)), "three starts"),
        (dict(residual="nag", norm="none"), "residual='nag' does not use norm: leave it at 'rms'"),
        (
            dict(residual="lns", nag_centre=False),
            "residual='lns' does not use nag_centre: leave it at True",
        ),
        (dict(residual="bhyt", norm="layer"), "residual='bhyt' does not use norm"),
        (
            dict(residual="bhyt_exact", bhyt_context=8),
            "residual='bhyt_exact' does not use bhyt_context",
        ),
        (
            dict(residual="prenorm_approx", bhyt_p=0.5),
            "residual='prenorm_approx' does not use bhyt_p",
        ),
        (dict(residual="bhyt", bhyt_p=1.0), "0 <= p < 1"),
        (dict(residual="bhyt", bhyt_lambda=(2.0, 0.0, 0.0)), "three starts"),
        (
            dict(nag_directions=0, nag_beta=1.0),
            "residual='nag' does not use nag_beta: leave it at None",
        ),
        (dict(norm_eps=1e-5), "residual='nag' does not use norm_eps"),
        (dict(init_scale=0.0), "init_scale=0.0: must be above 0"),
        (
            dict(mod_on="mlp", mod_rate=0.1, nag_directions=0),
            "mod_router='nag' needs nag_directions above 0",
        ),
        (
            dict(mod_on="mlp", mod_rate=0.1, mod_router="learned", mod_fallback=True),
            "does not use mod_fallback",
        ),
        (
            dict(mod_on="mlp", mod_rate=0.1, mod_blocks="inner"),
            "of n_layer=2 blocks none takes part",
        ),
        (dict(moe_top_k=3), "moe_top_k needs moe_experts above 0"),
        (dict(mod_rate=0.5), "mod_rate needs mod_on"),
        (dict(mod_blocks="inner", mod_fallback=True), "needs mod_on"),
        (dict(moe_experts=2, moe_rate=-1.0), "a rate of 0 or more"),
        (dict(mod_on="both", mod_rate=1.0), "0 <= rate < 1"),
        (
            dict(mod_on="mlps", mod_rate=0.1),
            "mod_on='mlps': choose one of none, attention, mlp, both",
        ),
        (dict(mod_router="best"), "mod_router='best': choose one of nag, learned, random"),
        (dict(mod_budget="all"), "mod_budget='all': choose one of global, layer"),
        (
            dict(mod_on="mlp", mod_rate=0.1, mod_blocks="odd"),
            "mod_blocks='odd': choose one of all, alternate, inner",
        ),
        (dict(mod_on="mlp", mod_rate=0.1, residual="lns"), "mod_router='nag' needs residual='nag'"),
        (dict(moe_experts=2, moe_top_k=3), "moe_experts=2, moe_top_k=3"),
        (dict(moe_experts=2, moe_balance="luck"), "moe_balance='luck': choose one of bias, loss"),
        (dict(nag_directions=-1), "nag_directions=-1: give at least 0"),
        (dict(nag_first_logits=0.0), "nag_first_logits=0.0: give at least"),
        (dict(nag_beta=-1.0), "nag_beta=-1.0: give at least"),
    ],
    ids=str,
)
def test_bad_names_and_shapes_raise_when_the_model_is_built(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {}, dict(n_head=4, n_kv_head=1), dict(activation="swiglu", tied=False),
        dict(residual="lns", mod_on="both", mod_rate=0.25, mod_router="learned"),
        dict(mod_on="mlp", mod_rate=0.5, mod_router="random"), dict(residual="lns", moe_experts=4, moe_shared=16),
        dict(mod_on="both", mod_rate=0.25),
        dict(residual="dyt", mod_on="attention", mod_rate=0.4, mod_router="learned", mod_blocks="alternate"),
        dict(moe_experts=4, moe_top_k=1, mod_on="both", mod_rate=0.25, mod_router="learned", activation="swiglu"),
    ],
    ids=str,
)  # fmt: skip
def test_flops_are_those_that_torch_counts(changes, monkeypatch):
    monkeypatch.setattr(  # of a custom operator torch counts nothing
        moe,
        "grouped",
        lambda x, w, ends: torch.cat([x[a:b] @ w[e].T for e, (a, b) in moe.spans(ends)]),
    )
    from torch.utils.flop_counter import FlopCounterMode

    model, idx = tiny(**changes), some_ids()
    B, T, C = 2, 32, model.config.n_embd
    counter = FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(idx, idx)[1].backward()
    counts = counter.get_flop_counts()["Global"]
    # torch counts the scores of n queries with all T keys, we those with the (T + 1) / 2 that a query sees on average
    asked = [T if block.attn_router is None else block.attn_router.k for block in model.blocks]
    masked = sum(n * (T - 1) / 2 for n in asked)
    assert B * T * model.flops_per_token() == pytest.approx(
        sum(counts.values()) - B * 12 * C * masked
    )


@pytest.mark.parametrize("queries, keys", [(300, 300), (256, 256), (19, 32), (3, 300), (190, 300)])
@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_attention_for_the_compiler_is_the_library_s(queries, keys, n_kv_head):
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, n, 8, dtype=torch.float64, requires_grad=True)
        for heads, n in ((4, queries), (n_kv_head, keys), (n_kv_head, keys))
    )
    rows = torch.stack(
        [torch.randperm(keys)[:queries].sort().values for _ in range(2)]
    )  # some tokens, in order
    rows[0] = torch.arange(keys)[-queries:]  # and the last ones
    mask = (torch.arange(keys) <= rows[..., None])[:, None] if queries < keys else None
    ours = cpu_attention(q, k, v, mask, 128)
    theirs = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)
    g = torch.randn_like(ours)
    for x, y in zip(
        torch.autograd.grad(ours, (q, k, v), g), torch.autograd.grad(theirs, (q, k, v), g)
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "changes",
    [
        *[dict(residual=r) for r in RESIDUALS], dict(moe_experts=4), dict(mod_on="both", mod_rate=0.4),
        dict(residual="bhyt", mod_on="both", mod_rate=0.4, mod_router="learned", moe_experts=4),
    ],
    ids=str,
)  # fmt: skip
def test_compiled_equals_eager_and_all_blocks_share_one_graph(changes):
    idx = torch.arange(64).view(2, 32)  # no two tokens alike, between which rounding could decide
    results = []
    for compiled in (False, True):
        model = shaken(tiny(n_layer=12, **changes))
        if (
            "moe_experts" in changes or "mod_on" in changes
        ):  # where rounding could decide who is chosen
            model.double()
        if compiled:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            for block in model.blocks:
                block.compile(fullgraph=True)
        logits, loss = model(idx, idx.roll(-1, 1))
        loss.backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    )  # at most the first block apart from the rest
    for eager, fused in zip(*results):
        torch.testing.assert_close(fused, eager, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# NAG


def some_lanes(*shape, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    r, f = (torch.randn(*shape, generator=g, dtype=torch.float64) for _ in "rf")
    r = r / r.square().mean(-1, keepdim=True).sqrt()
    s, a = (torch.rand(*shape[:-1], 1, generator=g, dtype=torch.float64) for _ in "sa")
    return [x.to(dtype).requires_grad_() for x in (r, s, f + 0.3, a)]


def test_nag_equals_the_golden_with_its_gradients():
    z = {
        k: torch.from_numpy(v)
        for k, v in np.load(os.path.join(HERE, "goldens", "nag.npz")).items()
        if v.ndim
    }
    for eps, tolerance in (({"eps": 0.0}, 1e-9), ({}, 1e-5)):
        r, f = z["direction"].clone().requires_grad_(), z["branch_out"].clone().requires_grad_()
        m = nag.modulator(r, z["mod_weight"], z["mod_bias"], z["mod_logits"], z["beta"])
        direction, norm = nag.rotate(r, z["log_norm"], f, z["alpha"] * m, **eps)
        direction.backward(z["grad_out"])
        for ours, key in (
            (direction, "new_direction"), (norm, "new_log_norm"), (r.grad, "grad_direction"),
            (f.grad, "grad_branch_out"),
        ):  # fmt: skip
            torch.testing.assert_close(ours, z[key], rtol=0, atol=tolerance)


def test_nag_in_one_pass_equals_the_plain_equations_with_gradients():
    results = []
    for form in (nag.rotate, nag.plain_rotate):
        lanes = some_lanes(3, 5, 24)
        r, s = form(*lanes)
        (r * torch.arange(24) + s.square()).sum().backward()
        results.append([r, s, *(x.grad for x in lanes)])
    for ours, paper in zip(*results):
        torch.testing.assert_close(ours, paper, rtol=1e-8, atol=1e-8)


def test_nag_lanes_are_an_additive_stream():
    """R_{l+1} = R_l + rho_l alpha m u, with nothing split, beside the lanes: R = e^s r all the way"""
    model = shaken(tiny(n_layer=64)).double()
    stream = model.ends.embed(model.embed(some_ids(T=6)))
    R, layers = stream.x * stream.lane.exp(), 0
    for b, block in enumerate(model.blocks):
        for name in ("attn", "mlp"):
            f = torch.randn(
                2, 6, 32, generator=torch.Generator().manual_seed(b), dtype=torch.float64
            )
            residual = getattr(block, name + "_residual")
            rho = R.square().mean(-1, keepdim=True).sqrt()
            v = f - f.mean(-1, keepdim=True)
            v = v - (v * R).sum(-1, keepdim=True) / (R * R).sum(-1, keepdim=True) * R
            gates = torch.sigmoid((R / rho) @ residual.w.T + residual.b) @ residual.p.softmax(-1)
            a = residual.alpha * gates[..., None] ** F.softplus(residual.raw_beta)
            R = R + rho * a * v / v.square().mean(-1, keepdim=True).sqrt()
            stream, layers = residual.write(stream, f), layers + 1
            torch.testing.assert_close(
                stream.x, R / R.square().mean(-1, keepdim=True).sqrt(), rtol=1e-9, atol=1e-9
            )
            torch.testing.assert_close(
                stream.lane, R.square().mean(-1, keepdim=True).log() / 2, rtol=1e-9, atol=1e-9
            )
    assert layers == 128


def test_nag_only_turns_and_by_no_more_than_it_may():
    for seed in range(20):
        r, s, f, a = some_lanes(4, 7, 32, seed=seed)
        new, norm = nag.rotate(r, s, f, a)
        torch.testing.assert_close(new.square().mean(-1), torch.ones(4, 7, dtype=torch.float64))
        cosine = (r * new).mean(-1, keepdim=True)
        torch.testing.assert_close(torch.acos(cosine), torch.atan(a))
        torch.testing.assert_close(
            norm - s, -torch.log(cosine)
        )  # the hypotenuse grows as the cosine falls
    r = r.detach() - r.detach().mean(-1, keepdim=True)
    assert nag.rotate(r, s, f, a)[0].mean(-1).abs().max() < 1e-9  # what is centred stays so


def test_nag_keeps_its_norm_in_bfloat16_over_256_sublayers():
    r, s, _, _ = (x.detach() for x in some_lanes(2, 8, 64, dtype=torch.bfloat16))
    s, turned = s.float(), 0.0
    for layer in range(256):
        f = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(layer)).bfloat16()
        r, new = nag.rotate(r, s, f, torch.tensor(0.7))
        turned, s = turned + (new - s), new
        assert (r.dtype, s.dtype) == (torch.bfloat16, torch.float32)
        norm = r.float().square().mean(-1).sqrt()
        assert (norm - 1).abs().max() < 0.01
    torch.testing.assert_close(
        turned, torch.full_like(turned, 128 * math.log(1.49)), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nag_survives_what_would_divide_by_zero(dtype):
    r, _, f, a = (x.detach() for x in some_lanes(4096, 1, 64, dtype=dtype))
    s, zero = torch.zeros(4096, 1, 1), torch.zeros_like(f)
    parallel = [k * r for k in (1, 2, -3, 10, -10, 100)] + [k * r + 1e-3 * f for k in (1, -10, 100)]
    for update in (zero, torch.ones_like(f), 300 + 0.1 * f, 1e-6 * f, *parallel):
        leaves = [x.clone().requires_grad_() for x in (r, update, a)]
        new, norm = nag.rotate(leaves[0], s, leaves[1], leaves[2])
        (new.float().sum() + norm.sum()).backward()
        assert all(x.isfinite().all() for x in (new, norm, *(leaf.grad for leaf in leaves)))
        assert (new.float().square().mean(-1).sqrt() - 1).abs().max() < 0.01
    assert (
        nag.rotate(zero, s, f, a)[0].isfinite().all() and not nag.rotate(zero, s, zero, a)[0].any()
    )
    w, b, p = (
        torch.zeros(4, 64, dtype=dtype),
        torch.full((4,), -1e4, dtype=dtype).requires_grad_(),
        torch.zeros(4),
    )
    m = nag.modulator(r, w, b, p, torch.tensor(0.3))  # every gate shut
    m.sum().backward()
    assert m.max().item() == pytest.approx(1e-6**0.3, rel=1e-5) and b.grad.isfinite().all()
    idx = some_ids()
    for changes in (dict(init_out="zero"), {}):
        model = tiny(n_layer=8, **changes).to(dtype)
        with torch.no_grad():
            model.embed.weight[3] = model.embed.weight[4]
        model(idx, idx.roll(-1, 1))[1].backward()
        assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).isfinite()
    with torch.no_grad():
        model.embed.weight[:3] = 0.5  # nothing is left of such rows when they are centred
    assert model(idx)[0].isfinite().all()


@pytest.mark.parametrize("degrees", [90, 30, 3, 1, 179, 0.3, 0.01])
def test_nag_in_float32_is_as_exact_near_a_parallel_update_as_its_file_says(degrees):
    cosine = math.cos(math.radians(degrees))
    r, s, f, a = (x.detach() for x in some_lanes(64, 1, 256))
    r = r - r.mean(-1, keepdim=True)
    r = r / r.square().mean(-1, keepdim=True).sqrt()
    across = f - f.mean(-1, keepdim=True) - (f * r).mean(-1, keepdim=True) * r
    update = (
        cosine * r
        + math.sqrt(1 - cosine**2) * across / across.square().mean(-1, keepdim=True).sqrt()
    )
    low = [x.float() for x in (r, s, update, a)]
    exact, ours = nag.plain_rotate(*(x.double() for x in low))[0], nag.rotate(*low)[0]
    assert (ours.square().mean(-1).sqrt() - 1).abs().max() < 2e-3
    error = (ours - exact).norm(dim=-1).max().item() / 16
    if 0.6 < degrees:
        assert error < min(1e-3, 3e-7 / (1 - cosine**2))
    else:  # it turns the right way, but less
        turn, less = ((x - r).norm(dim=-1) / (a[..., 0] * 16) for x in (exact, ours.double()))
        assert (less < turn).all()


@pytest.mark.parametrize(
    "changes", [{}, dict(nag_directions=0), dict(nag_lane=False), dict(tied=False)], ids=str
)
@pytest.mark.parametrize(
    "n_layer, n_embd, init_scale", [(1, 128, 0.05), (8, 64, 0.05), (32, 128, 0.02), (64, 64, 0.1)]
)
def test_nag_starts_its_logits_at_the_same_size_at_any_depth(n_layer, n_embd, init_scale, changes):
    model = tiny(n_layer=n_layer, n_embd=n_embd, init_scale=init_scale, **changes)
    with torch.no_grad():
        logits = model(some_ids())[0]
    own = F.one_hot(
        some_ids(), 64
    ).bool()  # with tied matrices a token's own logit stands out, in every mode
    assert 0.5 < logits[~own].std().item() < 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(nag_directions=0),
        dict(nag_lane=False),
        dict(nag_beta=3.0, nag_alpha_power=0.1),
        dict(branch_scale="depth"),
    ],
    ids=str,
)
def test_nag_knows_what_its_norm_lane_will_be(changes):
    model = tiny(n_layer=32, n_embd=64, nag_first_logits=0.6, **changes)
    *_, (_, _, _, _, stream) = depth.walk(model, some_ids())
    heat = model.ends.g_dec + (stream.lane if changes.get("nag_lane", True) else 0)
    assert heat.exp().mean().item() == pytest.approx(0.6, rel=0.03)
    model = tiny(nag_first_logits=None)
    assert model.ends.g_dec.item() == pytest.approx(-math.log(32) / 2)


def test_nag_gates_have_their_own_learning_rate_and_no_decay():
    model = tiny()
    for kind in ("adamw", "muon"):
        groups = [
            g
            for opt in model.optimizers(kind, 4e-3, 1e-3, 0.1, (0.9, 0.95))
            for g in opt.param_groups
        ]
        (gates,) = (g for g in groups if any(p is model.ends.g_dec for p in g["params"]))
        assert (gates["peak"], gates["weight_decay"]) == (1e-3, 0.0)
        assert {p.numel() for p in gates["params"]} == {1, 32, 32 * 32}


def test_nag_compiles_to_one_kernel_forward_and_one_backward():
    from torch._inductor.utils import run_and_get_code

    r, s, f, a = some_lanes(4, 16, 64, dtype=torch.float32)
    compiled = torch.compile(nag.rotate, fullgraph=True)
    _, codes = run_and_get_code(
        lambda: torch.autograd.backward(compiled(r, s, f, a), (r.detach(), s.detach()))
    )
    assert [len(re.findall(r"^cpp_fused\w+ = ", code, re.M)) for code in codes] == [1, 1]


@pytest.mark.parametrize(
    "device, index", [("cuda", 0), ("cuda:1", 1), (torch.device("cuda", 1), 1)], ids=str
)
def test_a_gpu_is_made_ready_by_any_of_its_names(monkeypatch, device, index):
    chosen, precision = [], torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    machine.prepare_process(device)
    torch.set_float32_matmul_precision(precision)
    assert chosen == [index]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("kind", ["any", "parallel", "zero"])
@pytest.mark.parametrize("dtype, close", [(torch.float32, 2e-4), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("d", [128, 768, 1000, 2048, 4096])
def test_on_cuda_what_is_compiled_equals_float64(d, dtype, close, kind):
    g = torch.Generator().manual_seed(0)
    r, f, grad = (torch.randn(64, d, generator=g, dtype=torch.float64) for _ in range(3))
    r = r / r.square().mean(-1, keepdim=True).sqrt()
    f = {"any": f, "parallel": 3 * r + 0.5 * f, "zero": 0 * f}[kind]
    s, a = torch.zeros(64, 1, dtype=torch.float64), torch.full((64, 1), 0.3, dtype=torch.float64)
    lam, gamma = (
        torch.full((1,), 2.0, dtype=torch.float64),
        torch.rand(d, generator=g, dtype=torch.float64),
    )

    def turned(r, f):
        lane = dict(device=r.device, dtype=torch.promote_types(r.dtype, torch.float32))
        return nag.rotate(r, s.to(**lane), f, a.to(**lane))[0]

    def bounded(x, f):
        x = norms.upcast(x + f)
        return bhyt.bounded_tanh(
            x, x.square().mean(-1, keepdim=True), lam.to(x), gamma.to(x), 10.0
        ).to(f.dtype)

    for function in (turned, bounded):
        results = []
        for compiled in (False, True):
            place = dict(device="cuda", dtype=dtype) if compiled else dict(dtype=torch.float64)
            inputs = [x.to(dtype).to(**place).requires_grad_() for x in (r, f)]
            out = (torch.compile(function) if compiled else function)(*inputs)
            grads = torch.autograd.grad(out, inputs, grad.to(dtype).to(out))
            results.append([out, *(grads[:1] if kind == "zero" else grads)])
        for expected, got in zip(*results):
            error = (got.double().cpu() - expected).abs().max() / expected.abs().max()
            assert error < close, (function.__name__, error)


def test_walk_is_the_forward_and_gate_health_counts_what_is_shut():
    model, idx = shaken(tiny()).eval(), some_ids()
    assert all(len(list(depth.walk(shaken(tiny(residual=r)), idx))) == 4 for r in RESIDUALS)
    *_, (_, _, _, _, last) = depth.walk(model, idx)
    assert torch.equal(F.linear(*model.ends.readout(last, model.head.weight)), model(idx)[0])
    with torch.no_grad():
        model.blocks[0].mlp_residual.alpha.zero_()
        model.blocks[1].attn_residual.b.fill_(-100)
        health = depth.gate_health(model, idx)
    dropping = shaken(tiny(dropout=0.5)).train()
    assert (
        depth.gate_health(dropping, idx) == depth.gate_health(dropping, idx) and dropping.training
    )
    assert health["dead"] == 2 and health["floor"] == 0.5 and len(health["a"]) == 4
    steps = [
        depth.degrees(before.x, stream.x).item()
        for _, _, _, before, stream in depth.walk(model, idx)
    ]
    assert (
        steps[0] == pytest.approx(math.degrees(math.atan(health["a"][0])), rel=0.02)
        and steps[1] < 1e-3
    )


# ---------------------------------------------------------------------------------------------------------------------
# BHyT


def test_bhyt_equals_the_golden_with_its_gradients():
    z = {
        k: torch.from_numpy(np.asarray(v))
        for k, v in np.load(os.path.join(HERE, "goldens", "bhyt.npz")).items()
    }
    same = dict(rtol=2e-6, atol=2e-6)
    c = bhyt.attention_gain(z["w_v"], z["w_o"], 4, 2, 8)
    torch.testing.assert_close(c, z["c_attn"], **same)
    x, lam, gamma = (z[k].clone().requires_grad_() for k in ("x", "lam_attn", "gamma_attn"))
    v = x.square().mean(-1, keepdim=True)
    y = bhyt.bounded_tanh(x, v, lam, gamma, 10.0)
    torch.testing.assert_close(y, z["normed_attn"], **same)
    torch.testing.assert_close(y, z["exact_normed"], **same)
    y.backward(z["grad_out"])
    for ours, key in (
        (x.grad, "exact_grad_x"),
        (lam.grad, "exact_grad_lam"),
        (gamma.grad, "exact_grad_gamma"),
    ):
        torch.testing.assert_close(ours, z[key], **same)
    model = tiny(
        residual="bhyt", n_layer=1, n_head=4, n_kv_head=2, block_size=8
    )  # the modules, as a block uses them
    first, second = model.blocks[0].attn_residual, model.blocks[0].mlp_residual
    with torch.no_grad():
        model.blocks[0].attn.wv.weight.copy_(z["w_v"])
        model.blocks[0].attn.wo.weight.copy_(z["w_o"])
        first.norm.gain.copy_(z["gamma_attn"])
        second.norm.gain.copy_(z["gamma_mlp"])
    model.refresh()
    h, stream = first.read(norms.Stream(z["x"]))
    torch.testing.assert_close(h, z["normed_attn"], **same)
    h, stream = second.read(first.write(stream, z["attn_out"]))
    torch.testing.assert_close(h, z["normed_mlp"], **same)
    assert second.write(stream, h).lane is None


def test_the_cheap_tanh_is_tanh():
    z = torch.cat(
        [torch.linspace(-12, 12, 200001), torch.logspace(-30, 10, 1000), torch.tensor([0.0, -1e30])]
    )
    z.requires_grad_()
    t = bhyt.Tanh.apply(z)
    t.sum().backward()
    exact = torch.tanh(z.detach().double())
    assert (t - exact).abs().max() < 4e-7 and (z.grad - (1 - exact**2)).abs().max() < 8e-7
    torch.testing.assert_close(t, exact.float(), rtol=1e-6, atol=0)
    assert t.abs().max() <= 1 and bhyt.Tanh.apply(torch.tensor([math.nan])).isnan()
    wide = torch.randn(9, dtype=torch.float64).requires_grad_()
    assert torch.equal(bhyt.Tanh.apply(wide), torch.tanh(wide)) and torch.autograd.gradcheck(
        bhyt.Tanh.apply, wide
    )


def test_bhyt_gradients_stay_below_those_of_rmsnorm():
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        x, gamma = (
            torch.randn(1, 24, generator=g).double() * 3 + 0.5,
            torch.rand(24, generator=g).double() * 2,
        )
        lam = torch.rand(1, generator=g).double() * 4

        def ours(x, lam=lam, gamma=gamma):
            return bhyt.bounded_tanh(x, x.square().mean(-1, keepdim=True), lam, gamma, 10.0)

        def rms(x, gamma=gamma):
            return gamma * F.rms_norm(x, (24,), eps=1e-6)

        a, b = (torch.autograd.functional.jacobian(f, x)[0, :, 0] for f in (ours, rms))
        assert torch.linalg.matrix_norm(a, 2) <= torch.linalg.matrix_norm(b, 2)
        up = torch.randn(24, generator=g).double()
        assert (up @ a).norm() <= (up @ b).norm()


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_bhyt_saturates_for_no_more_features_than_chebyshev_allows(p):
    g = torch.Generator().manual_seed(0)
    spike = torch.full((1, 1000), 1e-3)
    spike[0, : round(1000 * (1 - p))] = 1.0  # the worst there is
    for x in (torch.randn(50, 1000, generator=g), torch.randn(50, 1000, generator=g) ** 5, spike,
              torch.randn(50, 1000, generator=g) / torch.randn(50, 1000, generator=g)):  # fmt: skip
        norm = bhyt.BoundedTanh(GPTConfig(n_embd=1000, bhyt_p=p, norm_eps=1e-12), lam=1.5)
        norm.reset_parameters()
        assert (norm(x).abs() > math.tanh(1.5) + 1e-6).float().mean(
            -1
        ).max() <= 1 - p + 1e-6  # beyond lam, that is


def test_bhyt_unit_starts_with_outputs_as_large_as_a_norms():
    x = torch.randn(64, 32)
    for unit, size in ((True, 1.0), (False, 0.2)):
        norm = GPT(GPTConfig(**TINY, residual="bhyt", bhyt_unit=unit)).blocks[0].attn_residual.norm
        assert norm(x).std().item() == pytest.approx(size, rel=0.05)


def test_bhyt_settings_of_lambda():
    learned, frozen = (tiny(residual="bhyt", bhyt_learned=x) for x in (True, False))
    assert learned.num_params() - frozen.num_params() == 4
    idx = some_ids()
    frozen(idx, idx.roll(-1, 1))[1].backward()
    assert (
        not any("lam" in n for n, _ in frozen.named_parameters())
        and "ends.norm.lam" not in frozen.state_dict()
    )
    learned(idx, idx.roll(-1, 1))[1].backward()
    lam = learned.blocks[0].attn_residual.norm.lam
    assert (
        lam.grad.abs() > 0
        and lam.item() == 2
        and learned.blocks[0].mlp_residual.norm.lam.item() == 1
    )
    assert tiny(residual="bhyt", bhyt_lambda=(2.0, 1.0, 0.5)).ends.norm.lam.item() == 0.5


def test_bhyt_reads_the_predicted_variance_and_refreshes_without_a_new_graph():
    model, idx = shaken(tiny(residual="bhyt")), some_ids()
    for block in model.blocks:
        block.compile(fullgraph=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    before = model(idx)[0]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for block in model.blocks:
            block.attn.wo.weight.mul_(3)
    model(idx)
    old = [block.attn_residual.c.item() for block in model.blocks]
    stale = model(idx)[0]
    model.refresh()
    assert [block.attn_residual.c.item() for block in model.blocks] == pytest.approx(
        [9 * c for c in old]
    )
    assert not torch.equal(model(idx)[0], stale) and not torch.equal(before, stale)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert {"blocks.0.attn_residual.c", "blocks.1.attn_residual.c"} <= set(model.state_dict())


def test_the_theory_of_bhyt_is_what_independent_inputs_would_do_and_the_script_draws_it(
    data, tmp_path, monkeypatch
):
    sys.path.insert(0, os.path.join(HERE, "runs"))
    import bhyt_theory as theory

    x, y = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 2, 4, 8], [2.0, 1, 3, 9]))
    assert theory.fit(x, x) == pytest.approx({"RMSE": 0, "R2": 1, "Pearson": 1, "Spearman": 1})
    r2, pearson = 1 - 4 / ((y - 3.75) ** 2).sum().item(), np.corrcoef(x, y)[0, 1]
    assert theory.fit(x, y) == pytest.approx(
        {"RMSE": 1.0, "R2": r2, "Pearson": pearson, "Spearman": 0.8}
    )
    for activation in ("gelu", "relu", "swiglu"):
        model = shaken(
            tiny(residual="bhyt", n_embd=64, n_head=4, n_kv_head=2, activation=activation)
        )
        block = model.blocks[0]
        mlp, gain, norm = block.mlp, block.mlp_residual.norm.gain.detach(), block.attn_residual.norm
        with torch.no_grad():
            if (
                mlp.gate is None
            ):  # the theory takes hidden units as uncorrelated: give each a sign of its own
                mlp.down.weight.mul_(torch.randn_like(mlp.down.weight).sign())
            sampled = mlp(0.7 * gain * torch.randn(20000, 64)).square().mean().item()
            assert theory.mlp_variance(mlp, gain, 0.49) == pytest.approx(sampled, rel=0.15)
            x = torch.randn(4000, 32, 64) * norm.gain * norm.lam / norm.kappa
            v = (
                block.attn.wv(x).mean(1).view(-1, 2, 1, 16).expand(-1, 2, 2, 16).flatten(1)
            )  # uniform attention
            added = theory.added_variance(block, 32, gain_aware=True).item()
            assert added == pytest.approx(block.attn.wo(v).square().mean().item(), rel=0.05)
    train(data, tmp_path, "--residual=bhyt", "--learning_rate=1e-2")
    monkeypatch.setattr(sys, "argv", ["", f"--out_dir={tmp_path}", "--tokens=512"])
    runpy.run_path(os.path.join(HERE, "runs", "bhyt_theory.py"), run_name="__main__")
    report = json.load(open(tmp_path / "variance.json"))
    model, windows = lora.load_model(tmp_path)[1], data_file.Windows(data, "val", 32)
    x = torch.tensor(
        np.stack([windows[i][:-1] for i in data_file.spread(windows, 512)]).astype(int)
    )
    walked = [*depth.walk(model, x)]
    for i, (_, residual, h, before, after) in enumerate(walked):
        out = (h / residual.norm.gain).square().mean().item()
        assert report["output"][i] == pytest.approx(out, rel=1e-3)
        if i % 2 == 0:
            assert report["output, at least"][i] < out < report["output, at most"][i]
            measured, predicted = after.x.square().mean(-1), after.lane[..., 0]
            assert report["measured"][i // 2] == pytest.approx(measured.mean().item(), rel=1e-3)
            assert report["predicted"][i // 2] == pytest.approx(predicted.mean().item(), rel=1e-3)
            rmse = (measured - predicted).square().mean().sqrt().item()
            assert report["RMSE"][i // 2] == pytest.approx(rmse, rel=1e-2)
    least, most = report["recursion"]["least"], report["recursion"]["most"]
    assert all(0 < a < b for a, b in zip(least, most))
    assert {"predicted.png", "bounded.png"} <= set(os.listdir(tmp_path)) and max(
        report["saturated"]
    ) < 0.01
    train(data, tmp_path / "nag")
    monkeypatch.setattr(theory, "out_dir", str(tmp_path / "nag"))
    monkeypatch.setattr(sys, "argv", ["", f"--out_dir={tmp_path / 'nag'}"])
    with pytest.raises(SystemExit, match="residual='nag' predicts no variance"):
        theory.main()


@pytest.mark.parametrize("residual", ["bhyt", "bhyt_exact"])
@pytest.mark.parametrize(
    "changes",
    [
        {}, dict(activation="swiglu", n_kv_head=1, bias=True),
        dict(branch_scale="depth", bhyt_lambda=(2.0, 1.0, 0.5), tied=False, moe_experts=3, moe_shared=8),
    ],
    ids=str,
)  # fmt: skip
def test_folded_equals_unfolded(residual, changes):
    model, idx = shaken(tiny(residual=residual, **changes)).eval(), some_ids()
    logits, text = model(idx)[0], generate.generate(model, idx[:, :4], 20, temperature=0)
    count = model.num_params()
    bhyt.fold(model)
    torch.testing.assert_close(model(idx)[0], logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(generate.generate(model, idx[:, :4], 20, temperature=0), text)
    assert model.num_params() == count - 2 * 2 * (32 + 1)
    with pytest.raises(ValueError, match="residual='lns' has nothing to fold"):
        bhyt.fold(tiny(residual="lns"))
    adapted = tiny(residual=residual)
    lora.adapt(adapted, 2, 4.0, 0.0, "wq")
    with pytest.raises(ValueError, match="merge it first"):
        bhyt.fold(adapted)


# ---------------------------------------------------------------------------------------------------------------------
# Mixture of experts, mixture of depths


def test_grouped_products_are_products_group_by_group_with_gradients():
    x, w = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((10, 4), (4, 3, 4)))
    ends = torch.tensor([3, 3, 9, 10], dtype=torch.int32)  # the second expert has none
    parts = [x[a:b] @ w[e].T for e, (a, b) in enumerate(((0, 3), (3, 3), (3, 9), (9, 10)))]
    torch.testing.assert_close(moe.grouped(x, w, ends), torch.cat(parts))
    assert torch.autograd.gradcheck(lambda x, w: moe.grouped(x, w, ends), (x, w))
    x, w = (
        torch.randn(10, 16).bfloat16().requires_grad_(),
        torch.randn(4, 8, 16).bfloat16().requires_grad_(),
    )
    results = []
    for form in (moe.grouped, moe.grouped_loop):
        y = form(x, w, ends)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, w))])
    for kernel, loop in zip(*results):
        torch.testing.assert_close(kernel, loop, rtol=2e-2, atol=2e-2)


def test_recomputation_leaves_the_balance_loss_of_the_forward_alone():
    model, idx = tiny(moe_experts=4, moe_balance="loss", moe_rate=0.5).train(), some_ids(2)
    losses = []
    for model.recompute in (False, True):
        loss = model(idx, idx)[1]
        before = [layer.penalty for layer in moe.layers(model)]
        loss.backward()
        assert all(
            a is b.penalty for a, b in zip(before, moe.layers(model), strict=True)
        )  # else its graph would stay
        losses.append(loss.item())
    assert (
        losses[0] == losses[1] and model.eval()(idx, idx)[1].item() < losses[0]
    )  # without the penalty


def test_experts_are_balanced_by_bias_or_by_loss():
    idx = some_ids(8)
    model = tiny(moe_experts=4, moe_rate=0.02, residual="prenorm")
    with torch.no_grad():
        model.blocks[0].mlp.bias[0] = 0.5  # every token chooses the first expert
    worst = []
    for _ in range(100):
        model(idx)
        load = moe.balance(moe.layers(model))
        torch.testing.assert_close(load.sum(1), torch.ones(2))
        worst.append(load[0].max().item())
    assert worst[-1] < 0.3 < worst[0]
    kept = moe.layers(model)[0].bias.clone()
    model.eval()(idx)
    assert torch.equal(moe.balance(moe.layers(model)), torch.zeros(2, 4)) and torch.equal(
        kept, model.blocks[0].mlp.bias
    )
    a, b = (tiny(moe_experts=4, moe_balance=how, moe_rate=0.5) for how in ("loss", "bias"))
    difference = a(idx, idx)[1] - b(idx, idx)[1]
    expected = 0.0
    for experts, (_, _, h, _, _) in zip(moe.layers(a), [*depth.walk(a, idx)][1::2]):
        s = experts.router(h.flatten(0, 1)).softmax(-1)
        share = F.one_hot(s.topk(2).indices, 4).float().mean((0, 1))
        expected += 0.5 * 4 * (share * s.mean(0)).sum()
    torch.testing.assert_close(difference, expected)
    assert torch.equal(a.eval()(idx, idx)[1], b.eval()(idx, idx)[1])
    assert a.num_params() - a.num_params(active=True) == 2 * 2 * (
        2 * 32 * 128
    )  # two of four experts, two blocks


ROUTED = [
    dict(residual=r, **experts, **routed)
    for r in RESIDUALS
    for experts in ({}, dict(moe_experts=3))
    for routed in ({}, dict(mod_on="both", mod_rate=0.4), dict(mod_on="both", mod_rate=0.4, mod_router="learned"))
    if (experts or routed) and (r == "nag" or routed.get("mod_router", "none" if not routed else "nag") != "nag")
] + [
    dict(mod_on="both", mod_rate=0.4, mod_router="random"), dict(mod_on="both", mod_rate=0.4, mod_fallback=True),
    dict(residual="bhyt", mod_on="both", mod_rate=0.4, mod_router="random"),
]  # fmt: skip


def routed(**changes):
    """A model whose thresholds are those of its own scores"""
    model = shaken(tiny(**changes))
    for _ in range(3):
        model(some_ids(4))
        if mod.routers(model):
            mod.balance(mod.routers(model), True, 0.4)
    return model.eval()


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_learned_router_s_score_is_part_of_the_output_in_every_mode(residual):
    model, idx = (
        shaken(tiny(residual=residual, mod_on="both", mod_rate=0.01, mod_router="learned")),
        some_ids(),
    )
    losses = []
    for b in (0.0, -3.0):
        for router in mod.routers(model):
            assert router.k == 32  # all tokens run
            torch.nn.init.constant_(router.b, b)
        losses.append(model(idx, idx)[1])
    assert abs(losses[0] - losses[1]) > 1e-3
    losses[0].backward()
    assert all(router.w.grad.abs().max() > 1e-4 for router in mod.routers(model))


@torch.no_grad()
def test_the_share_that_is_said_to_skip_does(monkeypatch):
    model, ran = routed(mod_on="both", mod_rate=0.4, mod_router="learned").eval(), []
    run = mod.Router.run_above_tau
    monkeypatch.setattr(
        mod.Router, "run_above_tau", lambda *a: (out := run(*a), ran.append(out[1]))[0]
    )
    with mod.switched(model, "collect"):
        model(some_ids())
    exact = 1 - torch.cat([runs.flatten() for runs in ran]).float().mean()
    assert 0.2 < exact < 0.6 and abs(mod.skipped(mod.routers(model)) - exact) < 0.01


@pytest.mark.parametrize("changes", ROUTED, ids=str)
@torch.no_grad()
def test_experts_and_skipping_decode_as_they_read_and_see_no_future(changes):
    model, idx = routed(**changes), some_ids(3, T=12)
    full = model(idx)[0]
    cache = generate.KVCache(model, 3, 20)
    parts = [model(part, cache=cache)[0] for part in idx.split([5, 3, 1, 1, 2], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)
    for t in (0, 3, 10):
        other = idx.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1 + t) % 64
        torch.testing.assert_close(model(other)[0][:, : t + 1], full[:, : t + 1])
    assert generate.generate(model, idx, 30, temperature=0).shape == (3, 42)


@torch.no_grad()
def test_an_mlp_computes_the_tokens_that_run_and_no_others():
    model, seen = routed(mod_on="both", mod_rate=0.4), []
    model.blocks[1].mlp.register_forward_hook(
        lambda mlp, args, y: seen.append(args[0].shape[:-1].numel())
    )
    shares = [
        row
        for x in (some_ids(8), some_ids(8, T=1))
        for row in depth.skipping(model, [(x, x)], [1])["skipped"]
    ]
    seen.clear()
    for x in (some_ids(8), some_ids(8, T=1)):
        model(x)
    assert seen == [round((1 - shares[3]) * 8 * 32), round((1 - shares[7]) * 8)] and seen[0] < 256


def test_experts_are_many_matrices_and_a_bfloat16_model_counts_them():
    model = tiny(moe_experts=4)
    muon, adamw = model.optimizers("muon", 1e-3, None, 0.1, (0.9, 0.95))
    stacked = {p for m in moe.layers(model) for p in m.parameters(recurse=False)}
    assert not stacked & {p for group in muon.param_groups for p in group["params"]}
    assert stacked <= {p for group in adamw.param_groups for p in group["params"]}
    idx = some_ids(20)  # 640 tokens: more than bfloat16 can count
    model.train()
    exact, half = model(idx, idx)[1].item(), tiny(moe_experts=4).bfloat16()(idx, idx)[1].item()
    assert half == pytest.approx(exact, rel=0.02)


def test_training_looks_ahead_and_is_not_what_is_reported():
    model, idx = routed(mod_on="both", mod_rate=0.4).train(), some_ids(3)
    other = idx.clone()
    other[:, 16:] = (other[:, 16:] + 1) % 64
    assert not torch.equal(model(idx)[0][:, :16], model(other)[0][:, :16])


@pytest.mark.parametrize("changes", [c for c in ROUTED if "mod_on" in c], ids=str)
def test_gathered_equals_dense_and_masked_with_gradients(changes, monkeypatch):
    model, idx = routed(**changes).double().train(), some_ids(3)
    results = []
    for dense in (False, True):
        if (
            dense
        ):  # all tokens are computed, and the router's write masks those that were not chosen
            monkeypatch.setattr(
                mod.Router, "run_rows", lambda router, sublayer, h, chosen: sublayer(h, None)
            )
        torch.manual_seed(0)
        model.zero_grad()
        logits, loss = model(idx, idx.roll(-1, 1))
        loss.backward()
        results.append([logits, *(p.grad for p in model.parameters())])
    for gathered, masked in zip(*results):
        torch.testing.assert_close(gathered, masked, rtol=1e-9, atol=1e-12)


def test_a_moving_k_does_not_recompile():
    model, idx = tiny(n_layer=4, mod_on="both", mod_rate=0.4), some_ids()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile_blocks()
    for turn in range(5):
        model(idx, idx)[1].backward()
        for i, router in enumerate(mod.routers(model)):
            router.share.fill_(0.2 + 0.05 * i + 0.1 * turn)
            router.update_k()
    assert (
        torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    )  # for one k, for any, and where they are alike


def test_rate_zero_is_the_dense_model():
    dense, routed = tiny(), tiny(mod_on="both", mod_rate=0.0)
    assert torch.equal(dense(some_ids())[0], routed(some_ids())[0]) and not mod.routers(routed)
    everyone = tiny(mod_on="both", mod_rate=0.4)  # and so is one that lets all tokens run
    everyone.load_state_dict(dense.state_dict(), strict=False)
    for router in mod.routers(everyone):
        router.share.fill_(1.0)
        router.update_k()
    torch.testing.assert_close(dense(some_ids())[0], everyone(some_ids())[0])


@torch.no_grad()
@pytest.mark.parametrize("fallback", [False, True])
def test_a_token_that_skips_stays_or_turns_towards_a_learned_direction(fallback):
    model, skipped = routed(mod_on="both", mod_rate=0.4, mod_fallback=fallback).double(), 0
    walked = zip(mod.routers(model), depth.walk(model, some_ids()), strict=True)
    for router, (_, residual, h, before, stream) in walked:
        rest = router.score(h, before, residual, 1.0) < router.tau
        r, a = before.x[rest], residual.turn(before.x)[rest] if fallback else 0.0
        if fallback:
            u = (router.v - router.v.mean()).expand_as(r)
            u = u - (u * r).sum(-1, keepdim=True) / (r * r).sum(-1, keepdim=True) * r
            r = (r + a * u / u.square().mean(-1, keepdim=True).sqrt()) / (1 + a * a).sqrt()
        torch.testing.assert_close(stream.x[rest], r, rtol=1e-6, atol=1e-6)
        skipped += int(rest.sum())
    assert skipped


def test_skipping_goes_by_the_share_of_the_largest_rotation():
    model, idx = shaken(tiny(mod_on="both", mod_rate=0.5)), some_ids()
    for sublayer, residual, h, before, stream in depth.walk(model.eval(), idx):
        router = model.blocks[0].attn_router
        residual.ramp.fill_(0.3)
        q = router.score(h, before, residual, 0.5)
        m = nag.modulator(
            before.x, residual.w, residual.b, residual.p, F.softplus(residual.raw_beta)
        )
        a = 0.5 * 0.3 * residual.alpha
        torch.testing.assert_close(q, (torch.atan(a * m) / torch.atan(a))[..., 0])
        assert 0 < q.min() and q.max() < 1
    counts = {}
    for where, blocks in (("all", 4), ("alternate", 2), ("inner", 2)):
        model = tiny(n_layer=4, mod_on="attention", mod_rate=0.5, mod_blocks=where)
        counts[where] = [block.attn_router is not None for block in model.blocks]
        assert sum(counts[where]) == blocks and not any(block.mlp_router for block in model.blocks)
    assert counts["inner"] == [False, True, True, False]


@pytest.mark.parametrize("shared", [True, False])
def test_tau_and_k_follow_from_the_scores(shared):
    model = tiny(n_layer=3, mod_on="both", mod_rate=0.3)
    q, group = torch.rand(6, 100000) ** torch.arange(1, 7)[:, None], mod.routers(model)
    for router, row in zip(group, q):
        bins = (row * mod.BINS).long()
        router.fresh.index_add_(0, bins, torch.ones_like(bins))
    mod.balance(group, shared, 0.3)
    for router, row in zip(group, q):
        exact = (
            (q if shared else row).quantile(0.3, dim=-1).mean()
            if not shared
            else q.flatten().sort().values[180000]
        )
        assert router.tau.item() == pytest.approx(exact.item(), abs=2e-3)
        assert router.k == pytest.approx(32 * (row >= exact).float().mean().item(), abs=0.6)
    assert sum(router.k for router in group) == pytest.approx(
        0.7 * 32 * 6, abs=3
    )  # each is rounded


@torch.no_grad()
@pytest.mark.parametrize("rate", [0.1, 0.35, 0.6])
def test_a_model_can_be_dialled_to_another_rate(rate):
    model = routed(mod_on="both", mod_rate=0.2)
    mod.calibrate(model, [some_ids(64, seed=s) for s in range(4)], True, rate)
    skipped = [
        1 - (router.score(h, before, residual, 1.0) >= router.tau).float().mean().item()
        for (_, residual, h, before, _), router in zip(
            depth.walk(model, some_ids(64, seed=9)), mod.routers(model)
        )
    ]
    assert np.mean(skipped) == pytest.approx(rate, abs=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Data


def make_data(directory, *argv):
    namespace = {"__file__": prepare_c4.__file__}
    prepare_c4.prepare(
        configurator.configure(namespace, argv=[f"--data_dir={directory}", *argv])[0]
    )
    return str(directory)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A little of the embedded corpus"""
    return make_data(
        tmp_path_factory.mktemp("data"),
        "--max_tokens=200000",
        "--max_val_tokens=20000",
        "--shard_tokens=60000",
    )


def tokens_of(directory, split):
    meta = data_file.read_meta(directory)
    shards = [
        data_file.open_shard(os.path.join(directory, s["file"]), meta, s["tokens"])
        for s in meta["splits"][split]["shards"]
    ]
    return np.concatenate(shards), [len(s) for s in shards]


TEXTS = [f"document {i}: " + "naïve <|endoftext|> 日本 " * (i % 7) for i in range(200)]


def write_texts(directory):
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = [
        json.dumps({"text": t, "url": f"https://example.org/{i}"}) for i, t in enumerate(TEXTS)
    ]
    (directory / "a.jsonl").write_text("\n".join(records))
    with gzip.open(directory / "a.json.gz", "wt") as file:
        file.write("\n".join(records))
    pq.write_table(pa.table({"text": TEXTS, "url": [""] * len(TEXTS)}), directory / "a.parquet")
    for i, text in enumerate(TEXTS[:20]):
        (directory / f"{i:03d}.txt").write_text(text)


def test_shards_hold_every_document_once_in_order_and_the_formats_agree(tmp_path):
    write_texts(tmp_path)
    train, val = ([t for t in TEXTS if prepare_c4.validates(t, 0.2) == v] for v in (False, True))
    assert 10 < len(val) < 90
    for source in ("a.jsonl", "a.json.gz", "a.parquet"):
        argv = [
            f"--source={tmp_path / source}",
            "--tokenizer=bytes",
            "--val_share=0.2",
            "--shard_tokens=1000",
        ]
        directory = make_data(tmp_path / ("shards" + source), *argv)
        for split, texts in (("train", train), ("val", val)):
            tokens, sizes = tokens_of(directory, split)
            assert sizes[:-1] == [1000] * (len(sizes) - 1) and len(sizes) > 1
            assert tokens.tolist() == [b for t in texts for b in (*t.encode(), 256)]
    directory = make_data(tmp_path / "txt", f"--source={tmp_path / '*.txt'}", "--tokenizer=bytes", "--val_share=0.0",
                          f"--val_source={tmp_path / '00*.txt'}")  # fmt: skip
    assert tokens_of(directory, "train")[0].tolist() == [
        b for t in TEXTS[:20] for b in (*t.encode(), 256)
    ]
    assert tokens_of(directory, "val")[0].tolist() == [
        b for t in TEXTS[:10] for b in (*t.encode(), 256)
    ]


def test_a_local_rank_file_needs_no_network_and_travels_with_the_shards(tmp_path):
    write_texts(tmp_path)
    tokens = [bytes([i]) for i in range(256)] + [b"do", b"docu"]
    ranks = "\n".join(f"{base64.b64encode(t).decode()} {i}" for i, t in enumerate(tokens))
    (tmp_path / "my.tiktoken").write_text(ranks)
    argv = [f"--source={tmp_path / 'a.jsonl'}", f"--tokenizer={tmp_path / 'my.tiktoken'}"]
    directory = make_data(tmp_path / "shards", *argv)
    (tmp_path / "my.tiktoken").unlink()
    meta = data_file.read_meta(directory)
    encoding = data_file.meta_tokenizer(directory, meta)
    assert (meta["vocab_size"], meta["eot"]) == (259, 258) == (encoding.n_vocab, encoding.eot_token)
    text = encoding.decode(tokens_of(directory, "train")[0].tolist())
    assert text.startswith(next(t for t in TEXTS if not prepare_c4.validates(t, 0.05)))
    assert 256 in tokens_of(directory, "train")[0]


def test_preparation_killed_anywhere_goes_on_as_if_nothing_had_happened(tmp_path, monkeypatch):
    write_texts(tmp_path)
    argv = [
        f"--source={tmp_path / 'a.jsonl'}",
        "--tokenizer=bytes",
        "--shard_tokens=500",
        "--max_tokens=4000",
        "--workers=1",
    ]
    whole = make_data(tmp_path / "whole", *argv)
    replace, countdown = os.replace, 0

    def dies(*args):
        nonlocal countdown
        countdown -= 1
        if countdown < 0:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", dies)
    for kills in itertools.count(1):
        countdown = (
            3 + kills % 3
        )  # death while a shard is renamed, or meta.json behind it, a little later each time
        try:
            broken = make_data(tmp_path / "broken", *argv)
            break
        except KeyboardInterrupt:
            pass
    assert kills > 3
    assert sorted(os.listdir(broken)) == sorted(os.listdir(whole))
    for name in os.listdir(whole):
        assert (
            open(os.path.join(whole, name), "rb").read()
            == open(os.path.join(broken, name), "rb").read()
        )


def test_preparation_refuses_what_it_cannot_do(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"body": "x"}\n')
    make_data(tmp_path / "made", f"--source={tmp_path / 'a.jsonl'}", "--tokenizer=bytes")
    for argv, message in (
        (["--source=c4", "--tokenizer=bytes"], "say how many you want with --max_tokens"),
        ([f"--source={tmp_path / 'none*.jsonl'}"], "no file matches"),
        (
            [f"--source={tmp_path / 'a.jsonl'}", "--tokenizer=bytes", "--max_tokens=1e15"],
            "GB are free",
        ),
        ([f"--source={tmp_path / 'bad.jsonl'}", "--tokenizer=bytes"], "record 0 has no text"),
        (["--shard_tokens=0", "--tokenizer=bytes"], "at least 1"),
        (["--max_val_tokens=0", "--tokenizer=bytes"], "at least 1"),
        (["--tokenizer=gpt5"], "tokenizer='gpt5': choose bytes, a .tiktoken file, or one of gpt2"),
        (["--tokenizer=my.tiktoken"], "my.tiktoken: no such tokenizer file"),
    ):
        with pytest.raises(SystemExit, match=re.escape(message)):
            make_data(tmp_path / str(random.random()), *argv)
    with pytest.raises(SystemExit, match="prepared with another made_from"):
        make_data(
            tmp_path / "made",
            f"--source={tmp_path / 'a.jsonl'}",
            "--tokenizer=bytes",
            "--val_share=0.3",
        )


def test_windows_tile_each_shard_and_wide_vocabularies_get_wide_tokens(data):
    windows = data_file.Windows(data, "train", 32)
    tokens, sizes = tokens_of(data, "train")
    assert sizes == [60000, 60000, 60000, 20000] and len(windows) == sum(
        (n - 1) // 32 for n in sizes
    )
    assert (
        windows[0].tolist() == tokens[:33].tolist()
        and windows[1].tolist() == tokens[32:65].tolist()
    )
    assert windows[(60000 - 1) // 32].tolist() == tokens[60000:60033].tolist()
    assert len({len(windows[i]) for i in range(len(windows))}) == 1
    assert data_file.token_dtype(65536).itemsize == 2 and data_file.token_dtype(65537).itemsize == 4


def test_batches_depend_on_seed_step_and_place_alone_and_cover_an_epoch_once(data):
    windows = data_file.Windows(data, "val", 32)
    n = len(windows)

    def step_of(world, micro_steps, step, batch_size=4, seed=1):
        loaders = [
            data_file.Loader(windows, batch_size, micro_steps, seed, rank, world)
            for rank in range(world)
        ]
        return [
            sorted(
                i for loader in loaders for m in range(micro_steps) for i in loader.indices(step, m)
            )
        ][0]

    assert (
        step_of(1, 4, 9) == step_of(2, 2, 9) == step_of(4, 1, 9) == step_of(2, 1, 9, batch_size=8)
    )
    assert step_of(1, 4, 9) != step_of(1, 4, 10) and step_of(1, 4, 9) != step_of(1, 4, 9, seed=2)
    loader = data_file.Loader(windows, 1, 1, seed=1)
    epochs = [
        [loader.indices(e * n + i, 0)[0] for i in range(n)] for e in range(3)
    ]  # three times around
    assert all(sorted(e) == list(range(n)) for e in epochs) and epochs[0] != epochs[1]
    for step in (0, 1, 2, 7, 8, 3, 0):  # read ahead, jump, go back
        x, y = loader.batch(step, 0)
        row = windows[loader.indices(step, 0)[0]].tolist()
        assert x[0].tolist() == row[:-1] and y[0].tolist() == row[1:]


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train(data, out, *argv, script="train.py"):
    """Run a script in this process, for what it costs to import torch in another."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    argv, sys.argv = sys.argv, [script, *TINY_RUN, f"--data_dir={data}", f"--out_dir={out}", *argv]
    try:
        return runpy.run_path(os.path.join(HERE, script), run_name="__main__")
    finally:
        sys.argv = argv
        for s, handler in handlers.items():
            signal.signal(s, handler)


def records(out):
    lines = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]
    assert "settings" in lines[0]["run"]
    return [line for line in lines if "step" in line]


def losses(out):
    return [r["loss"] for r in records(out) if "loss" in r]


def checkpoint(out, name=None):
    path = checkpoints.newest(str(out)) if name is None else os.path.join(out, name)
    if not os.path.isdir(path):
        return torch.load(path, weights_only=True)
    return checkpoints.load(path) | {"optimizers": checkpoints.read_tensors(path, "optimizers")}


def assert_same(a, b):
    """Bit for bit, all the way down"""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for k in a:
            assert_same(a[k], b[k])
    elif isinstance(a, list):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_run_logs_what_it_did(data, tmp_path):
    out = tmp_path / "run"
    train(
        data,
        out,
        "--max_iters=40",
        "--eval_interval=10",
        "--learning_rate=1e-2",
        "--keep_interval=15",
        "--log_grad_norms=True",
    )
    rows = records(out)
    assert [r["step"] for r in rows] == list(range(41)) and rows[40]["tokens"] == 40 * 4 * 32
    assert (
        rows[40]["val_loss"] < rows[0]["val_loss"] - 1
        and abs(rows[0]["val_loss"] - math.log(257)) < 0.4
    )
    assert {
        "step",
        "tokens",
        "loss",
        "val_loss",
        "lr",
        "grad_norm",
        "tok_s",
        "mfu",
        "flops",
    } <= set(rows[1])
    names = dict(GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32)).named_parameters())
    norms_logged = rows[1]["grad_norms"]
    assert norms_logged.keys() == names.keys()
    assert math.hypot(*norms_logged.values()) == pytest.approx(rows[1]["grad_norm"], rel=1e-4)
    assert {"ckpt.pt", *(f"ckpt_0000{n}.pt" for n in ("00", "15", "30")), "log.jsonl"} == set(
        os.listdir(out)
    )
    header = json.loads(open(out / "log.jsonl").readline())["run"]
    assert {"settings", "versions", "device", "git", "params"} <= set(header)
    assert header["params"]["all"] == sum(p.numel() for p in names.values())
    assert rows[40]["flops"] == 40 * 128 * tiny(vocab_size=257).flops_per_token()


SAME = ["--dropout=0.1", "--lr_decay_iters=6", "--eval_interval=2", "--save_interval=1"]


@pytest.mark.parametrize(
    "more",
    [
        ["--alpha_warmup_iters=5"],
        ["--optimizer=muon", "--residual=dyt"],
        ["--gradient_accumulation_steps=2", "--mod_on=both", "--mod_rate=0.4"],
        [
            "--residual=bhyt",
            "--bhyt_interval=2",
            "--moe_experts=4",
            "--mod_on=mlp",
            "--mod_rate=0.3",
            "--mod_router=learned",
        ],
    ],
    ids=str,
)
def test_resumed_equals_never_stopped_bit_for_bit(data, tmp_path, more):
    train(data, tmp_path / "one", *SAME, *more)
    train(data, tmp_path / "two", *SAME, *more, "--max_iters=3")
    train(data, tmp_path / "two", *SAME, *more, "--init_from=resume")
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    for key in ("model", "optimizers", "step", "best_val_loss", "flops"):
        assert_same(one[key], two[key])
    assert losses(tmp_path / "one") == losses(tmp_path / "two")


def test_resume_forgets_what_was_logged_after_the_checkpoint(data, tmp_path):
    train(data, tmp_path, "--save_interval=2", "--max_iters=4", "--lr_decay_iters=6")
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write(
            json.dumps({"step": 5, "loss": 0.0}) + "\n" + '{"step": 6, "lo'
        )  # the last one torn by a crash
    train(data, tmp_path, "--init_from=auto", "--lr_decay_iters=6")
    assert [r["step"] for r in records(tmp_path)] == list(range(7)) and 0.0 not in losses(tmp_path)


def test_a_run_killed_before_its_first_step_can_be_started_again(data, tmp_path, monkeypatch):
    def dies(*args, **kw):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", dies)
        with pytest.raises(KeyboardInterrupt):
            train(data, tmp_path, "--init_from=auto")
    train(data, tmp_path, "--init_from=auto")
    train(data, tmp_path / "straight")
    assert [r["step"] for r in records(tmp_path)] == list(range(7))
    assert losses(tmp_path) == losses(tmp_path / "straight")


def test_evaluation_does_not_touch_training_and_is_one_number(data, tmp_path):
    for name, interval, batch in (("a", 1, 4), ("b", 6, 4), ("c", 0, 4)):
        train(
            data,
            tmp_path / name,
            f"--eval_interval={interval}",
            f"--batch_size={batch}",
            "--dropout=0.1",
        )
    assert losses(tmp_path / "a") == losses(tmp_path / "b") == losses(tmp_path / "c")
    assert all(r["val_loss"] is None for r in records(tmp_path / "c"))
    _, model = lora.load_model(tmp_path / "a" / "ckpt.pt")
    windows = data_file.Windows(data, "val", 32)
    places = data_file.spread(windows, 512)
    by_hand = [model(torch.tensor(windows[i][None, :-1].astype(int)))[0][0] for i in places]
    targets = [torch.tensor(windows[i][1:].astype(int)) for i in places]
    exact = torch.stack([F.cross_entropy(x, y) for x, y in zip(by_hand, targets)]).mean().item()
    assert records(tmp_path / "a")[-1]["val_loss"] == pytest.approx(exact, abs=1e-5)
    for batch_size in (1, 3, 16, 100):
        for model.loss_chunk in (None, 50):
            batches = data_file.eval_batches(windows, places, batch_size, "cpu")
            assert model_file.evaluate(model, batches) == pytest.approx(exact, abs=1e-5)
    shares = []  # two ranks by hand: their sums, not their means, make the number
    for rank in (0, 1):
        batches = list(data_file.eval_batches(windows, range(13), 4, "cpu", rank, 2))
        shares.append(sum(int((y[:, 0] >= 0).sum()) for _, y in batches))
        assert len(batches) == 2
    assert sum(shares) == 13


TRAIN_FLIPS = [
    "init_from=PATH", "max_iters=5", "flops_budget=1e7", "batch_size=2", "gradient_accumulation_steps=2",
    "total_batch_tokens=256", "seed=2", "optimizer=muon", "learning_rate=1e-3", "gate_lr=0.1", "weight_decay=0.5",
    "beta1=0.5", "beta2=0.5", "grad_clip=0.01", "schedule=wsd", "warmup_iters=4", "warmup_share=0.5",
    "lr_decay_iters=12", "min_lr=0.0", "dtype=bfloat16", "alpha_warmup_iters=4",
]  # fmt: skip


@pytest.fixture(scope="session")
def base_run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("flips") / "base"
    train(data, out)
    return out


@pytest.mark.parametrize("flip", TRAIN_FLIPS)
def test_every_training_setting_changes_the_losses(data, tmp_path, base_run, flip):
    train(data, tmp_path, "--" + flip.replace("PATH", str(base_run / "ckpt.pt")))
    assert losses(tmp_path) != losses(base_run)


@pytest.mark.parametrize("compile", [False, True])
def test_training_with_less_memory_is_the_same_training(data, tmp_path, base_run, compile):
    train(data, tmp_path, "--recompute=True", "--loss_chunk=50", f"--compile={compile}")
    assert losses(tmp_path) == pytest.approx(losses(base_run), abs=1e-4)


def test_alpha_warms_up_and_the_log_has_the_health_of_the_gates(data, tmp_path, base_run, capsys):
    train(data, tmp_path, "--alpha_warmup_iters=10", "--eval_interval=2", "--nag_alpha_power=20")
    ramps = [
        value for name, value in checkpoint(tmp_path)["model"].items() if name.endswith(".ramp")
    ]
    assert torch.equal(torch.stack(ramps), torch.full((4, 1), 0.6))
    assert [len(r["gates"]["a"]) for r in records(tmp_path) if r["val_loss"]] == [4] * 4
    assert "warning" not in capsys.readouterr().out
    last = records(base_run)[-1]["gates"]
    assert last["dead"] == last["floor"] == 0 and 0.3 < last["a"][0] < 0.7
    train(data, tmp_path / "on", f"--init_from={tmp_path / 'ckpt.pt'}", "--nag_alpha_power=20")
    assert all(
        v == 1 for n, v in checkpoint(tmp_path / "on")["model"].items() if n.endswith(".ramp")
    )
    assert "warning: 3 of 4 sublayers turn next to nothing" in capsys.readouterr().out
    train(data, tmp_path / "no", "--residual=lns")
    assert "gates" not in records(tmp_path / "no")[-1]


def test_learning_rates(data, tmp_path):
    def rates(*argv):
        out = tmp_path / str(random.random())
        train(
            data,
            out,
            "--max_iters=20",
            "--learning_rate=1.0",
            "--eval_interval=0",
            "--grad_clip=1e-9",
            *argv,
        )
        return [r["lr"] for r in records(out)]

    cosine = rates("--warmup_iters=4", "--min_lr=0.5")
    assert cosine[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert cosine[4:] == pytest.approx(
        [0.5 + 0.25 * (1 + math.cos(math.pi * i / 16)) for i in range(16)]
    )
    wsd = rates("--warmup_share=0.1", "--schedule=wsd", "--wsd_share=0.5", "--min_lr=0.0")
    assert wsd == pytest.approx([1 / 3, 2 / 3] + [1.0] * 9 + [1 - i / 10 for i in range(1, 10)])


def test_flops_budget_ends_exactly_there(data, tmp_path):
    step = 128 * tiny(vocab_size=257).flops_per_token()
    train(data, tmp_path, f"--flops_budget={3.5 * step}", "--max_iters=100")
    last = records(tmp_path)[-1]
    assert last["step"] == 4 and last["flops"] == 4 * step and last["lr"] == pytest.approx(2.2e-3)


def poison(monkeypatch, bad_calls):
    """Make the loss of these training forwards infinite."""
    calls, forward = itertools.count(), GPT.forward

    def poisoned(self, idx, targets=None):
        logits, loss = forward(self, idx, targets)
        return logits, loss * math.inf if self.training and next(calls) in bad_calls else loss

    monkeypatch.setattr(GPT, "forward", poisoned)


def test_a_bad_step_is_skipped_and_counted(data, tmp_path, monkeypatch):
    poison(monkeypatch, {2})
    train(data, tmp_path, "--max_bad_steps=2", "--keep_interval=1")
    assert [r["bad_steps"] for r in records(tmp_path)[1:]] == [0, 0, 1, 0, 0, 0]
    assert records(tmp_path)[3]["loss"] is None and not (tmp_path / "ckpt_000003.pt").exists()
    updates = {
        s: checkpoint(tmp_path, f"ckpt_{s:06d}.pt")["optimizers"][0][0]["step"].item()
        for s in (2, 4, 6)
    }
    assert updates == {2: 2, 4: 3, 6: 5}


def test_bad_steps_in_a_row_stop_the_run_and_leave_the_checkpoint(data, tmp_path, monkeypatch):
    poison(monkeypatch, {3, 4, 5})
    with pytest.raises(SystemExit, match="2 steps in a row"):
        train(data, tmp_path, "--max_bad_steps=2", "--save_interval=3")
    assert checkpoint(tmp_path)["step"] == 3 and all(
        p.isfinite().all() for p in checkpoint(tmp_path)["model"].values()
    )


def test_a_disk_that_fills_up_leaves_the_last_checkpoint(data, tmp_path):
    train(data, tmp_path, "--max_iters=3", "--lr_decay_iters=6")
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(
            SystemExit, match="step 6 could not be saved as .*the checkpoints before it are intact"
        ):
            train(data, tmp_path, "--init_from=resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoint(tmp_path)["step"] == 3
    assert not glob.glob(str(tmp_path / "*.tmp"))
    train(data, tmp_path, "--init_from=resume")
    assert checkpoint(tmp_path)["step"] == 6


def spoil(data, to, name, change):
    """A copy of the data with one file changed: bytes -> bytes, or None to remove it"""
    for file in os.listdir(data):
        content = open(os.path.join(data, file), "rb").read()
        if file == name:
            if change is None:
                continue
            content = change(content)
        (to / file).write_bytes(content)
    return to


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("meta.json", None, "no meta.json"),
        (
            "meta.json",
            lambda b: b.replace(b"60000", b"59999"),
            "holds 60000 tokens, meta.json says 59999",
        ),
        ("train_00001.bin", None, "train_00001.bin is listed in meta.json but missing"),
        ("train_00001.bin", lambda b: b[:-10], "train_00001.bin is truncated"),
        ("train_00001.bin", lambda b: b[:20], "train_00001.bin is no shard"),
        ("train_00001.bin", lambda b: b"x" + b[1:], "train_00001.bin is no shard: it starts with"),
        ("train_00001.bin", lambda b: b[:8] + b"\x09" + b[9:], "has format version 9"),
        ("train_00001.bin", lambda b: b[:30] + b"x" + b[31:], "made with another tokenizer"),
        ("meta.json", lambda b: b.replace(b'"complete": true', b'"complete": false'), "cut short"),
    ],
)
def test_bad_data_is_refused_with_its_name(data, tmp_path, name, change, message):
    (tmp_path / "data").mkdir()
    bad = spoil(data, tmp_path / "data", name, change)
    with pytest.raises(SystemExit, match=re.escape(message)):
        train(bad, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--n_lyer=3"], "the nearest is 'n_layer'"),
        (["--residual=prenrm"], "choose one of none, postnorm"),
        (["--optimizer=sgd"], "optimizer='sgd': must be adamw or muon"),
        (["--schedule=step"], "schedule='step': must be cosine or wsd"),
        (["--dtype=float16"], "dtype='float16': must be auto, float32 or bfloat16"),
        (["--shard=zero"], "shard='zero': must be none or fsdp"),
        (["--shard=fsdp"], "use torchrun"),
        (["--batch_size=0"], "batch_size=0: must be above 0"),
        (["--n_head=3"], "n_embd=32 does not divide into n_head=3"),
        (["--vocab_size=100"], "set --vocab_size=257 or more"),
        (["--data_dir=/nowhere"], "/nowhere holds no prepared data"),
        (["--block_size=30000"], "shorter than one window"),
        (
            ["--total_batch_tokens=200"],
            "200 tokens a step do not divide over 1 ranks in sequences of 32 tokens",
        ),
        (
            ["--total_batch_tokens=128", "--gradient_accumulation_steps=2"],
            "total_batch_tokens and gradient_accum",
        ),
        (["--branch_from=x", "--init_from=y"], "branch_from starts a new run"),
        (["--branch_from=/nowhere"], "/nowhere: no such checkpoint"),
        (["--val_part=half"], "val_part='half': must be all, tune or report"),
        (["--device=mps"], "device='mps': torch sees no Apple GPU"),
        (["--warmup_share=2"], "warmup_share=2.0: must be a share"),
        (["--init_from=resume"], "no such checkpoint"),
        (["--init_from=/nowhere.pt"], "/nowhere.pt: no such checkpoint"),
        ([f"--init_from={__file__}"], "test_all.py is no checkpoint of train.py"),
        ([f"--init_from={HERE}"], "ckpt.pt: no such checkpoint"),
        (["--device=tpu"], "device='tpu': must be auto, cpu, mps"),
        (["--total_batch_tokens=-128"], "total_batch_tokens=-128: must be above 0"),
        (["--flops_budget=0"], "flops_budget=0.0: must be above 0"),
        (
            ["--alpha_warmup_iters=9", "--residual=lns"],
            "alpha_warmup_iters=9 needs a mode that rotates",
        ),
        (["--bf16_stream=True", "--dtype=float32"], "bf16_stream=True needs dtype='bfloat16'"),
        (["--seed=-1"], "seed=-1: must be at least 0"),
        (["--min_lr=1.0"], "min_lr=1.0: must be from 0 to learning_rate"),
        (["--n_kv_head=0"], "n_kv_head=0: give at least 1"),
        (["--rope_base=0"], "rope_base=0.0: must be above 0"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_writes_nothing(data, tmp_path, argv, message):
    with pytest.raises(SystemExit, match=re.escape(message)) as stop:
        train(data, tmp_path / "out", *argv)
    assert "\n" not in str(stop.value) and not (tmp_path / "out").exists()


def test_a_run_is_never_overwritten_or_resumed_in_another_shape(data, tmp_path):
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    (tmp_path / "x.tiktoken").write_text("\n".join(lines))
    source = [f"--source={__file__}", f"--val_source={__file__}", "--max_tokens=5000"]
    other = make_data(tmp_path / "other", *source, f"--tokenizer={tmp_path / 'x.tiktoken'}")
    train(data, tmp_path / "run")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in os.listdir(tmp_path / "run")}
    for argv, message in (
        ([], "already holds a run"),
        (["--init_from=resume", "--n_embd=64"], "was trained with n_embd=32, not 64"),
        (["--init_from=resume", "--residual=lns"], "was trained with residual='nag', not 'lns'"),
        (["--init_from=resume", f"--data_dir={other}"], "was trained on another tokenizer"),
        (
            ["--init_from=resume", "--total_batch_tokens=64"],
            "was trained with tokens_per_step=128, not 64",
        ),
        (
            ["--init_from=resume", "--optimizer=muon"],
            "was trained with optimizer='adamw', not 'muon'",
        ),
        (["--init_from=resume", "--seed=3"], "was trained with seed=1337, not 3"),
    ):
        with pytest.raises(SystemExit, match=message):
            train(data, tmp_path / "run", *argv)
    assert before == {
        name: (tmp_path / "run" / name).read_bytes() for name in os.listdir(tmp_path / "run")
    }
    train(
        data,
        tmp_path / "tuned",
        f"--init_from={tmp_path / 'run' / 'ckpt.pt'}",
        "--learning_rate=1e-9",
        "--dropout=0.1",
    )
    assert records(tmp_path / "tuned")[0]["val_loss"] == pytest.approx(
        records(tmp_path / "run")[-1]["val_loss"], abs=1e-5
    )


def start(data, out, *argv, ranks=0, restarts=0):
    """train.py in a process of its own, or under torchrun in several"""
    launcher = [sys.executable]
    if ranks:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            f"--max-restarts={restarts}",
        ]
    command = [
        *launcher,
        os.path.join(HERE, "train.py"),
        *TINY_RUN,
        f"--data_dir={data}",
        f"--out_dir={out}",
        *argv,
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=env, **pipes)


def wait_for(path, process, seconds=60):
    for _ in range(seconds * 20):
        if os.path.exists(path):
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    raise AssertionError(f"{path} did not come")


def test_ddp_fsdp_and_one_process_give_one_curve_and_resume_exactly(data, tmp_path):
    steps = [
        "--max_iters=20",
        "--lr_decay_iters=20",
        "--gradient_accumulation_steps=4",
        "--eval_interval=10",
    ]
    train(data, tmp_path / "one", *steps)
    started = {
        "ddp": start(data, tmp_path / "ddp", *steps, ranks=2),
        "fsdp": start(data, tmp_path / "fsdp", *steps, "--shard=fsdp", ranks=2),
    }
    for name, process in started.items():
        output = process.communicate()[0]
        assert process.returncode == 0, output
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
        val = [
            [r["val_loss"] for r in records(tmp_path / n) if r["val_loss"]] for n in (name, "one")
        ]
        assert val[0] == pytest.approx(val[1], abs=1e-4)
    for shard, first in (("none", "ddp"), ("fsdp", "fsdp")):
        for more in (["--max_iters=10"], ["--init_from=resume"]):
            process = start(
                data, tmp_path / (first + "2"), *steps, *more, f"--shard={shard}", ranks=2
            )
            output = process.communicate()[0]
            assert process.returncode == 0, output
        one, two = checkpoint(tmp_path / first), checkpoint(tmp_path / (first + "2"))
        for key in ("model", "optimizers"):
            assert_same(one[key], two[key])
    more = ["--init_from=resume", "--max_iters=22", "--shard=none"]
    train(data, tmp_path / "fsdp2", *steps, *more)  # one process goes on


def test_bhyts_c_is_the_same_sharded_and_refreshed_when_due(data, tmp_path):
    steps = [
        "--residual=bhyt",
        "--bhyt_unit=True",
        "--max_iters=4",
        "--gradient_accumulation_steps=2",
    ]
    train(data, tmp_path / "one", *steps, "--bhyt_interval=3")
    for name, more in (("fsdp", ["--shard=fsdp"]), ("ddp", [])):
        process = start(data, tmp_path / name, *steps, "--bhyt_interval=3", *more, ranks=2)
        output = process.communicate()[0]
        assert process.returncode == 0, output
    train(data, tmp_path / "before", *steps, "--max_iters=3", "--lr_decay_iters=4")
    _, model = lora.load_model(tmp_path / "before" / "ckpt.pt")
    saved = checkpoint(tmp_path / "before")["model"]
    stale = [saved[f"blocks.{b}.attn_residual.c"].item() for b in range(2)]
    for b, block in enumerate(model.blocks):
        for run in ("one", "fsdp", "ddp"):
            c = checkpoint(tmp_path / run)["model"][f"blocks.{b}.attn_residual.c"].item()
            assert c == pytest.approx(
                block.attn_residual.c.item(), rel=1e-4
            ) and c != pytest.approx(stale[b], rel=1e-3)


def test_ranks_share_the_default_batch_or_refuse_one_that_does_not_divide(data, tmp_path):
    train(data, tmp_path / "one")
    for ranks in (2, 3):
        process = start(data, tmp_path / str(ranks), ranks=ranks)
        output = process.communicate()[0]
        if ranks == 2:
            assert (
                process.returncode == 0
                and "128 tokens = 2 ranks x 1 micro-steps x 2 x 32" in output
            ), output
            assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert (
        process.returncode != 0
        and "128 tokens a step do not divide over 3 ranks in sequences of 32" in output
    )
    assert not (tmp_path / "3").exists()


LONG = ["--max_iters=100000", "--eval_interval=0", "--save_interval=1"]


@pytest.mark.parametrize("ranks", [0, 2])
def test_sigterm_saves_and_exits_with_zero(data, tmp_path, ranks):
    process = start(
        data, tmp_path, *LONG, "--save_interval=0", "--gradient_accumulation_steps=2", ranks=ranks
    )
    wait_for(tmp_path / "log.jsonl", process)
    while (tmp_path / "log.jsonl").read_text().count("\n") < 4:
        time.sleep(0.05)
    target = process.pid
    if ranks:  # the launcher has children of its own: signal a worker, whose word reaches the other
        target = int(
            subprocess.run(
                ["pgrep", "-P", str(process.pid), "-f", "train.py"], capture_output=True, text=True
            ).stdout.split()[0]
        )
    os.kill(target, signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "stopped by a signal" in output, output
    step = checkpoint(tmp_path)["step"]
    assert records(tmp_path)[-1]["step"] == step
    train(
        data,
        tmp_path,
        "--init_from=resume",
        "--gradient_accumulation_steps=2",
        f"--max_iters={step + 2}",
    )
    assert checkpoint(tmp_path)["step"] == step + 2


def test_kill_9_at_any_moment_leaves_a_checkpoint_that_loads(data, tmp_path):
    reached = 0
    for pause in (0.0, 0.13, 0.29):
        process = start(data, tmp_path, *LONG, "--init_from=auto")
        wait_for(tmp_path / "ckpt.pt", process)
        while checkpoint(tmp_path)["step"] <= reached:
            time.sleep(0.02)
        time.sleep(pause)
        process.kill()
        process.wait()
        reached = checkpoint(tmp_path)["step"]
    assert [r["step"] for r in records(tmp_path)][:reached] == list(range(1, reached + 1))


def test_torchrun_restarts_a_killed_worker_and_the_run_goes_on(data, tmp_path):
    process = start(
        data, tmp_path, *LONG, "--init_from=auto", "--max_iters=400", ranks=1, restarts=1
    )
    wait_for(tmp_path / "ckpt.pt", process)
    while checkpoint(tmp_path)["step"] < 3:
        time.sleep(0.05)
    worker = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "train.py"], capture_output=True, text=True
    ).stdout.split()[0]
    os.kill(int(worker), signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert checkpoint(tmp_path)["step"] == 400
    headers = [
        json.loads(line)["run"]["from_step"]
        for line in open(tmp_path / "log.jsonl")
        if '"run"' in line
    ]
    assert len(headers) == 2 and headers[1] > 0


def test_training_needs_neither_datasets_nor_wandb(data, tmp_path, monkeypatch):
    for name in ("datasets", "wandb", "lm_eval", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    train(data, tmp_path)


def test_wandb_gets_the_records_when_asked(data, tmp_path, monkeypatch):
    seen = []
    fake = SimpleNamespace(
        init=lambda **kw: seen.append(kw), log=lambda record, step: seen.append(step)
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(data, tmp_path, "--wandb_log=True", "--wandb_project=mine")
    begun, *steps = seen
    assert begun["project"] == "mine" and steps == [*range(7)]
    train(data, tmp_path, "--wandb_log=True", "--init_from=resume", "--max_iters=7")
    assert seen[8]["id"] == begun["id"] and seen[8]["resume"] == "allow" and seen[9:] == [7]


# ---------------------------------------------------------------------------------------------------------------------
# eval.py, plot.py, bench.py, runs/, README and the house rules


@pytest.fixture(scope="session")
def two_runs(data, tmp_path_factory):
    """The same run with two seeds, and another mode"""
    at = tmp_path_factory.mktemp("runs")
    for name, *argv in (("a", "--seed=1"), ("b", "--seed=2"), ("c", "--residual=lns")):
        train(data, at / name, *argv)
    train(
        data, at / "d", "--residual=bhyt", "--mod_on=both", "--mod_rate=0.3", "--mod_router=learned"
    )
    return at


def script(name, *argv):
    """Run another script in this process"""
    argv, sys.argv = sys.argv, [name, *map(str, argv)]
    try:
        return runpy.run_path(os.path.join(HERE, name), run_name="__main__")
    finally:
        sys.argv = argv


def test_eval_reports_loss_depth_and_a_sample(data, two_runs, capsys):
    argv = [
        "--max_new_tokens=9",
        "--eval_tokens=512",
        "--depth_tokens=640",
        "--prompt=def ",
        "--temperature=0",
    ]
    argv += ["--dtype=float32"]
    script("eval.py", f"--out_dir={two_runs / 'a'}", *argv)
    report = json.load(open(two_runs / "a" / "eval.json"))
    assert report["loss"]["loss"] == pytest.approx(
        records(two_runs / "a")[-1]["val_loss"], abs=1e-5
    )
    assert report["sample"].startswith("def ") and "def " in capsys.readouterr().out
    _, model = lora.load_model(two_runs / "a" / "ckpt.pt")
    windows = data_file.Windows(data, "val", 32)
    x = torch.tensor(
        np.stack([windows[i][:-1] for i in data_file.spread(windows, 640)]).astype(int)
    )
    stream, rope, seen = model.ends.embed(model.embed(x)), (model.cos, model.sin), report["depth"]
    begin = (stream.x * stream.lane.exp()).detach().double()
    for layer in range(3):
        s = (stream.x * stream.lane.exp()).detach().double()  # NAG's lanes as one
        square, mean = s.square().mean(-1), s.mean(-1)
        fourth, rms, largest = (
            (s - mean[..., None]).pow(4).mean(-1),
            square.sqrt(),
            s.abs().max(-1).values,
        )
        for key, value in (
            ("variance", (square - mean**2) * 32 / 31), ("norm", rms * 32**0.5), ("max", largest),
            ("magnitude", s.abs().mean(-1)), ("max/rms", largest / rms), ("kurtosis", fourth / (square - mean**2) ** 2),
        ):  # fmt: skip
            assert seen[key][layer] == pytest.approx(value.mean().item(), rel=1e-4), key
        if layer:
            angle = torch.acos(F.cosine_similarity(begin, s, dim=-1)).rad2deg().mean().item()
            assert seen["from embedding"][2 * layer - 1] == pytest.approx(angle, rel=1e-3)
        stream = model.blocks[layer](stream, rope) if layer < 2 else stream
    assert len(seen["rotation"]) == len(seen["alpha"]) == 4 and len(seen["sink"]) == 2
    for alpha, a, rotation in zip(seen["alpha"], seen["a"], seen["rotation"]):
        assert 0 < a < alpha and rotation == pytest.approx(math.degrees(math.atan(a)), rel=0.05)
    p = model(x)[0].detach().softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    pair = torch.stack([stream.lane[..., 0].detach().flatten(), entropy.flatten()])
    assert seen["norm and entropy"] == pytest.approx(np.corrcoef(pair)[0, 1], abs=1e-3)
    for argv, message in (
        (["--what=loss,dept"], "dept is not one of"), (["--checkpoint=x.pt"], "no such checkpoint"),
        (["--data_dir=/nowhere"], "no prepared data"), (["--limit=3"], "limit=3 is for tasks"),
        (["--what=depth", "--text=x"], "text='x' is for loss"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=message):
            script("eval.py", f"--out_dir={two_runs / 'a'}", *argv)


def test_the_sink_is_the_share_of_attention_that_the_first_token_gets():
    model, h = shaken(tiny(n_head=4, n_kv_head=2)), torch.randn(2, 32, 32)
    attention, rope = model.blocks[0].attn, (model.cos, model.sin)
    seen, real = [], F.scaled_dot_product_attention

    def share(
        q, k, v, **how
    ):  # with values that are 1 for the first token alone, the output is its share
        v = torch.zeros_like(v)
        v[:, :, 0] = 1
        seen.append(real(q, k, v, **how)[:, :, 1:].mean().item())
        return real(q, k, v, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", share)
        attention(h, rope)
    assert depth.sink(attention, h, rope).item() == pytest.approx(seen[0], rel=1e-5)


def test_eval_tells_who_skips_and_dials_the_rate(data, two_runs, capsys):
    run = two_runs / "d"
    argv = [
        f"--out_dir={run}",
        "--what=mod,loss",
        "--depth_tokens=17000",
        "--eval_tokens=17000",
        "--prompt=import os",
    ]
    argv += ["--dtype=float32"]
    script("eval.py", *argv)
    report = json.load(open(run / "eval.json"))
    skipped, loss = report["mod"], report["loss"]["loss"]
    assert skipped["where"] == ["attn 0", "mlp 0", "attn 1", "mlp 1"] and skipped["tokens"] == [
        256,
        *b"import os",
    ]
    assert np.shape(skipped["map"]) == (4, 10) and skipped["causal loss"] == pytest.approx(
        loss, abs=1e-6
    )
    assert skipped["look-ahead loss"] != skipped["causal loss"] and len(skipped["skipped"]) == 4
    assert "looking ahead" in capsys.readouterr().out
    for rate in (0.1, 0.5):
        script("eval.py", *argv, f"--mod_rate={rate}")
        got = json.load(open(run / "eval.json"))["mod"]["rate"]
        assert got == pytest.approx(
            rate, abs=0.06
        )  # in the first sublayer all spaces, say, have the same score
    with pytest.raises(SystemExit, match="mod_rate=0.3: in .* no token may skip anything"):
        script("eval.py", f"--out_dir={two_runs / 'a'}", "--mod_rate=0.3")


def test_experts_and_routers_are_logged_and_agree_over_ranks(data, tmp_path):
    argv = [
        "--moe_experts=4",
        "--mod_on=both",
        "--mod_rate=0.4",
        "--max_iters=14",
        "--gradient_accumulation_steps=2",
    ]
    argv += ["--eval_interval=7"]
    train(data, tmp_path / "one", *argv)
    for name, more in (("ddp", []), ("fsdp", ["--shard=fsdp"])):
        process = start(data, tmp_path / name, *argv, *more, ranks=2)
        output = process.communicate()[0]
        assert process.returncode == 0, output
        assert losses(tmp_path / name)[:6] == pytest.approx(losses(tmp_path / "one")[:6], abs=3e-3)
        assert losses(tmp_path / name) == pytest.approx(
            losses(tmp_path / "one"), abs=0.1
        )  # rounding decides choices
        for key in (
            "blocks.0.attn_router",
            "blocks.1.mlp_router",
        ):  # each has counted what all ranks scored
            saved = checkpoint(tmp_path / name)["model"]
            assert (
                saved[key + ".histogram"].sum() == pytest.approx((9 + mod.MEMORY) * 256)
                and saved[key + ".fresh"].sum() == 4 * 256
            )
    last = records(tmp_path / "ddp")[-1]
    assert np.sum(last["load"], axis=1) == pytest.approx([1, 1]) and np.mean(
        last["ran"]
    ) == pytest.approx(0.6, abs=0.03)
    flops = [r["flops"] for r in records(tmp_path / "ddp")]
    assert flops[2] - flops[1] != flops[14] - flops[13]  # as k moved
    header = json.loads(open(tmp_path / "one" / "log.jsonl").readline())["run"]
    assert header["params"]["all"] - header["params"]["active"] == 2 * 2 * 2 * 32 * 128


def test_similarity_calibration_and_what_goes_with_the_norm():
    model, x = shaken(tiny(residual="prenorm")).eval(), some_ids(4)
    y = some_ids(4, seed=2)
    report = depth.depth(model, [(x[:3], y[:3]), (x[3:], y[3:])])
    updates = [
        F.normalize(s.x - b.x, dim=-1).mean((0, 1)) for _, _, _, b, s in depth.walk(model, x)
    ]
    cosines = F.cosine_similarity(torch.stack(updates)[:, None], torch.stack(updates)[None], dim=-1)
    torch.testing.assert_close(torch.tensor(report["similarity"]), cosines, atol=1e-5, rtol=1e-4)
    streams = [s.x for _, _, _, _, s in depth.walk(model, x)][1::2]
    assert report["cosine"][1] == pytest.approx(
        F.cosine_similarity(*streams, dim=-1).mean().item(), rel=1e-4
    )
    p = model(x)[0].detach().softmax(-1)
    confidence, right = p.max(-1).values, (p.argmax(-1) == y).float()
    error = 0.0
    for low in range(10):
        bin = (confidence >= low / 10) & (confidence < (low + 1) / 10)
        if bin.any():
            error += (
                bin.float().mean().item() * abs(confidence[bin].mean() - right[bin].mean()).item()
            )
    assert report["calibration error"] == pytest.approx(error, rel=1e-3)
    assert sum(report["calibration"]["share"]) == pytest.approx(1)
    by_norm, entropy = report["by norm"], -(p * p.log()).sum(-1).flatten()
    order = streams[1].norm(dim=-1).flatten().argsort()
    assert by_norm["norm"] == sorted(by_norm["norm"]) and len(by_norm["norm"]) == 10
    tenth = [i for i in range(128) if i * 10 // 128 == 9]
    assert by_norm["entropy"][9] == pytest.approx(entropy[order[tenth]].mean().item(), rel=1e-4)


@pytest.mark.parametrize("residual", ["prenorm", "nag", "bhyt"])
def test_a_block_that_does_nothing_is_not_missed_and_has_no_gradient(residual):
    model, x, y = (
        shaken(tiny(n_layer=3, residual=residual)).eval(),
        some_ids(4),
        some_ids(4, seed=2),
    )
    with torch.no_grad():
        for module in (model.blocks[1].attn.wo, model.blocks[1].mlp.down):
            module.weight.zero_()
        if residual == "nag":
            model.blocks[1].attn_residual.alpha.zero_()
            model.blocks[1].mlp_residual.alpha.zero_()
    model.refresh()
    before = model(x, y)[1].item()
    rise = depth.dropped(model, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert rise[1] == pytest.approx(0, abs=1e-5) and min(abs(rise[0]), abs(rise[2])) > 1e-4
    assert model(x, y)[1].item() == before and len(model.blocks) == 3
    norms = depth.gradients(model, x, y)
    loss = model(x, y)[1]
    grads = torch.autograd.grad(loss, [*model.blocks[2].parameters()], allow_unused=True)
    by_hand = math.sqrt(sum(g.square().sum().item() for g in grads if g is not None))
    assert norms[2] == pytest.approx(by_hand, rel=1e-5) and all(
        p.grad is None for p in model.parameters()
    )


def test_loss_of_any_text_is_exact(data, two_runs, tmp_path, monkeypatch):
    text = "def f(x):\n    return x + 1  # plus one\n" * 3
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": text}) + "\n")
    argv = [f"--out_dir={two_runs / 'a'}", "--what=loss", "--dtype=float32"]
    script("eval.py", *argv, f"--text={tmp_path / 'a.txt'}", "--batch_size=3")
    report = json.load(open(two_runs / "a" / "eval.json"))["loss"]
    _, model = lora.load_model(two_runs / "a" / "ckpt.pt")
    ids, nats = [256, *text.encode(), 256], []
    for at in range(0, len(ids) - 1, 32):
        row = torch.tensor([ids[at : at + 33]])
        logp = model(row[:, :-1])[0].detach().double().log_softmax(-1)
        nats += (-logp.gather(-1, row[:, 1:, None])).flatten().tolist()
    assert report["tokens"] == len(nats) == len(text) + 1 and report["bytes"] == len(text)
    assert report["loss"] == pytest.approx(np.mean(nats), rel=1e-5)
    assert report["bits per byte"] == pytest.approx(sum(nats) / len(text) / math.log(2), rel=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(np.mean(nats)), rel=1e-5)
    script(
        "eval.py", *argv, f"--text={tmp_path / 'b.jsonl'}", "--text_column=body", "--batch_size=3"
    )
    assert json.load(open(two_runs / "a" / "eval.json"))["loss"] == report
    for change, rel in (("--compile=True", 1e-5), ("--dtype=bfloat16", 1e-2)):
        script("eval.py", *argv, f"--text={tmp_path / 'a.txt'}", "--batch_size=3", change)
        again = json.load(open(two_runs / "a" / "eval.json"))["loss"]["loss"]
        assert again == pytest.approx(report["loss"], rel=rel)
    with pytest.raises(SystemExit, match="dtype='half': must be auto, float32 or bfloat16"):
        script("eval.py", *argv, "--dtype=half")
    script("eval.py", *argv, f"--text={tmp_path / 'a.txt'}", "--eval_tokens=50")
    assert json.load(open(two_runs / "a" / "eval.json"))["loss"]["loss"] == pytest.approx(
        np.mean(nats[:50]), rel=1e-5
    )
    import datasets

    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or [{"line": text}]
    )
    script(
        "eval.py",
        *argv,
        "--text=owner/name",
        "--text_column=line",
        "--text_split=validation",
        "--batch_size=3",
    )
    assert asked == [(("owner/name",), {"split": "validation", "streaming": True})]
    assert json.load(open(two_runs / "a" / "eval.json"))["loss"] == report


# ---------------------------------------------------------------------------------------------------------------------
# lm-evaluation-harness


@pytest.mark.parametrize("residual", ["nag", "prenorm", "bhyt"])
def test_choices_score_as_one_by_one(residual):
    model, rng = shaken(tiny(residual=residual, n_kv_head=1)).eval(), np.random.default_rng(0)
    questions = [rng.integers(0, 60, n).tolist() for n in (3, 3, 7, 31, 40, 1)]
    pairs = [(q, rng.integers(0, 60, n).tolist()) for q in questions for n in (1, 4, 2, 9)]
    with torch.no_grad():
        best = model(torch.tensor([questions[2]]))[0][0, -1, :60].argmax().item()
    pairs.append((questions[2], [best]))
    for batch_size in (1, 4):
        scores = ask.score_choices(model, pairs, batch_size, 60, "cpu")
        for (context, continuation), (total, greedy) in zip(pairs, scores):
            whole = (context + continuation)[-33:]
            logp = (
                model(torch.tensor([whole[:-1]]))[0][0, -len(continuation) :, :60]
                .detach()
                .log_softmax(-1)
            )
            expected = logp[range(len(continuation)), continuation].sum().item()
            assert total == pytest.approx(expected, abs=1e-4 * len(continuation))
            assert greedy == (logp.argmax(-1).tolist() == continuation)
    assert scores[-1][1]
    with pytest.raises(ValueError, match="33 tokens does not fit into block_size=32"):
        ask.score_choices(model, [([1], [2] * 33)], 1, 60, "cpu")
    with pytest.raises(ValueError, match="a continuation of 0 tokens"):
        ask.score_choices(model, [([1], [])], 1, 60, "cpu")


CHOICES = [
    {"q": f"{a} and {b} is", "choices": [str(a + b), str(a), "no"], "gold": 0}
    for a, b in ((1, 2), (3, 4), (2, 2))
]
TASKS = {  # as arc, piqa, hellaswag, openbookqa, mmlu and boolq have it; as winogrande; and the two other kinds
    "tiny_choice": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_target: gold\n"
    "doc_to_choice: '{{choices}}'\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n",
    "tiny_partial": "output_type: multiple_choice\ndoc_to_text: gold\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: '{{q}}'\nmetric_list:\n  - metric: acc\n",
    "tiny_rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{q}}'\n"
    "metric_list:\n  - metric: byte_perplexity\n",
    "tiny_writing": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{choices[0]}}'\n"
    "generation_kwargs:\n  until: [' ']\n  max_gen_toks: 5\nmetric_list:\n  - metric: exact_match\n",
}


def write_tasks(directory):
    directory.mkdir(exist_ok=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {directory}/rows.jsonl\n"
        (directory / f"{name}.yaml").write_text(head + "test_split: test\n" + text)
    return directory


def test_the_harness_gets_what_a_loop_would_compute(data, two_runs, tmp_path, capsys):
    pytest.importorskip("lm_eval", reason="make test installs lm-eval")
    folder, run = write_tasks(tmp_path / "tasks"), two_runs / "a"
    argv = [f"--out_dir={run}", "--what=tasks", f"--task_dir={folder}"]
    script("eval.py", *argv, f"--tasks={','.join(TASKS)}")
    report = json.load(open(run / "eval.json"))["tasks"]
    assert "tiny_choice" in capsys.readouterr().out and set(report["versions"]) == {
        "lm_eval",
        "datasets",
    }
    _, model = lora.load_model(run / "ckpt.pt")

    def score(context, continuation):
        ids = [256, *(context + continuation).encode()]
        logp = model(torch.tensor([ids[-33:][:-1]]))[0][0].detach().log_softmax(-1)
        last = [*continuation.encode()]
        return logp[-len(last) :][range(len(last)), last].sum().item()

    scores = [[score(row["q"], " " + choice) for choice in row["choices"]] for row in CHOICES]
    lengths = [[len(choice) for choice in row["choices"]] for row in CHOICES]
    acc = np.mean([np.argmax(s) == 0 for s in scores])
    acc_norm = np.mean([np.argmax(np.divide(s, n)) == 0 for s, n in zip(scores, lengths)])
    assert report["tiny_choice"]["acc_stderr,none"] >= 0
    assert (
        report["tiny_choice"]["acc,none"] == acc
        and report["tiny_choice"]["acc_norm,none"] == acc_norm
    )
    nats = [-score("", row["q"]) for row in CHOICES]
    per_byte = math.exp(sum(nats) / sum(len(row["q"]) for row in CHOICES))
    assert report["tiny_rolling"]["byte_perplexity,none"] == pytest.approx(per_byte, rel=1e-5)
    assert report["tiny_writing"]["exact_match,none"] == 0 and "acc,none" in report["tiny_partial"]
    script("eval.py", *argv, "--tasks=tiny_choice", "--limit=2", "--num_fewshot=0")
    assert json.load(open(run / "eval.json"))["tasks"]["tiny_choice"]["acc,none"] in (0, 0.5, 1)
    with pytest.raises(SystemExit, match="tiny_chioce is not one of tiny_choice"):
        script("eval.py", *argv, "--tasks=tiny_chioce")


def test_writing_stops_where_it_is_told(monkeypatch):
    encoding = data_file.get_tokenizer("bytes")
    asked, script_of = [], b"so it is.\nQ: more"
    monkeypatch.setattr(
        ask,
        "stream_tokens",
        lambda *a, **k: asked.append(a) or (torch.tensor([[t]]) for t in script_of),
    )
    model = SimpleNamespace(config=SimpleNamespace(block_size=32))
    assert ask.write_until(model, encoding, "x" * 99, ["Q:", "\n"], 256, 0.0, "cpu") == "so it is."
    assert len(asked.pop()[1][0]) == 16  # of the context half a window stays
    monkeypatch.setattr(
        ask, "stream_tokens", lambda *a, **k: (torch.tensor([[t]]) for t in [97, 98, 256])
    )
    assert ask.write_until(model, encoding, "x", ["Q:"], 9, 0.0, "cpu") == "ab"


def test_tasks_without_the_harness_say_how_to_get_it(two_runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match="pip install lm-eval"):
        script("eval.py", f"--out_dir={two_runs / 'a'}", "--what=tasks")


# ---------------------------------------------------------------------------------------------------------------------
# lora.py


@pytest.mark.parametrize(
    "changes",
    [dict(residual=r) for r in RESIDUALS] + [dict(activation="swiglu", bias=True)],
    ids=str,
)
def test_adapters_start_from_nothing_and_merge_exactly(changes):
    model, idx = shaken(tiny(**changes)).eval(), some_ids()
    before, weights = model(idx)[0].detach(), {k: v.clone() for k, v in model.state_dict().items()}
    targets = "wq,wk,wv,wo,up,down" + (",gate" if "activation" in changes else "")
    lora.adapt(model, 4, 8.0, 0.5, targets)
    assert torch.equal(model.eval()(idx)[0], before) and len(lora.adapters(model)) == 2 * len(
        targets.split(",")
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    assert (
        len(trained) == 2 * len(lora.adapters(model))
        and len(model.optimizers("adamw", 1, None, 0, (0.0, 0.0))) == 1
    )
    for p in trained:
        torch.nn.init.normal_(p, std=0.1)
    out = model(idx)[0].detach()
    W, first = weights["blocks.0.attn.wq.weight"], model.blocks[0].attn.wq
    x = torch.randn(3, 32)
    assert not torch.equal(out, before)
    expected = F.linear(x, W, first.bias) + 2.0 * x @ first.A.T @ first.B.T
    torch.testing.assert_close(first(x), expected)
    with lora.merged(model):
        torch.testing.assert_close(model(idx)[0], out, atol=2e-5, rtol=1e-4)
    assert torch.equal(model(idx)[0], out)
    for key, value in weights.items():
        assert torch.equal(model.state_dict()[key], value)
    model.train()
    assert not torch.equal(first(x), first(x))  # dropout


def test_adapters_are_refused_where_they_cannot_be():
    with pytest.raises(ValueError, match="'wx' is not one of wq, wk, wv, wo, up, down"):
        lora.adapt(tiny(), 4, 8.0, 0.0, "wq,wx")
    with pytest.raises(ValueError, match="'up' is not one of wq, wk, wv, wo"):
        lora.adapt(tiny(moe_experts=4), 4, 8.0, 0.0, "up")
    model = tiny(moe_experts=4, moe_shared=32)
    lora.adapt(model, 4, 8.0, 0.0, "wq,wv")
    assert len(lora.adapters(model)) == 4


def write_conversations(path, n=40):
    rows = [
        {"conversations": [f"What is {i}?", f"It is {i}.", "Sure?", "Yes."][: 2 + 2 * (i % 2)]}
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversations_are_packed_whole_and_only_answers_count(tmp_path):
    encoding = data_file.get_tokenizer("bytes")
    path, seen = write_conversations(tmp_path / "c.jsonl"), 0
    for split in ("train", "val"):
        rows = lora.Conversations(path, split, encoding, 160)
        for x, y, docs in (rows[i] for i in range(len(rows))):
            for doc in range(1, docs.max() + 1):
                at, seen = docs == doc, seen + 1
                text = bytes(x[at][1:].tolist()).split(b"\xff")[0] if 256 not in x[at][1:] else None
                answers = bytes(t for t in y[at].tolist() if 0 <= t < 256).decode()
                asked = encoding.decode(x[at].tolist())
                assert x[at][0] == 256 and (y[at] == 256).sum() == asked.count(
                    "User: "
                ) == answers.count(".")
                assert (
                    re.fullmatch(r" It is \d+\.( Yes\.)?", answers)
                    and text is None
                    or asked.count("User:") == 1
                )
                assert f"{answers.split('.')[0].split()[-1]}?" in asked
            assert (y[docs == 0] == -1).all()
    assert seen == 40
    short = lora.Conversations(
        path, "train", encoding, 40
    )  # what is too long is cut, if something of an answer is left
    assert 0 < short.cut <= short.kept and all((short[i][1] >= 0).any() for i in range(len(short)))
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    for file, message in (
        ("bad.jsonl", "record 0 is not"),
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
    ):
        with pytest.raises(SystemExit, match=message):
            lora.Conversations(tmp_path / file, "train", encoding, 64)


@pytest.mark.parametrize("changes", [*(dict(residual=r) for r in RESIDUALS), None], ids=str)
def test_documents_in_a_row_do_not_see_each_other(changes):
    model = shaken(tiny(**(changes or dict(mod_on="both", mod_rate=0.3, moe_experts=4)))).eval()
    idx = some_ids(1)
    docs = torch.tensor([[1] * 10 + [2] * 15 + [0] * 7])
    packed = model(idx, None, docs)[0]
    torch.testing.assert_close(packed[:, :10], model(idx[:, :10])[0], atol=1e-5, rtol=1e-4)
    other = idx.clone()
    other[:, :10] = some_ids(1, seed=5)[:, :10]
    torch.testing.assert_close(
        model(other, None, docs)[0][:, 10:], packed[:, 10:], atol=1e-5, rtol=1e-4
    )
    if changes:  # rotary positions are relative
        torch.testing.assert_close(packed[:, 10:25], model(idx[:, 10:25])[0], atol=1e-4, rtol=1e-3)
    if changes is None:
        model.train()
        (grad,) = torch.autograd.grad(model(idx, idx, docs)[1], model.embed.weight)
        assert grad.isfinite().all()


def test_fine_tuning_learns_to_answer_reports_forgetting_and_resumes(data, two_runs, tmp_path):
    path, base = write_conversations(tmp_path / "c.jsonl"), two_runs / "a" / "ckpt.pt"
    argv = [
        f"--sft_data={path}",
        "--learning_rate=3e-2",
        "--eval_interval=10",
        "--max_iters=20",
        "--block_size=64",
    ]
    argv += ["--lora_targets=wq,wv,up,down", "--lora_dropout=0.1", f"--init_from={base}"]
    train(
        data, tmp_path / "lora", *argv, "--lora_rank=4", "--keep_interval=10", "--save_interval=10"
    )
    log = [r for r in records(tmp_path / "lora") if r["val_loss"] is not None]
    assert log[-1]["val_loss"] < log[0]["val_loss"] - 0.2
    assert log[0]["pretraining_loss"] != log[-1]["pretraining_loss"]
    state, small = checkpoint(tmp_path / "lora"), os.path.getsize(tmp_path / "lora" / "ckpt.pt")
    assert small < os.path.getsize(base) / 2 and state["lora"]["base"] == str(base)
    assert all(".A" in name or ".B" in name or "ramp" in name for name in state["model"])
    state, model = lora.load_model(tmp_path / "lora" / "ckpt.pt")
    windows = data_file.Windows(data, "val", 64)
    batches = data_file.eval_batches(windows, data_file.spread(windows, 512), 4, "cpu")
    assert model_file.evaluate(model, batches) == pytest.approx(
        log[-1]["pretraining_loss"], abs=1e-4
    )
    subprocess.run(
        [sys.executable, "lora.py", tmp_path / "lora" / "ckpt.pt", tmp_path / "m.pt"],
        cwd=HERE,
        check=True,
    )
    whole = lora.load_model(tmp_path / "m.pt")[1]
    assert torch.equal(whole(some_ids())[0], model(some_ids())[0])
    train(data, tmp_path / "more", *argv[:5], f"--init_from={tmp_path / 'm.pt'}", "--max_iters=2")
    shutil.copytree(tmp_path / "lora", tmp_path / "again")
    shutil.copy(tmp_path / "again" / "ckpt_000010.pt", tmp_path / "again" / "ckpt.pt")
    train(data, tmp_path / "again", *argv[:-1], "--lora_rank=4", "--init_from=resume")
    assert_same(checkpoint(tmp_path / "again")["model"], checkpoint(tmp_path / "lora")["model"])
    train(data, tmp_path / "full", *argv[:5], argv[-1])
    assert records(tmp_path / "full")[-1]["val_loss"] < log[0]["val_loss"] - 0.2
    for more, message in (
        (["--init_from=resume", "--lora_rank=3"], "was trained with lora_rank=4, not 3"),
        (["--init_from=scratch", "--lora_rank=4"], "lora_rank=4 adapts a trained model"),
        (
            [f"--init_from={tmp_path / 'lora' / 'ckpt.pt'}", "--lora_rank=4"],
            "holds adapters: merge them first",
        ),
        ([f"--init_from={base}", "--lora_rank=4", "--lora_targets=head"], "'head' is not one of"),
    ):
        out = tmp_path / ("lora" if "resume" in more[0] else "none")
        with pytest.raises(SystemExit, match=message):
            train(data, out, *argv[:-1], *more)
    os.rename(base, str(base) + "x")
    with pytest.raises(SystemExit, match="which is gone or has changed"):
        lora.load_model(tmp_path / "lora" / "ckpt.pt")
    os.rename(str(base) + "x", base)


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(moe_experts=8, moe_shared=32), dict(mod_on="both", mod_rate=0.8)],
    ids=str,
)
def test_frozen_weights_save_their_own_gradient_and_no_more(changes):
    model = tiny(**changes)
    dense = model.flops_per_token()
    model.requires_grad_(False)
    assert model.flops_per_token() < dense * 0.8
    assert 2 * dense / 3 <= model.flops_per_token()  # attention's scores have gradients in any case
    model.blocks[0].attn.wk.requires_grad_()
    frozen = tiny(**changes).requires_grad_(False).flops_per_token()
    assert model.flops_per_token() - frozen == 2 * 32 * 32


def test_muon_gradient_norms_and_flops_budgets_go_with_adapters(data, two_runs, tmp_path):
    argv = [
        f"--init_from={two_runs / 'a' / 'ckpt.pt'}",
        "--lora_rank=4",
        "--optimizer=muon",
        "--log_grad_norms=True",
    ]
    train(data, tmp_path, *argv, "--flops_budget=1e8", "--eval_interval=1")
    log, path = records(tmp_path), write_conversations(tmp_path / "c.jsonl")
    header = json.loads(open(tmp_path / "log.jsonl").readline())["run"]
    assert log[-1]["step"] == header["max_iters"] == math.ceil(1e8 / header["flops_per_step"])
    assert all(name.endswith((".A", ".B")) for name in log[-1]["grad_norms"])
    for more, message in (
        (f"--sft_data={path}", "was trained with sft_data=None"), ("--lora_dropout=0.5", "was trained with lora_dropout"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=message):
            train(data, tmp_path, *argv[1:], "--init_from=resume", more)
    with pytest.raises(SystemExit, match="need lora_rank above 0"):
        train(data, tmp_path / "x", "--lora_dropout=0.5")


def test_fine_tuning_over_two_ranks_is_that_of_one(data, two_runs, tmp_path):
    argv = [
        f"--sft_data={write_conversations(tmp_path / 'c.jsonl')}",
        f"--init_from={two_runs / 'a' / 'ckpt.pt'}",
    ]
    argv += ["--lora_rank=4", "--learning_rate=1e-2", "--total_batch_tokens=64"]
    train(data, tmp_path / "one", *argv, "--batch_size=2")
    train(data, tmp_path / "accumulated", *argv, "--batch_size=1")  # rows count by their answers
    process = start(data, tmp_path / "two", *argv, "--batch_size=1", ranks=2)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    for other in ("accumulated", "two"):
        assert losses(tmp_path / other) == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def test_every_eval_setting_for_samples_matters(data, two_runs):
    def text(*argv):
        script(
            "eval.py", f"--out_dir={two_runs / 'a'}", "--what=sample", "--max_new_tokens=30", *argv
        )
        return json.load(open(two_runs / "a" / "eval.json"))["sample"]

    base = text()
    assert base == text()
    for flip in ("prompt=x", "temperature=0", "top_k=1", "top_p=0.1", "seed=2", "max_new_tokens=3"):
        assert text("--" + flip) != base
    assert text("--temperature=0", "--compile=True") == text("--temperature=0")


def test_figures_are_the_same_bytes_each_time_and_name_what_is_missing(two_runs, tmp_path):
    *runs, skips = [str(two_runs / name) for name in "abcd"]
    for run in runs:
        script("eval.py", f"--out_dir={run}", "--what=depth", "--depth_tokens=64")
    script("eval.py", f"--out_dir={skips}", "--what=mod", "--depth_tokens=64")
    bench = tmp_path / "bench.json"
    bench.write_text(
        json.dumps(
            {"modes": {"prenorm": {"ratio": [1, 1, 1]}, "nag": {"ratio": [1.01, 1.02, 1.04]}}}
        )
    )
    for_figure = {"alpha": runs[:2], "map": [skips]}
    for_figure["speed"] = [str(bench)]
    for figure in plot.FIGURES:
        made = []
        for turn in "12":
            plot.main(figure, str(tmp_path / (figure + turn)), *for_figure.get(figure, runs))
            made.append(
                [(tmp_path / f"{figure}{turn}.{end}").read_bytes() for end in ("png", "svg")]
            )
        assert made[0] == made[1] and len(made[0][0]) > 5000
    steps = plot.steps_of(runs[0])
    assert (
        steps[-1]["seconds"] == pytest.approx(sum(128 / r["tok_s"] for r in steps))
        and steps[0]["step"] == 1
    )
    assert {k: len(v[1]) for k, v in plot.grouped(runs).items()} == {"nag": 2, "lns": 1}
    with pytest.raises(SystemExit, match="nowhere/log.jsonl is missing"):
        plot.main("loss", str(tmp_path / "x"), "nowhere")
    with pytest.raises(SystemExit, match="no figure 'lss': choose one of loss"):
        plot.main("lss", str(tmp_path / "x"), *runs)
    with pytest.raises(SystemExit, match="no alpha in its depth: its mode has no rotation"):
        plot.main("alpha", str(tmp_path / "x"), runs[2])


def test_the_figure_of_a_target_interpolates(monkeypatch):
    import matplotlib.pyplot as plt

    def log(run):
        losses = {"slow": [4.0, 3.0, 2.0], "fast": [3.0, 1.0]}[run]
        records = [
            {"step": i + 1, "tokens": (i + 1) * 1e6, "tok_s": 1e6 / 60, "val_loss": x}
            for i, x in enumerate(losses)
        ]
        return {"residual": "nag" if run == "fast" else "prenorm", "out_dir": run}, records

    monkeypatch.setattr(plot, "read_log", log)
    fig, axes = plt.subplots()
    plot.target(axes, ["slow", "fast"])
    assert [bar.get_height() for bar in axes.patches] == [3.0, 1.5]
    assert [bar.get_height() for bar in fig.axes[1].patches] == pytest.approx(
        [3.0, 1.5]
    )  # a million tokens a minute
    assert axes.get_ylabel() == "million tokens to a loss of 2.000"


def test_the_figure_of_rates_begins_each_router_at_the_dense_run(monkeypatch):
    import matplotlib.pyplot as plt

    made = {
        "dense": dict(mod_on="none", mod_rate=0.0, mod_router="nag", loss=1.0),
        "nag": dict(mod_on="both", mod_rate=0.4, mod_router="nag", loss=1.5),
        "learned": dict(mod_on="both", mod_rate=0.4, mod_router="learned", loss=1.4),
        "mlp": dict(mod_on="mlp", mod_rate=0.4, mod_router="learned", loss=1.2),
    }
    monkeypatch.setattr(
        plot,
        "read_log",
        lambda run: ({"residual": "nag"} | made[run], [{"val_loss": made[run]["loss"]}]),
    )
    _, axes = plt.subplots()
    plot.rate(axes, [*made])
    assert {tuple(line.get_ydata()) for line in axes.lines} == {(1.0, 1.5), (1.0, 1.4), (1.0, 1.2)}


def test_the_classroom_comes_out_as_foretold(data, tmp_path, capsys):
    argv = [f"--data_dir={data}", f"--out={tmp_path}"]
    script(
        "runs/classroom.py", *argv, "--cases=B,C", "--steps=60", "--batch_size=128", "--width=128"
    )
    b, c = capsys.readouterr().out.splitlines()[2:]
    assert "| explosion | explosion |" in b and "| smooth | smooth |" in c
    log = [json.loads(line) for line in open(tmp_path / "C.jsonl")]
    assert len(log) == 62 and log[0]["settings"]["steps"] == 60 and log[1]["loss"] > log[-2]["loss"]

    def walk(*more):
        script("runs/classroom.py", *argv, "--what=walk", "--activation=relu", "--norm=none", *more)
        return np.array(
            [[*map(float, row.split("|")[2:4])] for row in capsys.readouterr().out.splitlines()[2:]]
        )

    keeps = walk(
        "--init=kaiming", "--skip=False", "--n_layer=12"
    )  # relu halves what its weights double
    assert len(keeps) == 12 and keeps[:, 0].max() / keeps[:, 0].min() < 3
    grows = walk(
        "--init=uniform", "--init_scale=0.5", "--skip=False", "--n_layer=6"
    )  # 256 weights of 1/12, half kept
    assert grows[1:, 0] / grows[:-1, 0] == pytest.approx([256 / 12 / 2] * 5, rel=0.4)
    assert grows[:-1, 1] / grows[1:, 1] == pytest.approx([256 / 12 / 2] * 5, rel=0.4)
    doubles = walk("--init=kaiming", "--skip=True", "--n_layer=8")
    assert np.mean(doubles[1:, 0] / doubles[:-1, 0]) > 1.5
    script("runs/classroom.py", *argv, "--what=transformer", "--steps=30", "--batch_size=64")
    out = capsys.readouterr().out
    assert (
        re.findall(r"^(\w+):", out, re.M) == ["skip", "no_skip", "none"]
        and "blocks.0.attn.wq.weight" in out
    )
    for more, message in (
        (["--cases=D"], "cases='D': choose one of A, B, C, deep"),
        (["--what=x"], "what='x'"),
    ):
        with pytest.raises((SystemExit, ValueError), match=message):
            script("runs/classroom.py", *argv, *more)


def test_sweep_trains_the_grid_then_seeds_at_the_best_and_skips_what_is_there(
    data, tmp_path, monkeypatch, capsys
):
    sys.path.insert(0, os.path.join(HERE, "runs"))
    import sweep

    ran, really = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:
            return really(command, **how)  # git, say
        name, *argv = command[1:]
        (out,) = [tmp_path / a[10:] for a in argv if a.startswith("--out_dir=")]
        ran.append((name, os.path.basename(out)))
        argv += ["--depth_tokens=64"] if name == "eval.py" else []
        train(data, out, *argv, f"--out_dir={out}") if name == "train.py" else script(
            name, *argv, f"--out_dir={out}"
        )
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(sweep.subprocess, "run", in_process)
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    how = dict(learning_rates=[1e-4, 1e-2], seeds=[1, 2], then=["--what=depth"])
    variants = {"plain": [], "scaled": ["--residual=lns"]}
    with (
        monkeypatch.context() as patch
    ):  # signal handlers belong to the main thread, and the pool has others
        patch.setattr(signal, "signal", lambda *args: None)
        losses = sweep.sweep("toy", variants, **how)
        expected = [
            f"{v}-{lr}-{s}" for lr, s in (("0.0001", 1), ("0.01", 1), ("0.01", 2)) for v in variants
        ]
        assert [name for kind, name in ran if kind == "train.py"] == expected and len(ran) == 12
        assert sweep.sweep("toy", variants, **how) == losses and len(ran) == 12
    assert [len(losses["plain"][lr]) for lr in (1e-4, 1e-2)] == [1, 2]
    sweep.table(losses)
    assert (
        f"{np.mean(losses['plain'][1e-2]):.3f} ± {np.std(losses['plain'][1e-2], ddof=1):.3f} (2)"
        in capsys.readouterr().out
    )


def test_bench_prints_ratios_and_keeps_every_number(data, tmp_path, capsys):
    argv = "--n_layer=1 --n_head=2 --n_embd=32 --block_size=32 --batch_size=2 --rounds=2 --quick=True".split()
    argv += "--prompt_tokens=8 --new_tokens=4 --batches_of=2 --rates=0,0.4 --megabytes=1".split()
    argv += [f"--out={tmp_path / 'bench.json'}"]
    script(
        "bench.py",
        "--what=forward,residual,train,cold,recipe,memory,generate,mod",
        "--modes=nag,nag",
        *argv,
    )
    out, report = capsys.readouterr().out, json.load(open(tmp_path / "bench.json"))
    assert set(report["forward"]) == set(report["train"]) == {"nag", "nag again"}
    assert set(report["residual"]) == {"nag", "nag again", "nag, no modulator"}
    made = [(of["kernels"], of["bytes"]) for of in report["residual"].values()]
    assert made[0] == made[1] > made[2] > (1, 16 * 2 * 32 * 32 * 2)
    assert report["cold"]["nag"]["first"] > report["cold"]["nag"]["later"]
    assert [*report["generate"]] == [
        "prompt, 2 at once",
        "4 new, 2 at once",
        "a token, no cache, 4 new, 2 at once",
    ]
    assert [*report["generate"]["4 new, 2 at once"]] == ["nag", "nag again", "the weights"]
    for part in (
        *map(report.get, ("forward", "residual", "train", "recipe", "mod")),
        *report["generate"].values(),
    ):
        first, *_ = part.values()
        assert (
            first["ratio"] == [1, 1, 1] and len(first["seconds"]) == 2
        )  # what is given counts for more than quick
    assert report["memory"]["nag, both"]["kept"] < report["memory"]["nag"]["kept"] / 2
    assert report["memory"]["nag, both"]["peak"] < report["memory"]["nag"]["peak"]
    of = report["memory"]["nag"]
    assert (
        of["peak"] > of["kept"] > of["kept a block"] > 2 * 32 * 32 * 4
    )  # 2 sequences, not the 8 of the default
    assert of["kept"] < 1e6
    assert report["copy_bytes_s"] > 1e8 and report["matmul_flops_s"] > 1e8
    assert "tokens/s" in out and "of reading the weights" in out and "of the FLOPs" in out
    script("bench.py", "--what=data", f"--data_dir={data}", *argv)
    out = capsys.readouterr().out
    assert "x the bare rate" in out and "a batch of 2 x 32" in out
    for more, message in (
        ("--modes=nagg", "residual='nagg': choose one of"),
        ("--what=speed", "what='speed': choose one"),
    ):
        with pytest.raises(SystemExit, match=message):
            script("bench.py", *argv, more)


def readme_commands():
    text = open(os.path.join(HERE, "README.md")).read()
    return [
        line
        for block in re.findall(r"```sh\n(.*?)```", text, re.S)
        for line in block.strip().splitlines()
    ]


def test_every_command_of_the_readme_runs_at_toy_size(tmp_path):
    write_texts(tmp_path)
    place = tmp_path / "clone"
    place.mkdir()
    write_conversations(place / "chat.jsonl")
    files = subprocess.run(
        ["git", "ls-files"], cwd=HERE, capture_output=True, text=True
    ).stdout.split()
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_bytes(open(os.path.join(HERE, file), "rb").read())
    (place / ".venv" / "bin").mkdir(parents=True)
    os.symlink(sys.executable, place / ".venv" / "bin" / "python")
    (place / ".venv" / "ready").touch()  # what the Makefile makes with pip
    shape = (
        " ".join(a for a in TINY_RUN if "device" not in a)
        + " --n_kv_head=1 --n_hidden=32 --vocab_size=300 --total_batch_tokens=128"
    )
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.path.dirname(os.path.dirname(torch.__file__)),
    }
    commands = readme_commands()
    assert {"make train", "make test"} <= set(commands) and len(commands) > 8
    for command in commands:
        toy = re.sub(r"(^|&& )python ", rf"\1{sys.executable} ", command)
        toy = toy.replace("torchrun", f"{sys.executable} -m torch.distributed.run").replace(
            "nproc_per_node=8", "nproc_per_node=2"
        )
        if command in ("make test", "make slow"):
            continue  # this is part of them
        if command == "make train":
            toy += f" ARGS='{shape}'"
        elif "prepare_c4.py --source" in command:
            toy = re.sub(
                r"--source=\S+",
                f"--source={tmp_path}/a.jsonl --data_dir=data/c4 --tokenizer=bytes",
                toy,
            ).replace("10e9", "10e4")
        elif "sft_lima" in command:
            toy += " --max_iters=2 --eval_tokens=512 --compile=False"
            toy += "" if "--sft_data" in command else " --sft_data=chat.jsonl"
        elif "train.py" in command and "--help" not in command:
            toy += " " + shape
        elif "eval.py" in command:
            toy += " --max_new_tokens=5 --eval_tokens=512 --depth_tokens=512"
            toy = toy.replace(
                "--tasks=piqa,boolq",
                f"--tasks=tiny_choice --task_dir={write_tasks(tmp_path / 'tasks')}",
            )
        elif "classroom.py" in command:
            toy += " --steps=3 --width=32 --batch_size=16"
        elif "bench.py" in command:
            toy += " --n_layer=1 --n_head=2 --n_kv_head=1 --n_embd=32 --n_hidden=32 --vocab_size=300 --rounds=2"
            toy += " --what=residual" if "quick" in command else ""
            toy += " --modes=nag" if "--modes" in command else ""
        result = subprocess.run(
            ["bash", "-c", toy], cwd=place, env=env, capture_output=True, text=True
        )
        assert result.returncode == 0, (
            f"{command}\n{result.stdout[-1500:]}\n{result.stderr[-3000:]}"
        )


# ---------------------------------------------------------------------------------------------------------------------
# What is measured, and on what data


def header_of(out):
    return next(
        json.loads(line)["run"] for line in open(os.path.join(out, "log.jsonl")) if '"run"' in line
    )


def test_evaluation_windows_are_spread_over_the_split_and_halves_do_not_overlap(data):
    windows = data_file.Windows(data, "val", 32)
    n = len(windows)
    assert list(data_file.spread(windows)) == list(range(n))
    tune, report = (data_file.spread(windows, None, part) for part in ("tune", "report"))
    assert sorted(tune + report) == list(range(n)) and abs(len(tune) - len(report)) <= 1
    for part, pool in (("all", range(n)), ("tune", tune), ("report", report)):
        some = data_file.spread(windows, 32 * 50, part)
        assert len(some) == 50 and set(some) <= set(pool)
        gaps = np.diff([-0.5 * n / 50, *some, n + 0.5 * n / 50 - 1])
        assert gaps.max() < 1.6 * n / 50 + 2
    assert len(data_file.spread(windows, 1)) == 1
    with pytest.raises(SystemExit, match="val_part='half': choose one of all, tune, report"):
        data_file.spread(windows, 32, "half")


def test_the_part_of_the_validation_split_is_chosen_in_training_and_evaluation(data, tmp_path):
    for part in ("tune", "report"):
        train(data, tmp_path / part, f"--val_part={part}")
        script("eval.py", f"--out_dir={tmp_path / part}", "--what=loss,depth", "--eval_tokens=512", "--dtype=float32",
               f"--val_part={part}", "--depth_tokens=64")  # fmt: skip
        loss = json.load(open(tmp_path / part / "eval.json"))["loss"]["loss"]
        assert loss == pytest.approx(records(tmp_path / part)[-1]["val_loss"], abs=1e-5)
    assert losses(tmp_path / "tune") == losses(tmp_path / "report")
    assert (
        records(tmp_path / "tune")[-1]["val_loss"] != records(tmp_path / "report")[-1]["val_loss"]
    )


def test_the_log_says_how_the_outputs_start_and_step_0_is_kept(data, tmp_path):
    train(data, tmp_path / "a", "--residual=prenorm", "--keep_interval=6")
    train(data, tmp_path / "b", "--residual=prenorm", "--init_out=plain")
    headers = [header_of(tmp_path / name)["resolved"] for name in "ab"]
    assert [h["init_out"] for h in headers] == ["scaled", "plain"] and headers[0][
        "min_lr"
    ] == pytest.approx(4e-4)
    start = lora.load_model(tmp_path / "a" / "ckpt_000000.pt")[1]
    torch.manual_seed(1337)
    fresh = GPT(start.config)
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), fresh.parameters()))


@torch.no_grad()
@pytest.mark.parametrize("residual", ["prenorm", "nag", "none"])
def test_depth_has_the_size_of_each_update_relative_to_the_stream(residual):
    model, x = shaken(tiny(residual=residual)).eval(), some_ids(4)
    report = depth.depth(model, [(x, x)])
    for i, (_, _, _, before, after) in enumerate(depth.walk(model, x)):
        old, new = (s.x if s.lane is None else s.x * s.lane.exp() for s in (before, after))
        sizes = ((new - old).norm(dim=-1) / old.norm(dim=-1)).mean()
        assert report["update"][i] == pytest.approx(sizes.item(), rel=1e-4)


def test_runs_on_different_data_are_not_compared_or_resumed(data, tmp_path):
    other = make_data(
        tmp_path / "other", "--max_tokens=100000", "--max_val_tokens=20000", "--shard_tokens=60000"
    )
    train(data, tmp_path / "a")
    train(other, tmp_path / "b")
    one, two = (header_of(tmp_path / name)["data"] for name in "ab")
    assert one["train"] != two["train"] and one["val"] == two["val"]
    assert one == {split: data_file.Windows(data, split, 16).sha256 for split in ("train", "val")}
    meta = data_file.read_meta(data)
    for split in meta["splits"].values():
        for shard in split["shards"]:
            assert shard.pop("sha256") == data_file.file_sha256(os.path.join(data, shard["file"]))
    assert (
        data_file.split_sha256(data, meta["splits"]["train"]["shards"]) == one["train"]
    )  # an older meta.json
    with pytest.raises(SystemExit, match="a and .*b were trained on different data"):
        plot.main("loss", str(tmp_path / "x"), str(tmp_path / "a"), str(tmp_path / "b"))
    with pytest.raises(SystemExit, match="was trained on other data than that of"):
        train(other, tmp_path / "a", "--init_from=resume")
    shutil.copytree(data, tmp_path / "moved")
    train(
        tmp_path / "moved", tmp_path / "a", "--init_from=resume", "--max_iters=7"
    )  # the same content elsewhere
    sys.path.insert(0, os.path.join(HERE, "runs"))
    import sweep

    with pytest.raises(SystemExit, match="a and b were trained on different data"):
        sweep.refuse_mixed_data([tmp_path / "a", tmp_path / "b"])


def test_the_dial_is_calibrated_on_training_windows(data, two_runs, monkeypatch):
    seen = []
    monkeypatch.setattr(mod, "calibrate", lambda model, batches, shared, rate: seen.extend(batches))
    script(
        "eval.py",
        f"--out_dir={two_runs / 'd'}",
        "--what=mod",
        "--mod_rate=0.2",
        "--depth_tokens=64",
    )
    windows = data_file.Windows(data, "train", 32)
    assert torch.cat(seen)[0].tolist() == windows[data_file.spread(windows, 32768)[0]][:-1].tolist()


def test_a_router_s_fallback_starts_small_enough_for_adam_to_turn():
    model = tiny(n_embd=512, mod_on="both", mod_rate=0.4, mod_fallback=True)
    assert all(
        router.v.std().item() == pytest.approx(0.02, rel=0.2) for router in mod.routers(model)
    )


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that is made while this is on"""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        self.numel = max([self.numel, *(x.numel() for x in made if isinstance(x, torch.Tensor))])
        return out


def test_evaluation_and_rolling_scores_hold_no_more_logits_than_loss_chunk():
    model, V = tiny(vocab_size=4096), 4096
    batches = [(some_ids(8), some_ids(8, seed=2))]
    exact = model_file.evaluate(model, batches)
    pairs = [([1], some_ids(1, seed=i)[0].tolist()) for i in range(8)]
    scores = ask.score_choices(model, pairs, 8, V, "cpu")
    model.loss_chunk = 16
    with Largest() as largest:
        assert model_file.evaluate(model, batches) == pytest.approx(exact, rel=1e-6)
        chunked = ask.score_choices(model, pairs, 8, V, "cpu")
    assert largest.numel <= max(16 * V, V * 32)  # the head itself has V x 32
    for (a, b), (c, d) in zip(scores, chunked):
        assert a == pytest.approx(c, rel=1e-6) and b == d


def test_a_sample_begins_as_every_document_and_is_timed_without_prompt_and_compilation(
    data, two_runs, monkeypatch
):
    seen = []
    real = ask.stream_tokens
    monkeypatch.setattr(
        generate,
        "stream_tokens",
        lambda model, idx, *a, **k: seen.append(idx) or real(model, idx, *a, **k),
    )
    script(
        "eval.py",
        f"--out_dir={two_runs / 'a'}",
        "--what=sample",
        "--prompt=ab",
        "--max_new_tokens=4",
    )
    assert seen[0].tolist() == [[256, 97, 98]]
    assert json.load(open(two_runs / "a" / "eval.json"))["sample"].startswith("ab")
    assert (
        ask.decoding_speed(0.0, [5.0, 9.0, 9.5, 10.0])
        == "2 tokens/s; 9.00 s before, for the prompt and the first step"
    )
    assert "too few" in ask.decoding_speed(0.0, [5.0])


# ---------------------------------------------------------------------------------------------------------------------
# A checkpoint knows its model


MODELS = {  # every kind of model that a checkpoint can hold
    **{residual: [f"--residual={residual}"] for residual in RESIDUALS},
    "moe": ["--moe_experts=4", "--residual=lns"],
    "mod": ["--mod_on=both", "--mod_rate=0.3"],
    "mod learned": [
        "--mod_on=mlp",
        "--mod_rate=0.3",
        "--mod_router=learned",
        "--residual=bhyt",
        "--moe_experts=4",
    ],
}


def bare(*argv):
    """train.py with nothing on its command line but argv"""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        return script("train.py", *argv)
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


def test_resume_needs_no_settings_and_equals_never_stopped(data, tmp_path):
    argv = [
        "--residual=bhyt",
        "--bhyt_interval=2",
        "--dropout=0.1",
        "--learning_rate=1e-3",
        "--lr_decay_iters=6",
        "--n_layer=3",
    ]
    train(data, tmp_path / "one", *argv)
    train(data, tmp_path / "two", *argv, "--max_iters=3")
    bare(f"--out_dir={tmp_path / 'two'}", "--init_from=resume", "--max_iters=6")
    for key in ("model", "optimizers"):
        assert_same(checkpoint(tmp_path / "one")[key], checkpoint(tmp_path / "two")[key])
    os.rename(
        tmp_path / "two", tmp_path / "moved"
    )  # the folder's old name in the checkpoint does not matter
    bare(
        f"--out_dir={tmp_path / 'moved'}",
        "--init_from=auto",
        "--max_iters=7",
        "--batch_size=1",
        "--learning_rate=1e-4",
    )
    assert not (tmp_path / "two").exists() and checkpoint(tmp_path / "moved")["step"] == 7
    assert header_of(tmp_path / "moved")["tokens_per_step"] == 128
    before = (tmp_path / "moved" / "ckpt.pt").read_bytes()
    for flip, message in (
        ("--residual=lns", "residual='bhyt', not 'lns'"), ("--n_embd=64", "n_embd=32, not 64"),
        ("--seed=2", "seed=1337, not 2"), ("--optimizer=muon", "optimizer='adamw', not 'muon'"),
        ("--beta2=0.9", "beta2=0.95, not 0.9"), ("--total_batch_tokens=256", "tokens_per_step=128, not 256"),
    ):  # fmt: skip
        with pytest.raises(
            SystemExit, match=f"moved/ckpt.pt was trained with {re.escape(message)}"
        ):
            bare(f"--out_dir={tmp_path / 'moved'}", "--init_from=resume", flip)
    assert (tmp_path / "moved" / "ckpt.pt").read_bytes() == before


def test_every_setting_either_may_change_in_a_run_that_goes_on_or_is_fixed(data, tmp_path):
    known = set(configurator.read_settings(open(os.path.join(HERE, "train.py")).read()))
    ran = train(data, tmp_path, "--max_iters=1")
    assert ran["MAY_CHANGE"] <= known | {"dropout"}
    fixed = known - ran["MAY_CHANGE"]
    assert fixed == {
        "seed",
        "optimizer",
        "beta1",
        "beta2",
        "sft_data",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_targets",
    }


def test_a_branch_goes_on_elsewhere_and_leaves_its_source_alone(data, tmp_path):
    argv = ["--schedule=wsd", "--wsd_share=0.5", "--max_iters=8", "--residual=lns"]
    train(data, tmp_path / "one", *argv, "--keep_interval=3")
    before = {name: (tmp_path / "one" / name).read_bytes() for name in os.listdir(tmp_path / "one")}
    source = tmp_path / "one" / "ckpt_000003.pt"
    bare(f"--branch_from={source}", f"--out_dir={tmp_path / 'same'}", "--init_from=auto")
    assert_same(
        checkpoint(tmp_path / "one")["model"], checkpoint(tmp_path / "same")["model"]
    )  # under the same schedule
    assert_same(
        checkpoint(tmp_path / "one")["optimizers"], checkpoint(tmp_path / "same")["optimizers"]
    )
    assert [r["step"] for r in records(tmp_path / "same")] == [4, 5, 6, 7, 8]
    bare(
        f"--branch_from={source}",
        f"--out_dir={tmp_path / 'decay'}",
        "--init_from=auto",
        "--max_iters=6",
    )
    bare(
        f"--branch_from={source}",
        f"--out_dir={tmp_path / 'decay'}",
        "--init_from=auto",
        "--max_iters=7",
    )  # resumes
    assert [r["step"] for r in records(tmp_path / "decay")] == [4, 5, 6, 7]
    assert header_of(tmp_path / "decay")["from"] == str(source)
    assert before == {
        name: (tmp_path / "one" / name).read_bytes() for name in os.listdir(tmp_path / "one")
    }
    with pytest.raises(SystemExit, match="was trained with n_layer=2, not 3"):
        bare(f"--branch_from={source}", f"--out_dir={tmp_path / 'other'}", "--n_layer=3")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_documented_fine_tuning_commands_work_for_every_model(data, tmp_path, name):
    chat, run = write_conversations(tmp_path / "chat.jsonl"), tmp_path / "run"
    train(data, run, *MODELS[name])
    config = [
        os.path.join(HERE, "config", "sft_lima.py"),
        f"--sft_data={chat}",
        "--max_iters=3",
        "--device=cpu",
        "--compile=False",
    ]
    bare(*config, f"--init_from={run / 'ckpt.pt'}", f"--out_dir={tmp_path / 'sft'}")
    state = checkpoint(tmp_path / "sft")
    assert state["config"] == checkpoint(run)["config"] and state["lora"]["rank"] == 8
    bare(f"--out_dir={tmp_path / 'sft'}", "--init_from=resume", "--max_iters=4")
    lora.main(str(tmp_path / "sft" / "ckpt.pt"), str(tmp_path / "merged.pt"))
    assert lora.load_model(tmp_path / "merged.pt")[1].config == lora.load_model(run)[1].config
    other = "prenorm" if name != "prenorm" else "lns"
    with pytest.raises(SystemExit, match=f"was trained with residual='.*', not '{other}'"):
        bare(
            *config,
            f"--init_from={run / 'ckpt.pt'}",
            f"--out_dir={tmp_path / 'x'}",
            f"--residual={other}",
        )
    assert not (tmp_path / "x").exists()


def test_fine_tuning_at_another_block_size_keeps_the_c_of_bhyt(data, tmp_path):
    train(data, tmp_path / "a", "--residual=bhyt")
    for more, context in (("--block_size=16", 32), ("--block_size=32", None)):
        out = tmp_path / more[-2:]
        bare(f"--init_from={tmp_path / 'a'}", more, f"--out_dir={out}", "--max_iters=1", "--learning_rate=1e-9",
             "--bhyt_interval=1", "--device=cpu", "--compile=False", "--eval_tokens=512")  # fmt: skip
        assert checkpoint(out)["config"]["bhyt_context"] == context
        for b in range(2):
            c, before = (
                checkpoint(p)["model"][f"blocks.{b}.attn_residual.c"].item()
                for p in (out, tmp_path / "a")
            )
            fresh = lora.load_model(tmp_path / "a")[1].blocks[b].attn_residual.c.item()
            assert c == pytest.approx(fresh, rel=1e-3) and c != pytest.approx(before, rel=1e-6)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


def spoiled(kind, path, good):
    """A file that is no checkpoint, or no longer one"""
    if kind == "truncated":
        path.write_bytes(good.read_bytes()[:-2000])
    elif kind == "foreign":
        torch.save({"weights": torch.zeros(3)}, path)
    elif kind == "malicious":
        torch.save({**torch.load(good, weights_only=True), "meta": Evil()}, path)
    elif kind == "text":
        path.write_text("not a checkpoint")
    elif kind == "newer":
        torch.save({**torch.load(good, weights_only=True), "format": 99}, path)
    elif kind == "unknown setting":
        state = torch.load(good, weights_only=True)
        torch.save({**state, "config": state["config"] | {"nag_colour": "red"}}, path)
    elif kind in ("another shape", "gone setting", "old experts"):
        change = {
            "another shape": {"n_embd": 64},
            "gone setting": {"bhyt_causal": True},
            "old experts": {"moe_experts": 4},
        }
        state = torch.load(good, weights_only=True)
        state["config"] |= change[kind]
        torch.save(state | {"format": 2 if kind == "another shape" else 1}, path)
    return path


@pytest.mark.parametrize(
    "kind, message",
    [
        ("missing", "no such checkpoint"), ("truncated", "is no checkpoint of train.py"),
        ("foreign", "it lacks config, settings or step"), ("malicious", "is no checkpoint of train.py"),
        ("text", "is no checkpoint of train.py"), ("newer", "has format 99, this code reads up to"),
        ("unknown setting", "has format 2 and nag_colour='red', which this code no longer has"),
        ("another shape", "does not fit its own settings"),
        ("gone setting", "has format 1 and bhyt_causal=True, which this code no longer has"),
        ("old experts", "has format 1 and moe_experts=4: experts had another layout then"),
    ],
)  # fmt: skip
def test_every_script_answers_a_bad_checkpoint_with_one_line(
    data, base_run, tmp_path, monkeypatch, kind, message
):
    monkeypatch.chdir(tmp_path)
    path = spoiled(kind, tmp_path / "ckpt.pt", base_run / "ckpt.pt")
    for run in (
        lambda: bare(f"--init_from={path}", f"--out_dir={tmp_path / 'out'}"),
        lambda: bare("--init_from=resume", f"--out_dir={tmp_path}"),
        lambda: script("eval.py", f"--out_dir={tmp_path}", "--checkpoint=ckpt.pt"),
        lambda: lora.main(str(path), str(tmp_path / "merged.pt")),
    ):
        with pytest.raises(SystemExit, match=message) as stop:
            run()
        assert "\n" not in str(stop.value)
    assert set(os.listdir(tmp_path)) <= {"ckpt.pt"}


def test_a_checkpoint_of_the_first_format_is_read(data, base_run, tmp_path):
    state = checkpoint(base_run)
    for key in ("format", "data", "run_id"):
        state.pop(key)
    state["settings"] |= {
        "warmup_iters": 0.25,
        "gradient_accumulation_steps": 1,
        "save_interval": 100,
    }
    for key in ("warmup_share", "branch_from", "save_best", "val_part"):
        state["settings"].pop(key)
    state["config"].pop("bhyt_context")
    state["config"] |= {"bhyt_causal": False, "bhyt_gain_aware": False}  # settings that are gone
    torch.save(state, tmp_path / "ckpt.pt")
    bare(f"--out_dir={tmp_path}", "--init_from=resume", "--max_iters=8")
    header = header_of(tmp_path)
    assert header["settings"]["warmup_share"] == 0.25 and header["settings"]["warmup_iters"] == 50
    assert (
        checkpoint(tmp_path)["step"] == 8 and checkpoint(tmp_path)["format"] == checkpoints.FORMAT
    )


def test_saves_come_by_time_unless_steps_are_asked_for(data, tmp_path, monkeypatch):
    saved, now, real = [], [0.0], checkpoints.save

    def save(path, state):
        now[0] += cost
        saved.append(state["step"])
        real(path, state)

    monkeypatch.setattr(checkpoints, "save", save)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        lora,
        "merged",
        lambda model: (now.__setitem__(0, now[0] + 10), lora.adapters(model))[1] or NOTHING,
    )
    argv = ["--max_iters=12", "--eval_interval=0", "--residual=bhyt", "--bhyt_interval=1"]
    for name, cost, more, expected in (
        ("cheap", 0.0, [], [0, 3, 6, 9, 12]), ("dear", 0.6, [], [0, 6, 12]), ("steps", 0.6, ["--save_interval=5"], [0, 5, 10, 12]),
        ("end", 0.0, ["--save_interval=0"], [0, 12]),
    ):  # fmt: skip
        saved.clear()
        train(data, tmp_path / name, *argv, *more)
        assert saved == expected, name


class NOTHING:
    def __enter__(self):
        pass

    def __exit__(self, *args):
        pass


NOTHING = NOTHING()


def test_the_best_checkpoint_is_kept_on_request_alone(data, tmp_path, base_run):
    assert not (base_run / "ckpt_best.pt").exists()
    train(data, tmp_path, "--save_best=True")
    assert checkpoint(tmp_path, "ckpt_best.pt")["step"] in (3, 6)


def ranks(data, out, *argv, count=2):
    """train.py in several processes, to its end"""
    process = start(data, out, *argv, ranks=count)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_sharded_checkpoints_resume_on_any_number_of_ranks_and_every_script_reads_them(
    data, tmp_path, optimizer
):
    steps = [
        "--max_iters=9",
        "--lr_decay_iters=9",
        "--gradient_accumulation_steps=2",
        f"--optimizer={optimizer}",
    ]
    train(data, tmp_path / "one", *steps)
    run, fsdp = tmp_path / "run", ["--shard=fsdp", "--save_interval=2"]
    ranks(data, run, *steps, *fsdp, "--max_iters=3", "--keep_interval=2", "--save_best=True")
    assert {"ckpt_000003", "kept_000000", "kept_000002", "best_000003", "log.jsonl"} == set(
        os.listdir(run)
    )
    assert {"index.json", "state.pt", "__0_0.distcp", "__1_0.distcp"} == set(
        os.listdir(run / "ckpt_000003")
    )
    train(data, run, *steps, "--init_from=resume", "--max_iters=5", "--shard=none")  # one process
    assert "ckpt.pt" in os.listdir(run) and "ckpt_000003" not in os.listdir(run)
    ranks(data, run, *steps, *fsdp, "--init_from=resume", "--max_iters=7")
    ranks(
        data, run, *steps, "--shard=none", "--init_from=resume", "--max_iters=8"
    )  # DDP reads it too
    ranks(data, run, *steps, *fsdp, "--init_from=resume")
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), abs=2e-4)
    _, model = lora.load_model(run)
    _, whole = lora.load_model(tmp_path / "one")
    for a, b in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    script(
        "eval.py",
        f"--out_dir={run}",
        "--what=loss",
        "--eval_tokens=512",
        "--checkpoint=kept_000002",
    )
    bare(
        f"--init_from={run}",
        "--lora_rank=2",
        f"--out_dir={tmp_path / 'sft'}",
        "--max_iters=1",
        "--shard=none",
    )
    lora.main(str(tmp_path / "sft"), str(tmp_path / "merged.pt"))


@pytest.mark.slow
def test_a_malicious_or_broken_folder_is_refused_and_runs_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks(data, tmp_path / "run", "--shard=fsdp")
    good, index = tmp_path / "run" / "ckpt_000006", tmp_path / "bad" / "index.json"

    def refused(message):
        with pytest.raises(SystemExit, match=message) as stop:
            lora.load_model(tmp_path / "bad")
        assert "\n" not in str(stop.value) and not (tmp_path / "pwned").exists()
        shutil.rmtree(tmp_path / "bad")
        shutil.copytree(good, tmp_path / "bad")

    shutil.copytree(good, tmp_path / "bad")
    lora.load_model(tmp_path / "bad")
    first = next(iter(json.load(open(index))))
    for change, message in (
        (lambda i: i[first].update(dtype="load"), "is no dtype"),
        (lambda i: i[first].update(dtype="no_such_dtype"), "no attribute"),
        (lambda i: i[first]["parts"][0].__setitem__(2, "../run/log.jsonl"), "is not in the folder"),
        (lambda i: i[first].update(size=[2**60]), "is no complete checkpoint"),
        (lambda i: i[first]["parts"][0].__setitem__(3, 10**9), "is no complete checkpoint"),
        (lambda i: i.pop(first), "does not fit its own settings"),
    ):
        content = json.load(open(index))
        change(content)
        index.write_text(json.dumps(content))
        refused(message)
    index.write_text("[1]")
    refused("is no checkpoint of train.py: index.json")
    os.remove(tmp_path / "bad" / "__1_0.distcp")
    refused("is no complete checkpoint")
    part = tmp_path / "bad" / "__0_0.distcp"
    torch.save(Evil(), part)  # in place of the first tensor
    content = json.load(open(index))
    content[first]["parts"] = [
        [
            [0] * len(content[first]["size"]),
            content[first]["size"],
            part.name,
            0,
            os.path.getsize(part),
        ]
    ]
    index.write_text(json.dumps(content))
    refused("is no complete checkpoint")
    os.remove(index)
    refused("no checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--shard=fsdp"], []], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        ["--compile=True"],
        ["--optimizer=muon"],
        ["--compile=True", "--optimizer=muon", "--moe_experts=4"],
    ],
    ids=str,
)
def test_two_ranks_compiled_or_with_muon_equal_one_process(data, tmp_path, how, more):
    steps = ["--max_iters=8", "--gradient_accumulation_steps=2", *more]
    train(data, tmp_path / "one", *steps)
    ranks(data, tmp_path / "two", *steps, *how)
    assert losses(tmp_path / "two") == pytest.approx(
        losses(tmp_path / "one"), abs=3e-3 if "moe" in str(more) else 2e-4
    )


@pytest.mark.slow
def test_20_kills_of_a_sharded_run_change_nothing(data, tmp_path):
    steps = [
        "--max_iters=300",
        "--lr_decay_iters=300",
        "--gradient_accumulation_steps=2",
        "--eval_interval=0",
        "--shard=fsdp",
    ]
    steps += ["--save_interval=1", "--init_from=auto", "--log_interval=1"]
    ranks(data, tmp_path / "whole", *steps)
    rng, kills = random.Random(0), 0
    while kills < 20:
        process = start(data, tmp_path / "killed", *steps, ranks=2)
        reached = -1
        goal = (kills + 1) * 12 + rng.randrange(5)
        while reached < goal and process.poll() is None:
            time.sleep(0.01)
            newest = checkpoints.newest(str(tmp_path / "killed"))
            reached = checkpoints.step_of(newest) if newest else -1
        time.sleep(rng.random() * 0.05)
        subprocess.run(
            ["pkill", "-KILL", "-f", str(tmp_path / "killed")]
        )  # the launcher and both ranks
        process.wait()
        kills += 1
    ranks(data, tmp_path / "killed", *steps)
    one, two = (lora.load_model(tmp_path / name)[0] for name in ("whole", "killed"))
    assert_same(one["model"], two["model"])
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len([line for line in open(tmp_path / "killed" / "log.jsonl") if '"run"' in line]) == 21


def test_windows_has_no_resource_module_and_trains_all_the_same(data, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "resource", None)
    train(data, tmp_path)
    assert records(tmp_path)[-1]["mem_gb"] is None


@pytest.mark.parametrize(
    "cuda, mps, expected", [(True, False, "cuda:1"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_takes_the_best_device_there_is(monkeypatch, cuda, mps, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert str(machine.pick_device("auto", local_rank=1)) == expected
    assert machine.pick_dtype("auto", "mps") == "float32" and not machine.can_compile("mps")
    for name in ("eval.py", "bench.py", "train.py"):
        assert (
            configurator.read_settings(open(os.path.join(HERE, name)).read())["device"].default
            == "auto"
        )


def test_a_small_file_of_conversations_has_some_for_both_splits(tmp_path):
    encoding = data_file.get_tokenizer("bytes")
    for n in (2, 3, 15, 40):
        path = write_conversations(tmp_path / f"{n}.jsonl", n)
        kept = [lora.Conversations(path, split, encoding, 160).kept for split in ("train", "val")]
        assert kept == [n - max(1, round(n / 10)), max(1, round(n / 10))]
    with pytest.raises(SystemExit, match="1 conversations; at least 2 are needed"):
        lora.Conversations(write_conversations(tmp_path / "1.jsonl", 1), "val", encoding, 160)


@torch.no_grad()
def test_experts_are_chosen_in_float32_under_autocast():
    model, h = shaken(tiny(moe_experts=4)), torch.randn(64, 32)
    experts, seen, real = moe.layers(model)[0], [], torch.Tensor.topk
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", lambda s, k: seen.append(s) or real(s, k))
        experts(h)
        with torch.autocast("cpu", torch.bfloat16):
            experts(h)
    assert seen[0].dtype == seen[1].dtype == torch.float32 and torch.equal(*seen)


def test_compiled_experts_bear_one_that_no_token_chose():
    results = []
    for compiled in (False, True):
        model = tiny(moe_experts=4).train()
        with torch.no_grad():
            for experts in moe.layers(model):
                experts.bias[2] = -10.0  # is never chosen
        if compiled:
            torch._dynamo.reset()
            model.compile_blocks()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(some_ids(), some_ids())[1]
        loss.backward()
        assert all(layer.load[2] == 0 for layer in moe.layers(model))
        results.append([loss, *(p.grad for p in model.parameters())])
    for eager, fused in zip(*results):
        torch.testing.assert_close(fused, eager, rtol=0.1, atol=2e-2)


def test_the_walk_keeps_the_dtype_of_the_stream():
    model, idx = shaken(tiny(bf16_stream=True)).eval(), some_ids()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        *_, (_, _, _, before, last) = depth.walk(model, idx)
        logits = F.linear(*model.ends.readout(last, model.head.weight))
        assert before.x.dtype == last.x.dtype == torch.bfloat16 and torch.equal(
            logits, model(idx)[0]
        )


# ---------------------------------------------------------------------------------------------------------------------
# House rules

SOURCES = sorted(
    glob.glob(os.path.join(HERE, "*.py")) + glob.glob(os.path.join(HERE, "runs", "*.py"))
)


def test_only_the_launcher_speaks_through_the_environment():
    launcher = {f'environ.get("{name}",' for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    for path in SOURCES:
        if not os.path.basename(path).startswith("test_"):
            named = re.findall(r"environ\S*", open(path).read())
            assert set(named) <= launcher | {"environ"}, (path, named)
            assert not re.findall(r"except( Exception)?:", open(path).read()), path


@pytest.mark.parametrize(
    "name",
    [
        os.path.basename(path)[:-3]
        for path in glob.glob(os.path.join(HERE, "*.py"))
        if not path.endswith("train.py")
    ],
)
def test_importing_does_nothing(name, tmp_path):
    code = f"import sys; sys.path.insert(0, {HERE!r}); import {name}"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, os.listdir(tmp_path)) == (0, "", []), result.stderr
