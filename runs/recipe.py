"""
train.py's default recipe, one change at a time: is each part worth its place?

    python runs/recipe.py    prints a table

1,000 steps of 1,024 bytes, 3 seeds, at equal tokens. The table has the time of a step beside the
loss, because some parts cost time.
"""

from sweep import sweep, table

COMMON = "--max_iters=1000 --device=cpu --eval_interval=500 --log_interval=25"
ADAMW = ["--optimizer=adamw", "--embed_lr=None", "--head_lr=None"]
TIED = ["--tied=True", "--head_lr=None", "--head_scale=None", "--embed_scale=0.05"]

VARIANTS = {
    "the recipe": [],
    "NAG": ["--residual=nag"],
    "AdamW, one rate": ADAMW,
    "no smear": ["--smear=0"],
    "smear of 1": ["--smear=1"],
    "no value embeddings": ["--value_embeds=False"],
    "no logit cap": ["--logit_cap=None"],
    "no qk norm": ["--qk_norm=False"],
    "tied": [*TIED, "--embed_lr=0.01"],
    "GELU": ["--activation=gelu"],
    "ReLU": ["--activation=relu"],
    "cosine": ["--schedule=cosine"],
    "2048 tokens a step": ["--batch_size=8", "--max_iters=500"],
    "512 tokens a step": ["--batch_size=2", "--max_iters=2000"],
    "4 blocks of width 192": ["--n_layer=4", "--n_embd=192"],
}

table(sweep("recipe", VARIANTS, [8e-3, 4e-3], [1, 2, 3], COMMON.split()))
