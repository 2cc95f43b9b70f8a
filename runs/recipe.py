"""
An earlier default recipe of train.py, one change at a time: does each part help?

    python runs/recipe.py    says how long it takes, trains, and prints a table

Differences are at an equal number of tokens, paired by seed, with 95% intervals. Finished runs are
kept in out/recipe.jsonl. These and the recorded ones in results/recipe.jsonl are not repeated.
--record=True keeps new runs in results/, and leaves out those in out/.
"""

import statistics
import sys

import study
from stats import decided, gap_of, losses_of

from configurator import configure

record = False  # keep results in results/, and read no others

COMMON = {"max_iters": 800, "eval_interval": 800, "eval_tokens": 262144, "log_interval": 20}
# The recipe until this study. Now ReLU, which is better, and no logit cap are the defaults.
COMMON |= {"activation": "relu2", "logit_cap": 15.0}
SEEDS = (1, 2, 3)
LONGER = {"max_iters": 1200, "eval_interval": 1200}
ADAMW = {"optimizer": "adamw", "embed_lr": None, "head_lr": None}
TIED = {"tied": True, "head_lr": None, "head_scale": None, "embed_scale": 0.05, "embed_lr": 0.01}

RECIPE = "the recipe"
PLAN = {  # name: change
    RECIPE: {},
    "nag": {"residual": "nag"},
    "nag, 1,200 steps": {"residual": "nag"} | LONGER,
    "perinorm": {"residual": "perinorm"},
    "orthogonal": {"residual": "orthogonal"},
    "AdamW, one rate": ADAMW,
    "rate 4e-3": {"learning_rate": 4e-3},
    "rate 1.6e-2": {"learning_rate": 1.6e-2},
    "no smear": {"smear": 0},
    "no value embeddings": {"value_embeds": False},
    "no logit cap": {"logit_cap": None},
    "no qk norm": {"qk_norm": False},
    "tied": TIED,
    "output projections from 0": {"init_out": "zero"},
    "GELU": {"activation": "gelu"},
    "ReLU": {"activation": "relu"},
    "ReLU, rate 4e-3": {"activation": "relu", "learning_rate": 4e-3},
    "weight decay of 0.1": {"weight_decay": 0.1},
    "cosine": {"schedule": "cosine"},
    "2,048 tokens a step": {"batch_size": 8, "max_iters": 400, "eval_interval": 400},
    "512 tokens a step": {"batch_size": 2, "max_iters": 1600, "eval_interval": 1600},
}
HEAD = ("change", "loss", "difference", "verdict")


def rows():
    """The rows of the table."""
    plan = PLAN | {"longer": LONGER}
    runs = [COMMON | change | {"seed": seed} for change in plan.values() for seed in SEEDS]
    lines = iter(study.run("recipe", runs))
    found = {name: [next(lines) for _ in SEEDS] for name in plan}
    for name, change in PLAN.items():
        ours, theirs = found[name], found["longer" if LONGER.items() <= change.items() else RECIPE]
        gaps = [gap_of(ours, theirs)] if change else []
        yield name, f"{statistics.mean(losses_of(ours)):.4f}", *decided(gaps)


if __name__ == "__main__":
    configure(globals(), argv=sys.argv[1:])
    study.begin(record)
    print(study.aligned([HEAD, *rows()]))
