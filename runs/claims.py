"""
The published claims, with our measurements beside them: a part of RESULTS.md, which runs/report.py
writes.

A row: (claim, published figure, ours, verdict). With intervals, a claim holds if 0 is outside them
and the sign is the claimed one, does not hold if the sign is the other, and is undecided if 0 is
inside.
"""

import json
import math
from statistics import mean

import classroom
import judge
import lead
import study
from study import ROOT, gap_of, interval, minus, paired, plus_minus

HEAD = ("claim", "published", "ours", "verdict")
STACKS = {
    "A": "12 ReLU layers, no norm, no skip: the loss drops fast, then stalls",
    "B": "The same, weights from U[-0.5, 0.5]: it explodes",
    "C": "30 GELU layers with norm and skip: no spike, and a loss near that of 2 layers or lower",
}
STILL = 5  # an angle that grows by fewer degrees has stopped
WEAK, STRONG = -0.1, -0.5  # correlations
NEAR = 0.05  # losses of the stacks that differ by less are alike
PUBLISHED_GAINS = {80: 0.0118, 60: 0.0189, 40: 0.0220, 30: 0.0219, 20: 0.0285}
PUBLISHED_1B = {"prenorm": 3.272, "lns": 3.271, "perinorm": 3.279, "dyt": 3.696, "bhyt": 3.254}


def sign(interval, wanted=-1):
    """The verdict if the difference should have the wanted sign."""
    difference, half = interval
    if abs(difference) <= half:
        return "undecided"
    return "holds" if difference * wanted > 0 else "does not hold"


def all_of(words):
    """The verdict on several parts of a claim."""
    for word in ("does not hold", "undecided"):
        if word in words:
            return word
    return "holds"


def held(right):
    """The verdict of one run."""
    return f"{'holds' if right else 'does not hold'} (one seed)"


def below(ours, theirs):
    """The verdict if all of our values should be below all of theirs."""
    if max(ours) < min(theirs):
        return "holds (one seed)"
    if min(ours) > max(theirs):
        return "does not hold (one seed)"
    return "undecided: depends on the learning rate"


def speed(name, parts, mode, other):
    """The median_interval of a mode's time over another's, from a part of a file of bench.py."""
    report = json.loads((ROOT / "results" / "speed" / f"{name}.json").read_text())
    for part in parts:
        report = report[part]
    pairs = zip(report[mode]["seconds"], report[other]["seconds"])
    return study.median_interval([a / b for a, b in pairs])


def faster(interval):
    """The verdict on a claim of speed."""
    low, _, high = interval
    word = "holds" if high < 1 else "does not hold" if low > 1 else "undecided"
    return f"{word} on a CPU, at this size"


def ratio_in_words(interval, other):
    low, middle, high = interval
    return f"{middle:.3f} of the time of {other} (95% interval {low:.3f} to {high:.3f})"


def runs_of(judged, mode):
    """The runs of a mode for all steps, one line per seed."""
    return judged[mode][1][1.0]


def complete(judged):
    """The judged modes without a diverged seed."""
    whole = lambda lines: None not in [line["loss"] for line in lines]
    return {mode: judged[mode] for mode in judged if whole(runs_of(judged, mode))}


def insides(mode):
    """{learning rate: what eval.py measured by depth on the first seed}"""
    pairs = judge.lines_of_mode(lead.scale_of_judge(), mode)
    measured = ((full["learning_rate"], line) for full, line in pairs if "depth" in line)
    return {rate: line["depth"] for rate, line in sorted(measured, key=lambda pair: pair[0])}


def spread(values, form=".3g"):
    """From the smallest to the largest value, as text."""
    ends = dict.fromkeys(f"{value:{form}}" for value in (min(values), max(values)))
    return " to ".join(ends)


def growth(depth):
    """The norm of the stream after the last block, over that of the embedding."""
    return depth["norm"][-1] / depth["norm"][0]


def late_turn(depth):
    """How much the angle to the embedding grows in the second half of the sublayers, in degrees."""
    angles = depth["from embedding"]
    return angles[-1] - angles[len(angles) // 2 - 1]


# ------------------------------------------------------------------------------------------------
# The claims


def gain_by_shape(earlier):
    """Claims about NAG with experts. Our runs are short, with rates at the edge of their grid."""
    gains = {}
    for ratio in PUBLISHED_GAINS:
        pair = (earlier.losses("moe_ratio", f"{mode}_{ratio}") for mode in ("prenorm", "nag"))
        gains[ratio] = minus(*pair)
    means = ", ".join(f"{mean(of):.4f}" for of in gains.values())
    none = "not decidable here: short runs, rate at the edge of its grid"
    yield (
        "With experts, NAG's loss is lower than pre-norm's, by more the smaller width / depth is "
        f"({', '.join(map(str, gains))})",
        ", ".join(f"{gain:.4f}" for gain in PUBLISHED_GAINS.values()),
        f"{means}; growth {plus_minus(paired(gains[20], gains[80]))} (short runs)",
        f"{none}; it takes 4 MB with tuned rates",
    )


def nag(judged, with_adamw):
    """Claims about a dense NAG. judged, with_adamw: {mode: what judge.train returns}."""
    if not {"prenorm", "nag"} <= judged.keys():
        return
    ours, verdicts = [], []
    for optimizer, modes in (("Muon", judged), ("AdamW", with_adamw)):
        if {"prenorm", "nag"} <= modes.keys():
            gap = gap_of(runs_of(modes, "nag"), runs_of(modes, "prenorm"))
            ours.append(f"{optimizer} {plus_minus(gap)}")
            verdicts.append(f"{sign(gap)} with {optimizer}")
    claim = "NAG's loss is lower than pre-norm's without experts"
    yield claim, "yes", ", ".join(ours), ", ".join(verdicts)
    yield from inside_nag(insides("prenorm"), insides("nag"))


def gain_by_depth(blocks):
    """Claims about a dense NAG in depth. blocks: {(mode, number of blocks): the lines of its seeds}
    of runs/lead.py."""
    gains = {}
    for n in sorted({n for _, n in blocks}):
        theirs, ours = (judge.losses(blocks.get((mode, n), [])) for mode in ("prenorm", "nag"))
        if theirs and ours and math.inf not in theirs + ours:
            gains[n] = minus(theirs, ours)
    if len(gains) < 2:
        return
    few, many = min(gains), max(gains)
    growth = paired(gains[many], gains[few])
    yield (
        f"The same without experts: NAG gains more with {many} blocks than with {few}",
        "not given",
        ", ".join(f"{n} blocks: {mean(gain):.4f}" for n, gain in gains.items())
        + f"; growth {plus_minus(growth)}",
        sign(growth, wanted=1),
    )


def inside_nag(theirs, ours):
    """Claims about the stream of NAG. theirs, ours: what insides returns for pre-norm and NAG."""
    theirs, ours = theirs.values(), ours.values()
    a, b = ([growth(depth) for depth in of] for of in (theirs, ours))
    least, most = min(a) / max(b), max(a) / min(b)
    in_part = f"holds in part (one seed): {least:.1f} to {most:.1f} times as much, not about 120"
    yield (
        "Through depth, the norm of the stream grows far more with pre-norm than with NAG",
        "about 120 times, at ratio 80",
        f"pre-norm {spread(a)} times, NAG {spread(b)} times, in 8 blocks",
        in_part if 1 < least and most < 60 else below(b, a),
    )

    a, b = ([late_turn(depth) for depth in of] for of in (theirs, ours))
    grows, stops = max(a) < min(b), max(a) < STILL
    in_part = "holds in part (one seed): it grows less with pre-norm, but does not stop"
    yield (
        "The angle between the stream and the embedding keeps growing with NAG, and stops without",
        "yes",
        f"in the second half of the depth: pre-norm {spread(a)} degrees, NAG {spread(b)}",
        in_part if grows and not stops else below(a, b),
    )

    a, b = ([max(depth["sink"]) for depth in of] for of in (theirs, ours))
    length = lead.scale_of_judge()["block_size"]
    uniform = mean(1 / n for n in range(2, length + 1))  # as depth.sink averages
    found = f"pre-norm {spread(a)}, NAG {spread(b)}; uniform attention: {uniform:.3g}"
    without = max(a) < 2 * uniform
    none = "not decidable here: pre-norm has no sink; it takes a larger model"
    verdict = none if without else below(b, a)
    yield "Attention to the first token is smaller with NAG", "yes", found, verdict

    for words, key in (
        ("The largest feature / rms is smaller with NAG", "max/rms"),
        ("The kurtosis of the stream is smaller with NAG", "kurtosis"),
    ):
        a, b = ([max(depth[key]) for depth in of] for of in (theirs, ours))
        yield words, "yes", f"pre-norm {spread(a)}, NAG {spread(b)}", below(b, a)

    entropy, loss = ([depth[f"norm and {key}"] for depth in ours] for key in ("entropy", "loss"))
    found = f"correlation with entropy {spread(entropy, '+.2f')}, with loss {spread(loss, '+.2f')}"
    weakest = max(entropy + loss)
    yield (
        "With NAG, a large final norm means a confident prediction",
        "low entropy and loss",
        f"log norm: {found}",
        "holds weakly (one seed)" if STRONG < weakest < WEAK else held(weakest <= STRONG),
    )


def depths(mixtures, dense, earlier):
    """Claims about mixtures of depths. mixtures: {name: the lines of runs/lead.py}. dense: the
    lines of NAG without skipping, {steps: lines}."""
    for rate, published in ((0.2, "yes"), (0.4, "-0.0671 (per token of a BPE)")):
        own, learned, other = (
            f"{router} {rate}"
            for router in ("NAG's router", "learned router", "learned router on pre-norm")
        )
        words = "NAG with NAG's router has a lower loss than pre-norm with a learned one, if "
        words += f"{rate:.0%} of tokens skip"
        gap = gap_of_mixtures(mixtures, own, other)
        if gap:
            yield words, published, plus_minus(gap), sign(gap)
        else:
            names = f"no_fallback_{rate}", f"prenorm_learned_{rate}"
            gap = paired(*(earlier.losses("mod_table", name) for name in names))
            none = "not decidable here: short runs, not tuned; it takes 4 MB with tuned rates"
            yield words, published, f"{plus_minus(gap)} (short runs)", none
        gap = gap_of_mixtures(mixtures, own, learned)
        if gap:
            words = f"On NAG's stream, NAG's router is better than a learned one ({rate:.0%})"
            yield words, "not given", plus_minus(gap), sign(gap)
    names = [name for name in ("NAG's router 0.2", "learned router 0.2") if name in mixtures]
    gaps = {name: at_flops(mixtures[name], dense) for name in names}
    gaps = {name: gap for name, gap in gaps.items() if gap}
    if gaps:
        yield (
            "At equal FLOPs, skipping 20 to 25% of the tokens (here 20%) matches full depth",
            "equal",
            ", ".join(f"{name} {plus_minus(gap)}" for name, gap in gaps.items()),
            "; ".join(
                f"{name.removesuffix(' 0.2')}: {judge.verdict([gaps[name]])}" for name in gaps
            ),
        )


def gap_of_mixtures(mixtures, ours, theirs):
    """gap_of, or None if one of the two has not finished."""
    return gap_of(mixtures[ours], mixtures[theirs]) if {ours, theirs} <= mixtures.keys() else None


def at_flops(lines, dense):
    """The difference from a dense model with as many training FLOPs, paired by seed, or None."""
    differences = differences_at_flops(lines, dense)
    return differences and interval(differences)


def differences_at_flops(lines, dense):
    """Those differences, seed by seed. The dense model is interpolated between lengths.

    dense: {steps: lines}. None if a run diverged, or if no dense model was trained as long.
    """
    losses = {steps: [line["loss"] for line in of] for steps, of in dense.items()}
    ours = [line["loss"] for line in lines]
    if len(losses) < 3 or 4000 not in losses or None in sum(losses.values(), ours):
        return None
    per_step = mean(line["flops"] / line["steps"] for line in dense[4000])
    steps = mean(line["flops"] for line in lines) / per_step
    if not min(losses) <= steps <= max(losses):
        return None
    return minus(ours, study.losses_at(steps, losses))


def bhyt(judged):
    """Claims about the loss and the activations of BHyT."""
    have = [mode for mode in PUBLISHED_1B if mode in judged]
    others = [mode for mode in have if mode != "bhyt"]
    if "bhyt" in have and others:
        yield lowest_loss(judged, others)
        yield least_growth(others)
    yield (
        "At 3B, BHyT has the lowest loss",
        "bhyt 3.107, lns 3.139, perinorm 3.142, prenorm 3.180, dyt 3.855",
        "",
        "not decidable here: it takes GPUs for some days",
    )


def lowest_loss(judged, others):
    """The claim that BHyT's loss is lower than that of all others."""
    gaps = [gap_of(runs_of(judged, "bhyt"), runs_of(judged, mode)) for mode in others]
    found = ", ".join(f"against {mode} {plus_minus(gap)}" for mode, gap in zip(others, gaps))
    return (
        "At 1B, BHyT has the lowest loss",
        " < ".join(sorted(PUBLISHED_1B, key=PUBLISHED_1B.get)),
        f"bhyt {found}",
        f"not decidable here; at 0.5M parameters: {all_of([sign(gap) for gap in gaps])}",
    )


def least_growth(others):
    """The claim that the stream grows less with BHyT than with all others."""
    sizes = {m: [growth(depth) for depth in insides(m).values()] for m in (*others, "bhyt")}
    smaller = [mode for mode in others if max(sizes[mode]) < min(sizes["bhyt"])]
    least = below(sizes["bhyt"], sum((sizes[mode] for mode in others), []))
    return (
        "BHyT's activations grow least with depth",
        "bhyt least, dyt and prenorm most",
        "the norm grows " + ", ".join(f"{mode} {spread(x)} times" for mode, x in sizes.items()),
        f"does not hold (one seed): less with {', '.join(smaller)}" if smaller else least,
    )


def bhyt_variance():
    """The claim about BHyT's prediction, from runs/bhyt_theory.py."""
    words = "BHyT's variance before the MLP can be predicted from the weights (R² above 0.5)"
    path = ROOT / "results" / "variance.json"
    if not path.exists():
        return words, "close", "", "not measured yet: runs/bhyt_theory.py"
    found = json.loads(path.read_text())
    means = {key: mean(found[key]) for key in ("RMSE", "R2", "Pearson", "Spearman")}
    ours = ", ".join(f"{key} {value:.2g}" for key, value in means.items())
    return words, "close", f"{ours}, mean over blocks", held(means["R2"] > 0.5)


def bhyt_speed():
    """Claims about the speed of BHyT, from bench.py."""
    decoding = ("generate", "128 new, 1 at once")
    for words, published, name, parts, other in (
        ("BHyT's forward pass of a 1B layer is faster than pre-norm's", "by 7.7% (first version)",
         "forward_1b_cpu", ("forward",), "prenorm"),
        ("The same against Peri-norm", "by 17.7% (first version)",
         "forward_1b_cpu", ("forward",), "perinorm"),
        ("Training with BHyT is faster than with pre-norm", "by 15.8% (1.6% in a later version)",
         "train_12x512_cpu", ("train",), "prenorm"),
        ("Generation with BHyT is faster (here: 12 x 768, 128 tokens after 512)",
         "by 4.2% (1.77% in a later version)", "generate_12x768_cpu", decoding, "prenorm"),
    ):  # fmt: skip
        ratio = speed(name, parts, "bhyt", other)
        yield words, published, ratio_in_words(ratio, other), faster(ratio)


def bhyt_stability(earlier):
    """The claim about high learning rates, from short runs."""
    last = {}
    for mode in ("dyt", "bhyt", "prenorm"):
        for line in earlier.of("bhyt", mode):
            if line["seed"] == 1 and line["learning_rate"] in (0.001, 0.03):
                last.setdefault(mode, {})[line["learning_rate"]] = line["variance"][-1]
    explodes = {mode: at[0.03] / at[0.001] > 10 for mode, at in last.items()}
    found = ", ".join(f"{m} {at[0.001]:.2g} and {at[0.03]:,.0f}" for m, at in last.items())
    return (
        "As the learning rate grows, DyT's variance explodes and BHyT's does not",
        "yes",
        f"variance of the last block at rates 0.001 and 0.03: {found} (short runs)",
        held(explodes["dyt"] and not explodes["bhyt"]),
    )


def classrooms():
    """Claims about small networks, from runs/classroom.py. Their sources are not papers."""
    found = classroom.finished()
    last = {}
    for (skip, _), line in found["transformer"].items():
        last[skip] = min(line["last"], last.get(skip, math.inf))
    words = "Without the line x = x + output, a one-layer transformer cannot use its attention"
    published = "loss 1.70 with the line, 2.47 without"
    missing = "not measured yet: runs/classroom.py"
    if len(last) == len(classroom.SKIPS):
        ours = ", ".join(f"{skip}: {loss:.2f}" for skip, loss in last.items())
        for line in found["bigram"].values():
            ours += f"; entropy given the character before: {line['entropy']:.2f}"
        works = last["output"] < (last["x + output"] + last["deleted"]) / 2
        verdict = held(last["x + output"] + 0.3 < last["deleted"])
        also = "; with x = output in its place, attention works" if works else ""
        yield words, published, ours, verdict + also
    else:
        yield words, published, "", missing
    stacks = {case: line for (case,), line in found["stack"].items()}
    for case, words in STACKS.items():
        if case not in stacks:
            yield words, "yes", "", missing
            continue
        line = stacks[case]
        ours = f"{line['verdict']}: {line['first']:.3g} to {line['last']:.3g}"
        other = {"A": "C", "C": "2 layers"}.get(case)
        if other in stacks:
            ours += f"; {other}: {stacks[other]['last']:.3g}"
        yield words, "yes", f"{ours} ({line['steps']} steps)", of_stack(case, stacks)


def of_stack(case, stacks):
    """The verdict on one of the stacks of MLPs."""
    line = stacks[case]
    as_claimed = line["verdict"] == classroom.STACKS[case][-1]
    behind = {other: line["last"] - each["last"] for other, each in stacks.items()}
    if case == "A":
        return held(as_claimed and behind.get("C", math.inf) > NEAR)
    if case == "B":
        return held(as_claimed)
    if line["verdict"] not in ("smooth", "plateau"):
        return held(False)
    near = behind.get("2 layers", 0.0) < NEAR
    return held(True) if near else "holds in part (one seed): no spike, but a higher loss"


def rows(judged, with_adamw, blocks, mixtures, dense, earlier):
    """judged, with_adamw: {mode: what judge.train returns}. blocks: see gain_by_depth. mixtures and
    dense: see depths."""
    judged = complete(judged)
    yield from gain_by_shape(earlier)
    yield from gain_by_depth(blocks)
    yield from nag(judged, complete(with_adamw))
    yield from depths(mixtures, dense, earlier)
    yield from bhyt(judged)
    yield bhyt_variance()
    yield from bhyt_speed()
    yield bhyt_stability(earlier)
    yield from classrooms()
