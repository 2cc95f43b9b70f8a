"""
Which models learn to copy from their context, and what is a seed worth that does not?

    python runs/copying.py

Trains pre-norm and NAG again as in the study of lengths (8 blocks, Muon, 4,000 steps), and measures
the loss of random tokens the first time and when they repeat. runs/lead.py measures its own runs.
A model copies if the repetition costs less than COPIES times the first time.
"""

import lead
import study
from judge import LOOK

COPIES = 0.75


def copies(line):
    """Whether the model of a line copies; None if that was not measured."""
    if "copying" not in line.get("depth", {}):
        return None
    first, again = line["depth"]["copying"]
    return again < COPIES * first


def lines(lines_of):
    """{mode: the line of each seed}"""
    changes = dict.fromkeys(("prenorm", "nag"))
    plan = lead.runs_of(changes, "max_iters", [4000], (1.0,), lines_of)
    found = lines_of("copying", [run for of_seeds in plan.values() for run in of_seeds[:3]], LOOK)
    return {name: found[3 * i : 3 * i + 3] for i, (name, _) in enumerate(plan)}


if __name__ == "__main__":
    for name, of_seeds in lines(study.run).items():
        for line in of_seeds:
            first, again = line["depth"]["copying"]
            print(f"{name} seed {line['settings']['seed']}: loss {line['loss']:.3f}, "
                  f"random tokens {first:.2f}, repeated {again:.2f}")  # fmt: skip
