"""The tests of conversion: a pre-norm model becomes one of another mode. See test_all.py."""

import dataclasses

import pytest
import study
import torch
import torch.nn.functional as F
from test_lora import write_conversations

import nag
from attention import rotary_table
from model import GPT, RESIDUALS
from norms import RMSNorm
from test_all import (
    assert_close,
    assert_same_state,
    cases,
    centred,
    checkpoint,
    content,
    log_of,
    mean_square,
    on_forward,
    refuses,
    resume,
    rms,
    send_sigterm,
    shaken,
    some_ids,
    tiny,
    train,
    without_parallel,
)

MODES = [name for name, mode in RESIDUALS.items() if hasattr(mode, "convert")]


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
    mode = RESIDUALS[residual]
    changes = {"residual": residual, **mode.converted, **changes}
    torch.manual_seed(3)
    model = GPT(dataclasses.replace(source.config, **changes)).double().eval()
    model.load_state_dict(source.state_dict(), strict=False)
    mode.convert(model, source, some_text())
    model.refresh()
    return model


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


def test_converted_bhyt_exact_approaches_prenorm_as_kappa_grows():
    """The difference shrinks as 1 / kappa^2 = 1 - p."""
    source, ids = prenorm(), some_ids()
    expected, errors = source(ids)[0], []
    for p in (1 - 1e-3, 1 - 1e-5, 1 - 1e-7):
        model = converted(source, "bhyt_exact", bhyt_p=p)
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
    assert_close(*added) and added[0].min() > 0


# --- NAG ------------------------------------------------------------------------------------------


@torch.no_grad()
@cases("changes, old", [
    ({}, {}), ({}, dict(branch_scale="depth")), (dict(nag_centre=False), {}),
    (dict(nag_orthogonal=False), {}), (dict(nag_directions=0), {}), (dict(nag_beta=2.0), {}),
])  # fmt: skip
def test_converted_alphas_are_the_measured_rotations(changes, old):
    source = prenorm(**old)
    model, rope = converted(source, "nag", **changes), rotary_table(source.config, None)
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
            m = mixture[counted] ** changes.get("nag_beta", 1.0)
        expected = (rms(u) / rms(z))[counted].mean() / m.mean()
        assert own.alpha.item() == pytest.approx(expected.item(), rel=1e-6) and expected > 0
        x = x + f * source.blocks[0].scale


@torch.no_grad()
@cases("changes", [{}, dict(activation="swiglu"), dict(moe_experts=4, moe_shared=32)])
def test_converted_sublayers_of_nag_read_what_those_of_prenorm_read(changes):
    """On a stream whose mean is 0, such as the one of NAG."""
    source = prenorm(**changes)
    model, x = converted(source, "nag"), centred(torch.randn(2, 8, 32).double())
    r, rope = x / rms(x), tuple(table[:8] for table in rotary_table(source.config, None))
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
    model = converted(source, "nag", **changes)
    x, y = map(torch.cat, zip(*some_text()))
    theirs, ours = (F.linear(*each.hidden(x))[y >= 0] for each in (source, model))
    p, variances = theirs.exp() / theirs.exp().sum(-1, keepdim=True), []
    for z in (theirs, ours):
        variances.append((p * z**2).sum(-1) - (p * z).sum(-1) ** 2)
    assert_close(variances[0].mean(), variances[1].mean(), rtol=1e-6, atol=0)
    rows = nag.unit_rows(source.head.weight * source.ends.norm.gain)
    assert_close(nag.unit_rows(model.head.weight), rows)


# --- train.py -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def base(data, tmp_path_factory):
    """A briefly trained pre-norm model."""
    out = tmp_path_factory.mktemp("convert") / "base"
    train(data, out, residual="prenorm", tied=False, head_lr=1e-2, max_iters=40, eval_interval=40)
    return out


@cases("residual", MODES)
def test_a_converted_model_starts_below_an_untrained_one_and_resumes_exactly(
    data, base, tmp_path, monkeypatch, residual
):
    how = dict(init_from=base, residual=residual, convert=True, tied=False, save_interval=0)
    one, two = tmp_path / "one", tmp_path / "two"
    train(data, one, **how)
    untrained, trained = log_of(base).val_losses
    first = log_of(one).val_losses[0]
    assert trained - 0.05 < first < (untrained + trained) / 2
    assert residual == "nag" or first == pytest.approx(trained, abs=0.1)
    header = log_of(one).headers[0]
    assert header["converted_from"] == "prenorm" and header["settings"]["convert"]
    assert header["from"] == f"{base}/ckpt.pt"
    with monkeypatch.context() as patch:
        on_forward(patch, send_sigterm)
        train(data, two, **how)
    resume(two, convert=True, residual=residual)
    assert_same_state(one, two)
    assert log_of(two).headers[1]["converted_from"] is None
    resume(tmp_path / "tuned", init_from=one, max_iters=1)  # the new model is one like any other
    assert checkpoint(tmp_path / "tuned")["config"] == checkpoint(one)["config"]
    assert not log_of(tmp_path / "tuned").headers[0]["settings"]["convert"]


def test_a_model_is_converted_on_conversations_and_at_another_block_size(data, base, tmp_path):
    how = dict(init_from=base, convert=True, tied=False, block_size=64, nag_directions=4)
    train(data, tmp_path / "a", **how, sft_data=write_conversations(tmp_path / "c.jsonl"))
    first, *_, last = log_of(tmp_path / "a").val_losses
    assert last < first < 7
    config = checkpoint(tmp_path / "a")["config"]
    assert (config["residual"], config["nag_directions"]) == ("nag", 4)


NOT_POSSIBLE = [
    (dict(init_from="scratch"), "give its checkpoint as init_from"),
    (dict(residual="lns"), "residual='lns': choose one of nag, bhyt, bhyt_exact, prenorm_approx"),
    (dict(residual="prenorm"), "residual='prenorm': choose one of nag, "),
    (dict(residual="nagg"), "residual='nagg': choose one of nag, "),
    (dict(n_embd=64), "was trained with n_embd=32, not 64"),
    (dict(bhyt_lambda="(1.0,1.0,0.0)"), "trained with bhyt_lambda=(2.0, 1.0, 0.0), not"),
    (dict(lora_rank=4), "convert=True needs lora_rank=0, not 4"),
    (dict(nag_first_logits=None), "convert=True needs nag_first_logits=0.75, not None"),
    (dict(residual="bhyt", bhyt_unit=False), "convert=True needs bhyt_unit=True, not False"),
    (dict(convert=False), "was trained with residual='prenorm', not 'nag'"),
]


@cases("given, why", NOT_POSSIBLE)
def test_what_cannot_be_converted_is_refused_in_one_line(data, base, tmp_path, given, why):
    how = dict(init_from=base, convert=True, tied=False)
    refuses(why, train, data, tmp_path / "x", **how | given)
    assert not (tmp_path / "x").exists()


def test_only_a_plain_pre_norm_model_is_converted_and_only_at_the_start(data, base, runs, tmp_path):
    before, out = content(base), tmp_path / "x"
    how = dict(convert=True, residual="nag")
    refuses("give its checkpoint as init_from", resume, base, **how)
    refuses("as init_from", resume, out, **how, init_from="scratch", branch_from=base)
    refuses("convert=True, residual=None: choose", resume, out, init_from=base, convert=True)
    needs = "norm='{}', mod_on='none': convert=True needs residual='prenorm', norm='rms', "
    refuses(needs.format("rms"), resume, out, init_from=runs / "a", **how)
    state = torch.load(base / "ckpt.pt", weights_only=True)
    path = tmp_path / "other.pt"
    torch.save(state | {"config": state["config"] | {"norm": "layer"}}, path)
    refuses(needs.format("layer"), resume, out, init_from=path, **how)
    torch.save(state | {"lora": {"rank": 4}}, path)
    refuses(f"{path} holds adapters: merge them first", resume, out, init_from=path, **how)
    assert content(base) == before and not out.exists()


# --- Studies --------------------------------------------------------------------------------------


def test_a_study_knows_where_its_runs_start(base, tmp_path, monkeypatch):
    settings, started = {"seed": 1, "init_from": "out/a.pt"}, []
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
