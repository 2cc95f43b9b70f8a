"""
Figures from logs: python plot.py FIGURE OUT.png RUN [RUN ...]

    loss       validation loss against tokens, and faintly the training loss, from each RUN/log.jsonl
    flops      the same against training FLOPs
    time       the same against time spent in training steps
    target     tokens and time to the highest of the runs' final validation losses, likewise
    variance   variance of the stream behind each block, from each RUN/eval.json
    norm       the norm of the stream, likewise
    rotation   how far the embedding has been turned behind each sublayer, likewise
    alpha      NAG: alpha and the a that comes of it in each sublayer, likewise
    dropped    how much the loss rises when a block is left out, likewise
    calibrated how often the likeliest token is right against its probability, likewise
    similarity cosines between the mean directions of the sublayers' updates, from one RUN/eval.json
    rate       final validation loss against the share of tokens that skip, by router, from each RUN/log.jsonl
    ladder     final validation loss against width over depth, likewise
    map        which tokens of a text ran where, from one RUN/eval.json
    stability  final validation loss, and growth of the variance, against the learning rate, from both
    speed      bars of the ratios that bench.py wrote, from each JSON

Runs that differ only in their seed become one line, their mean, with a band from the least to the most. The same input
gives the same bytes. A missing file is an error. Writes OUT.png and OUT.svg.
"""

import json
import math
import os
import sys

COLOURS = {  # Okabe and Ito's and some of Tol's, safe for the colour-blind; other modes share them by their name
    "prenorm": "#000000", "perinorm": "#0072B2", "postnorm": "#D55E00", "lns": "#009E73", "dyt": "#E69F00",
    "none": "#CC79A7", "nag": "#56B4E9", "orthogonal": "#999999",
    "bhyt": "#882255", "bhyt_exact": "#AA4499", "prenorm_approx": "#666666",
}  # fmt: skip


def colour(mode):
    """The same colour for a mode in every figure."""
    return COLOURS.get(mode) or [*COLOURS.values()][sum(map(ord, mode)) % len(COLOURS)]


def need(path):
    if not os.path.exists(path):
        raise SystemExit(f"plot.py: {path} is missing")
    return open(path)


def read_log(run):
    """The settings of a run and its records, one a step"""
    lines = [json.loads(line) for line in need(os.path.join(run, "log.jsonl"))]
    settings = next(line["run"]["settings"] for line in lines if "run" in line)
    return settings, [line for line in lines if "step" in line]


def read_eval(run, part):
    report = json.load(need(os.path.join(run, "eval.json")))
    if part not in report:
        who = {"mod": "with tokens that skip, "}.get(part, "")
        how = f"for a run {who}python eval.py --out_dir={run} --what={part}"
        raise SystemExit(f"plot.py: {run}/eval.json has no {part}: {how}")
    return report[part]


def refuse_mixed_data(runs):
    """Losses on different data cannot be compared: data/python, for one, is made from each user's own Python."""
    seen = {}
    for run in runs:
        header = next(
            json.loads(line) for line in need(os.path.join(run, "log.jsonl")) if '"run"' in line
        )["run"]
        seen.setdefault(str(header.get("data")), run)
    if len(seen) > 1:
        one, two, *_ = seen.values()
        raise SystemExit(
            f"plot.py: {one} and {two} were trained on different data (see data in their log.jsonl)"
        )


def grouped(runs, but=()):
    """{label: (residual, runs)}: a label is the mode, and the settings in which the runs of a mode differ, but for the
    seed, what is of no matter and what is in but"""
    settings, groups = {run: read_log(run)[0] for run in runs}, {}
    for run, s in settings.items():
        alike = [other for other in settings.values() if other["residual"] == s["residual"]]
        keys = [
            k for k in s if len({str(other[k]) for other in alike if k in other}) > 1
        ]  # old logs know fewer
        keys = [k for k in keys if k not in ("seed", "out_dir", "init_from", "max_iters", *but)]
        label = ", ".join([s["residual"], *(f"{k}={s[k]}" for k in keys)])
        groups.setdefault(label, (s["residual"], []))[1].append(run)
    return groups


def styled(runs):
    """(label, runs, style) of each group: those of one mode have its colour and differ in their dashes"""
    seen = []
    for label, (residual, members) in grouped(runs).items():
        dashes = ("-", "--", ":", "-.")[seen.count(residual) % 4]
        seen.append(residual)
        yield label, members, {"color": colour(residual), "label": label, "lw": 1.5, "ls": dashes}


def draw(axes, runs, curve, band=True, **style):
    """One line a group of runs, their mean; curve: run -> (x, y)"""
    for _, members, look in styled(runs):
        curves = [dict(zip(*curve(run))) for run in members]
        x = [
            x for x in curves[0] if all(x in other for other in curves)
        ]  # where every seed has a point
        columns = [[y[at] for y in curves] for at in x]
        (line,) = axes.plot(x, [sum(c) / len(c) for c in columns], **(look | style))
        if band and len(members) > 1:
            low, high = [*map(min, columns)], [*map(max, columns)]
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)


def steps_of(run):
    """The records of the steps, of which the one before the first would only set the scale, with the seconds spent"""
    seconds, tokens, steps = 0.0, 0, [r for r in read_log(run)[1] if r["step"]]
    for r in steps:
        seconds, tokens = seconds + (r["tokens"] - tokens) / r["tok_s"], r["tokens"]
        r["seconds"] = seconds
    return steps


def losses_against(axes, runs, key, unit, label):
    def curve(loss):
        def points(run):
            steps = [r for r in steps_of(run) if r[loss] is not None]
            return [r[key] / unit for r in steps], [r[loss] for r in steps]

        return points

    if key == "tokens":
        draw(axes, runs, curve("loss"), band=False, label=None, lw=0.6, alpha=0.5)
        draw(axes, runs, curve("val_loss"), marker="o", ms=3)
    else:  # of which no two seeds may need the same
        for _, members, look in styled(runs):
            for i, run in enumerate(members):
                axes.plot(
                    *curve("val_loss")(run),
                    **(look | {"label": None if i else look["label"], "marker": "o", "ms": 3}),
                )
    axes.set(
        xlabel=label,
        ylabel="validation loss (nats a token)" + (", thin: training" if key == "tokens" else ""),
    )


def loss(axes, runs):
    losses_against(axes, runs, "tokens", 1e6, "million tokens")


def flops(axes, runs):
    losses_against(axes, runs, "flops", 1e12, "training TFLOPs")


def time(axes, runs):
    losses_against(axes, runs, "seconds", 60, "minutes of training")


def reached(run, goal, key):
    """The tokens, steps or seconds at which the validation loss came down to the goal; between two evaluations it is
    taken to fall evenly. None if it did not"""
    steps = [r for r in steps_of(run) if r["val_loss"] is not None]
    at = next((n for n, r in enumerate(steps) if r["val_loss"] <= goal), None)
    if at is None:
        return None
    a, b = steps[max(0, at - 1)], steps[at]
    share = (a["val_loss"] - goal) / (a["val_loss"] - b["val_loss"]) if at else 1.0
    return a[key] + share * (b[key] - a[key])


def target(axes, runs):
    runs = [run for run in runs if final_loss(run) < math.inf]
    goal, groups, right = max(map(final_loss, runs)), grouped(runs), axes.twinx()
    for i, (residual, members) in enumerate(groups.values()):
        for key, unit, side, shift in (("tokens", 1e6, axes, -0.2), ("seconds", 60, right, 0.2)):
            needed = [reached(run, goal, key) / unit for run in members]
            mean = sum(needed) / len(needed)
            error = [[mean - min(needed)], [max(needed) - mean]]
            hatch = None if side is axes else "//"
            side.bar(
                i + shift, mean, 0.38, yerr=error, color=colour(residual), hatch=hatch, ec="white"
            )
    axes.set(
        xticks=range(len(groups)),
        xticklabels=[g.replace(", ", "\n") for g in groups],
        ylabel=f"million tokens to a loss of {goal:.3f}",
    )
    right.set(ylabel="minutes to it (hatched)")
    right.spines["right"].set_visible(True)


def by_depth(key):
    def curve(run):
        depth = read_eval(run, "depth")
        if key not in depth:
            why = "its mode has no rotation" if key in ("a", "alpha") else "evaluate it again"
            raise SystemExit(f"plot.py: {run}/eval.json has no {key} in its depth: {why}")
        return range(len(depth[key])), depth[key]

    return curve


def variance(axes, runs):
    draw(axes, runs, by_depth("variance"))
    axes.set(xlabel="block", ylabel="variance of the stream", yscale="log")


def norm(axes, runs):
    draw(axes, runs, by_depth("norm"))
    axes.set(xlabel="block", ylabel="norm of the stream", yscale="log")


def rotation(axes, runs):
    def curve(run):
        degrees = by_depth("from embedding")(run)[1]
        return range(len(degrees) + 1), [0.0, *degrees]

    draw(axes, runs, curve)
    axes.set(xlabel="sublayer", ylabel="degrees from the embedding")


def alpha(axes, runs):
    def curve(key):
        def points(run):
            values = by_depth(key)(run)[1]
            return range(1, len(values) + 1), values

        return points

    draw(axes, runs, curve("alpha"), ls="--", label=None)
    draw(axes, runs, curve("a"))
    axes.set(xlabel="sublayer", ylabel="mean |a|, and alpha (dashed)")


def dropped(axes, runs):
    draw(axes, runs, by_depth("dropped"), marker="o", ms=3)
    axes.set(xlabel="block left out", ylabel="rise of the loss (nats a token)")
    axes.set_yscale("symlog", linthresh=0.01)


def calibrated(axes, runs):
    def curve(run):
        bins = read_eval(run, "depth")[
            "calibration"
        ]  # each is drawn at its centre, as far off the diagonal as it is
        centres = [min(9, int(10 * c)) / 10 + 0.05 for c in bins["confidence"]]
        return centres, [
            at + a - c for at, a, c in zip(centres, bins["accuracy"], bins["confidence"])
        ]

    axes.plot([0, 1], [0, 1], color="0.7", lw=1)
    draw(axes, runs, curve, marker="o", ms=3)
    axes.set(xlabel="probability of the likeliest token", ylabel="how often it was right")


def similarity(axes, runs):
    matrix = by_depth("similarity")(runs[0])[1]
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.figure.colorbar(image, label="cosine of the mean updates")
    axes.plot([], [], " ", label=read_log(runs[0])[0]["residual"])
    axes.set(xlabel="sublayer", ylabel="sublayer")


def against(axes, runs, x_of, but, value, shared=(), **style):
    """One line a group of runs that differ in x_of(their settings): the mean of value(run) over seeds, with a band.
    shared: runs that belong to every group of their mode. Groups of a mode have its colour and differ in their marks"""
    seen = []
    for label, (residual, members) in grouped(runs, but).items():
        points, mark = {}, "osD^v"[seen.count(residual) % 5]
        seen.append(residual)
        for run in members + [run for run in shared if read_log(run)[0]["residual"] == residual]:
            points.setdefault(x_of(read_log(run)[0]), []).append(value(run))
        x = sorted(points)
        mean = [sum(points[at]) / len(points[at]) for at in x]
        look = {
            "marker": mark,
            "ms": 5,
            "lw": 1.5,
            "label": label,
            "ls": ("-", "--")[mark != "o"],
        } | style
        (line,) = axes.plot(x, mean, color=colour(residual), **look)
        low, high = [min(points[at]) for at in x], [max(points[at]) for at in x]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)


def final_loss(run):
    """Infinity for a run that diverged, which no line goes through"""
    header, records = read_log(run)
    if records and records[-1].get("bad_steps", 0) >= header.get("max_bad_steps", math.inf):
        return math.inf
    return [r["val_loss"] for r in records if r["val_loss"] is not None][-1]


def rate(axes, runs):
    dense = [run for run in runs if read_log(run)[0]["mod_rate"] == 0]
    routed, but = (
        [run for run in runs if run not in dense],
        ["mod_rate", "gate_lr", "nag_directions"],
    )
    against(axes, routed, lambda s: s["mod_rate"], but, final_loss, dense)
    axes.set(xlabel="share of tokens that skip", ylabel="validation loss (nats a token)")


def ladder(axes, runs):
    shape = [
        "n_layer",
        "n_embd",
        "n_head",
        "n_kv_head",
        "n_hidden",
        "moe_experts",
        "moe_shared",
        "init_scale",
    ]
    against(axes, runs, lambda s: s["n_embd"] / s["n_layer"], shape, final_loss)
    axes.set(xlabel="width over depth", ylabel="validation loss (nats a token)")


def stability(axes, runs):
    def growth(run):
        values = (
            read_eval(run, "depth")["variance"] if final_loss(run) < math.inf else [0, 1, math.inf]
        )
        return values[-1] / values[1]

    right = axes.twinx()
    right.spines["right"].set_visible(True)
    rate_of = lambda settings: settings["learning_rate"]
    against(axes, runs, rate_of, ["learning_rate"], final_loss)
    against(right, runs, rate_of, ["learning_rate"], growth, ls=":", label=None)
    axes.set(xlabel="learning rate", ylabel="validation loss (nats a token)", xscale="log")
    right.set(ylabel="variance, last block over first (dotted)", yscale="log")


def map_(axes, runs):
    report = read_eval(runs[0], "mod")
    axes.imshow(report["map"], aspect="auto", cmap="Greys", interpolation="nearest")
    axes.set(
        xlabel="token (black: it ran)",
        yticks=range(len(report["where"])),
        yticklabels=report["where"],
    )
    axes.xaxis.get_major_locator().set_params(integer=True)


def speed(axes, files):
    height = 0
    for file in files:
        parts = [part for part in json.load(need(file)).values() if isinstance(part, dict)]
        rows = {
            name: row
            for part in parts
            for name, row in part.items()
            if isinstance(row, dict) and "ratio" in row
        }
        for name, row in rows.items():
            low, middle, high = row["ratio"]
            axes.barh(
                height,
                middle,
                color=colour(name),
                xerr=[[middle - low], [high - middle]],
                ecolor="0.5",
            )
            axes.text(0, height, f" {name}  {middle:.3f}x", va="center", color="white")
            height += 1
    axes.axvline(1, color="0.7", lw=1)
    axes.set(xlabel="time over that of the first, and quartiles over the rounds", yticks=[])


FIGURES = {
    "loss": loss, "flops": flops, "time": time, "target": target, "variance": variance, "norm": norm,
    "rotation": rotation, "alpha": alpha, "dropped": dropped, "calibrated": calibrated, "similarity": similarity,
    "rate": rate, "ladder": ladder, "map": map_, "stability": stability, "speed": speed,
}  # fmt: skip


def main(figure, out, *runs):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "svg.hashsalt": "residual",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    import matplotlib.pyplot as plt

    if figure not in FIGURES:
        raise SystemExit(
            f"plot.py: there is no figure {figure!r}: choose one of {', '.join(FIGURES)}"
        )
    if FIGURES[figure] is not speed:
        refuse_mixed_data(runs)
    fig, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    FIGURES[figure](axes, runs)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    stem = os.path.splitext(out)[0]
    fig.savefig(stem + ".png", dpi=150, metadata={"Software": None})
    fig.savefig(stem + ".svg", metadata={"Date": None})
    plt.close(fig)
    print(f"{stem}.png {stem}.svg")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
