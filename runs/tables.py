"""
Fill the marked tables and numbers of the pages in PAGES from results/, and draw the figures.

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
from statistics import mean, median

import judge
import lead
import stats
import study
from stats import by_seed, decided, gap_of, losses_of, plus_minus, verdict, with_range
from study import ROOT, NotFinished, find

import plot
from configurator import usage
from model import RESIDUALS

RESULTS = ROOT / "results"
PAGES = ("RESULTS.md", "README.md", "results/more.md")
SEEDS = (judge.seeds, 6, 5)  # numbers of seeds that a mode may have, the most first
BASELINE = judge.baseline
DEPTHS = (4, 8, 16, 32)
OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW"}
PLACES = {  # where designs are compared: (config file, optimizer, file of results, threads)
    "muon": ("judge_8x64", "muon", "judge", 1), "adamw": ("judge_8x64", "adamw", "judge", 1),
    "english": ("judge_8x64", "muon", "english", 1), "wider": ("judge_8x128", "muon", "judge", 2),
}  # fmt: skip
TRAVELS = {  # places with Muon, as blocks x width and text
    "muon": "8 x 64, Python", "english": "8 x 64, English", "wider": "8 x 128, Python"
}  # fmt: skip
JUDGED = {mode: (mode, {}) for mode in RESIDUALS}  # name: (mode, its own settings)
JUDGED |= {
    "ihc, 4 streams": ("ihc", {"hc_streams": 4}), "wide, 2 streams": ("wide", {"hc_streams": 2})
}  # fmt: skip
LONGER = {"max_iters": 4000, "batch_size": 8}  # 4.5 bytes for each parameter at 8 x 128
BAD = 1.0  # pre-norm's loss with a bad seed, at least, with Muon at 8 x 64
COPIES = 0.75  # a model copies if repeated characters cost less than this share of the first time
study.record = True  # read results/ only


def load(name):
    return json.loads((RESULTS / name).read_text())


# ------------------------------------------------------------------------------------------------
# The judge's runs


def scale_of(place):
    config, optimizer, *_ = PLACES[place]
    return study.parse([f"{ROOT}/config/{config}.py", f"--optimizer={optimizer}"])


def with_most_seeds(numbers, lines_of):
    """lines_of(number of seeds), for the first of these numbers that has finished, or None."""
    for n in numbers:
        with suppress(NotFinished):
            return lines_of(n)


def step_times(place, **more):
    """{name: median_interval of its time over the baseline's} of what is JUDGED and timed. Times do
    not depend on the text. more: further settings
    """
    usual, threads = scale_of(place) | more, PLACES[place][-1]
    timed = {BASELINE: judge.scale_for(usual, BASELINE)}
    for name, (mode, change) in JUDGED.items():
        timed[name] = judge.scale_for(usual | change, mode)
    return study.race("judge", timed, measure=False, threads=threads)


@cache
def judged(place):
    """({name: what judge.train returns}, {name: median_interval of its time}) of what is JUDGED.

    The baseline has those lengths and rates that its comparisons need and that have finished.
    """
    usual, lines_of, trained = scale_of(place), partial(find, PLACES[place][2]), {}
    for name, (mode, change) in JUDGED.items():
        with suppress(NotFinished):  # not tuned yet
            choice = judge.tune(usual | change, mode, lines_of)
            runs = partial(judge.of_seeds, usual | change, mode, choice)
            found = with_most_seeds(SEEDS, lambda n, runs=runs: lines_of(runs(n)))
            if found:
                trained[name] = choice, {1.0: found}
    ratios = {name: each for name, each in step_times(place).items() if name in trained}
    choice, lines = trained[BASELINE]
    lengths = judge.lengths(ratios)
    try:
        own = judge.choices_at(usual, BASELINE, choice, lines_of, lengths)
    except NotFinished:  # the first runs are older than the tuning for these lengths
        own = dict.fromkeys(lengths, choice)
    for name, other in {**own, **judge.other_rates(choice)}.items():
        length = name if name in lengths else 1.0
        runs = partial(judge.of_seeds, usual, BASELINE, other, length=length)
        found = with_most_seeds(SEEDS, lambda n, runs=runs: lines_of(runs(n)))
        if found:
            lines[name] = found
    return trained, ratios


@cache
def compared(place):
    """judge.compare of all judged modes, best at equal steps first and diverged ones last."""
    found = judge.compared(*judged(place))
    return sorted(found, key=lambda each: each["steps"] or (math.inf, 0))


def judged_lines(place, mode):
    """The lines of a mode's seeds."""
    return judged(place)[0][mode][1][1.0]


def modes(place):
    """The judge's table with verdicts after Holm's correction. The baseline is first, also with
    half and twice its learning rate.
    """
    found = compared(place)
    of_steps = {each["mode"]: [(each["steps"], each["n"])] for each in found if each["steps"]}
    times = {each["mode"]: [*zip(each["times"], each["timed"])] for each in found if each["times"]}
    at_steps, at_time = stats.holm(of_steps), stats.holm(times)
    head = ["mode", "seeds", *judge.HEAD[2:5], "after Holm", *judge.HEAD[5:-1]]
    head += ["after Holm, time", judge.HEAD[-1]]

    choice, lines = judged(place)[0][BASELINE]
    name, _, *rest = judge.cells_of_baseline(choice, lines)
    rows = [[name, len(lines[1.0]), *rest[:3], "", *rest[3:-1], "", rest[-1]]]
    for name in [name for name in judge.other_rates(choice) if name in lines]:
        theirs = lines[name]
        cells = f"{BASELINE} at {name} its rate", len(theirs), f"{mean(losses_of(theirs)):.4f}"
        gap = gap_of(theirs, lines[1.0])
        rows.append([*cells, *decided([gap]), *[""] * (len(head) - 5)])
    for each in found:
        name, _, *rest = judge.cells(each)
        row = [name, each["n"], *rest[:3], at_steps.get(name, ""), *rest[3:-1]]
        rows.append([*row, at_time.get(name, ""), rest[-1]])
    return head, rows


def in_several_places():
    """[(name, place)] of what was judged in several places, the baseline first."""
    counts = Counter(name for place in TRAVELS for name in judged(place)[0])
    several = [name for name, n in counts.items() if n > 1]
    return [(name, place) for name in several for place in TRAVELS if name in judged(place)[0]]


def places():
    """What was judged in several places: differences and verdicts, without Holm's correction."""
    tables, columns = {place: modes(place) for place in TRAVELS}, ["mode"]
    rows = {name: [name] for name, _ in in_several_places() if name != BASELINE}
    differences = (("at equal steps", "verdict"), ("at equal time", "verdict at equal time"))
    for titles, place in product(differences, TRAVELS):
        columns.append(f"{titles[0]}: {TRAVELS[place]}")
        head, every = tables[place]
        found = {cells[0]: [cells[head.index(title)] for title in titles] for cells in every}
        for name, row in rows.items():
            row.append(", ".join(found.get(name, ())))
    return columns, [*rows.values()]


def compared_in_several_places(words):
    """judge.compare of what was judged in several places, with a name in words and the place."""
    for name, place in in_several_places():
        for each in compared(place):
            if each["mode"] == name:
                yield each | {"mode": f"{words[name]}\n{TRAVELS[place]}"}


def judge_facts():
    """How many modes have each verdict, and what could have been found."""
    head, rows = table_of("modes")
    rivals = [row for row in rows if row[0].split()[0] != BASELINE]
    words = dict(zip(head, zip(*rivals)))
    for word in ("better", "worse", "undecided"):
        yield f"verdict: {word}", sum(cell.startswith(word) for cell in words["verdict"])
    yield "after Holm: worse", words["after Holm"].count("worse")
    yield "fragile", sum("fragile" in cell for cell in words["verdict"])
    yield "designs", len(RESIDUALS)
    yield "compared", len(words["mode"])
    decidable = [each for each in compared("muon") if each["steps"]]
    half_widths = [each["steps"][1] for each in decidable]
    yield "median half-width", f"{median(half_widths):.4f}"
    able = [stats.detectable(half, each["n"]) for half, each in zip(half_widths, decidable)]
    yield "difference to be found", f"{median(able):.3f}"
    pairs = ("ihc, 4 streams", "mhc"), ("ihc", "ihc, 4 streams"), ("wide, 2 streams", "wide")
    for pair in (*pairs, ("bhyt_exact", "bhyt")):
        lines = (judged_lines("muon", name) for name in pair)
        yield " minus ".join(pair), plus_minus(gap_of(*lines))
    (choice, _), usual = judged("muon")[0][BASELINE], scale_of("muon")
    starts = choice, choice | {"init_out": "zero"}
    ends = judge.means(usual, BASELINE, starts, partial(find, "judge"), 1.0, judge.TUNING)
    for name, end in zip(("as chosen", "from zero projections"), ends):
        yield f"prenorm, tuning seeds, {name}", f"{end:.4f}"
    (choice, _), usual = judged("adamw")[0][BASELINE], scale_of("adamw")
    again = find("another_cpu", judge.of_seeds(usual, BASELINE, choice, judge.seeds)[3:])
    of_one_cpu = judged_lines("adamw", BASELINE)[:3] + again
    yield "ihc, AdamW, one CPU", plus_minus(gap_of(judged_lines("adamw", "ihc"), of_one_cpu))
    commits = [line["commit"] for line in study.finished("judge").values()]
    share = mean(commit.endswith("+changes") for commit in commits)
    yield "runs with uncommitted changes", f"{share:.0%}"


def again_facts():
    """ihc against pre-norm with 8 more seeds, settings as before: these alone, with the first ones,
    and all but those with which pre-norm ends high.
    """
    name, usual = "ihc", scale_of("muon")
    trained, ratios = judged("muon")

    def lines_of(name, length=1.0):
        mode, change = JUDGED[name]
        how = usual | change, mode, trained[name][0]
        return find("judge", judge.of_seeds(*how, 2 * judge.seeds, length))

    ours, lengths = lines_of(name), (1.0, *judge.lengths({name: ratios[name]}))
    theirs = {length: lines_of(BASELINE, length) for length in lengths}
    every = range(len(ours))
    chosen = {"16 seeds": every, "new seeds": every[judge.seeds :]}
    chosen["good seeds"] = [at for at in every if theirs[1.0][at]["loss"] < BAD]
    chosen["new good seeds"] = [at for at in chosen["good seeds"] if at >= judge.seeds]
    for what, kept in chosen.items():
        some = lambda lines, kept=kept: [lines[at] for at in kept]
        others = {length: some(lines) for length, lines in theirs.items()}
        found = judge.compare(name, trained[name][0], some(ours), others, ratios[name])
        yield from found_by(f"{name}, {what}", found)


def longer_facts():
    """ihc against pre-norm at 8 x 128 with 5.3 times as many bytes. One seed chose their rates."""
    usual, lines_of, lines = scale_of("wider") | LONGER, partial(find, "judge"), {}
    for mode, lengths in ((BASELINE, (0.7, 1.0, 1.4)), ("ihc", (1.0,))):
        choice = judge.best_rate(usual, mode, {"learning_rate": 0.008}, lines_of, 1.0)
        runs = {length: judge.of_seeds(usual, mode, choice, 6, length) for length in lengths}
        lines[mode] = {length: lines_of(each) for length, each in runs.items()}
        yield f"{mode}, longer, 1.0 times, loss", f"{mean(losses_of(lines[mode][1.0])):.4f}"
    ratio = step_times("wider", **LONGER)["ihc"]
    found = judge.compare("ihc", choice, lines["ihc"][1.0], lines[BASELINE], ratio)
    yield from found_by("ihc, longer", found)
    yield "ihc, longer, worth", with_range(found["worth"])
    yield "ihc, longer, step time", with_range(ratio)


def found_by(title, found):
    """The differences of what judge.compare returned, and the verdict at equal time."""
    difference, word = decided(found["times"])
    yield f"{title}, at equal steps", plus_minus(found["steps"])
    yield f"{title}, at equal time", difference
    yield f"{title}, verdict", word


def leads(ours, theirs, steps):
    """The mean difference of the training losses of these seeds at each of these steps."""
    curves = [[dict(line["curve"]) for line in pair] for pair in stats.pairs(ours, theirs).values()]
    return [mean(a[step] - b[step] for a, b in curves) for step in steps]


def verdict_facts():
    """With Muon: the verdicts after Holm's correction of the modes that lead after 1,000 steps, and
    how many change at half of pre-norm's rate.
    """
    theirs = judged("muon")[0][BASELINE][1]
    ahead, fragile = Counter(), 0
    for each in compared("muon"):
        mode = each["mode"]
        if not each["steps"]:  # a run diverged
            continue
        ours = judged_lines("muon", mode)
        gap = gap_of(ours, theirs["half"])
        fragile += gap is not None and verdict([gap]) != verdict([each["steps"]])
        if leads(ours, theirs[1.0], [1000])[0] < 0:
            ahead[number("modes", mode, "after Holm")] += 1
    yield "fragile at half its rate", fragile
    for word, n in ahead.items():
        yield f"ahead after 1,000 steps: {word}", n


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
        by_length = {n: losses for n, losses in by_length.items() if math.inf not in losses}
        found, gaps = {}, {}
        for each in compared(optimizer):
            ours = judged_lines(optimizer, each["mode"])
            flops = flops_of_step(ours) / flops_of_step(theirs[1.0])
            if not each["steps"] or not min(by_length) <= flops <= max(by_length):
                continue  # a run of the mode diverged, or of the baseline at such a length
            by_seed = stats.differences_at(flops, losses_of(ours), by_length)
            gaps[each["mode"]] = [(stats.interval(by_seed), len(by_seed))]
            if each["mode"] in better:
                params = each["params"] / theirs[1.0][0]["params"]
                found[each["mode"]] = f"{params:.2f}", f"{flops:.2f}", plus_minus(each["steps"])
        corrected = stats.holm(gaps)
        for mode, cells in found.items():
            rows.append((mode, name, *cells, *decided([gaps[mode][0][0]]), corrected[mode]))
    head = ("mode", "optimizer", "parameters", "FLOPs", "at equal steps", "at equal FLOPs")
    return (*head, "verdict at equal FLOPs", "after Holm"), rows


# ------------------------------------------------------------------------------------------------
# Other depths, streams, experts, mixtures of depths: runs/lead.py


@cache
def lead_lines(what, optimizer="muon"):
    """{(name, value): the lines of its seeds} of what has finished of a plan of runs/lead.py."""
    changes, settings_of = lead.PLANS[what]
    found = {}
    for name, value in product(changes, settings_of):
        with suppress(NotFinished):  # not tuned yet
            runs = lead.runs_of(name, changes[name], settings_of[value], find, optimizer)
            numbers = range(len(runs), 2, -1)  # of seeds: all, or the first ones
            lines = with_most_seeds(numbers, lambda n, runs=runs: find("lead", runs[:n]))
            if lines:
                found[name, value] = lines
    return found


@cache
def by_depth():
    """{optimizer in words: {blocks: (lines of NAG, lines of pre-norm)}}"""
    found = {}
    for optimizer, words in OPTIMIZERS.items():
        eight = {(mode, 8): judged_lines(optimizer, mode) for mode in ("nag", BASELINE)}
        lines = lead_lines("blocks", optimizer) | eight
        known = [n for n in DEPTHS if {("nag", n), (BASELINE, n)} <= lines.keys()]
        found[words] = {n: (lines["nag", n], lines[BASELINE, n]) for n in known}
    return found


def growth(pairs):
    """The change of the difference of two designs when x doubles.

    pairs: {x: (lines of one, lines of the other)}
    """
    return plus_minus(stats.slope({math.log2(x): by_seed(*pair) for x, pair in pairs.items()}))


def minus_grown(large, small):
    """The difference of two designs in one pair, minus 2.4 times that in the other.

    In NAG's paper, with experts, it grows 2.4 times. A pair: (lines of one, lines of the other)
    """
    return plus_minus(stats.contrast([(1, by_seed(*large)), (-2.4, by_seed(*small))]))


def curves_by_depth():
    """{label: {number of blocks: interval}} for the figure."""
    label = lambda words, pairs: f"nag, {words}: {growth(pairs)} when doubled"
    gaps = lambda pairs: {n: gap_of(*pair) for n, pair in pairs.items()}
    return {label(words, pairs): gaps(pairs) for words, pairs in by_depth().items()}


def depths():
    """Losses minus pre-norm's by the number of blocks, and their change when it doubles."""
    rows = []
    for words, pairs in by_depth().items():
        cells = [plus_minus(gap_of(*pairs[n])) if n in pairs else "" for n in DEPTHS]
        rows.append(("nag", words, *cells, growth(pairs)))
    return ("mode", "optimizer", *(f"{n} blocks" for n in DEPTHS), "when doubled"), rows


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
        if optimizer == "muon":
            for mode in ("nag", "ihc"):
                both = (of_tuning_seeds(name, choice["learning_rate"]) for name in (mode, BASELINE))
                pairs[f"{mode} at {BASELINE}'s rate"] = tuple(both)
        for name, pair in pairs.items():
            cells = (f"{lead:+.3f}" for lead in leads(*pair, steps))
            rows.append((name, OPTIMIZERS[optimizer], *cells))
    return ("mode", "optimizer", *(f"step {step:,}" for step in steps)), rows


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
    found, changes = lead_lines("mod"), lead.PLANS["mod"][0]
    timed = {name: lines[0]["settings"] for (name, _), lines in found.items()}
    times = study.race("lead", timed, measure=False)
    rows = []
    for name, steps in found:
        base = lead.base_of(changes, name)
        if changes[name] is None or (base, steps) not in found:
            continue
        both = [with_further_seeds(found[at, steps]) for at in (name, base)]
        n = min(map(len, both))
        lines, theirs = (each[:n] for each in both)
        gap = gap_of(lines, theirs)
        row = [name, n, "", "", "", plus_minus(gap), *[""] * 5]
        rows.append(row)
        if gap is None:  # a run diverged
            continue
        skipped = f"{mean_of(lines, 'skipped'):.1%}" if "router" in name else ""
        flops = f"{mean_of(lines, 'flops') / mean_of(theirs, 'flops'):.2f}"
        row[2:5] = skipped, flops, f"{mean_of(lines, 'loss'):.4f}"
        if base == "nag":  # these are also compared with NAG at other lengths
            at_flops = stats.interval(at_equal_flops(lines))
            ratios = times.get(name, ())
            at_times = [stats.interval(minus_dense(lines, steps * ratio)) for ratio in ratios]
            time = f"{ratios[1]:.2f}" if ratios else ""
            row[6:] = *decided([at_flops]), time, *decided(at_times)
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


def copies(line):
    """Whether a model copies from its context."""
    first, again = line["depth"]["copying"]
    return again < COPIES * first


def mixture_facts():
    """Differences between mixtures of depths."""
    found = {name: with_further_seeds(lines) for (name, _), lines in lead_lines("mod").items()}
    own = "NAG's router 0.4"
    losses = (at_equal_flops(found[name]) for name in (own, "nag with 5 blocks"))
    yield "NAG's router minus 5 blocks", plus_minus(stats.interval(stats.minus(*losses)))
    for ours, theirs in (
        ("NAG's router 0.2", "learned router 0.2"),
        (own, "learned router 0.4"),
        (own, "learned router on pre-norm 0.4"),
        ("learned router 0.4", "learned router on pre-norm 0.4"),
        ("NAG's router with fallback 0.4", own),
    ):
        yield f"{ours} minus {theirs}", plus_minus(gap_of(found[ours], found[theirs]))


def lead_facts():
    """Streams, models that copy, and NAG's lead by depth and with experts."""
    streams = lead_lines("streams")
    four, one = "ihc with four streams", "ihc with one stream"
    yield f"{four} minus {one}", plus_minus(gap_of(streams[four, 4000], streams[one, 4000]))
    shallow = lead_lines("blocks", "adamw")
    for mode in (BASELINE, "nag"):
        copy = [copies(line) for line in shallow[mode, 4]]
        yield f"{mode} copies with AdamW and 4 blocks", f"{sum(copy)} of {len(copy)}"
    pairs = by_depth()["AdamW"]
    deeper = growth({n: pair for n, pair in pairs.items() if n > 4})
    yield "change of NAG's lead from 8 to 32 blocks", deeper
    yield "NAG's lead with 32 blocks minus 2.4 times that with 8", minus_grown(pairs[32], pairs[8])

    lines, pairs = lead_lines("experts", "adamw"), {}
    for ratio, shape in lead.OF_EXPERTS.items():
        pair = lines["nag", ratio], lines[BASELINE, ratio]
        pairs[shape["n_embd"] / shape["n_layer"]] = pair
        yield f"NAG's lead with experts at ratio {ratio}", plus_minus(gap_of(*pair))
    yield "change of NAG's lead when the ratio doubles", growth(pairs)
    ends = pairs[min(pairs)], pairs[max(pairs)]
    yield "NAG's lead at ratio 19 minus 2.4 times that at 80", minus_grown(*ends)


# ------------------------------------------------------------------------------------------------
# The default run, and speed


def default_facts():
    log = map(json.loads, (RESULTS / "default" / "log.jsonl").read_text().splitlines())
    losses = [record["val_loss"] for record in log if record.get("val_loss")]
    yield "default run", f"{losses[-1]:.3f}"
    yield "default run on the whole split", f"{load('default/eval.json')['loss']['loss']:.3f}"


def speed_facts():
    """Times of BHyT over other designs, and steps at 12 x 768."""
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


def speed():
    """The time of a step over pre-norm's on a CPU and a GPU, and what it would move on an H100."""
    steps, alone = {}, {}
    for name, run in load("speed/gpu.json").items():
        ratios = {mode: row["ratio"] for mode, row in run.get("train", {}).items()}
        steps |= ratios if "2 x 2048" in name else {}
        alone |= {mode: row["ratio"] for mode, row in run.get("residual", {}).items()}
    found = {"8 x 64, a CPU core": step_times("muon"), "8 x 128, 2 cores": step_times("wider")}
    found |= {"2 x 2048, H200": steps, "residual alone, H200": alone}
    moved = load("speed/h100.json")["modes"]

    def on_h100(mode, change):
        name = ":".join([mode, *(f"{key}={value}" for key, value in change.items())])
        if name not in moved:
            return ""
        passes, kernels = moved[name]["passes"], moved[name]["kernels"]
        return f"{passes:.1f} ({passes / moved[BASELINE]['passes']:.2f}), {kernels}"

    rows = []
    for name, what in JUDGED.items():
        cells = [*(with_range(of.get(name)) for of in found.values()), on_h100(*what)]
        if any(cells):
            rows.append((name, *cells))
    return ("mode", *found, "passes on an H100 (ratio), kernels"), rows


def hand_written():
    """The kernels of kernels.py compiled for an H100, each where it needs most."""
    modes = load("speed/h100.json")["modes"]
    found = {}
    for mode in RESIDUALS:
        for kernel, numbers in modes.get(mode, {}).get("ours", {}).items():
            found.setdefault(kernel, {})[mode] = numbers
    rows = []
    for kernel, of_mode in found.items():
        registers, spilled, shared, occupancy = zip(*of_mode.values())
        numbers = max(registers), max(spilled), max(shared), f"{min(occupancy):.0%}"
        rows.append((f"`{kernel}`", ", ".join(of_mode), *numbers))
    return ("kernel", "modes", "registers", "spilled bytes", "shared bytes", "occupancy"), rows


def brief():
    """README's columns: how many times as many steps pre-norm needs, and the time of a step over
    pre-norm's on a CPU core and, if measured, on an H200. Without intervals.
    """
    without = lambda cell: str(cell).partition(" ")[0]
    head, rows = table_of("modes")
    worth = {row[0]: without(row[head.index("worth in steps")]) for row in rows}
    for mode, of_core, _, of_gpu, *_ in table_of("speed")[1]:
        cost = " / ".join(filter(None, map(without, (of_core, of_gpu))))
        yield mode, worth.get(mode, ""), cost


# ------------------------------------------------------------------------------------------------
# The pages

FACTS = (judge_facts, again_facts, longer_facts, verdict_facts, mixture_facts, lead_facts)
FACTS += (default_facts, speed_facts)
TABLES = {
    "modes": partial(modes, "muon"), "adamw": partial(modes, "adamw"),
    "english": partial(modes, "english"), "wider": partial(modes, "wider"), "places": places,
    "at size": at_size, "depths": depths, "early": early, "mixtures": mixtures,
    "speed": speed, "brief": lambda: (("mode", "worth", "cost"), [*brief()]),
    "kernels": hand_written,
    "facts": lambda: (("fact", "value"), [row for facts in FACTS for row in facts()]),
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
    exact = [cells for cells in rows if cells[0] == row]
    longer = [cells for cells in rows if " ".join(map(str, cells)).startswith(f"{row} ")]
    named = exact or longer
    if not named and row in RESIDUALS and column in head:
        return "not judged yet" if name == "modes" else ""
    if column not in head or len(named) != 1:
        known = f"rows {', '.join(str(cells[0]) for cells in rows)}; columns {', '.join(head)}"
        raise SystemExit(f"{name}/{row}/{column} is not one cell of this table: {known}")
    return str(named[0][head.index(column)])


def written(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def filled(page):
    """The text of a page with its tables and numbers written anew."""
    as_table = lambda mark: f"{mark[1]}{written(*table_of(mark[2]))}<!-- end -->"
    as_number = lambda mark: f"{mark[1]}{number(*mark.groups()[1:])}<!-- -->"
    page, n_tables = TABLE.subn(as_table, page)
    page, n_numbers = NUMBER.subn(as_number, page)
    if page.count("<!--") != 2 * (n_tables + n_numbers):
        raise SystemExit("a mark has no end, or is not one of the two kinds: see runs/tables.py")
    return page


def names_in_words(readme):
    """{mode, or name of what is JUDGED: its design} from README's table of modes."""
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \|", readme, re.M)
    words = {mode: re.sub(r"\[(.*?)\]\(.*?\)", r"\1", design) for design, mode in rows}
    judged = {name: mode for name, (mode, _) in JUDGED.items() if mode in words}
    return words | {name: words[mode] + name.removeprefix(mode) for name, mode in judged.items()}


if __name__ == "__main__":
    usage(__doc__, sys.argv, len(sys.argv) == 1)
    for page in PAGES:
        text = filled((ROOT / page).read_text())
        (ROOT / page).write_text(text)
    readme = (ROOT / "README.md").read_text()
    words = names_in_words(readme)
    judge.draw(RESULTS / "modes.png", compared("muon"), words)
    judge.draw(RESULTS / "places.png", compared_in_several_places(words), words)
    plot.leads(RESULTS / "depth.png", curves_by_depth(), "validation loss minus pre-norm's")
