"""
Write RESULTS.md and its figures from the files in results/.

    python runs/report.py

Every number in RESULTS.md comes from one of these files, or is a quoted published one.
"""

import json
import math
import re
import statistics
import textwrap
from collections import defaultdict
from contextlib import suppress
from functools import cache, partial

import claims
import convert
import judge
import lead
import recipe
import study
from study import ROOT, find, paired, plus_minus, read, table

from model import RESIDUALS

RESULTS, SPEED = ROOT / "results", ROOT / "results" / "speed"
WIDTH = 120
SEEDS = range(1, judge.seeds + 1)


def wrap(text):
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


# ------------------------------------------------------------------------------------------------
# The default recipe


def default_run():
    """(records with a validation loss, tokens per step, loss on the whole validation split)"""
    log = map(json.loads, (RESULTS / "default" / "log.jsonl").read_text().splitlines())
    records = [record for record in log if record.get("val_loss")]
    whole = json.loads((RESULTS / "default" / "eval.json").read_text())["loss"]["loss"]
    return records, records[-1]["tokens"] // records[-1]["step"], whole


def race(path):
    """A side-by-side run: (loss, steps, seconds) of the peer's best rate and of ours, and (loss of
    ours at the peer's time, difference)."""
    text = path.read_text()
    run = r"(\S+) after (\d+) steps, (\d+) s"
    peers = re.findall(rf"^\w+ at \S+: {run}", text, re.M)
    ours = re.search(rf"^ours: {run}", text, re.M).groups()
    met = re.search(r"ours (\S+), difference (\S+)", text).groups()
    return min(peers, key=lambda peer: float(peer[0])), ours, met


def the_recipe():
    records, size, whole = default_run()
    curve = ", ".join(f"{record['step']:,}: {record['val_loss']:.2f}" for record in records)
    ends = f"`python train.py` with its defaults ends at {records[-1]['val_loss']:.4f} nats per byte on the validation tokens that it evaluates, and "
    ends += f"at {whole:.4f} on the whole split, after {records[-1]['step']:,} steps of {size:,} bytes (`results/default`). If yours is normal, its validation "
    ends += f"loss at each step is close to this: {curve}."
    beside = "nanochat's model and optimizer (with its own learning rates) against ours, on the same machine and "
    beside += "shards. One run each. Times exclude the first three steps. If our run ends "
    beside += "first, we compare its final loss."
    text = f"## The default recipe\n\n{wrap(ends)}\n\n{wrap(beside)}\n\n"
    rows = []
    for path in sorted(SPEED.glob("nanochat_*.txt")):
        shape = path.stem.removeprefix("nanochat_").replace("x", " x ")
        (loss, n, seconds), (end, m, last), (at, difference) = race(path)
        theirs, ours = (
            f"{x} after {n} steps, {s} s" for x, n, s in ((loss, n, seconds), (end, m, last))
        )
        rows.append((shape, theirs, ours, at, difference))
    text += table(
        ("blocks x width", "nanochat", "ours", "our loss at nanochat's time", "difference"), rows
    )
    parts = f"Each part of the recipe, changed alone: {recipe.COMMON['max_iters']} steps of {size:,} bytes, "
    parts += f"{len(recipe.SEEDS)} seeds, paired by seed, with 95% intervals. Above 0, the change hurts. The time is "
    parts += "the changed run's time divided by the recipe's. The last column compares the change with the recipe "
    parts += "trained for the same time, if that was timed; its intervals leave out the uncertainty of the times, which were measured with two threads and ReLU. The recipe of this table has ReLU² and a logit cap of 15; the default now has ReLU and no cap. "
    parts += f"The changes are not tuned. The loss is on {recipe.COMMON['eval_tokens']:,} bytes of validation text."
    text += f"\n{wrap(parts)}\n\n```sh\npython runs/recipe.py\n```\n\n"
    text += "![What each part of the recipe is worth](results/recipe.png)\n\n"
    return text + table(recipe.HEAD, map(recipe.cells, recipe.rows(find, measure=False)))


# ------------------------------------------------------------------------------------------------
# The modes


def must_find(name, runs, look=()):
    """The lines of runs in a study. Raises LookupError if one is missing; trains nothing."""
    found = find(name, runs)
    if None in found:
        raise LookupError
    return found


def scale_of(optimizer):
    return study.parse([judge.SCALE, f"--optimizer={optimizer}"])


@cache
def judged(optimizer="muon"):
    """({mode: what judge.train returns}, {mode: median_interval of its time}) of the judged modes.

    Empty if the baseline is not among them.
    """
    scale, trained = scale_of(optimizer), {}
    for mode in RESIDUALS:
        with suppress(LookupError):
            trained[mode] = judge.train(scale, mode, partial(must_find, "judge"))
    if judge.baseline not in trained:
        return {}, {}
    choice, theirs = trained[judge.baseline]
    for length in judge.LENGTHS:
        runs = [judge.settings(scale, judge.baseline, choice, s, length) for s in SEEDS]
        with suppress(LookupError):
            theirs[length] = must_find("judge", runs)
    return trained, study.race("judge", judge.timed(scale, trained), measure=False)


def core_hours(*studies):
    """The time of all steps in these files, without evaluations, compilation and restarts."""
    lines = [line for study in studies for line in read(study) if line.get("step_s")]
    return sum(line["steps"] * line["step_s"] for line in lines) / 3600


def modes():
    """The verdicts of runs/judge.py, and what the models look like inside."""
    trained, ratios = judged()
    rows = list(judge.rows(trained, ratios))
    if not rows:
        return ""
    text = "Each mode against pre-norm, both tuned alike: 8 blocks of width 64, 4 MB of text, "
    text += f"{judge.seeds} seeds, paired by seed, with 95% intervals. Below 0 is better. The loss is on one half of the validation "
    text += f"split; {judge.TUNE_TOKENS:,} bytes of the other half were for tuning. A verdict is undecided if the interval contains 0. "
    text += "At equal time, we compare with pre-norm trained for as long as the mode takes (interpolated between lengths), and the verdict must be the same at both "
    text += "ends of the 95% interval of the measured time ratio: so a difference larger than its interval can be undecided. If a mode equals pre-norm, its verdict is "
    text += "still wrong in 5% of cases: among 20 modes, expect one false verdict. All runs of runs/judge.py and "
    text += f"runs/lead.py together took at least {core_hours('judge', 'lead'):.0f} core-hours."
    command = "```sh\npython runs/judge.py --residual=all\n```"
    inside = "Inside the model of the first seed, on 4,096 tokens. Norm growth: the norm of the stream after the last block divided by "
    inside += "that of the embedding. Angle: between these two. The last two columns are means over tokens, in the block where they are largest."
    head = ("mode", "norm growth", "angle to embedding (degrees)", "attention to the first token")
    head += ("largest feature / rms",)
    firsts = {mode: of[1][1.0][0] for mode, of in trained.items()}
    measured = [(mode, *through_depth(line)) for mode, line in firsts.items() if "depth" in line]
    tables = (
        f"{table(judge.HEAD, rows)}\n{tuning(trained)}\n{wrap(inside)}\n\n{table(head, measured)}"
    )
    return f"## The modes\n\n{wrap(text)}\n\n{command}\n\n{tables}{with_adamw()}"


def with_adamw():
    """The verdicts with AdamW, or nothing."""
    trained, ratios = judged("adamw")
    rows = list(judge.rows(trained, ratios))
    if not rows:
        return ""
    command = "python runs/judge.py config/judge_8x64.py --optimizer=adamw --residual=nag,bhyt,lns"
    text = f"The same with AdamW in place of Muon:\n\n```sh\n{command}\n```\n\n"
    return f"\n{text}{table(judge.HEAD, rows)}\n{tuning(trained, 'adamw')}"


def tuning(trained, optimizer="muon"):
    """A table of the losses of all learning rates that were tried, on the tuning half."""
    losses, scale = defaultdict(dict), scale_of(optimizer)
    for line in study.finished("judge").values():
        full = study.DEFAULTS | line["settings"]
        mode = full["residual"]
        if full["seed"] == 0 and mode in trained and judge.is_of(full, scale, mode):
            at = losses[mode, full["max_iters"]]
            rate = full["learning_rate"]
            at[rate] = min(*judge.losses([line]), at.get(rate, math.inf))
    rates = sorted({rate for at in losses.values() for rate in at})
    rows = ((mode, f"{steps:,}", *(f"{at[rate]:.4f}" if rate in at else "" for rate in rates))
            for (mode, steps), at in sorted(losses.items()))  # fmt: skip
    text = "Tuning, one seed: the lowest loss at each learning rate. The best rate changes with the length."
    return f"{text}\n\n{table(('mode', 'steps', *(f'rate {rate:g}' for rate in rates)), rows)}"


def through_depth(line):
    depth = line["depth"]
    yield f"{claims.growth(depth):.1f}"
    yield f"{depth['from embedding'][-1]:.0f}"
    yield f"{max(depth['sink']):.2f}"
    yield f"{max(depth['max/rms']):.1f}"


def leads(what):
    """The rows of runs/lead.py that have finished."""
    changes, axis, values, around = lead.PLANS[what]
    first, runs = next(iter(changes)), {}
    for name, change in changes.items():
        for value in values:
            with suppress(LookupError):
                runs |= lead.runs_of({name: change}, axis, [value], around, must_find)
    return [row for row in lead.rows(runs, first, find) if row[0] != first]


@cache
def lead_points():
    """{mode: [(steps, difference, half of its interval)]}: from lead.py, and at 4 MB the judge."""
    points, trained = defaultdict(list), claims.complete(judged()[0])
    if judge.baseline not in trained:
        return {}
    for mode, steps, loss, *interval in leads("tokens"):
        if loss is not None:
            points[mode].append((steps, *interval))
    for mode in points.keys() & trained.keys():
        pair = (claims.losses(trained, each) for each in (mode, judge.baseline))
        points[mode].append((trained[mode][1][1.0][0]["steps"], *paired(*pair)))
    return {mode: sorted(of) for mode, of in points.items()}


def per_parameter():
    """Bytes of text per step and parameter of pre-norm, in the judge's studies."""
    line = judged()[0][judge.baseline][1][1.0][0]
    return line["tokens"] / line["steps"] / line["params"]


def lead_text():
    """How the lead of each mode changes with tokens, with blocks, and with changes of NAG."""
    points = lead_points()
    if not points:
        return ""
    rows = [(mode, f"{steps:,}", f"{steps * per_parameter():.1f}", plus_minus(interval), judge.verdict([interval]))
            for mode, of in points.items() for steps, *interval in of]  # fmt: skip
    text = f"The difference from pre-norm (below 0: better) after 1 to 16 MB, for {len(lead.SEEDS)} new seeds. Each length "
    text += "is a separate run with its own schedule. All use the settings that runs/judge.py chose for 4 MB, with the learning rate tuned again at each length. The rows "
    text += (
        "for 4,000 steps repeat the table above. Of many verdicts, expect one in 20 to be false."
    )
    head = ("mode", "steps", "bytes per parameter", "difference", "verdict")
    image = "![Difference from pre-norm against bytes per parameter](results/lead.png)"
    command = "```sh\npython runs/lead.py --what=tokens\n```"
    text = f"## Does the lead last?\n\n{wrap(text)}\n\n{command}\n\n{image}\n\n{table(head, rows)}"
    for what, title, words in (
        ("blocks", "blocks", "Fewer and more blocks"),
        ("nag", "steps", "NAG with one part changed"),
        ("bhyt", "steps", "BHyT with other initial values"),
    ):
        rows = [(name, f"{value:,}", f"{loss:.4f}", plus_minus(interval))
                for name, value, loss, *interval in leads(what) if loss is not None]  # fmt: skip
        if rows:
            text += f"\n{words}, with the learning rate tuned for each:\n\n```sh\npython runs/lead.py --what={what}\n```\n\n"
            text += table(("mode or change", title, "loss", "difference from pre-norm"), rows)
    return text


def mixtures():
    """NAG with mixtures of depths and with fewer blocks, from runs/lead.py, or nothing."""
    found = [row for row in leads("mod") if row[2] is not None]
    if not found:
        return ""
    runs = lead.runs_of(*lead.PLANS["mod"], must_find)
    of = lambda name, key: statistics.mean(line[key] for line in find("lead", runs[name, 4000]))
    rows = []
    for name, _, loss, *gap in found:
        flops = f"{of(name, 'flops') / of('nag', 'flops'):.2f}"
        skipped = f"{of(name, 'skipped'):.1%}" if "router" in name else ""
        rows.append((name, skipped, flops, f"{loss:.4f}", plus_minus(gap), judge.verdict([gap])))
    text = "NAG with a mixture of depths, and NAG with fewer blocks, against plain NAG: 8 blocks of width 64, 4 MB of text, "
    text += f"{len(lead.SEEDS)} seeds, paired, with 95% intervals; below 0 is better. The number in a name is the fraction of tokens that skip in training, averaged over the sublayers with a router; the "
    text += "second column has the fraction that skips in evaluation, under the causal rule. FLOPs count the whole training, relative to plain NAG. All use the "
    text += "settings that runs/judge.py found for plain NAG or pre-norm. Of many verdicts, expect one in 20 to be false."
    head = ("model", "skip in evaluation", "FLOPs", "loss", "difference from nag", "verdict")
    command = "```sh\npython runs/lead.py --what=mod\n```"
    return f"## Mixtures of depths\n\n{wrap(text)}\n\n{command}\n\n{table(head, rows)}"


def lead_figure(path):
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    lengths = sorted({steps for of in lead_points().values() for steps, *_ in of})
    ticks = [steps * per_parameter() for steps in lengths]
    for i, (mode, of) in enumerate(lead_points().items()):
        steps, differences, halves = zip(*of)
        x = [each * per_parameter() * 1.03**i for each in steps]
        axes.errorbar(x, differences, yerr=halves, fmt="o-", capsize=2, label=mode)
    axes.axhline(0, color="0.7", lw=1)
    axes.set(xscale="log", xlabel="training bytes per parameter")
    axes.set_xticks(ticks, [f"{tick:.1f}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylabel("validation loss minus pre-norm's")
    axes.legend()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def first_seed(mode):
    """The command that trains seed 1 of a judged mode again."""
    own = " ".join(f"--{key}={value}" for key, value in judged()[0][mode][0].items())
    return f"python train.py config/judge_8x64.py --residual={mode} --seed=1 {own} --out_dir=out/{mode}\n"


def variance_text():
    """What runs/bhyt_theory.py measured on a judged BHyT, or nothing."""
    path = RESULTS / "variance.json"
    if not path.exists() or "bhyt" not in judged()[0]:
        return ""
    found = json.loads(path.read_text())
    keys = ("measured", "predicted", "R2", "Pearson", "Spearman")
    rows = [(b, f"{v:.0f}", f"{predicted:.0f}", *(f"{x:.2f}" for x in fits))
            for b, (v, predicted, *fits) in enumerate(zip(*(found[key] for key in keys)))]  # fmt: skip
    text = "BHyT predicts the variance of the stream before each MLP from the weights. Here it is beside the measured one, in seed 1 of the table of modes "
    text += "(16,384 tokens; fits over tokens). The prediction leaves out the value embeddings of every second block."
    commands = f"{first_seed('bhyt')}python runs/bhyt_theory.py --out_dir=out/bhyt\ncp out/bhyt/variance.json results\n"
    head = ("block", "measured variance", "predicted", "R²", "Pearson", "Spearman")
    return f"## BHyT's prediction\n\n{wrap(text)}\n\n```sh\n{commands}```\n\n{table(head, rows)}"


def oracle_text():
    """How well scores predict what skipping a sublayer costs, from runs/oracle.py, or nothing."""
    rows, commands, trained = [], "", judged()[0]
    for path in sorted(RESULTS.glob("oracle_*.json")):
        found, mode = json.loads(path.read_text()), path.stem.removeprefix("oracle_")
        if mode not in trained:
            continue
        commands += first_seed(mode)
        where = f"--out_dir=out/{mode} --oracle_tokens={found['tokens']} --rate={found['rate']}"
        commands += (
            f"python runs/oracle.py {where}\ncp out/{mode}/oracle.json {path.relative_to(ROOT)}\n"
        )
        rise = f"{statistics.mean(found['rise']):.4f}"
        for score, of in found["scores"].items():
            means = [statistics.mean(of[key]) for key in ("rank correlation", "regret")]
            rows.append((mode, score, *(f"{x:+.4f}" for x in means), rise))
    if not rows:
        return ""
    text = "One token skips one sublayer: how much does the loss of the whole sequence rise (in nats), and which score predicts that? A router should skip the "
    text += "tokens with the lowest rises. The models have no mixture of depths; they are the first seeds of the table of modes. "
    text += f"Regret (lower is better): the mean rise of the {found['rate']:.0%} of tokens with the lowest scores, minus that of the {found['rate']:.0%} with the "
    text += "lowest rises. `turn` is the score of NAG's router; `update` and `angle` "
    text += "measure how far the sublayer moves the stream; `random` is a control. `probe` is a linear fit on half of the text, and all numbers are means over sublayers on the other half. "
    text += "For NAG, `turn`, `update` and `angle` rank almost alike by construction."
    head = ("mode", "score", "rank correlation", "regret", "mean rise of all tokens")
    return f"## The skip oracle\n\n{wrap(text)}\n\n```sh\n{commands}```\n\n{table(head, rows)}"


def published():
    """The published claims, with our measurements."""
    text = "The second column quotes the papers that README links; the last four rows are about popular examples without a paper. "
    text += "Short runs are those under 'Earlier, shorter runs'."
    rows = claims.rows(judged()[0], Earlier())
    return f"## Published claims\n\n{wrap(text)}\n\n{table(claims.HEAD, rows)}"


def classroom_lines():
    """{what: {its settings as a tuple: line}} of runs/classroom.py."""
    found = defaultdict(dict)
    for line in read("classroom"):
        known = line["settings"]
        names = {"transformer": ("skip", "rate"), "stack": ("case",), "walk": ("start",)}[
            known["what"]
        ]
        found[known["what"]][tuple(known[name] for name in names)] = line
    return found


def classrooms():
    """What runs/classroom.py measured, or nothing."""
    found = classroom_lines()
    if not found:
        return ""
    text = "Popular examples, repeated (one seed). Stacks of MLPs predict a byte from the 8 before it; runs/classroom.py defines them and their verdicts. The "
    text += "second table has variances before training, in the first and in the last of 12 ReLU layers."
    if found["transformer"]:
        text += " The transformer is one post-norm block over 65 characters; 'deleted' removes the line x = x + output after attention, so that nothing "
        text += "reads its output."
    parts = [
        "```sh\npython runs/classroom.py\n```",
        "![Loss of the small models](results/classroom.png)",
    ]
    rows = [(case, f"{line['first']:.4g}", f"{line['last']:.4g}", line["steps"], line["verdict"])
            for (case,), line in found["stack"].items()]  # fmt: skip
    if rows:
        parts.append(table(("stack", "first loss", "last loss", "steps", "verdict"), rows))
    rows = []
    for (start,), line in found["walk"].items():
        ends = (
            f"{line[key][0]:.3g} to {line[key][-1]:.3g}" for key in ("variance", "of the gradient")
        )
        rows.append((start, *ends))
    if rows:
        head = ("initialisation", "variance of activations", "variance of their gradients")
        parts.append(table(head, rows))
    rows = []
    for (skip, rate), line in found["transformer"].items():
        norms = line["gradients"]
        of = (
            "-" if norms[f"{n}.weight"] is None else norms[f"{n}.weight"] for n in ("value", "up")
        )
        without = dict.fromkeys(n.partition(".")[0] for n, norm in norms.items() if norm is None)
        rows.append((skip, rate, line["last"], *of, ", ".join(without)))
    if rows:
        head = ("after attention: x =", "rate", "last loss", "gradient norm of W_V", "of W_up")
        parts.append(table((*head, "layers without a gradient"), rows))
    body = "\n\n".join(part.rstrip() for part in parts)
    return f"## Classrooms\n\n{wrap(text)}\n\n{body}\n"


def classroom_figure(path):
    plt, found = pyplot(), classroom_lines()
    whats = [what for what in ("stack", "transformer") if found[what]]
    size = dict(figsize=(4.5 * len(whats), 3.2), layout="constrained", squeeze=False)
    figure, axes = plt.subplots(1, len(whats), **size)
    for panel, what in zip(axes[0], whats):
        for names, line in found[what].items():
            if line["curve"]:
                panel.plot(*zip(*line["curve"]), label=", ".join(map(str, names)), lw=1)
        panel.set(xlabel="step", ylabel="training loss", title=what, ylim=(1, 6))  # B is above
        panel.legend(fontsize=7)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


# ------------------------------------------------------------------------------------------------
# What each part of the recipe is worth


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def figure(path):
    """What each part of the recipe is worth at equal time, with intervals."""
    plt = pyplot()
    rows = [row for row in recipe.rows(find, measure=False) if row["equal"] or row["steps"]]
    rows = [row for row in rows if row["name"] != recipe.RECIPE]
    rows.sort(key=lambda row: (row["equal"] or row["steps"])[0])
    differences, halves = zip(*(row["equal"] or row["steps"] for row in rows))
    names = [row["name"] + ("" if row["equal"] else ", at equal steps") for row in rows]
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.25 * len(rows)), layout="constrained")
    axes.errorbar(differences, range(len(rows)), xerr=halves, fmt="o", color="C0", capsize=2)
    axes.axvline(0, color="0.7", lw=1)
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlabel="validation loss minus the recipe's, at equal time")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


# ------------------------------------------------------------------------------------------------
# Earlier, shorter runs


class Earlier:
    """Runs of 0.06 to 5 bytes per parameter, before the protocol of runs/judge.py."""

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


def earlier():
    e = Earlier()
    ladder, norms, table_of_mod = "nag_ladder", "bhyt", "mod_table"
    rows = [
        ("Without a skip connection nothing is learned beyond the frequency of bytes",
         f"none {e.mean('additive', 'none')}, pre-norm {e.mean('additive', 'prenorm')}"),
        ("NAG's lead over pre-norm after 500 steps grows from 8 to 16 blocks",
         ", ".join(f"{n} blocks {e.gap('nag_depth', f'nag_{n}', f'prenorm_{n}')}" for n in (8, 16, 32))),
        ("After 250 steps, NAG's rotation alone gives almost half of NAG's lead; each other part is within the noise",
         f"rotation alone against pre-norm {e.gap(ladder, 'rotation_only', 'prenorm')}, "
         f"the modulator {e.gap(ladder, 'and_modulated', 'and_centred')}, "
         f"centring {e.gap(ladder, 'and_centred', 'rotation_only')}, "
         f"the norm lane {e.gap(ladder, 'nag', 'and_modulated')}"),
        ("Orthogonal updates do not visibly help NAG",
         f"without them {e.gap(ladder, 'nag_not_orthogonal', 'nag')}"),
        ("NAG fails if alpha starts at 1 in every sublayer, and if logits are divided by d as in the public replication",
         f"{e.mean(ladder, 'nag_alpha_0')} and {e.mean(ladder, 'replication')}; NAG {e.mean(ladder, 'nag')}"),
        ("BHyT as published is worse than pre-norm, because its sublayers read small inputs",
         f"BHyT {e.gap(norms, 'bhyt', 'prenorm')}; with gains that give outputs of variance 1 "
         f"{e.gap(norms, 'bhyt_unit', 'prenorm')}"),
        ("Predicting BHyT's second variance has no cost visible in these runs",
         f"predicted against exact {e.gap(norms, 'bhyt', 'bhyt_exact')}; with pre-norm "
         f"{e.gap(norms, 'prenorm_approx', 'prenorm')}"),
        ("Of three modes, BHyT's loss varies least over learning rates from 0.001 to 0.03",
         ", ".join(f"{n} {e.range_over_rates(norms, n)}" for n in ("bhyt", "prenorm", "dyt"))),
        ("In a mixture of depths at 20%, a random router is worse than dense; the others are within the noise",
         f"NAG's router {e.gap(table_of_mod, 'nag_0.2', 'dense')}, without its fallback "
         f"{e.gap(table_of_mod, 'no_fallback_0.2', 'dense')}, a learned router "
         f"{e.gap(table_of_mod, 'learned_0.2', 'dense')}, random {e.gap(table_of_mod, 'random_0.2', 'dense')}"),
        ("Skipping 40% of the MLPs has no cost visible in these runs",
         f"learned {e.gap(table_of_mod, 'learned_mlp_0.4', 'dense')}"),
        ("At equal FLOPs, a mixture of depths gains as much as fewer blocks do",
         f"rate 0.4 {e.gap('isoflop', 'rate_0.4', 'dense')}, 6 blocks {e.gap('isoflop', 'dense_6_blocks', 'dense')}"),
        ("With experts, NAG leads in wide and in deep shapes (width / depth of 80 and 20)",
         f"{e.gap('moe_ratio', 'nag_80', 'prenorm_80')} and {e.gap('moe_ratio', 'nag_20', 'prenorm_20')}"),
    ]  # fmt: skip
    text = """## Earlier, shorter runs

These runs saw 0.06 to 5 bytes per parameter, with AdamW, with output projections initialised differently in
different modes, and with a learning rate chosen on the first of the seeds shown. Take the differences as hints. They are paired by seed (3 seeds), with
95% intervals; below 0 is better. `results/earlier.jsonl` has all of these runs.

"""
    return text + table(("finding", "losses and differences"), rows)


def rivals():
    e = Earlier()
    rows = []
    lines = [line for line in e.lines if line["study"] == "rivals"]
    rates = (0.004, 0.008, 0.016)
    for mode in dict.fromkeys(line["variant"] for line in lines):
        by_rate = {line["learning_rate"]: line["loss"] for line in lines if line["variant"] == mode}
        if by_rate.keys() >= set(rates):
            rows.append((mode, *(f"{by_rate[rate]:.3f}" for rate in rates)))
    text = """## Every mode once

8 blocks of width 64, 1,000 steps of 2,048 bytes, one seed, with the AdamW recipe of `config/plain.py`. This shows that
no mode is broken, but not which one is better. For one run:

```sh
python train.py config/plain.py --residual=nag --n_embd=64 --max_iters=1000 --learning_rate=4e-3 --seed=1
```

"""
    text += table(("mode", *(f"rate {rate:g}" for rate in rates)), rows)
    return (
        text
        + """
- Without a skip connection, nothing is learned beyond the frequency of bytes.
- BHyT has higher losses because its sublayers read small inputs: see BHyT in the next table.
- DyT uses its authors' initial values for a 1B model. They tune these for each width and depth; we did not.
"""
    )


# ------------------------------------------------------------------------------------------------
# Trained models: conversion, pruning


def conversion():
    """The table of runs/convert.py, or nothing."""
    rows = [*convert.rows(*convert.the_base(), find)]
    if not rows:
        return ""
    text = f"A pre-norm model (8 blocks of width 64, 2,000 steps of 1,024 bytes) is trained for {convert.steps} more "
    text += f"steps, unchanged or after conversion. The rows 'new' train from scratch. {convert.seeds} seeds (the data order; for new "
    text += "models also the initialisation), paired, with 95% intervals; below 0 is better. The factor multiplies all learning rates; it was tuned for each row, on "
    text += "another seed and the other half of the validation text."
    command = "```sh\npython runs/convert.py\n```"
    return f"## Conversion\n\n{wrap(text)}\n\n{command}\n\n{table(convert.HEAD, rows)}\n"


def imported():
    """What eval.py measures on a model that hf.py imported, or nothing."""
    path = RESULTS / "imported.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())["depth"]
    rows = []
    for b in range(len(found["dropped"])):
        turns = (f"{found['rotation'][2 * b + i]:.1f}" for i in (0, 1))
        rest = (f"{found[key][b]:.2f}" for key in ("sink", "dropped"))
        stream = (f"{found[key][b + 1]:.1f}" for key in ("norm", "max/rms"))
        rows.append((b, *turns, *stream, *rest))
    head = ("block", "rotation by attention (degrees)", "by the MLP", "norm of the stream after it")
    head += ("largest feature / rms", "attention to the first token", "rise of the loss without it")
    text = "What `eval.py` measures on an imported model, with the text of model.py. We had no public checkpoint, so this is "
    text += "the model of the next table, exported and imported again (`results/imported.json`)."
    lines = "python hf.py export out/llama/ckpt.pt out/exported\n"
    lines += "python hf.py import out/exported --out_dir=out/imported\n"
    lines += "python eval.py --out_dir=out/imported --what=depth --text=model.py --context=256"
    cost = json.loads((SPEED / "import_1b.json").read_text())
    low, middle, high = cost["ratio"]
    text += f" Importing {cost['bytes'] / 1e9:.1f} GB of random weights takes {middle:.1f} times as long as copying the files "
    text += f"(quartiles {low:.1f} and {high:.1f}) and at most {cost['peak_bytes'] / 1e9:.1f} GB of memory "
    text += "(`python runs/import_cost.py`)."
    return f"## An imported model, by depth\n\n{wrap(text)}\n\n```sh\n{lines}\n```\n\n{table(head, rows)}\n"


def pruning():
    """The table and the figure of runs/prune.py, or nothing."""
    lines = read("prune")
    if not lines:
        return ""
    rows = []
    for unit, rate in sorted({(line["unit"], line["rate"]) for line in lines}):
        here = [line for line in lines if (line["unit"], line["rate"]) == (unit, rate)]
        of = lambda rule, key, here=here: statistics.mean(x[key] for x in here if x["rule"] == rule)
        losses = [f"{of(rule, 'loss'):.3f}" for rule in ("angle", "norm", "random")]
        rows.append((unit, f"{rate:.3f}", *losses, f"{of('angle', 'time'):.2f}"))
    head = ("unit", "share skipped", "loss by angle", "by norm", "at random")
    head += ("time of the forward pass, by angle",)
    text = "Loss and time of the forward pass of a trained model, after the units (blocks or sublayers) with the lowest scores are removed "
    text += f"(`{lines[0]['run']}`: 8 blocks of width 128 with SwiGLU, without smear and value embeddings, otherwise trained like the default "
    text += "model). The "
    text += "random control is a mean over 3 seeds."
    image = "![Loss and time against the share skipped](results/prune.png)"
    command = f"```sh\npython train.py --activation=swiglu --smear=0 --value_embeds=False --out_dir={lines[0]['run']}\n"
    command += f"python runs/prune.py --out_dir={lines[0]['run']}\n```"
    return f"## Pruning without training\n\n{wrap(text)}\n\n{command}\n\n{image}\n\n{table(head, rows)}\n"


# ------------------------------------------------------------------------------------------------
# Speed

BENCHES = (  # (file, command, what it shows)
    ("recipe_8x128_cpu", "--what=recipe,train --modes=prenorm,prenorm,nag --batch_size=4 --rounds=15",
     "A training step of the default model, part by part, and with NAG"),
    ("rivals_12x512_cpu", "config/plain.py --what=train --modes=prenorm,attnres,ngpt,x0mix,rezero,mixln,deepnorm "
     "--n_layer=12 --n_head=8 --n_embd=512 --batch_size=4 --rounds=5",
     "A training step of other modes, 12 blocks of width 512"),
    ("streams_12x512_cpu", "config/plain.py --what=train --modes=prenorm,mhc,hc,attnres_block --n_layer=12 "
     "--n_head=8 --n_embd=512 --batch_size=4 --rounds=7",
     "The modes with several streams, 12 blocks of width 512"),
    ("rivals_8x128_cpu", "config/plain.py --what=train "
     "--modes=prenorm,prenorm,mhc,hc,attnres_block,ngpt,x0mix,rezero,mixln,deepnorm --rounds=9",
     "Other modes, 8 blocks of width 128"),
    ("train_12x512_cpu", "config/plain.py --what=train --modes=prenorm,prenorm,nag,bhyt,perinorm --n_layer=12 "
     "--n_head=8 --n_embd=512 --block_size=512 --init_scale=0.03 --rounds=9",
     "NAG and BHyT, 12 blocks of width 512, context 512"),
    ("forward_1b_cpu", "config/plain.py --what=forward "
     "--modes=prenorm,prenorm,postnorm,perinorm,lns,dyt,nag,bhyt,bhyt_exact,none --n_head=32 --n_kv_head=8 "
     "--n_embd=2048 --n_hidden=8192 --activation=swiglu --block_size=1024 --batch_size=1 --init_scale=0.02 "
     "--rounds=21", "The forward pass of one block of a 1B model"),
    ("residual_4096x512_cpu", "config/plain.py --what=residual --modes=prenorm,prenorm,nag,bhyt,bhyt_exact "
     "--n_head=8 --n_embd=512 --block_size=512 --rounds=101", "The residual alone: two sublayers"),
    ("mod_12x512_cpu", "config/plain.py --what=mod --modes=nag --rates=0,0.4 --n_layer=12 --n_head=8 "
     "--n_embd=512 --block_size=512 --init_scale=0.03 --rounds=11", "A mixture of depths"),
)  # fmt: skip


def texts():
    """Yield a table, with its title, for each comparison that was printed."""
    titles = {
        "nanogpt_8x128": "A training step beside stock nanoGPT's with bfloat16 autocast, 8 blocks of width 128",
        "nanogpt_6x384": "The same, 6 blocks of width 384",
        "generate_8x128": "Decoding one text, 8 blocks of width 128, compiled: `python bench.py --what=generate "
        "--modes=prenorm,nag,bhyt,ngpt,hc,mhc,attnres_block --prompt_tokens=64 --new_tokens=128 --batches_of=1 "
        "--rounds=5`",
    }
    parts = {"128 new": "128 new tokens", "a token": "a token, without a cache"}
    for name, title in titles.items():
        yield wrap(f"{title} (`results/speed/{name}.txt`):") + "\n\n"
        for part in (SPEED / f"{name}.txt").read_text().split("\n\n"):
            found = re.findall(r"^(\S.*?)  +([\d.]+) ms .*?([\d.]+)x(.*)$", part, re.M)
            rows = [(a, f"{float(b):.1f} ms", f"{c}x{rest.rstrip()}") for a, b, c, rest in found]
            what = part.split(",")[0] if "median" in part else "candidate"
            if rows:
                yield table((parts.get(what, what), "time", "ratio"), rows) + "\n"


def ratios(report):
    """(candidate, median, ratio) of all parts of a file of bench.py that compare candidates."""
    for part in report.values():
        for name, row in part.items() if isinstance(part, dict) else ():
            if isinstance(row, dict) and "ratio" in row:
                low, middle, high = row["ratio"]
                yield (
                    name,
                    f"{row['median'] * 1e3:.1f} ms",
                    f"{middle:.3f}x ({low:.3f} - {high:.3f})",
                )


def growth():
    """How the cost of a step grows, from runs/growth.py, or nothing."""
    path = SPEED / "growth.json"
    if not path.exists():
        return ""
    report = json.loads(path.read_text())
    rows = []
    for axis in ("n_layer", "n_embd", "block_size"):
        for value, found in report[axis].items():
            over = [f"{of['over_floor']:.2f}" for of in found.values()]
            first = [f"{of['first']:.0f} s" for of in found.values()]
            rows.append((f"{axis} {value}", *over, *first))
    head = ("", *(f"{mode}: {what}" for what in ("step / floor", "first step") for mode in found))
    text = "How the cost of a training step grows (`results/speed/growth.json`). The floor is an estimate: the FLOPs of a "
    text += "step at the speed of a large matrix product, and its memory traffic at the speed of a copy. The first step "
    text += "includes compilation. A narrow model is far above the floor, because its matrix products are too small to reach "
    text += "the machine's rate. The blocks share their code, so the first step does not slow down with depth."
    image = "![How the cost of a step grows](results/speed/growth.png)"
    return f"{wrap(text)}\n\n```sh\npython runs/growth.py\n```\n\n{image}\n\n{table(head, rows)}\n"


def speed():
    text = """## Speed

We give the median time, and the time relative to the first candidate of the same run (median, and quartiles over rounds
in changing order). All ran on 2 CPU cores with AVX512-bf16 and no AMX. Across tables, compare only ratios. The matrix
rate is that of a large bfloat16 matrix product on the same machine. "5% of reading the weights" means that reading all
weights once takes 5% of the time.

"""
    text += "".join(texts()) + growth()
    for name, command, title in BENCHES:
        report = json.loads((SPEED / f"{name}.json").read_text())
        text += (
            f"{title} (`results/speed/{name}.json`):\n\n```sh\npython bench.py {command}\n```\n\n"
        )
        text += table(("candidate", "time", "ratio"), ratios(report)) + "\n"
    return text


# ------------------------------------------------------------------------------------------------
# README's first page

START, END = "<!-- written by runs/report.py -->\n", "<!-- end -->"


def first_page():
    """The figure and what was found, or only the default run if nothing is judged yet."""
    trained, ratios = judged()
    records, _, whole = default_run()
    path = SPEED / "nanochat_8x128.txt"
    (theirs, _, seconds), *_ = race(path)
    passed = re.search(r"ours after (\d+) s", path.read_text())[1]
    image = "![What each part of the default recipe is worth](results/recipe.png)"
    if lead_points():
        image = "![Difference from pre-norm against bytes per parameter](results/lead.png)"
    text = f"`make train` ends at a validation loss of {records[-1]['val_loss']:.3f} nats per byte ({whole:.3f} on the whole split). nanochat's model and optimizer, with their own "
    text += f"learning rates, reach {theirs} in {seconds} s; ours pass that loss after {passed} s (one run each, same machine). "
    if not trained:
        return f"{image}\n\n{wrap(text)}\n"
    line = trained[judge.baseline][1][1.0][0]
    size, per = line["params"] / 1e6, line["tokens"] / line["params"]
    rows = list(judge.rows(trained, ratios))
    at_steps = by_word((row[0], *row[3:5]) for row in rows)
    at_time = by_word((row[0], *row[6:8]) for row in rows)
    text += f"**Found so far**, as the loss minus pre-norm's, so below 0 is better ({size:.1f}M parameters, {per:.0f} bytes of text per parameter, "
    text += f"one token per byte, {judge.seeds} seeds, 95% intervals). At equal steps, {at_steps}. At equal time, where the verdict must hold "
    text += f"for all plausible time ratios, {at_time}. "
    for mode, of in lead_points().items():
        (steps, *first), (most, *last) = of[0], of[-1]
        if steps == most:
            continue
        text += f"From {steps * per_parameter():.0f} to {most * per_parameter():.0f} bytes per parameter (the figure), the difference of "
        text += f"`{mode}` goes from {plus_minus(first)} to {plus_minus(last)}. "
    parts = {
        row["name"]: row["steps"][0] for row in recipe.rows(find, measure=False) if row["steps"]
    }
    text += f"AdamW with one rate in place of Muon with three raises the loss by {parts['AdamW, one rate']:.2f}, and removing the value embeddings by "
    text += f"{parts['no value embeddings']:.2f} (8 blocks of width 128, 800 steps, learning rates not tuned again). "
    text += "Such small models give hints for larger ones, no more. [RESULTS.md](RESULTS.md) has all results."
    return f"{image}\n\n{wrap(text)}\n"


def by_word(rows):
    """Rows (mode, difference, verdict) as text, in groups of equal verdicts."""
    groups = defaultdict(list)
    for mode, difference, word in rows:
        groups[word or "diverged"].append(f"`{mode}`" + f" ({difference})" * bool(difference))
    return "; ".join(f"{word}: {', '.join(modes)}" for word, modes in sorted(groups.items()))


def verdicts():
    """{mode: its verdict for README's table of modes}"""
    trained, ratios = judged()
    found = {judge.baseline: "the baseline"} if trained else {}
    for mode, count, _, steps, word, _, _, at_time, _ in judge.rows(trained, ratios):
        found[mode] = f"{steps} ({word}); at equal time {at_time}" if steps else count
    return found


def readme(text):
    """README with its first page and the verdicts in its table of modes written anew."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    found = verdicts()
    row = r"^(\|.*\| `(\w+)` \|.*\|)[^|]*\|$"
    verdict = lambda match: f"{match[1]} {found.get(match[2], 'not judged yet')} |"
    return before + START + first_page() + END + re.sub(row, verdict, after, flags=re.M)


INTRO = """# Results

`python runs/report.py` writes this page from the files in `results/`. No number was typed by hand, except quoted
published ones. Losses are in nats per byte on validation text.

"""


PARTS = (modes, lead_text, mixtures, oracle_text, variance_text, classrooms, published)
PARTS += (the_recipe, rivals, earlier, conversion, imported, pruning, speed)


def markdown():
    return INTRO + "\n".join(filter(None, (part() for part in PARTS))).rstrip() + "\n"


if __name__ == "__main__":
    (ROOT / "RESULTS.md").write_text(markdown())
    (ROOT / "README.md").write_text(readme((ROOT / "README.md").read_text()))
    figure(RESULTS / "recipe.png")
    if classroom_lines():
        classroom_figure(RESULTS / "classroom.png")
    if lead_points():
        lead_figure(RESULTS / "lead.png")
