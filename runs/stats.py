"""Paired intervals, their p values, and losses between the trained lengths."""

import math
import statistics


def scipy():
    """The package, imported only where it is needed."""
    try:
        import scipy.interpolate
        import scipy.optimize
        import scipy.stats
    except ImportError:
        raise SystemExit("the studies in runs/ need scipy: pip install scipy")
    return scipy


def quantile(p, degrees):
    """Of the t distribution."""
    return float(scipy().stats.t.ppf(p, degrees))


def interval(values):
    """The mean of values, and half the width of its 95% t interval. None if a run diverged."""
    if not all(map(math.isfinite, values)):
        return None
    n = len(values)
    standard_error = statistics.stdev(values) / math.sqrt(n)
    return statistics.mean(values), quantile(0.975, n - 1) * standard_error


def minus(a, b):
    """Differences of losses by seed. The last seeds, if only one side has them, do not count."""
    return [x - y for x, y in zip(a, b)]


def detectable(half, n):
    """The true difference that 4 of 5 studies find, if their 95% intervals have this half-width."""
    certain, likely = quantile(0.975, n - 1), quantile(0.8, n - 1)
    return half * (certain + likely) / certain


def p_value(gap, n):
    """The probability of a difference this large if the true one is 0. gap: interval of n values"""
    difference, half = gap
    if half == 0:
        return float(difference == 0)
    standard_error = half / quantile(0.975, n - 1)
    return float(2 * scipy().stats.t.sf(abs(difference) / standard_error, n - 1))


def holm(gaps):
    """{name: verdict} after Holm's correction. gaps: {name: [(interval, number of its values)]}

    Of several intervals the least certain counts, and all must agree.
    """
    alone = {name: verdict([gap for gap, _ in pairs]) for name, pairs in gaps.items()}
    clear = [name for name in gaps if alone[name] != "undecided"]
    values = {name: max(p_value(*pair) for pair in gaps[name]) for name in clear}
    found = dict.fromkeys(gaps, "undecided")
    for i, name in enumerate(sorted(values, key=values.get)):
        if values[name] > 0.05 / (len(gaps) - i):
            break
        found[name] = alone[name]
    return found


def median_interval(values):
    """The median of independent values between the ends of its 95% interval.

    The number of values below the true median is binomial. Fewer than 6 values: the whole range,
    which holds it with a probability below 95%.
    """
    values = sorted(values)
    below = max(0, int(scipy().stats.binom.ppf(0.025, len(values), 0.5)) - 1)
    return values[below], statistics.median(values), values[-1 - below]


def losses_of(lines):
    """The loss of each line; infinite if the run diverged."""
    return [math.inf if line["loss"] is None else line["loss"] for line in lines]


def of_seeds(lines):
    """{seed: line}, in the order of seeds."""
    seeds = [line.get("settings", {}).get("seed") for line in lines]
    if None in seeds or len({*seeds}) < len(seeds):
        raise SystemExit(f"runs to compare need one line for each seed, not {seeds}")
    return dict(sorted(zip(seeds, lines), key=lambda pair: pair[0]))


def pairs(ours, theirs):
    """{seed: (our line, their line)} of the seeds that both sides have.

    Both runs of a pair must share data and computes.
    """
    mine, others = of_seeds(ours), of_seeds(theirs)
    found = {seed: (mine[seed], others[seed]) for seed in mine if seed in others}
    if len(found) < 2:
        raise SystemExit(f"runs of seeds {[*mine]} and {[*others]} share fewer than two")
    for pair in found.values():
        if len({(line.get("data"), line.get("computes")) for line in pair}) > 1:
            raise SystemExit("a pair of runs has different data, devices, dtypes or compilation")
    return found


def by_seed(ours, theirs):
    """{seed: our loss minus theirs}"""
    losses = {seed: losses_of(pair) for seed, pair in pairs(ours, theirs).items()}
    return {seed: loss - other for seed, (loss, other) in losses.items()}


def gap_of(ours, theirs):
    """The interval of these differences, or None if a run diverged."""
    return interval([*by_seed(ours, theirs).values()])


def slope(by_x):
    """The interval of the slope over x of a least-squares line. by_x: {x: {seed: value}}

    If every x has the same seeds, this is the t interval of the slopes of the seeds.
    """
    middle = statistics.mean(by_x)
    squares = sum((x - middle) ** 2 for x in by_x)
    return contrast([((x - middle) / squares, values) for x, values in by_x.items()])


def contrast(weighted):
    """The interval of a weighted sum of means. weighted: [(weight, {seed: value})]

    Means that share seeds are paired by these seeds. Others are independent: for two of them this
    is Welch's interval of a difference, and for more its usual extension.
    """
    groups = []
    for each in weighted:
        paired = [group for group in groups if any(of.keys() & each[1].keys() for _, of in group)]
        groups = [group for group in groups if group not in paired] + [sum(paired, [each])]
    found, variances = 0.0, []
    for group in groups:
        seeds = set.intersection(*(set(of) for _, of in group))
        if len(seeds) < 2:
            raise SystemExit("values to compare share fewer than two seeds")
        sums = [sum(weight * of[seed] for weight, of in group) for seed in sorted(seeds)]
        found += statistics.mean(sums)
        variances.append((statistics.variance(sums) / len(sums), len(sums) - 1))
    total = sum(variance for variance, _ in variances)
    if total == 0:
        return found, 0.0
    degrees = total**2 / sum(variance**2 / n for variance, n in variances)
    return found, quantile(0.975, degrees) * math.sqrt(total)


def differences_at(length, losses, by_length):
    """For each seed, the loss minus what other runs would have at this length."""
    return minus(losses, losses_at(length, by_length))


def losses_at(length, by_length):
    """The loss of each seed, interpolated at a length. by_length: {length: losses}

    A parabola in log(length), through the next longer length and the two nearest others. If three
    or more lengths have the most seeds, and this one is between them, only these count.
    """
    full = with_most_seeds(by_length)
    if len(full) > 2 and min(full) <= length <= max(full):
        by_length = full
    if not min(by_length) <= length <= max(by_length):
        raise ValueError(f"length {length:g} is not between those trained: {sorted(by_length)}")
    above = min(known for known in by_length if known >= length)
    distance = lambda known: (known != above, abs(math.log(known / length)))
    near = sorted(by_length, key=distance)[:3]
    logs = [math.log(known) for known in near]
    curves = zip(*(by_length[known] for known in near))
    at = lambda curve: scipy().interpolate.krogh_interpolate(logs, curve, math.log(length))
    return [float(at(curve)) for curve in curves]


def with_most_seeds(by_length):
    most = max(map(len, by_length.values()))
    return {length: losses for length, losses in by_length.items() if len(losses) == most}


def length_of(losses, by_length):
    """The length at which the other runs reach the mean of losses, between the ends of its 95%
    interval. None: beyond those trained.

    From the lengths with the most seeds, or, if these do not reach, from all with the seeds they
    share.
    """
    found = crossings(losses, with_most_seeds(by_length))
    least = min(map(len, by_length.values()))
    shared = {length: theirs[:least] for length, theirs in by_length.items()}
    return crossings(losses, shared) if None in found else found


def crossings(losses, by_length):
    """Where the upper end, the middle and the lower end of the difference are 0, or None."""
    first, last = min(by_length), max(by_length)

    def end(length, side):
        difference, half = interval(differences_at(length, losses, by_length))
        return difference + side * half

    inside = lambda side: end(first, side) <= 0 <= end(last, side)
    root = lambda side: scipy().optimize.brentq(end, first, last, (side,))
    return [root(side) if inside(side) else None for side in (1, 0, -1)]


def verdict(intervals):
    """The verdict on all intervals (difference, half its width).

    It is undecided if they disagree, or if one of them is None because a run diverged.
    """
    if None in intervals:
        return "undecided"
    if all(difference + half < 0 for difference, half in intervals):
        return "better"
    if all(difference - half > 0 for difference, half in intervals):
        return "worse"
    return "undecided"


def plus_minus(interval):
    return "{:+.4f} ± {:.4f}".format(*interval) if interval else "diverged"


def decided(intervals):
    """Two cells: the middle one of some intervals, and the verdict on all. Empty without any."""
    if not intervals:
        return "", ""
    middle = intervals[len(intervals) // 2]
    return plus_minus(middle), verdict(intervals)


def with_range(ratios):
    """The middle one of three ratios with the two others, if these are known and differ."""
    if not ratios or ratios[1] is None:
        return ""
    low, middle, high = ratios
    known = None not in ratios and low < high
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if known else f"{middle:.2f}"
