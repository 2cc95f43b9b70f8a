"""
The public replication of NAG after its repair. The learning rate of the gates is 17 times smaller
than that of the matrices, and alpha grows over the first 600 steps. In the replication NAG was
0.0086 bits per byte worse than its baseline. nag_replication_broken.py lists the differences.
torchrun --standalone --nproc_per_node=8 train.py config/nag_replication_repaired.py
"""

include = "plain.py"

data_dir = "data/c4"
out_dir = "out/nag_replication_repaired"
init_from = "auto"

residual = "nag"
nag_first_logits = None
n_layer = 64
n_head = 5
n_embd = 640
block_size = 1024
vocab_size = 50304
activation = "relu"
qk_norm = True
tied = False
init = "xavier"
init_scale = 0.8
init_out = "zero"

optimizer = "muon"
learning_rate = 4e-3
min_lr = 2e-4
warmup_iters = 40
schedule = "wsd"
wsd_share = 0.65
gate_lr = 2.4e-4
alpha_warmup_iters = 600

batch_size = 16
total_batch_tokens = 524288
max_iters = 19000
eval_tokens = 5242880
