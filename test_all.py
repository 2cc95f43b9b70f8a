"""The tests compare each concept with something independent. python -m pytest -q test_all.py"""

import base64
import contextlib
import dataclasses
import faulthandler
import functools
import glob
import gzip
import itertools
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import attention
import bhyt
import checkpoint as checkpoints
import configurator
import data as data_file
import generate
import lora
import machine
import mod
import model as model_file
import moe
import nag
import ngpt
import norms
import plot
import prepare_c4
import prune
import streams
from model import GPT, RESIDUALS, GPTConfig

HERE = os.path.dirname(os.path.abspath(__file__))
FIELDS = dataclasses.fields(GPTConfig)
PLAIN = os.path.join(HERE, "config", "plain.py")
TINY = {key: value for _, key, value in configurator.read_file(PLAIN) if hasattr(GPTConfig, key)}
TINY |= dict(residual="nag", n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64)
TINY_RUN = (
    f"{PLAIN} --residual=nag --n_layer=2 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 "
    "--max_iters=6 --warmup_iters=2 --eval_tokens=512 --eval_interval=3 --log_interval=1 "
    "--device=cpu --dtype=float32 --compile=False"
).split()
EXTRAS = dict(smear=3, value_embeds=True, logit_cap=1.0)
MOD = dict(mod_on="both", mod_rate=0.4)
assert_close = torch.testing.assert_close
cases = functools.partial(pytest.mark.parametrize, ids=str)
every_mode = pytest.mark.parametrize("residual", RESIDUALS)
slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
mean_square = lambda x: x.square().mean(-1, keepdim=True)
rms = lambda x: mean_square(x).sqrt()
unit = lambda x, dim=-1: x / x.norm(dim=dim, keepdim=True)
centred = lambda x: x - x.mean(-1, keepdim=True)
without_parallel = lambda f, x: f - x * (f * x).mean(-1, keepdim=True) / mean_square(x)
arrays = lambda name: np.load(os.path.join(HERE, "goldens", name + ".npz")).items()
golden = lambda name: {key: torch.tensor(array) for key, array in arrays(name)}


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **changes}))


def some_ids(rows=2, T=32, vocab=64, seed=1):
    return torch.randint(vocab, (rows, T), generator=torch.Generator().manual_seed(seed))


def shaken(model):
    """Change every initial value, so that no gain is 1 and no output projection is small."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for experts in moe.layers(model):
            experts.bias.normal_(std=0.1)
    model.refresh()
    return model


def logits_and_gradients(model, idx, targets):
    torch.manual_seed(0)
    logits = model(idx)[0]
    torch.manual_seed(0)
    loss = model(idx, targets)[1]
    return logits, loss, torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)


def compile_with(monkeypatch, backend, **how):
    """Let torch.compile use this backend. aot_eager traces and checks, but generates no code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, **how))
    monkeypatch.setattr(streams, "ITERS", 3)  # more of them only take time to compile
    torch._dynamo.reset()


@pytest.fixture
def quick_compiler(monkeypatch):
    compile_with(monkeypatch, "aot_eager")


def accepts(**changes):
    """Whether such a model exists. If not, its mode must refuse a setting that it does not use."""
    try:
        return bool(tiny(**changes))
    except ValueError as error:
        assert "does not use" in str(error)


# --- Settings -------------------------------------------------------------------------------------


def configure(*argv):
    """All settings of train.py and the model after this command line, and train.py's namespace"""
    namespace = {"__file__": os.path.join(HERE, "train.py"), "__doc__": "Train a model."}
    return configurator.configure(namespace, GPTConfig, argv=argv)[0], namespace


def test_settings_take_values_of_their_type_in_the_order_given(tmp_path):
    (tmp_path / "x.py").write_text('"""A config file"""\ninclude = "y.py"\nn_embd = 6\n')
    (tmp_path / "y.py").write_text("max_iters = 1e3\nn_embd = 4")
    argv = f"--max_iters=5 {tmp_path}/x.py --n_embd=8 --grad_clip=2 --out_dir=b=c --residual=7"
    argv += " --wandb_log=True --dyt_alpha=(1,2,3) --gate_lr=2 --min_lr=1 --min_lr=None"
    argv += " --sft_data='a'"
    values, namespace = configure(*argv.split())
    expected = dict(max_iters=1000, n_embd=8, grad_clip=2.0, out_dir="b=c", residual="7")
    expected |= dict(sft_data="'a'")
    expected |= dict(wandb_log=True, dyt_alpha=(1, 2, 3), gate_lr=2.0, min_lr=None, seed=1337)
    assert repr({key: values[key] for key in expected}) == repr(expected)  # repr tells 1 from 1.0
    assert namespace["max_iters"] == 1000 and "n_embd" not in namespace
    for text in ("A = 0\nb = 1\nx = configure()\nc = 2", "A = 0\nb = 1\ndef f(): pass\nc = 2"):
        assert list(configurator.read_settings(text)) == ["b"]


@cases("text, value", [
    ("12 * 8", 96), ("-(2 - 5) * 2**3", 24), ("+7 // 2", 3), ("12 / 4", 3), ("(1 + 2) * 2", 6),
])  # fmt: skip
def test_a_config_may_hold_arithmetic_of_numbers(tmp_path, text, value):
    (tmp_path / "x.py").write_text(f"batch_size = {text}\nlearning_rate = {text} / 2\n")
    values, _ = configure(str(tmp_path / "x.py"))
    assert repr((values["batch_size"], values["learning_rate"])) == repr((value, value / 2))


def test_a_run_begins_with_the_settings_that_are_not_the_defaults(capsys):
    values = configure("--n_layer=3", "--out_dir=x", "--seed=1337", "--gate_lr=None")[0]
    configurator.echo(values)
    line = "settings that differ from the defaults: out_dir='x' n_layer=3; --help lists all\n"
    assert capsys.readouterr().out == line
    configurator.echo(configure()[0])
    assert "from the defaults: none;" in capsys.readouterr().out


@cases("arg, message", [
    ("--ma_iters=3", "no setting 'ma_iters'; the nearest is 'max_iters'"),
    ("--n_layer=1.5", "n_layer expects int, got 1.5 (float)"),
    ("--n_layer=True", "n_layer expects int, got True (bool)"),
    ("--n_layer=None", "n_layer expects int, got None"),
    ("--tied=1", "tied expects bool, got 1 (int)"),
    ("--gate_lr=lots", "gate_lr expects float or None, got 'lots' (str)"),
    ("--n_layer", "--n_layer: write it as --key=value"),
    ("nowhere.py", "nowhere.py: no such config file"),
    ("include = 'x.py'", "x.py: includes itself"),
    ("include = './x.py'", "x.py: includes itself"),
    ("n_laye = 5", "x.py: there is no setting 'n_laye'"),
    *((f"n_layer = {bad}", "x.py, line 1: expected key") for bad in (
        "open('y')", "n + 1", "-'a'", "'a' * 2", "9**9**9", "7**99", "1 / 0", "10.0**99 * 1e300",
        "True + 1", "(-8) ** 0.5", "not 1", "5 % 2", "2 * open('y')", "~1",
    )),
    ("--n_layer=2*4", "n_layer expects int, got '2*4'"),
])  # fmt: skip
def test_settings_refuse_with_a_line_that_says_what_to_do(tmp_path, arg, message):
    (tmp_path / "x.py").write_text(arg)
    with pytest.raises(SystemExit, match=re.escape(message)):
        configure(str(tmp_path / "x.py") if " = " in arg else arg)


def test_every_setting_is_declared_once_has_a_comment_and_is_in_the_help(capsys):
    with pytest.raises(SystemExit, match="^None$"):
        configure("--help")
    text = re.sub(" +", " ", capsys.readouterr().out)
    files = dict.fromkeys(("eval", "bench", "prepare_c4", "train")) | {"model": "GPTConfig"}
    declared = {
        file: configurator.read_settings(open(os.path.join(HERE, file + ".py")).read(), of)
        for file, of in files.items()
    }
    assert not [name for s in declared.values() for name in s if not s[name].comment]
    train, shape = declared["train"], declared["model"]
    assert list(shape) == [field.name for field in FIELDS] and not {*train} & {*shape}
    for name, setting in (train | shape).items():
        assert f"--{name}={setting.default} {setting.comment}" in text


@cases("path", sorted(glob.glob(os.path.join(HERE, "config", "*.py"))))
def test_every_config_builds_its_model_and_the_shapes_in_its_docstring_have_equal_size(path):
    counts, shapes = [], re.findall(r"^(\d+)  (--.*)$", open(path).read(), re.M)  # width over depth
    for ratio, argv in [("40", ""), *shapes]:
        values, _ = configure(path, *argv.split())
        config = GPTConfig(**{field.name: values[field.name] for field in FIELDS})
        assert not shapes or config.n_embd / config.n_layer == pytest.approx(int(ratio), rel=0.035)
        modes = [config.residual, "prenorm"] if shapes else [config.residual]
        with torch.device("meta"):
            models = [GPT(dataclasses.replace(config, residual=mode)) for mode in modes]
        counts.append([model.num_params(active) for model in models for active in (False, True)])
    assert len(counts) == (5 if "moe_840m" in path else 1) and counts[0][0] > 4e5
    assert all(max(count) / min(count) < 1.02 for count in zip(*counts))


@cases("path", ["plot.py", "train.py", "eval.py", "tasks.py", "depth.py"])
def test_no_script_names_a_mode(path):
    """They use RESIDUALS or attributes of a mode's class, so a new mode needs no change in them."""
    known = {"train.py": ["bhyt", "bhyt", "nag"]}  # bhyt.INTERVAL, and a message
    source = open(os.path.join(HERE, path)).read()
    source = re.sub(r'""".*?"""|#.*?$|^COLOURS = .*?^}', "", source, flags=re.M | re.S)
    modes = {*RESIDUALS, *(mode.__name__ for mode in RESIDUALS.values())} - {"none"}
    named = sorted(word for word in re.findall(r"\w+", source) if word in modes)
    assert named in ([], known.get(path)), f"{path} names {named}: ask the mode's class instead"


# --- The model against a second implementation of the equations, in float64 -----------------------


class Formulas:
    """The parts that modes share, with the parameters P of a float64 model. `at` names the current
    module: the ends, or the residual of sublayer f in block b. s is the branch scale."""

    activations = {
        "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
        "relu": lambda z: z.clamp(min=0), "relu2": lambda z: z.clamp(min=0) ** 2,
        "silu": lambda z: z / (1 + torch.exp(-z)),
    }  # fmt: skip

    def __init__(self, model):
        self.c, self.P, self.at = model.config, {}, "ends"
        self.D = self.c.head_dim or self.c.n_embd // self.c.n_head
        self.s = self.c.n_layer**-0.5 if self.c.branch_scale == "depth" else 1
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.P[name] = tensor
            if tensor.ndim == 3:  # the matrices of all experts: one linear per expert
                at, _, matrix = name.rpartition(".")
                self.P |= {f"{at}.{e}.{matrix}.weight": w for e, w in enumerate(tensor)}

    def p(self, name, default=None):
        return self.P.get(f"{self.at}.{name}", default)

    def scaled(self, x, v=None):
        return x / torch.sqrt((mean_square(x) if v is None else v) + self.c.norm_eps)

    def norm(self, x, name="norm", v=None):
        if self.c.norm == "none":
            return x
        x = centred(x) if self.c.norm == "layer" else x
        shift = self.p(name + ".shift") if self.c.norm == "layer" and self.c.bias else 0
        return self.p(name + ".gain") * self.scaled(x, v) + shift

    def dyt(self, x):
        return self.p("norm.gain") * torch.tanh(self.p("norm.alpha") * x) + self.p("norm.shift")

    def derf(self, x):
        z = self.p("norm.alpha") * x + self.p("norm.s")
        return self.p("norm.gain") * torch.special.erf(z) + self.p("norm.shift")

    def bounded(self, x, v=None):
        bound = self.p("norm.lam") * math.sqrt(1 - bhyt.P)
        return self.p("norm.gain") * torch.tanh(bound * self.scaled(x, v))

    def linear(self, x, at):
        return x @ self.P[at + ".weight"].T + self.P.get(at + ".bias", 0)

    def angles(self, T):
        angles = [self.c.rope_base ** (-2 * i / self.D) for i in range(self.D // 2)]
        if self.c.rope_scaling is not None:
            factor, low, high, length = (*self.c.rope_scaling, 1, 2, 0)[:4]
            keep = lambda a: min(1, max(0, (length * a / (2 * math.pi) - low) / (high - low)))
            angles = [angle * (keep(angle) + (1 - keep(angle)) / factor) for angle in angles]
        return torch.arange(T)[:, None] * torch.tensor(angles, dtype=torch.float64)

    def rotated(self, x, at, n):
        """Queries or keys (B, T, heads, D), with feature pairs rotated as complex numbers"""
        y, joint = self.linear(x, f"{at}.w{n}"), self.c.qk_norm_joint
        y = y if joint else y.unflatten(-1, (-1, self.D))
        y = self.P[f"{at}.{n}_norm.gain"] * self.scaled(y) if self.c.qk_norm else y
        y = y.unflatten(-1, (-1, self.D)) if joint else y
        y = torch.complex(*y.chunk(2, -1)) * torch.exp(1j * self.angles(x.size(1)))[:, None]
        y = torch.cat([y.real, y.imag], -1)
        s = self.P.get(f"{at}.{n}_scale.s", self.P.get(f"{at}.q_scale.s"))  # of nGPT
        return y if s is None else math.sqrt(x.size(-1)) * s.view(y.shape[2:]) * unit(y)

    def attn(self, x, at):
        q, k = (self.rotated(x, at, n) for n in "qk")
        v = self.linear(x, at + ".wv").unflatten(-1, k.shape[2:])
        if self.c.value_embeds and (self.c.n_layer - 1 - self.b) % 2 == 0:  # also the last block
            values = self.P[f"value_embeds.{self.b}.weight"][self.idx]
            v = v + self.P[at + ".value_gate"][:, None] * values.view(v.shape)
        group = [head * k.size(2) // q.size(2) for head in range(q.size(2))]
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        scores = torch.einsum("bthd,bshd->bhts", q, k[:, :, group])
        scores = scores * q.size(-1) ** (0.5 if self.c.residual == "ngpt" else -0.5)
        p = scores.masked_fill(future, -math.inf).softmax(-1)
        y = torch.einsum("bhts,bshd->bthd", p, v[:, :, group])
        return self.linear(y.flatten(2), at + ".wo")

    def hidden(self, x, at, name):
        y, of_all = self.linear(x, f"{at}.{name}"), at.rpartition(".")[0]  # experts
        scale = {"up": "act.s_u", "gate": "act.s_v"}[name]  # of nGPT
        s = self.P.get(f"{at}.{scale}", self.P.get(f"{of_all}.{scale}"))
        return y if s is None else math.sqrt(x.size(-1)) * s * y

    def one_mlp(self, x, at):
        up, kind = self.hidden(x, at, "up"), self.c.activation
        if kind == "swiglu":
            up = self.activations["silu"](self.hidden(x, at, "gate")) * up
        return self.linear(up if kind == "swiglu" else self.activations[kind](up), at + ".down")

    def mlp(self, x, at):
        if not self.c.moe_experts:
            return self.one_mlp(x, at)
        s, k, E = self.linear(x, at + ".router").softmax(-1), self.c.moe_top_k, self.c.moe_experts
        rank = (s + self.P[at + ".bias"]).argsort(-1, descending=True).argsort(-1)
        w = torch.where(rank < k, s, 0)
        w = w / w.sum(-1, keepdim=True) if k > 1 else w
        y = sum(w[..., e, None] * self.one_mlp(x, f"{at}.{e}") for e in range(E))
        return y + self.one_mlp(x, at + ".shared") if self.c.moe_shared else y

    def added_by_attention(self):
        """BHyT's c, with W_V repeated for each query head"""
        at, c = f"blocks.{self.b}.attn", self.c
        w_v = self.P[at + ".wv.weight"].unflatten(0, (-1, self.D))
        w_v = w_v.repeat_interleave(c.n_head // w_v.size(0), 0).flatten(0, 1)
        product = self.P[at + ".wo.weight"] @ w_v * (self.p("norm.gain") if c.bhyt_unit else 1)
        return product.square().sum() / ((c.bhyt_context or c.block_size) * c.n_embd)


class Equation(NamedTuple):
    """The equations of a mode, for Formulas m. begin makes the stream x of the embedding e."""

    sublayer: Callable  # (m, x) -> x
    begin: Callable = lambda m, e: e  # -> x
    end: Callable = lambda m, x, W: x @ W.T  # the last x and the head -> the logits


def nag_sublayer(m, R):
    """NAG with a single stream R, which grows and is read only as a direction"""
    r = R / rms(R)
    u = m.f(r)
    u = centred(u) if m.c.nag_centre else u
    u = without_parallel(u, r) if m.c.nag_orthogonal else u
    a = m.s * m.p("alpha")
    if m.c.nag_directions:
        b, p = m.p("constants")[:-1].chunk(2)
        gates = torch.sigmoid(r @ m.p("w").T + b) * torch.softmax(p, 0)
        a = a * gates.sum(-1, keepdim=True) ** F.softplus(m.p("constants")[-1])
    return R + rms(R) * a * u / rms(u)


def nag_end(m, R, W):
    r, W = R if m.c.nag_lane else R / rms(R), centred(W) / rms(centred(W))
    return m.p("g_dec").exp() * r @ W.T / math.sqrt(m.c.n_embd)


def ngpt_sublayer(m, h):
    alpha = m.s * ngpt.ALPHA * math.sqrt(m.c.n_embd) * m.p("alpha").abs()
    return unit(unit(h) + alpha * (unit(m.f(h)) - unit(h)))


def predicting(norm, output_variance):
    """BHyT's variance v, measured before attention, and predicted before the MLP"""

    def sublayer(m, stream):
        x, v = stream
        v = mean_square(x) if "attn" in m.at else v
        added = m.s**2 * m.added_by_attention() * output_variance(m)
        return x + m.s * m.f(norm(m, x, v=v)), v + added.detach()

    return Equation(sublayer, lambda m, e: (e, None), lambda m, x, W: bhyt_end(m, x[0], W))


def hc_sublayer(m, X):
    """Hyper-Connections, with the streams X in a list"""
    n, A = len(X), []
    s, a = m.p("sa")[:2], m.p("sa")[2:].unflatten(0, (n, n + 2))
    for i, x in enumerate(X):
        a_i = a[i].expand(*x.shape[:-1], -1)
        A.append(a_i + s[[0, 1] + [0] * n] * torch.tanh(m.scaled(x) @ m.p("w").T))
    f = m.s * m.f(m.norm(sum(a[..., :1] * x for a, x in zip(A, X))))
    return [sum(a[..., 2 + k, None] * x for a, x in zip(A, X)) + A[k][..., 1:2] * f
            for k in range(n)]  # fmt: skip


def s_and_b(m):
    n_b = len(m.p("w"))
    return m.p("sb")[:-n_b], m.p("sb")[-n_b:]


def mhc_products(m, X):
    z = torch.cat(X, -1)
    return z / torch.sqrt(mean_square(z) + 1e-6) @ m.p("w").T


def mhc_sublayer(m, X, f=None):
    n, (s, b) = len(X), s_and_b(m)
    y = mhc_products(m, X) * torch.cat([s[:1].expand(n), s[1:2].expand(n), s[2:].expand(n * n)])
    y = y + b
    M = torch.exp(y[..., 2 * n :].unflatten(-1, (n, n)))
    M = M / M.sum(-1, keepdim=True) + 1e-6
    for i in range(39):  # columns, rows, columns, ..., columns
        M = M / (M.sum(i % 2 - 2, keepdim=True) + 1e-6)
    if f is None:
        f = m.f(m.norm(sum((torch.sigmoid(y[..., i, None]) + 1e-6) * X[i] for i in range(n))))
    f = m.s * f
    return [sum(M[..., j, k, None] * X[j] for j in range(n))
            + 2 * torch.sigmoid(y[..., n + k, None]) * f for k in range(n)]  # fmt: skip


def ihc_sublayer(m, X):
    n, (s, b) = len(X), s_and_b(m)
    y = mhc_products(m, X) * torch.cat([s[:1].expand(n), s[1:].expand(n)]) + b
    f = m.s * m.f(m.norm(sum((torch.sigmoid(y[..., i, None]) + 1e-6) * X[i] for i in range(n))))
    return [X[i] + 2 * torch.sigmoid(y[..., n + i, None]) * f for i in range(n)]


def mhc_end(m, X, W):
    s, b = s_and_b(m)
    pre = torch.sigmoid(s * mhc_products(m, X) + b) + 1e-6
    return m.norm(sum(pre[..., i, None] * x for i, x in enumerate(X))) @ W.T


def smhc_sublayer(m, stream):
    X, pre = stream
    n, (s, b) = len(X), s_and_b(m)
    y = s[0] * mhc_products(m, X)[..., :n] + b[:n]
    f = m.f(m.norm(sum(pre[..., i, None] * x for i, x in enumerate(X))))
    return mhc_sublayer(m, X, f), torch.sigmoid(y) + 1e-6


def gated_reads(m, X):
    z = [m.norm(x, f"norm.{i}") for i, x in enumerate(X)]
    low = F.silu(torch.cat(z, -1) @ m.p("d").T / len(X))
    gates = torch.sigmoid(low @ m.p("u").T).unflatten(-1, (len(X), -1))
    return (gates * torch.stack(z, -2)).mean(-2), torch.cat(z, -1)


def gated_sublayer(m, X):
    h, z = gated_reads(m, X)
    post = 2 * torch.sigmoid(z @ m.p("w").T / len(X))
    f = m.s * m.f(h)
    return [x + post[..., i, None] * f for i, x in enumerate(X)]


def wide_reads(m, X, rho):
    return m.norm(sum(torch.sigmoid(r) * x for r, x in zip(rho, X)))


def wide_sublayer(m, X):
    rho, kappa, beta = m.p("constants").chunk(3)
    f = m.s * m.f(wide_reads(m, X, rho))
    return [(0.9 + 0.1 * torch.sigmoid(k)) * x + 2 * torch.sigmoid(b) * f
            for k, b, x in zip(kappa, beta, X)]  # fmt: skip


def attended(m, outputs, size):
    """The weighted sum of Attention Residuals. outputs: the embedding, then each sublayer's"""
    e, *f = outputs
    v = [e, *(sum(f[i : i + size]) for i in range(0, len(f), size))]
    scores = [m.p("source_norm.gain") * m.scaled(source) @ m.p("w") for source in v]
    p = torch.stack(scores).softmax(0)
    return sum(p_i[..., None] * source for p_i, source in zip(p, v))


def attention_residuals(size):
    return Equation(
        lambda m, v: [*v, m.s * m.f(m.norm(attended(m, v, size(m))))],
        lambda m, e: [e], lambda m, v, W: m.norm(attended(m, v, size(m))) @ W.T,
    )  # fmt: skip


copies = lambda m, e: [e] * streams.count(m.c)


def mixln_sublayer(m, x):
    post = m.b < norms.POST_SHARE * m.c.n_layer
    return m.norm(x + m.s * m.f(x)) if post else x + m.s * m.f(m.norm(x))


def x0mix_sublayer(m, stream):
    x, x_0, x_m = stream
    if "attn" in m.at:
        x_m = x if m.b == m.c.n_layer // 2 + 1 else x_m
        x = m.p("mix")[0] * x + m.p("mix")[1] * x_0
    return x + m.s * m.f(m.norm(x)), x_0, x_m


def x0mix_end(m, stream, W):
    x, _, x_m = stream
    return m.norm(x - m.p("nu") * (x if x_m is None else x_m)) @ W.T


def keel_sublayer(m, x):
    f = m.s * m.f(m.norm(x, "norm_in"))
    if m.b == 0:
        return x + f if "attn" in m.at else m.norm(x + f)
    return m.norm(2 * m.c.n_layer * x + f)


final_norm = lambda m, x, W: m.norm(x) @ W.T
bhyt_end = lambda m, x, W: (m.bounded(x) if m.c.bhyt_lambda[2] else m.norm(x)) @ W.T

EQUATIONS = {
    "none": Equation(lambda m, x: m.norm(m.f(x))),
    "postnorm": Equation(lambda m, x: m.norm(x + m.s * m.f(x))),
    "prenorm": Equation(lambda m, x: x + m.s * m.f(m.norm(x)), end=final_norm),
    "outnorm": Equation(lambda m, x: x + m.s * m.norm(m.f(x)), end=final_norm),
    "perinorm": Equation(
        lambda m, x: x + m.s * m.norm(m.f(m.norm(x)), "norm_out"),
        lambda m, e: m.norm(e, "norm_in"), final_norm,
    ),
    "lns": Equation(lambda m, x: x + m.s * m.f(m.norm(x) / math.sqrt(m.b + 1)), end=final_norm),
    "dyt": Equation(
        lambda m, x: x + m.s * m.f(m.dyt(x)),
        lambda m, e: m.p("scale") * e, lambda m, x, W: m.dyt(x) @ W.T,
    ),
    "derf": Equation(
        lambda m, x: x + m.s * m.f(m.derf(x)),
        lambda m, e: m.p("scale") * e, lambda m, x, W: m.derf(x) @ W.T,
    ),
    "keel": Equation(keel_sublayer),
    "deepnorm": Equation(lambda m, x: m.norm((2 * m.c.n_layer) ** 0.25 * x + m.s * m.f(x))),
    "rezero": Equation(lambda m, x: x + m.s * m.p("a") * m.f(m.norm(x)), end=final_norm),
    "mixln": Equation(mixln_sublayer, end=final_norm),
    "x0mix": Equation(
        x0mix_sublayer, lambda m, e: (m.norm(e, "norm_in"), m.norm(e, "norm_in"), None), x0mix_end
    ),
    "orthogonal": Equation(
        lambda m, x: x + m.s * without_parallel(m.f(m.norm(x)), x), end=final_norm
    ),
    "nag": Equation(nag_sublayer, lambda m, e: centred(e) * math.e ** m.p("g_enc", 0), nag_end),
    "ngpt": Equation(
        ngpt_sublayer, lambda m, e: unit(e) if m.c.smear else e,
        lambda m, h, W: math.sqrt(m.c.n_embd) * m.p("s_z") * (h @ W.T),
    ),
    "bhyt_exact": Equation(lambda m, x: x + m.s * m.f(m.bounded(x)), end=bhyt_end),
    "bhyt": predicting(Formulas.bounded, lambda m: m.p("norm.lam") ** 2 * (1 - bhyt.P)),
    "prenorm_approx": predicting(Formulas.norm, lambda m: m.p("norm.gain").square().mean()),
    "hc": Equation(hc_sublayer, copies, lambda m, X, W: m.norm(sum(X)) @ W.T),
    "mhc": Equation(mhc_sublayer, copies, mhc_end),
    "ihc": Equation(ihc_sublayer, copies, mhc_end),
    "smhc": Equation(
        smhc_sublayer,
        lambda m, e: (copies(m, e), torch.eye(streams.count(m.c))[0].expand(*e.shape[:2], -1)),
        lambda m, x, W: m.norm(sum(x[1][..., i, None] * x_i for i, x_i in enumerate(x[0]))) @ W.T,
    ),
    "gated": Equation(gated_sublayer, copies, lambda m, X, W: gated_reads(m, X)[0] @ W.T),
    "wide": Equation(wide_sublayer, copies, lambda m, X, W: wide_reads(m, X, m.p("rho")) @ W.T),
    "attnres": attention_residuals(lambda m: 1),
    "attnres_block": attention_residuals(lambda m: m.c.attnres_size or -(-m.c.n_layer // 4)),
}  # fmt: skip


def naive(model, idx):
    """The logits from EQUATIONS"""
    m, mode = Formulas(model), model.config.residual
    if mode not in EQUATIONS:
        pytest.fail(f"residual mode {mode!r} has no equation: add one to EQUATIONS in test_all.py")
    sublayer, begin, end = EQUATIONS[mode]
    m.idx, e = idx, m.P["embed.weight"][idx]
    for k, w in enumerate(m.P.get("smear.w", ()), 1):
        e = e + w * F.pad(m.P["embed.weight"][idx[:, :-k]], (0, 0, k, 0))
    x = begin(m, e)
    for b, name in itertools.product(range(m.c.n_layer), ("attn", "mlp")):
        m.b, m.at = b, f"blocks.{b}.{name}_residual"
        m.f = functools.partial(getattr(m, name), at=f"blocks.{b}.{name}")
        x = sublayer(m, x)
    m.at = "ends"
    logits, cap = end(m, x, m.P["embed.weight" if m.c.tied else "head.weight"]), m.c.logit_cap
    return cap * torch.tanh(logits / cap) if cap else logits


def check_against_the_equations(**changes):
    model = shaken(tiny(**{"n_embd": 16, **changes})).double().eval()
    model.refresh()
    angles, idx, targets = Formulas(model).angles(32), some_ids(T=7), some_ids(T=7, seed=2)
    assert_close((model.cos, model.sin), (angles.cos(), angles.sin()), atol=1e-5, rtol=0)
    model.cos, model.sin = angles.cos(), angles.sin()  # the model keeps float32
    targets[0, :3] = -1  # ignored by the loss
    logits, loss, expected = model(idx)[0], model(idx, targets)[1], naive(model, idx)
    p = expected.softmax(-1)[targets >= 0].gather(-1, targets[targets >= 0, None])
    assert len(p) == 11 and loss.item() == pytest.approx(-p.log().mean().item(), rel=1e-5)
    assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    g, parameters = torch.randn(logits.shape), [*model.parameters()]
    gradients = lambda y: torch.autograd.grad(y, parameters, g.to(y), allow_unused=True)
    assert_close(gradients(logits), gradients(expected), rtol=1e-6, atol=1e-6)


@every_mode
def test_every_mode_equals_its_equation(residual):
    check_against_the_equations(residual=residual)
    for changes in (
        dict(norm="layer", bias=True), dict(norm="none"), dict(branch_scale="depth", n_layer=3),
        dict(n_head=4, n_kv_head=2, qk_norm=True), dict(moe_experts=4, tied=False),
    ):  # fmt: skip
        if accepts(residual=residual, **changes):
            check_against_the_equations(residual=residual, **changes)


@cases("changes", [
    dict(EXTRAS, n_head=4, n_kv_head=2, n_layer=3), dict(EXTRAS, residual="ngpt"),
    dict(residual="prenorm", norm="layer"), dict(activation="relu"),
    dict(activation="relu2"), dict(activation="silu"),
    dict(activation="swiglu", bias=True), dict(residual="lns", moe_experts=3, moe_top_k=1),
    dict(moe_experts=4, moe_shared=24, activation="swiglu", n_hidden=16, bias=True),
    dict(nag_centre=False), dict(nag_orthogonal=False), dict(nag_directions=0),
    dict(nag_centre=False, nag_orthogonal=False, nag_directions=0, nag_lane=False),
    dict(residual="bhyt", bhyt_unit=True, n_head=4, n_kv_head=1, bhyt_context=8),
    dict(residual="bhyt", bhyt_lambda=(1.0, 0.5, 0.3), norm_eps=0.1),
    dict(residual="bhyt_exact", bhyt_learned=False, bhyt_lambda=(1.0, 0.5, 0.3)),
    dict(residual="ngpt", activation="swiglu", tied=False, n_head=4, n_kv_head=2),
    dict(residual="ngpt", activation="swiglu", moe_experts=4, moe_shared=24, bias=True),
    dict(residual="hc", hc_streams=3, norm_eps=0.1),
    dict(residual="mhc", hc_streams=3, mhc_start="deepseek"), dict(residual="mhc", hc_streams=1),
    dict(residual="ihc", hc_streams=3, mhc_start="deepseek"), dict(residual="ihc", hc_streams=1),
    dict(residual="ihc", hc_streams=4),
    *[dict(residual=mode, hc_streams=2) for mode in ("mhc", "smhc", "gated", "wide")],
    dict(residual="wide", hc_streams=3), dict(residual="gated", norm_eps=0.1),
    *[dict(residual="attnres_block", attnres_size=size, n_layer=3) for size in (2, 3, 4, 9)],
    dict(head_dim=6, attn_bias="qkv", rope_scaling=(4.0,)), dict(attn_bias="all", head_dim=12),
    dict(n_head=4, n_kv_head=2, qk_norm=True, qk_norm_joint=True, bias=True, attn_bias="none"),
    dict(rope_base=100.0, rope_scaling=(8.0, 1.0, 4.0, 16), head_dim=16, residual="ngpt"),
    dict(residual="bhyt", head_dim=6, n_head=4, n_kv_head=2, qk_norm=True, qk_norm_joint=True),
])  # fmt: skip
def test_model_equals_the_equations(changes):
    check_against_the_equations(**changes)


@torch.no_grad()
@cases("place", ["embedding", "attention weights", "attention", "mlp"])
def test_dropout_in_each_place_drops_half_and_doubles_the_rest(place):
    model, idx = shaken(tiny(residual="prenorm", dropout=0.5)).double().eval(), some_ids(64)
    block, rope, at = model.blocks[0], (model.cos, model.sin), torch.arange(32)
    stream = model.begin(idx, at)
    outputs = {
        "embedding": lambda: model.begin(idx, at).x,
        "attention weights": lambda: block.attn(stream.x, rope)[:, 0],
        "attention": lambda: block.attend(stream, rope).x - stream.x,
        "mlp": lambda: block.feed(stream).x - stream.x,
    }
    if place == "attention weights":  # the first token sees only itself, with a weight of 1
        block.attn.wo.weight.copy_(torch.eye(32))
    else:
        block.attn.dropout = 0.0
    whole = outputs[place]()
    model.train()
    dropped = outputs[place]()
    kept = dropped.abs() > 1e-9
    assert 0.3 < kept.double().mean() < 0.7
    assert_close(dropped, 2 * whole * kept)


@cases(
    "residual, how", [("nag", dict(loss_chunk=7)), ("bhyt", dict(loss_chunk=100, recompute=True))]
)
def test_options_for_less_memory_change_no_number(residual, how):
    model, x, y = shaken(tiny(residual=residual, dropout=0.2)), some_ids(3), some_ids(3, seed=2)
    y[0, :5], results = -1, []
    for settings in ({}, how):
        vars(model).update(settings)
        keep = lambda t, sizes=(sizes := []): sizes.append(t.numel()) or t
        with torch.autograd.graph.saved_tensors_hooks(keep, id):
            model(x, y)
        results.append((logits_and_gradients(model, x, y)[1:], sum(sizes), max(sizes)))
    (expected, total, largest), (ours, less, no_larger) = results
    assert less < total * (0.7 if "recompute" in how else 1) and no_larger <= largest
    assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def test_a_batch_without_targets_has_no_loss_and_does_not_count():
    model, x, y = tiny(), some_ids(), some_ids(seed=2)
    none = torch.full_like(y, -1)
    loss = model(x, none)[1]
    loss.backward()
    assert loss == 0 and all(p.grad.isfinite().all() for p in model.parameters())
    alone = model_file.evaluate(model, [(x, y)])
    assert model_file.evaluate(model, [(x, y), (x, none)]) == pytest.approx(alone)


def test_eager_losses_are_summed_and_capped_in_float32():
    model, targets = tiny(vocab_size=512, tied=False, logit_cap=15.0), torch.arange(512)
    head, h, errors = model.head.weight, 6 * torch.randn(512, 32), []
    head.data.normal_()
    expected = F.cross_entropy(15 * torch.tanh(h.double() @ head.double().T / 15), targets)
    (whole,) = torch.autograd.grad(expected, head)
    for model.loss_chunk in (None, 2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(h[None], head, targets[None])
        (grad,) = torch.autograd.grad(loss, head)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
        errors.append(float((grad - whole).norm() / whole.norm()))
    assert max(errors) < 0.01 and errors[1] < 1.1 * errors[0]


def test_modules_equal_the_goldens():
    z, dyt = golden("dyt"), norms.DyT(32, 1.0)
    dyt.load_state_dict(dict(alpha=z["alpha"], gain=z["gamma"], shift=z["beta"]))
    assert_close(dyt(z["x"]), z["out"], rtol=1e-6, atol=1e-6)
    z, norm = golden("bhyt"), bhyt.BoundedTanh(GPTConfig(n_embd=32), 2.0)
    x, c = z["x"].requires_grad_(), bhyt.attention_gain(z["w_v"], z["w_o"], 4, 2, 8)
    norm.load_state_dict(dict(lam=z["lam_attn"], gain=z["gamma_attn"]))
    y = norm(x)
    ours = c, y, *torch.autograd.grad(y, (x, norm.lam, norm.gain), z["grad_out"])
    keys = ("c_attn", "exact_normed", "exact_grad_x", "exact_grad_lam", "exact_grad_gamma")
    assert_close(ours, tuple(z[key] for key in keys), rtol=2e-6, atol=2e-6)
    attention, mlp = (bhyt.BHyT(GPTConfig(n_embd=32), layer) for layer in (1, 2))
    for mode, name in ((attention, "attn"), (mlp, "mlp")):
        mode.norm.load_state_dict(dict(lam=z["lam_" + name], gain=z["gamma_" + name]))
    attention.c.copy_(c)
    _, stream = attention.read(norms.Stream(z["x"]))
    predicted, _ = mlp.read(attention.write(stream, z["attn_out"]))
    assert_close(predicted, z["normed_mlp"], rtol=0, atol=5e-7)  # without c: 3e-6
    z = golden("nag")
    for eps, tolerance in (({"eps": 0.0}, 1e-9), ({}, 1e-5)):
        r, f = (z[key].requires_grad_() for key in ("direction", "branch_out"))
        m = nag.modulator(F.linear(r, z["mod_weight"]), z["mod_bias"], z["mod_logits"], z["beta"])
        direction, norm = nag.rotate(r, z["log_norm"], f, z["alpha"] * m, **eps)
        ours = direction, norm, *torch.autograd.grad(direction, (r, f), z["grad_out"])
        keys = ("new_direction", "new_log_norm", "grad_direction", "grad_branch_out")
        assert_close(ours, tuple(z[key] for key in keys), rtol=0, atol=tolerance)


@cases("norm", [norms.RMSNorm(64), norms.LayerNorm(64), norms.DyT(64, 1.0)])
def test_norms_compute_in_float32_and_keep_the_dtype(norm):
    torch.manual_seed(0)
    norm.reset_parameters()
    x = (torch.randn(5, 64) * 1e-3).bfloat16()
    y, exact = norm.bfloat16()(x), norm.double()(x.double())
    assert y.dtype == torch.bfloat16 and (y - exact).abs().max() <= exact.abs().max() * 2**-8


def test_generation():
    model, idx = shaken(tiny()), some_ids(T=4)
    text = idx
    for _ in range(20):
        text = torch.cat((text, model(text)[0][:, -1:].argmax(-1)), 1)
    for how in (dict(temperature=0), dict(top_k=1), dict(top_p=1e-6)):
        assert torch.equal(generate.generate(model, idx, 20, **how), text)
    assert generate.generate(model, idx, 100, temperature=0).shape == (2, 104)  # past the window
    assert generate.generate(tiny(block_size=1), idx, 3).shape == (2, 7)
    assert generate.generate(model, idx, 50, n_vocab=10, temperature=5.0)[:, 4:].max() < 10
    assert len(list(generate.stream_tokens(model, idx, 5))) == 5
    for how in (dict(top_k=0), dict(top_p=0.0), dict(temperature=-1.0)):
        with pytest.raises(ValueError, match="is below 0, top_k=.* below 1"):
            generate.generate(model, idx, 1, **how)
    with pytest.raises(ValueError, match="33 tokens do not fit into block_size=32"):
        model(some_ids(T=33))


def test_sampling_follows_the_distribution():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(20000, 4)
    for how, expected in (  # temperature, top_k, top_p
        ((1.0, None, None), [0.5, 0.3, 0.15, 0.05]), ((1.0, 2, None), [0.625, 0.375, 0, 0]),
        ((0.5, None, None), [0.685, 0.247, 0.062, 0.007]), ((1.0, None, 0.7), [0.625, 0.375, 0, 0]),
    ):  # fmt: skip
        counts = torch.bincount(generate.sample(logits, *how)[:, 0], minlength=4)
        assert (counts / 20000).tolist() == pytest.approx(expected, abs=0.02)


def few(mode):
    """A mode with two streams, and two sublayers in a block of sources: small graphs."""
    settings = {"hc_streams": 2, "attnres_size": 2}
    return {"residual": mode} | {k: settings[k] for k in RESIDUALS[mode].settings if k in settings}


@cases("backend, changes", [
    ("aot_eager", dict(MOD, moe_experts=4)), slow("inductor", dict(MOD, moe_experts=4)),
    *[slow("inductor", few(r)) for r in ("nag", "bhyt", "mhc", "attnres")],
])  # fmt: skip
def test_a_compiled_step_decodes_as_an_eager_one_and_is_compiled_once(
    backend, changes, monkeypatch
):
    compile_with(monkeypatch, backend)
    model, idx = shaken(tiny(**changes)).eval(), some_ids(T=4)
    expected = generate.generate(model, idx, 40, temperature=0)  # past the window
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(generate.generate(model, idx, 40, temperature=0, compile=True), expected)


@every_mode
def test_a_bfloat16_stream_stays_bfloat16_and_changes_results_little(residual):
    low, high = (shaken(tiny(residual=residual, bf16_stream=x)) for x in (True, False))
    idx, dtypes = some_ids(), set()
    for block in low.blocks:
        block.register_forward_hook(lambda module, args, stream: dtypes.add(stream.x.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        a, one, grads = logits_and_gradients(low, idx, idx.roll(-1, 1))
        b, two, _ = logits_and_gradients(high, idx, idx.roll(-1, 1))
    assert dtypes == {torch.bfloat16} and (a - b).abs().max() < 0.2 * b.std()
    assert abs(one - two) < 0.01 and all(grad.isfinite().all() for grad in grads)


@every_mode
def test_weights_in_bfloat16_change_results_little(residual):  # bench.py times these
    low, high = (shaken(tiny(residual=residual)).to(dtype) for dtype in (torch.bfloat16, None))
    idx = some_ids()
    a, one, grads = logits_and_gradients(low, idx, idx.roll(-1, 1))
    b, two, _ = logits_and_gradients(high, idx, idx.roll(-1, 1))
    assert (a - b).abs().max() < 0.2 * b.std() and abs(one - two) < 0.01 * two
    assert all(grad.isfinite().all() for grad in grads)


@every_mode
def test_every_parameter_is_initialised_and_trained_in_one_group(residual):
    norm = "layer" if accepts(residual=residual, norm="layer") else "rms"
    model = tiny(residual=residual, norm=norm, bias=True, qk_norm=True, moe_experts=2, tied=False)
    named, groups = dict(model.named_parameters()), model.param_groups()
    for p in named.values():
        p.data.fill_(math.nan)
    model.init_weights()
    assert all(p.isfinite().all() for p in named.values())
    assert sorted(sum(groups.values(), [])) == sorted(named)
    for group, dimensions in dict(matrices=2, embeddings=2, head=2, vectors=1, experts=3).items():
        assert all(named[name].ndim == dimensions for name in groups[group])
    gate = lambda name: re.search(r"(ends|_residual)\.\w+$", name) or named[name].numel() == 1
    assert sorted(groups["gates"] + groups["maps"]) == sorted(filter(gate, named))
    decays = getattr(RESIDUALS[residual], "decays", ())
    assert all((name.rpartition(".")[2] in decays) == (name in groups["maps"]) for name in named)
    for kind in ("adamw", "muon"):
        trained, expected = {}, {}
        for optimizer in model.optimizers(kind, 4e-3, {"gates": 1e-3}, 0.1):
            for group in optimizer.param_groups:
                assert group.get("betas", (0.9, 0.95)) == (0.9, 0.95)  # Muon has none
                how = type(optimizer).__name__.lower(), group["peak"], group["weight_decay"]
                trained |= dict.fromkeys(group["params"], how)
        for group, names in groups.items():
            optimizer = kind if group in ("matrices", "experts") else "adamw"
            peak = 1e-3 if group == "gates" else 4e-3
            decay = 0.1 * (group not in ("vectors", "gates"))
            expected |= {named[name]: (optimizer, peak, decay) for name in names}
        assert trained == expected
    model.blocks[0].extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match="no rule initialises blocks.0.extra"):
        model.init_weights()


@cases("how, std", [
    (dict(init="normal", init_scale=0.05), 0.05), (dict(init="kaiming"), 1.7 / 16),
    (dict(init="kaiming", activation="relu"), math.sqrt(2 / 256)),
    (dict(init="xavier"), math.sqrt(2 / (256 + 1024))),
    (dict(init="uniform", init_scale=0.5), 0.5 / math.sqrt(3)),
])  # fmt: skip
def test_initial_weights_have_the_expected_size(how, std):
    dense, experts = (tiny(n_embd=256, moe_experts=e, **how).blocks[0].mlp for e in (0, 2))
    assert dense.up.weight.std().item() == pytest.approx(std, rel=0.02)
    assert experts.up.std().item() == pytest.approx(std, rel=0.02)

    def outputs(residual="lns", **out):
        block = lambda experts: tiny(residual=residual, moe_experts=experts, **how, **out).blocks[0]
        dense, moe = block(0), block(2)
        return torch.cat([dense.attn.wo.weight, dense.mlp.down.weight.T, *moe.mlp.down.mT])

    plain, scaled, zero = (outputs(init_out=out) for out in ("plain", "scaled", "zero"))
    assert_close((scaled, zero), (plain / 2, 0 * plain))  # sqrt(2 n_layer) = 2
    assert_close((outputs("lns"), outputs("prenorm")), (plain, scaled))  # the modes' defaults
    for router in mod.routers(tiny(n_embd=512, mod_on="both", mod_rate=0.4, mod_fallback=True)):
        assert router.v.std().item() == pytest.approx(0.02, rel=0.2)  # Adam can rotate it


OTHER = dict(  # valid values for settings where twice the default is not valid
    n_kv_head=1, residual="lns", norm="layer", activation="swiglu", dropout=0.5, init="xavier",
    init_out="plain", branch_scale="depth", moe_balance="bias", mod_on="both", mod_rate=0.5,
    mod_router="learned", mod_budget="layer", mhc_start="paper", block_size=128,
    rope_scaling=(4.0,), attn_bias="all",
)  # fmt: skip


def another(field):
    """A value of a setting other than that of tiny models"""
    x = TINY.get(field.name, field.default)
    if x is None:
        x = 4 if field.type == int | None else 1.0
    twice = tuple(y / 2 for y in x) if isinstance(x, tuple) else 2 * x or 4
    return OTHER.get(field.name, not x if isinstance(x, bool) else twice)


@cases("field", FIELDS, ids=lambda field: field.name)
def test_every_model_setting_changes_something_and_is_refused_by_modes_without_it(field):
    name, change = field.name, {field.name: another(field)}
    owners = [residual for residual, mode in RESIDUALS.items() if name in mode.settings]
    base = dict(tied=name != "head_scale", block_size=64, qk_norm=name == "qk_norm_joint")
    base, idx = base | dict(residual=owners[0] if owners else "prenorm"), some_ids()
    if name.startswith("moe_") and name != "moe_experts":
        base |= dict(moe_experts=4, moe_balance="loss")
    if name.startswith("mod_"):
        base |= dict(residual="nag", mod_on="mlp", mod_rate=0.3, n_layer=3)
    models = tiny(**base), tiny(**{**base, **change})
    for model in models if name == "mod_budget" else ():  # works after the first balance
        model(idx)
        mod.balance(mod.routers(model), model.config.mod_budget == "global", 0.3)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16_stream"):
        losses = [model(idx, idx.roll(-1, 1))[1].item() for model in models]
    costs = [(model.num_params(), model.flops_per_token()) for model in models]
    assert costs[0] != costs[1] or losses[0] != losses[1]
    for residual in [mode for mode in RESIDUALS if owners and mode not in owners]:
        message = f"residual={residual!r} does not use {name}: leave it at {field.default!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            tiny(residual=residual, **change)


ANY_NAME = dict(MOD, residual="prenorm", mod_router="learned", moe_experts=2)


@cases("changes, message", [
    *[(dict(ANY_NAME, **{name: "nonsense"}), f"{name}='nonsense': choose one of ") for name in
      ("init_out", *(field.name for field in FIELDS if isinstance(field.default, str)))],
    *[(dict(residual=r, norm="layer"), f"residual={r!r} does not use norm: leave it at 'rms'")
      for r in ("dyt", "nag", "bhyt", "bhyt_exact", "prenorm_approx", "ngpt")],
    *[({name: value}, f"{name}={value}") for name, value in dict(
      n_layer=0, dropout=1.0, init_scale=0.0, rope_base=0.0, nag_directions=-1,
      nag_first_logits=0.0, logit_cap=math.inf, norm_eps=-1e-6, bhyt_context=-8,
      head_scale=-1.0).items()],
    (dict(nag_first_logits=9e-4), "must be at least 0.001 and finite"),
    (dict(nag_first_logits=math.nan), "nag_first_logits=nan: must be at least 0.001"),
    (dict(moe_experts=2, moe_shared=-4), "moe_shared=-4: must be at least 0"),
    (dict(residual="prenrm"), "residual='prenrm': choose one of none, postnorm, prenorm"),
    (dict(residual="ngpt", init_out="zero"), "does not use init_out: leave it at None"),
    (dict(residual="none", branch_scale="depth"), "residual='none' does not use branch_scale"),
    (dict(norm_eps=1e-5), "'nag' does not use norm_eps"),
    (dict(n_head=3), "n_embd=32 does not divide into n_head=3 heads"), (dict(n_head=32), "even"),
    (dict(n_head=4, n_kv_head=3), "n_head=4 query heads do not divide over n_kv_head=3"),
    *((dict(rope_scaling=bad), "give (factor,) or (factor, low, high, length)")
      for bad in ((), ("x",), (8, "a", 4, 16), (2.0, 1.0), (8.0, 4.0, 1.0, 64))),
    (dict(qk_norm=False, qk_norm_joint=True), "qk_norm_joint=True needs qk_norm=True"),
    (dict(attn_bias="q"), "attn_bias='q': choose one of None, none, qkv, all"),
    (dict(dyt_alpha=(1.0,)), "three starts"), (dict(dyt_alpha=("a", 1, 1)), "three starts"),
    (dict(residual="bhyt", bhyt_lambda=(2.0, 1.0, math.nan)), "three starts"),
    (dict(residual="derf", norm_eps=1e-5), "'derf' does not use norm_eps"),
    (dict(residual="ngpt", norm_eps=1e-5, qk_norm=True), "'ngpt' does not use norm_eps"),
    (dict(residual="bhyt", bhyt_lambda=(2.0, 0.0, 0.0)), "three starts"),
    (dict(moe_top_k=3), "moe_top_k needs moe_experts above 0"),
    (dict(moe_experts=2, moe_top_k=3), "moe_top_k=3: must be from 1 to moe_experts=2"),
    (dict(moe_experts=2, moe_top_k=1), "no gradient with nag: set moe_top_k=2 or moe_shared"),
    (dict(mod_rate=0.5), "mod_rate needs mod_on"), (dict(mod_fallback=True), "needs mod_on"),
    (dict(mod_on="both", mod_rate=1.0), "mod_rate=1.0: must be at least 0 and below 1"),
    (dict(mod_on="mlp"), "mod_rate above 0"),
    (dict(MOD, nag_directions=0), "needs nag_directions above 0"),
    (dict(MOD, residual="lns"), "mod_router='nag' needs residual='nag'"),
    (dict(MOD, mod_router="learned", mod_fallback=True), "does not use mod_fallback"),
])  # fmt: skip
def test_settings_that_do_not_fit_raise_when_the_model_is_built(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny(**changes)


@cases("changes", [
    dict(EXTRAS, n_head=4, n_kv_head=1), dict(activation="swiglu", tied=False, residual="lns"),
    dict(residual="lns", moe_experts=4, moe_shared=16), dict(mod_on="both", mod_rate=0.25),
    dict(mod_on="mlp", mod_rate=0.5, mod_router="random"), dict(residual="hc"),
    dict(residual="ihc"), dict(residual="attnres_block"), dict(residual="nag"),
    dict(residual="smhc"), dict(residual="gated"), dict(residual="wide", hc_streams=3),
    dict(residual="dyt", mod_on="attention", mod_rate=0.4, mod_router="learned", n_kv_head=1),
    dict(MOD, residual="lns", moe_experts=4, moe_top_k=1, mod_router="learned"),
    dict(residual="ngpt", n_head=4, n_kv_head=1, activation="swiglu", moe_experts=4, moe_shared=16),
])  # fmt: skip
def test_flops_are_those_that_torch_counts(changes, monkeypatch):
    model = tiny(**changes)
    assert 2 * 32 * model.flops_per_token() == pytest.approx(counted_flops(model, monkeypatch))


def counted_flops(model, monkeypatch):
    """The FLOPs of a training step on some_ids(), as torch counts them, with causal attention."""
    grouped = lambda x, w, ends: torch.cat([x[a:b] @ w[e].T for e, (a, b) in moe.spans(ends)])
    monkeypatch.setattr(moe, "grouped", grouped)  # torch does not count custom operators
    idx, counter = some_ids(), FlopCounterMode(display=False)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(idx, idx)[1].backward()
    # torch counts scores with all T keys, we count the (T + 1) / 2 that a query sees on average
    B, T, counted = *idx.shape, sum(counter.get_flop_counts()["Global"].values())
    runs = [block for block in model.blocks if not prune.skips(block)[0]]
    asked = sum(T if block.attn_router is None else block.attn_router.k for block in runs)
    return counted - B * 12 * model.config.n_embd * asked * (T - 1) / 2


@cases("backend, changes", [
    *[("aot_eager", few(r)) for r in RESIDUALS], ("aot_eager", MOD),
    ("aot_eager", dict(MOD, residual="bhyt", mod_router="learned", moe_experts=4)),
    *[slow("inductor", few(r)) for r in RESIDUALS],
    slow("inductor", dict(MOD, residual="bhyt", mod_router="learned", moe_experts=4)),
])  # fmt: skip
def test_compiled_equals_eager_and_blocks_share_graphs(backend, changes, monkeypatch):
    idx = torch.arange(64).view(2, 32)  # distinct tokens: no ties that rounding decides
    dtype = torch.float64 if "mod_on" in changes else None  # or rounding decides which tokens run
    by_place = backend == "inductor" and "attnres" in changes.get("residual", "")
    shape = dict(n_layer=2 if by_place else 4)  # there each block has a graph of its own
    eager, compiled = models = [shaken(tiny(**shape, **changes)).to(dtype) for _ in range(2)]
    compile_with(monkeypatch, backend, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    compiled.compile_blocks()
    for turn in range(3):  # again with new weights, refreshed values and new k
        ours, expected = (logits_and_gradients(m, idx, idx.roll(-1, 1)) for m in (compiled, eager))
        assert_close(ours, expected, rtol=1e-3, atol=1e-5)
        for model in models:
            for p in model.parameters():
                p.data.mul_(1.1)
            model.refresh()
            for i, router in enumerate(mod.routers(model)):
                router.share.fill_(0.2 + 0.05 * i + 0.1 * turn)
                router.update_k()
    # a graph for the blocks, for the readout and for the loss, and one for a changing k
    most = {"attnres": 6, "attnres_block": 6, "x0mix": 5, "mixln": 4}.get(eager.config.residual, 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= most + ("mod_on" in changes)


def test_the_compiler_knows_the_options_of_every_mode():
    """Without a GPU nothing else reads them, and a name may be gone in another torch."""
    for mode in RESIDUALS.values():
        torch.compile(lambda x: x, options=mode.cuda_options)
    with pytest.raises(RuntimeError, match="Unexpected optimization option"):
        torch.compile(lambda x: x, options={"triton.gone": False})


@cases("flash", [(), ("cpu",)])
def test_gathered_queries_see_the_same_tokens_as_in_a_full_row(flash, monkeypatch):
    monkeypatch.setattr(attention, "FLASH", flash)
    layer, h = shaken(tiny()).blocks[0].attn, torch.randn(2, 12, 32)
    docs = torch.arange(12).expand(2, -1) // 4
    rope = tuple(table[:12] for table in attention.rotary_table(tiny().config))
    rows = mod.highest(torch.randn(2, 12), 5)
    for of_docs in (None, docs):
        full = layer(h, rope, of_docs)
        chosen = full.gather(1, rows[0][..., None].expand(-1, -1, 32))
        assert_close(layer(h, rope, of_docs, rows=rows), chosen)


def test_a_prompt_longer_than_the_context_keeps_its_end():
    model, idx = shaken(tiny()).eval(), some_ids(T=50)
    expected = generate.generate(model, idx[:, -32:], 6, temperature=0)[:, -6:]
    assert torch.equal(generate.generate(model, idx, 6, temperature=0)[:, -6:], expected)


def test_output_projections_of_hc_start_larger_because_its_end_sums_the_streams():
    for n in (1, 4):
        hc = tiny(residual="hc", hc_streams=n, init_out="plain", n_embd=128).blocks[0]
        plain = tiny(residual="prenorm", init_out="plain", n_embd=128).blocks[0]
        for ours, theirs in ((hc.attn.wo, plain.attn.wo), (hc.mlp.down, plain.mlp.down)):
            ratio = ours.weight.std() / theirs.weight.std()
            assert ratio.item() == pytest.approx(math.sqrt(n), rel=0.05)


@cases("changes", [MOD, dict(MOD, mod_router="learned", residual="prenorm", n_head=4, n_kv_head=1)])
def test_skipping_on_flash_attention_has_the_losses_and_gradients_of_a_mask(changes, monkeypatch):
    found, masks, idx, real = [], [], some_ids(), F.scaled_dot_product_attention
    seen = lambda *args, attn_mask, **how: (
        masks.append(attn_mask) or real(*args, attn_mask=attn_mask, **how)
    )
    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    for flash in ((), ("cpu",)):
        monkeypatch.setattr(attention, "FLASH", flash)
        masks.clear()
        model = shaken(tiny(**changes)).double()
        found.append(logits_and_gradients(model, idx, idx.roll(-1, 1)))
        assert len(masks) == 4 and all((mask is None) == bool(flash) for mask in masks)
    assert_close(*found)


@cases("residual, grown", [("attnres", torch.bfloat16), ("attnres_block", torch.float32)])
def test_only_sums_of_outputs_need_the_dtype_of_the_stream(residual, grown):
    model = tiny(residual=residual, n_layer=8)  # attnres_block: 2 sublayers a block
    first, second = model.blocks[0].attn_residual, model.blocks[0].mlp_residual
    stream = model.ends.embed(torch.randn(2, 4, 32))
    for sublayer in (first, second):
        stream = sublayer.write(stream, torch.randn(2, 4, 32).bfloat16())
        assert stream.x.dtype == grown


# --- Mixture of experts, mixture of depths --------------------------------------------------------


ROUTED = [
    *[dict(MOD, residual=r, moe_experts=3, mod_router="learned") for r in RESIDUALS],
    dict(MOD, residual="lns", mod_router="learned"), dict(moe_experts=3), MOD,
    dict(MOD, moe_experts=3), dict(MOD, mod_fallback=True), dict(MOD, mod_router="random"),
    dict(MOD, mod_router="random", residual="bhyt", branch_scale="depth"),
]  # fmt: skip
with_routers = cases("changes", [changes for changes in ROUTED if "mod_on" in changes])


def routed(**changes):
    """A model with thresholds set from its own scores"""
    model = shaken(tiny(**changes))
    for _ in range(3):
        model(some_ids(4))
        if mod.routers(model):
            mod.balance(mod.routers(model), True, 0.4)
    return model.eval()


@torch.no_grad()
@cases("changes", [*[dict(residual=r) for r in RESIDUALS], *ROUTED, EXTRAS])
def test_decoding_equals_the_full_forward_and_no_logit_sees_a_later_token(changes):
    model, idx = routed(n_head=4, n_kv_head=2, qk_norm=True, **changes), some_ids(3, T=12)
    full, cache = model(idx)[0], generate.KVCache(model, 3, 20)
    parts = [model(part, cache=cache)[0] for part in idx.split([1, 5, 3, 1, 2], dim=1)]
    assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)
    for t in (0, 1, 3, 7, 10):
        other = idx.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1 + t) % 64
        assert_close(model(other)[0][:, : t + 1], full[:, : t + 1])
    assert generate.generate(model, idx, 30, temperature=0).shape == (3, 42)


# --- Data -----------------------------------------------------------------------------------------


def make_data(directory, *argv):
    argv, namespace = [f"--data_dir={directory}", *argv], {"__file__": prepare_c4.__file__}
    prepare_c4.prepare(configurator.configure(namespace, argv=argv)[0])
    return str(directory)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small part of Python's standard library, as shards: made once for this file and tests/"""
    at = tmp_path_factory.getbasetemp() / "data"
    sizes = "--max_tokens=200000 --max_val_tokens=20000 --shard_tokens=60000 --workers=1".split()
    return str(at) if at.exists() else make_data(at, *sizes)


def tokens_of(directory, split):
    """The tokens of a split, and the length of each shard"""
    meta = data_file.read_meta(directory)
    files = [(os.path.join(directory, s["file"]), s) for s in meta["splits"][split]["shards"]]
    shards = [data_file.open_shard(path, meta, shard["tokens"]) for path, shard in files]
    return np.concatenate(shards), [len(shard) for shard in shards]


TEXTS = [f"document {i}: " + "naïve <|endoftext|> 日本 " * (i % 7) for i in range(200)]


def write_texts(directory):
    import pyarrow as pa
    import pyarrow.parquet as pq

    urls = [f"https://example.org/{i}" for i in range(len(TEXTS))]
    lines = "\n".join(json.dumps({"text": t, "url": url}) for t, url in zip(TEXTS, urls))
    (directory / "a.jsonl").write_text(lines)
    (directory / "a.json.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": TEXTS, "url": urls}), directory / "a.parquet")
    for i, text in enumerate(TEXTS[:20]):
        (directory / f"{i:03d}.txt").write_text(text)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A working directory with texts. This process tokenises: starting others takes seconds."""
    write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare_c4, "encoding", data_file.get_tokenizer("bytes"), raising=False)
    here = lambda pool, jobs, n: map(prepare_c4.tokenise, jobs)
    monkeypatch.setattr(prepare_c4, "in_order", here)
    monkeypatch.setattr(prepare_c4, "LEAST", 2)
    return tmp_path


def test_shards_hold_every_document_once_in_order_and_the_formats_agree(texts):
    train, val = ([t for t in TEXTS if prepare_c4.validates(t, 0.2) == v] for v in (False, True))
    assert 10 < len(val) < 90
    for source, train, val, argv in (
        *[(f"a.{kind}", train, val, "--val_share=0.2") for kind in ("jsonl", "json.gz", "parquet")],
        ("01*.txt", TEXTS[10:20], TEXTS[:10], "--val_share=0.0 --val_source=00*.txt"),
    ):
        argv = [f"--source={source}", "--tokenizer=bytes", "--shard_tokens=500", *argv.split()]
        directory = make_data(f"made from {source}", *argv)
        for split, documents in (("train", train), ("val", val)):
            tokens, sizes = tokens_of(directory, split)
            assert tokens.tolist() == [byte for t in documents for byte in (*t.encode(), 256)]
            assert sizes[:-1] == [500] * (len(sizes) - 1) and len(sizes) > 1


def test_a_local_rank_file_needs_no_network_and_travels_with_the_shards(tmp_path):
    write_texts(tmp_path)
    tokens, file = [bytes([i]) for i in range(256)] + [b"do", b"docu"], tmp_path / "my.tiktoken"
    ranks = [*range(257), 258]  # with a gap
    lines = [f"{base64.b64encode(t).decode()} {i}" for i, t in zip(ranks, tokens, strict=True)]
    file.write_text("\n".join(lines))
    directory = make_data(tmp_path / "new", f"--source={tmp_path}/a.jsonl", f"--tokenizer={file}")
    file.unlink()
    meta, (ids, _) = data_file.read_meta(directory), tokens_of(directory, "train")
    encoding = data_file.meta_tokenizer(directory, meta)
    assert (meta["vocab_size"], meta["eot"]) == (260, 259) == (encoding.n_vocab, encoding.eot_token)
    first = next(t for t in TEXTS if not prepare_c4.validates(t, 0.05))
    assert encoding.decode(ids.tolist()).startswith(first) and 256 in ids
    with open(os.path.join(directory, meta["tokenizer"]), "a") as changed:
        changed.write(f"\n{base64.b64encode(b'docum').decode()} 259")
    with pytest.raises(SystemExit, match=".tiktoken is not the tokenizer that"):
        data_file.meta_tokenizer(directory, meta)


@cases("val", [[], ["--val_source=val.jsonl", "--max_val_tokens=1700"]])
def test_preparation_killed_anywhere_continues_with_the_same_result(texts, monkeypatch, val):
    write_jsonl(texts / "val.jsonl", TEXTS[::4])
    argv = "--source=a.jsonl --tokenizer=bytes --shard_tokens=500 --max_tokens=4000".split() + val
    make_data("whole", *argv)
    replace, left = os.replace, 0

    def dies(*args):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", dies)
    for kills in itertools.count():
        left = 3 + kills % 3  # dies when it renames a shard or the meta.json after it
        with contextlib.suppress(KeyboardInterrupt):
            make_data("broken", *argv)
            break
    whole, broken = content(texts / "whole"), content(texts / "broken")
    assert kills >= 3 and whole == broken and len(whole) > 8


def write_jsonl(path, documents):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def documents_in(directory, split):
    """The texts of a split of byte tokens. The last one may be cut."""
    text = "".join(chr(i) for i in tokens_of(directory, split)[0])
    return [part.encode("latin-1").decode() for part in text.removesuffix(chr(256)).split(chr(256))]


@cases("val_source", ["./a.jsonl", "{here}/a.jsonl", "link.jsonl", "*/../a.jsonl"])
def test_a_file_of_both_splits_is_refused_whatever_its_path(texts, val_source):
    (texts / "folder").mkdir()
    (texts / "link.jsonl").symlink_to("a.jsonl")
    argv = ["--source=a*.jsonl", f"--val_source={val_source.format(here=texts)}"]
    with pytest.raises(SystemExit, match="1 files are also in source, such as .*/a.jsonl"):
        make_data("new", "--tokenizer=bytes", *argv)


def test_documents_of_validation_are_left_out_of_training(texts, capsys):
    val, new = TEXTS[20:60], [f"a text of training only: {i}" for i in range(30)]
    write_jsonl(texts / "val.jsonl", val)
    write_jsonl(texts / "train.jsonl", [*new[:10], *val[:20], *new[10:], *val[20:]])
    argv = "--val_source=val.jsonl --tokenizer=bytes --shard_tokens=500".split()
    directory = make_data("new", "--source=train.jsonl", *argv)
    assert documents_in(directory, "val") == val and documents_in(directory, "train") == new
    assert "train: left out 40 documents that are in validation" in capsys.readouterr().out
    # A document that max_val_tokens cuts is validation text too. Those after it are not.
    whole = sum(len(text.encode()) + 1 for text in val[:5])
    directory = make_data("cut", "--source=train.jsonl", f"--max_val_tokens={whole + 7}", *argv)
    assert documents_in(directory, "val") == [*val[:5], val[5][:7]]
    expected = [*new[:10], *val[6:20], *new[10:], *val[20:]]
    assert documents_in(directory, "train") == expected
    shutil.copyfile("val.jsonl", "copy.jsonl")
    with pytest.raises(SystemExit, match="0 tokens for train are fewer"):
        make_data("empty", "--source=copy.jsonl", *argv)
    assert not os.listdir("empty")


@pytest.mark.parametrize(
    "documents", [["naïve 日本 " * 100], ["x" * 1000] * 2, TEXTS[:50]], ids=len
)
def test_few_documents_give_their_ends_to_validation(texts, capsys, documents):
    (texts / "my.txt").write_text(documents[0])
    write_jsonl(texts / "my.jsonl", documents)
    source = "my.jsonl" if len(documents) > 1 else "my.txt"
    directory = make_data("new", f"--source={source}", "--tokenizer=bytes", "--val_share=0.1")
    assert "few documents: validation gets the last 10% of each" in capsys.readouterr().out
    train, val = (documents_in(directory, split) for split in ("train", "val"))
    assert [a + b for a, b in zip(train, val)] == documents
    assert all(len(b) == math.ceil(len(b + a) / 10) for a, b in zip(train, val))


def test_few_documents_that_others_extend_are_left_out(texts, capsys):
    a, b = "".join(map(chr, range(32, 127))) * 2, "b" * 100
    write_jsonl(texts / "my.jsonl", [a, a + b * 9, b + "c", a + b, b, a + b * 9])
    argv = ["--source=my.jsonl", "--tokenizer=bytes", "--val_share=0.1"]
    directory = make_data("new", *argv)
    assert "left out 3 documents that are the beginning" in capsys.readouterr().out
    train, val = (documents_in(directory, split) for split in ("train", "val"))
    assert [x + y for x, y in zip(train, val)] == [a + b * 9, b + "c", a + b * 9]


def test_without_a_network_the_message_names_a_tokenizer_that_needs_none(texts, monkeypatch):
    import requests

    def get(*args, **how):
        raise requests.ConnectionError("no route to host")

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(texts / "cache"))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    with pytest.raises(SystemExit, match="^[^\n]*use --tokenizer=bytes, or set TIKTOKEN_CACHE_DIR"):
        make_data("new", "--source=a.jsonl")
    assert not os.path.exists("new")


def test_a_shard_that_has_changed_is_found(data, tmp_path, capsys):
    make_data(data, "--verify=True")
    assert "5 shards have the sha256 that meta.json says" in capsys.readouterr().out
    directory = shutil.copytree(data, tmp_path / "new")
    windows = data_file.Windows(directory, "train", 32)
    windows.verify().join()
    assert len(windows[0]) == 33
    with open(directory / "train_00001.bin", "r+b") as file:  # another token, and the same size
        file.seek(-2, os.SEEK_END)
        file.write(bytes([7, 0]))
    (directory / "train_00002.bin").rename(directory / "elsewhere")
    with pytest.raises(SystemExit) as stopped:
        make_data(directory, "--verify=True")
    changed, missing = str(stopped.value).split("\n")
    assert re.search("train_00001.bin has changed since it was prepared: delete", changed)
    assert re.search("train_00002.bin is listed in meta.json but missing: delete", missing)
    loader = data_file.Loader(windows, 4, 1, seed=1)
    windows.verify().join()
    with pytest.raises(SystemExit, match="train_00001.bin has changed"):
        loader.batch(0, 0)


@cases("argv, message", [
    ("--source=c4", "say how many you want with --max_tokens"),
    ("--source=none*.jsonl", "no file matches"), ("--source=bad.jsonl", "record 0 has no text"),
    ("--source=a.jsonl --max_tokens=1e15", "GB are free"), ("--shard_tokens=0", "at least 257"),
    ("--max_val_tokens=0", "at least 257"), ("--val_share=1.0", "at least 0 and below 1"),
    ("--val_share=0", "no validation text"), ("--source=empty.jsonl", "0 tokens for val are fewer"),
    ("--tokenizer=gpt5", "choose bytes, a .tiktoken or .json file, gpt2"),
    ("--tokenizer=my.tiktoken", "my.tiktoken: no such tokenizer file"),
    ("--tokenizer=bad.tiktoken", "bad.tiktoken: not lines of base64 and rank"),
    ("--tokenizer=empty.tiktoken", "empty.tiktoken: not lines of base64 and rank"),
    ("--source=a.jsonl --data_dir=made", "has another made_from"),
    ("--source=cut.jsonl", "cut.jsonl cannot be read"), ("--workers=0", "at least 1"),
    ("--source=latin.txt", "latin.txt cannot be read"), ("--source=nothing.jsonl", "0 tokens"),
    ("--source=two.txt", "2 tokens for val are fewer than the 257 of a window: give more text"),
    ("--source=short.txt", "212 tokens for val"), ("--max_tokens=99", "at least 257"),
    ("--source=plain.json.gz", "plain.json.gz cannot be read: Not a gzipped file"),
    ("--source=two.txt --val_source=a.jsonl", "3 tokens for train are fewer"),
])  # fmt: skip
def test_preparation_refuses_what_it_cannot_do(texts, monkeypatch, argv, message):
    (texts / "bad.jsonl").write_text('{"body": "x"}\n')
    (texts / "cut.jsonl").write_text('{"text": "x"}\n{"text": "y')
    (texts / "bad.tiktoken").write_text("abc")
    (texts / "empty.tiktoken").write_text("")
    (texts / "latin.txt").write_bytes("Grüße".encode("latin1"))
    (texts / "nothing.jsonl").write_text("")
    (texts / "plain.json.gz").write_text('{"text": "x"}\n')
    (texts / "two.txt").write_text("ab")
    (texts / "short.txt").write_text("a" * 4220)
    write_jsonl(texts / "empty.jsonl", [""])
    monkeypatch.setattr(prepare_c4, "LEAST", GPTConfig.block_size + 1)
    if "made" in argv:
        make_data("made", "--source=a.jsonl", "--tokenizer=bytes", "--val_share=0.3")
    with pytest.raises(SystemExit, match=re.escape(message)):
        make_data("new", "--tokenizer=bytes", *argv.split())
    assert not glob.glob("new/*")
    if "made" not in argv:  # a folder without shards is free for the next attempt
        make_data("new", "--source=a.jsonl", "--tokenizer=bytes", "--val_share=0.3")


def test_a_file_whose_name_looks_like_a_pattern_is_read(tmp_path):
    for name in ("a1.txt", "a[1].txt"):
        (tmp_path / name).write_text(name)
        assert [*data_file.read_documents(str(tmp_path / name))] == [name]


def test_windows_tile_each_shard_and_wide_vocabularies_get_wide_tokens(data):
    windows, (tokens, sizes) = data_file.Windows(data, "train", 32), tokens_of(data, "train")
    assert sizes == [60000, 60000, 60000, 20000]
    starts = [60000 * n + i for n, size in enumerate(sizes) for i in range(0, size - 32, 32)]
    assert len(windows) == len(starts)
    assert all(np.array_equal(w, tokens[at : at + 33]) for w, at in zip(windows, starts))
    assert [data_file.token_dtype(n).itemsize for n in (65536, 65537)] == [2, 4]
    assert prepare_c4.LEAST == GPTConfig.block_size + 1


def test_batches_depend_only_on_seed_step_and_place_and_cover_an_epoch_once(data):
    windows = data_file.Windows(data, "val", 32)

    def step_of(world, micro_steps, step, batch_size=4, seed=1):
        how = (windows, batch_size, micro_steps, seed)
        ranks = [data_file.Loader(*how, rank, world) for rank in range(world)]
        return sorted(i for r in ranks for m in range(micro_steps) for i in r.indices(step, m))

    same = [step_of(1, 4, 9), step_of(2, 2, 9), step_of(4, 1, 9), step_of(2, 1, 9, batch_size=8)]
    assert all(step == same[0] for step in same)
    assert step_of(1, 4, 10) != same[0] != step_of(1, 4, 9, seed=2)
    loader, n = data_file.Loader(windows, 1, 1, seed=1), len(windows)
    epochs = [[loader.indices(e * n + i, 0)[0] for i in range(n)] for e in range(3)]
    assert all(sorted(e) == list(range(n)) for e in epochs) and epochs[0] != epochs[1]
    for epoch, order in enumerate(epochs):  # recorded runs have this order
        assert order == np.random.default_rng((1, epoch)).permutation(n).tolist()
    for step in (0, 1, 2, 7, 8, 3, 0):  # read ahead, jump, go back
        x, y = loader.batch(step, 0)
        row = windows[loader.indices(step, 0)[0]].tolist()
        assert x[0].tolist() == row[:-1] and y[0].tolist() == row[1:]


# --- Training -------------------------------------------------------------------------------------


def script(name, *argv, **settings):
    """Run a script in this process. Another one would take seconds to import torch."""
    argv = [name, *map(str, argv), *(f"--{key}={value}" for key, value in settings.items())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        try:
            return runpy.run_path(os.path.join(HERE, name), run_name="__main__")
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)


def train(data, out, *argv, **settings):
    where = [f"--data_dir={data}", f"--out_dir={out}"]
    return script("train.py", *TINY_RUN, *where, *argv, **settings)


def resume(out, **settings):
    """A resumed run needs no setting except its out_dir."""
    return script("train.py", **dict(init_from="resume", out_dir=out) | settings)


def evaluated(out, what, **settings):
    """What eval.py writes to eval.json"""
    script("eval.py", out_dir=out, what=what, **{"dtype": "float32"} | settings)
    return json.load(open(out / "eval.json"))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


PRELOAD = ["test_all", "torch._inductor.compile_fx"]  # of the process that others are forked from


def ranks(data, out, world=2, sigterm_to=None, join=True, **settings):
    """train.py in several processes, forked from one that has only imported this file.

    Without join, returns at once: what it returns has their processes.
    """
    how = (world, free_port(), sigterm_to, data, str(out), settings)
    return forked(one_rank, how, world, join)


def forked(run, how, n, join=True):
    """run(rank, *how) in n processes."""
    torch.multiprocessing.set_forkserver_preload(PRELOAD)
    start = torch.multiprocessing.start_processes
    return start(run, how, n, join, daemon=True, start_method="forkserver")


def one_rank(rank, world, port, sigterm_to, data, out, settings):
    faulthandler.enable()  # where a rank was, if one crashes
    bhyt.INTERVAL = 4
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if rank == sigterm_to:
        on_forward(pytest.MonkeyPatch(), send_sigterm)
    with open(f"{out}.rank{rank}.txt", "a") as sys.stdout:
        train(data, out, **settings)


def on_forward(monkeypatch, change):
    """Replace the loss of every training forward by change(number of the forward, loss)."""
    numbers, forward = itertools.count(1), GPT.forward

    def changed(self, *args):
        logits, loss = forward(self, *args)
        return logits, change(next(numbers), loss) if self.training else loss

    monkeypatch.setattr(GPT, "forward", changed)


def send_sigterm(number, loss):
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss


def log_of(out):
    lines = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]
    log = SimpleNamespace(records=[line for line in lines if "step" in line])
    log.headers = [line["run"] for line in lines if "run" in line]
    log.steps = [r["step"] for r in log.records]
    log.losses = [r["loss"] for r in log.records if "loss" in r]
    log.val_losses = [r["val_loss"] for r in log.records if r["val_loss"] is not None]
    return log


content = lambda folder: {name: (folder / name).read_bytes() for name in os.listdir(folder)}


def checkpoint(path):
    return checkpoints.load(str(path))


def assert_same_state(one, two):
    """The newest checkpoints of two runs agree bit for bit."""
    one, two = checkpoint(one), checkpoint(two)
    for key in ("model", "optimizers", "step", "best_val_loss", "flops", "expected_flops"):
        assert_close(two[key], one[key], rtol=0, atol=0)


def refuses(message, run, *args, **settings):
    """run(...) exits with one line that contains the message."""
    with pytest.raises(SystemExit, match=re.escape(message)) as stop:
        run(*args, **settings)
    assert "\n" not in str(stop.value)


@pytest.fixture(scope="session")
def runs(data, tmp_path_factory):
    """Five runs: b differs from a in the seed, c and e in the mode, d in its mixture of depths."""
    at = tmp_path_factory.getbasetemp() / "runs"
    if at.exists():
        return at
    train(data, at / "a")
    train(data, at / "b", seed=2)
    train(data, at / "c", residual="lns")
    train(data, at / "d", residual="bhyt", mod_on="both", mod_rate=0.3, mod_router="learned")
    train(data, at / "e", residual="attnres")
    return at


def test_a_run_logs_what_it_did_and_keeps_what_is_asked_for(data, runs, tmp_path):
    out, same = tmp_path / "run", tiny(vocab_size=257)
    how = dict(max_iters=40, eval_interval=5, keep_interval=15, save_best=True, init_out="scaled")
    train(data, out, **how, learning_rate=1.0, min_lr=1.0)
    log, header, default = log_of(out), log_of(out).headers[0], log_of(runs / "a").headers[0]
    first, *_, last = log.records[1:]
    assert log.steps == list(range(41)) and last["tokens"] == 40 * 4 * 32
    assert last["flops"] == last["tokens"] * same.flops_per_token()
    assert abs(log.val_losses[0] - math.log(257)) < 0.4 and log.val_losses[-1] < 4
    assert {"loss", "lr", "tok_s", "mfu", "mem_gb", "bad_steps"} <= set(first)
    assert {"settings", "versions", "device", "git"} <= set(header)
    assert header["params"]["all"] == sum(p.numel() for p in same.parameters())
    resolved = [(h["resolved"]["init_out"], h["resolved"]["min_lr"]) for h in (header, default)]
    assert resolved == [("scaled", 1.0), ("plain", 4e-4)]
    gate_lrs = [log_of(runs / name).headers[0]["resolved"]["gate_lr"] for name in "ac"]
    assert gate_lrs == [default["settings"]["learning_rate"], None]  # lns has no gates
    kept = {"ckpt_000000.pt", "ckpt_000015.pt", "ckpt_000030.pt", "ckpt_best.pt"}
    assert set(os.listdir(out)) == kept | {"ckpt.pt", "log.jsonl"}
    assert checkpoint(out / "ckpt_best.pt")["step"] == 5 * np.argmin(log.val_losses) < 40
    start = checkpoints.load_model(out / "ckpt_000000.pt")[1]
    torch.manual_seed(1337)
    assert_close(start.state_dict(), GPT(start.config).state_dict(), rtol=0, atol=0)


@cases("more", [
    dict(alpha_warmup_iters=5, optimizer="muon"), dict(residual="dyt", schedule="wsd"),
    dict(total_batch_tokens=256, mod_on="both", mod_rate=0.4, flops_budget=2.5e8),
    dict(residual="bhyt", moe_experts=4, mod_on="mlp", mod_rate=0.3, mod_router="learned"),
    dict(residual="ngpt", tied=False, moe_experts=4, mod_on="both", mod_rate=0.3,
         mod_router="learned"),
])  # fmt: skip
def test_stopped_and_resumed_equals_never_stopped(data, tmp_path, monkeypatch, capsys, more):
    """The run stops on a SIGTERM. It is moved before it is resumed."""
    one, old, two = (tmp_path / name for name in ("one", "old", "two"))
    how = dict(dropout=0.1, learning_rate=1e-3, eval_interval=2, save_interval=0, **more)
    monkeypatch.setattr(bhyt, "INTERVAL", 2)
    train(data, one, **how)
    with monkeypatch.context() as patch:
        on_forward(patch, send_sigterm)
        train(data, old, **how)
    os.rename(old, two)
    step = checkpoint(two)["step"]
    assert log_of(two).steps[-1] == step in (2, 3)
    assert f"stopped by a signal at step {step}, saved" in capsys.readouterr().out
    with open(two / "log.jsonl", "a") as log:
        log.write('\0\0\0\n{"step": 5, "loss": 0.0}\n{"step": 6, "lo')  # torn by a crash
    (two / "ckpt.pt.0a1b2c3d.tmp").write_text("what an interrupted save left")
    resume(two)
    assert_same_state(one, two)
    assert log_of(two).losses == log_of(one).losses and log_of(two).steps == list(range(7))
    assert set(os.listdir(two)) == {"ckpt.pt", "log.jsonl"} and not old.exists()


def test_a_run_says_what_happens_next(data, tmp_path, monkeypatch, capfd):
    run = tmp_path / "my run"
    with monkeypatch.context() as patch:
        on_forward(patch, send_sigterm)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        train(data, run, n_hidden=40)
    told, warned = capfd.readouterr()
    assert "stopping after this step; a second Ctrl-C ends at once" in warned
    assert ", 1 thread, float32" in told and " = 1 rank x 1 micro-step x 4 x 32\n" in told
    assert "resumed" not in told
    step, command = re.search(r"signal at step (\d), saved; to continue: (.*)\n", told).groups()
    python, *argv = shlex.split(command)
    script(*argv)
    told = capfd.readouterr().out
    assert python == "python" and f"resumed at step {step} of {run}/ckpt.pt\n" in told
    assert f"{run}/ckpt.pt is saved: python eval.py --out_dir='{run}'\n" in told
    assert "rises again" not in told and "compiling" not in told
    resume(run, max_iters=8)
    assert "the schedule now ends at step 8" in capfd.readouterr().out


def test_fine_tuning_takes_its_learning_rates_from_those_of_the_base(data, runs, tmp_path, capfd):
    base, own = shutil.copytree(runs / "a", tmp_path / "base"), {"gate_lr": 0.02, "embed_lr": 0.3}
    resaved(lambda s: s | {"settings": s["settings"] | own})(base / "ckpt.pt")
    for given, expected in (({}, 4e-4), ({"lora_rank": 2}, 4e-3), ({"learning_rate": 1e-3}, 1e-3)):
        out = tmp_path / str(expected)
        how = dict(init_from=base, max_iters=1, eval_tokens=512, compile=False, **given)
        resume(out, **how)
        found, share = log_of(out).headers[0]["settings"], 1.0 if "lora_rank" in given else 0.1
        assert found["learning_rate"] == pytest.approx(expected)
        assert [found[k] for k in own] == pytest.approx([share * v for v in own.values()])
        assert "its learning rates decide those that are not given" in capfd.readouterr().out


def test_a_run_survives_a_kill_in_the_first_step_and_a_full_disk(data, runs, tmp_path, monkeypatch):
    def dies(number, loss):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        on_forward(patch, dies)
        train(data, tmp_path, init_from="auto")
    with monkeypatch.context() as patch:
        on_forward(patch, send_sigterm)
        train(data, tmp_path, init_from="auto")
    stopped_at = checkpoint(tmp_path)["step"]
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        message = f"step 6 could not be saved as {tmp_path}/ckpt.pt, older checkpoints are intact"
        refuses(message, resume, tmp_path, max_iters=6)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint(tmp_path)["step"] == stopped_at < 6
    assert not glob.glob(f"{tmp_path}/*.tmp")
    resume(tmp_path, max_iters=6)
    assert_same_state(tmp_path, runs / "a")
    assert log_of(tmp_path).steps == list(range(7))


def test_a_run_that_goes_on_may_change_some_settings_and_no_others(data, runs, tmp_path):
    run = shutil.copytree(runs / "a", tmp_path / "run")
    how = dict(max_iters=7, batch_size=1, learning_rate=1e-4)
    resume(run, init_from="auto", **how)
    assert checkpoint(run)["step"] == 7 and log_of(run).records[-1]["tokens"] == 7 * 128
    before = content(run)
    for name, old, new in (
        ("residual", "'nag'", "lns"), ("n_embd", "32", "64"), ("tokens_per_step", "128", "64"),
        ("seed", "1337", "2"), ("optimizer", "'adamw'", "muon"),
        ("sft_data", "None", __file__), ("lora_rank", "0", "4"),
    ):  # fmt: skip
        given = {name.replace("tokens_per_step", "total_batch_tokens"): new}
        refuses(f"run/ckpt.pt was trained with {name}={old}, not ", resume, run, **given)
    refuses("already holds a run", train, data, run)
    refuses("run/ckpt.pt is at step 7 already", resume, run, max_iters=6)
    assert content(run) == before
    state = torch.load(run / "ckpt.pt", weights_only=True)
    torch.save(state | {"meta": {"tokenizer_sha256": "another"}}, run / "ckpt.pt")
    why = "was trained with another tokenizer"
    refuses(why, resume, run)
    refuses(why, evaluated, run, "loss")
    refuses("ckpt.pt is a file: give its folder", evaluated, run / "ckpt.pt", "loss")
    refuses("context=64: must be at most block_size=32", evaluated, runs / "a", "loss", context=64)


def test_a_branch_goes_on_elsewhere_and_leaves_its_source_alone(data, tmp_path):
    one, same, decay = (tmp_path / name for name in ("one", "same", "decay"))
    train(data, one, schedule="wsd", wsd_share=0.5, max_iters=8, residual="lns", keep_interval=3)
    before, branch = content(one), dict(branch_from=one / "ckpt_000003.pt", init_from="auto")
    resume(same, **branch)
    assert_same_state(one, same)
    for last in (6, 7):  # the second time it resumes
        resume(decay, **branch, max_iters=last)
    assert log_of(same).steps == [4, 5, 6, 7, 8] and log_of(decay).steps == [4, 5, 6, 7]
    assert log_of(decay).headers[0]["from"] == str(branch["branch_from"])
    assert log_of(decay).headers[0]["run_id"] != log_of(one).headers[0]["run_id"]
    refuses("was trained with n_layer=2, not 3", resume, tmp_path / "x", **branch, n_layer=3)
    assert content(one) == before


def test_evaluation_does_not_touch_training_and_is_the_exact_mean(data, tmp_path):
    windows, found = data_file.Windows(data, "val", 32), set()
    train(data, tmp_path / "never", dropout=0.1, eval_interval=0)
    assert not log_of(tmp_path / "never").val_losses
    for interval, part in ((1, "all"), (3, "tune"), (3, "report")):
        run, places = tmp_path / part, data_file.spread(windows, 512, part)
        train(data, run, dropout=0.1, eval_interval=interval, val_part=part)
        assert log_of(run).losses == log_of(tmp_path / "never").losses
        rows = torch.tensor(np.stack([windows[i] for i in places]).astype(int))
        _, model = checkpoints.load_model(run)
        logits = model(rows[:, :-1])[0].detach()
        exact = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
        assert log_of(run).val_losses[-1] == pytest.approx(exact, abs=1e-5)
        for batch_size, model.loss_chunk in itertools.product((1, 3, 16, 100), (None, 50)):
            batches = [*data_file.eval_batches(windows, places, batch_size, "cpu")]
            assert model_file.evaluate(model, batches) == pytest.approx(exact, abs=1e-5)
        report = evaluated(run, "loss,depth", eval_tokens=512, depth_tokens=320, val_part=part)
        assert report["loss"]["loss"] == pytest.approx(exact, abs=1e-5)
        found |= {exact, report["depth"]["norm"][0]}
    assert len(found) == 6  # each part has its own loss and its own first norm
    for training in (True, False):
        model_file.evaluate(model.train(training), batches)
        assert model.training == training


@cases("setting, like", [*((setting, None) for setting in [
    "init_from=PATH", "max_iters=5", "flops_budget=1e7", "batch_size=2", "seed=2", "min_lr=0.0",
    "total_batch_tokens=256", "optimizer=muon", "gate_lr=0.1", "learning_rate=1e-3",
    "weight_decay=0.5", "grad_clip=0.01", "schedule=wsd", "warmup_iters=4", "warmup_iters=0.5",
    "dtype=bfloat16", "alpha_warmup_iters=4", "embed_lr=0.1", "head_lr=0.1 --tied=False",
]), ("recompute=True --loss_chunk=50", "a"),
    ("recompute=True --loss_chunk=50 --compile=True --residual=lns", "c")])  # fmt: skip
def test_a_setting_changes_the_losses_or_only_memory(
    data, runs, tmp_path, monkeypatch, setting, like, quick_compiler
):
    run, base, seen, loss = tmp_path / "run", runs / (like or "a"), set(), GPT.loss
    given = f"--{setting.replace('PATH', str(runs / 'a'))}".split()
    spied = lambda self, *how: seen.add((self.loss_chunk, self.recompute)) or loss(self, *how)
    monkeypatch.setattr(GPT, "loss", spied)
    train(data, run, *given)
    if not like and len(given) > 1:  # the second one changes the losses, too
        base = tmp_path / "base"
        train(data, base, *given[1:])
    losses, before = log_of(run).losses, log_of(base).losses
    if not like:
        assert losses != before
        return
    assert losses == pytest.approx(before, abs=1e-4) and seen == {(50, True)}
    seen.clear()
    evaluated(run, "loss", eval_tokens=64)
    assert seen == {(50, False)}


def test_alpha_warms_up_and_the_log_has_the_health_of_the_gates(
    data, runs, tmp_path, capsys, monkeypatch
):
    def ramps(run):
        return [x.item() for name, x in checkpoint(run)["model"].items() if name.endswith(".ramp")]

    slow, on = tmp_path / "slow", tmp_path / "on"
    monkeypatch.setattr(nag, "ALPHA_POWER", 20)
    train(data, slow, alpha_warmup_iters=10, eval_interval=2)
    gates = [r["gates"]["a"] for r in log_of(slow).records if r["val_loss"]]
    assert [len(a) for a in gates] == [4] * 4 and ramps(slow) == pytest.approx([0.6] * 4)
    assert "warning" not in capsys.readouterr().out
    train(data, on, init_from=slow)
    assert "warning: 3 of 4 sublayers hardly rotate the stream" in capsys.readouterr().out
    healthy, other = log_of(runs / "a").records[-1]["gates"], log_of(runs / "c").records[-1]
    assert healthy["dead"] == healthy["floor"] == 0 and 0.3 < healthy["a"][0] < 0.7
    assert ramps(on) == [1] * 4 and "gates" not in other


def test_learning_rates_and_a_budget_of_flops(data, tmp_path):
    cosine = [0.5 + 0.25 * (1 + math.cos(math.pi * i / 16)) for i in range(16)]
    linear = [1.0] * 9 + [1 - i / 10 for i in range(1, 10)]
    step = 128 * tiny(vocab_size=257).flops_per_token()
    for given, expected in (
        ("--warmup_iters=4 --min_lr=0.5", [0.2, 0.4, 0.6, 0.8, *cosine]),
        ("--warmup_iters=0.1 --schedule=wsd --wsd_share=0.5 --min_lr=0", [1 / 3, 2 / 3, *linear]),
        (f"--flops_budget={3.5 * step} --max_iters=100", [1 / 3, 2 / 3, 1.0, 0.55]),
    ):
        how = ["--max_iters=20", "--learning_rate=1", "--eval_interval=0", *given.split()]
        train(data, tmp_path / given, *how)
        assert [r["lr"] for r in log_of(tmp_path / given).records] == pytest.approx(expected)
    run = tmp_path / given
    assert log_of(run).records[-1]["flops"] == 4 * step
    refuses("max_iters=50 needs flops_budget=None", resume, run, max_iters=50)
    resume(run, flops_budget=4.5 * step, max_iters=2)  # which does not count
    assert checkpoint(run)["step"] == 5


def test_bad_steps_are_skipped_and_counted_and_too_many_stop(data, tmp_path, monkeypatch):
    bad = (3, 6, 7, 8, 9, 10)
    on_forward(monkeypatch, lambda number, loss: loss * math.inf if number in bad else loss)
    how = dict(keep_interval=1, save_interval=1, max_iters=20)
    refuses("was not finite in 5 steps in a row, up to step 10", train, data, tmp_path, **how)
    counted = [r["bad_steps"] for r in log_of(tmp_path).records[1:]]
    assert counted == [0, 0, 1, 0, 0, 1, 2, 3, 4, 5]
    assert log_of(tmp_path).losses[2] is None and not (tmp_path / "ckpt_000003.pt").exists()
    for name, step, updates in (("ckpt_000002", 2, 2), ("ckpt_000004", 4, 3), ("ckpt", 5, 4)):
        state = checkpoint(tmp_path / f"{name}.pt")
        assert (state["step"], state["optimizers"][0][0]["step"].item()) == (step, updates)
        assert all(x.isfinite().all() for x in state["model"].values())


def test_a_run_whose_last_step_is_bad_is_saved(data, tmp_path, monkeypatch):
    on_forward(monkeypatch, lambda number, loss: loss * math.inf if number == 6 else loss)
    train(data, tmp_path, save_interval=0)
    state = checkpoint(tmp_path)
    assert (state["step"], state["bad_steps"]) == (6, 1)
    assert state["optimizers"][0][0]["step"].item() == 5


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a disk that is full")
def test_a_full_disk_under_the_log_ends_a_run_with_one_line(data, tmp_path, monkeypatch):
    def fill(number, loss):
        if number == 3:
            (tmp_path / "log.jsonl").unlink()
            (tmp_path / "log.jsonl").symlink_to("/dev/full")
        return loss

    on_forward(monkeypatch, fill)
    why = "log.jsonl cannot be written, checkpoints are intact: No space left"
    refuses(why, train, data, tmp_path, save_interval=1)
    assert checkpoint(tmp_path)["step"] == 2


def test_a_share_of_warm_up_stays_the_same_number_of_steps(data, tmp_path):
    train(data, tmp_path / "run", max_iters=4, warmup_iters=0.5)
    resume(tmp_path / "run", max_iters=40)
    assert [h["resolved"]["warmup_iters"] for h in log_of(tmp_path / "run").headers] == [2, 2]


def test_bad_steps_do_not_move_routers_and_experts(data, tmp_path, monkeypatch):
    """Scores that are not finite would all count as tokens that skip."""
    how = dict(mod_on="both", mod_rate=0.4, moe_experts=4, eval_interval=0, keep_interval=1)
    train(data, tmp_path / "good", **how, max_iters=5)

    def spoil(number, loss):
        if number in (3, 5):
            for module in live:
                module.fresh.add_(10**6) if isinstance(module, mod.Router) else module.load.add_(9)
        return loss * math.inf if number in (3, 5) else loss

    live, build = [], GPT.__init__
    found = lambda model: live.extend([*mod.routers(model), *moe.layers(model)])
    monkeypatch.setattr(GPT, "__init__", lambda self, config: build(self, config) or found(self))
    on_forward(monkeypatch, spoil)
    train(data, tmp_path / "bad", **how, max_iters=8)
    good, bad = (checkpoint(tmp_path / name)["model"] for name in ("good", "bad"))
    for name in (name for name in good if name.endswith(("tau", "share", "histogram"))):
        assert torch.equal(good[name], bad[name]), name  # set by step 1, and not by a bad step
    for name in (name for name in good if name.endswith("mlp.bias")):
        assert bad[name].abs().max() <= 6 * moe.RATE + 1e-9
    fresh = [x.sum().item() for name, x in bad.items() if name.endswith("fresh")]
    assert fresh == [3 * 128] * 4  # steps 6 to 8


@cases("interval, cost, steps", [
    (None, 0.0, [0, 3, 6, 9, 12]), (None, 0.6, [0, 6, 12]), (5, 0.6, [0, 5, 10, 12]),
    (0, 0.0, [0, 12]),
])  # fmt: skip
def test_saves_come_by_time_or_by_steps(data, tmp_path, monkeypatch, interval, cost, steps):
    """The newest, on a clock where a step takes 10 seconds and a save takes `cost` seconds. Kept
    checkpoints do not put it off."""
    saved, clock = [], [0.0]

    def save(path, state):
        if path.endswith("/ckpt.pt"):
            saved.append(state["step"])
            clock.append(cost)

    on_forward(monkeypatch, lambda number, loss: clock.append(10.0) or loss)
    monkeypatch.setattr(checkpoints, "save", save)
    monkeypatch.setattr(time, "monotonic", lambda: sum(clock))
    train(data, tmp_path, max_iters=12, eval_interval=0, save_interval=interval, keep_interval=1)
    assert saved == steps


BAD_INPUT = {
    "train.py": [
        ("--n_lyer=3", "the nearest is 'n_layer'"), ("--residual=prenrm", "choose one of none"),
        ("--optimizer=sgd", "must be adamw or muon"), ("--schedule=step", "must be cosine or wsd"),
        ("--dtype=float16", "must be auto, float32 or b"), ("--shard=zero", "must be none or fsdp"),
        ("--shard=fsdp", "needs several proc"), ("--val_part=half", "must be all, tune or report"),
        ("--device=tpu", "must be auto, cpu, mps"), ("--device=mps", "torch sees no Apple GPU"),
        ("--batch_size=0", "must be above 0"), ("--flops_budget=0", "must be above 0"),
        ("--flops_budget=1e999", "and finite"), ("--warmup_iters=1e999", "and finite"),
        ("--block_size=0", "must be above 0"), ("--seed=1e30", "must be below 2**63"),
        ("--out_dir=", "out_dir is empty: give a folder"), ("nope.py", "no such config file"),
        ("--total_batch_tokens=-128", "must be above 0"), ("--seed=-1", "must be at least 0"),
        ("--warmup_iters=1.5", "must be whole steps, or a share of all below 1"),
        ("--min_lr=1.0", "must be from 0 to learning_rate"),
        ("--wsd_share=0.3 --schedule=cosine", "wsd_share=0.3 needs schedule='wsd'"),
        ("--n_head=3", "does not divide into n_head=3"), ("--n_kv_head=0", "must be at least 1"),
        ("--rope_base=0", "must be above 0"), ("--vocab_size=100", "set --vocab_size=257 or more"),
        ("--block_size=30000", "no window of 30000 tokens"), ("--data_dir=/x", "/x holds no prep"),
        ("--total_batch_tokens=200", "do not divide over 1 ranks in sequences of 32 tokens"),
        ("--alpha_warmup_iters=9 --residual=lns", "alpha_warmup_iters=9 needs residual='nag'"),
        ("--recompute=True --compile=True --moe_experts=4 --moe_balance=loss",
         "recompute=True needs compile=False or moe_balance='bias'"),
        ("--lora_rank=4 --embed_lr=0.1", "embed_lr=0.1 needs lora_rank=0"),
        ("--lora_rank=4", "a trained model"), ("--head_lr=1.0", "needs tied=False"),
        ("--gate_lr=1.0 --residual=prenorm", "has no gates"),
        ("--save_best=True --eval_interval=0", "needs eval_interval above 0"),
        ("--head_scale=1.0", "needs tied=False"), ("--smear=-1", "must be at least 0"),
        ("--bf16_stream=True", "needs dtype='bfloat16'"),
        ("--branch_from=x --init_from=y", "starts a new run"), ("--branch_from=/x", "/x: no such"),
        ("--init_from=/x.pt", "/x.pt: no such checkpoint"), ("--init_from=resume", "no such check"),
        (f"--init_from={HERE}", "no such check"), (f"--init_from={__file__}", "is no checkpoint"),
    ],
    "eval.py": [
        ("--what=loss,dept", "dept is not one of loss, depth, sample, tasks"),
        ("--what=mod", "mod is not one of loss, depth, sample, tasks"),
        ("--checkpoint=x.pt", "x.pt: no such check"), ("--data_dir=/x", "/x holds no prepared"),
        ("--what=loss --text=nope.md", "text='nope.md': no such file"),
        ("--limit=3", "limit=3 is for tasks"),
        (f"--what=sample --text={HERE}/README.md", f"text='{HERE}/README.md' is for loss"),
        ("--what=loss --dtype=half", "must be auto, float32"), ("--mod_rate=1", "and below 1"),
        ("--batch_size=0", "above 0"), ("--context=0", "above 0"), ("--temperature=-1", "at least"),
        ("--top_p=2", "at most 1"), ("--val_part=half", "must be all, tune or report"),
        (f"--text={HERE}", "cannot be read"), (f"--text={HERE}/results/modes.png", "cannot be r"),
        (f"--text={HERE}/README.md --val_part=tune", "is for the validation split, not for text"),
    ],
    "bench.py": [
        ("--what=speed", "choose one of forward"), ("--modes=nagg", "choose one of none"),
        ("--what=size,memory", "size goes alone"),
        ("--what=nanogpt --nanogpt_model=nothing.py", "is not the path"),
        ("--rounds=2", "at least 3"), ("--rates=2", "shares below 1"), ("--ranks=0", "above 0"),
        ("--new_tokens=a", "numbers above 0"), ("--batches_of=0", "numbers above 0"),
        ("--what=size --out=", "'' is not the name of a file"),
        (f"--what=size --out={HERE}", "is not the name of a file"),
        ("--residual=nag", "set --modes, not --residual"),
        ("--what=size --modes=nag", "set --residual, not --modes"),
        ("--modes=prenorm,nag --hc_streams=2", "hc_streams: no setting of prenorm or nag"),
    ],
}  # fmt: skip


@cases("name, bad, why", [(n, *row) for n in BAD_INPUT for row in BAD_INPUT[n]])
def test_bad_input_is_one_line_and_writes_nothing(
    data, runs, tmp_path, monkeypatch, name, bad, why
):
    monkeypatch.chdir(tmp_path)
    before = content(runs / "a")
    tiny_run = [*TINY_RUN, f"--data_dir={data}", f"--out_dir={tmp_path / 'out'}"]
    argv = {"train.py": tiny_run, "eval.py": [f"--out_dir={runs / 'a'}"], "bench.py": []}[name]
    refuses(why, script, name, *argv, *bad.split())
    assert content(runs / "a") == before and not os.listdir(tmp_path)


def test_wandb_gets_the_records_when_asked_and_is_not_needed_otherwise(data, tmp_path, monkeypatch):
    seen, log = [], lambda record, step: seen.append(step)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(machine, "resource", None)  # Windows does not have this module either
    train(data, tmp_path)
    assert log_of(tmp_path).records[-1]["mem_gb"] is None
    fake = SimpleNamespace(init=lambda **how: seen.append(how), log=log)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(data, tmp_path / "with", wandb_log=True)
    resume(tmp_path / "with", max_iters=7)
    begun, *steps, resumed, last = seen
    assert begun["project"] == "residual" and steps == [*range(7)] and last == 7
    assert resumed["id"] == begun["id"] and resumed["resume"] == "allow"


def test_runs_on_different_data_are_not_compared_or_resumed(data, runs, tmp_path):
    other, a, b = shutil.copytree(data, tmp_path / "other"), tmp_path / "a", tmp_path / "b"
    meta = data_file.read_meta(other)
    meta["splits"]["train"]["shards"].pop()
    data_file.write_json(other / "meta.json", meta)
    shutil.copytree(runs / "a", a)
    train(other, b)
    one, two = (log_of(run).headers[0]["data"] for run in (a, b))
    assert one["train"] != two["train"] and one["val"] == two["val"]
    assert one == {split: data_file.Windows(data, split, 16).sha256 for split in one}
    for shard in data_file.read_meta(data)["splits"]["train"]["shards"]:
        assert shard["sha256"] == data_file.file_sha256(os.path.join(data, shard["file"]))
    message = f"{a} and {b} were trained on different data"
    refuses(message, plot.main, "loss", str(tmp_path / "x"), str(a), str(b))
    refuses("on other data: the shards of train differ", resume, a, data_dir=other)
    shutil.copytree(data, tmp_path / "moved")
    resume(a, data_dir=tmp_path / "moved", max_iters=7)  # the same content elsewhere


# --- Training in several processes ----------------------------------------------------------------


@pytest.fixture(scope="session")
def over_ranks(data, tmp_path_factory):
    """The same run in one process, in two with DDP, and in two with FSDP. The last one is stopped
    by a signal to its second rank, and resumed."""
    at = tmp_path_factory.mktemp("ranks")
    how = dict(max_iters=8, total_batch_tokens=384, keep_interval=4, save_best=True)
    how |= dict(residual="bhyt", bhyt_unit=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bhyt, "INTERVAL", 4)
        train(data, at / "one", **how)
    ranks(data, at / "ddp", **how)
    ranks(data, at / "fsdp", **how, shard="fsdp", sigterm_to=1)
    told = open(at / "fsdp.rank0.txt").read()
    command = f"torchrun --standalone --nproc_per_node=2 train.py --out_dir={at / 'fsdp'} --init"
    assert f"stopped by a signal at step 2, saved; to continue: {command}" in told
    ranks(data, at / "fsdp", **how, shard="fsdp", init_from="resume")
    return at


@cases("name", ["ddp", "fsdp"])
def test_two_ranks_have_the_curve_of_one_process(over_ranks, tmp_path, monkeypatch, name):
    """Each run refreshes BHyT's c on schedule. One process can resume each of them."""
    assert "2 ranks x 2 micro-steps x 3 x 32" in open(over_ranks / f"{name}.rank0.txt").read()
    paths = [shutil.copytree(over_ranks / run, tmp_path / run) for run in ("one", name)]
    one, two = (checkpoint(path)["model"] for path in paths)
    old, fresh = (f(paths[0] / "ckpt_000004.pt") for f in (checkpoint, checkpoints.load_model))
    for key in ("blocks.0.attn_residual.c", "blocks.1.attn_residual.c"):
        c = fresh[1].state_dict()[key].item()
        assert one[key].item() == pytest.approx(c, rel=1e-4) == two[key].item()
        assert old["model"][key].item() != pytest.approx(c, rel=1e-3)
    for path in paths:
        monkeypatch.setattr(bhyt, "INTERVAL", 4)
        resume(path, max_iters=10, shard="none")
    one, two = map(log_of, paths)
    assert two.steps == list(range(11)) and two.losses == pytest.approx(one.losses, abs=1e-4)
    assert two.val_losses == pytest.approx(one.val_losses, abs=1e-4)
    monkeypatch.setenv("WORLD_SIZE", "5")
    refuses("384 tokens a step do not divide over 5 ranks in sequences of 32", resume, paths[1])


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["hc", "mhc", "attnres", "attnres_block"])
def test_streams_and_sources_over_two_ranks_are_those_of_one(data, tmp_path, residual):
    """With FSDP: test_sharded_over_two_ranks_they_have_the_curve_of_one_process."""
    how = dict(few(residual), total_batch_tokens=256, max_iters=8)
    train(data, tmp_path / "one", **how)
    ranks(data, tmp_path / "two", **how)
    resume(tmp_path / "two", max_iters=10)
    resume(tmp_path / "one", max_iters=10)
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    assert two.steps == list(range(11)) and two.losses == pytest.approx(one.losses, abs=1e-4)


def test_a_sharded_run_writes_the_files_of_one_process(over_ranks, tmp_path):
    """Every script reads them. The first one has the same weights, before any training."""
    one, run, sft = over_ranks / "one", over_ranks / "fsdp", tmp_path / "sft"
    kept = {"ckpt_000000.pt", "ckpt_000004.pt", "ckpt_000008.pt", "ckpt_best.pt", "ckpt.pt"}
    assert set(os.listdir(run)) == set(os.listdir(one)) == kept | {"log.jsonl"}
    starts = [checkpoint(path / "ckpt_000000.pt")["model"] for path in (one, run)]
    assert_close(*starts, rtol=0, atol=0)
    ends = [checkpoint(path) for path in (one, run)]
    assert_close(ends[0]["optimizers"], ends[1]["optimizers"], rtol=1e-2, atol=1e-4)
    report = evaluated(run, "loss", eval_tokens=512, checkpoint="ckpt_best.pt")
    (run / "eval.json").unlink()
    assert report["loss"]["loss"] == pytest.approx(min(log_of(run).val_losses), abs=1e-4)
    how = dict(lora_rank=2, max_iters=1, eval_tokens=512, device="cpu", compile=False)
    resume(sft, init_from=run, **how)
    lora.main(str(sft), str(tmp_path / "merged.pt"))


@cases("source, start", [
    ("d", dict(residual="bhyt", mod_on="both", mod_rate=0.3, mod_router="learned")),
    slow("c", dict(residual="lns")), slow(None, dict(moe_experts=4, tied=False, head_scale=0.1)),
])  # fmt: skip
def test_ranks_get_the_model_that_rank_0_built_or_read(data, runs, tmp_path, source, start):
    """Weights, buffers and, as the FLOPs show, how many tokens routers run"""
    how = dict(start, max_iters=2, keep_interval=1, total_batch_tokens=256)
    how["init_from"] = "scratch" if source is None else runs / source
    train(data, tmp_path / "one", **how)
    ranks(data, tmp_path / "two", **how, shard="fsdp")
    one, two = (checkpoint(tmp_path / run / "ckpt_000000.pt")["model"] for run in ("one", "two"))
    assert_close(one, two, rtol=0, atol=0)
    one, two = (log_of(tmp_path / run) for run in ("one", "two"))
    assert two.losses == pytest.approx(one.losses, abs=1e-3)
    assert [r["flops"] for r in two.records] == [r["flops"] for r in one.records]


@cases("shard", ["none", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_experts_and_routers_agree_over_ranks(data, tmp_path, shard):
    how = dict(moe_experts=4, mod_on="both", mod_rate=0.4, max_iters=14, total_batch_tokens=256)
    train(data, tmp_path / "one", **how)
    ranks(data, tmp_path / "two", **how, shard=shard)
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    assert two.losses[:2] == pytest.approx(one.losses[:2], abs=1e-5)
    assert two.losses[:6] == pytest.approx(one.losses[:6], abs=1e-2)  # rounding changes choices
    assert two.losses == pytest.approx(one.losses, abs=0.1)
    saved, last = checkpoint(tmp_path / "two")["model"], two.records[-1]
    for router in ("blocks.0.attn_router", "blocks.1.mlp_router"):  # scores of all ranks
        scored = saved[router + ".histogram"].sum(), saved[router + ".fresh"].sum()
        assert scored == (pytest.approx((9 + mod.MEMORY) * 256), 4 * 256)
    assert np.sum(last["load"], axis=1) == pytest.approx([1, 1])
    assert np.mean(last["ran"]) == pytest.approx(0.6, abs=0.03)
    cost, params = np.diff([r["flops"] for r in two.records]), two.headers[0]["params"]
    assert cost[1] != cost[-1]  # because k changed
    assert params["all"] - params["active"] == 2 * 2 * 2 * 32 * 128


# --- Checkpoints ----------------------------------------------------------------------------------


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("pwned",)


edited = lambda change: lambda path: path.write_bytes(change(path.read_bytes()))
resaved = lambda change: lambda path: torch.save(change(torch.load(path, weights_only=True)), path)
config = lambda **changes: resaved(lambda s: s | {"config": s["config"] | changes})


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("name, spoil, why", [
    ("data/meta.json", os.remove, "no meta.json"),
    ("data/meta.json", edited(lambda b: b.replace(b"60000", b"59")), "is not the shard that"),
    ("data/meta.json", edited(lambda b: b.replace(b": true", b": false")), "was cut short"),
    ("data/meta.json", edited(lambda b: b[:-10]), "is damaged, or from another version"),
    ("data/meta.json", edited(lambda b: b.replace(b"sha256", b"sha")), "is damaged, or from"),
    ("data/val_00000.bin", os.remove, "val_00000.bin is listed in meta.json but missing"),
    ("data/val_00000.bin", edited(lambda b: b[:-10]), "val_00000.bin is truncated"),
    *[("data/val_00000.bin", edited(change), "is not the shard that meta.json describes")
      for change in (lambda b: b[:20], lambda b: b"x" + b[1:], lambda b: b[:8] + b"9" + b[9:],
                     lambda b: b[:30] + b"x" + b[31:])],
    ("run/ckpt.pt", os.remove, "no such checkpoint"),
    ("run/ckpt.pt", edited(lambda b: b[:-2000]), "is no checkpoint of train.py"),
    ("run/ckpt.pt", edited(lambda b: b"text"), "is no checkpoint of train.py"),
    ("run/ckpt.pt", resaved(lambda s: {"weights": 1}), "it lacks config, settings or step"),
    ("run/ckpt.pt", resaved(lambda s: s | {"meta": Evil()}), "is no checkpoint of train.py"),
    ("run/ckpt.pt", resaved(lambda s: without(s, "format")), "has format 1, this code reads 5"),
    ("run/ckpt.pt", resaved(lambda s: s | {"format": 2}), "has format 2, this code reads 5"),
    ("run/ckpt.pt", resaved(lambda s: s | {"format": 99}), "has format 99, this code reads 5"),
    ("run/ckpt.pt", config(n_embd=64), "does not fit its own settings"),
    ("run/ckpt.pt", config(n_head=3), "does not divide into n_head=3 heads"),
    ("run/ckpt.pt", config(bhyt_causal=True), "differs from this code in the settings bhyt_causal"),
    ("run/ckpt.pt", resaved(lambda s: s | {"config": without(s["config"], "smear")}), "smear: use"),
])  # fmt: skip
def test_a_damaged_file_is_refused(data, runs, tmp_path, monkeypatch, name, spoil, why):
    """With a one-line message, and without running code from the file."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data, "data")
    shutil.copytree(runs / "a", "run")
    spoil(tmp_path / name)
    if name.startswith("data"):
        refuses(why, train, "data", "out")
    else:
        refuses(why, resume, "run")
        refuses(why, resume, "out", init_from="run/ckpt.pt")
        refuses(why, script, "eval.py", out_dir="run")
        refuses(why, lora.main, "run/ckpt.pt", "merged.pt")
    assert set(os.listdir()) == {"data", "run"}


def test_two_writers_of_a_file_do_not_mix(tmp_path, monkeypatch):
    path, called = tmp_path / "file", []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        spied = lambda *of, name=name, real=real: called.append(name) or real(*of)
        monkeypatch.setattr(os, name, spied)
    with pytest.raises(FileNotFoundError), data_file.atomic(str(path)) as first:
        first.write(b"first")
        with data_file.atomic(str(path)) as second:
            second.write(b"2nd")
    assert path.read_bytes() == b"2nd" and os.listdir(tmp_path) == ["file"]
    assert called == ["fsync", "replace"] + ["fsync", "replace"]  # complete before it has its name


def test_a_save_leaves_the_files_of_others_alone(data, tmp_path):
    """Such as a merge or an evaluation that is writing into the folder at the same time."""
    others = {"merged.pt.tmp", "eval.json.tmp", "notes.tmp", "ckpt_best.pt.tmp"}
    for name in others:
        (tmp_path / name).write_text("in progress")
    train(data, tmp_path, max_iters=2, save_interval=1)
    assert set(os.listdir(tmp_path)) == others | {"ckpt.pt", "log.jsonl"}


def test_a_checkpoint_has_the_number_of_its_streams(data, runs, tmp_path):
    assert checkpoint(runs / "a")["config"]["hc_streams"] is None
    train(data, tmp_path, residual="ihc", max_iters=1)
    resume(tmp_path, hc_streams=2, max_iters=2)
    assert log_of(tmp_path).headers[0]["resolved"]["hc_streams"] == 2
    assert checkpoint(tmp_path)["step"] == 2 and checkpoint(tmp_path)["config"]["hc_streams"] == 2
    refuses("trained with hc_streams=2, not 4", resume, tmp_path, hc_streams=4)


def test_a_run_resumes_in_a_folder_with_brackets_and_holds_no_old_file(data, runs, tmp_path):
    """A file that is replaced takes space as long as a process has it open."""
    run = shutil.copytree(runs / "a", tmp_path / "lr[3e-4]*")
    names = resume(run, max_iters=7)
    if os.path.exists("/proc/self/maps"):  # on Linux
        assert str(run) not in open("/proc/self/maps").read()
    assert names["step"] == 7 == checkpoint(run)["step"]


@cases("before, changes, best", [
    (True, {}, 0.5), (True, {"val_part": "tune"}, None), (True, {"eval_tokens": 256}, None),
    (False, {"save_best": True}, None),  # no file has the best of the run before
])  # fmt: skip
def test_the_best_loss_counts_on_the_same_text_and_if_it_was_saved(
    data, runs, tmp_path, before, changes, best
):
    """The best so far is lower than any loss of this run, so only a new comparison replaces it."""
    run = shutil.copytree(runs / "a", tmp_path / "run")
    old = lambda state: {"settings": state["settings"] | {"save_best": before}}
    resaved(lambda state: state | {"best_val_loss": 0.5} | old(state))(run / "ckpt.pt")
    resume(run, max_iters=7, eval_interval=7, **changes)
    last = log_of(run).val_losses[-1]
    assert last > 0.5 and checkpoint(run)["best_val_loss"] == (best or last)
    assert (run / "ckpt_best.pt").exists() == (best is None)


def test_the_best_checkpoint_can_be_the_first(data, tmp_path):
    train(data, tmp_path / "run", max_iters=4, eval_interval=2, learning_rate=10.0, save_best=True)
    losses = log_of(tmp_path / "run").val_losses
    saved = torch.load(tmp_path / "run" / "ckpt_best.pt", weights_only=True)
    assert saved["step"] == 0 and saved["best_val_loss"] == losses[0] == min(losses)
