"""
Draw figures from logs: python plot.py FIGURE OUT.png RUN [RUN ...]

From log.jsonl of each run:
    loss        validation loss against tokens, with the training loss as a thin line
    flops       validation loss against training FLOPs
    time        validation loss against the time spent in training steps

From eval.json of each run:
    variance    variance of the stream after each block
    norm        norm of the stream after each block
    rotation    degrees between the stream and the embedding, after each sublayer
    alpha       NAG's alpha and mean |a| of each sublayer
    dropped     rise of the loss when a block is left out

From eval.json of one run:
    sources     weights that sublayers and head give to their sources, for Attention Residuals
    map         which tokens of a text ran in which sublayers

Runs that differ only in the seed become one line: their mean, with a band from the lowest to the
highest; flops and time draw each run. plot.py writes OUT.png and OUT.svg. The same input gives the
same bytes. A missing file is an error.
"""

import math
import os
import statistics
import sys
from functools import partial

from configurator import usage
from data import atomic, json_lines, read_json

# Colours of Okabe and Ito, and of Tol, which colour-blind readers can tell apart.
COLOURS = {
    "prenorm": "#000000", "perinorm": "#0072B2", "postnorm": "#D55E00", "lns": "#009E73",
    "dyt": "#E69F00", "none": "#CC79A7", "nag": "#56B4E9", "orthogonal": "#999999",
    "bhyt": "#882255", "bhyt_exact": "#AA4499", "prenorm_approx": "#666666",
    "ngpt": "#332288", "deepnorm": "#999933", "rezero": "#DDCC77", "mixln": "#CC6677",
    "x0mix": "#117733", "outnorm": "#B5D6F5", "derf": "#EE7733", "keel": "#BBCC33",
    "hc": "#661100", "mhc": "#44AA99", "ihc": "#EE3377",
    "attnres": "#00D26A", "attnres_block": "#99EEBB",
    "smhc": "#225588", "gated": "#AA66FF", "wide": "#FF9999",
}  # fmt: skip
LOSS = "validation loss (nats a token)"


def colour(mode):
    """The colour of a mode, the same in each figure. New modes share a colour with another."""
    return COLOURS.get(mode) or [*COLOURS.values()][sum(map(ord, mode)) % len(COLOURS)]


def canvas(width, height, font=10):
    """(figure, axes) to draw to a file, the same on every run."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "residual", "font.size": font})
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


# ------------------------------------------------------------------------------------------------
# Logs


def lines_of(run):
    """The lines of a run's log, without those that a crash has damaged."""
    path = os.path.join(run, "log.jsonl")
    if not os.path.exists(path):
        raise SystemExit(f"plot.py: {path} is missing")
    return json_lines(path)


def header_of(run):
    for line in lines_of(run):
        if "run" in line:
            return line["run"]
    raise SystemExit(f"plot.py: {run}/log.jsonl is no log of train.py")


def refuse_mixed_data(runs):
    """Refuse runs on different data. For example, data/python depends on the Python version."""
    seen = {}
    for run in runs:
        seen.setdefault(str(header_of(run).get("data")), run)
    if len(seen) > 1:
        one, two, *_ = seen.values()
        raise SystemExit(f"plot.py: {one} and {two} were trained on different data")


def steps_of(run):
    """Records of a run from step 1 on, each with the training seconds so far.

    After each start of a compiled run, the first interval counts at the median speed: it includes
    compilation.
    """
    steps, slow, compiles = [], [], False
    for line in lines_of(run):
        if "run" in line:
            compiles = line["run"]["resolved"]["compile"]
        elif line["step"]:
            steps.append(line)
            slow += [line] * compiles
            compiles = False
    if len(steps) > len(slow):
        speed = statistics.median(step["tok_s"] for step in steps if step not in slow)
        for record in slow:
            record["tok_s"] = speed
    header = header_of(run)
    seconds, tokens = 0.0, header["from_step"] * header["tokens_per_step"]  # a branch starts late
    for record in steps:
        seconds += (record["tokens"] - tokens) / record["tok_s"]
        tokens = record["tokens"]
        record["seconds"] = seconds
    return steps


# ------------------------------------------------------------------------------------------------
# Groups of runs


def grouped(runs):
    """Group runs that differ only in the seed: {label: (mode, runs)}.

    A label has the mode, the share of tokens that skip and their router, and the settings in which
    the runs of this mode differ.
    """
    shown = {"seed", "out_dir", "mod_on", "mod_rate", "mod_router"}  # or not of interest
    scratch = dict.fromkeys(("scratch", "auto", "resume"), {"init_from": "scratch"})
    settings = {}
    for run in runs:
        own, resolved = (header_of(run)[part] for part in ("settings", "resolved"))
        streams = resolved.get("hc_streams", own.get("hc_streams"))  # older logs: only the setting
        settings[run] = own | scratch.get(own.get("init_from"), {}) | {"hc_streams": streams}
    groups = {}
    for run, own in settings.items():
        mode = own["residual"]
        same_mode = [other for other in settings.values() if other["residual"] == mode]
        # Older logs do not have newer settings.
        values = {key: {str(s[key]) for s in same_mode if key in s} for key in own}
        differs = [key for key in own if len(values[key]) > 1 and key not in shown]
        skipped = []
        if own.get("mod_on", "none") != "none":
            share = f"{100 * own['mod_rate']:.6g}%"
            skipped = [f"{share} skip {own['mod_on']} ({own['mod_router']} router)"]
        label = ", ".join([mode, *skipped, *(f"{key}={own[key]}" for key in differs)])
        groups.setdefault(label, (mode, []))[1].append(run)
    return groups


def styled(runs):
    """Yield (runs, style) of each group. Groups of one mode differ in the dashes."""
    seen = []
    for label, (mode, members) in grouped(runs).items():
        dashes = ("-", "--", ":", "-.")[seen.count(mode) % 4]
        yield members, {"color": colour(mode), "label": label, "lw": 1.5, "ls": dashes}
        seen.append(mode)


def draw(axes, runs, curve, band=True, **style):
    """Draw the mean of each group of runs, with a band from the lowest to the highest seed.

    curve(run) returns (x, y). A line has the points that all its seeds have.
    """
    for members, look in styled(runs):
        curves = [dict(zip(*curve(run))) for run in members]
        x = [x for x in curves[0] if all(x in other for other in curves)]
        values = [[y[at] for y in curves] for at in x]
        (line,) = axes.plot(x, [statistics.mean(y) for y in values], **look | style)
        if band and len(members) > 1:
            low, high = [*map(min, values)], [*map(max, values)]
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)


# ------------------------------------------------------------------------------------------------
# Figures from log.jsonl


def smoothed(values):
    """The mean of each value and those before it, up to 2% of all: one batch is noisy."""
    size = math.ceil(len(values) / 50)
    starts = (max(0, end - size) for end in range(1, len(values) + 1))
    return [statistics.mean(values[start:end]) for end, start in enumerate(starts, 1)]


def losses_against(axes, runs, key, unit, label):
    def curve(loss, run):
        steps = [record for record in steps_of(run) if record[loss] is not None]
        values = [record[loss] for record in steps]
        values = smoothed(values) if loss == "loss" else values
        return [record[key] / unit for record in steps], values

    if key == "tokens":
        draw(axes, runs, partial(curve, "loss"), band=False, label=None, lw=0.6, alpha=0.5)
        draw(axes, runs, partial(curve, "val_loss"), marker="o", ms=3)
    else:  # seeds differ in x, so they have no mean: draw each run
        for members, look in styled(runs):
            look |= {"marker": "o", "ms": 3}
            for run in members:
                axes.plot(*curve("val_loss", run), **look)
                look["label"] = None  # one label per group
    axes.set(xlabel=label, ylabel=LOSS + ("\nthin: training, smoothed" if key == "tokens" else ""))


# ------------------------------------------------------------------------------------------------
# Figures from eval.json


def measured(run, key, part="depth"):
    """A measurement of a run, with a value for each block, sublayer or token."""
    path = os.path.join(run, "eval.json")
    report = read_json(path) if os.path.exists(path) else {}
    if key not in report.get(part, {}):
        command = f"python eval.py --out_dir={run} --what={part}"
        raise SystemExit(f"plot.py: no {key} in {path}: {command} adds it, if the model has one")
    return report[part][key]


def draw_depth(axes, runs, key, first=0, **style):
    """Draw a measurement against the block or sublayer. first: the number of the first one."""

    def curve(run):
        values = measured(run, key)
        return range(first, first + len(values)), values

    draw(axes, runs, curve, **style)


def stream(axes, runs, key):
    draw_depth(axes, runs, key)
    axes.set(xlabel="block", ylabel=f"{key} of the stream", yscale="log")


def rotation(axes, runs):
    draw_depth(axes, runs, "from embedding", first=1)
    axes.set(xlabel="sublayer", ylabel="degrees from the embedding")


def alpha(axes, runs):
    draw_depth(axes, runs, "alpha", first=1, lw=0.6, label=None)
    draw_depth(axes, runs, "a", first=1)
    axes.set(xlabel="sublayer", ylabel="mean |a|, and alpha (thin)")


def dropped(axes, runs):
    draw_depth(axes, runs, "dropped", marker="o", ms=3)
    axes.set(xlabel="block left out", ylabel="rise of the loss (nats a token)")
    axes.set_yscale("symlog", linthresh=0.01)


def sources(axes, runs):
    matrix = measured(runs[0], "sources")
    image = axes.imshow(matrix, cmap="viridis", vmin=0)
    axes.figure.colorbar(image, label="mean weight")
    axes.set(xlabel="source (0: the embedding)", ylabel="reader (last: the head)")
    axes.locator_params(integer=True)


def token_map(axes, runs):
    shown, where, names = (measured(runs[0], key, "mod") for key in ("map", "where", "characters"))
    axes.imshow(shown, aspect="auto", cmap="Greys", interpolation="nearest")
    axes.set_yticks(range(len(where)), where)
    names = [repr(name)[1:-1].replace(" ", "␣") for name in names]
    axes.set_xticks(range(len(names)), names, fontsize=min(10, 500 / len(names)), parse_math=False)
    for label in axes.get_xticklabels():
        label.set_rotation(0 if len(label.get_text()) < 3 else 90)
    axes.set(xlabel="token (black: it ran)")


def differences(path, rows, baseline):
    """Draw intervals of two differences from a baseline.

    rows: [(name, at equal steps, at equal time)]. An interval is (middle, half), or None.

    Limits cover every interval that ends within 3 times the median end. The others become arrows,
    so that a bad design does not hide the differences between good ones.
    """
    gaps = [gap for _, *both in rows for gap in both if gap]
    edge = 3 * statistics.median(abs(middle) + half for middle, half in gaps)
    inside = [gap for gap in gaps if sum(gap) <= edge]
    left = min([0.0, *(middle - half for middle, half in inside)])
    right = edge if len(inside) < len(gaps) else max([0.0, *map(sum, inside)])
    margin = 0.04 * (right - left) or 0.001

    fig, axes = canvas(11, 2 + 0.42 * len(rows), font=15)
    names, *kinds = zip(*rows)
    labels = ("at equal steps", "at equal time")
    for label, style, shift, of_kind in zip(labels, ("C0o", "C1s"), (-0.16, 0.16), kinds):
        points = [(*gap, y + shift) for y, gap in enumerate(of_kind) if gap in inside]
        middles, halves, heights = zip(*(points or [(math.nan,) * 3]))  # the legend shows both
        how = dict(ms=8, lw=2.5, capsize=4, label=label)
        axes.errorbar(middles, heights, xerr=halves, fmt=style, **how)
        for y, (gap, pair) in enumerate(zip(of_kind, zip(*kinds))):
            if gap and gap not in inside:
                how = dict(ha="right", va="center", color=style[:2])
                alone = any(other in inside for other in pair)  # beside a point: below or above it
                x, height = (edge, y + 2 * shift) if alone else (edge * (0.87 + 0.8 * shift), y)
                axes.text(x, height, f"{gap[0]:+.3f} ⟶", **how)
    axes.axvline(0, color="0.4", lw=1.5)
    axes.set_yticks(range(len(names)), names)
    axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(left - margin, right + margin))
    axes.set_xlabel(f"validation loss minus {baseline}'s   (left is better)")
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    fig.legend(loc="outside upper center", ncols=2, frameon=False)
    path.parent.mkdir(exist_ok=True)
    fig.savefig(path, dpi=120, metadata={"Software": None})


def leads(path, curves, label):
    """Draw intervals against the number of blocks. curves: {name: {blocks: (middle, half)}}"""
    fig, axes = canvas(7, 4)
    for i, (name, curve) in enumerate(curves.items()):
        blocks = sorted(curve)
        middles, halves = zip(*(curve[n] for n in blocks))
        apart = 1.03 ** (i - (len(curves) - 1) / 2)  # so that the bars do not overlap
        places = [n * apart for n in blocks]
        axes.errorbar(places, middles, yerr=halves, fmt="o-", capsize=3, label=name)
    axes.axhline(0, color="0.4", lw=1)
    ticks = sorted(set().union(*curves.values()))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(str, ticks))
    axes.set(xlabel="blocks", ylabel=label)
    axes.legend(frameon=False)
    fig.savefig(path, dpi=120, metadata={"Software": None})


FIGURES = {
    "loss": partial(losses_against, key="tokens", unit=1e6, label="million tokens"),
    "flops": partial(losses_against, key="flops", unit=1e12, label="training TFLOPs"),
    "time": partial(losses_against, key="seconds", unit=60, label="minutes of training"),
    "variance": partial(stream, key="variance"), "norm": partial(stream, key="norm"),
    "rotation": rotation, "alpha": alpha, "dropped": dropped,
    "sources": sources, "map": token_map,
}  # fmt: skip


def main(figure, out, *runs):
    if figure not in FIGURES:
        raise SystemExit(f"plot.py: no figure {figure!r}: choose one of {', '.join(FIGURES)}")
    if figure in ("sources", "map") and len(runs) > 1:
        raise SystemExit(f"plot.py: the figure {figure} shows one run, not {len(runs)}")
    refuse_mixed_data(runs)
    fig, axes = canvas(7, 4)
    FIGURES[figure](axes, runs)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    stem = os.path.splitext(out)[0]
    with atomic(stem + ".png") as png, atomic(stem + ".svg") as svg:
        fig.savefig(png, format="png", dpi=150, metadata={"Software": None})
        fig.savefig(svg, format="svg", metadata={"Date": None})
    print(f"{stem}.png {stem}.svg")


if __name__ == "__main__":
    usage(__doc__, sys.argv, len(sys.argv) >= 4)
    main(*sys.argv[1:])
