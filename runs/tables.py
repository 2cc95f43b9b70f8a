"""
Fill the marked tables and numbers of the pages in PAGES from results/, and draw both figures.

    python runs/tables.py

People write the text. The mark before a table names it. The mark before a number names its table,
row and column. Rendered pages do not show the marks:

    <!-- table: modes -->
    ...
    <!-- end -->

    NAG ends at <!-- modes/nag/loss -->0.9891<!-- -->.

A row is named by its first cell, or by more of them if the first is not unique.
"""

import json
import math
import re
import sys
from collections import Counter
from contextlib import suppress
from functools import cache, partial
from itertools import product
from statistics import mean, median, stdev

import copying
import judge
import lead
import recipe
import stats
import study
from stats import by_seed, decided, gap_of, losses_of, minus, plus_minus, verdict, with_range
from study import ROOT, NotFinished, find, read

import plot
from configurator import configure
from model import RESIDUALS

RESULTS = ROOT / "results"
PAGES = ("RESULTS.md", "results/more.md", "README.md")
SEEDS = (judge.seeds, 5)  # numbers of seeds that a mode may have, the most first
BASELINE = judge.baseline
DEPTHS = (4, 8, 16, 32)
OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW"}


def load(name):
    return json.loads((RESULTS / name).read_text())


# ------------------------------------------------------------------------------------------------
# The judge's runs


def scale_of(optimizer):
    return study.parse([judge.SCALE, f"--optimizer={optimizer}"])


def with_most_seeds(numbers, lines_of):
    """lines_of(number of seeds), for the first of these numbers that has finished, or None."""
    for n in numbers:
        with suppress(NotFinished):
            return lines_of(n)


@cache
def judged(optimizer):
    """({mode: what judge.train returns}, {mode: median_interval of its time}) of the judged modes.

    The baseline has all lengths that its comparisons need.
    """
    scale, lines_of = scale_of(optimizer), partial(find, "judge")
    trained = {}
    for mode in RESIDUALS:
        found = with_most_seeds(SEEDS, partial(judge.train, scale, mode, lines_of))
        if found:
            trained[mode] = found
    ratios = study.race("judge", judge.timed(scale, trained), measure=False)
    choice, lines = trained[BASELINE]
    lengths = judge.lengths(ratios)
    try:
        own = judge.choices_at(scale, BASELINE, choice, lines_of, lengths)
    except NotFinished:  # the first runs are older than the tuning for these lengths
        own = dict.fromkeys(lengths, choice)
    for name, other in {**own, **judge.other_rates(choice)}.items():
        length = name if name in lengths else 1.0
        runs = partial(judge.of_seeds, scale, BASELINE, other, length=length)
        found = with_most_seeds(SEEDS, lambda n, runs=runs: lines_of(runs(n)))
        if found:
            lines[name] = found
    return trained, ratios


@cache
def compared(optimizer):
    """judge.compare of all judged modes, best at equal steps first and diverged ones last."""
    found = judge.compared(*judged(optimizer))
    return sorted(found, key=lambda each: each["steps"] or (math.inf, 0))


def judged_lines(optimizer, mode):
    """The lines of a mode's seeds."""
    return judged(optimizer)[0][mode][1][1.0]


def modes(optimizer):
    """The judge's table with verdicts after Holm's correction. The baseline is first, also with
    half and twice its learning rate.
    """
    found = compared(optimizer)
    decidable = [each for each in found if each["steps"]]
    corrected = stats.holm({each["mode"]: (each["steps"], each["n"]) for each in decidable})
    head = ["mode", "seeds", *judge.HEAD[2:5], "after Holm", *judge.HEAD[5:]]

    choice, lines = judged(optimizer)[0][BASELINE]
    name, _, *rest = judge.cells_of_baseline(choice, lines)
    rows = [[name, len(lines[1.0]), *rest[:3], "", *rest[3:]]]
    for name in ("half", "twice"):
        theirs = lines[name]
        cells = f"{BASELINE} at {name} its rate", len(theirs), f"{mean(losses_of(theirs)):.4f}"
        gap = gap_of(theirs, lines[1.0])
        rows.append([*cells, *decided([gap]), *[""] * (len(head) - 5)])
    for each in found:
        name, _, *rest = judge.cells(each)
        rows.append([name, each["n"], *rest[:3], corrected.get(name, ""), *rest[3:]])
    return head, rows


def judge_facts():
    """How many modes have each verdict, and what could have been found."""
    head, rows = table_of("modes")
    words = dict(zip(head, zip(*rows[3:])))  # without the baseline
    for kind in ("verdict", "after Holm"):
        for word in ("better", "worse", "undecided"):
            yield f"{kind}: {word}", sum(cell.startswith(word) for cell in words[kind])
    yield "fragile", sum("fragile" in cell for cell in words["verdict"])
    yield "designs", len(RESIDUALS)
    yield "compared", len(words["mode"])
    decidable = [each for each in compared("muon") if each["steps"]]
    half_widths = [each["steps"][1] for each in decidable]
    yield "median half-width", f"{median(half_widths):.4f}"
    able = [stats.detectable(half, each["n"]) for half, each in zip(half_widths, decidable)]
    yield "difference to be found", f"{median(able):.3f}"
    ihc, mhc = (judged_lines("muon", mode) for mode in ("ihc", "mhc"))
    yield "ihc minus mhc", plus_minus(gap_of(ihc, mhc))
    commits = [line["commit"] for line in study.finished("judge").values()]
    share = mean(commit.endswith("+changes") for commit in commits)
    yield "runs with uncommitted changes", f"{share:.0%}"


def leads(ours, theirs, steps):
    """The mean difference of the training losses of these seeds at each of these steps."""
    curves = [[dict(line["curve"]) for line in pair] for pair in stats.pairs(ours, theirs).values()]
    return [mean(a[step] - b[step] for a, b in curves) for step in steps]


def in_words(gap):
    return f"{gap[0]:+.4f} ({verdict([gap])})"


def verdict_facts():
    """With Muon: the verdicts after Holm's correction of the modes that lead after 1,000 steps, how
    many change at half of pre-norm's rate, and two modes at the rates that one tuning seed chose.
    """
    theirs = judged("muon")[0][BASELINE][1]
    ahead, fragile = Counter(), 0
    for each in compared("muon"):
        mode = each["mode"]
        ours = judged_lines("muon", mode)
        fragile += verdict([gap_of(ours, theirs["half"])]) != verdict([each["steps"]])
        if leads(ours, theirs[1.0], [1000])[0] < 0:
            ahead[number("modes", mode, "after Holm")] += 1
    yield "fragile at half its rate", fragile
    for word, n in ahead.items():
        yield f"ahead after 1,000 steps: {word}", n

    for mode, rate in (("mhc", 0.016), ("hc", 0.004)):
        choice = judge.with_rate(judged("muon")[0][mode][0], rate)
        lines = find("judge", judge.of_seeds(scale_of("muon"), mode, choice, 5))
        yield f"{mode} at the rate of one seed", in_words(gap_of(lines, theirs[1.0]))


def flops_of_step(lines):
    """The FLOPs of a step. Some old lines do not have them."""
    return next(line["flops"] / line["steps"] for line in lines if "flops" in line)


def at_size():
    """The designs that are better with one of the optimizers, at equal FLOPs, and their size over
    pre-norm's. Holm's correction counts all designs.
    """
    every = [each for optimizer in OPTIMIZERS for each in compared(optimizer)]
    better = {each["mode"] for each in every if verdict([each["steps"]]) == "better"}
    rows = []
    for optimizer, name in OPTIMIZERS.items():
        theirs = judged(optimizer)[0][BASELINE][1]
        by_length = {n: losses_of(lines) for n, lines in theirs.items() if isinstance(n, float)}
        found, gaps = {}, {}
        for each in compared(optimizer):
            ours = judged_lines(optimizer, each["mode"])
            flops = flops_of_step(ours) / flops_of_step(theirs[1.0])
            by_seed = stats.differences_at(flops, losses_of(ours), by_length)
            gaps[each["mode"]] = stats.interval(by_seed), len(by_seed)
            if each["mode"] in better:
                params = each["params"] / theirs[1.0][0]["params"]
                found[each["mode"]] = f"{params:.2f}", f"{flops:.2f}", plus_minus(each["steps"])
        corrected = stats.holm(gaps)
        for mode, cells in found.items():
            rows.append((mode, name, *cells, *decided([gaps[mode][0]]), corrected[mode]))
    head = ("mode", "optimizer", "parameters", "FLOPs", "at equal steps", "at equal FLOPs")
    return (*head, "verdict at equal FLOPs", "after Holm"), rows


# ------------------------------------------------------------------------------------------------
# Other lengths and depths, changed parts, mixtures of depths: runs/lead.py


@cache
def lead_lines(what, optimizer="muon"):
    """{(name, value): the lines of its seeds} of what has finished of a plan of runs/lead.py."""
    changes, settings_of = lead.PLANS[what]
    found = {}
    for at in product(changes, settings_of):
        name, value = at
        plan = {name: changes[name]}, {value: settings_of[value]}, find, optimizer
        with suppress(NotFinished):  # not tuned yet
            runs = lead.runs_of(*plan)[at]
            numbers = range(len(runs), 2, -1)  # of seeds: all, or the first ones
            lines = with_most_seeds(numbers, lambda n, runs=runs: find("lead", runs[:n]))
            if lines:
                found[at] = lines
    return found


def lead_times(what):
    """{name: median_interval of its step time over that of the plan's first name}, if timed."""
    runs = {name: lines[0]["settings"] for (name, _), lines in lead_lines(what).items()}
    return study.race("lead", runs, measure=False)


def lengths():
    """Differences from pre-norm after fewer and more steps. The verdicts are on both of its rates,
    as far as it was trained with the second one.
    """
    found, changes = lead_lines("tokens"), lead.PLANS["tokens"][0]
    theirs = {steps: losses_of(of) for (name, steps), of in found.items() if name == BASELINE}
    other_rate = [(n, losses_of(of)) for (name, n), of in found.items() if name in lead.OTHER_RATES]
    one = judged_lines("muon", BASELINE)[0]
    per_step = one["tokens"] / one["steps"] / one["params"]
    head = ("mode", "steps", "bytes per parameter", "at equal steps")
    head += ("from pre-norm at another rate", "verdict on both")
    rows = []
    for name, steps, _, gap in lead.rows(found, changes):
        if changes[name] is not None:
            continue
        ours = found[name, steps]
        others = [found[rate, steps] for rate in lead.OTHER_RATES if (rate, steps) in found]
        gaps = [gap, *(gap_of(ours, other) for other in others)]
        words = (plus_minus(gap), ", ".join(map(plus_minus, gaps[1:])), verdict(gaps))
        times = [steps * ratio for ratio in judged("muon")[1][name]]
        known = min(theirs) <= min(times) and max(times) <= max(theirs)
        pairs = product((theirs, theirs | dict(other_rate)), times) if known else ()
        at_time = [stats.gap_at(time, losses_of(ours), by_length) for by_length, time in pairs]
        cells = (plus_minus(at_time[1]), verdict(at_time)) if known else ("", "")
        rows.append((name, f"{steps:,}", f"{steps * per_step:.1f}", *words, *cells))
    return (*head, "at equal time", "verdict at equal time"), rows


@cache
def by_depth():
    """{(mode, its optimizer in words): {blocks: (lines of the mode, lines of pre-norm)}}"""
    found = {}
    for optimizer, mode in product(OPTIMIZERS, ("nag", "ihc")):
        trained, of = judged(optimizer)[0], lead_lines("blocks", optimizer)
        of = of | {(name, 8): lines[1.0] for name, (_, lines) in trained.items()}
        known = [n for n in DEPTHS if {(mode, n), (BASELINE, n)} <= of.keys()]
        if len(known) > 1:
            found[mode, OPTIMIZERS[optimizer]] = {n: (of[mode, n], of[BASELINE, n]) for n in known}
    return found


def growth(pairs):
    """The change of the difference of two designs when x doubles, without diverged runs.

    pairs: {x: (lines of one, lines of the other)}
    """
    gaps = {math.log2(x): by_seed(*pair) for x, pair in pairs.items() if gap_of(*pair)}
    return plus_minus(stats.slope(gaps)) if len(gaps) > 1 else ""


def minus_grown(large, small):
    """The difference of two designs in one pair, minus 2.4 times that in the other.

    In NAG's paper, with experts, it grows 2.4 times. A pair: (lines of one, lines of the other)
    """
    grown = [(1, by_seed(*large)), (-2.4, by_seed(*small))]
    return plus_minus(stats.contrast(grown))


def curves_by_depth():
    """{label: {number of blocks: interval}} for the figure, without those where a run diverged."""
    return {
        f"{mode}, {optimizer}: {growth(pairs)} when doubled": {
            n: gap for n, pair in pairs.items() if (gap := gap_of(*pair))
        }
        for (mode, optimizer), pairs in by_depth().items()
    }


def depths():
    """Losses minus pre-norm's by the number of blocks, and their change when it doubles."""
    rows = []
    for name, pairs in by_depth().items():
        cells = [plus_minus(gap_of(*pairs[n])) if n in pairs else "" for n in DEPTHS]
        rows.append((*name, *cells, growth(pairs)))
    return ("mode", "optimizer", *(f"{n} blocks" for n in DEPTHS), "when doubled"), rows


def experts():
    """NAG's loss minus pre-norm's in models with experts, by width over depth."""
    found, pairs, rows = lead_lines("experts", "adamw"), {}, []
    for ratio, (blocks, width, _) in lead.SHAPES.items():
        if {("nag", ratio), (BASELINE, ratio)} <= found.keys():
            ours, theirs = found["nag", ratio], found[BASELINE, ratio]
            pairs[width / blocks] = ours, theirs
            losses = (f"{mean(losses_of(lines)):.4f}" for lines in (theirs, ours))
            cells = (f"{blocks} x {width}", len(ours), *losses)
            rows.append((str(ratio), *cells, *decided([gap_of(ours, theirs)])))
    if len(pairs) > 1:
        rows.append(("change when the ratio doubles", *[""] * 4, growth(pairs), ""))
    head = ("width / depth", "blocks x width", "seeds", BASELINE, "nag", "nag minus prenorm")
    return (*head, "verdict"), rows


def by_mode(lines):
    """{mode: its lines, in the order of seeds}"""
    found = {}
    for line in sorted(lines, key=lambda line: line["settings"]["seed"]):
        found.setdefault(line["settings"].get("residual", BASELINE), []).append(line)
    return found


def of_streams():
    """What mhc and ihc owe to parameters and to several streams, with seeds of their own."""
    found = {name: lines for (name, _), lines in lead_lines("streams").items()}
    again = by_mode(study.finished("float32").values())
    found |= {f"{mode} in float32": lines for mode, lines in again.items()}
    large, narrow = "prenorm as large as mhc", "ihc with one stream"
    pairs = [(name, BASELINE) for name in (large, "mhc", narrow, "ihc")]
    pairs += [("mhc", large), ("ihc", narrow), ("ihc in float32", f"{BASELINE} in float32")]
    rows = []
    for name, base in pairs:
        if {name, base} <= found.keys():
            ours, theirs = found[name], found[base]
            params = [f"{lines[0]['params']:,}" for lines in (ours, theirs)]
            n = min(len(ours), len(theirs))
            rows.append((name, base, *params, n, *decided([gap_of(ours, theirs)])))
    head = ("model", "minus", "parameters", "parameters of the other", "seeds", "difference")
    return (*head, "verdict"), rows


def copiers():
    """When the model of each seed starts to copy, and the losses at the end."""
    found = {}
    for line in sorted(read("copying"), key=lambda line: line["settings"]["seed"]):
        full = study.DEFAULTS | line["settings"]
        group = (full["optimizer"], full["n_layer"], full["residual"], full["learning_rate"])
        found.setdefault(group, []).append(line)
    rows = []
    for (optimizer, blocks, mode, rate), lines in sorted(found.items()):
        columns = (
            [line["settings"]["seed"] for line in lines],
            [copying.onset(line) or "never" for line in lines],
            [f"{line['copying'][-1][2]:.2f}" for line in lines],
            [f"{line['loss']:.3f}" for line in lines],
        )
        cells = (", ".join(map(str, column)) for column in columns)
        rows.append((mode, OPTIMIZERS[optimizer], blocks, f"{rate:g}", *cells))
    head = ("mode", "optimizer", "blocks", "rate", "seeds", "copies after steps")
    return (*head, "repeated characters", "loss"), rows


def of_tuning_seeds(mode, rate):
    choice = judge.with_rate(judged("muon")[0][mode][0], rate)
    scale = scale_of("muon")
    return find("judge", [judge.settings(scale, mode, choice, seed) for seed in judge.TUNING])


def early():
    """The training loss minus pre-norm's during training, with the seeds of the judge.

    With pre-norm's rate, of a mode that has another: with the seeds that tune.
    """
    rows, steps = [], (100, 400, 700, 1000, 1500, 2000, 3000, 4000)
    modes = ("nag", "bhyt", "ihc", "mhc", "attnres", "hc", "attnres_block")
    for optimizer in OPTIMIZERS:
        trained = judged(optimizer)[0]
        choice, theirs = trained[BASELINE]
        known = [mode for mode in modes if mode in trained]
        pairs = {mode: (judged_lines(optimizer, mode), theirs[1.0]) for mode in known}
        pairs[f"{BASELINE} at half its rate"] = theirs["half"], theirs[1.0]

        for mode in ("nag", "ihc") if optimizer == "muon" else ():
            both = (of_tuning_seeds(name, choice["learning_rate"]) for name in (mode, BASELINE))
            pairs[f"{mode} at {BASELINE}'s rate"] = tuple(both)
        for name, pair in pairs.items():
            cells = (f"{lead:+.3f}" for lead in leads(*pair, steps))
            rows.append((name, OPTIMIZERS[optimizer], *cells))
    return ("mode", "optimizer", *(f"step {step:,}" for step in steps)), rows


def parts():
    """NAG and BHyT with one part changed."""
    rows = []
    for what in ("nag", "bhyt"):
        changes, times = lead.PLANS[what][0], lead_times(what)
        lines = lead_lines(what)
        found = [*lead.rows(lines, changes)]
        n = {name: min(len(lines[name, 4000]), len(lines[what, 4000])) for name, *_ in found}
        corrected = stats.holm({name: (gap, n[name]) for name, _, _, gap in found})
        for name, _, loss, gap in found:
            time = f"{times[name][1]:.2f}" if name in times else ""
            rows.append((what, name, f"{loss:.4f}", *decided([gap]), corrected[name], time))
    measured, predicted = (judged_lines("muon", mode) for mode in ("bhyt_exact", "bhyt"))
    loss = f"{mean(losses_of(measured)):.4f}"
    gap = decided([gap_of(measured, predicted)])
    rows.append(("bhyt", "variance measured (5 seeds)", loss, *gap, "", ""))
    head = ("mode", "change", "loss", "difference", "verdict", "after Holm", "step time")
    return head, rows


def mean_of(lines, key):
    return mean(line[key] for line in lines)


@cache
def dense():
    """{steps: lines of NAG without skipping}"""
    tokens = lead_lines("tokens").items()
    known = {steps: of for (name, steps), of in tokens if name == "nag" and steps >= 2000}
    return {steps: with_further_seeds(of) for steps, of in known.items()}


def minus_dense(lines, steps):
    """The losses minus NAG's without skipping after as many steps, interpolated between lengths."""
    by_length = {steps: losses_of(of) for steps, of in dense().items()}
    return stats.differences_at(steps, losses_of(lines), by_length)


def at_equal_flops(lines):
    """minus_dense at the FLOPs of each seed's run."""
    per_step = flops_of_step(dense()[4000])
    found = [minus_dense(lines, line["flops"] / per_step) for line in lines]
    return [by_seed[i] for i, by_seed in enumerate(found) if i < len(by_seed)]


def mixtures():
    """NAG with mixtures of depths and with fewer blocks, beside the same model without skipping."""
    found, changes, times = lead_lines("mod"), lead.PLANS["mod"][0], lead_times("mod")
    rows = []
    for name, steps, *_ in lead.rows(found, changes):
        if changes[name] is None:
            continue
        base = lead.base_of(changes, name)
        both = [with_further_seeds(found[at, steps]) for at in (name, base)]
        n = min(map(len, both))
        lines, theirs = (each[:n] for each in both)
        skipped = f"{mean_of(lines, 'skipped'):.1%}" if "router" in name else ""
        flops = f"{mean_of(lines, 'flops') / mean_of(theirs, 'flops'):.2f}"
        cells = (name, n, skipped, flops, f"{mean_of(lines, 'loss'):.4f}")
        cells += (plus_minus(gap_of(lines, theirs)),)
        if base != "nag":  # the others are also compared with NAG at other lengths
            rows.append((*cells, *[""] * 5))
            continue
        at_flops = stats.interval(at_equal_flops(lines))
        ratios = times.get(name, ())
        at_times = [stats.interval(minus_dense(lines, steps * ratio)) for ratio in ratios]
        time = f"{ratios[1]:.2f}" if ratios else ""
        rows.append((*cells, *decided([at_flops]), time, *decided(at_times)))
    head = ("model", "seeds", "skip in evaluation", "FLOPs", "loss", "at equal steps")
    head += ("at equal FLOPs", "verdict at equal FLOPs")
    return (*head, "step time", "at equal time", "verdict at equal time"), rows


def with_further_seeds(lines):
    """The lines of the first three seeds of a run, then of its later seeds in float32."""
    own, seed_of = lines[0]["settings"], lambda line: line["settings"]["seed"]
    more = [*study.finished("skipping").values(), *study.finished("float32").values()]
    more = [line for line in more if line["settings"] | {"seed": own["seed"]} == own]
    more = [line for line in more if seed_of(line) > seed_of(lines[2])]
    return lines[:3] + sorted(more, key=seed_of)


def lead_facts():
    """Pairs of mixtures of depths, models that copy, and runs that were repeated."""
    found = {name: with_further_seeds(lines) for (name, _), lines in lead_lines("mod").items()}
    own = "NAG's router 0.4"
    by_seed = (at_equal_flops(found[name]) for name in (own, "nag with 5 blocks"))
    yield "NAG's router minus 5 blocks", plus_minus(stats.interval(stats.minus_shared(*by_seed)))
    for ours, theirs in (
        ("NAG's router 0.2", "learned router 0.2"),
        (own, "learned router 0.4"),
        (own, "learned router on pre-norm 0.4"),
        ("learned router 0.4", "learned router on pre-norm 0.4"),
        ("NAG's router with fallback 0.4", own),
    ):
        yield f"{ours} minus {theirs}", plus_minus(gap_of(found[ours], found[theirs]))

    shallow = lead_lines("blocks", "adamw")
    for mode in (BASELINE, "nag"):
        lines = shallow[mode, 4]
        copy = [copying.copies(*line["depth"]["copying"]) for line in lines]
        yield f"{mode} copies with AdamW and 4 blocks", f"{sum(copy)} of {len(copy)}"
    pairs = by_depth()["nag", "AdamW"]
    deeper = growth({n: pair for n, pair in pairs.items() if n > 4})
    yield "change of NAG's lead from 8 to 32 blocks", deeper
    yield "NAG's lead with 32 blocks minus 2.4 times that with 8", minus_grown(pairs[32], pairs[8])
    experts = lead_lines("experts", "adamw")
    ends = [(experts["nag", ratio], experts[BASELINE, ratio]) for ratio in (19, 80)]
    yield "NAG's lead at ratio 19 minus 2.4 times that at 80", minus_grown(*ends)

    for again, words in (("another_cpu", "on another CPU"), ("float32", "in float32")):
        changes = [*repeated(again, "lead")]
        yield f"runs {words}", len(changes)
        yield f"mean change {words}", f"{mean(changes):+.4f}"
        yield f"deviation {words}", f"{stdev(changes):.4f}"


def repeated(again, first):
    """The change of the loss for each run of a study that repeats one of another study."""
    losses = {line["key"]: line["loss"] for line in study.finished(first).values()}
    for line in study.finished(again).values():
        yield line["loss"] - losses[line["key"]]


# ------------------------------------------------------------------------------------------------
# Inside the models, and other studies

INSIDE = {  # what eval.py measured by depth on seed 1
    "norm growth": lambda depth: depth["norm"][-1] / depth["norm"][0],
    "late turn": lambda depth: depth["from embedding"][-1] - depth["from embedding"][7],  # of 16
    "attention to the first token": lambda depth: max(depth["sink"]),
    "largest feature": lambda depth: max(depth["max/rms"]),
    "kurtosis": lambda depth: max(depth["kurtosis"]),
    "norm and entropy": lambda depth: depth.get("norm and entropy"),
    "norm and loss": lambda depth: depth.get("norm and loss"),
}


def inside():
    """Each measurement from the lowest to the highest over the measured learning rates."""
    rows = []
    names = ("prenorm", "nag", "lns", "perinorm", "dyt", "bhyt")
    for optimizer, mode in product(OPTIMIZERS, names):
        known = judge.lines_of_mode(scale_of(optimizer), mode)
        lines = [line for full, line in known if full["seed"] == 1]
        row = [f"{mode} {OPTIMIZERS[optimizer]}"]
        for measure in INSIDE.values():
            values = [measure(line["depth"]) for line in lines if "depth" in line]
            values = sorted(value for value in values if value is not None)
            ends = [f"{value:.3g}" for value in values[:1] + values[-1:]]
            row.append(" to ".join(dict.fromkeys(ends)))
        rows.append(row)
    return ("mode", *INSIDE), rows


EARLIER = {  # finding: (study, variant, the variant that it is compared with)
    "8 blocks: NAG": ("nag_depth", "nag_8", "prenorm_8"),
    "16 blocks: NAG": ("nag_depth", "nag_16", "prenorm_16"),
    "32 blocks: NAG": ("nag_depth", "nag_32", "prenorm_32"),
    "NAG's rotation alone": ("nag_ladder", "rotation_only", "prenorm"),
    "BHyT as published": ("bhyt", "bhyt", "prenorm"),
    "BHyT with outputs of variance 1": ("bhyt", "bhyt_unit", "prenorm"),
    "40% skip MLPs, from none": ("mod_table", "learned_mlp_0.4", "dense"),
    "40% skip attention, from none": ("mod_table", "learned_attention_0.4", "dense"),
    "20% skip, from pre-norm's": ("mod_table", "no_fallback_0.2", "prenorm_learned_0.2"),
}


def of_earlier(name, variant):
    """The losses of all seeds, at the learning rate that is best for the first seed."""
    lines = [x for x in read("earlier") if (x["study"], x["variant"]) == (name, variant)]
    lines = sorted(lines, key=lambda line: line["seed"])
    first = [line for line in lines if line["seed"] == lines[0]["seed"]]
    rate = min(first, key=lambda line: line["loss"])["learning_rate"]
    return [line["loss"] for line in lines if line["learning_rate"] == rate]


def earlier():
    rows = []
    for finding, (name, ours, theirs) in EARLIER.items():
        gap = minus(of_earlier(name, ours), of_earlier(name, theirs))
        rows.append((finding, plus_minus(stats.interval(gap))))
    return ("short runs", "difference"), rows


def other_facts():
    """The default run, small networks, BHyT's prediction and speed, and high learning rates."""
    log = map(json.loads, (RESULTS / "default" / "log.jsonl").read_text().splitlines())
    losses = [record["val_loss"] for record in log if record.get("val_loss")]
    yield "default run", f"{losses[-1]:.3f}"
    yield "default run on the whole split", f"{load('default/eval.json')['loss']['loss']:.3f}"

    for line in read("classroom"):
        known = line["settings"]
        if known["what"] == "stack":
            yield f"stack {known['case']}", f"{line['first']:.3g} to {line['last']:.3g}"
        if known["what"] == "transformer" and known["rate"] == 1e-3:  # the better of two rates
            yield f"one block, {known['skip']}", f"{line['last']:.2f}"
        if known["what"] == "bigram":
            yield "entropy given one character", f"{line['entropy']:.2f}"

    change = mean(repeated("repaired", "judge"))
    yield "change of mhc with float32 gradients", f"{change:+.4f}"
    of = by_mode(x for x in read("retuned") if x["settings"]["seed"] not in judge.TUNING)
    for mode in ("x0mix", "rezero"):
        yield f"{mode} at half its rate", in_words(gap_of(of[mode], of[BASELINE]))

    found = load("variance.json")
    yield "R2 of BHyT's prediction", f"{mean(found['R2']):.2f}"
    for line in read("earlier"):
        mode, rate = line["variant"], line["learning_rate"]
        if (line["study"], line["seed"]) == ("bhyt", 1) and rate in (0.001, 0.03):
            yield f"variance of {mode} at {rate}", f"{line['variance'][-1]:.2g}"
    gpu = load("speed/gpu.json")
    forward = gpu["forward"]["forward"]
    training = gpu["step, 2 x 2048: norms"]["train"]
    generation = gpu["decoding"]["generate"] | gpu["decoding, 32 at once"]["generate"]
    for name, of, other in (
        ("forward", forward, "prenorm"),
        ("forward over Peri-norm's", forward, "perinorm"),
        ("training", training, "prenorm"),
        ("generation of 128", generation["128 new, 1 at once"], "prenorm"),
        ("generation of 512", generation["512 new, 1 at once"], "prenorm"),
        ("eager token", generation["a token, no cache, 128 new, 1 at once"], "prenorm"),
        ("eager tokens", generation["a token, no cache, 128 new, 32 at once"], "prenorm"),
    ):
        pairs = zip(of["bhyt"]["seconds"], of[other]["seconds"])
        low, middle, high = stats.median_interval([a / b for a, b in pairs])
        yield f"time of BHyT's {name}", f"{middle:.3f} ({low:.3f} to {high:.3f})"
    training = gpu["step, 12 x 768: nag"]["train"]
    yield "time of NAG's step at 12 x 768", with_range(training["nag"]["ratio"])
    yield "time of pre-norm's again at 12 x 768", with_range(training["prenorm again"]["ratio"])
    for rate in (0.2, 0.4):
        row = gpu["skipping"]["mod"][f"step, rate {rate}"]
        yield f"time of a step that skips {rate:.0%}", with_range(row["ratio"])


def conversion():
    """A pre-norm model that trains on, unchanged or converted; the settings are tuned on seed 0."""
    starts = [line for line in read("convert") if "init_from" in line["settings"]]
    of, rows = by_mode(line for line in starts if line["settings"]["seed"] > 0), []
    for mode, lines in of.items():
        losses = (f"{mean_of(lines, key):.4f}" for key in ("start", "loss"))
        factor = lines[0]["settings"]["learning_rate"] / study.DEFAULTS["learning_rate"]
        rows.append((mode, *losses, plus_minus(gap_of(lines, of[BASELINE])), f"{factor:g}"))
    return ("start", "loss at step 0", "loss", f"minus {BASELINE}'s", "factor on rates"), rows


def speed():
    """The time of a step over pre-norm's on a CPU and a GPU, and what it would move on an H100."""
    steps, alone = {}, {}
    for name, run in load("speed/gpu.json").items():
        ratios = {mode: row["ratio"] for mode, row in run.get("train", {}).items()}
        steps |= ratios if "2 x 2048" in name else {}
        alone |= {mode: row["ratio"] for mode, row in run.get("residual", {}).items()}
    found = {"8 x 64, a CPU core": judged("muon")[1], "2 x 2048, H200": steps}
    found["residual alone, H200"] = alone
    moved = load("speed/h100.json")["modes"]

    def on_h100(mode):
        if mode not in moved:
            return ""
        passes, kernels = moved[mode]["passes"], moved[mode]["kernels"]
        return f"{passes:.1f} ({passes / moved[BASELINE]['passes']:.2f}), {kernels}"

    rows = []
    for mode in RESIDUALS:
        cells = [*(with_range(of.get(mode)) for of in found.values()), on_h100(mode)]
        if any(cells):
            rows.append((mode, *cells))
    return ("mode", *found, "passes on an H100 (ratio), kernels"), rows


# ------------------------------------------------------------------------------------------------
# The pages

TABLES = {
    "modes": partial(modes, "muon"), "adamw": partial(modes, "adamw"), "at size": at_size,
    "lengths": lengths, "depths": depths, "streams": of_streams, "experts": experts,
    "copying": copiers, "early": early, "parts": parts,
    "mixtures": mixtures, "inside": inside, "earlier": earlier, "speed": speed,
    "recipe": lambda: (recipe.HEAD, [*recipe.rows(find)]),
    "conversion": conversion,
    "facts": lambda: (
        ("fact", "value"), [*judge_facts(), *verdict_facts(), *lead_facts(), *other_facts()]
    ),
}  # fmt: skip
TABLE = re.compile(r"(<!-- table: (.*?) -->\n).*?<!-- end -->", re.S)
NUMBER = re.compile(r"(<!-- ([^<>/]+)/([^<>/]+)/([^<>/]+) -->).*?<!-- -->")


@cache
def table_of(name):
    """(head, rows) of a table."""
    if name not in TABLES:
        raise SystemExit(f"no table {name!r}: choose from {', '.join(TABLES)}")
    return TABLES[name]()


def number(name, row, column):
    """A cell of a table, as text."""
    head, rows = table_of(name)
    if column not in head:
        raise SystemExit(f"table {name!r} has no column {column!r}: choose from {', '.join(head)}")
    exact = [cells for cells in rows if cells[0] == row]
    longer = [cells for cells in rows if " ".join(map(str, cells)).startswith(f"{row} ")]
    named = exact or longer
    if not named and name == "modes" and row in RESIDUALS:
        return "not judged yet"
    if len(named) != 1:
        names = ", ".join(str(cells[0]) for cells in rows)
        raise SystemExit(f"table {name!r} has {len(named)} rows {row!r}: choose one from {names}")
    return str(named[0][head.index(column)])


def filled(page):
    """The text of a page with its tables and numbers written anew."""
    as_table = lambda mark: f"{mark[1]}{study.table(*table_of(mark[2]))}<!-- end -->"
    as_number = lambda mark: f"{mark[1]}{number(*mark.groups()[1:])}<!-- -->"
    page, n_tables = TABLE.subn(as_table, page)
    page, n_numbers = NUMBER.subn(as_number, page)
    if page.count("<!--") != 2 * (n_tables + n_numbers):
        raise SystemExit("a mark has no end, or is not one of the two kinds: see runs/tables.py")
    return page


def names_in_words(readme):
    """{mode: its design} from README's table of modes."""
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \|", readme, re.M)
    return {mode: re.sub(r"\[(.*?)\]\(.*?\)", r"\1", design) for design, mode in rows}


if __name__ == "__main__":
    configure(globals(), argv=sys.argv[1:])  # there are no settings: only --help
    for page in PAGES:
        text = filled((ROOT / page).read_text())
        (ROOT / page).write_text(text)
    readme = (ROOT / "README.md").read_text()
    judge.draw(RESULTS / "modes.png", compared("muon"), names_in_words(readme))
    plot.leads(RESULTS / "depth.png", curves_by_depth(), "validation loss minus pre-norm's")
