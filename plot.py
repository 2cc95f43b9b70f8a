"""
Figures from logs: python plot.py FIGURE OUT.png RUN [RUN ...]

    loss       validation loss against tokens, and faintly the training loss, from each RUN/log.jsonl
    variance   variance of the stream behind each block, from each RUN/eval.json
    norm       the norm of the stream, NAG's on a scale of its own, likewise
    rotation   how far the embedding has been turned behind each sublayer, likewise
    alpha      NAG: alpha and the a that comes of it in each sublayer, likewise
    rate       final validation loss against the share of tokens that skip, by router, from each RUN/log.jsonl
    map        which tokens of a text ran where, from one RUN/eval.json
    stability  final validation loss, and growth of the variance, against the learning rate, from both
    predicted  BHyT's predicted variance beside the measured one, and the theory's, from each RUN/eval.json

Runs that differ only in their seed become one line, their mean, with a band from the least to the most. The same input
gives the same bytes. A missing file is an error. Writes OUT.png and OUT.svg.
"""

import json
import os
import sys

COLOURS = {  # Okabe and Ito's and some of Tol's, for the colour-blind; a mode has the same one everywhere
    "prenorm": "#000000", "perinorm": "#0072B2", "postnorm": "#D55E00", "lns": "#009E73", "dyt": "#E69F00",
    "none": "#CC79A7", "nag": "#56B4E9", "orthogonal": "#999999",
    "bhyt": "#882255", "bhyt_exact": "#AA4499", "prenorm_approx": "#666666",
}  # fmt: skip


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
        raise SystemExit(f"plot.py: {run}/eval.json has no {part}: python eval.py --out_dir={run} --what={part}")
    return report[part]


def grouped(runs, but=()):
    """{label: (residual, runs)}: a label says which settings tell these runs apart, the seed aside, and those in but"""
    settings = {run: read_log(run)[0] for run in runs}
    keys = [k for k in settings[runs[0]] if len({str(s.get(k)) for s in settings.values()}) > 1]
    keys = [k for k in keys if k not in ("seed", "out_dir", "init_from", "max_iters", *but)]
    keys.sort(key=lambda k: k != "residual")
    groups = {}
    for run, s in settings.items():
        label = ", ".join(str(s[k]) if k == "residual" else f"{k}={s.get(k)}" for k in keys) or s["residual"]
        groups.setdefault(label, (s["residual"], []))[1].append(run)
    return groups


def draw(axes, runs, curve, band=True, **style):
    """One line a group of runs; curve: run -> (x, y). Groups of one mode have its colour and differ in their dashes."""
    seen = []
    for label, (residual, members) in grouped(runs).items():
        curves = [dict(zip(*curve(run))) for run in members]
        x = [x for x in curves[0] if all(x in other for other in curves)]  # where every seed has a point
        columns = [[y[at] for y in curves] for at in x]
        dashes = ("-", "--", ":", "-.")[seen.count(residual) % 4]
        look = {"color": COLOURS.get(residual), "label": label, "lw": 1.5, "ls": dashes} | style
        seen.append(residual)
        (line,) = axes.plot(x, [sum(c) / len(c) for c in columns], **look)
        if band and len(members) > 1:
            low, high = [*map(min, columns)], [*map(max, columns)]
            axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)


def loss(axes, runs):
    def curve(key):
        def points(run):  # from the first step on: what came before says nothing and would set the scale
            steps = [r for r in read_log(run)[1] if r["step"] and r[key] is not None]
            return [r["tokens"] / 1e6 for r in steps], [r[key] for r in steps]

        return points

    draw(axes, runs, curve("loss"), band=False, label=None, lw=0.6, alpha=0.5)
    draw(axes, runs, curve("val_loss"), marker="o", ms=3)
    axes.set(xlabel="million tokens", ylabel="validation loss (nats a token)")


def by_depth(key):
    def curve(run):
        depth = read_eval(run, "depth")
        if key not in depth:
            raise SystemExit(f"plot.py: {run}/eval.json has no {key} in its depth: it is not a run of NAG")
        return range(len(depth[key])), depth[key]

    return curve


def variance(axes, runs):
    draw(axes, runs, by_depth("variance"))
    axes.set(xlabel="block", ylabel="variance of the stream", yscale="log")


def norm(axes, runs):
    """NAG's on the left, everybody else's on the right"""
    nag = [run for run in runs if read_log(run)[0]["residual"] == "nag"]
    other, right = [run for run in runs if run not in nag], axes
    axes.set(xlabel="block", ylabel="norm of the stream")
    if nag and other:
        axes.set(ylabel="norm of NAG's stream, exp(s) sqrt(d)")
        right = axes.twinx()
        right.spines["right"].set_visible(True)
        right.set(ylabel="norm of the other streams (dashed)")
    if nag:
        draw(axes, nag, by_depth("norm"))
    if other:
        draw(right, other, by_depth("norm"), ls="--")
        right.legend(loc="lower right", frameon=False)


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


def against(axes, runs, setting, but, value, **style):
    """One line a group of runs that differ in one setting: the mean of value(run) over seeds, with a band"""
    for label, (residual, members) in grouped(runs, (setting, *but)).items():
        points = {}
        for run in members:
            points.setdefault(read_log(run)[0][setting], []).append(value(run))
        x = sorted(points)
        mean = [sum(points[at]) / len(points[at]) for at in x]
        look = {"marker": "o", "ms": 4, "lw": 1.5, "label": label} | style
        (line,) = axes.plot(x, mean, color=COLOURS[residual] if label == residual else None, **look)
        low, high = [min(points[at]) for at in x], [max(points[at]) for at in x]
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.2, lw=0)


def final_loss(run):
    return [r["val_loss"] for r in read_log(run)[1] if r["val_loss"] is not None][-1]


def rate(axes, runs):
    against(axes, runs, "mod_rate", ["mod_on"], final_loss)
    axes.set(xlabel="share of tokens that skip", ylabel="validation loss (nats a token)")


def stability(axes, runs):
    def growth(run):
        values = read_eval(run, "depth")["variance"]
        return values[-1] / values[1]

    right = axes.twinx()
    right.spines["right"].set_visible(True)
    against(axes, runs, "learning_rate", [], final_loss)
    against(right, runs, "learning_rate", [], growth, ls=":", label=None)
    axes.set(xlabel="learning rate", ylabel="validation loss (nats a token)", xscale="log")
    right.set(ylabel="variance, last block over first (dotted)", yscale="log")


def map_(axes, runs):
    report = read_eval(runs[0], "mod")
    axes.imshow(report["map"], aspect="auto", cmap="Greys", interpolation="nearest")
    axes.set(xlabel="token", yticks=range(len(report["where"])), yticklabels=report["where"])
    axes.plot([], [], "s", color="black", label="ran")


def predicted(axes, runs):
    for run in runs:
        report, label = read_eval(run, "variance"), read_log(run)[0]["residual"]
        blocks = range(len(report["measured"]))
        axes.plot(blocks, report["measured"], color=COLOURS[label], lw=1.5, label=f"{label}: measured")
        axes.plot(blocks, report["paper"]["predicted"], color=COLOURS[label], lw=1.5, ls="--", label="predicted")
        if "recursion" in report:
            least, most = (report["recursion"][bound] for bound in ("least", "most"))
            axes.fill_between(blocks, least, most, color="0.8", label="the theory's recursion, uncorrelated")
    axes.set(xlabel="block", ylabel="variance before the MLP", yscale="log")


FIGURES = {
    "loss": loss, "variance": variance, "norm": norm, "rotation": rotation, "alpha": alpha, "rate": rate, "map": map_,
    "stability": stability, "predicted": predicted,
}  # fmt: skip


def main(figure, out, *runs):
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "residual", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    import matplotlib.pyplot as plt

    if figure not in FIGURES:
        raise SystemExit(f"plot.py: there is no figure {figure!r}: choose one of {', '.join(FIGURES)}")
    fig, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    FIGURES[figure](axes, runs)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    stem = os.path.splitext(out)[0]
    fig.savefig(stem + ".png", dpi=150, metadata={"Software": None})
    fig.savefig(stem + ".svg", metadata={"Date": None})
    print(f"{stem}.png {stem}.svg")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
