"""Paired intervals, their p values, and losses between the trained lengths."""

import math
import statistics

try:
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


def p_value(gap, n):
    """The probability of a difference this large if the true one is 0. gap: interval of n values"""
    difference, half = gap
    if difference == 0:
        return 1.0
    if half == 0:
        return 0.0
    standard_error = half / student.ppf(0.975, n - 1)
    return float(2 * student.sf(abs(difference) / standard_error, n - 1))


def holm(gaps, n):
    """{name: verdict} after Holm's correction. gaps: {name: interval of n}"""
    values = {name: p_value(gap, n) for name, gap in gaps.items()}
    found = dict.fromkeys(gaps, "undecided")
    for i, name in enumerate(sorted(values, key=values.get)):
        if values[name] > 0.05 / (len(values) - i):
            break
        found[name] = verdict([gaps[name]])
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


def gap_of(ours, theirs):
    """The paired interval of our losses minus theirs, or None if a run diverged."""
    a, b = losses_of(ours), losses_of(theirs)
    return None if math.inf in a + b else paired(a, b)


def gap_at(length, losses, by_length):
    """The paired interval from other runs, interpolated at a length. by_length: {length: losses}"""
    return paired(losses, losses_at(length, by_length))


def losses_at(length, by_length):
    """The loss of each seed, interpolated at a length. by_length: {length: losses}"""
    curves = [dict(zip(by_length, of_seed)) for of_seed in zip(*by_length.values())]
    return [at_length(length, curve) for curve in curves]


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
    """The verdict on all intervals (difference, half its width): undecided if they disagree."""
    words = set()
    for difference, half in intervals:
        decided = "better" if difference < 0 else "worse"
        words.add("undecided" if abs(difference) <= half else decided)
    return words.pop() if len(words) == 1 else "undecided"


def plus_minus(interval):
    return "{:+.4f} ± {:.4f}".format(*interval)
