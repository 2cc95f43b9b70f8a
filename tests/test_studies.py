"""The studies in runs/: what is trained, what is not trained again, and the verdicts."""

import json
import math
import re
import statistics
import sys
from types import SimpleNamespace

import claims
import judge
import lead
import oracle
import pytest
import report
import study
import torch
import torch.nn.functional as F

import mod
from model import GPT, RESIDUALS, GPTConfig
from test_all import EXTRAS, HERE, cases, shaken, some_ids, tiny


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Studies write to a temporary folder, on two devices, and train nothing."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "data_hash", lambda data_dir: "data")
    monkeypatch.setattr(study, "devices", lambda: ["cpu", "cpu"])
    study.free_devices.cache_clear()
    study.stopped.clear()
    yield tmp_path
    study.free_devices.cache_clear()


def trainer(loss_of, trained):
    """Replaces study.train; the loss is loss_of(all settings)."""

    def train(settings, device, folder, look, lock):
        trained.append(settings)
        full = study.DEFAULTS | settings
        return {"loss": loss_of(full), "steps": full["max_iters"], "params": 1000}

    return train


def test_a_run_with_a_line_is_not_repeated(place, monkeypatch):
    trained = []
    monkeypatch.setattr(study, "train", trainer(lambda full: float(full["seed"]), trained))
    runs = [{"seed": seed, "max_iters": 10} for seed in (3, 1, 2)]
    assert [line["loss"] for line in study.run("toy", runs)] == [3, 1, 2]
    assert [line["loss"] for line in study.run("toy", [*runs, {"seed": 4}])] == [3, 1, 2, 4]
    assert len(trained) == 4 and len(study.read("toy")) == 4
    same_place = [settings | {"out_dir": "other", "log_interval": 7} for settings in runs]
    study.run("toy", same_place)
    assert len(trained) == 4
    study.run("toy", [runs[0] | {"qk_norm": False}])
    assert len(trained) == 5 and trained[-1]["qk_norm"] is False


def test_a_line_that_was_cut_is_trained_again(place, monkeypatch):
    trained = []
    monkeypatch.setattr(study, "train", trainer(lambda full: 1.0, trained))
    study.run("toy", [{"seed": 1}, {"seed": 2}])
    path = study.path_of("toy")
    whole = path.read_text()
    path.write_text(whole[:-20])
    study.run("toy", [{"seed": 1}, {"seed": 2}])
    assert len(trained) == 3
    assert len(study.read("toy")) == 2


def test_no_run_starts_after_one_has_failed(place, monkeypatch):
    trained = []

    def fail(settings, device, folder, look, lock):
        trained.append(settings)
        raise SystemExit("did not finish")

    monkeypatch.setattr(study, "train", fail)
    monkeypatch.setattr(study, "devices", lambda: ["cpu"])
    study.free_devices.cache_clear()
    with pytest.raises(SystemExit, match="did not finish"):
        study.run("toy", [{"seed": seed} for seed in range(5)])
    assert len(trained) == 1 and not study.read("toy")


def test_a_new_setting_that_is_off_does_not_rename_a_run(monkeypatch):
    before = study.key({"seed": 1})
    monkeypatch.setitem(study.DEFAULTS, "a_new_setting", None)
    assert study.key({"seed": 1}) == before
    assert study.key({"seed": 1, "a_new_setting": 2}) != before
    assert study.key({"seed": 1, "warmup_iters": 0}) != before  # 0 is not None
    with pytest.raises(SystemExit, match="device: a study sets this"):
        study.parse(["--device=cpu"])


def test_runs_on_other_data_are_other_runs(place, monkeypatch):
    trained = []
    monkeypatch.setattr(study, "train", trainer(lambda full: 1.0, trained))
    study.run("toy", [{"seed": 1}])
    monkeypatch.setattr(study, "data_hash", lambda data_dir: "other")
    study.run("toy", [{"seed": 1}])
    assert len(trained) == 2
    with pytest.raises(SystemExit, match="different data"):
        study.find("toy", [{"seed": 1}])


def test_a_finished_log_becomes_a_line(tmp_path):
    header = {"settings": {"flops_budget": None}, "resolved": {"max_bad_steps": 5}}
    header |= {"max_iters": 100}
    header |= {"tokens_per_step": 50, "params": {"all": 7}, "git": "abc", "device": "a CPU"}
    header |= {"versions": {"torch": "2"}}
    steps = [
        {"step": i, "tokens": 50 * i, "flops": 0, "loss": 200 - i, "val_loss": None, "tok_s": 500}
        for i in range(1, 101)
    ]
    log = tmp_path / "log.jsonl"
    write = lambda records: log.write_text("".join(json.dumps(r) + "\n" for r in records))
    write([{"run": header}, *steps[:99]])
    assert study.summary(tmp_path) is None
    steps[-1] |= {"val_loss": 1.5}
    write([{"run": header}, *steps])
    found = study.summary(tmp_path)
    assert (found["loss"], found["steps"], found["step_s"]) == (1.5, 100, 0.1)
    write([{"run": header}, *steps, {"run": header | {"from_step": 100}}])  # started once more
    assert study.summary(tmp_path) == found
    assert len(found["curve"]) <= study.POINTS and found["curve"][0] == [3, 198.0]
    write([{"run": header}, *steps[:50], steps[50] | {"bad_steps": 5}])
    assert study.summary(tmp_path)["loss"] is None


@cases("code, loss, line", [(0, 1.5, 1.5), (1, None, None)])
def test_a_diverged_run_gets_a_line_but_a_failed_one_does_not(
    tmp_path, monkeypatch, code, loss, line
):
    monkeypatch.setattr(study.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=code))
    monkeypatch.setattr(study, "summary", lambda folder: {"loss": loss})
    assert study.train({}, "cpu", tmp_path, ())["loss"] == line
    for found in (None, {"loss": 1.5}):  # it ended too early, or was finished and then failed
        monkeypatch.setattr(study, "summary", lambda folder, found=found: found)
        if found is None or code:
            with pytest.raises(SystemExit, match="did not finish"):
                study.train({}, "cpu", tmp_path, ())


def test_intervals_and_interpolation():
    a, b = [1.0, 2.0, 4.0], [1.5, 2.1, 4.2]
    mean, half = study.paired(a, b)
    differences = [-0.5, -0.1, -0.2]
    assert mean == pytest.approx(statistics.mean(differences))
    assert half == pytest.approx(4.303 * statistics.stdev(differences) / math.sqrt(3))
    parabola = lambda length: 3 - math.log(length) + 0.1 * math.log(length) ** 2
    by_length = {length: parabola(length) for length in (100, 200, 800, 3000)}
    for length in (100, 150, 400, 3000):
        assert study.at_length(length, by_length) == pytest.approx(parabola(length))
    with pytest.raises(ValueError, match="not between those trained"):
        study.at_length(99, by_length)


def test_the_chance_of_a_difference_is_a_twentieth_at_the_edge_of_its_interval():
    for n in range(2, 11):
        assert study.p_value((0.3, 0.3), n) == pytest.approx(0.05, abs=1e-4)
    assert study.p_value((-0.1, 0.2), 5) > 0.05 > study.p_value((-0.3, 0.2), 5)
    t, freedom = 2.0, 4  # the closed form of this case
    x = t / math.sqrt(freedom + t * t)
    assert study.within(t, freedom) == pytest.approx(x * (1.5 - 0.5 * x * x))


def test_holms_correction_needs_a_smaller_chance_for_the_smallest(monkeypatch):
    at = lambda p: {"mode": f"{p}", "steps": p}
    monkeypatch.setattr(study, "p_value", lambda steps, n: steps)
    for chances, kept in (([0.04, 0.01], 2), ([0.04, 0.03], 0), ([0.02, 0.06, 0.01], 2)):
        monkeypatch.setattr(report, "compared", lambda of=chances: map(at, of))
        assert len(report.survivors()) == kept


def test_the_interval_of_a_median_contains_it_in_95_of_100_cases():
    draws = torch.randn(400, 45, generator=torch.Generator().manual_seed(0)).exp().tolist()
    intervals = [study.median_interval(values) for values in draws]
    inside = sum(low <= 1 <= high for low, _, high in intervals)  # the median of exp(normal) is 1
    assert 0.93 <= inside / 400 <= 0.99
    assert all(low <= middle <= high for low, middle, high in intervals)
    assert study.median_interval([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)


@cases("gain, ratio, words", [
    (0.05, 1.0, ("better", "better")), (0.05, 1.5, ("better", "worse")),
    (-0.05, 1.0, ("worse", "worse")), (0.0, 1.0, ("undecided", "undecided")),
])  # fmt: skip
def test_the_judge_tunes_both_modes_and_gives_its_verdict(
    place, monkeypatch, capsys, gain, ratio, words
):
    """The best rate is beyond the first grid, and lower at full length. The best rate of the gates
    is 16 times the learning rate. The noise of a seed is almost the same in a pair."""
    trained = []

    def loss_of(full):
        nag = full["residual"] == "nag"
        loss = 2 - 0.2 * math.log(full["max_iters"]) - gain * nag
        rate = (3.2e-2 if full["max_iters"] < 400 else 1.6e-2) if nag else 8e-3
        loss += 0.01 * math.log2(full["learning_rate"] / rate) ** 2
        loss += 0.1 * (full["init_out"] != ("zero" if nag else None))
        factor = (full["gate_lr"] or full["learning_rate"]) / full["learning_rate"]
        loss += nag * 0.1 * abs(math.log2(factor / 16))
        loss += 0.1 * (full["embed_lr"] != 0.025)
        alone = 0.001 * math.sin(full["seed"] + 7 * nag) * (full["seed"] > 0)
        return loss + 0.3 * math.sin(full["seed"]) + alone

    monkeypatch.setattr(study, "train", trainer(loss_of, trained))
    monkeypatch.setattr(study, "probe", lambda settings: 0.1)
    monkeypatch.setattr(study, "stepper", lambda full, device: full["residual"])
    seconds = {"prenorm": [0.1, 0.2, 0.1], "nag": [0.1 * ratio, 0.2 * ratio, 0.1 * ratio]}
    monkeypatch.setattr(study.bench, "race", lambda steps, rounds: seconds)
    for name in judge.OWN:
        monkeypatch.setattr(judge, name, getattr(judge, name))
    monkeypatch.setattr(sys, "argv", ["judge.py", "--residual=nag", "--max_iters=400"])
    for _ in range(2):  # the second time nothing is left to train
        judge.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| nag")]
    assert rows[0] == rows[1]
    assert (place / "out" / "judge.png").stat().st_size > 0
    steps = 4200 * (1 + ratio) + 2000 * (0.7 + 1.4 + 2.0 * (ratio > 1.4))
    assert lines[1].startswith("no runs of prenorm for this scale")
    assert lines[2] == f"about {steps * 0.1 / 2 / 3600:.1f} hours" and "about 0.0 hours" in lines
    row = rows[0]
    assert (row[4], row[7]) == words
    assert float(row[3].split()[0]) == pytest.approx(-gain, abs=2e-3)
    assert float(row[6].split()[0]) == pytest.approx(-gain + 0.2 * math.log(ratio), abs=2e-3)
    tuned = "learning_rate=0.016 init_out=zero gate_lr=0.256 embed_lr=0.025"
    assert row[8] == f"{tuned} |"
    keys = [line["key"] for line in study.read("judge") if "key" in line]
    assert len(keys) == len(set(keys)) == len(trained)
    assert {s["seed"] for s in trained if s["val_part"] == "tune"} == {0}
    assert {s["seed"] for s in trained if s["val_part"] == "report"} == {1, 2, 3, 4, 5}


def test_the_baseline_is_trained_as_long_as_the_slowest_mode_needs():
    as_fast, slower = [0.9, 0.95, 1.3], [1.4, 1.6, 1.9]
    assert judge.lengths({"a": as_fast}) == (0.7, 1.4)
    assert judge.lengths({"a": as_fast, "b": slower}) == (0.7, 1.4, 2.0)
    assert judge.lengths({"a": [9, 9, 9]}) == judge.LENGTHS


def test_the_lead_is_paired_by_seed_and_shows_only_finished_runs(place, monkeypatch):
    loss = {"prenorm": 2.0, "nag": 1.9, "bhyt": 1.95}

    def loss_of(full):
        seed = 0.1 * full["seed"] + 0.001 * full["seed"] ** 2 * (full["residual"] == "nag")
        return loss[full["residual"]] - math.log(full["max_iters"]) + seed

    monkeypatch.setattr(study, "train", trainer(loss_of, []))
    monkeypatch.setattr(lead, "names", "nag,bhyt")
    monkeypatch.setattr(lead, "values", "1000,8000")
    changes, axis, values, around = lead.selected(lead.PLANS["tokens"])
    assert list(changes) == ["prenorm", "nag", "bhyt"] and values == [1000, 8000]
    runs = lead.runs_of(changes, axis, values, around, study.run)
    lines = {at: study.run("lead", of_seeds) for at, of_seeds in runs.items()}
    found = {(name, value): rest for name, value, *rest in lead.rows(lines, changes)}
    differences = [-0.1 + 0.001 * seed**2 for seed in lead.SEEDS]
    mean, half = study.paired(differences, [0.0] * 3)
    assert found["nag", 8000][1] == pytest.approx((mean, half))
    assert found["bhyt", 1000][1] == pytest.approx((-0.05, 0.0))

    del lines["prenorm", 8000]  # without its base, a row is left out
    assert {value for _, value, *_ in lead.rows(lines, changes)} == {1000}
    monkeypatch.setattr(lead, "names", "nanorm")
    with pytest.raises(SystemExit, match="nanorm: choose from prenorm, nag"):
        lead.selected(lead.PLANS["tokens"])


def test_lead_times_only_what_has_finished(place, monkeypatch, capsys):
    monkeypatch.setattr(study, "train", trainer(lambda full: 1.0 + 0.1 * full["seed"], []))
    monkeypatch.setattr(study, "race", lambda name, runs: {key: 1.5 for key in runs})
    for key in ("what", "names", "timed"):
        monkeypatch.setattr(lead, key, getattr(lead, key))
    argv = ["lead.py", "--what=nag", "--names=not centred"]
    monkeypatch.setattr(sys, "argv", [*argv, "--timed=True"])
    with pytest.raises(SystemExit, match="have not finished"):
        lead.main()
    monkeypatch.setattr(sys, "argv", ["lead.py", "--what=blocks", "--timed=True"])
    with pytest.raises(SystemExit, match="only for nag, bhyt and mod"):
        lead.main()
    monkeypatch.setattr(sys, "argv", [*argv, "--timed=False"])
    lead.main()
    monkeypatch.setattr(sys, "argv", [*argv, "--timed=True"])
    capsys.readouterr()
    lead.main()
    assert capsys.readouterr().out.endswith("{'nag': 1.5, 'not centred': 1.5}\n")


@cases("what, value", [("tokens", 16000), ("blocks", 32)])
def test_long_and_deep_runs_use_the_rate_that_is_best_at_half_of_that(
    place, monkeypatch, what, value
):
    best, trained = {4000: 0.016, 8000: 0.004}, []

    def loss_of(full):
        size = full["max_iters"] * (2 if full["n_layer"] == 16 else 1)
        return abs(math.log(full["learning_rate"] / best.get(size, 0.008)))

    monkeypatch.setattr(study, "train", trainer(loss_of, trained))
    _, axis, _, around = lead.PLANS[what]
    runs = lead.runs_of({"prenorm": None}, axis, [value], around, study.run)
    assert {run["learning_rate"] for run in runs["prenorm", value]} == {0.004}
    assert {run["seed"] for run in trained} == {0}
    assert max(run[axis] for run in trained) == lead.LARGEST[axis]


def test_a_change_is_compared_with_the_mode_that_it_changes():
    changes = lead.PLANS["mod"][0]
    assert lead.base_of(changes, "random router 0.4") == "nag"
    assert lead.base_of(changes, "learned router on pre-norm 0.4") == "prenorm"
    assert lead.base_of(lead.PLANS["bhyt"][0], "lambda fixed") == "bhyt"
    assert lead.base_of(lead.PLANS["tokens"][0], "nag") == "prenorm"


@cases("what", lead.PLANS)
def test_the_names_of_a_plan_are_different_models(what):
    changes, axis, values, _ = lead.PLANS[what]
    scale, keys = study.parse([judge.SCALE]) | {axis: values[0]}, set()
    for name, change in changes.items():
        own = {"residual": name} if change is None else {"residual": "nag"} | change
        with torch.device("meta"):
            GPT(GPTConfig(**judge.shape_of(scale | own)))
        keys.add(study.key(scale | own))
    assert len(keys) == len(changes)


@cases("interval, word", [
    ((-0.02, 0.01), "holds"), ((0.02, 0.01), "does not hold"), ((-0.02, 0.03), "undecided"),
])  # fmt: skip
def test_a_claim_holds_if_its_whole_interval_has_the_right_sign(interval, word):
    assert claims.sign(interval) == word
    opposite = {"holds": "does not hold", "does not hold": "holds"}.get(word, word)
    assert claims.sign(interval, wanted=1) == opposite


@cases("ours, theirs, word", [
    ([1.0, 2.0], [2.5, 9.0], "holds (one seed)"), ([3.0], [1.0, 2.0], "does not hold (one seed)"),
    ([1.0, 3.0], [2.5, 9.0], "undecided: depends on the learning rate"),
])  # fmt: skip
def test_a_claim_about_one_seed_must_hold_at_all_learning_rates(ours, theirs, word):
    assert claims.below(ours, theirs) == word
    assert claims.spread(theirs) == " to ".join(f"{value:g}" for value in theirs)


@cases("words, word", [
    (["holds", "holds"], "holds"), (["holds", "undecided"], "undecided"),
    (["undecided", "does not hold"], "does not hold"),
])  # fmt: skip
def test_a_claim_with_several_parts_holds_if_all_of_them_do(words, word):
    assert claims.all_of(words) == word


def test_nag_gains_with_depth_if_its_lead_grows_for_each_seed():
    at = lambda base: [{"loss": base + 0.1 * seed} for seed in range(3)]
    blocks = {("prenorm", n): at(2.0) for n in (4, 16)} | {("nag", 4): at(1.9)}
    assert not [*claims.gain_by_depth(blocks)]  # one depth only
    ((words, _, ours, verdict),) = claims.gain_by_depth(blocks | {("nag", 16): at(1.7)})
    assert "more with 16 blocks than with 4" in words
    assert ours == "4 blocks: 0.1000, 16 blocks: 0.3000; growth +0.2000 ± 0.0000"
    assert verdict == "holds"
    ((*_, shrinks),) = claims.gain_by_depth(blocks | {("nag", 16): at(1.95)})
    assert shrinks == "does not hold"
    assert not [*claims.gain_by_depth(blocks | {("nag", 16): [{"loss": None}] * 3})]


def test_a_mixture_of_depths_has_a_row_as_soon_as_its_seeds_have_finished(monkeypatch):
    line = {"flops": 10.0, "skipped": 0.0}
    found = {"nag": [line | {"loss": 1.0 + 0.1 * seed} for seed in range(3)]}
    for router, gap in (("NAG's", 0.01), ("learned", 0.03)):
        lines = [{"loss": own["loss"] + gap, "flops": 6.0, "skipped": 0.4} for own in found["nag"]]
        found[f"{router} router 0.4"] = lines
    found["random router 0.4"] = [line | {"loss": None}] * 3
    found |= {f"nag with {n} blocks": found["nag"] for n in (5, 6)}
    at_4_mb = lambda what: {(name, 4000): lines for name, lines in found.items()}
    monkeypatch.setattr(report, "lead_lines", at_4_mb)
    monkeypatch.setattr(report, "lead_ratios", lambda what: {"NAG's router 0.4": (0.7, 0.75, 0.8)})
    rows = report.mixtures()["table"].splitlines()[2:]
    gap = "+0.0100 ± 0.0000 | worse |  |  |"
    assert rows[0] == f"| NAG's router 0.4 | 40.0% | 0.60 | 0.75 | 1.1100 | {gap}"
    assert rows[2].split(" | ")[5] == "diverged"

    assert report.mixture_values() is None  # no dense model at other lengths
    found["random router 0.4"] = found["learned router 0.4"]
    longer = {steps: [{"loss": 2.0 - steps / 4000 + 0.1 * seed, "flops": 10.0, "steps": steps}
                      for seed in range(3)] for steps in (2000, 4000, 8000)}  # fmt: skip
    for steps, lines in longer.items():
        for line in lines:
            line["flops"] *= steps / 4000
    monkeypatch.setattr(report, "dense_lines", lambda: longer)
    values = report.mixture_values()
    assert values["own"] == "+0.0100 ± 0.0000" and values["learned"] == "+0.0300 ± 0.0000"
    assert values["flops_own"] == 0.6
    dense_at_2400 = study.at_length(0.6, {0.5: 1.5, 1.0: 1.0, 2.0: 0.0})
    assert float(values["equal_own"].split()[0]) == pytest.approx(1.01 - dense_at_2400, abs=1e-4)

    claimed = {row[0]: row[2:] for row in claims.depths(found, {}, report.Earlier())}
    by_router = "On NAG's stream, NAG's router is better than a learned one (40%)"
    assert claimed[by_router] == ("-0.0200 ± 0.0000", "holds")
    on_prenorm = [found for words, (found, _) in claimed.items() if "than pre-norm" in words]
    assert len(on_prenorm) == 2 and all(text.endswith("(short runs)") for text in on_prenorm)
    found["learned router 0.4"] = [line | {"loss": None}] * 3
    assert report.mixture_values() is None
    assert by_router not in {row[0] for row in claims.depths(found, {}, report.Earlier())}


def test_readme_has_a_verdict_for_each_judged_mode(monkeypatch):
    monkeypatch.setattr(report, "readme_verdicts", lambda: {"nag": ("+1", "worse")})
    monkeypatch.setattr(report, "first_page", lambda: "PAGE\n")
    readme = report.readme(open(f"{HERE}/README.md").read())
    rows = [line for line in readme.splitlines() if re.search(r"\| `\w+` \|", line)]
    assert {re.search(r"`(\w+)`", row)[1] for row in rows} == set(RESIDUALS)
    for row in rows:
        cells = "+1 | worse" if "`nag`" in row else "not judged yet | "
        assert row.endswith(f"| {cells} |") and row.count(" | ") == 4
    assert report.START + "PAGE\n" + report.END in readme


def test_readme_groups_the_verdicts_with_adamw(monkeypatch):
    found = {"diverged": None, "loss": 1.0, "ratio": 1.0, "times": []}
    gaps = {"nag": (-0.1, 0.01), "lns": (0.02, 0.01), "bhyt": (0.03, 0.01)}
    each = [found | {"mode": mode, "steps": gap} for mode, gap in gaps.items()]
    each[1]["times"] = [gaps["bhyt"]] * 3
    monkeypatch.setattr(report, "by_difference", lambda optimizer: each)
    words = report.adamw_in_words()
    assert words.startswith("- **With AdamW** in place of Muon (`nag`, `lns` and `bhyt`; 3 seeds):")
    verdicts = "at equal steps `nag` is better, 2 worse; at equal time no mode is better, 1 worse"
    assert words.endswith(f" {verdicts}, 2 without a verdict.")


def skipping(model, layer, token):
    """Give one sublayer a router that only this token does not pass."""
    block, runs = model.blocks[layer // 2], torch.arange(32) != token
    name = "mlp_router" if layer % 2 else "attn_router"

    def route(run, residual, h, stream, scale):
        return mod.Router.write(router, residual, run(h), runs[:, None], 1, stream, scale, None)

    router = SimpleNamespace(v=None, learned=False)
    setattr(block, name, route)
    return block, name


@cases("mode", ["prenorm", "nag", "postnorm", "mixln", "x0mix"])
def test_the_oracle_equals_a_forward_in_which_one_token_skips_one_sublayer(mode):
    model, idx = shaken(tiny(residual=mode, **EXTRAS)).eval(), some_ids()[:1]
    y = idx.roll(-1, 1)
    rises, seen = oracle.look(model, idx, y)
    loss = lambda: F.cross_entropy(model(idx)[0][0], y[0], reduction="sum").item()
    whole = loss()
    for layer, token in ((0, 0), (1, 5), (2, 30), (3, 31)):
        block, name = skipping(model, layer, token)
        rise = loss() - whole
        setattr(block, name, None)
        assert rises[layer, token].item() == pytest.approx(rise, abs=2e-3)
    assert seen["input"].shape == (4, idx.size(1), model.config.n_embd)


def test_the_oracle_knows_a_perfect_score_from_a_random_one():
    rise = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0)).exp()
    inputs = torch.randn(4, 2000, 8)
    inputs[..., 3] = rise
    seen = {"turn": torch.zeros_like(rise), "update": 2 * rise, "angle": -rise, "input": inputs}
    found = oracle.compare(rise, seen)
    assert "turn" not in found  # a mode without rotation
    assert found["update"]["rank correlation"] == pytest.approx([1] * 4)
    assert found["update"]["regret"] == pytest.approx([0] * 4)
    assert found["angle"]["rank correlation"] == pytest.approx([-1] * 4)
    assert min(found["probe"]["rank correlation"]) > 0.8
    assert max(map(abs, found["random"]["rank correlation"])) < 0.1
    assert min(found["random"]["regret"]) > max(found["probe"]["regret"]) > 0


def test_the_pages_can_be_written_from_few_runs(monkeypatch):
    """Somebody who judged one mode on other data has no other runs."""
    few = tuple({mode: each[mode] for mode in ("prenorm", "nag")} for each in report.judged())
    monkeypatch.setattr(
        report, "judged", lambda optimizer="muon": few if optimizer == "muon" else ({}, {})
    )
    monkeypatch.setattr(
        report, "compared", lambda optimizer="muon": [*judge.compared(*report.judged(optimizer))]
    )
    monkeypatch.setattr(report, "slower_baseline", lambda: None)
    monkeypatch.setattr(report, "lead_lines", lambda what: {})
    page, readme = report.markdown(), report.readme(open(f"{HERE}/README.md").read())
    assert "| nag | 526,506 |" in page and "| mhc |" not in page.partition("## Speed")[0]
    assert "1 modes against pre-norm" in readme and "`mhc` takes" not in readme


def test_sentences_written_by_hand_agree_with_the_results():
    cells = lambda table: [row.split(" | ") for row in table.splitlines()[2:]]
    means = [float(row[1]) for row in cells(report.gates()["table"])]
    assert means == sorted(means)  # "|a| grows"

    at_1000 = report.lead_lines("tokens")["nag", 1000]
    high = [line["loss"] > 1.2 for line in at_1000]
    assert sum(high) == 2  # "bad for two of the three new seeds"
    assert high == [line["gates"]["dead"] > 0 for line in at_1000]  # "sublayers closed in"

    half = "prenorm at half the rate"
    for name, steps in (("prenorm", 4000), (half, 8000), (half, 16000)):
        below, middle, above = sorted(x["loss"] for x in report.lead_lines("tokens")[name, steps])
        assert above - middle > 2 * (middle - below)  # "one of the three new seeds", BAD_SEED

    prenorm = report.lead_lines("tokens")["prenorm", 4000]
    bad = max(prenorm, key=lambda line: line["loss"])
    again = study.finished("another_cpu").values()
    again = [line for line in again if line["settings"]["max_iters"] == 4000]
    assert max(again, key=lambda line: line["loss"])["key"] == bad["key"]  # "is high again"
    for name in ("attnres", "mhc"):
        of_mode = report.lead_lines("tokens")[name, 4000]
        by_seed = study.minus(judge.losses(of_mode), judge.losses(prenorm))
        assert max(by_seed) < 0  # "lower with every seed, but undecided"
        assert judge.verdict([study.interval(by_seed)]) == "undecided"
        gap, from_half = dict(p[:2] for p in report.lead_points("tokens")[name])[8000]
        words = judge.verdict([gap]), judge.verdict([from_half])
        assert words == ("better", "undecided")  # "With 8,000 steps, both are better"

    too_low = [float(row[1]) > float(row[2]) for row in cells(report.variance()["table"])]
    assert all(too_low)  # "is too low in all blocks"

    regrets = {tuple(row[:2]): float(row[3]) for row in cells(report.oracle()["table"])}
    for (mode, score), regret in regrets.items():  # "better than chance"
        assert score == "random" or regret < regrets[mode, "random"]

    factors = {row[0].lstrip("| "): row[4] for row in cells(report.conversion()["table"])}
    assert factors["bhyt"].startswith("0.1 ") and factors["nag"].startswith("0.3 ")  # GUIDE


def test_the_page_of_results_is_the_one_that_the_report_writes():
    results, readme = (open(f"{HERE}/{name}").read() for name in ("RESULTS.md", "README.md"))
    hint = "results/ has changed: run python runs/report.py"
    assert results == report.markdown(), hint
    assert readme == report.readme(readme), hint


def test_every_recorded_run_and_time_is_found_by_its_settings():
    """A new default or a removed setting changes keys. Then results/ needs new keys, too."""
    for name in ("judge", "lead", "recipe", "convert", "another_cpu"):
        lines = study.read(name)
        assert [line["key"] for line in lines if "key" in line] == [
            study.key(line["settings"]) for line in lines if "key" in line
        ]
        for line in (line for line in lines if "race" in line):
            assert line["race"] == [study.key(settings) for settings in line["runs"]]
