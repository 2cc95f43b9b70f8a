"""
An earlier default recipe of train.py, one change at a time: does each part help?

    python runs/recipe.py    trains what results/recipe.jsonl lacks, then prints a table

Comparisons are at equal time: if a changed run takes 1.1 times as long, its loss is compared with
the recipe's after 1.1 times as many steps. The recipe is trained at several lengths for this. At
the end, steps of all are timed in turn: keep the machine quiet. Differences are paired by seed,
with 95% intervals. The verdict at equal time must hold at both ends of the interval of the time.
"""

import statistics

from stats import decided, gap_at, losses_of, plus_minus, with_range
from study import race, run, table

COMMON = {"max_iters": 800, "eval_interval": 800, "eval_tokens": 262144, "log_interval": 20}
# The recipe until this study. Now ReLU, which is better, and no logit cap are the defaults.
COMMON |= {"activation": "relu2", "logit_cap": 15.0}
SEEDS = (1, 2, 3)
LENGTHS = {steps: {"max_iters": steps, "eval_interval": steps} for steps in (600, 1200)}
ADAMW = {"optimizer": "adamw", "embed_lr": None, "head_lr": None}
TIED = {"tied": True, "head_lr": None, "head_scale": None, "embed_scale": 0.05, "embed_lr": 0.01}

TIMED = {"logit_cap": 15.0}  # the steps were timed with this cap, and with ReLU
TIMELESS = {"learning_rate", "schedule", "weight_decay", "init_out"}  # no effect on the time
UNTIMED = {"activation"}
RECIPE = "the recipe"
PLAN = {  # name: change
    RECIPE: {},
    "nag": {"residual": "nag"},
    "nag, 1,200 steps": {"residual": "nag", "max_iters": 1200, "eval_interval": 1200},
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
HEAD = ("change", "loss", "difference", "time", "difference at equal time", "verdict at equal time")


def rows(lines_of, measure=True):
    """Yield the rows of the table. An empty cell is not known.

    lines_of: study.run trains missing runs; study.find uses only finished ones. measure=False: do
    not time steps.
    """
    runs = {(name, seed): COMMON | change | {"seed": seed}
            for name, change in (PLAN | LENGTHS).items() for seed in SEEDS}  # fmt: skip
    lines = dict(zip(runs, lines_of("recipe", [*runs.values()])))
    found = {name: [lines[name, seed] for seed in SEEDS] for name in PLAN | LENGTHS}

    times = {name: (1.0, 1.0, 1.0) for name, change in PLAN.items() if change.keys() <= TIMELESS}
    timed = {RECIPE: TIMED}
    timed |= {name: TIMED | change for name, change in PLAN.items()
              if name not in times and not change.keys() & UNTIMED}  # fmt: skip
    times |= race("recipe", timed, measure)

    for name in PLAN:
        losses = losses_of(found[name])
        length = found[name][0]["tokens"] / found[RECIPE][0]["tokens"]
        time = [ratio * length for ratio in times.get(name, ())]
        steps, *equal = (difference(found, losses, at) for at in (length, *time))
        equal = [] if None in equal else equal
        loss = f"{statistics.mean(losses):.4f}"
        yield name, loss, plus_minus(steps) if steps else "", with_range(time), *decided(equal)


def difference(found, losses, length):
    """Losses minus the recipe's at this length, a share of its steps. None: not trained so long."""
    steps = COMMON["max_iters"]
    if not min(LENGTHS) <= length * steps <= max(LENGTHS):
        return None
    by_length = {each: losses_of(found[each]) for each in LENGTHS}
    by_length[steps] = losses_of(found[RECIPE])
    return gap_at(length * steps, losses, by_length)


if __name__ == "__main__":
    print(table(HEAD, rows(run)))
