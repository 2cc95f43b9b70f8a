"""
The published claims, with our measurements beside them: a part of RESULTS.md, which runs/report.py
writes.

A row: (claim, published figure, ours, verdict). A verdict comes from an interval where there is
one: holds, does not hold, or undecided. Otherwise it says what a decision would take.
"""

import json
from statistics import mean

import classroom
import study
from study import ROOT, paired, plus_minus

HEAD = ("claim", "published", "ours", "verdict")
STACKS = {
    "A": "12 layers of ReLU without norm and skip: a fast drop, then a plateau",
    "B": "The same from uniform[-0.5, 0.5]: explosion",
    "C": "30 layers of GELU with norm and skip: smooth",
}
GPUS = "not decidable here: needs GPUs"


def sign(interval, wanted=-1):
    """holds, if the whole interval has the wanted sign."""
    difference, half = interval
    if abs(difference) <= half:
        return "undecided"
    return "holds" if difference * wanted > 0 else "does not hold"


def speed(name, part, mode):
    """The quartiles of the time of a mode over pre-norm's, from a file of bench.py."""
    return json.loads((ROOT / "results" / "speed" / f"{name}.json").read_text())[part][mode][
        "ratio"
    ]


def faster(quartiles, by):
    """Whether a mode is faster than pre-norm. by: the published share of the time that it saves."""
    low, _, high = quartiles
    if low > 1 - by:
        return "does not hold on a CPU"
    return "holds in direction" if high < 1 else "undecided"


def times(quartiles):
    low, middle, high = quartiles
    return f"{middle:.3f}x pre-norm's time (quartiles {low:.3f} and {high:.3f})"


def nag(judged, earlier):
    """Claims about NAG. judged: {mode: what judge.train returns}."""
    gains = []
    for ratio in (80, 20):
        pairs = zip(
            *(earlier.losses("moe_ratio", f"{mode}_{ratio}") for mode in ("prenorm", "nag"))
        )
        gains.append([theirs - ours for theirs, ours in pairs])
    more = paired(gains[1], gains[0])
    yield (
        "With experts, NAG's gain over pre-norm grows as width / depth falls from 80 to 20",
        "0.0118 to 0.0285",
        f"{mean(gains[0]):.4f} to {mean(gains[1]):.4f}, growth {plus_minus(more)} (short runs)",
        sign(more, 1),
    )
    if not {"prenorm", "nag"} <= judged.keys():
        return
    ours, theirs = ([line["loss"] for line in judged[m][1][1.0]] for m in ("nag", "prenorm"))
    gap = paired(ours, theirs)
    yield "NAG's loss is lower than pre-norm's", "see above", plus_minus(gap), sign(gap)

    inside = {mode: judged[mode][1][1.0][0]["depth"] for mode in ("prenorm", "nag")}
    both = lambda of, digits: " and ".join(f"{of(inside[m]):.{digits}f}" for m in inside)
    less = lambda of: "holds" if of(inside["nag"]) < of(inside["prenorm"]) else "does not hold"
    growth = lambda depth: depth["norm"][-1] / depth["norm"][0]
    yield (
        "The norm of pre-norm's stream is much larger than that of NAG's",
        "about 120 times, at ratio 80",
        f"it grows {both(growth, 1)} times through 8 blocks",
        f"{less(growth)} in direction; the size needs depth",
    )
    turned = lambda depth: depth["from embedding"][-1]
    more = "holds" if turned(inside["nag"]) > turned(inside["prenorm"]) else "does not hold"
    yield (
        "The stream of NAG turns further from the embedding",
        "grows steadily; flattens without NAG",
        f"{both(turned, 0)} degrees (pre-norm and NAG), at the end",
        f"{more} (one seed)",
    )
    for words, key in (("Attention to the first token is smaller", "sink"),
                       ("Outliers are smaller: largest feature / rms", "max/rms"),
                       ("Outliers are smaller: kurtosis", "kurtosis")):  # fmt: skip
        top = lambda depth, key=key: max(depth[key])
        yield (
            f"{words} with NAG",
            "yes",
            f"{both(top, 2)} (pre-norm and NAG)",
            f"{less(top)} (one seed)",
        )
    confident = inside["nag"]["norm and entropy"]
    yield (
        "A large final norm means a confident prediction",
        "correlates with low entropy and loss",
        f"NAG: correlation of log norm and entropy {confident:+.2f}, "
        f"and loss {inside['nag']['norm and loss']:+.2f}",
        f"{'holds' if confident < -0.1 else 'does not hold'} (one seed)",
    )


def depths(earlier):
    """Claims about mixtures of depths, from short runs."""
    of = lambda variant: earlier.losses("mod_table", variant)
    for rate in ("0.2", "0.4"):
        if earlier.of("mod_table", f"nag_{rate}") and earlier.of("mod_table", f"learned_{rate}"):
            gap = paired(of(f"nag_{rate}"), of(f"learned_{rate}"))
            yield (
                f"NAG's router is better than a learned one, at rate {rate}",
                "by 0.0671" if rate == "0.4" else "yes",
                f"{plus_minus(gap)} (short runs)",
                sign(gap),
            )
    gap = paired(*(earlier.losses("isoflop", name) for name in ("rate_0.4", "dense_6_blocks")))
    yield (
        "At equal FLOPs, skipping tokens costs nothing",
        "20 to 25% equals full depth",
        f"rate 0.4 against 6 blocks {plus_minus(gap)} (short runs)",
        sign(gap, 1).replace("does not hold", "better than claimed"),
    )


def bhyt(judged, earlier):
    """Claims about BHyT."""
    published = {"prenorm": 3.272, "lns": 3.271, "perinorm": 3.279, "dyt": 3.696, "bhyt": 3.254}
    order = " < ".join(sorted(published, key=published.get))
    have = [mode for mode in published if mode in judged]
    if "bhyt" in have:
        losses = {m: [line["loss"] for line in judged[m][1][1.0]] for m in have}
        gap = paired(losses["bhyt"], losses["prenorm"])
        ours = " < ".join(sorted(have, key=lambda m: mean(losses[m])))
        yield (
            "At 1B, BHyT has the lowest loss",
            order,
            f"{ours}; bhyt against prenorm {plus_minus(gap)}",
            f"{sign(gap)} at 0.5M",
        )
    else:
        yield "At 1B, BHyT has the lowest loss", order, "", GPUS
    yield "The same at 3B", "3.107; RMSNorm 3.180, LNS 3.139", "", GPUS
    path = ROOT / "results" / "variance.json"
    if path.exists():
        found = json.loads(path.read_text())
        middle = {key: mean(found[key]) for key in ("RMSE", "R2", "Pearson", "Spearman")}
        yield (
            "The variance before the MLP can be predicted from the weights",
            "close, by RMSE, R², Pearson, Spearman",
            ", ".join(f"{key} {value:.2g}" for key, value in middle.items()),
            "holds" if middle["R2"] > 0.5 else "does not hold",
        )
    if {"prenorm", "lns", "bhyt"} <= judged.keys():
        growth = {m: (lambda norm: norm[-1] / norm[0])(judged[m][1][1.0][0]["depth"]["norm"])
                  for m in ("prenorm", "lns", "bhyt")}  # fmt: skip
        gentle = growth["bhyt"] == min(growth.values())
        yield (
            "BHyT's activations grow least with depth",
            "bhyt least, dyt and prenorm most",
            "norm grows " + ", ".join(f"{m} {x:.1f} times" for m, x in growth.items()),
            f"{'holds' if gentle else 'does not hold'} (one seed)",
        )
    forward = speed("forward_1b_cpu", "forward", "bhyt")
    yield (
        "The forward of a 1B layer is faster than with RMSNorm",
        "by 7.7%",
        f"{times(forward)}, on a CPU",
        faster(forward, 0.077),
    )
    step = speed("train_12x512_cpu", "train", "bhyt")
    yield (
        "Training is faster than with RMSNorm",
        "by 15.8%, in a later version 1.6%",
        f"{times(step)}, on a CPU",
        faster(step, 0.016),
    )
    ratio = {}
    for mode in ("dyt", "bhyt", "prenorm"):
        last = {
            x["learning_rate"]: x["variance"][-1]
            for x in earlier.of("bhyt", mode)
            if x["seed"] == 1
        }
        ratio[mode] = last[0.03] / last[0.001]
    yield (
        "As the learning rate grows, DyT's variance explodes and BHyT's does not",
        "yes",
        "variance of the last block at rate 0.03 over that at 0.001: "
        + ", ".join(f"{mode} {x:,.0f}" for mode, x in ratio.items())
        + " (short runs, AdamW)",
        "holds" if ratio["bhyt"] < ratio["dyt"] / 10 else "does not hold",
    )


def classrooms():
    """Claims about small networks, from runs/classroom.py."""
    lines = study.read("classroom")
    last = {}
    for line in (line for line in lines if line["settings"]["what"] == "transformer"):
        skip = line["settings"]["skip"]
        last[skip] = min(line["last"], last.get(skip, line["last"]))
    if len(last) == 3:
        yield (
            "One-layer transformer with the line x = x + output deleted",
            "1.70 with it, 2.47 without",
            ", ".join(f"{skip} {loss:.2f}" for skip, loss in last.items()),
            "holds: without that line nothing reads attention. x <- output alone costs "
            f"{last['output'] - last['x + output']:+.2f}",
        )
    stacks = {x["settings"]["case"]: x for x in lines if x["settings"]["what"] == "stack"}
    for case, words in STACKS.items():
        if case in stacks:
            line, expected = stacks[case], classroom.STACKS[case][-1]
            ours = f"{line['verdict']}: {line['first']:.2f} to {line['last']:.2f}"
            ours += f" in {line['steps']} steps"
            yield words, "yes", ours, "holds" if line["verdict"] == expected else "does not hold"


def rows(judged, earlier):
    yield from nag(judged, earlier)
    yield from depths(earlier)
    yield from bhyt(judged, earlier)
    yield from classrooms()
