"""The figures of RESULTS.md. Each function draws what it is given; report.py chooses it."""

import statistics

from study import pyplot, saved


def differences(axes, comparisons, baseline):
    """Both differences of each mode with their intervals, from the best mode to the worst.

    comparisons: what judge.compare returns. Differences far beyond most others are written at the
    edge.
    """
    shown = sorted((each for each in comparisons if each["steps"]), key=lambda each: each["steps"])
    at_steps = [each["steps"] for each in shown]
    at_time = [each["times"][1] if each["times"] else None for each in shown]
    if not shown:
        return
    edge = 1.3 * statistics.quantiles([0.0, *(abs(d) for d, _ in at_steps)], n=10)[-1]
    for shift, of, label in ((-0.14, at_steps, "at equal steps"), (0.14, at_time, "at equal time")):
        found = [(y + shift, *interval) for y, interval in enumerate(of) if interval]
        if not found:
            continue
        heights, middles, halves = zip(*found)
        axes.errorbar(middles, heights, xerr=halves, fmt="o", ms=4, capsize=2, label=label)
        axes.legend(fontsize=8)
        for y, difference, _ in found:
            if difference > edge:
                axes.text(edge, y, f"{difference:+.2f} →", ha="right", va="center", fontsize=7)
    axes.axvline(0, color="0.7", lw=1)
    axes.set_yticks(range(len(shown)), [each["mode"] for each in shown])
    axes.set(ylim=(len(shown) - 0.5, -0.5), xlabel=f"loss minus {baseline}'s (left: better)")
    axes.set_xlim(right=min(edge, axes.get_xlim()[1]))


def height(comparisons):
    """The height of that figure, in inches."""
    return 0.9 + 0.35 * len(comparisons)


def modes(path, comparisons, baseline, leads):
    """The differences of all modes; beside them, their leads against tokens and blocks.

    leads: arguments of against, for each panel.
    """
    rows, columns = max(1, len(leads)), 2 if leads else 1
    size = dict(figsize=(4.5 * columns + 1, height(comparisons)), layout="constrained")
    figure = pyplot().figure(**size)
    grid = figure.add_gridspec(rows, columns)
    differences(figure.add_subplot(grid[:, 0]), comparisons, baseline)
    for row, lead in enumerate(leads):
        against(figure.add_subplot(grid[row, 1]), *lead)
    saved(figure, path)


def against(axes, points, unit, form, xlabel):
    """The lead of each mode against steps or blocks, in multiples of a unit.

    points: what report.lead_points returns.
    """
    values = sorted({value for of in points.values() for value, *_ in of})
    for i, (mode, of) in enumerate(points.items()):
        middles, halves = zip(*(gaps[0] for _, gaps, _ in of))
        x = [value * unit * 1.03**i for value, *_ in of]
        axes.errorbar(x, middles, yerr=halves, fmt="o-", ms=4, capsize=2, label=mode)
    axes.axhline(0, color="0.7", lw=1)
    axes.set(xscale="log", xlabel=xlabel)
    axes.set_xticks([value * unit for value in values], [form.format(v * unit) for v in values])
    axes.set_xticks([], minor=True)
    largest = max(abs(gaps[0][0]) for of in points.values() for _, gaps, _ in of)
    axes.set(ylabel="loss minus pre-norm's, at equal steps")
    axes.set(ylim=(-2 * largest, 2 * largest))  # may cut intervals
    axes.legend(fontsize=8)


def classroom(path, found):
    """The training losses of the small models. found: what classroom.finished returns."""
    whats = [what for what in ("stack", "transformer") if found[what]]
    size = dict(figsize=(4.5 * len(whats), 3.2), layout="constrained", squeeze=False)
    figure, axes = pyplot().subplots(1, len(whats), **size)
    for panel, what in zip(axes[0], whats):
        for names, line in found[what].items():
            if line["curve"]:
                panel.plot(*zip(*line["curve"]), label=", ".join(map(str, names)), lw=1)
        panel.set(xlabel="step", ylabel="training loss", title=what, ylim=(1, 6))  # B is above
        panel.legend(fontsize=7)
    saved(figure, path)


def stability(path, lines):
    """Loss and variance of the stream against the learning rate. lines: {mode: its runs}."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(8, 3), layout="constrained")
    for i, (mode, of) in enumerate(lines.items()):
        of = sorted(of, key=lambda line: line["learning_rate"])
        rates = [line["learning_rate"] for line in of]
        first, last = ([line["variance"][b] for line in of] for b in (0, -1))
        left.plot(rates, [line["loss"] for line in of], f"C{i}o-", label=mode)
        right.plot(rates, last, f"C{i}o-", label=f"{mode}, after the last block")
        right.plot(rates, first, f"C{i}o:", label=f"{mode}, after the first block")
    left.set(xlabel="learning rate", ylabel="validation loss", xscale="log")
    right.set(xlabel="learning rate", ylabel="variance of the stream", xscale="log", yscale="log")
    left.legend(fontsize=8)
    right.legend(fontsize=6)
    saved(figure, path)


def recipe(path, rows):
    """What each part of the recipe is worth at equal time, with intervals. rows: of recipe.rows."""
    rows = sorted(rows, key=lambda row: (row["equal"] or row["steps"])[0])
    middles, halves = zip(*(row["equal"] or row["steps"] for row in rows))
    names = [row["name"] + ("" if row["equal"] else ", at equal steps") for row in rows]
    figure, axes = pyplot().subplots(figsize=(7, 0.5 + 0.25 * len(rows)), layout="constrained")
    axes.errorbar(middles, range(len(rows)), xerr=halves, fmt="o", color="C0", capsize=2)
    axes.axvline(0, color="0.7", lw=1)
    axes.set_yticks(range(len(rows)), names)
    axes.set(xlabel="validation loss minus the recipe's, at equal time")
    saved(figure, path)
