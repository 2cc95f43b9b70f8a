"""What eval.py and depth.py measure, figures, and scripts as a user meets them. See test_all.py."""

import glob
import itertools
import json
import math
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint as checkpoints
import data as data_file
import depth
import generate
import machine
import mod
import model as model_file
import moe
import plot
import tasks
from model import GPTConfig
from test_all import (
    EXTRAS,
    HERE,
    MOD,
    assert_close,
    cases,
    evaluated,
    every_mode,
    log_of,
    make_data,
    refuses,
    resaved,
    script,
    shaken,
    some_ids,
    tiny,
    train,
)

# --- Evaluation -----------------------------------------------------------------------------------


def test_windows_for_evaluation_are_spread_and_the_halves_do_not_overlap(data):
    windows, spread = data_file.Windows(data, "val", 32), data_file.spread
    n, tune, report = len(windows), spread(windows, None, "tune"), spread(windows, None, "report")
    assert spread(windows) == list(range(n)) == sorted(tune + report)
    assert abs(len(tune) - len(report)) <= 1 and len(spread(windows, 1)) == 1
    hundred = type("Hundred", (), {"T": 32, "__len__": lambda self: 100})()
    assert spread(hundred, 32 * 4) == [12, 37, 62, 87]  # the middle of each quarter
    assert spread(hundred, 32 * 4, "tune") == [12, 36, 62, 86]
    for part, pool in (("all", range(n)), ("tune", tune), ("report", report)):
        some, gap = spread(windows, 32 * 50, part), n / 50
        assert len(some) == 50 and set(some) <= set(pool)
        assert np.diff([-gap / 2, *some, n + gap / 2 - 1]).max() < 1.6 * gap + 2


@cases("run", ["a", "c"])
def test_eval_measures_the_stream_by_depth(data, runs, capsys, run):
    """Every number is computed again from its definition. NAG's lanes make one stream."""
    argv = ["--max_new_tokens=9", "--prompt=def ", "--temperature=0", "--dtype=float32"]
    script("eval.py", *argv, out_dir=runs / run, eval_tokens=512, depth_tokens=640)
    report = json.load(open(runs / run / "eval.json"))
    _, model = checkpoints.load_model(runs / run)
    assert report["sample"].startswith("def ") and "def " in capsys.readouterr().out
    assert report["loss"]["loss"] == pytest.approx(log_of(runs / run).val_losses[-1], abs=1e-5)
    windows, seen = data_file.Windows(data, "val", 32), report["depth"]
    rows = np.stack([windows[i] for i in data_file.spread(windows, 640)]).astype(int)
    x = torch.tensor(rows[:, :-1])
    walked = [stream for *_, before, after in depth.walk(model, x) for stream in (before, after)]
    streams = [s.x if s.lane is None else s.x * s.lane.exp() for s in walked[:1] + walked[1::2]]
    start, *after = streams = [s.detach().double() for s in streams]
    angle = lambda a, b: torch.acos(F.cosine_similarity(a, b, dim=-1)).rad2deg()
    layers = torch.stack(streams[::2])  # after the embedding and each block
    rms, mean, largest = layers.square().mean(-1).sqrt(), layers.mean(-1), layers.abs().amax(-1)
    variance, fourth = rms**2 - mean**2, (layers - mean[..., None]).pow(4).mean(-1)
    updates = [new - old for old, new in itertools.pairwise(streams)]
    for name, values in {
        "variance": variance * 32 / 31, "norm": rms * 32**0.5, "magnitude": layers.abs(),
        "max": largest, "max/rms": largest / rms, "kurtosis": fourth / variance**2,
        "cosine": F.cosine_similarity(layers[:-1], layers[1:], dim=-1),
        "update": [u.norm(dim=-1) / s.norm(dim=-1) for u, s in zip(updates, streams)],
        "rotation": [angle(old, new) for old, new in itertools.pairwise(streams)],
        "from embedding": [angle(start, new) for new in after],
    }.items():  # fmt: skip
        assert seen[name] == pytest.approx([v.mean().item() for v in values], rel=1e-3), name
    if run == "a":
        turned = [math.degrees(math.atan(a)) for a in seen["a"]]
        assert seen["rotation"] == pytest.approx(turned, rel=0.05)
        assert all(0 < a < alpha for a, alpha in zip(seen["a"], seen["alpha"]))
    assert len(seen["sink"]) == 2
    p = model(x)[0].detach().softmax(-1)
    norm, entropy = streams[4].norm(dim=-1).flatten(), -(p * p.log()).sum(-1).flatten()
    correlation = torch.corrcoef(torch.stack([norm.log(), entropy]))[0, 1].item()
    assert seen["norm and entropy"] == pytest.approx(correlation, abs=1e-3)


def test_the_sink_is_the_share_of_attention_that_the_first_token_gets(monkeypatch):
    model, h = shaken(tiny(n_head=4, n_kv_head=2)), torch.randn(2, 32, 32)
    attention, rope = model.blocks[0].attn, (model.cos, model.sin)
    sink, real = depth.sink(attention, h, rope).item(), F.scaled_dot_product_attention

    def checked(q, k, v, **how):
        """With values of 1 for the first token and 0 for others, the output is its share."""
        first = torch.zeros_like(v).index_fill_(2, torch.tensor(0), 1)
        assert real(q, k, first, **how)[:, :, 1:].mean().item() == pytest.approx(sink, rel=1e-5)
        return real(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", checked)
    attention(h, rope)


@cases("residual", ["prenorm", "nag", "bhyt"])
def test_a_block_that_does_nothing_is_not_missed_and_has_no_gradient(residual):
    model = shaken(tiny(n_layer=3, residual=residual, **EXTRAS)).eval()
    x, y, idle = some_ids(4), some_ids(4, seed=2), model.blocks[1]
    silent = [idle.attn.wo.weight, idle.mlp.down.weight]
    if residual == "nag":
        silent += [idle.attn_residual.alpha, idle.mlp_residual.alpha]
    torch._foreach_zero_([p.data for p in silent])
    model.refresh()
    before, rise = model(x, y)[1].item(), depth.dropped(model, [(x[:3], y[:3]), (x[3:], y[3:])])
    assert rise[1] == pytest.approx(0, abs=1e-5) and min(abs(rise[0]), abs(rise[2])) > 1e-4
    assert model(x, y)[1].item() == before and len(model.blocks) == 3
    norms, params = depth.gradients(model, x, y), [*model.blocks[2].parameters()]
    assert all(p.grad is None for p in model.parameters())
    grads = torch.autograd.grad(model(x, y)[1], params, allow_unused=True)
    by_hand = math.hypot(*(g.norm().item() for g in grads if g is not None))
    assert norms[2] == pytest.approx(by_hand, rel=1e-5)


def test_depth_shows_the_load_of_the_experts_that_training_counts(capsys):
    model = shaken(tiny(moe_experts=4, n_layer=3))
    batches = [(some_ids(rows, seed=rows), some_ids(rows)) for rows in (3, 1)]
    for x, _ in batches:
        model(x)  # in training
    counted = torch.stack([layer.load for layer in moe.layers(model)]) / (4 * 32 * 2)
    report = depth.depth(model.eval(), batches)
    assert_close(torch.tensor(report["load"]), counted)
    script_of = runpy.run_path(os.path.join(HERE, "eval.py"))
    script_of["show_depth"](report | {"copying": [1.0, 1.0]})
    ends = ", ".join(f"{row.min():.1%} to {row.max():.1%}" for row in counted)
    assert f"of each block, share of the choices: {ends}\n" in capsys.readouterr().out


@torch.no_grad()
@every_mode
def test_the_walk_is_the_forward_and_updates_are_measured_against_the_stream(residual):
    model, idx = shaken(tiny(residual=residual, bf16_stream=True)).eval(), some_ids()
    with torch.autocast("cpu", torch.bfloat16):
        *_, (_, _, _, before, last) = depth.walk(model, idx)
        logits = F.linear(*model.ends.readout(last, model.head.weight))
        assert before.x.dtype == last.x.dtype == torch.bfloat16
        assert torch.equal(logits, model(idx)[0])
    report = depth.depth(model, [(idx, idx)])
    old = model.ends.additive(model.begin(idx, torch.arange(idx.size(1))))
    assert report["norm"][0] == pytest.approx(old.norm(dim=-1).mean().item(), rel=1e-4)
    for update, (*_, after) in zip(report["update"], depth.walk(model, idx)):
        new = model.ends.additive(after)
        size = ((new - old).norm(dim=-1) / old.norm(dim=-1)).mean().item()
        assert update == pytest.approx(size, rel=1e-4)
        old = new


def test_logits_that_are_not_finite_count_as_a_leak_and_equal_ones_do_not():
    model = tiny(residual="prenorm").eval()
    assert depth.leak(model) < 1e-5
    with torch.no_grad():
        model.head.weight.zero_()
        assert depth.leak(model) == 0
        model.ends.norm.gain[0] = math.nan
    assert depth.leak(model) == math.inf


def test_rounding_that_changes_what_a_router_chooses_is_no_leak(monkeypatch):
    model = shaken(tiny(residual="prenorm", **MOD, mod_router="learned")).eval()
    score = mod.Router.score
    for router in mod.routers(model):
        router.tau.fill_(0.5)

    def rough(self, h, *others):
        noise = torch.rand(h.shape[:2]) if h.dtype == torch.float32 else 0.0
        return score(self, h, *others) + noise

    monkeypatch.setattr(mod.Router, "score", rough)
    assert depth.leak(model) < 1e-9


class Copier(torch.nn.Module):
    """Sure that each token is followed by what followed it half a window ago."""

    config = GPTConfig(block_size=32, vocab_size=64)

    def forward(self, x):
        known = F.pad(x, (15, 0), value=0)[:, : x.size(1)]  # at t: token t - 15
        return 50.0 * F.one_hot(known, 64), None


def test_copying_tells_a_model_that_copies_from_one_that_does_not():
    first, again = depth.copying(Copier(), torch.arange(64))
    assert first > 40 and again < 1e-6
    first, again = depth.copying(tiny().eval(), some_ids())
    assert first == pytest.approx(again, rel=0.02)


def test_eval_tells_who_skips_and_dials_the_rate(data, runs, monkeypatch, capsys):
    seen, real, tokens = [], mod.calibrate, dict(depth_tokens=8000, eval_tokens=8000, batch_size=64)
    report = evaluated(runs / "d", "mod,loss", prompt="import os", **tokens)
    skipped, loss = report["mod"], report["loss"]["loss"]
    assert skipped["where"] == ["attn 0", "mlp 0", "attn 1", "mlp 1"]
    assert skipped["tokens"] == [256, *b"import os"] and np.shape(skipped["map"]) == (4, 10)
    assert skipped["characters"] == ["<|endoftext|>", *"import os"]
    assert skipped["causal loss"] == pytest.approx(loss, abs=1e-6) != skipped["look-ahead loss"]
    printed = capsys.readouterr().out
    assert len(skipped["skipped"]) == 4 and "this looks at later tokens" in printed
    rows = "\n".join(printed.partition("# runs, . skips\n")[2].splitlines()[:4])
    ran = ["".join(".#"[token] for token in row) for row in skipped["map"]]
    assert re.findall(r"^(\w+ \d) +[\d.]+% ([.#]+)$", rows, re.M) == [*zip(skipped["where"], ran)]
    monkeypatch.setattr(mod, "calibrate", lambda *how: seen.append(how[1]) or real(*how))
    for rate in (0.1, 0.5):
        got = evaluated(runs / "d", "mod", mod_rate=rate, **tokens)["mod"]["rate"]
        assert got == pytest.approx(rate, abs=0.06)  # scores have ties, for example spaces
    windows = data_file.Windows(data, "train", 32)
    assert seen[0][0][0].tolist() == windows[data_file.spread(windows, 32768)[0]][:-1].tolist()


def test_the_loss_of_any_text_is_exact(runs, tmp_path, monkeypatch, quick_compiler):
    text, asked = "def f(x):\n    return x + 1  # plus one\n" * 3, []
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": text}) + "\n")

    def loss(**how):
        how = dict(text=tmp_path / "a.txt", batch_size=3) | how
        return evaluated(runs / "a", "loss", **how)["loss"]

    report, (_, model) = loss(), checkpoints.load_model(runs / "a")
    ids = [256, *text.encode(), 256]

    def nats_in(T):
        found = []
        for at in range(0, len(ids) - 1, T):
            row = torch.tensor([ids[at : at + T + 1]])
            logp = model(row[:, :-1])[0].detach().double().log_softmax(-1)
            found += (-logp.gather(-1, row[:, 1:, None])).flatten().tolist()
        return found

    nats = nats_in(32)
    expected = {"loss": np.mean(nats), "perplexity": math.exp(np.mean(nats)), "tokens": len(nats)}
    bits = {"bits per byte": sum(nats) / len(text) / math.log(2), "bytes": len(text)}
    assert report == pytest.approx(expected | bits, rel=1e-5)
    assert loss(context=8)["loss"] == pytest.approx(np.mean(nats_in(8)), rel=1e-5)
    shards = evaluated(runs / "a", "loss", context=16, eval_tokens=48)["loss"]
    assert shards["tokens"] == 48  # with the model's 32: one window
    assert loss(eval_tokens=50)["loss"] == pytest.approx(np.mean(nats[:50]), rel=1e-5)
    low = loss(dtype="bfloat16")["loss"]
    assert low != report["loss"] and low == pytest.approx(report["loss"], rel=1e-2)
    assert loss(text=tmp_path / "b.jsonl", text_column="body") == report
    torch._dynamo.utils.counters.clear()
    assert loss(compile=True) == pytest.approx(report, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    load = lambda *args, **how: asked.append((args, how)) or [{"line": text}]
    monkeypatch.setattr("datasets.load_dataset", load)
    assert loss(text="owner/name", text_column="line", text_split="validation") == report
    assert asked == [(("owner/name",), {"split": "validation", "streaming": True})]
    refuses("a/b: record 0 has no body, but line", loss, text="a/b", text_column="body")

    def gone(*args, **how):
        raise RuntimeError("Dataset scripts are no longer supported\nmore lines")

    monkeypatch.setattr("datasets.load_dataset", gone)
    refuses("text='a/b.md': no such file, and no data set: Dataset scripts", loss, text="a/b.md")


class Largest(TorchDispatchMode):
    """The size of the largest tensor made while this mode is on"""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (tuple, list)) else [out]
        sizes = [x.numel() for x in made if isinstance(x, torch.Tensor)]
        self.numel = max([getattr(self, "numel", 0), *sizes])
        return out


def test_evaluation_and_scores_hold_no_more_logits_than_loss_chunk():
    model, pairs = tiny(vocab_size=4096), [([1], [2] * 32), ([3], [4] * 30)]

    def numbers():
        batches = [(some_ids(8), some_ids(8, seed=2))]
        scores = tasks.score_choices(model, pairs, 8, 4096, "cpu")
        by_depth = depth.look(model, *batches[0])[1].mean(1).tolist()
        return [model_file.evaluate(model, batches), *sum(scores, ()), *by_depth]

    exact, model.loss_chunk = numbers(), 16
    with Largest() as largest:
        assert numbers() == pytest.approx(exact, rel=1e-6)
    assert largest.numel <= 32 * 4096  # the head itself


def test_a_run_whose_shards_are_gone_can_still_be_sampled(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "a", tmp_path / "run")
    moved = resaved(lambda state: state | {"settings": state["settings"] | {"data_dir": "/gone"}})
    moved(run / "ckpt.pt")
    evaluated(run, "sample", max_new_tokens=2)
    assert "the shards are no longer in /gone" in capsys.readouterr().out
    refuses("give --text or --data_dir", evaluated, run, "loss")


def test_a_sample_begins_with_end_of_text_and_every_setting_matters(runs, monkeypatch):
    seen, real = [], generate.stream_tokens

    def spied(model, idx, *args, compile, **how):
        seen.append((idx.tolist(), compile))
        return real(model, idx, *args, **how)

    usual = dict(prompt="ab", max_new_tokens=30)
    text = lambda how: evaluated(runs / "a", "sample", **usual | how)["sample"]
    monkeypatch.setattr(generate, "stream_tokens", spied)
    base, same = text({}), text({"compile": True})
    assert base == same and base.startswith("ab")
    assert seen == [([[256, 97, 98]], False), ([[256, 97, 98]], True)]
    changes = dict(prompt="x", temperature=0, top_k=1, top_p=0.1, seed=2, max_new_tokens=3)
    assert all(text({key: value}) != base for key, value in changes.items())
    monkeypatch.setattr(data_file, "ends_text", lambda token, encoding: True)
    assert len(text({})) < len(base)  # it stops at a token that ends a text


@cases("kind", ["builtins.ValueError", "builtins.ConnectionError", "builtins.RuntimeError",
                "builtins.ImportError", "datasets.exceptions.DatasetGenerationError"])  # fmt: skip
def test_an_error_of_the_harness_is_one_line(monkeypatch, kind):
    def fails(*args, **how):
        raise pkgutil.resolve_name(kind)("Set confirm_run_unsafe_code=True\nmore lines")

    manager = lambda **how: SimpleNamespace(all_tasks=["a"])
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=fails))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(TaskManager=manager))
    monkeypatch.setattr(tasks, "harness", lambda *how: None)
    how = ("a", None, None, None, 1)
    refuses("tasks: Set confirm_run_unsafe", tasks.run_tasks, None, None, 1, "cpu", *how)


@cases("residual", ["nag", "prenorm", "bhyt"])
def test_choices_score_the_same_one_by_one(residual):
    model = shaken(tiny(residual=residual, n_kv_head=1, **EXTRAS)).eval()
    rng = np.random.default_rng(0)
    ids = lambda n: rng.integers(0, 60, n).tolist()
    questions = [ids(n) for n in (3, 3, 7, 31, 40, 1)]
    pairs = [(question, ids(n)) for question in questions for n in (1, 4, 2, 9)]
    predictions = lambda ids: model(torch.tensor([ids]))[0][0, :, :60].detach().log_softmax(-1)
    pairs.append((questions[2], [predictions(questions[2])[-1].argmax().item()]))
    pairs += [([7], ids(1 + n % 3)) for n in range(20)]  # more than are scored at once
    for batch_size in (1, 4):
        scores = tasks.score_choices(model, pairs, batch_size, 60, "cpu")
        for (context, continuation), (total, greedy) in zip(pairs, scores):
            n = len(continuation)
            logp = predictions((context + continuation)[-33:-1])[-n:]
            expected = logp[range(n), continuation].sum().item()
            assert total == pytest.approx(expected, abs=1e-4 * n)
            assert greedy == (logp.argmax(-1).tolist() == continuation)
    assert scores[24][1]
    for continuation, message in (([2] * 33, "33 tokens does not fit"), ([], "0 tokens")):
        with pytest.raises(SystemExit, match=f"an answer of {message}"):
            tasks.score_choices(model, [([1], continuation)], 1, 60, "cpu")


# --- Figures, scripts, house rules ----------------------------------------------------------------


def test_a_figure_shows_the_mean_of_seeds_and_a_band_from_lowest_to_highest(monkeypatch):
    import matplotlib.pyplot as plt

    axes = plt.figure().subplots()
    curves = {"a": ([1, 2, 3], [2.0, 9.0, 5.0]), "b": ([1, 3], [4.0, 5.0])}
    monkeypatch.setattr(plot, "styled", lambda runs: [(runs, {})])
    plot.draw(axes, curves, curves.get)
    x, means = axes.lines[0].get_data()
    assert (list(x), list(means)) == ([1, 3], [3.0, 5.0])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (2.0, 5.0)
    plt.close("all")


def test_alpha_does_not_look_like_another_group_of_its_mode(monkeypatch):
    groups = {"nag": ("nag", ["a"]), "nag, n_layer=4": ("nag", ["b"])}
    monkeypatch.setattr(plot, "grouped", lambda runs: groups)
    monkeypatch.setattr(plot, "measured", lambda run, key: [0.5, 0.25])
    axes = plot.canvas(7, 4)[1]
    plot.alpha(axes, ["a", "b"])
    looks = {(line.get_linestyle(), line.get_linewidth()) for line in axes.lines}
    assert len(looks) == 4 and "alpha (thin)" in axes.get_ylabel()


def test_runs_of_one_line_of_a_figure_differ_only_in_the_seed(runs, tmp_path):
    def written(name, source, settings, resolved):
        header = plot.header_of(runs / source)
        header |= {"settings": header["settings"] | settings}
        header |= {"resolved": header["resolved"] | resolved}
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(json.dumps({"run": header}))
        return str(tmp_path / name)

    more = written("more", "d", {"mod_rate": 0.304}, {})
    skipping = plot.grouped([str(runs / "d"), more])
    assert [label.partition("%")[0] for label in skipping] == ["bhyt, 30", "bhyt, 30.4"]
    streams = [written(f"{n}", "a", {"residual": "ihc", "hc_streams": n}, {"hc_streams": n or 2})
               for n in (None, 2, 4)]  # fmt: skip
    assert [len(group) for _, group in plot.grouped(streams).values()] == [2, 1]


def test_every_figure_is_drawn_and_two_drawings_are_the_same_bytes(runs, tmp_path):
    dense, x = [str(runs / name) for name in "abc"], str(tmp_path / "x")
    for run, what in (("a", "depth"), ("b", "depth"), ("c", "depth"), ("d", "mod"), ("e", "depth")):
        evaluated(runs / run, what, depth_tokens=64)
    others = {"alpha": dense[:2], "map": [str(runs / "d")], "sources": [str(runs / "e")]}

    def drawn(figure):
        plot.main(figure, x, *others.get(figure, dense))
        return [(tmp_path / f"x.{end}").read_bytes() for end in ("png", "svg")]

    made, steps = {figure: drawn(figure) for figure in plot.FIGURES}, plot.steps_of(dense[0])
    assert all(len(png) > 5000 for png, _ in made.values())
    axes = plot.canvas(7, 4)[1]
    plot.token_map(axes, others["map"])
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == ["<|endoftext|>", "d", "e", "f", "␣"]
    rgb = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in plot.COLOURS.values()]
    assert min(math.dist(*pair) for pair in itertools.combinations(rgb, 2)) > 45
    assert plot.smoothed([4.0, 2.0]) == [4.0, 2.0] and plot.smoothed([1.0] * 99 + [3.0])[-1] == 2
    assert all(drawn(figure) == made[figure] for figure in ("loss", "variance", "map"))
    assert steps[-1]["seconds"] == pytest.approx(sum(128 / r["tok_s"] for r in steps))
    assert steps[0]["step"] == 1
    log = (runs / "a" / "log.jsonl").read_text().replace('"from_step": 0', '"from_step": 2')
    later = "\n".join(log.splitlines()[:1] + log.splitlines()[4:])  # a branch from step 2
    (tmp_path / "log.jsonl").write_text(later + '\n{"step": 9, "lo')
    assert plot.steps_of(tmp_path)[0]["seconds"] == pytest.approx(
        steps[2]["seconds"] - steps[1]["seconds"]
    )
    assert {k: len(v[1]) for k, v in plot.grouped(dense).items()} == {"nag": 2, "lns": 1}
    assert [*plot.grouped([str(runs / "d")])] == ["bhyt, 30% skip both (learned router)"]
    refuses("nowhere/log.jsonl is missing", plot.main, "loss", x, "nowhere")
    refuses("no figure 'lss': choose one of loss", plot.main, "lss", x, *dense)
    refuses("map shows one run, not 3", plot.main, "map", x, *dense)
    refuses("nowhere/x.png cannot be written: No such", plot.main, "loss", "nowhere/x.png", *dense)
    for name, why in (("log.jsonl", "is no log of train.py"), ("eval.json", "Expecting value")):
        (tmp_path / name).write_text("torn")
        refuses(f"{tmp_path}/{name}", plot.main, "loss" if "log" in name else "norm", x, tmp_path)
        refuses(why, plot.main, "loss" if "log" in name else "norm", x, tmp_path)
        shutil.copy(runs / "a" / "log.jsonl", tmp_path)
    for key in ("alpha", "sources"):
        refuses("--what=depth adds it, if the model has one", plot.main, key, x, dense[2])


def test_only_the_variables_of_torchrun_are_read_from_the_environment():
    from_torchrun = {f'environ.get("{key}",' for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    files = [*glob.glob(f"{HERE}/[!t]*.py"), *glob.glob(f"{HERE}/runs/*.py")]
    for path in [*files, "train.py", "tasks.py"]:
        text = open(os.path.join(HERE, path)).read()
        assert set(re.findall(r"environ\S*", text)) <= from_torchrun | {"environ"}, path
        assert not re.findall(r"except( Exception)?:", text), path


@cases("more, warned", [(0, False), (1, True)])
def test_a_run_says_what_to_do_on_a_busy_machine(data, tmp_path, monkeypatch, capsys, more, warned):
    monkeypatch.setattr(machine, "threads_that_want_to_run", lambda: os.cpu_count() + more)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    train(data, tmp_path, max_iters=21)
    assert ("OMP_NUM_THREADS=1" in capsys.readouterr().out) == warned


@cases("compiled, expected", [(True, [2, 1, 2, 2, 2]), (False, [10, 1, 2, 5, 2])])
def test_the_time_of_a_run_leaves_out_compilation(tmp_path, compiled, expected):
    header = {"from_step": 0, "tokens_per_step": 10, "resolved": {"compile": compiled}}
    speeds = [(1, 1), (2, 10), (3, 5), (4, 2), (5, 5)]  # step, tokens a second since the last one
    start = {"run": header | {"settings": {}}}
    records = [{"step": step, "tokens": 10 * step, "tok_s": speed} for step, speed in speeds]
    lines = [start, *records[:3], start, *records[3:]]  # resumed at step 3
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = [record["seconds"] for record in plot.steps_of(tmp_path)]
    assert seconds == pytest.approx([*itertools.accumulate(expected)])


@cases("name", ["plot.py", "lora.py", "convert.py"])
def test_scripts_without_settings_print_their_help(name, capsys):
    for argv, status in ((["--help"], 0), ([], 1), (["loss", "", "x"], 1)):
        with pytest.raises(SystemExit) as stop:
            script(name, *argv)
        assert bool(stop.value.code) == bool(status)
        assert f"python {name}" in capsys.readouterr()[status]


def test_a_folder_that_cannot_be_made_is_one_line(data, tmp_path):
    (tmp_path / "file").touch()
    where = tmp_path / "file" / "out"
    why = f"{where}: no folder can be made there: Not a directory"
    refuses(why, train, data, where)
    refuses(why, make_data, where, "--source=README.md", "--tokenizer=bytes")


def test_a_damaged_eval_json_is_not_overwritten(runs, tmp_path):
    shutil.copy(runs / "a" / "ckpt.pt", tmp_path)
    for text, why in (("torn", "eval.json: Expecting value"), ("[]", "is not a table of keys")):
        (tmp_path / "eval.json").write_text(text)
        refuses(why, evaluated, tmp_path, "sample", max_new_tokens=1)
        assert (tmp_path / "eval.json").read_text() == text


def test_importing_does_nothing_and_needs_no_optional_package(tmp_path):
    named = {*re.findall(r"`(\w+\.py)`", open(f"{HERE}/README.md").read())}
    files = named & {*os.listdir(HERE)} - {"test_all.py", "train.py"}
    names = ", ".join(name[:-3] for name in files)
    optional = ["wandb", "datasets", "lm_eval", "matplotlib"]
    optional += ["safetensors", "tokenizers", "transformers"]
    code = f"import sys; sys.modules |= dict.fromkeys({optional}); import {names}"
    how = dict(env=os.environ | {"PYTHONPATH": HERE}, capture_output=True, text=True)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, **how)
    assert (ran.returncode, ran.stdout, os.listdir(tmp_path)) == (0, "", []), ran.stderr


def test_eval_measures_no_model_that_leaks_or_is_not_finite(runs, tmp_path, monkeypatch):
    run = shutil.copytree(runs / "c", tmp_path / "run")
    spoilt = {"ends.norm.gain": torch.full((32,), math.nan)}
    resaved(lambda s: s | {"model": {**s["model"], **spoilt}})(run / "ckpt.pt")
    refuses("some weights are not finite", evaluated, run, "sample")
    monkeypatch.setattr(depth, "leak", lambda model: 0.01)
    for name, what in (("c", "loss"), ("c", "depth"), ("d", "mod")):
        refuses("not causal: logits change with later", evaluated, runs / name, what)
    evaluated(runs / "c", "sample", max_new_tokens=1)
