"""Skipping whole sublayers and blocks: prune.py, and its dial in eval.py."""

import functools
import json
import math
import shutil
import sys

import pytest
import torch

import checkpoint as checkpoints
import data as data_file
import depth
import generate
import prune
from checkpoint import load_model
from model import evaluate
from test_all import (
    EXTRAS,
    MOD,
    assert_close,
    cases,
    compile_with,
    counted_flops,
    evaluated,
    every_mode,
    few,
    refuses,
    routed,
    script,
    shaken,
    slow,
    some_ids,
    tiny,
    train,
)

BATCHES = [some_ids(3), some_ids(2, seed=2)]
ADDITIVE = "prenorm perinorm lns dyt rezero orthogonal bhyt bhyt_exact prenorm_approx".split()


def angle(x, y):
    """Eq. 1 for two lists of numbers"""
    dot = sum(a * b for a, b in zip(x, y))
    return math.acos(dot / math.hypot(*x) / math.hypot(*y)) / math.pi


def change(x, y):
    """Eq. 2 for two lists of numbers"""
    return math.dist(x, y) / math.hypot(*x)


def streams(model, idx):
    """The stream before the first sublayer and after each one, (B, T, C) each"""
    stream, rope = model.begin(idx, torch.arange(idx.size(1))), (model.cos, model.sin)
    yield stream
    for b, block in enumerate(model.blocks):
        attend = functools.partial(block.attn, rope=rope, values=model.values(b, idx))
        for run, residual in ((attend, block.attn_residual), (block.mlp, block.mlp_residual)):
            h, stream = residual.read(stream)
            stream = residual.write(stream, run(h))
            yield stream


@torch.no_grad()
@cases("residual", ["prenorm", "nag", "x0mix", "bhyt"])
@cases("unit, size", [("sublayer", 1), ("block", 2)])
def test_scores_equal_a_loop_over_tokens(residual, unit, size):
    model = shaken(tiny(residual=residual, n_layer=3, **EXTRAS)).eval().double()
    model.blocks[1].mlp.down.weight.mul_(1e-3)  # a small angle
    found = {"angle": [], "norm": []}
    for x in BATCHES:
        walked = [s.x if residual != "nag" else s.x * s.lane.exp() for s in streams(model, x)]
        walked = [s.flatten(0, 1).tolist() for s in walked[::size]]
        for name, score in (("angle", angle), ("norm", change)):
            of_tokens = [[score(*xy) for xy in zip(*pair)] for pair in zip(walked, walked[1:])]
            found[name].append(torch.tensor(of_tokens))
    for name, parts in found.items():
        scores = prune.scores(model, BATCHES, unit, name)
        assert_close(scores, torch.cat(parts, 1).mean(1).double(), rtol=1e-5, atol=1e-8)
        in_float32 = prune.scores(model.float(), BATCHES, unit, name)
        assert_close(in_float32.double(), scores, rtol=1e-3, atol=1e-7)
        model.double()


@torch.no_grad()
def test_the_lowest_scores_are_skipped():
    model = shaken(tiny(n_layer=4)).eval()
    for unit, n in (("sublayer", 8), ("block", 4)):
        for rule in prune.RULES:
            scores = prune.scores(model, BATCHES, unit, rule, seed=3)
            order = sorted(range(n), key=scores.tolist().__getitem__)
            for rate in (0, 0.1, 0.25, 0.5, 0.7, 1):
                found = prune.prune(model, BATCHES, rate, unit, rule, seed=3)
                assert found == sorted(order[: round(rate * n)])
                flags = [flag for block in model.blocks for flag in prune.skips(block)]
                assert [i for i in range(8) if flags[i]] == [
                    i for i in range(8) if i * n // 8 in found
                ]
            prune.skip(model, (), "block")
    random = lambda seed: prune.scores(model, [], "block", "random", seed).tolist()
    assert random(1) == random(1) != random(2)
    assert prune.names([0, 3], "sublayer") == ["attn 0", "mlp 1"]
    assert prune.names([0, 3], "block") == ["block 0", "block 3"]


@cases("how, message", [
    (dict(unit="head"), "prune_unit='head': choose one of sublayer, block"),
    (dict(rule="size"), "prune_by='size': choose one of angle, norm, random"),
    (dict(rate=-0.1), "rate=-0.1: give a share, 0 to 1"), (dict(rate=1.5), "rate=1.5: give a"),
])  # fmt: skip
def test_bad_values_are_refused(how, message):
    with pytest.raises(ValueError, match=message):
        prune.prune(tiny(), BATCHES, **{"rate": 0.5} | how)


@torch.no_grad()
@every_mode
def test_a_skipped_block_equals_a_block_left_out(residual):
    model = shaken(tiny(residual=residual, n_layer=4, **EXTRAS)).eval()
    x, y = some_ids(), some_ids(seed=2)
    whole, rises = model(x, y)[1], depth.dropped(model, [(x, y)])
    for b, rise in enumerate(rises):
        prune.skip(model, [b], "block")
        assert float(model(x, y)[1] - whole) == pytest.approx(rise, abs=1e-6)


@torch.no_grad()
@cases("residual", ADDITIVE)
@cases("layer", [0, 1, 2, 3, 4, 5])
def test_a_skipped_sublayer_of_an_additive_mode_equals_one_that_adds_zero(residual, layer):
    model, idx = shaken(tiny(residual=residual, n_layer=3, **EXTRAS)).eval(), some_ids()
    block, whole = model.blocks[layer // 2], model(idx)[0]
    prune.skip(model, [layer], "sublayer")
    skipped = model(idx)[0]
    prune.skip(model, (), "block")
    output = block.mlp.down if layer % 2 else block.attn.wo
    output.weight.zero_()
    model.refresh()
    assert_close(skipped, model(idx)[0])
    assert (skipped - whole).abs().max() > 1e-3


@torch.no_grad()
@cases("changes", [
    {}, dict(MOD, mod_router="learned"), dict(MOD, mod_on="mlp", residual="nag", mod_rate=0.2),
    dict(moe_experts=4, moe_shared=16), dict(residual="attnres_block", attnres_size=3),
])  # fmt: skip
@cases("unit", ["sublayer", "block"])
def test_pruned_models_decode_and_no_logit_sees_a_later_token(changes, unit):
    check_that_it_runs(unit, **dict(residual="prenorm") | changes)


@torch.no_grad()
@every_mode
def test_every_mode_runs_pruned_and_is_restored(residual):
    check_that_it_runs("sublayer", residual=residual)


def check_that_it_runs(unit, **changes):
    model, idx = routed(n_layer=4, n_head=4, n_kv_head=2, **EXTRAS, **changes), some_ids(3, T=12)
    whole = model(idx)[0]
    assert prune.prune(model, BATCHES, 0, unit) == []
    assert torch.equal(model(idx)[0], whole)
    skipped = prune.prune(model, BATCHES, 0.5, unit)
    assert prune.prune(model, BATCHES, 0.5, unit) == skipped  # scored on the whole model again
    full, cache = model(idx)[0], generate.KVCache(model, 3, 20)
    assert full.isfinite().all() and (full - whole).abs().max() > 1e-3
    parts = [model(part, cache=cache)[0] for part in idx.split([1, 5, 3, 1, 2], dim=1)]
    assert_close(torch.cat(parts, 1), full, rtol=1e-4, atol=1e-5)
    for t in (0, 3, 7, 10):
        other = idx.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1 + t) % 64
        assert_close(model(other)[0][:, : t + 1], full[:, : t + 1])
    *_, (*_, last) = depth.walk(model, idx)
    assert torch.equal(model.logits(*model.ends.readout(last, model.head.weight)), full)
    prune.skip(model, (), "block")
    assert torch.equal(model(idx)[0], whole)


def test_a_skipped_sublayer_runs_none_of_its_modules():
    model = shaken(tiny(n_layer=2, residual="hc")).eval()
    ran = []
    for name, module in model.blocks.named_modules():
        module.register_forward_pre_hook(lambda module, inputs, name=name: ran.append(name))
    prune.skip(model, [0, 3], "sublayer")
    model(some_ids())
    assert {"0", "0.mlp", "0.mlp_residual.norm", "1", "1.attn", "1.attn_residual.norm"} <= {*ran}
    assert not [name for name in ran if name.startswith(("0.attn", "1.mlp"))]


@cases("changes", [
    dict(EXTRAS, n_head=4, n_kv_head=1), dict(MOD, mod_rate=0.25),
    dict(residual="lns", moe_experts=4, moe_shared=16, activation="swiglu"),
])  # fmt: skip
def test_flops_are_those_that_torch_counts(changes, monkeypatch):
    model = tiny(n_layer=4, **changes)
    prune.skip(model, [2, 5, 6, 7], "sublayer")
    assert len([block for block in model.blocks if not prune.skips(block)[0]]) == 2
    assert 2 * 32 * prune.flops_per_token(model) == pytest.approx(counted_flops(model, monkeypatch))


@cases("residual", ["prenorm", "bhyt", *map(slow, ("hc", "x0mix", "attnres"))])
def test_compiled_equals_eager_whatever_the_blocks_skip(residual, monkeypatch):
    model, idx = shaken(tiny(n_layer=8, **few(residual), **EXTRAS)).eval(), some_ids()
    compile_with(monkeypatch, "aot_eager", fullgraph=True)  # too many graphs is an error
    prune.skip(model, [4, 6, 9, 11, 12, 13, 14, 15], "sublayer")  # each kind of block twice
    eager = model(idx)[0]
    with torch._dynamo.config.patch(recompile_limit=8):
        model.compile_blocks()
        for gradients in (True, False):
            with torch.set_grad_enabled(gradients):
                assert_close(model(idx)[0], eager, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run without routers"""
    at = tmp_path_factory.mktemp("prune")
    train(data, at / "dense", n_layer=4, residual="prenorm")
    return at


def test_eval_prunes_a_model_without_routers(data, trained, capsys):
    how = dict(eval_tokens=2048, mod_rate=0.25, prune_by="norm")
    report = evaluated(trained / "dense", "loss", **how)
    model, windows = load_model(trained / "dense")[1], data_file.Windows(data, "train", 32)
    places, whole = data_file.spread(windows, 32768), model.flops_per_token()
    batches = [x for x, _ in data_file.eval_batches(windows, places, 8, "cpu")]
    names = prune.names(prune.prune(model, batches, 0.25, rule="norm"), "sublayer")
    share = prune.flops_per_token(model) / whole
    assert len(names) == 2
    assert report["prune"] == {"skipped": names, "FLOPs left": pytest.approx(share)}
    assert f"skipped {', '.join(names)}; {share:.1%} of the FLOPs left" in capsys.readouterr().out
    val = data_file.Windows(data, "val", 32)
    val_batches = data_file.eval_batches(val, data_file.spread(val, 2048), 8, "cpu")
    assert report["loss"]["loss"] == pytest.approx(evaluate(model, val_batches), abs=1e-5)
    assert report["settings"]["prune"]["mod_rate"] == 0.25
    assert report["settings"]["loss"]["data"] == data_file.Windows(data, "val", 32).sha256
    how |= dict(prune_unit="block", prune_by="random", seed=5)
    found = evaluated(trained / "dense", "loss", **how)["prune"]["skipped"]
    assert found == [f"block {torch.rand(4, generator=torch.Generator().manual_seed(5)).argmin()}"]
    found = evaluated(trained / "dense", "loss", eval_tokens=2048, mod_rate=0)
    assert found["prune"] == {"skipped": [], "FLOPs left": 1}


def test_without_shards_nothing_chooses_what_to_skip(trained, tmp_path):
    state = checkpoints.load(str(trained / "dense"))
    state["settings"] |= {"data_dir": None}
    checkpoints.save(str(tmp_path / "ckpt.pt"), state)
    (tmp_path / "a.txt").write_text("x = 1\n" * 20)
    why = "mod_rate=0.25 chooses what to skip on training text: give --data_dir"
    refuses(why, evaluated, tmp_path, "loss", text=tmp_path / "a.txt", mod_rate=0.25)


@cases("run, how, message", [
    ("d", dict(mod_rate=0.2, prune_by="norm"), "prune_by='norm' needs mod_rate, and a model"),
    ("d", dict(mod_rate=0.2, prune_unit="block"), "prune_unit='block' needs mod_rate, and a model"),
    ("dense", dict(prune_by="norm"), "needs mod_rate, and a model without routers"),
    ("dense", dict(mod_rate=0.3, prune_by="size"), "choose one of angle, norm, random"),
])  # fmt: skip
def test_eval_refuses_bad_values(run, how, message, runs, trained):
    out = runs / run if run == "d" else trained / run
    refuses(message, script, "eval.py", what="loss", out_dir=out, **how)


def test_eval_measures_a_text_of_two_rows_and_keeps_parts_before_one_that_fails(
    trained, tmp_path, monkeypatch
):
    text, out = tmp_path / "a.txt", tmp_path / "run"
    shutil.copytree(trained / "dense", out)
    text.write_text("x = 1\n" * 8)  # a row of 32 bytes and a padded one
    found = evaluated(out, "loss,depth", text=text, depth_tokens=32)
    assert found["loss"]["tokens"] == 48 + 1 and len(found["depth"]["norm"]) == 5
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refuses("pip install lm-eval", evaluated, out, "loss,tasks", eval_tokens=512)
    report = json.load(open(out / "eval.json"))
    assert report["loss"]["tokens"] == 512 and report["depth"] == found["depth"]
    assert "tasks" not in report["settings"]
