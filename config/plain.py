"""
The usual settings of papers, in place of the recipe that is train.py's default. Other config files
include this one.
"""

optimizer = "adamw"
learning_rate = 4e-3
batch_size = 8
embed_lr = None
head_lr = None
weight_decay = 0.1
schedule = "cosine"
warmup_iters = 50

residual = "prenorm"
activation = "gelu"
qk_norm = False
tied = True
smear = 0
value_embeds = False
logit_cap = None
init = "normal"
init_scale = 0.05
embed_scale = None
head_scale = None
init_out = None
