"""
Kernels on a machine without a GPU: against their plain lines, and compiled for an H100.

Triton's interpreter runs kernels on tensors of the CPU in a process with TRITON_INTERPRET=1 from
its start. So a test here starts pytest again, which runs the functions whose names begin with
`streams_`.
"""

import copy
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import test_rivals
import torch
from torch.testing import assert_close

import kernels
import streams
from bench import writes_and_reads
from test_all import HERE, MOD, cases, logits_and_gradients, shaken, some_ids, tiny

pytest.importorskip("triton", reason="make slow installs triton")
pytestmark = pytest.mark.slow
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cases("names", ["streams"])  # the beginning of the functions that the interpreter runs
def test_in_the_interpreter(names):
    """Kernels equal their plain lines, values and gradients."""
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", __file__]
    command += ["-o", f"python_functions={names}_*"]
    how = dict(cwd=HERE, env=os.environ | {"TRITON_INTERPRET": "1"}, text=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, **how)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-3000:]


def test_a_block_with_kernels_compiles_for_an_h100(tmp_path):
    """Without a graph break, and without registers in memory."""
    argv = ["--modes=ihc", "--what=step", "--parts=dense", f"--out={tmp_path / 'found'}"]
    command = [sys.executable, "runs/h100.py", *argv]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (found,) = json.loads((tmp_path / "found").read_text())["modes"].values()
    assert found["breaks"] == found["spill"] == 0 and len(found["ours"]) == 3


# ------------------------------------------------------------------------------------------------
# Streams


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """The interpreter keeps bfloat16 in integers, and multiplies them as such."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    def in_float32(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    plain = InterpreterBuilder.create_dot
    dot = lambda self, a, b, *more: plain(self, in_float32(a), in_float32(b), *more)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


MODELS = {
    "one": dict(hc_streams=1), "two": dict(hc_streams=2), "three": dict(hc_streams=3),
    "layer": dict(norm="layer"), "none": dict(norm="none"), "depth": dict(branch_scale="depth"),
    "skipping": MOD | {"mod_router": "learned"}, "wider": dict(n_embd=72), "again": {}, "four": {},
}  # fmt: skip
OF_MODE = {
    "hc": ["four", "skipping"],
    "mhc": ["one", "three"],
    "ihc": ["one", "two", "layer", "none", "depth", "wider", "again", "skipping"],
    "smhc": ["two", "skipping"],
}


@cases("mode, kind", [(mode, kind) for mode in OF_MODE for kind in OF_MODE[mode]])
def streams_of_a_model(mode, kind, monkeypatch):
    """A block, and in "again" with recompute. 38 tokens fill no block of tokens."""
    model = shaken(tiny(residual=mode, n_layer=1, **MODELS[kind])).double().train()
    model.recompute = kind == "again"
    idx, targets = some_ids(2, 19), some_ids(2, 19, seed=2)
    expected = logits_and_gradients(model, idx, targets)
    monkeypatch.setattr(streams, "on_cuda", lambda x: True)
    for ours, theirs in zip(logits_and_gradients(model, idx, targets), expected):
        assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def worst_error(mode, width, stream, output, place="cpu", compiled=lambda function: function):
    """Two sublayers against plain lines in float64: the largest error of an output or a gradient,
    relative to the largest number of each. stream and output: dtypes"""
    model = shaken(tiny(residual=mode, n_layer=1, n_embd=width, n_head=2))
    block, g, found = model.blocks[0], torch.Generator().manual_seed(0), []
    random = lambda *size: torch.randn(size, generator=g, dtype=torch.float64)
    dtypes, sizes = (output, output, stream), ((), (), (4,))
    given = [random(*size, 2, 19, width).to(dtype) for size, dtype in zip(sizes, dtypes)]
    grads = []
    for reference in (True, False):
        where = [("cpu", torch.float64)] * 3 if reference else [(place, d) for d in dtypes]
        leaves = [x.to(*to).requires_grad_() for x, to in zip(given, where)]
        parts = copy.deepcopy([block.attn_residual, block.mlp_residual])
        parts = [part.double() if reference else part.to(place) for part in parts]
        start = model.ends.embed(leaves[2][0].detach())
        streams_in = [*leaves[2]] if reference else leaves[2:]
        assert start.x.shape == streams_in[0].shape
        out = compiled(writes_and_reads(*parts, start))(*leaves[:2], *streams_in)
        out = [*out[:2], torch.stack(out[2:6]), *out[6:]] if reference else out
        grads = grads or [random(*x.shape) for x in out]
        leaves += [p for part in parts for p in part.parameters()]
        weights = [grad.to(x) for grad, x in zip(grads, out)]
        how = dict(allow_unused=True, materialize_grads=True)
        back = torch.autograd.grad(out, leaves, weights, **how)
        found.append([x.detach().cpu().double() for x in (*out, *back)])
    errors = [(b - a).abs().max() / a.abs().max().clamp(min=1e-3) for a, b in zip(*found)]
    return max(errors).item()


PRECISIONS = [  # of the stream and of what sublayers write; the largest error
    (torch.float32, torch.float32, 1e-5),
    (torch.float32, torch.bfloat16, 1e-2),
    (torch.bfloat16, torch.bfloat16, 3e-2),
]


@cases("mode, precision", [("ihc", 0), ("hc", 1), ("ihc", 2), ("smhc", 2)])
def streams_in_low_precision(mode, precision, monkeypatch):
    monkeypatch.setattr(streams, "on_cuda", lambda x: x.dtype != torch.float64)
    stream, output, close = PRECISIONS[precision]
    assert worst_error(mode, 72, stream, output) < close


def by_kernels(monkeypatch):
    """Replace the functions of streams.py that the goldens hold."""
    first = lambda X, *more: kernels.Exchange.apply(torch.stack([*X]), None, None, *more)

    def mhc_maps(X, w, s, b, iters=20, eps=streams.EPS):
        _, y, squares, *_ = first(X, w, None, None, None, kernels.NONE, eps, 0.0)
        n, own = len(X), SimpleNamespace(n=len(X), n_maps=len(s), w=w, s=s, b=b)
        pre, maps = streams.MHC.maps_of(own, y, squares)
        post, M = maps[..., :n].split(1, -1), maps[..., n:].split(1, -1)
        return pre.split(1, -1), post, [M[i : i + n] for i in range(0, len(M), n)] or None

    def read(X, pre):
        pre = torch.cat([*pre], -1)
        X, _, _, own, rho, h = first(X, None, None, pre, None, kernels.GIVEN, 0.0, 0.0)
        return kernels.Reading.apply(h, rho, pre, None, X, own)

    def write(X, M, post, f):
        maps = torch.cat([*post, *sum(map(list, M or ()), [])], -1)
        return kernels.write(torch.stack([*X]), f, maps).unbind()

    replaced = dict(mhc_maps=mhc_maps, read=read, write=write)
    for name, function in replaced.items():
        monkeypatch.setattr(streams, name, function)
    monkeypatch.setattr(streams, "on_cuda", lambda x: True)


@cases("kind", ["mhc", "ihc", "smhc"])
def streams_equal_the_golden(kind, monkeypatch):
    by_kernels(monkeypatch)
    if kind in ("mhc", "ihc"):
        test_rivals.test_hyper_connections_equal_the_golden_with_gradients(kind)
    else:
        test_rivals.test_three_sublayers_equal_the_golden_with_gradients(kind)


def streams_leave_plain_lines_when_there_are_many(monkeypatch):
    monkeypatch.setattr(streams, "on_cuda", lambda x: True)
    model = tiny(residual="mhc", hc_streams=kernels.MOST_STREAMS + 1)
    assert model.ends.embed(torch.zeros(1, 2, 32)).x.ndim == 3
