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
from study import ROOT, gap_of, paired, plus_minus

HEAD = ("claim", "published", "ours", "verdict")
STACKS = {
    "A": "12 ReLU layers, no norm, no skip: the loss drops fast, then stalls",
    "B": "The same, weights from U[-0.5, 0.5]: it explodes",
    "C": "30 GELU layers with norm and skip: no spike, and a loss near that of 2 layers or lower",
}
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


def speed(name, part, mode):
    """The quartiles of the time of a mode over pre-norm's, from a file of bench.py."""
    report = json.loads((ROOT / "results" / "speed" / f"{name}.json").read_text())
    return report[part][mode]["ratio"]


def faster(quartiles):
    """The verdict on a claim of speed: three quarters of the rounds have to agree."""
    low, _, high = quartiles
    word = "holds" if high < 1 else "does not hold" if low > 1 else "undecided"
    return f"{word} on a CPU"


def times(quartiles):
    low, middle, high = quartiles
    return f"{middle:.3f}x pre-norm's time (quartiles {low:.3f} and {high:.3f})"


def runs_of(judged, mode):
    """The runs of a mode for all steps, one line per seed."""
    return judged[mode][1][1.0]


def complete(judged):
    """The judged modes without a diverged seed."""
    whole = lambda lines: None not in [line["loss"] for line in lines]
    return {mode: judged[mode] for mode in judged if whole(runs_of(judged, mode))}


def insides(mode):
    """What eval.py measured by depth on the first seed, for each learning rate that was tried."""
    scale = lead.scale_of_judge()
    lines = [line for line in study.finished("judge").values() if "depth" in line]
    settings = [study.DEFAULTS | line["settings"] for line in lines]
    return [line["depth"] for full, line in zip(settings, lines) if judge.is_of(full, scale, mode)]


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
    gains, gaps = [], []
    for ratio in (80, 20):
        theirs, ours = (earlier.losses("moe_ratio", f"{m}_{ratio}") for m in ("prenorm", "nag"))
        gains.append([a - b for a, b in zip(theirs, ours)])
        gaps.append(paired(ours, theirs))
    yield (
        "With experts, NAG's loss is lower than pre-norm's",
        "yes",
        "width / depth of 80: {}; of 20: {} (short runs)".format(*map(plus_minus, gaps)),
        all_of([sign(gap) for gap in gaps]),
    )
    more = paired(gains[1], gains[0])
    yield (
        "With experts, NAG's gain over pre-norm grows as width / depth falls from 80 to 20",
        "0.0118 to 0.0285",
        f"{mean(gains[0]):.4f} to {mean(gains[1]):.4f}, growth {plus_minus(more)} (short runs)",
        sign(more, 1),
    )


def nag(judged):
    """Claims about a dense NAG. judged: {mode: what judge.train returns}."""
    if not {"prenorm", "nag"} <= judged.keys():
        return
    gap = gap_of(runs_of(judged, "nag"), runs_of(judged, "prenorm"))
    yield (
        "NAG's loss is lower than pre-norm's without experts",
        "yes",
        plus_minus(gap),
        sign(gap),
    )
    yield from inside_nag(insides("prenorm"), insides("nag"))


def inside_nag(theirs, ours):
    """Claims about the stream of NAG. theirs, ours: what insides returns for pre-norm and NAG."""
    a, b = ([growth(depth) for depth in of] for of in (theirs, ours))
    yield (
        "Through depth, the norm of the stream grows far more with pre-norm than with NAG",
        "about 120 times, at ratio 80",
        f"pre-norm {spread(a)} times, NAG {spread(b)} times, in 8 blocks",
        below(b, a),
    )

    a, b = ([late_turn(depth) for depth in of] for of in (theirs, ours))
    stops = "; with pre-norm it grows less, but does not stop" if max(a) > 5 else ""
    yield (
        "The angle between the stream and the embedding keeps growing with NAG, and stops without",
        "yes",
        f"in the second half of the depth: pre-norm {spread(a)} degrees, NAG {spread(b)}",
        below(a, b).replace("holds", "holds in part" if stops else "holds") + stops,
    )

    a, b = ([max(depth["sink"]) for depth in of] for of in (theirs, ours))
    length = lead.scale_of_judge()["block_size"]
    uniform = mean(1 / n for n in range(2, length + 1))  # as depth.sink averages
    found = f"pre-norm {spread(a)}, NAG {spread(b)}; uniform attention: {uniform:.3g}"
    without = max(a) < 2 * uniform
    verdict = "not decidable here: pre-norm has no sink" if without else below(b, a)
    yield "Attention to the first token is smaller with NAG", "yes", found, verdict

    for words, key in (
        ("The largest feature / rms is smaller with NAG", "max/rms"),
        ("The kurtosis of the stream is smaller with NAG", "kurtosis"),
    ):
        a, b = ([max(depth[key]) for depth in of] for of in (theirs, ours))
        yield words, "yes", f"pre-norm {spread(a)}, NAG {spread(b)}", below(b, a)

    entropy, loss = ([depth[f"norm and {key}"] for depth in ours] for key in ("entropy", "loss"))
    found = f"correlation with entropy {spread(entropy, '+.2f')}, with loss {spread(loss, '+.2f')}"
    strong = max(entropy + loss) <= -0.5
    yield (
        "With NAG, a large final norm means a confident prediction",
        "low entropy and loss",
        f"log norm: {found}",
        "holds weakly (one seed)" if -0.5 < max(entropy + loss) < -0.1 else held(strong),
    )


def depths(mixtures, earlier):
    """Claims about mixtures of depths. mixtures: {name: the lines of runs/lead.py}."""
    for rate, published in ((0.2, 0.0), (0.4, 0.0671)):
        ours, theirs = (mixtures.get(f"{who} router {rate}", ()) for who in ("NAG's", "learned"))
        gap, length = ours and theirs and gap_of(ours, theirs), ""
        if not gap:
            names = f"no_fallback_{rate}", f"learned_{rate}"
            short = (earlier.losses("mod_table", name) for name in names)
            gap, length = paired(*short), " (short runs)"
        less = published and -published < gap[0] - gap[1]
        yield (
            f"NAG's router is better than a learned one if {rate:.0%} of tokens skip",
            f"-{published}" if published else "yes",
            plus_minus(gap) + length,
            sign(gap) + (", but less than published" if less else ""),
        )
    gaps = {}
    for name in ("rate_0.2", "rate_0.25", "dense_6_blocks"):
        gaps[name] = paired(earlier.losses("isoflop", name), earlier.losses("isoflop", "dense"))
    words = ("skipping 20%", "skipping 25%", "6 blocks in place of 8")
    found = "; ".join(f"{word} {plus_minus(gap)}" for word, gap in zip(words, gaps.values()))
    yield (
        "At equal FLOPs, skipping 20 to 25% of the tokens is at least as good as full depth",
        "equal",
        f"{found} (short runs)",
        all_of([sign(gaps["rate_0.2"]), sign(gaps["rate_0.25"])])
        + "; fewer blocks have a similar difference",
    )


def bhyt(judged, earlier):
    """Claims about BHyT."""
    have = [mode for mode in PUBLISHED_1B if mode in judged]
    order = " < ".join(sorted(PUBLISHED_1B, key=PUBLISHED_1B.get))
    others = [mode for mode in have if mode != "bhyt"]
    if "bhyt" in have and others:
        gaps = [gap_of(runs_of(judged, "bhyt"), runs_of(judged, mode)) for mode in others]
        found = ", ".join(f"against {m} {plus_minus(gap)}" for m, gap in zip(others, gaps))
        word = f"{all_of([sign(gap) for gap in gaps])} at 0.5M parameters"
        yield "At 1B, BHyT has the lowest loss", order, f"bhyt {found}", word
        sizes = {mode: [growth(depth) for depth in insides(mode)] for mode in have}
        yield (
            "BHyT's activations grow least with depth",
            "bhyt least, dyt and prenorm most",
            "the norm grows " + ", ".join(f"{m} {spread(x)} times" for m, x in sizes.items()),
            below(sizes["bhyt"], sum((sizes[mode] for mode in others), [])),
        )
    yield (
        "At 3B, BHyT has the lowest loss",
        "bhyt 3.107, lns 3.139, perinorm 3.142, prenorm 3.180, dyt 3.855",
        "",
        "not decidable here: needs GPUs",
    )
    words = "BHyT's variance before the MLP can be predicted from the weights (R² above 0.5)"
    path = ROOT / "results" / "variance.json"
    if path.exists():
        found = json.loads(path.read_text())
        means = {key: mean(found[key]) for key in ("RMSE", "R2", "Pearson", "Spearman")}
        ours = ", ".join(f"{key} {value:.2g}" for key, value in means.items())
        yield words, "close", f"{ours}, mean over blocks", held(means["R2"] > 0.5)
    else:
        yield words, "close", "", "not measured yet: runs/bhyt_theory.py"
    for words, published, where in (
        ("BHyT's forward pass of a 1B layer is faster than pre-norm's", "by 7.7% (first version)",
         ("forward_1b_cpu", "forward", "bhyt")),
        ("Training with BHyT is faster than with pre-norm", "by 15.8% (1.6% in a later version)",
         ("train_12x512_cpu", "train", "bhyt")),
    ):  # fmt: skip
        ratio = speed(*where)
        yield words, published, times(ratio), faster(ratio)
    last = {}
    for mode in ("dyt", "bhyt", "prenorm"):
        for line in earlier.of("bhyt", mode):
            if line["seed"] == 1 and line["learning_rate"] in (0.001, 0.03):
                last.setdefault(mode, {})[line["learning_rate"]] = line["variance"][-1]
    calm = last["bhyt"][0.03] / last["bhyt"][0.001] < 10
    yield (
        "As the learning rate grows, DyT's variance explodes and BHyT's does not",
        "yes",
        "variance of the last block at rates 0.001 and 0.03: "
        + ", ".join(f"{m} {at[0.001]:.2g} and {at[0.03]:,.0f}" for m, at in last.items())
        + " (short runs)",
        held(calm and last["dyt"][0.03] / last["dyt"][0.001] > 10),
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
        right = held(last["x + output"] + 0.3 < last["deleted"])
        note = "; without the skip alone, attention works" if last["output"] < 2 else ""
        yield words, published, ours, right + note
    else:
        yield words, published, "", missing
    stacks = {case: line for (case,), line in found["stack"].items()}
    for case, words in STACKS.items():
        if case in stacks:
            line = stacks[case]
            ours = f"{line['verdict']}: {line['first']:.3g} to {line['last']:.3g}"
            ours += f" in {line['steps']} steps"
            right = line["verdict"] == classroom.STACKS[case][-1]
            if case == "A" and "C" in stacks:
                ours += f"; C: {stacks['C']['last']:.3g}"
                right = right and line["last"] > stacks["C"]["last"] + 0.1
            if case == "C" and "2 layers" in stacks:
                other = stacks["2 layers"]["last"]
                ours += f"; 2 layers: {other:.3g}"
                calm = line["verdict"] in ("smooth", "plateau")
                right = calm and line["last"] < other + 0.05
                if calm and not right:
                    yield (
                        words,
                        "yes",
                        ours,
                        "holds in part (one seed): no spike, but a higher loss",
                    )
                    continue
            yield words, "yes", ours, held(right)
        else:
            yield words, "yes", "", missing


def rows(judged, mixtures, earlier):
    """judged: {mode: what judge.train returns}, mixtures: {name: the lines of runs/lead.py}."""
    judged = complete(judged)
    yield from gain_by_shape(earlier)
    yield from nag(judged)
    yield from depths(mixtures, earlier)
    yield from bhyt(judged, earlier)
    yield from classrooms()
