"""The studies in runs/: what is trained, what is not trained again, and the verdicts."""

import gzip
import json
import math
import re
import runpy
import statistics
import sys
import weakref
from functools import cache, partial
from itertools import product
from types import SimpleNamespace

import gpu
import judge
import lead
import numpy
import pytest
import stats
import study
import tables
import torch

import plot
from model import GPT, RESIDUALS, GPTConfig
from test_all import HERE, cases


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Studies write to a temporary folder, on two devices, and train nothing."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "data_hash", lambda data_dir: "data")
    monkeypatch.setattr(study, "devices", lambda: ["cpu", "cpu"])
    monkeypatch.setattr(study, "probe", lambda settings: (9.0, 0.0))
    monkeypatch.setattr(study, "record", False)
    monkeypatch.setattr(study.signal, "signal", lambda *_: None)
    study.free_devices.cache_clear()
    study.stopped.clear()
    yield tmp_path
    study.free_devices.cache_clear()


def trains(monkeypatch, loss_of=lambda full: 1.0):
    """Replace study.train: the loss is loss_of(all settings). Returns the runs that it has got."""
    trained = []

    def train(settings, device, folder, look, lock):
        trained.append(settings)
        full = study.DEFAULTS | settings
        return {"loss": loss_of(full), "steps": full["max_iters"], "params": 1000}

    monkeypatch.setattr(study, "train", train)
    return trained


def test_a_run_with_a_line_is_not_repeated(place, monkeypatch):
    trained = trains(monkeypatch, lambda full: float(full["seed"]))
    runs = [{"seed": seed, "max_iters": 10} for seed in (3, 1, 2)]
    assert [line["loss"] for line in study.run("toy", runs)] == [3, 1, 2]
    assert [line["loss"] for line in study.run("toy", [*runs, {"seed": 4}])] == [3, 1, 2, 4]
    assert len(trained) == 4 and len(study.read("toy")) == 4
    same_place = [settings | {"out_dir": "other", "log_interval": 7} for settings in runs]
    study.run("toy", same_place)
    assert len(trained) == 4
    study.run("toy", [runs[0] | {"qk_norm": False}])
    assert len(trained) == 5 and trained[-1]["qk_norm"] is False


def test_results_are_recorded_only_if_asked_to(place, monkeypatch):
    trained = trains(monkeypatch)
    of_user, of_pages = place / "out" / "toy.jsonl", place / "results" / "toy.jsonl"
    study.begin(recording=True)
    study.run("toy", [{"seed": 1}])
    study.begin(recording=False)
    study.run("toy", [{"seed": 1}, {"seed": 2}])  # the recorded run is not repeated
    assert [run["seed"] for run in trained] == [1, 2]
    assert [len(path.read_text().splitlines()) for path in (of_pages, of_user)] == [1, 1]
    study.begin(recording=True)
    with pytest.raises(study.NotFinished):  # the pages show recorded runs only
        study.find("toy", [{"seed": 2}])


def test_the_study_of_the_guide_runs(place, monkeypatch, capsys):
    trains(monkeypatch, lambda full: full["n_hidden"] / full["seed"])
    (code,) = re.findall(r"```python\n(\"\"\"runs/.*?)```", open(f"{HERE}/GUIDE.md").read(), re.S)
    exec(code, {})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch("about .* to train 6 runs of ihc, 2 at a time", first)
    assert last.startswith("-78.2222 ± ")


@cases("name", ["judge.py", "lead.py", "tables.py", "english.py"])
def test_a_study_explains_itself_without_scipy_but_does_not_start(place, monkeypatch, capsys, name):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(f"{HERE}/runs/{name}", run_name="__main__")
    assert not stopped.value.code and f"python runs/{name}" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="pip install scipy"):
        study.begin(False)


def test_a_line_that_was_cut_is_trained_again(place, monkeypatch):
    trained = trains(monkeypatch)
    study.run("toy", [{"seed": 1}, {"seed": 2}])
    path = study.files_of("toy")[-1]
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


def test_a_new_name_of_a_study_continues_no_run_of_the_old_one(place, monkeypatch):
    folders = []
    train = lambda settings, device, folder, *others: folders.append(folder) or {"loss": 1.0}
    monkeypatch.setattr(study, "train", train)
    for name in ("toy", "other"):
        study.run(name, [{"seed": 1}])
    assert len({*folders}) == 2


def test_the_default_seed_is_recorded_like_any_other(place, monkeypatch):
    trains(monkeypatch, lambda full: float(full["seed"]))
    usual = study.DEFAULTS["seed"]
    lines = study.run("toy", [{"seed": usual}, {"seed": 1}])
    assert [*stats.of_seeds(lines)] == [1, usual]
    assert study.key({"seed": usual}) == study.key({}) and "seed" not in study.changed({})


def test_a_new_setting_that_is_off_does_not_rename_a_run(monkeypatch):
    before = study.key({"seed": 1})
    monkeypatch.setitem(study.DEFAULTS, "a_new_setting", None)
    assert study.key({"seed": 1}) == before
    assert study.key({"seed": 1, "a_new_setting": 2}) != before
    assert study.key({"seed": 1, "warmup_iters": 0}) != before  # 0 is not None
    with pytest.raises(SystemExit, match="device: a study sets this"):
        study.parse(["--device=cpu"])
    with pytest.raises(SystemExit, match="out_dir: a study sets this"):
        study.parse(["--out_dir=out/x"])
    for name in ("gpt2_124m", "moe_840m", "llama_1b"):  # each has its own out_dir and init_from
        scale = study.parse([f"config/{name}.py"])
        assert "n_layer" in scale and not {"out_dir", "init_from"} & scale.keys()


def test_runs_on_other_data_are_other_runs(place, monkeypatch):
    trained = trains(monkeypatch)
    study.run("toy", [{"seed": 1}])
    monkeypatch.setattr(study, "data_hash", lambda data_dir: "other")
    study.run("toy", [{"seed": 1}])
    assert len(trained) == 2
    with pytest.raises(SystemExit, match="different data"):
        study.find("toy", [{"seed": 1}])

    lines = study.run("toy", [{"seed": 2}, {"seed": 3}])
    monkeypatch.setattr(study, "data_hash", lambda data_dir: "a third one")
    others = study.run("toy", [{"seed": 4}])
    mixed = [{"seed": seed} for seed in (2, 3, 4)]
    assert study.find("toy", mixed) == lines + others
    with pytest.raises(SystemExit, match="a pair of runs has different data"):
        stats.gap_of(lines, [lines[0], lines[1] | {"data": others[0]["data"]}])


def test_a_finished_log_becomes_a_line(tmp_path):
    header = {"max_iters": 100, "resolved": {"max_bad_steps": 5}}
    header |= {"tokens_per_step": 50, "params": {"all": 7}, "git": "abc", "device": "a CPU"}
    header |= {"versions": {"torch": "2"}, "settings": {"log_interval": 1}}
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
    header["settings"]["log_interval"] = 8
    curves = []
    for stopped in ([], [29]):
        logged = [steps[at - 1] for at in sorted([*range(8, 100, 8), *stopped, 100])]
        write([{"run": header}, *logged])
        curves.append(study.summary(tmp_path)["curve"])
    assert curves[0] == curves[1] and curves[0][-1] == [100, 100.0]


@cases("code, loss, line", [(0, 1.5, 1.5), (1, None, None)])
def test_a_diverged_run_gets_a_line_but_a_failed_one_does_not(
    tmp_path, monkeypatch, code, loss, line
):
    done = SimpleNamespace(returncode=code, stderr="a message\n")
    monkeypatch.setattr(study.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(study, "summary", lambda folder: {"loss": loss})
    assert study.train({}, "cpu", tmp_path, ())["loss"] == line
    for found in (None, {"loss": 1.5}):  # it ended too early, or was finished and then failed
        monkeypatch.setattr(study, "summary", lambda folder, found=found: found)
        if found is None or code:
            with pytest.raises(SystemExit, match="did not finish"):
                study.train({}, "cpu", tmp_path, ())


def test_intervals_and_interpolation():
    a, b = [1.0, 2.0, 4.0], [1.5, 2.1, 4.2]
    mean, half = stats.interval(stats.minus(a, b))
    differences = [-0.5, -0.1, -0.2]
    assert mean == pytest.approx(statistics.mean(differences))
    assert half == pytest.approx(4.302653 * statistics.stdev(differences) / math.sqrt(3))
    parabola = lambda length: 3 - math.log(length) + 0.1 * math.log(length) ** 2
    by_length = {length: [1.0, parabola(length)] for length in (100, 200, 800, 3000)}
    for length in (100, 150, 400, 3000):
        assert stats.losses_at(length, by_length) == pytest.approx([1.0, parabola(length)])
    with pytest.raises(ValueError, match="not between those trained"):
        stats.losses_at(99, by_length)
    by_length[500] = [2.0]  # fewer seeds: not used between lengths with more
    assert stats.losses_at(400, by_length) == pytest.approx([1.0, parabola(400)])
    assert len(stats.losses_at(1, {1: [1.0, 2.0], 2: [3.0]})) == 1
    far = {1: [0.0], 1.1: [-0.095], 1.2: [-0.172], 10: [-2.303]}
    assert -2.303 < stats.losses_at(3, far)[0] < -0.8  # not by the three nearest, all below 3


def test_the_chance_of_a_difference_is_a_twentieth_at_the_edge_of_its_interval():
    for n in range(2, 11):
        assert stats.p_value((0.3, 0.3), n) == pytest.approx(0.05, abs=1e-4)
    assert stats.p_value((-0.1, 0.2), 5) > 0.05 > stats.p_value((-0.3, 0.2), 5)
    t, freedom = 2.0, 4  # the closed form of this case
    x = t / math.sqrt(freedom + t * t)
    inside = x * (1.5 - 0.5 * x * x)
    half = 2.776445  # from a table: the interval of a difference of t standard errors of 1
    assert stats.p_value((t, half), 5) == pytest.approx(1 - inside, abs=1e-6)


def test_identical_runs_do_not_differ():
    same = stats.interval(stats.minus([1.0, 1.2, 0.9], [1.0, 1.2, 0.9]))
    assert stats.p_value(same, 3) == 1
    assert stats.p_value((0.1, 0.0), 3) == 0
    found = stats.holm({"same": [(same, 3)], "other": [((-0.1, 0.001), 3)]})
    assert found == {"same": "undecided", "other": "better"}
    assert stats.verdict([same]) == "undecided"


@cases("chances, kept", [([0.04, 0.01], 2), ([0.04, 0.03], 0), ([0.02, 0.06, 0.01], 2)])
def test_holms_correction_needs_a_smaller_chance_for_the_smallest(monkeypatch, chances, kept):
    monkeypatch.setattr(stats, "p_value", lambda gap, n: gap[1])
    found = stats.holm({i: [((1.0, chance), 5)] for i, chance in enumerate(chances)})
    assert [*found.values()].count("worse") == kept


def test_intervals_that_disagree_stay_undecided_after_holms_correction():
    surely_better, better, surely_worse = (-0.010, 0.002), (-0.004, 0.002), (0.004, 0.0019)
    pairs = lambda *gaps: {"a": [(gap, 8) for gap in gaps]}
    assert stats.holm(pairs(surely_better, better))["a"] == "better"
    assert stats.holm(pairs(surely_better, better, surely_worse))["a"] == "undecided"


@cases("n", [6, 11, 21, 45])
def test_the_interval_of_a_median_is_the_narrowest_that_contains_it_in_95_of_100_cases(n):
    low, middle, high = stats.median_interval([*range(n)][::-1])
    assert (middle, high) == ((n - 1) / 2, n - 1 - low)
    missed = lambda below: 2 * sum(math.comb(n, k) for k in range(below + 1)) / 2**n
    assert missed(low) <= 0.05 < missed(low + 1)
    assert stats.median_interval([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)


@cases("gain, ratio, words", [
    (0.05, 1.0, ("better", "better")), (0.05, 1.5, ("better", "worse")),
    (-0.05, 1.0, ("worse", "worse")), (0.0, 1.0, ("undecided", "undecided")),
])  # fmt: skip
def test_the_judge_tunes_both_modes_and_gives_its_verdict(
    place, monkeypatch, capsys, gain, ratio, words
):
    """The best rate is beyond the first grid, and lower at full length. The best rate of the gates
    is 16 times the learning rate. The noise of a seed is almost the same in a pair."""

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

    trained = trains(monkeypatch, loss_of)
    monkeypatch.setattr(study, "stepper", lambda full, device: full["residual"])
    seconds = {"prenorm": [0.1, 0.2, 0.1], "nag": [0.1 * ratio, 0.2 * ratio, 0.1 * ratio]}
    monkeypatch.setattr(study.bench, "race", lambda steps, rounds: seconds)
    for name in judge.OWN:
        monkeypatch.setattr(judge, name, getattr(judge, name))
    monkeypatch.setattr(sys, "argv", ["judge.py", "--residual=nag", "--max_iters=400"])
    for _ in range(2):  # the second time nothing is left to train
        judge.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [re.split(" {2,}", line) for line in lines if re.match(r"(nag|prenorm) +1,000 ", line)]
    assert rows[:2] == rows[2:] and rows[0][3] == "the baseline"
    assert (place / "out" / "judge.png").stat().st_size > 0
    assert lines[0].startswith("timing the steps of prenorm, nag")
    estimate = r"about (.*) hours to train (\d+) runs of nag, prenorm, 2 at a time"
    hours, runs = map(float, re.fullmatch(estimate, lines[1]).groups())
    steps = sum(run["max_iters"] * (ratio if run["residual"] == "nag" else 1) for run in trained)
    assert 0.75 < hours / (steps * 9.0 / 2 / 3600) < 1 and 0.75 < runs / len(trained) < 1
    assert "\n".join(lines).count("about") == 1
    done = re.compile(r"nag +tune 0  \d+ steps  rate 0.016  loss .*   \d+ of \d+, .* left")
    assert any(map(done.fullmatch, lines))
    row = rows[1]
    doubt = "" if gain else ", fragile"  # another rate costs the baseline 0.01
    assert (row[4], row[8]) == (words[0] + doubt, words[1])
    assert float(row[3].split()[0]) == pytest.approx(-gain, abs=2e-3)
    worth, low, _, high = row[5].replace("(", "").replace(")", "").split()  # steps for this loss
    assert float(worth) == pytest.approx(math.exp(gain / 0.2), abs=0.02)
    assert float(low) <= float(worth) <= float(high) < float(low) + 0.1
    assert float(row[7].split()[0]) == pytest.approx(-gain + 0.2 * math.log(ratio), abs=2e-3)
    tuned = "learning_rate=0.016 init_out=zero gate_lr=0.256 embed_lr=0.025"
    assert f"nag was tuned to {tuned}" in lines
    power = r"at equal steps, a true difference of 0.00\d would be found in 4 of 5 such studies; "
    assert re.fullmatch(power + "smaller ones are mostly missed", lines[-1])
    keys = [line["key"] for line in study.read("judge") if "key" in line]
    assert len(keys) == len(set(keys)) == len(trained)
    assert {s["seed"] for s in trained if s["val_part"] == "tune"} == {0, 100, 101}
    assert {s["seed"] for s in trained if s["val_part"] == "report"} == {*range(1, 9)}


def test_a_rate_is_chosen_by_the_mean_of_three_seeds(place, monkeypatch):
    """The first seed prefers a quarter of the rate that is best on average."""

    def loss_of(full):
        best = 4e-3 if full["seed"] == 0 else 3.2e-2
        return math.log2(full["learning_rate"] / best) ** 2

    trains(monkeypatch, loss_of)
    scale = study.parse([judge.SCALE, "--max_iters=400"])
    lines_of = lambda runs: study.run("judge", runs)
    assert judge.tune(scale, "prenorm", lines_of)["learning_rate"] == 1.6e-2
    monkeypatch.setattr(judge, "TUNING", (0, 100, 101, 102))  # 102 is missing
    lines_of = lambda runs: study.find("judge", runs)
    assert judge.tune(scale, "prenorm", lines_of)["learning_rate"] == 4e-3


def test_rates_at_which_no_model_learns_are_not_compared(place, monkeypatch):
    def loss_of(full):
        rate = full["learning_rate"]
        return math.log2(rate / 1e-3) ** 2 if rate < 2e-3 else 3 + 1e-4 * math.sin(1e4 * rate)

    trains(monkeypatch, loss_of)
    scale = study.parse([judge.SCALE, "--max_iters=400"])
    lines_of = lambda runs: study.run("judge", runs)
    found = judge.best_rate(scale, "dyt", {"learning_rate": 8e-3}, lines_of)
    assert found == {"learning_rate": 1e-3}


def by_seed(values, first=0):
    return dict(enumerate(values, first))


def differences(ours, theirs):
    return [*stats.by_seed(ours, theirs).values()]


def test_the_slope_of_two_groups_without_a_common_seed_is_welchs_difference():
    from scipy.stats import ttest_ind

    few, many = [0.3, 0.1, 0.4], [0.5, 0.7, 0.6, 0.9, 0.6]
    low, high = ttest_ind(many, few, equal_var=False).confidence_interval()
    of_few, of_many = by_seed(few), by_seed(many, 10)
    found, half = stats.slope({2: of_few, 4: of_many})
    assert stats.contrast([(0.5, of_many), (-0.5, of_few)]) == pytest.approx((found, half))
    assert (2 * (found - half), 2 * (found + half)) == pytest.approx((low, high))


def test_a_slope_over_shared_seeds_is_the_mean_of_the_slopes_of_the_seeds():
    xs = [2, 3, 4.5]
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).tolist()
    slopes = [numpy.polyfit(xs, column, 1)[0] for column in zip(*values)]
    by_x = {x: by_seed(row) for x, row in zip(xs, values)}
    assert stats.slope(by_x) == pytest.approx(stats.interval(slopes))
    by_x[3][77] = 9.0  # a seed that only one x has does not count
    by_x[2] = dict(reversed(by_x[2].items()))
    assert stats.slope(by_x) == pytest.approx(stats.interval(slopes))
    with pytest.raises(SystemExit, match="share fewer than two seeds"):
        stats.slope({2: {1: 0.1, 2: 0.2}, 3: {2: 0.2, 3: 0.1}})


def test_the_interval_of_a_slope_contains_it_in_95_percent():
    """The first two share seeds, and the noise of these."""
    torch.manual_seed(0)

    def draw():
        noise = torch.randn(6, dtype=torch.float64)
        own = lambda n: torch.randn(n, dtype=torch.float64)
        values = {2: 2 * noise + own(6), 3: 3 * noise + own(6), 5: 5 * own(8)}
        return {x: by_seed((0.3 * x + of).tolist(), x // 5 * 10) for x, of in values.items()}

    found = (stats.slope(draw()) for _ in range(1000))
    inside = sum(abs(slope - 0.3) <= half for slope, half in found)
    assert 930 <= inside <= 970


def test_the_figure_of_leads_by_depth_repeats_byte_by_byte(tmp_path):
    curves = {"a": {4: (0.1, 0.02), 16: (-0.1, 0.03)}, "b": {8: (0.0, 0.01)}}
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    for path in (first, again):
        plot.leads(path, curves, "difference")
    assert first.read_bytes() == again.read_bytes()


def test_the_worth_in_steps_comes_from_the_lengths_with_the_most_seeds():
    losses_of = lambda length, n: [seed / 100 - math.log(length) for seed in range(n)]
    by_length = {0.5: losses_of(0.5, 8), 1.0: losses_of(1.0, 8), 2.0: losses_of(2.0, 3)}
    for length in (0.8, 1.6):  # 2.0 counts only for the second, with the seeds that all have
        found = stats.length_of(losses_of(length, 8), by_length)
        assert found == pytest.approx([length] * 3)
    without = by_length | {2.0: [9.0, 9.0, 9.0]}
    assert stats.length_of(losses_of(0.8, 8), without) == pytest.approx([0.8] * 3)
    assert stats.length_of(losses_of(3.0, 8), by_length) == [None] * 3


def lines_with(*losses, first=1):
    """A line for each loss, with seeds from the first one on."""
    return [{"loss": loss, "params": 1, "settings": {"seed": seed}}
            for seed, loss in enumerate(losses, first)]  # fmt: skip


def test_seeds_that_only_one_side_has_do_not_count():
    gap = stats.gap_of(lines_with(1.0, 2.0, 9.0), lines_with(0.5, 1.0))
    assert gap == stats.interval(stats.minus([1.0, 2.0], [0.5, 1.0]))
    by_length = {1: [0.5, 1.0], 2: [0.4, 0.8, 0.7]}
    assert stats.interval(stats.differences_at(1, [1.0, 2.0, 9.0], by_length)) == gap

    diverged = stats.gap_of(lines_with(1.0, None), lines_with(0.5, None))
    assert stats.plus_minus(diverged) == "diverged"
    assert stats.verdict([diverged, (-1.0, 0.1)]) == "undecided"
    assert stats.interval([1.0, math.nan]) is None


def test_tables_leave_out_or_name_what_diverged(monkeypatch):
    def lines(*losses):
        found = [line | {"flops": 9, "steps": 3} for line in lines_with(*losses)]
        return [line | {"curve": [[1000, line["loss"]]]} for line in found]

    theirs = {0.7: lines(2.2, None), 1.0: lines(2.0, 2.1), 1.4: lines(1.8, 1.9)}
    theirs["half"] = lines(None, 2.0)
    ours = {"prenorm": theirs, "nag": {1.0: lines(1.0, 1.1)}, "lns": {1.0: lines(None, 1.0)}}
    trained, ratios = {mode: ({}, of) for mode, of in ours.items()}, dict.fromkeys(ours, (1, 1, 1))
    found = [*judge.compared(trained, ratios)]
    monkeypatch.setattr(tables, "judged", lambda place: (trained, ratios))
    monkeypatch.setattr(tables, "compared", lambda place: found)
    monkeypatch.setattr(tables, "number", lambda *cell: "better")
    fragile, ahead = tables.verdict_facts()
    assert fragile[1] == 0 and ahead == ("ahead after 1,000 steps: better", 1)
    assert [row[:2] for row in tables.at_size()[1]] == [("nag", "Muon"), ("nag", "AdamW")]

    mixed = {"nag": lines(1.0, 1.1, 1.2), "NAG's router 0.2": lines(None, 1.1, 1.2)}
    of_mod = {(name, 4000): of for name, of in mixed.items()}
    monkeypatch.setattr(tables, "lead_lines", lambda what: of_mod)
    monkeypatch.setattr(study, "race", lambda *runs, measure: {})
    head, (row,) = tables.mixtures()
    assert dict(zip(head, row))["at equal steps"] == "diverged" and len(row) == len(head)


def test_differences_are_paired_by_seed_and_not_by_position():
    ours, theirs = lines_with(1.0, 2.0, 4.0), lines_with(0.5, 0.0, 1.0, 7.0)
    assert differences(ours, theirs) == [0.5, 2.0, 3.0]
    assert differences(ours[::-1], [theirs[i] for i in (2, 0, 3, 1)]) == [0.5, 2.0, 3.0]
    assert differences(ours, lines_with(0.5, 0.0, 1.0, first=2)) == [1.5, 4.0]
    no_seed = [{"loss": 1.0, "settings": {}}, {"loss": 2.0, "settings": {}}]
    for bad in (no_seed, [*ours, ours[0]]):
        for pair in ((ours, bad), (bad, ours)):
            with pytest.raises(SystemExit, match="one line for each seed"):
                stats.gap_of(*pair)
    with pytest.raises(SystemExit, match="share fewer than two"):
        stats.gap_of(ours, lines_with(1.0, 2.0, first=3))


def test_a_rehearsal_is_small_and_says_so(place, monkeypatch, capsys):
    loss_of = lambda full: 5.0 + 0.1 * full["seed"] + full["learning_rate"]
    trained = trains(monkeypatch, loss_of)
    same_times = lambda name, runs, threads: dict.fromkeys(runs, (1.0, 1.0, 1.0))
    monkeypatch.setattr(study, "race", same_times)
    monkeypatch.setattr(study, "ROUNDS", study.ROUNDS)
    for name in (*judge.OWN, *judge.FEW):
        monkeypatch.setattr(judge, name, getattr(judge, name))
    monkeypatch.setattr(sys, "argv", ["judge.py", "--rehearse=True"])
    judge.main()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == last == "REHEARSAL, ignore these numbers."
    assert len(trained) <= 27 and all(run["eval_tokens"] == 2048 for run in trained)
    assert not study.read("judge") and study.read("rehearsal_judge")
    seeds = lambda: {run["seed"] for run in trained if run["val_part"] == "report"}
    assert seeds() == {1, 2}
    monkeypatch.setattr(sys, "argv", ["judge.py", "--rehearse=True", "--seeds=3"])
    judge.main()
    assert seeds() == {1, 2, 3}


@cases("argv, message", [
    ("--residual=foo", f"residual='foo': choose one of {', '.join(RESIDUALS)}"),
    ("--residual=prenorm", "residual='prenorm': give a mode that is not the baseline"),
    ("--seeds=100", "seeds=100: give 2 to 99"), ("--min_lr=1e-5", "give --min_lr=None"),
    ("--residual=nag --n_embd=63", "n_embd"),
    ("--residual=nag --hc_streams=2", "hc_streams: no setting of prenorm or nag"),
    ("--residual=lns --gate_lr=0.1", "gate_lr: no setting of prenorm or lns"),
    ("--residual=lns --alpha_warmup_iters=9", "alpha_warmup_iters: no setting of prenorm or lns"),
])  # fmt: skip
def test_the_judge_refuses_what_it_cannot_build_in_one_line(monkeypatch, argv, message):
    for name in judge.OWN:
        monkeypatch.setattr(judge, name, getattr(judge, name))
    monkeypatch.setattr(sys, "argv", ["judge.py", *argv.split()])
    with pytest.raises(SystemExit, match=message) as refused:
        judge.main()
    assert "\n" not in str(refused.value)


def test_a_setting_of_one_mode_is_not_one_of_the_baseline():
    usual = study.parse([judge.SCALE])
    given = usual | {"hc_streams": 4, "gate_lr": 0.1, "alpha_warmup_iters": 9}
    key = lambda scale, mode: study.key(judge.settings(scale, mode, {}, 1))
    assert key(given, "prenorm") == key(usual, "prenorm")
    assert key(given, "ihc") != key(usual, "ihc")
    assert not judge.refusal(**judge.shape_of(given, "prenorm"))
    own = {mode: judge.scale_for(given, mode).keys() - usual.keys() for mode in ("ihc", "nag")}
    assert own["ihc"] == {"residual", "hc_streams", "gate_lr"}
    assert own["nag"] == {"residual", "gate_lr", "alpha_warmup_iters"}


def test_each_start_of_the_output_projections_is_tried_once():
    usual = study.parse([judge.SCALE])
    assert judge.other_starts(usual, "prenorm") == ["plain", "zero"]
    assert judge.other_starts(usual | {"init_out": "plain"}, "prenorm") == ["scaled", "zero"]


def test_a_verdict_that_the_time_ratio_changes_says_so():
    found = {"mode": "nag", "params": 1, "ratio": 1.3, "choice": {}, "diverged": None}
    found |= {"fragile": False, "loss": 1.0, "steps": (0.01, 0.1), "worth": ()}
    times = [(0.02, 0.03), (0.0390, 0.0353), (0.05, 0.03)]
    why = "undecided (differs within the time ratio's interval)"
    assert judge.cells(found | {"times": times})[8] == why
    assert judge.cells(found | {"times": times[:1] * 3})[8] == "undecided"
    assert judge.cells(found | {"times": times[1:2] * 3})[8] == "worse"


@cases("loss, seeds", [(0.02, judge.TUNING), (-0.02, judge.TUNING), (0.02, judge.TUNING[:2])])
def test_defaults_win_at_full_length_if_three_seeds_say_so(loss, seeds):
    """loss: what "zero", the best start of short runs, adds at full length. seeds: with results"""
    scale = study.parse([judge.SCALE])

    def lines_of(runs, look=()):
        if not {run["seed"] for run in runs if run["max_iters"] == 4000} <= {0, *seeds}:
            raise study.NotFinished
        losses = []
        for run in runs:
            zero = loss if run["max_iters"] == 4000 else -0.02
            rate = math.log2(run.get("learning_rate", 0.008) / 0.008) ** 2
            losses.append(1 + 0.1 * rate + zero * (run.get("init_out") == "zero"))
        return [{"loss": each} for each in losses]

    start = {} if loss > 0 and len(seeds) == 3 else {"init_out": "zero"}
    assert judge.tune(scale, "prenorm", lines_of) == {"learning_rate": 0.008} | start


def test_the_judge_tunes_the_rate_of_routers():
    assert not judge.has_gates(**judge.shape_of(study.parse([judge.SCALE]), "prenorm"))
    routed = study.parse([judge.SCALE, "--mod_on=mlp", "--mod_rate=0.2", "--mod_router=learned"])
    assert judge.has_gates(**judge.shape_of(routed, "prenorm"))


def test_the_time_left_agrees_with_the_estimate_until_much_is_measured(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(study.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(study, "devices", lambda: ["cpu", "cpu"])
    monkeypatch.setattr(study, "probe", lambda settings: (0.0, 60.0))
    progress = study.Progress([{}] * 100)
    shown = []
    for _ in range(101):
        now[0] += 60.0  # they are half as fast as expected
        progress.finish({})
        shown.append(str(progress))
    assert shown[0] == "1 of 100, 54 min left"
    assert shown[49] == "50 of 100, 46 min left"
    assert shown[100] == "101 of 101, 0 s left"
    progress.finish({"val_part": "tune"})
    assert str(progress).startswith("102 of 103, ")  # the seeds follow


def test_lead_starts_nothing_without_the_name_of_a_study(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lead.py"])
    with pytest.raises(SystemExit, match="what='': choose from tokens, blocks"):
        lead.main()


def test_ctrl_c_says_at_once_how_to_continue(place, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        study.stop()
    assert stopped.value.code == 130
    assert "the same command continues" in capsys.readouterr().out
    monkeypatch.setattr(study, "train", lambda *_: pytest.fail("a run has started"))
    with pytest.raises(SystemExit, match="toy: stopped"):
        study.run("toy", [{"seed": 1}])


def test_the_baseline_is_trained_as_long_as_the_slowest_mode_needs():
    as_fast, slower = [0.9, 0.95, 1.3], [1.4, 1.6, 1.9]
    assert judge.lengths({"a": as_fast}) == (0.7, 1.4)
    assert judge.lengths({"a": as_fast, "b": slower}) == (0.7, 1.4, 2.0)
    assert judge.lengths({"a": [9, 9, 9]}) == judge.LENGTHS


def test_the_baseline_has_its_own_rate_at_the_shortest_and_the_longest_length():
    asked = []

    def lines_of(runs):
        """The best rate halves whenever the length doubles."""
        asked.extend(runs)
        distance = lambda run: math.log2(run["learning_rate"] * run["max_iters"] / (0.016 * 400))
        return [{"loss": abs(distance(run))} for run in runs]

    scale = study.parse([judge.SCALE, "--max_iters=400"])
    tuned = {"learning_rate": 0.016, "gate_lr": 0.064}
    lengths = (0.5, 1.4, 2.8, 4.0)
    found = judge.choices_at(scale, "prenorm", tuned, lines_of, lengths)
    rates = {at: choice["learning_rate"] for at, choice in found.items()}
    assert rates == {0.5: 0.032, 1.4: 0.016, 2.8: 0.004, 4.0: 0.004}
    assert all(choice["gate_lr"] == 4 * choice["learning_rate"] for choice in found.values())
    assert {run["max_iters"] for run in asked} == {200, 1600}
    assert {run["seed"] for run in asked} == {0}
    assert judge.choices_at(scale, "nag", tuned, lines_of, ()) == {}


def test_the_figure_cuts_no_interval_and_hides_no_point(tmp_path, monkeypatch):
    drawn = []

    def canvas(*size, real=plot.canvas, **font):
        drawn.append(real(*size, **font))
        return drawn[-1]

    monkeypatch.setattr(plot, "canvas", canvas)
    for steps, time in (((0.4, 0.1), (0.3, 0.2)), ((-0.5, 0.3), None), ((0.0, 0.0), (0.0, 0.0))):
        times = [time] * 3 if time else []
        judge.draw(tmp_path / "b.png", [{"mode": "keel", "steps": steps, "times": times}], {})
        axes = drawn[-1][1]
        left, right = axes.get_xlim()
        ends = [middle + sign * half for middle, half in (steps, time or steps) for sign in (-1, 1)]
        assert left < min(0, *ends) and max(0, *ends) < right and not axes.texts

    gaps = {"nag": (-0.02, 0.01), "bhyt": (0.01, 0.005), "dyt": (0.04, 0.02), "none": (0.4, 0.1)}
    found = [{"mode": mode, "steps": gap, "times": [gap] * 3} for mode, gap in gaps.items()]
    found.append({"mode": "lns", "steps": None, "times": []})  # it diverged
    judge.draw(tmp_path / "out" / "a.png", found, {"nag": "NAG"})
    figure, axes = drawn[-1]
    left, right = axes.get_xlim()
    lines = [part for bars in axes.collections for part in bars.get_segments()]
    assert len(lines) == 2 * 3
    assert all(left < x < right for line in lines for x, _ in line)
    arrows = [text.get_text().split()[0] for text in axes.texts]
    assert sorted(arrows) == ["+0.400", "+0.400"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["NAG", "bhyt", "dyt", "none"]
    legend = figure.legends[0].get_window_extent()
    assert legend.y0 >= axes.get_window_extent().y1
    assert (tmp_path / "out" / "a.png").stat().st_size > 0


class Hangs:
    """A process of gpu.py. Only the second one ends by itself."""

    exitcode = None

    def __init__(self, target, args):
        self.number, _, _, self.out, self.ready, _ = args

    def start(self):
        self.ready.value = 1

    def is_alive(self):
        return self.exitcode is None

    def join(self, timeout):
        if self.number == 1:
            self.exitcode = 0
            self.out.write_text('{"settings": {}, "train": 2}')

    def terminate(self):
        self.exitcode = -15


def test_gpu_py_goes_on_after_a_process_that_hangs(tmp_path, monkeypatch, capsys):
    value = lambda kind, first: SimpleNamespace(value=first)
    several = SimpleNamespace(Process=Hangs, RawValue=value)
    fakes = {"get_context": lambda kind: several, "DEVICE": "cpu", "patience": 0}
    fakes |= {"PROCESSES": {"hangs": "", "ends": ""}}
    fakes |= {"FOLDER": tmp_path, "RESULT": tmp_path / "all.json"}
    for name, fake in fakes.items():
        monkeypatch.setattr(gpu, name, fake)
    monkeypatch.setattr(gpu.bench, "floors", lambda *how: (1e9, 1e9))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--patience=7"])
    gpu.main()
    told = capsys.readouterr().out.splitlines()
    assert told == ["hangs: failed, not done after 7 s", "ends: measured"]
    assert [*json.loads((tmp_path / "all.json").read_text())] == ["ends"]


@cases("total, micro_steps", [(None, 1), (256, 2), (512, 4), (64, 1)])
def test_a_timed_step_has_the_micro_steps_of_training(monkeypatch, total, micro_steps):
    rows, updates = [], []

    class Counted(GPT):
        def forward(self, idx, targets):
            rows.append(len(idx))
            return super().forward(idx, targets)

        def after_step(self):
            updates.append(1)
            super().after_step()

    monkeypatch.setattr(study.bench, "GPT", Counted)
    small = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=32 --batch_size=4 --compile=False"
    settings = study.parse([*small.split(), f"--total_batch_tokens={total}"])
    run = study.stepper(study.DEFAULTS | settings, "cpu")
    updates.clear()  # a new model calls after_step once
    run()
    assert len(updates) == study.STEPS
    assert len(rows) == study.STEPS * micro_steps
    assert sum(rows) * 32 == study.STEPS * (total or 4 * 32)


def test_a_timed_step_computes_as_the_run_does(monkeypatch):
    asked, model = [], SimpleNamespace()
    stepper = lambda *how: asked.append(how) or (None, model, None)
    monkeypatch.setattr(study.bench, "stepper", stepper)
    how = dict(dtype="bfloat16", optimizer="adamw", compile=True, loss_chunk=16, recompute=True)
    study.stepper(study.DEFAULTS | how, "cpu")
    assert asked[0][3:] == ("bfloat16", "adamw", 1, True)
    assert (model.loss_chunk, model.recompute) == (16, True)


def test_a_race_frees_its_models_for_the_runs_in_other_processes(place, monkeypatch):
    class Step:
        def __init__(self, *how):
            self.itself = self  # as in a compiled module
            models.append(weakref.ref(self))

    models, freed = [], []
    monkeypatch.setattr(study, "stepper", Step)
    times = lambda candidates, rounds: dict.fromkeys(candidates, [1.0] * 5)
    monkeypatch.setattr(study.bench, "race", times)
    alive = lambda: freed.append([model() for model in models])
    monkeypatch.setattr(torch.cuda, "empty_cache", alive)
    runs = {"one": {"residual": "prenorm"}, "other": {"residual": "nag"}}
    study.race("judge", runs, threads=torch.get_num_threads())
    assert freed == [[None, None]]


def test_times_with_other_threads_or_on_another_cpu_are_kept_apart(place, monkeypatch):
    used, usual = [], torch.get_num_threads()

    def timed(candidates, rounds):
        used.append(torch.get_num_threads())
        return {"one": [1.0] * 5, "other": [1.0 + 0.1 * used[-1]] * 5}

    monkeypatch.setattr(study, "stepper", lambda full, device: None)
    monkeypatch.setattr(study.bench, "race", timed)
    runs = {"one": {"residual": "prenorm"}, "other": {"residual": "nag"}}
    try:
        found = [study.race("judge", runs, threads=n)["other"] for n in (1, 2, 1, 2)]
        assert used == [1, 2]
        study.race("judge", {name: run | {"recompute": True} for name, run in runs.items()})
        assert used == [1, 2, 1]
        monkeypatch.setattr(study.machine, "device_name", lambda device: "another CPU")
        study.race("judge", runs)
    finally:
        torch.set_num_threads(usual)
    assert used == [1, 2, 1, 1]
    with pytest.raises(SystemExit, match="its times are of different machines"):
        study.race("judge", runs, measure=False)
    assert [ratio for _, ratio, _ in found] == pytest.approx([1.1, 1.2, 1.1, 1.2])


def test_the_lead_is_paired_by_seed(place, monkeypatch, capsys):
    loss = {"prenorm": 2.0, "nag": 1.9, "bhyt": 1.95}

    def loss_of(full):
        seed = 0.1 * full["seed"] + 0.001 * full["seed"] ** 2 * (full["residual"] == "nag")
        return loss[full["residual"]] - math.log(full["max_iters"]) + seed

    trained = trains(monkeypatch, loss_of)
    for key in ("what", "record"):
        monkeypatch.setattr(lead, key, getattr(lead, key))
    plan = dict.fromkeys(("prenorm", "nag", "bhyt")), lead.of("max_iters", 1000, 8000)
    monkeypatch.setitem(lead.PLANS, "tokens", plan)
    monkeypatch.setattr(sys, "argv", ["lead.py", "--what=tokens"])
    lead.main()
    printed = capsys.readouterr().out.splitlines()
    estimate = r"about .* to train (\d+) runs of bhyt, nag, prenorm, 2 at a time"
    runs = int(re.fullmatch(estimate, printed[0])[1])
    assert 0.3 < runs / len(trained) < 1  # no rate is best here: the grids grow to the end
    assert sum(line.startswith("about") for line in printed) == 1
    gap = stats.interval([-0.1 + 0.001 * seed**2 for seed in lead.SEEDS])
    assert f"nag 8000: {stats.plus_minus(gap)} from prenorm" in printed
    assert f"bhyt 1000: {stats.plus_minus((-0.05, 0.0))} from prenorm" in printed
    lead.main()  # nothing is left to train
    assert capsys.readouterr().out.splitlines()[-4:] == printed[-4:]


def test_lead_takes_what_the_judge_found_on_another_kind_of_machine(place, monkeypatch):
    loss_of = lambda full: abs(math.log(full["learning_rate"] / 0.004))
    trained = trains(monkeypatch, loss_of)
    found = judge.tune(lead.SCALE, "prenorm", partial(study.run, "judge"))
    n = len(trained)
    monkeypatch.setattr(study, "place", lambda settings: {"data": "data", "computes": "cuda"})
    assert lead.as_judged(lead.SCALE, "prenorm", study.run) == found and len(trained) == n
    assert lead.as_judged(lead.SCALE, "nag", study.run)["learning_rate"] == 0.004
    assert {run["residual"] for run in trained[n:]} == {"nag"}


def test_a_gpu_trains_several_runs_at_a_time(monkeypatch):
    monkeypatch.setattr(study.machine, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(study, "PER_GPU", 2)
    assert sorted(study.devices.__wrapped__()) == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@cases("what, value", [("tokens", 16000), ("blocks", 32)])
def test_long_and_deep_runs_use_the_rate_that_is_best_at_half_of_that(
    place, monkeypatch, what, value
):
    best = {4000: 0.016, 8000: 0.004}

    def loss_of(full):
        size = full["max_iters"] * (2 if full["n_layer"] == 16 else 1)
        return abs(math.log(full["learning_rate"] / best.get(size, 0.008)))

    trained = trains(monkeypatch, loss_of)
    largest = lead.PLANS[what][1][value]
    runs = lead.runs_of("prenorm", None, largest, study.run)
    assert {run["learning_rate"] for run in runs} == {0.004}
    assert {run["seed"] for run in trained} == {*judge.TUNING}
    (axis,) = largest
    assert max(run[axis] for run in trained) == lead.LARGEST[axis]


def test_a_change_is_compared_with_the_mode_that_it_changes():
    changes = lead.PLANS["mod"][0]
    assert lead.base_of(changes, "random router 0.4") == "nag"
    assert lead.base_of(changes, "learned router on pre-norm 0.4") == "prenorm"
    of_streams = lead.PLANS["streams"][0]
    assert lead.base_of(of_streams, "ihc with one stream") == "ihc with four streams"
    assert lead.base_of(of_streams, "ihc with four streams") == "prenorm"
    assert lead.base_of(lead.PLANS["tokens"][0], "nag") == "prenorm"


@cases("what", lead.PLANS)
def test_the_names_of_a_plan_are_different_models(what):
    changes, settings_of = lead.PLANS[what]
    scale, keys = study.parse([judge.SCALE]) | next(iter(settings_of.values())), set()
    for name, change in changes.items():
        own = {"residual": name} if change is None else {"residual": "nag"} | change
        with torch.device("meta"):
            GPT(GPTConfig(**judge.shape_of(scale | own, own["residual"])))
        keys.add(study.key(scale | own))
    assert len(keys) == len(changes)


def test_experts_of_all_shapes_have_equal_parameters():
    with torch.device("meta"):
        for ratio, shape in lead.OF_EXPERTS.items():
            model = GPT(GPTConfig(**judge.shape_of(lead.SCALE | shape, "prenorm")))
            assert abs(shape["n_embd"] / shape["n_layer"] - ratio) < 0.5
            assert 1.11e6 < model.num_params() < 1.16e6
            assert 0.51e6 < model.num_params(active=True) < 0.54e6


# ------------------------------------------------------------------------------------------------
# The pages


def pages():
    return {page: open(f"{HERE}/{page}").read() for page in tables.PAGES}


def test_the_tables_and_numbers_of_the_pages_are_those_of_the_results():
    for page, text in pages().items():
        assert tables.filled(text) == text, f"{page}: run python runs/tables.py"


def test_every_interval_in_the_prose_is_in_a_table_or_marked():
    interval = re.compile(r"[+-]\d\.\d+ ± \d\.\d+")
    known, prose = "", ""
    for text in pages().values():
        for line in text.splitlines(keepends=True):
            if line.startswith("|"):
                known += line
            else:
                known += "".join(mark[0] for mark in tables.NUMBER.finditer(line))
                prose += tables.NUMBER.sub("", line)
    found = set(interval.findall(prose))
    assert found and found <= set(interval.findall(known))
    assert len(interval.findall(prose)) == prose.count("±")


@cases("mark, message", [
    ("<!-- table: mode -->\n<!-- end -->", "no table 'mode': choose from modes, "),
    ("<!-- modus/nag/loss -->1<!-- -->", "no table 'modus': choose from modes, "),
    ("<!-- modes/nag/los -->1<!-- -->", "modes/nag/los is not one cell of this table: rows "),
    ("<!-- modes/nagg/loss -->1<!-- -->", "; columns mode, seeds, loss, "),
    ("<!-- at size/nag/FLOPs -->1<!-- -->", "at size/nag/FLOPs is not one cell"),
    ("<!-- modes/nag/loss -->1", "a mark has no end"),
    ("<!-- table: modes -->\n", "a mark has no end"),
])  # fmt: skip
def test_an_unknown_mark_is_an_error_that_lists_the_known_ones(mark, message):
    with pytest.raises(SystemExit, match=re.escape(message)):
        tables.filled(f"Text {mark} text\n")


def empty_caches(monkeypatch):
    """Empty ones, until the test ends: what other tests have in them stays."""
    for name in ("judged", "compared", "table_of"):
        monkeypatch.setattr(tables, name, cache(getattr(tables, name).__wrapped__))


def test_a_mode_with_a_setting_has_a_row_once_its_runs_have_finished(place, monkeypatch):
    """Fabricated runs, in a temporary folder."""

    def loss_of(full):
        n = full["hc_streams"] or 2
        return 1 + 0.01 * full["seed"] - 0.001 * n * full["seed"] % 7

    trains(monkeypatch, loss_of)
    monkeypatch.setattr(tables, "JUDGED", {
        "prenorm": ("prenorm", {}), "ihc": ("ihc", {}), "ihc, 4 streams": ("ihc", {"hc_streams": 4})
    })  # fmt: skip
    scale, lines_of = tables.scale_of("muon"), partial(study.run, "judge")
    time = {"computes": study.place(scale)["computes"], "ratio": [1.1, 1.2, 1.3]}
    time |= {"threads": 1, "machine": "a CPU"}

    def judge_now(mode, change):
        judge.train(scale | change, mode, lines_of, 5, judge.LENGTHS[:3])
        pair = [study.key(judge.scale_for(scale | change, each)) for each in ("prenorm", mode)]
        study.append("judge", {"race": pair} | time)

    for change, rows in (({}, ["ihc"]), ({"hc_streams": 4}, ["ihc", "ihc, 4 streams"])):
        judge_now("prenorm", {})
        judge_now("ihc", change)
        empty_caches(monkeypatch)
        table = tables.modes("muon")[1]
        assert sorted(row[0] for row in table[3:]) == rows
        assert all(row[7] == "1.20" for row in table[3:])


@pytest.fixture
def toy_mode(monkeypatch):
    """One more design, without results."""

    class Toy(RESIDUALS["prenorm"]):
        pass

    empty_caches(monkeypatch)
    monkeypatch.setitem(RESIDUALS, "toy", Toy)
    monkeypatch.setitem(tables.JUDGED, "toy", ("toy", {}))


def test_a_design_without_results_changes_only_the_number_of_designs(toy_mode):
    for text in pages().values():
        text = re.sub(r"(<!-- facts/designs/value -->)\d+", r"\g<1>0", text)
        filled = re.sub(r"(<!-- facts/designs/value -->)\d+", r"\g<1>0", tables.filled(text))
        assert filled == text
    assert tables.number("facts", "designs", "value") == str(len(RESIDUALS))
    row = "| A toy | `toy` | x | <!-- modes/toy/verdict -->x<!-- --> |\n"
    assert "-->not judged yet<!--" in tables.filled(row)
    assert tables.names_in_words(row) == {"toy": "A toy"}
    assert "toy" not in {cells[0] for cells in tables.modes("muon")[1]}
    with pytest.raises(SystemExit, match="modes/toy/verdit is not one cell"):
        tables.filled(row.replace("verdict", "verdit"))
    test_sentences_written_by_hand_agree_with_the_results()
    test_readme_has_a_row_for_each_judged_mode()


def test_readme_quotes_the_races_with_others_as_measured():
    speed, readme = study.ROOT / "results" / "speed", " ".join(pages()["README.md"].split())
    for name, file in (("nanoGPT", "nanogpt_loss_8x128.txt"), ("nanochat", "nanochat_8x128.txt")):
        end = r"(\S+) after (\d+) s\b"
        ends = rf"{name}'s.*?: {end} \(ours.*?: {end}"
        quoted = re.search(ends, readme).groups()
        race = (speed / file).read_text()
        end = r"^{}: (\S+) after \d+ steps, (\d+) s$"
        theirs = min(re.findall(end.format(rf"{name.lower()} at \S+"), race, re.M))
        (ours,) = re.findall(end.format("ours"), race, re.M)
        assert quoted == theirs + ours


def test_readme_has_a_row_for_each_judged_mode():
    """A design without results may have one."""
    readme = pages()["README.md"]
    rows = [line for line in readme.splitlines() if re.search(r"\| `\w+` \|", line)]
    named = [re.search(r"`(\w+)`", row)[1] for row in rows]
    assert len(named) == len({*named})
    judged = {tables.JUDGED[name][0] for name in tables.judged("muon")[0]}
    assert judged <= {*named} <= RESIDUALS.keys()
    assert all(row.count("|") == 7 for row in rows)
    assert tables.names_in_words(readme)["nag"] == "NAG, norm-agnostic"


def test_a_finer_grid_of_rates_would_gain_little():
    """A parabola through the losses at half, whole and twice the rate: "at most 0.001 lower"."""
    for place, mode in product(("muon", "wider"), ("prenorm", "ihc", "nag", "wide")):
        change, (choice, _) = tables.JUDGED[mode][1], tables.judged(place)[0][mode]
        scale, lines_of = tables.scale_of(place) | change, partial(study.find, "judge")
        choices = judge.nearby(choice)
        half, whole, twice = judge.means(scale, mode, choices, lines_of, 1.0, judge.TUNING)
        assert (twice - half) ** 2 / (8 * (twice + half - 2 * whole)) < 0.001


def test_sentences_written_by_hand_agree_with_the_results():
    head, rows = tables.modes("muon")
    better = {row[0] for row in rows if row[head.index("after Holm")] == "better"}
    fragile = "wide, 2 streams"  # "one of them from better"
    six = {"mhc", "ihc", "hc", "wide", "attnres", "attnres_block"}
    assert better == six | {"ihc, 4 streams", fragile}
    for mode in better:
        word = tables.number("modes", mode, "verdict")
        assert word == ("better, fragile" if mode == fragile else "better")
    at_time = {row[0]: row[head.index("verdict at equal time")] for row in rows}
    ahead = {mode for mode, verdict in at_time.items() if verdict == "better"}
    assert ahead == {"ihc"} and tables.number("modes", "ihc", "after Holm, time") == "undecided"
    for seeds in ("new seeds", "16 seeds"):
        fact = f"ihc, {seeds}, verdict"
        assert tables.number("facts", fact, "value") == "better"
    assert tables.number("facts", "ihc, longer, verdict", "value") == "undecided"
    fact = tables.number("facts", "ihc, longer, at equal steps", "value")
    gap, half = map(float, fact.split(" ± "))
    assert gap < -half  # "at equal steps, better"
    for mode in ("ihc", "wide"):
        assert tables.number("english", mode, "verdict at equal time") == "undecided"
        assert tables.number("english", mode, "verdict") == "better"
    for column, word in (("verdict", "better"), ("verdict at equal time", "undecided")):
        assert tables.number("wider", "wide", column) == word
    assert tables.number("wider", "nag", "verdict") == "better"
    of_nag = tables.number("wider", "nag", "verdict at equal time")
    assert of_nag == "undecided (differs within the time ratio's interval)"
    for mode in ("ihc", "attnres_block"):
        assert tables.number("wider", mode, "after Holm, time") == "better"
    assert {mode for mode in better if at_time[mode] == "undecided"} == {
        "ihc, 4 streams", "attnres", "attnres_block", "wide", fragile}  # fmt: skip
    at_flops = {row[0]: row[-2:] for row in tables.at_size()[1] if row[0] in better}
    assert {verdict for verdict, _ in at_flops.values()} == {"better"}
    assert {mode for mode in better if at_flops[mode][1] == "undecided"} == {"hc", "mhc"}
    theirs = tables.judged_lines("muon", "prenorm")
    early = {mode: tables.leads(tables.judged_lines("muon", mode), theirs, [1000])
             for mode in tables.judged("muon")[0]}  # fmt: skip
    assert round(early["nag"][0], 3) == -0.077
    assert early["nag"] < [0] and tables.number("modes", "nag", "after Holm") == "undecided"
    theirs = tables.judged("muon")[0]["prenorm"][1]
    by_length = {n: stats.losses_of(of) for n, of in theirs.items() if isinstance(n, float)}
    for mode, mixing, word in (  # 3 x 2 x 24 C for hc and mhc, in 16 sublayers: "4.5%"
        ("hc", 0.045, "undecided"), ("mhc", 0.045, "undecided"), ("ihc", 0.015, "better"),
        ("attnres", 0.05, "better"), ("attnres_block", 0.03, "better"), ("wide", 0.015, "better"),
    ):  # fmt: skip
        ours = tables.judged_lines("muon", mode)
        flops = tables.flops_of_step(ours) / tables.flops_of_step(theirs[1.0])
        at_flops = stats.differences_at(flops + mixing, stats.losses_of(ours), by_length)
        gap = stats.interval(at_flops)
        assert stats.verdict([gap]) == word
    gap, half = map(float, tables.number("facts", "ihc, 4 streams minus mhc", "value").split(" ± "))
    lead = -float(tables.number("modes", "mhc", "at equal steps").split()[0])
    assert half < gap < 0.25 * lead  # "Most of this gain needs no mixing of streams"
    worth = {row[0]: row[head.index("worth in steps")].split()[0] for row in rows if row[0] in six}
    assert worth["mhc"] == max(worth.values()) and worth["attnres_block"] == min(worth.values())

    adamw, muon = ({mode: lines[1.0] for mode, (_, lines) in tables.judged(name)[0].items()}
                   for name in ("adamw", "muon"))  # fmt: skip
    found = differences(adamw["nag"], adamw["prenorm"])
    assert len(found) == 8 and max(found) < 0  # "with every seed"
    for mode in ("nag", "prenorm"):  # "With Muon both end lower still"
        assert max(stats.losses_of(muon[mode])) < min(stats.losses_of(adamw[mode]))
    for mode in ("nag", "ihc"):
        assert tables.number("adamw", mode, "after Holm") == "better"
        assert tables.number("adamw", mode, "verdict") == "better"  # not fragile
    for column, word in (("verdict at equal time", "better"), ("after Holm, time", "undecided")):
        assert tables.number("adamw", "ihc", column) == word
    for rate in ("half", "twice"):
        assert tables.number("adamw", f"prenorm at {rate} its rate", "verdict") == "worse"
    assert tables.number("modes", "prenorm at half its rate", "verdict") == "undecided"

    of_blocks = tables.lead_lines("blocks", "adamw")
    for blocks in (32, 16, 4):
        nag, prenorm = (stats.losses_of(of_blocks[mode, blocks]) for mode in ("nag", "prenorm"))
        assert len(nag) == len(prenorm) == 6 and max(nag) < min(prenorm)  # "below all of"
    deep = sum((of_blocks[mode, n] for mode in ("nag", "prenorm") for n in (16, 32)), [])
    assert all(tables.copies(line) for line in deep)  # "all copy"
    assert tables.number("depths", "nag AdamW", "when doubled").startswith("+")  # "no growth"
    fact = tables.number("facts", "change of NAG's lead from 8 to 32 blocks", "value")
    change, half = map(float, fact.split(" ± "))
    assert abs(change) < half  # "we see no change"
    for ends, less in (
        ("with 32 blocks minus 2.4 times that with 8", True),  # "grows less"
        ("at ratio 19 minus 2.4 times that at 80", False),
    ):  # "do not exclude"
        fact = tables.number("facts", f"NAG's lead {ends}", "value")
        change, half = map(float, fact.split(" ± "))
        assert change > 0 and (change > half) == less
    copy = [tables.copies(line) for line in of_blocks["prenorm", 4]]
    by_loss = sorted(zip(prenorm, copy))
    assert [each for _, each in by_loss] == sorted(copy, reverse=True)  # "its others end highest"

    shallow = tables.lead_lines("blocks", "muon")
    lines = shallow["nag", 4] + shallow["prenorm", 4]
    assert all(tables.copies(line) for line in lines)
    for column in ("4 blocks", "8 blocks", "16 blocks", "when doubled"):
        gap, half = tables.number("depths", "nag Muon", column).split(" ± ")
        assert abs(float(gap)) < float(half)  # "neither a lead nor a change of it"

    gaps = {}
    for (name, _), lines in tables.lead_lines("mod").items():
        if "on pre-norm" not in name and name not in ("nag", "prenorm"):
            gaps[name] = tables.at_equal_flops(tables.with_further_seeds(lines))
    corrected = stats.holm({name: [(stats.interval(gap), len(gap))] for name, gap in gaps.items()})
    for router, rate in product(("NAG's", "learned"), (0.2, 0.4)):
        name = f"{router} router {rate}"
        assert corrected[name] == "better"  # "also after Holm's correction"
        last = stats.interval(gaps[name][3:])
        assert stats.verdict([last]) == "better"  # "also with the last three seeds alone"
        assert tables.number("mixtures", name, "verdict at equal time") == "undecided"

    for name, better in (
        ("NAG's router 0.4 minus learned router on pre-norm 0.4", True),
        ("learned router 0.4 minus learned router on pre-norm 0.4", True),
        ("NAG's router 0.4 minus learned router 0.4", False),
        ("NAG's router 0.2 minus learned router 0.2", True),
        ("NAG's router minus 5 blocks", True),
    ):  # "pre-norm with a learned router ends higher than NAG with either router"
        gap, half = map(float, tables.number("facts", name, "value").split(" ± "))
        assert better == (gap < -half) and (better or abs(gap) < half)

    for gaps in [gaps for _, optimizer, *gaps in tables.early()[1] if optimizer == "Muon"]:
        first, last = gaps[:4], gaps[-1]  # up to 1,000 steps, and 4,000
        assert min(map(float, gaps)) == min(map(float, first)) < 4 * float(last)  # "they shrink"
    slow = tables.number("early", "prenorm at half its rate Muon", "step 700")
    assert float(slow) < -0.05  # "at half that rate it leads early, too"
    for mode, share in (("nag", 0.85), ("ihc", 0.5)):  # NAG by as much at pre-norm's rate
        names = f"{mode} Muon", f"{mode} at prenorm's rate"
        own, same = (float(tables.number("early", name, "step 1,000")) for name in names)
        assert same < share * own
        assert float(tables.number("early", names[1], "step 4,000")) > -0.005  # "lost"

    lines = tables.lead_lines("tokens")
    half = "prenorm at half the rate"
    for name, steps in (("prenorm", 4000), (half, 8000), (half, 16000)):
        losses = sorted(stats.losses_of(lines[name, steps]))
        low, second, high = losses[0], losses[-2], losses[-1]
        middle = statistics.median(losses)
        assert high - middle > 2 * (middle - low)  # "Bad seeds"
        assert high - second > 1.5 * (second - low)  # "far above the others"
    repeated = {tuple(line["settings"].get(key, "prenorm") for key in ("residual", "seed")):
                line["loss"] for line in study.finished("float32").values()
                if line["settings"]["val_part"] == "report"}  # fmt: skip
    bad = {seed for (mode, seed), loss in repeated.items() if mode == "prenorm" and loss > 1.005}
    assert bad == {12, 14} and sorted(repeated.values())[-3] < 0.99  # "There seed 14 is bad, too"
    for mode, steps in (("mhc", 8000), ("attnres", 4000), ("attnres", 8000)):
        gaps = differences(lines[mode, steps], lines["prenorm", steps])
        assert max(gaps) < 0  # "lower than pre-norm with every seed"
    assert sum(line["loss"] > 1.2 for line in lines["nag", 1000]) == 2  # "bad for two"


def test_english_keeps_each_paragraph_of_prose_once(tmp_path, monkeypatch, capsys):
    line = "The {} line of the page, which is for a reader."
    a, b, c, d = map(line.format, ("one", "two", "three", "four"))
    files = {
        "doc/a/copyright": "Files: *\nLicense: MIT\n",
        "doc/a/index.html": f"<p>{a}</p><pre>{b}</pre>int x = 1;",
        "doc/a/main.c": b,
        "doc/a/README": f"{a}\n\n{b}\n\nint x = 1;",
        "doc/b/copyright": "See /usr/share/common-licenses/GPL-2.",
        "doc/b/changelog": d,
        "man/man1/b.1.gz": f".SH NAME\nb\n.PP\n{c}\n.B it and the \\fIend\\fP\n.nf\nint x = 1;",
        "doc/c/copyright": "All rights reserved.",
        "doc/c/README": d,
    }
    for name, text in files.items():
        path, raw = tmp_path / name, text.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        package = "b" if name.startswith("man") else name[4]
        with open(tmp_path / f"{package}.list", "a") as file:
            file.write(f"{path}\n")
    main = runpy.run_path(f"{HERE}/runs/english.py")["main"]
    own = main.__globals__
    here = {"OUT": tmp_path, "DPKG": tmp_path, "LEAST": 1}
    for place in ("PLACES", "COPYRIGHT"):
        here[place] = own[place].replace("/usr/share", str(tmp_path))
    own.update(here)
    monkeypatch.setattr(sys, "argv", ["english.py"])
    main()
    lines = (tmp_path / "english.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [a, b, f"{c} it and the end"]
    report = json.loads((tmp_path / "english.licences.json").read_text())
    named = {name: each["licences"] for name, each in report.items()}
    assert named == {"a": ["MIT"], "b": ["GPL-2"]}
    assert "of 2 packages" in capsys.readouterr().out
