"""The tests of conversion: a pre-norm model becomes one of another mode. See test_all.py."""

import pytest
import study
import torch
import torch.nn.functional as F

import bhyt
import convert
import lora
import nag
from attention import rotary_table
from checkpoint import load_model
from norms import RMSNorm
from test_all import (
    assert_close,
    cases,
    centred,
    checkpoint,
    content,
    log_of,
    mean_square,
    refuses,
    resume,
    rms,
    script,
    shaken,
    some_ids,
    tiny,
    train,
    without_parallel,
)

MODES = [*convert.MODES]


def prenorm(**changes):
    """A pre-norm model in float64 whose gains are not 1."""
    return shaken(tiny(residual="prenorm", tied=False, **changes)).double().eval()


def some_text():
    """[(inputs, targets)] with two targets that do not count"""
    batches = [(some_ids(seed=seed), some_ids(seed=seed + 1)) for seed in (3, 5)]
    batches[1][1][0, :2] = -1
    return batches


def converted(source, residual, **changes):
    """A model of another mode, converted on some_text, in float64."""
    torch.manual_seed(3)
    return convert.convert(source, some_text(), residual, **changes)


# --- BHyT -----------------------------------------------------------------------------------------


@torch.no_grad()
def test_converted_bounded_norms_equal_rmsnorm_to_first_order():
    """Halving the input, at a fixed variance, divides the difference by 8."""
    source = prenorm()
    model = converted(source, "bhyt_exact", bhyt_lambda=(2.0, 1.0, 0.5))
    x, v = torch.randn(4, 32).double(), torch.ones(4, 1).double()
    names = [name for name, module in source.named_modules() if type(module) is RMSNorm]
    assert len(names) == 2 * 2 + 1
    for ours, theirs in ((model.get_submodule(n), source.get_submodule(n)) for n in names):
        errors = [(ours(t * x, v) - theirs(t * x, v)).abs().max() for t in (0.2, 0.1)]
        assert errors[0] < 0.01 and errors[0] / errors[1] == pytest.approx(8, rel=0.05)


def test_converted_bhyt_exact_approaches_prenorm_as_kappa_grows(monkeypatch):
    """The difference shrinks as 1 / kappa^2 = 1 - p."""
    source, ids = prenorm(), some_ids()
    expected, errors = source(ids)[0], []
    for p in (1 - 1e-3, 1 - 1e-5, 1 - 1e-7):
        monkeypatch.setattr(bhyt, "KAPPA", (1 - p) ** -0.5)
        model = converted(source, "bhyt_exact")
        errors.append((model(ids)[0] - expected).abs().max().item())
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(100, rel=0.1)


def test_converted_bhyt_predicts_the_variance_with_its_large_gain():
    """With gains of 1, RMSNorm and its tanh have the same output variance, and so the same c."""
    source = prenorm()
    for module in source.modules():
        if type(module) is RMSNorm:
            torch.nn.init.ones_(module.gain)
    added = []
    for residual in ("bhyt", "prenorm_approx"):
        model = converted(source, residual)
        first = [block.attn_residual for block in model.blocks]
        added.append(torch.stack([r.c * r.output_variance() for r in first]).detach())
    assert_close(*added)
    assert added[0].min() > 0


# --- NAG ------------------------------------------------------------------------------------------


@torch.no_grad()
@cases("changes, old", [
    ({}, {}), ({}, dict(branch_scale="depth")), (dict(nag_centre=False), {}),
    (dict(nag_orthogonal=False), {}), (dict(nag_directions=0), {}),
])  # fmt: skip
def test_converted_alphas_are_the_measured_rotations(changes, old):
    source = prenorm(**old)
    model, rope = converted(source, "nag", **changes), rotary_table(source.config)
    attend = lambda block: lambda h: block.attn(h, rope)
    steps = []  # (sublayer, its norm, the residual of NAG)
    for block, new in zip(source.blocks, model.blocks):
        steps.append((attend(block), block.attn_residual.norm, new.attn_residual))
        steps.append((block.mlp, block.mlp_residual.norm, new.mlp_residual))
    ids, targets = map(torch.cat, zip(*some_text()))
    x, counted = source.embed(ids), targets >= 0
    for run, norm, own in steps:
        f = run(norm.gain * x / torch.sqrt(mean_square(x) + norm.eps))
        z, u = (x, f) if "nag_centre" in changes else (centred(x), centred(f))
        u = u if "nag_orthogonal" in changes else without_parallel(u, z)
        m = torch.ones(1)
        if "nag_directions" not in changes:
            mixture = torch.sigmoid(z / rms(z) @ own.w.T).mean(-1, keepdim=True)
            m = mixture[counted]
        expected = (rms(u) / rms(z))[counted].mean() / m.mean()
        assert own.alpha.item() == pytest.approx(expected.item(), rel=1e-6) and expected > 0
        x = x + f * source.blocks[0].scale


@torch.no_grad()
@cases("changes", [{}, dict(activation="swiglu"), dict(moe_experts=4, moe_shared=32)])
def test_converted_sublayers_of_nag_read_what_those_of_prenorm_read(changes):
    """On a stream whose mean is 0, such as the one of NAG."""
    source = prenorm(**changes)
    model, x = converted(source, "nag"), centred(torch.randn(2, 8, 32).double())
    r, rope = x / rms(x), tuple(table[:8] for table in rotary_table(source.config))
    for old, new in zip(source.blocks, model.blocks):
        h_attn, h_mlp = old.attn_residual.norm(x), old.mlp_residual.norm(x)
        assert_close(new.attn(r, rope), old.attn(h_attn, rope), rtol=1e-4, atol=1e-5)
        assert_close(new.mlp(r), old.mlp(h_mlp), rtol=1e-4, atol=1e-5)
    assert model.ends.g_enc == 0


@torch.no_grad()
@cases("changes", [{}, dict(nag_lane=False), dict(logit_cap=1.0)])
def test_converted_logits_of_nag_have_the_size_of_those_of_prenorm(changes):
    cap = {name: changes[name] for name in changes if name == "logit_cap"}
    source = prenorm(**cap)
    model = converted(source, "nag", **{k: v for k, v in changes.items() if k not in cap})
    x, y = map(torch.cat, zip(*some_text()))
    theirs, ours = (F.linear(*each.hidden(x))[y >= 0] for each in (source, model))
    p, variances = theirs.exp() / theirs.exp().sum(-1, keepdim=True), []
    for z in (theirs, ours):
        variances.append((p * z**2).sum(-1) - (p * z).sum(-1) ** 2)
    assert_close(variances[0].mean(), variances[1].mean(), rtol=1e-6, atol=0)
    rows = nag.unit_rows(source.head.weight * source.ends.norm.gain)
    assert_close(nag.unit_rows(model.head.weight), rows)


# --- The script -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def base(data, tmp_path_factory):
    """A briefly trained pre-norm model."""
    out = tmp_path_factory.mktemp("convert") / "base"
    train(data, out, residual="prenorm", tied=False, head_lr=1e-2, max_iters=40, eval_interval=40)
    return out


def converts(path, to, **settings):
    """Run convert.py on a checkpoint."""
    script("convert.py", str(path), str(to), **settings)


@cases("residual", MODES)
def test_a_converted_model_starts_below_an_untrained_one_and_trains_like_any_other(
    data, base, tmp_path, residual
):
    before = content(base)
    converts(base, tmp_path / "new.pt", residual=residual)
    assert content(base) == before
    how = dict(init_from=tmp_path / "new.pt", tied=False, head_lr=1e-2)
    train(data, tmp_path / "run", **how, residual=residual)
    untrained, trained = log_of(base).val_losses
    first = log_of(tmp_path / "run").val_losses[0]
    assert trained - 0.05 < first < (untrained + trained) / 2
    assert residual == "nag" or first == pytest.approx(trained, abs=0.1)
    assert log_of(tmp_path / "run").headers[0]["settings"]["residual"] == residual
    resume(tmp_path / "tuned", init_from=tmp_path / "run", max_iters=1, compile=False)
    assert checkpoint(tmp_path / "tuned")["config"] == checkpoint(tmp_path / "run")["config"]
    refuses("has no optimizer state", resume, tmp_path / "x", branch_from=tmp_path / "new.pt",
            init_from="auto")  # fmt: skip


def test_the_seed_decides_the_weights_that_prenorm_does_not_have(base, tmp_path):
    paths = [tmp_path / name for name in ("a.pt", "b.pt", "c.pt")]
    for path, seed in zip(paths, (1, 1, 2)):
        converts(base, path, residual="nag", nag_directions=4, seed=seed)
    one, same, other = (load_model(path)[1].state_dict() for path in paths)
    name = "blocks.0.attn_residual.w"
    assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])
    assert one[name].shape == (4, 32)


@cases("given, why", [
    (dict(), "residual=None: choose one of nag, bhyt, bhyt_exact, prenorm_approx"),
    (dict(residual="lns"), "residual='lns': choose one of nag, "),
    (dict(residual="nag", n_embd=64), "n_embd=64: a conversion changes only settings of nag"),
    (dict(residual="nag", nag_first_logits=None), "to nag needs nag_first_logits=0.75"),
    (dict(residual="bhyt", bhyt_unit=False), "to bhyt needs bhyt_unit=True"),
    (dict(residual="bhyt", seed=3), "seed=3: a conversion changes only settings of bhyt"),
    (dict(residual="prenorm_approx", data_dir="x"), "data_dir='x': a conversion changes only"),
])  # fmt: skip
def test_what_cannot_be_converted_is_refused_in_one_line(base, tmp_path, given, why):
    refuses(why, converts, base, tmp_path / "x.pt", **given)
    assert not (tmp_path / "x.pt").exists()


def test_no_file_is_overwritten(base, tmp_path):
    before = (base / "ckpt.pt").read_bytes()
    for main, *argv in ((convert.main, "--residual=bhyt"), (lora.main,)):
        refuses("ckpt.pt already exists", main, str(base / "ckpt.pt"), str(base / "ckpt.pt"), *argv)
    assert (base / "ckpt.pt").read_bytes() == before
    converts(base, tmp_path / "new" / "x.pt", residual="bhyt")  # in a new folder


def test_only_a_plain_pre_norm_model_is_converted(base, runs, tmp_path):
    path, out = tmp_path / "other.pt", tmp_path / "x.pt"
    refuses("the model has residual='nag'", converts, runs / "a", out, residual="bhyt")
    state = torch.load(base / "ckpt.pt", weights_only=True)
    layer = state["config"] | {"norm": "layer"}
    torch.save(state | {"config": layer}, path)
    refuses("the model has norm='layer'", converts, path, out, residual="bhyt")
    torch.save(state | {"settings": state["settings"] | {"data_dir": None}}, path)
    refuses("imported without shards: give --data_dir", converts, path, out, residual="nag")
    torch.save(state | {"meta": state["meta"] | {"tokenizer_sha256": "another"}}, path)
    refuses("was trained with another tokenizer", converts, path, out, residual="nag")
    unknown = {"meta": state["meta"] | {"tokenizer_sha256": None}}
    small = {"model": {**state["model"]}, "config": state["config"] | {"vocab_size": 64}}
    for name in ("embed.weight", "head.weight"):
        small["model"][name] = state["model"][name][:64]
    torch.save(state | unknown | small, path)
    refuses("has more token ids than the model", converts, path, out, residual="nag")
    assert not out.exists()


# --- Studies --------------------------------------------------------------------------------------


def test_a_study_knows_where_its_runs_start(base, tmp_path, monkeypatch):
    settings, started = {"residual": "nag", "seed": 1, "init_from": "out/a.pt"}, []
    assert study.key(settings) != study.key({"seed": 1, "init_from": "out/b.pt"})
    assert study.key({"seed": 1, "init_from": "scratch"}) == study.key({"seed": 1})
    assert study.changed(settings) == settings
    assert study.summary(base)["start"] == log_of(base).val_losses[0]

    def stop(argv, **how):
        started.append(next(arg for arg in argv if arg.startswith("--init_from")))
        raise KeyboardInterrupt

    monkeypatch.setattr(study.subprocess, "run", stop)
    for given, folder in ((settings, tmp_path), (settings, base), ({"seed": 1}, tmp_path)):
        with pytest.raises(KeyboardInterrupt):
            study.train(given, "cpu", folder, ())
    assert started == ["--init_from=out/a.pt", "--init_from=auto", "--init_from=auto"]
