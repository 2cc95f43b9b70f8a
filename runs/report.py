"""
Write RESULTS.md, its figures, README's first page and the verdicts in README's table of modes.

    python runs/report.py

report.md has the text, with placeholders such as {table}. For each of its sections, SECTIONS names
a function that returns the values of the placeholders, or None to leave the section out.
"""

import json
import math
import re
import statistics
import textwrap
from collections import defaultdict
from contextlib import suppress
from functools import cache, partial
from itertools import groupby, product

import claims
import classroom
import convert
import figures
import judge
import lead
import recipe
import study
from study import (
    ROOT,
    NotFinished,
    find,
    gap_at,
    gap_of,
    must_find,
    paired,
    plus_minus,
    read,
    table,
)

from depth import DEAD
from model import RESIDUALS

BAD_SEED = "After 8, one of these seeds of pre-norm ends far above the others."
RESULTS, SPEED = ROOT / "results", ROOT / "results" / "speed"
SEEDS = {"muon": judge.seeds, "adamw": 3}  # seeds of the judge's runs, with each optimizer


# ------------------------------------------------------------------------------------------------
# The modes


def scale_of(optimizer):
    return study.parse([judge.SCALE, f"--optimizer={optimizer}"])


@cache
def judged(optimizer="muon"):
    """({mode: what judge.train returns}, {mode: median_interval of its time}) of the judged modes.

    Empty if the baseline is not among them.
    """
    scale, trained = scale_of(optimizer), {}
    for mode in RESIDUALS:
        with suppress(NotFinished):
            lines_of = partial(must_find, "judge")
            trained[mode] = judge.train(scale, mode, lines_of, SEEDS[optimizer])
    if judge.baseline not in trained:
        return {}, {}
    choice, theirs = trained[judge.baseline]
    for length in judge.LENGTHS:
        runs = judge.of_seeds(scale, judge.baseline, choice, SEEDS[optimizer], length)
        with suppress(NotFinished):
            theirs[length] = must_find("judge", runs)
    return trained, study.race("judge", judge.timed(scale, trained), measure=False)


@cache
def compared(optimizer="muon"):
    """What judge.compare returns, for all judged modes."""
    return [*judge.compared(*judged(optimizer))]


def core_hours(*studies):
    """The time of all steps in these files, without evaluations, compilation and restarts."""
    lines = [line for study in studies for line in read(study) if line.get("step_s")]
    return sum(line["steps"] * line["step_s"] for line in lines) / 3600


def modes():
    """The verdicts of runs/judge.py, and what the models look like inside."""
    trained, found = judged()[0], by_difference()
    if not found:
        return None
    better, worse = corrected()
    head = ("mode", "norm growth", "angle to embedding (degrees)", "attention to the first token")
    head += ("largest feature / rms",)
    firsts = {mode: lines[1.0][0] for mode, (_, lines) in trained.items()}
    inside = [(mode, *inside_cells(line)) for mode, line in firsts.items() if "depth" in line]
    return {
        "seeds": judge.seeds,
        "tune_tokens": judge.TUNE_TOKENS,
        "hours": math.floor(core_hours("judge", "lead")),
        "half_rate": tuning_in_words(found),
        "corrected": f"{listed(better)} better and {len(worse)} worse",
        "uncommitted": uncommitted(),
        "larger": larger_in_words(),
        "verdicts": table(judge.HEAD, [baseline_cells(), *map(judge.cells, found)]),
        "tuning": tuning(trained),
        "inside": table(head, inside),
    }


def by_difference(optimizer="muon"):
    """What judge.compare returns, from the best mode at equal steps to the worst."""
    return sorted(compared(optimizer), key=lambda each: each["steps"] or (math.inf, 0))


def better_modes():
    """What judge.compare returns, for the modes that are better at equal steps."""
    return [
        each
        for each in by_difference()
        if each["steps"] and judge.verdict([each["steps"]]) == "better"
    ]


def baseline_cells(optimizer="muon"):
    """The baseline's row in a table of verdicts."""
    choice, lines = judged(optimizer)[0][judge.baseline]
    own = {"mode": judge.baseline, "params": lines[1.0][0]["params"], "choice": choice}
    own |= {"loss": mean_of(lines[1.0], "loss"), "steps": (0.0, 0.0), "ratio": 1.0}
    mode, params, loss, *_, tuned = judge.cells(own | {"times": [], "diverged": None})
    return [mode, params, loss, "", "the baseline", "1.00", "", "", tuned]


def tuning_in_words(found):
    """What a badly tuned baseline changes, if that was measured."""
    if (half := at_half_the_rate()) is None:
        return ""
    cost, turned = half
    differ = f"{len(turned)} of {len(found)} verdicts at equal steps differ ({listed(turned)})"
    return f" Half its learning rate costs pre-norm {plus_minus(cost)}; against it, {differ}."


def survivors():
    """The modes that differ from the baseline at equal steps after Holm's correction."""
    gaps = {each["mode"]: each["steps"] for each in compared() if each["steps"]}
    return holm(gaps, judge.seeds)


def holm(gaps, seeds):
    """The names whose difference is not 0 after Holm's correction. gaps: {name: interval}."""
    values = {name: study.p_value(gap, seeds) for name, gap in gaps.items()}
    rejected = []
    for i, name in enumerate(sorted(values, key=values.get)):
        if values[name] > 0.05 / (len(values) - i):
            break
        rejected.append(name)
    return rejected


def corrected():
    """(the better modes, the worse ones) after that correction, the best mode first."""
    kept = survivors()
    gaps = {each["mode"]: each["steps"][0] for each in by_difference() if each["mode"] in kept}
    return [m for m in gaps if gaps[m] < 0], [m for m in gaps if gaps[m] > 0]


def uncommitted():
    """The share of the judge's runs that started with uncommitted changes."""
    commits = [line["commit"] for line in read("judge") if "loss" in line]
    return statistics.mean("+changes" in str(each) for each in commits)


def larger_in_words():
    """The modes with clearly more parameters than the baseline."""
    counts = {mode: lines[1.0][0]["params"] for mode, (_, lines) in judged()[0].items()}
    more = {mode: count / counts[judge.baseline] - 1 for mode, count in counts.items()}
    shown = [f"`{mode}` {share:.0%}" for mode, share in more.items() if share > 0.02]
    return f" Some modes have more parameters: {enumerated(shown)}." if shown else ""


def listed(names):
    """`a`, `b` and `c`"""
    return enumerated([f"`{name}`" for name in names] or ["none"])


def enumerated(words):
    """a, b and c"""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


@cache
def slower_baseline():
    """The lines of pre-norm at half its tuned learning rate, or None."""
    choice = judged()[0][judge.baseline][0]
    slower = judge.with_rate(choice, choice["learning_rate"] / 2)
    runs = judge.of_seeds(scale_of("muon"), judge.baseline, slower, judge.seeds)
    lines = find("judge", runs)
    return None if None in lines + judge.losses(lines) else lines


def at_half_the_rate():
    """(what half its rate costs pre-norm, the modes with another verdict against that pre-norm).

    None if that was not trained.
    """
    trained = judged()[0]
    if (slower := slower_baseline()) is None:
        return None
    turned = []
    for each in by_difference():
        if each["steps"]:
            gap = gap_of(trained[each["mode"]][1][1.0], slower)
            if judge.verdict([gap]) != judge.verdict([each["steps"]]):
                turned.append(each["mode"])
    return gap_of(slower, trained[judge.baseline][1][1.0]), turned


def with_adamw():
    """The verdicts with AdamW."""
    found = by_difference("adamw")
    if not found:
        return None
    rows = [baseline_cells("adamw"), *map(judge.cells, found)]
    trained = judged("adamw")[0]
    span = lambda losses: max(losses) - min(losses)
    spans = (f"{mode} {span(judge.losses(of[1.0])):.3f}" for mode, (_, of) in trained.items())
    values = {"seeds": SEEDS["adamw"], "spans": ", ".join(spans)}
    verdicts, tried = table(judge.HEAD, rows), tuning(trained, "adamw")
    return values | {"verdicts": verdicts, "tuning": tried}


def tuning(trained, optimizer="muon"):
    """A table of the losses of all learning rates that were tried at full length."""
    losses, scale = {mode: {} for mode in sorted(trained)}, scale_of(optimizer)
    for mode, at in losses.items():
        for full, line in judge.lines_of_mode(scale, mode):
            if full["seed"] == 0 and full["max_iters"] == scale["max_iters"]:
                rate = full["learning_rate"]
                at[rate] = min(judge.losses([line])[0], at.get(rate, math.inf))
    rates = sorted({rate for at in losses.values() for rate in at})
    shown = lambda loss: "diverged" if loss == math.inf else f"{loss:.4f}"
    rows = ((mode, *(shown(at[rate]) if rate in at else "" for rate in rates))
            for mode, at in losses.items())  # fmt: skip
    return table(("mode", *(f"rate {rate:g}" for rate in rates)), rows)


def inside_cells(line):
    """The cells of a row of the table of what the models look like inside."""
    depth = line["depth"]
    yield f"{claims.growth(depth):.1f}"
    yield f"{depth['from embedding'][-1]:.0f}"
    yield f"{max(depth['sink']):.2f}"
    yield f"{max(depth['max/rms']):.1f}"


@cache
def lead_lines(what):
    """{(name, value): the lines of its seeds} of what has finished of a plan of runs/lead.py."""
    changes, axis, values, rates_around = lead.PLANS[what]
    found = {}
    for name, value in product(changes, values):
        with suppress(NotFinished):
            runs = lead.runs_of({name: changes[name]}, axis, [value], rates_around, must_find)
            found[name, value] = must_find("lead", runs[name, value])
    return found


def lead_points(what):
    """{mode: [(value, differences at equal steps, differences at equal time)]} for several numbers
    of steps (tokens) or of blocks. At equal steps: from pre-norm with its tuned rate, and with each
    other rate that was trained. At equal time: what at_equal_time returns.
    """
    lines, points = lead_lines(what), defaultdict(list)
    changes, axis, *_ = lead.PLANS[what]
    losses = {at: judge.losses(of) for at, of in lines.items()}
    losses = {at: each for at, each in losses.items() if math.inf not in each}
    theirs = {value: each for (name, value), each in losses.items() if name == judge.baseline}
    for name, value, _, gap in lead.rows(lines, changes):
        if not gap or changes[name] is not None:
            continue
        ours = losses[name, value]
        others = [losses[rate, value] for rate in lead.OTHER_RATES if (rate, value) in losses]
        gaps = [gap, *(paired(ours, other) for other in others)]
        at_time = at_equal_time(name, value, ours, theirs) if axis == "max_iters" else []
        points[name].append((value, gaps, at_time))
    return points


def at_equal_time(mode, steps, ours, theirs):
    """Differences for the ends of the time ratio and its median. theirs: {steps: losses}.

    Empty if the baseline was not trained for as long.
    """
    lengths = [steps * ratio for ratio in judged()[1].get(mode, ())]
    known = lengths and min(theirs) <= min(lengths) and max(lengths) <= max(theirs)
    return [gap_at(length, ours, theirs) for length in lengths] if known else []


def per_parameter():
    """Bytes of text per step and parameter of pre-norm, in the judge's studies."""
    line = judged()[0][judge.baseline][1][1.0][0]
    return line["tokens"] / line["steps"] / line["params"]


def lead_by_tokens():
    """How the lead of each mode changes with tokens."""
    rows = []
    for mode, of in lead_points("tokens").items():
        for steps, gaps, at_time in of:
            size = f"{steps * per_parameter():.1f}"
            other = ", ".join(map(plus_minus, gaps[1:]))
            timed = (plus_minus(at_time[1]), judge.verdict(at_time)) if at_time else ("", "")
            untimed = (mode, f"{steps:,}", size, plus_minus(gaps[0]), other, judge.verdict(gaps))
            rows.append((*untimed, *timed))
    head = ("mode", "steps", "bytes per parameter", "difference at equal steps")
    head += ("from pre-norm at another rate", "verdict on all")
    head += ("difference at equal time", "verdict at equal time")
    return {"seeds": len(lead.SEEDS), "table": table(head, rows)} if rows else None


def gates():
    """How far NAG's sublayers turn the stream at the end of shorter and longer runs."""
    rows = []
    for (mode, steps), lines in lead_lines("tokens").items():
        of = [line["gates"] for line in lines if line["gates"]]
        if mode != "nag" or not of:
            continue
        a = [statistics.mean(sublayer) for sublayer in zip(*(each["a"] for each in of))]
        row = (f"{statistics.mean(a):.3f}", f"{min(a):.3f}", f"{max(a):.3f}")
        floor = statistics.mean(each["floor"] for each in of)
        rows.append((f"{steps:,}", *row, f"{floor:.1%}", max(each["dead"] for each in of)))
    head = ("steps", "mean", "lowest mean of a sublayer", "highest", f"share below {DEAD}")
    head += (f"most sublayers with a mean below {DEAD}",)
    return {"table": table(head, rows)} if len(rows) > 1 else None


def lead_by_blocks():
    """How the lead of each mode changes with depth."""
    rows = [(mode, blocks, plus_minus(gaps[0]), judge.verdict(gaps))
            for mode, of in lead_points("blocks").items() for blocks, gaps, _ in of]  # fmt: skip
    head = ("mode", "blocks", "difference at equal steps", "verdict")
    known = len({blocks for _, blocks, *_ in rows}) > 1
    return {"seeds": len(lead.SEEDS), "table": table(head, rows)} if known else None


def on_another_cpu():
    """Runs of results/lead.jsonl that were repeated on another kind of CPU."""
    first, again = study.finished("lead"), study.finished("another_cpu")
    if not again:
        return None
    rows, changes = [], []
    for name, line in again.items():
        run, loss = line["settings"], first[name]["loss"]
        changes.append(line["loss"] - loss)
        cells = (run.get("residual", judge.baseline), f"{run['max_iters']:,}", run["seed"])
        rows.append((*cells, f"{loss:.4f}", f"{line['loss']:.4f}", f"{changes[-1]:+.4f}"))
    head = ("mode", "steps", "seed", first[name]["machine"], line["machine"], "change")
    return {
        "machine": line["machine"],
        "runs": len(rows),
        "mean": plus_minus(study.interval(changes)),
        "spread": statistics.stdev(changes),
        "others": enumerated(trained_on(line["machine"], again) or ["none"]),
        "table": table(head, sorted(rows)),
    }


def trained_on(machine, again):
    """The modes and steps of runs/lead.py --what=tokens that were trained on this machine, and
    their differences from the baseline's repeats there. again: {name: line} of all repeats."""
    lines, found = lead_lines("tokens"), []
    for (mode, steps), ours in lines.items():
        theirs = [again.get(study.name_of(line)) for line in lines.get((judge.baseline, steps), ())]
        if ours[0]["machine"] == machine and theirs and None not in theirs:
            found.append(f"`{mode}` with {steps:,} steps {plus_minus(gap_of(ours, theirs))}")
    return found


def lead_ratios(what):
    """{name: median_interval of its step time over that of the plan's first name}, if timed."""
    runs = {name: lines[0]["settings"] for (name, _), lines in lead_lines(what).items()}
    return study.race("lead", runs, measure=False) if runs else {}


def one_change(what):
    """A mode with one part changed, beside the unchanged mode."""
    rows, gaps = [], {}
    changes, ratios = lead.PLANS[what][0], lead_ratios(what)
    for name, _, loss, gap in lead.rows(lead_lines(what), changes):
        time = f"{ratios[name][1]:.2f}" if name in ratios else ""
        if gap:
            gaps[name] = gap
            rows.append((name, f"{loss:.4f}", plus_minus(gap), judge.verdict([gap]), time))
        else:
            rows.append((name, "", "diverged", "", time))
    first = next(iter(changes))
    head = ("change", "loss", f"difference from {first}", "verdict", f"step time / {first}'s")
    seeds = len(lead.SEEDS)
    values = {"seeds": seeds, "count": len(gaps), "surviving": listed(holm(gaps, seeds))}
    return values | {"table": table(head, rows)} if rows else None


def mixture_lines():
    """{name: the lines of its seeds} of what has finished of runs/lead.py --what=mod."""
    return {name: lines for (name, _), lines in lead_lines("mod").items()}


def dense_lines():
    """{steps: the lines} of NAG without skipping."""
    found = lead_lines("tokens").items()
    return {steps: lines for (name, steps), lines in found if name == "nag" and steps >= 2000}


def mixtures():
    """Mixtures of depths, and NAG with fewer blocks, beside the same model without skipping."""
    found, rows, changes = mixture_lines(), [], lead.PLANS["mod"][0]
    ratios = lead_ratios("mod")
    for name, _, loss, gap in lead.rows(lead_lines("mod"), changes):
        lines, dense = found[name], found[lead.base_of(changes, name)]
        if changes[name] is None:
            continue
        if not gap:
            rows.append((name, "", "", "", "", "diverged", "", "", ""))
            continue
        of_nag = dense is found.get("nag")
        skipped = f"{mean_of(lines, 'skipped'):.1%}" if "router" in name else ""
        flops = f"{mean_of(lines, 'flops') / mean_of(dense, 'flops'):.2f}"
        time = f"{ratios[name][1]:.2f}" if of_nag and name in ratios else ""
        at_flops = claims.at_flops(lines, dense_lines()) if of_nag else None
        gaps = [plus_minus(gap), judge.verdict([gap])]
        gaps += [plus_minus(at_flops), judge.verdict([at_flops])] if at_flops else ["", ""]
        rows.append((name, skipped, flops, time, f"{loss:.4f}", *gaps))
    head = ("model", "skip in evaluation", "FLOPs", "step time", "loss")
    head += ("difference at equal steps", "verdict")
    head += ("difference at equal FLOPs", "verdict at equal FLOPs")
    return {"seeds": len(lead.SEEDS), "table": table(head, rows)} if rows else None


def mean_of(lines, key):
    return statistics.mean(line[key] for line in lines)


# ------------------------------------------------------------------------------------------------
# Measurements on the judged models


def first_seed(mode):
    """The command that trains seed 1 of a judged mode again."""
    own = " ".join(f"--{key}={value}" for key, value in judged()[0][mode][0].items())
    where = f"--residual={mode} --seed=1 {own} --out_dir=out/{mode}"
    return f"python train.py config/judge_8x64.py {where}"


def oracle():
    """How well scores predict what skipping a sublayer costs, from runs/oracle.py."""
    rows, commands, rises, lowest, trained = [], [], [], [], judged()[0]
    for path in sorted(RESULTS.glob("oracle_*.json")):
        found, mode = json.loads(path.read_text()), path.stem.removeprefix("oracle_")
        if mode not in trained:
            continue
        rate, rise = found["rate"], found["rise"]
        where = f"--out_dir=out/{mode} --oracle_tokens={found['tokens']} --rate={rate}"
        commands += [first_seed(mode), f"python runs/oracle.py {where}"]
        commands += [f"cp out/{mode}/oracle.json {path.relative_to(ROOT)}"]
        largest = rise.index(max(rise))
        without = lambda x, largest=largest: statistics.mean(x[:largest] + x[largest + 1 :])
        mean = statistics.mean(rise)
        rises.append(f"{mode} {mean:.3f} and {without(rise):.3f}")
        by_chance = statistics.mean(found["scores"]["random"]["regret"])
        lowest.append(f"about {mean - by_chance:.2f} ({mode})")
        for score, fits in found["scores"].items():
            means = [statistics.mean(fits[key]) for key in ("rank correlation", "regret")]
            means.append(without(fits["regret"]))
            rows.append((mode, score, *(f"{x:+.3f}" for x in means)))
    if not rows:
        return None
    found = {"rate": rate, "rises": ", ".join(rises), "lowest": " and ".join(lowest)}
    head = ("mode", "score", "rank correlation", "regret", "regret without that sublayer")
    return found | {"commands": "\n".join(commands), "table": table(head, rows)}


def variance():
    """What runs/bhyt_theory.py measured on a judged BHyT, and what its prediction costs."""
    path, trained = RESULTS / "variance.json", judged()[0]
    if not path.exists() or not {"bhyt", "bhyt_exact"} <= trained.keys():
        return None
    predicting, measuring = (trained[mode][1][1.0] for mode in ("bhyt", "bhyt_exact"))
    cost = gap_of(predicting, measuring)
    found = json.loads(path.read_text())
    keys = ("measured", "predicted", "R2", "Pearson", "Spearman")
    rows = []
    for b, (measured, predicted, *fits) in enumerate(zip(*(found[key] for key in keys))):
        rows.append((b, f"{measured:.0f}", f"{predicted:.0f}", *(f"{x:.2f}" for x in fits)))
    head = ("block", "measured variance", "predicted", "R²", "Pearson", "Spearman")
    known = {"command": first_seed("bhyt"), "cost": plus_minus(cost) if cost else "not known"}
    return known | {"table": table(head, rows)}


# ------------------------------------------------------------------------------------------------
# Classrooms and claims


def classrooms():
    return {} if any(classroom.finished().values()) else None


def stacks():
    rows = [(case, f"{line['first']:.4g}", f"{line['last']:.4g}", line["steps"], line["verdict"])
            for (case,), line in classroom.finished()["stack"].items()]  # fmt: skip
    head = ("stack", "first loss", "last loss", "steps", "verdict")
    return {"table": table(head, rows)} if rows else None


def walks():
    rows = []
    for (start,), line in classroom.finished()["walk"].items():
        both = (line[key] for key in ("variance", "of the gradient"))
        rows.append((start, *(f"{each[0]:.3g} to {each[-1]:.3g}" for each in both)))
    head = ("initialisation", "variance of activations", "variance of their gradients")
    return {"table": table(head, rows)} if rows else None


def transformers():
    rows, found = [], classroom.finished()
    if not found["bigram"]:
        return None
    for (skip, rate), line in found["transformer"].items():
        norms = line["gradients"]
        of = [norms[f"{name}.weight"] for name in ("value", "up")]
        without = dict.fromkeys(n.partition(".")[0] for n, norm in norms.items() if norm is None)
        shown = ("-" if norm is None else norm for norm in of)
        rows.append((skip, rate, line["last"], *shown, ", ".join(without)))
    head = ("after attention: x =", "rate", "last loss", "gradient norm of W_V", "of W_up")
    head += ("layers without a gradient",)
    return {"table": table(head, rows), "entropy": found["bigram"][()]["entropy"]} if rows else None


def published():
    """The published claims, with our measurements."""
    modes, mixed = (judged()[0], judged("adamw")[0]), (mixture_lines(), dense_lines())
    rows = claims.rows(*modes, lead_lines("blocks"), *mixed, Earlier())
    rates = (f"{m} {' and '.join(map(str, claims.insides(m)))}" for m in ("prenorm", "nag"))
    limits = {"still": claims.STILL, "strong": claims.STRONG, "near": claims.NEAR}
    return {"table": table(claims.HEAD, rows), "rates": ", ".join(rates)} | limits


# ------------------------------------------------------------------------------------------------
# The default recipe


def default_run():
    """(records with a validation loss, tokens per step, loss on the whole validation split)"""
    log = map(json.loads, (RESULTS / "default" / "log.jsonl").read_text().splitlines())
    records = [record for record in log if record.get("val_loss")]
    whole = json.loads((RESULTS / "default" / "eval.json").read_text())["loss"]["loss"]
    return records, records[-1]["tokens"] // records[-1]["step"], whole


def side_by_side(path):
    """A side-by-side run: (loss, steps, seconds) of the peer's best rate and of ours, and the
    seconds that ours takes to the peer's loss."""
    text = path.read_text()
    run = r"(\S+) after (\d+) steps, (\d+) s"
    peers = re.findall(rf"^\w+ at \S+: {run}", text, re.M)
    best = min(peers, key=lambda peer: float(peer[0]))
    ours = re.search(rf"^ours: {run}", text, re.M).groups()
    return best, ours, re.search(r"ours after (\d+) s", text)[1]


@cache
def recipe_rows():
    return [*recipe.rows(find, measure=False)]


def the_recipe():
    records, size, whole = default_run()
    rows = []
    for path in sorted(SPEED.glob("nanochat_*.txt")):
        shape = path.stem.removeprefix("nanochat_").replace("x", " x ")
        *runs, passed = side_by_side(path)
        ends = [f"{loss} after {n} steps, {seconds} s" for loss, n, seconds in runs]
        rows.append((shape, *ends, f"{passed} s"))
    head = ("blocks x width", "nanochat", "ours", "ours reaches nanochat's loss in")
    parts = map(recipe.cells, recipe_rows())
    return {
        "last": records[-1]["val_loss"],
        "whole": whole,
        "steps": records[-1]["step"],
        "size": size,
        "curve": ", ".join(f"{at['step']:,}: {at['val_loss']:.2f}" for at in records),
        "nanochat": table(head, rows),
        "part_steps": recipe.COMMON["max_iters"],
        "rate": study.DEFAULTS["learning_rate"],
        "seeds": len(recipe.SEEDS),
        "tokens": recipe.COMMON["eval_tokens"],
        "table": table(recipe.HEAD, parts),
    }


# ------------------------------------------------------------------------------------------------
# Earlier, shorter runs


class Earlier:
    """Runs of 0.06 to 1.2 bytes per parameter, before the protocol of runs/judge.py."""

    def __init__(self):
        self.lines = read("earlier")

    def of(self, study, variant):
        return [x for x in self.lines if (x["study"], x["variant"]) == (study, variant)]

    def losses(self, study, variant):
        """The losses of all seeds, at the learning rate that is best for the first seed."""
        lines = sorted(self.of(study, variant), key=lambda line: line["seed"])
        first = [line for line in lines if line["seed"] == lines[0]["seed"]]
        rate = min(first, key=lambda line: line["loss"])["learning_rate"]
        return [line["loss"] for line in lines if line["learning_rate"] == rate]

    def mean(self, study, variant):
        return f"{statistics.mean(self.losses(study, variant)):.3f}"

    def gap(self, study, a, b):
        return plus_minus(paired(self.losses(study, a), self.losses(study, b)))

    def range_over_rates(self, study, variant):
        losses = [line["loss"] for line in self.of(study, variant) if line["seed"] == 1]
        return f"{max(losses) - min(losses):.2f}"


class Cells(dict):
    """Fills {gap[study a b]} in report.md with gap(study, a, b)."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def __missing__(self, names):
        return self.number(*names.split())


def earlier():
    e = Earlier()
    return {"mean": Cells(e.mean), "gap": Cells(e.gap), "range": Cells(e.range_over_rates)}


# ------------------------------------------------------------------------------------------------
# Trained models: conversion, pruning


def conversion():
    """The table of runs/convert.py."""
    rows = [*convert.rows(*convert.the_base(), find)]
    if not rows:
        return None
    factors = enumerated([f"{factor:g}" for factor in convert.FACTORS])
    found = {"steps": convert.steps, "seeds": convert.seeds, "table": table(convert.HEAD, rows)}
    return found | {"factors": factors}


def imported():
    """What eval.py measures on a model that hf.py imported."""
    path = RESULTS / "imported.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text())["depth"]
    rows = []
    for b in range(len(found["dropped"])):
        turns = (f"{found['rotation'][2 * b + i]:.1f}" for i in (0, 1))
        rest = (f"{found[key][b]:.2f}" for key in ("sink", "dropped"))
        stream = (f"{found[key][b + 1]:.1f}" for key in ("norm", "max/rms"))
        rows.append((b, *turns, *stream, *rest))
    head = ("block", "rotation by attention (degrees)", "by the MLP", "norm of the stream after it")
    head += ("largest feature / rms", "attention to the first token", "rise of the loss without it")
    cost = json.loads((SPEED / "import_1b.json").read_text())
    values = dict(zip(("low", "times", "high"), cost["ratio"]))
    values |= {"gigabytes": cost["bytes"] / 1e9, "peak": cost["peak_bytes"] / 1e9}
    return values | {"table": table(head, rows)}


def pruning():
    """The table of runs/prune.py."""
    lines = read("prune")
    if not lines:
        return None
    rows = []
    for unit, rate in sorted({(line["unit"], line["rate"]) for line in lines}):
        here = [line for line in lines if (line["unit"], line["rate"]) == (unit, rate)]
        of = lambda rule, key, here=here: statistics.mean(x[key] for x in here if x["rule"] == rule)
        losses = [f"{of(rule, 'loss'):.3f}" for rule in ("angle", "norm", "random")]
        rows.append((unit, f"{rate:.3f}", *losses, f"{of('angle', 'time'):.2f}"))
    head = ("unit", "share skipped", "loss by angle", "by norm", "at random")
    head += ("time of the forward pass, by angle",)
    return {"run": lines[0]["run"], "table": table(head, rows)}


# ------------------------------------------------------------------------------------------------
# Speed


def printed(path):
    """The tables of a comparison that was printed."""
    parts = {"128 new": "128 new tokens", "a token": "a token, without a cache"}
    for part in path.read_text().split("\n\n"):
        found = re.findall(r"^(\S.*?)  +([\d.]+) ms .*?([\d.]+)x(.*)$", part, re.M)
        rows = [(a, f"{float(b):.1f} ms", f"{c}x{rest.rstrip()}") for a, b, c, rest in found]
        what = part.split(",")[0] if "median" in part else "candidate"
        if rows:
            yield table((parts.get(what, what), "time", "ratio"), rows)


def bench_rows(report):
    """(candidate, median, ratio) of all parts of a file of bench.py that compare candidates."""
    for part in report.values():
        for name, row in part.items() if isinstance(part, dict) else ():
            if isinstance(row, dict) and "ratio" in row:
                low, middle, high = row["ratio"]
                ratio = f"{middle:.3f}x ({low:.3f} - {high:.3f})"
                yield name, f"{row['median'] * 1e3:.1f} ms", ratio


def cost_growth():
    """How the cost of a step grows, from runs/growth.py."""
    path = SPEED / "growth.json"
    if not path.exists():
        return None
    report = json.loads(path.read_text())
    rows = []
    for axis in ("n_layer", "n_embd", "block_size"):
        for value, found in report[axis].items():
            over = [f"{of['over_floor']:.2f}" for of in found.values()]
            first = [f"{of['first']:.0f} s" for of in found.values()]
            rows.append((f"{axis} {value}", *over, *first))
    head = ("", *(f"{mode}: {what}" for what in ("step / floor", "first step") for mode in found))
    return {"table": table(head, rows)}


RATIOS = {  # column: [(file, its part)]
    "8 x 128": [("rivals_8x128_cpu", "train")],
    "12 x 512": [("rivals_12x512_cpu", "train"), ("streams_12x512_cpu", "train")],
    "12 x 512, context 512": [("train_12x512_cpu", "train")],
    "forward, 1B block": [("forward_1b_cpu", "forward")],
}


def ratios():
    """{column: {mode: (low end, time over pre-norm's, high end)}}"""
    found = {"8 x 64": judged()[1]}
    for column, files in RATIOS.items():
        of = [json.loads((SPEED / f"{name}.json").read_text())[part] for name, part in files]
        found[column] = {mode: row["ratio"] for each in of for mode, row in each.items()}
    return found


def speed():
    """{file: its tables} of results/speed, and a table of the ratios of all modes."""
    found = {path.stem: "\n".join(printed(path)) for path in SPEED.glob("*.txt")}
    for path in SPEED.glob("*.json"):
        rows = bench_rows(json.loads(path.read_text()))
        found[path.stem] = table(("candidate", "time", "ratio"), rows)
    by_column = ratios()
    shown = lambda ratio: "{1:.2f} ({0:.2f} - {2:.2f})".format(*ratio) if ratio else ""
    rows = [(mode, *(shown(of.get(mode)) for of in by_column.values()))
            for mode in ("prenorm again", *RESIDUALS) if mode != judge.baseline]  # fmt: skip
    return found | {"ratios": table(("mode", *by_column), rows)}


# ------------------------------------------------------------------------------------------------
# README's first page

START, END = "<!-- written by runs/report.py -->\n", "<!-- end -->"


def default_values():
    """The loss of the default run."""
    records, _, whole = default_run()
    return {"last": records[-1]["val_loss"], "whole": whole}


def verdict_values():
    """The verdicts of runs/judge.py in words, and the lead against tokens."""
    rows = [(found["mode"], *judge.words(found)) for found in compared()]
    if not rows:
        return None
    line = judged()[0][judge.baseline][1][1.0][0]
    return {
        "millions": line["params"] / 1e6,
        "per_parameter": line["tokens"] / line["params"],
        "seeds": judge.seeds,
        "modes": len(rows),
        "at_steps": by_word((mode, at_steps[1]) for mode, at_steps, _ in rows),
        "at_time": by_word((mode, at_time[1]) for mode, _, at_time in rows),
        "surviving": surviving_in_words(),
        "loss": mean_of(judged()[0][judge.baseline][1][1.0], "loss"),
        "larger": larger_in_words(),
        "also": "\n".join(filter(None, [adamw_in_words(), lead_in_words()])),
        "widths": widths_in_words(),
        "trust": trust_in_words(),
    }


def lead_in_words():
    """The verdicts at several lengths and depths, if there are any."""
    found = []
    for what, where, size, unit in (
        ("tokens", "after {}", per_parameter(), "bytes per parameter"),
        ("blocks", "with {}", 1, "blocks"),
    ):
        modes = defaultdict(list)  # that share their verdicts
        for mode, points in lead_points(what).items():
            new = [p for p in points if what == "tokens" or p[0] != scale_of("muon")["n_layer"]]
            if new:
                modes[verdicts_at(new, where, size)].append(mode)
        for verdicts, alike in modes.items():
            found.append(f"{listed(alike)} {are(alike)} {verdicts} {unit}")
    text = f"- **With {len(lead.SEEDS)} new seeds**, at equal steps, {'; '.join(found)}."
    return f"{text} {BAD_SEED}" if found else ""


def verdicts_at(points, where, unit):
    """Verdicts, grouped: 'undecided after 2, better after 4 and 8'."""
    pairs = [(judge.verdict(gaps), f"{value * unit:.0f}") for value, gaps, _ in points]
    found = []
    for word, alike in groupby(pairs, key=lambda pair: pair[0]):
        found.append(f"{word} {where.format(enumerated([at for _, at in alike]))}")
    return ", ".join(found)


def adamw_in_words():
    """The verdicts with AdamW, if there are any."""
    rows = [(found["mode"], *judge.words(found)) for found in by_difference("adamw")]
    if not rows:
        return ""
    at_steps = by_word((mode, words[1]) for mode, words, _ in rows)
    at_time = by_word((mode, words[1]) for mode, _, words in rows)
    of = listed([mode for mode, *_ in rows])
    text = f"- **With AdamW** in place of Muon ({of}; {SEEDS['adamw']} seeds): at equal steps"
    return f"{text} {at_steps}; at equal time {at_time}."


def mixture_values():
    """What skipping 40% of the sublayers costs NAG, with two routers, and having fewer blocks."""
    names = {"own": "NAG's router 0.4", "learned": "learned router 0.4"}
    names |= {"five": "nag with 5 blocks"}
    found, dense = mixture_lines(), mixture_lines().get("nag")
    lines = {key: found.get(name) for key, name in names.items()}
    if not dense or None in lines.values():
        return None
    gaps = {key: gap_of(of, dense) for key, of in lines.items()}
    by_seed = {key: claims.differences_at_flops(of, dense_lines()) for key, of in lines.items()}
    if None in (*gaps.values(), *by_seed.values()):
        return None
    gaps |= {f"equal_{key}": study.interval(of) for key, of in by_seed.items()}
    gaps["control"] = paired(by_seed["own"], by_seed["five"])
    values = {key: plus_minus(gap) for key, gap in gaps.items()}
    flops, ratios = mean_of(lines["own"], "flops"), lead_ratios("mod")
    time = time_five = ""
    if names["own"] in ratios and names["five"] in ratios:
        share = {key: f"{ratios[names[key]][1]:.0%}" for key in ("own", "five")}
        time, time_five = f" and {share['own']} of the time", f" ({share['five']} of the time)"
    values |= {"seeds": len(lead.SEEDS), "flops_own": flops / mean_of(dense, "flops")}
    return values | {"time": time, "time_five": time_five}


def widths_in_words():
    """How the time of two modes depends on the width, if they were judged."""
    narrow, wide = judged()[1], ratios()["12 x 512"]
    if not {"mhc", "attnres"} <= narrow.keys():
        return ""
    here, there = ([times[mode][1] for mode in ("mhc", "attnres")] for times in (narrow, wide))
    text = " A step of `mhc` takes {:.2f} times as long as pre-norm's, of `attnres` {:.2f} times;"
    text += " in 12 blocks of width 512, where we measured no losses, {:.2f} and {:.2f} times."
    return text.format(*here, *there)


def trust_in_words():
    """How much hangs on the tuning of the baseline, if that was measured."""
    if (half := at_half_the_rate()) is None:
        return ""
    cost, turned = half
    text = f" At half its rate, pre-norm's loss changes by {plus_minus(cost)}, and"
    return f"{text} {len(turned)} of {len(compared())} verdicts at equal steps change."


def surviving_in_words():
    """The better modes that remain after the correction, with their differences."""
    gaps = {each["mode"]: each["steps"] for each in compared()}
    found = [f"`{mode}` ({plus_minus(gaps[mode])})" for mode in corrected()[0]]
    return enumerated(found or ["none"])


def by_word(pairs):
    """Pairs (mode, verdict) as text: names the better modes, and counts the others."""
    groups = defaultdict(list)
    for mode, word in pairs:
        groups[word or "without a verdict"].append(mode)
    better = groups.pop("better", [])
    counts = [f"{len(groups[word])} {word}" for word in sorted(groups, reverse=True)]
    first = f"{listed(better)} {are(better)} better" if better else "no mode is better"
    return ", ".join([first, *counts])


def are(names):
    return "are" if len(names) > 1 else "is"


def summary():
    """What the verdicts say, for the top of RESULTS.md."""
    found = verdict_values()
    if found is None:
        return None
    named = ", ".join(f"`{each['mode']}` {plus_minus(each['steps'])}" for each in better_modes())
    return found | {"better": named or "none", "surviving": listed(corrected()[0])}


def readme_verdicts():
    """{mode: its cells (at equal steps, at equal time) in README's table of modes}"""
    found = {judge.baseline: ("the baseline", "")} if judged()[0] else {}
    for each in compared():
        (difference, word), (_, at_time) = judge.words(each)
        cells = (f"{difference} ({word})", at_time or "no verdict")
        found[each["mode"]] = (each["diverged"], "") if each["diverged"] else cells
    return found


# ------------------------------------------------------------------------------------------------
# The pages

SECTIONS = {
    "README: found so far": verdict_values,
    "README: mixtures of depths": mixture_values,
    "README: the default recipe": default_values,
    "Summary": summary,
    "The modes": modes,
    "With AdamW": with_adamw,
    "Shorter and longer training": lead_by_tokens,
    "On another CPU": on_another_cpu,
    "NAG's gates": gates,
    "With fewer and more blocks": lead_by_blocks,
    "NAG with one part changed": partial(one_change, "nag"),
    "BHyT with other initial values": partial(one_change, "bhyt"),
    "Mixtures of depths": mixtures,
    "The skip oracle": oracle,
    "BHyT's prediction": variance,
    "Classrooms": classrooms,
    "Stacks of MLPs": stacks,
    "Initialisations": walks,
    "A transformer without the line x = x + output": transformers,
    "Published claims": published,
    "The default recipe": the_recipe,
    "Earlier, shorter runs": earlier,
    "Conversion": conversion,
    "An imported model, by depth": imported,
    "Pruning without training": pruning,
    "Speed": speed,
    "How the cost of a training step grows": cost_growth,
}
FIRST_PAGE = [title for title in SECTIONS if title.startswith("README: ")]


def template():
    """report.md: (introduction, {title: section}, {title: section} of README's first page)."""
    intro, *parts = re.split(r"^(?=##+ )", (ROOT / "runs" / "report.md").read_text(), flags=re.M)
    sections = {part.partition("\n")[0].lstrip("# "): part for part in parts}
    first = {title: sections.pop(title).partition("\n")[2] for title in FIRST_PAGE}
    return intro, sections, first


def wrapped(text):
    """Text in lines of 120. Tables, code, images and headings stay. A line of a list is an item."""
    parts = re.split(r"\n{2,}", text.strip())
    fill = partial(textwrap.fill, width=120, break_on_hyphens=False, break_long_words=False)
    items = lambda part: "\n".join(fill(s, subsequent_indent="  ") for s in part.split("\n"))
    kept = ("#", "|", "```", "!")
    wrap = lambda part: items(part) if part.startswith("- ") else fill(part)
    return "\n\n".join(part if part.startswith(kept) else wrap(part) for part in parts)


def filled(sections, between="\n\n"):
    """The sections that have results, with their numbers."""
    found = ((text, SECTIONS[title]()) for title, text in sections.items())
    return between.join(wrapped(text.format(**of)) for text, of in found if of is not None)


def markdown():
    intro, sections, _ = template()
    return intro + filled(sections) + "\n"


def first_page():
    return filled(template()[-1], between="\n") + "\n"  # one list


def readme(text):
    """README with its first page and the verdicts in its table of modes written anew."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise SystemExit(f"README.md must have one line {START.strip()} and one {END}")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    found = readme_verdicts()
    row = r"^(\|.*\| `(\w+)` \|.*\|)[^|]*\|[^|]*\|$"
    cells = lambda mode: " | ".join(found.get(mode, ("not judged yet", "")))
    verdict = lambda match: f"{match[1]} {cells(match[2])} |"
    return before + START + first_page() + END + re.sub(row, verdict, after, flags=re.M)


def draw():
    """All figures of the page."""
    leads = [(lead_points("tokens"), per_parameter(), "{:.1f}", "training bytes per parameter")]
    blocks = lead_points("blocks")
    if len({value for of in blocks.values() for value, *_ in of}) > 2:
        leads.append((blocks, 1, "{:.0f}", "blocks"))
    leads = [each for each in leads if each[0]]
    if compared():
        figures.modes(RESULTS / "modes.png", compared(), judge.baseline, leads)

    if any(classroom.finished().values()):
        figures.classroom(RESULTS / "classroom.png", classroom.finished())
    e = Earlier()
    first_seed = lambda mode: [line for line in e.of("bhyt", mode) if line["seed"] == 1]
    by_mode = {mode: first_seed(mode) for mode in ("prenorm", "dyt", "bhyt")}
    figures.stability(RESULTS / "stability.png", by_mode)
    known = [row for row in recipe_rows() if row["equal"] or row["steps"]]
    figures.recipe(RESULTS / "recipe.png", [r for r in known if r["name"] != recipe.RECIPE])


if __name__ == "__main__":
    (ROOT / "RESULTS.md").write_text(markdown())
    (ROOT / "README.md").write_text(readme((ROOT / "README.md").read_text()))
    draw()
