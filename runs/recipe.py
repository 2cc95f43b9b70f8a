"""
train.py's default recipe, one change at a time: does each part help?

    python runs/recipe.py    trains what results/recipe.jsonl lacks, then prints a table

Comparisons are at equal time: if a changed run takes 1.1 times as long, its loss is compared with
the recipe's after 1.1 times as many steps. The recipe is trained at several lengths for this. At
the end, steps of all are timed in turn: keep the machine quiet. Differences are paired by seed,
with 95% intervals.
"""

import statistics

from study import gap_at, plus_minus, race, run, table

COMMON = {"max_iters": 800, "eval_interval": 800, "eval_tokens": 262144, "log_interval": 20}
# The recipe until this study. Its winners, ReLU and no logit cap, became the defaults.
COMMON |= {"activation": "relu2", "logit_cap": 15.0}
SEEDS = (1, 2, 3)
LENGTHS = {steps: {"max_iters": steps, "eval_interval": steps} for steps in (600, 1200)}
ADAMW = {"optimizer": "adamw", "embed_lr": None, "head_lr": None}
TIED = {"tied": True, "head_lr": None, "head_scale": None, "embed_scale": 0.05, "embed_lr": 0.01}
TOKENS_2048 = {"batch_size": 8, "max_iters": 400, "eval_interval": 400}
TOKENS_512 = {"batch_size": 2, "max_iters": 1600, "eval_interval": 1600}

TIMED = {"logit_cap": 15.0}  # the steps were timed with this cap, and with ReLU
TIMELESS = {"learning_rate", "schedule", "weight_decay", "init_out"}  # no effect on the time
RECIPE = "the recipe"
CHANGES = {
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
    "2,048 tokens a step": TOKENS_2048,
    "512 tokens a step": TOKENS_512,
    "4 blocks of width 192": {"n_layer": 4, "n_embd": 192},
}


def settings(change, seed):
    return COMMON | change | {"seed": seed}


def rows(lines_of, measure=True):
    """Dicts with name, loss, "steps": (difference, half its interval) at equal tokens, "time": run
    time / the recipe's, and "equal": as steps, at equal time. None: not known.

    lines_of: study.run trains missing runs; study.find uses only finished ones. measure=False: do
    not time steps.
    """
    variants = {RECIPE: {}, **LENGTHS, **CHANGES}
    runs = [(name, settings(change, s)) for name, change in variants.items() for s in SEEDS]
    found = {}
    for (name, _), line in zip(runs, lines_of("recipe", [each for _, each in runs])):
        found.setdefault(name, []).append(line)
    found = {name: lines for name, lines in found.items() if None not in lines}
    if not found.keys() >= {RECIPE, *LENGTHS}:
        return
    compared = {RECIPE: {}} | {name: CHANGES[name] for name in CHANGES if name in found}
    slower = {name: c for name, c in compared.items() if c.keys() - TIMELESS or name == RECIPE}
    times = dict.fromkeys(compared.keys() - slower.keys(), (1.0, 1.0, 1.0))
    times |= race("recipe", {name: TIMED | change for name, change in slower.items()}, measure)

    for name in compared:
        losses, row = [line["loss"] for line in found[name]], dict.fromkeys(("loss", "time"))
        length = found[name][0]["tokens"] / found[RECIPE][0]["tokens"]
        if name in times:
            row["time"] = times[name][1] * length
        if None not in losses:
            row |= {"loss": statistics.mean(losses), "steps": difference(found, losses, length)}
            row["equal"] = difference(found, losses, row["time"])
        yield {"name": name, "steps": None, "equal": None} | row


def difference(found, losses, length):
    """Losses minus the recipe's at this length, a share of its steps. None: not trained so long."""
    steps = COMMON["max_iters"]
    if length is None or not min(LENGTHS) <= length * steps <= max(LENGTHS):
        return None
    by_length = {each: [line["loss"] for line in found[each]] for each in LENGTHS}
    by_length[steps] = [line["loss"] for line in found[RECIPE]]
    return gap_at(length * steps, losses, by_length)


def cells(row):
    """A row of the table, as text."""
    loss = "diverged" if row["loss"] is None else f"{row['loss']:.4f}"
    time = "" if row["time"] is None else f"{row['time']:.2f}"
    steps, equal = (plus_minus(row[kind]) if row[kind] else "" for kind in ("steps", "equal"))
    return row["name"], loss, steps, time, equal


HEAD = ("change", "loss", "difference", "time", "difference at equal time")

if __name__ == "__main__":
    print(table(HEAD, map(cells, rows(run))))
