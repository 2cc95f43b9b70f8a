"""
train.py's default recipe, one change at a time: is each part worth its place?

    python runs/recipe.py    trains what results/recipe.jsonl lacks, then prints a table

Compared at equal time: a change whose steps take 1.1 times as long meets the recipe after 1.1 times
as many steps. The recipe itself is trained at several lengths, for that. Seconds a step are medians
over runs that trained side by side. Differences are paired by seed, with 95% intervals.
"""

import statistics

from study import at_length, paired, run

COMMON = {"max_iters": 800, "eval_interval": 800, "eval_tokens": 262144, "log_interval": 20}
SEEDS = (1, 2, 3)
LENGTHS = {steps: {"max_iters": steps, "eval_interval": steps} for steps in (600, 1200)}
ADAMW = {"optimizer": "adamw", "embed_lr": None, "head_lr": None}
TIED = {"tied": True, "head_lr": None, "head_scale": None, "embed_scale": 0.05, "embed_lr": 0.01}
TOKENS_2048 = {"batch_size": 8, "max_iters": 400, "eval_interval": 400}
TOKENS_512 = {"batch_size": 2, "max_iters": 1600, "eval_interval": 1600}

CHANGES = {
    "nag": {"residual": "nag"},
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
    "weight decay of 0.1": {"weight_decay": 0.1},
    "cosine": {"schedule": "cosine"},
    "2,048 tokens a step": TOKENS_2048,
    "512 tokens a step": TOKENS_512,
    "4 blocks of width 192": {"n_layer": 4, "n_embd": 192},
}


def settings(change, seed):
    return COMMON | change | {"seed": seed}


def rows():
    """(change, mean loss, time of a run v. the recipe's, difference, half its interval)"""
    variants = {"the recipe": {}, **LENGTHS, **CHANGES}
    runs = [(name, settings(change, s)) for name, change in variants.items() for s in SEEDS]
    lines = run("recipe", [each for _, each in runs])
    found = {}
    for (name, _), line in zip(runs, lines):
        found.setdefault(name, []).append(line)

    def seconds(name):
        return statistics.median(line["steps"] * line["step_s"] for line in found[name])

    for name in ("the recipe", *CHANGES):
        losses, time = [line["loss"] for line in found[name]], seconds(name) / seconds("the recipe")
        if None in losses:
            yield name, None, time, None, None
            continue
        equals = []
        for i in range(len(SEEDS)):
            by_length = {steps: found[steps][i]["loss"] for steps in LENGTHS}
            by_length[COMMON["max_iters"]] = found["the recipe"][i]["loss"]
            equals.append(at_length(time * COMMON["max_iters"], by_length))
        yield name, statistics.mean(losses), time, *paired(losses, equals)


if __name__ == "__main__":
    print("| change | loss | time | difference at equal time |\n|---|---|---|---|")
    for name, loss, time, difference, half in rows():
        if loss is None:
            print(f"| {name} | diverged | {time:.2f} | |")
        else:
            print(f"| {name} | {loss:.4f} | {time:.2f} | {difference:+.4f} ± {half:.4f} |")
