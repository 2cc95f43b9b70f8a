"""Paired intervals, their p values, and losses between the trained lengths."""

import math
import statistics
from itertools import accumulate, combinations_with_replacement

try:
    from scipy.optimize import brentq
    from scipy.stats import t as student
except ImportError:
    raise SystemExit("the studies in runs/ need scipy: pip install scipy")


def interval(values):
    """The mean of values, and half the width of its 95% t interval."""
    n = len(values)
    if n < 2:
        return statistics.mean(values), math.inf
    standard_error = statistics.stdev(values) / math.sqrt(n)
    return statistics.mean(values), float(student.ppf(0.975, n - 1)) * standard_error


def paired(a, b):
    """The interval of a - b over pairs."""
    return interval(minus(a, b))


def minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def detectable(half, n):
    """The true difference that 4 of 5 studies find, if their 95% intervals have this half-width."""
    certain, likely = student.ppf((0.975, 0.8), n - 1)
    return half * (certain + likely) / certain


def signed_rank_verdict(values):
    """The verdict of the 95% signed-rank interval of the median; None for fewer than 6 values.

    Its ends are means of two values (Walsh averages): the k-th from either side, where k - 1 is the
    largest rank sum whose probability is at most 0.025 when all signs are equally likely.
    """
    n = len(values)
    counts = [1] + [0] * (n * (n + 1) // 2)  # in how many of the 2^n ways the ranks sum to i
    for rank in range(1, n + 1):
        for i in range(len(counts) - 1, rank - 1, -1):
            counts[i] += counts[i - rank]
    k = sum(total <= 0.025 * 2**n for total in accumulate(counts))
    if k == 0:
        return None
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    low, high = means[k - 1], means[-k]
    return "better" if high < 0 else "worse" if low > 0 else "undecided"


def p_value(gap, n):
    """The probability of a difference this large if the true one is 0. gap: interval of n values"""
    difference, half = gap
    if difference == 0:
        return 1.0
    if half == 0:
        return 0.0
    standard_error = half / student.ppf(0.975, n - 1)
    return float(2 * student.sf(abs(difference) / standard_error, n - 1))


def holm(gaps):
    """{name: verdict} after Holm's correction. gaps: {name: (interval, number of its values)}"""
    values = {name: p_value(gap, n) for name, (gap, n) in gaps.items()}
    found = dict.fromkeys(gaps, "undecided")
    for i, name in enumerate(sorted(values, key=values.get)):
        if values[name] > 0.05 / (len(values) - i):
            break
        found[name] = verdict([gaps[name][0]])
    return found


def median_interval(values):
    """The median of independent values between the ends of its 95% interval.

    The number of values below the true median has mean n/2 and standard deviation sqrt(n)/2.
    """
    values = sorted(values)
    below = max(0, math.floor((len(values) - 1.96 * math.sqrt(len(values))) / 2))
    return values[below], statistics.median(values), values[-1 - below]


def losses_of(lines):
    """The loss of each line; infinite if the run diverged."""
    return [math.inf if line["loss"] is None else line["loss"] for line in lines]


def differences(ours, theirs):
    """The losses of our lines minus theirs. Seeds that only one side has do not count."""
    n = min(len(ours), len(theirs))
    return minus(losses_of(ours[:n]), losses_of(theirs[:n]))


def gap_of(ours, theirs):
    """The interval of these differences, or None if a run diverged."""
    found = differences(ours, theirs)
    return interval(found) if all(map(math.isfinite, found)) else None


def slope(by_x):
    """The interval of the slope over x of the means of independent values. by_x: {x: values}

    For two x that is Welch's interval of a difference, and for more its usual extension.
    """
    middle = statistics.mean(by_x)
    squares = sum((x - middle) ** 2 for x in by_x)
    found, variances = 0.0, []
    for x, values in by_x.items():
        weight, n = (x - middle) / squares, len(values)
        found += weight * statistics.mean(values)
        variances.append((weight**2 * statistics.variance(values) / n, n - 1))
    total = sum(variance for variance, _ in variances)
    degrees = total**2 / sum(variance**2 / n for variance, n in variances)
    return found, float(student.ppf(0.975, degrees)) * math.sqrt(total)


def gap_at(length, losses, by_length):
    """The interval of the differences from other runs, interpolated at a length.

    by_length: {length: losses}. Seeds that only one side has do not count.
    """
    theirs = losses_at(length, by_length)
    n = min(len(losses), len(theirs))
    return paired(losses[:n], theirs[:n])


def losses_at(length, by_length):
    """The loss of each seed, interpolated at a length. by_length: {length: losses}"""
    curves = [dict(zip(by_length, of_seed)) for of_seed in zip(*by_length.values())]
    return [at_length(length, curve) for curve in curves]


def length_of(losses, by_length):
    """The length at which the other runs reach the mean of losses. None: beyond those trained."""
    gap = lambda length: gap_at(length, losses, by_length)[0]
    low, high = min(by_length), max(by_length)
    return brentq(gap, low, high) if gap(low) <= 0 <= gap(high) else None


def at_length(length, losses):
    """Interpolate {length: loss}: a parabola in log(length), through the three nearest lengths."""
    if not min(losses) <= length <= max(losses):
        raise ValueError(f"length {length:g} is not between those trained: {sorted(losses)}")
    near = sorted(losses, key=lambda known: abs(math.log(known / length)))[:3]
    value = 0.0
    for a in near:  # Lagrange's form
        weight = 1.0
        for b in near:
            if b != a:
                weight *= math.log(length / b) / math.log(a / b)
        value += weight * losses[a]
    return value


def verdict(intervals):
    """The verdict on all intervals (difference, half its width).

    It is undecided if they disagree, or if one of them is None because a run diverged.
    """
    if None in intervals:
        return "undecided"
    words = set()
    for difference, half in intervals:
        decided = "better" if difference < 0 else "worse"
        words.add("undecided" if abs(difference) <= half else decided)
    return words.pop() if len(words) == 1 else "undecided"


def plus_minus(interval):
    return "{:+.4f} ± {:.4f}".format(*interval) if interval else "diverged"
