"""
The public replication of NAG after its repair. The learning rate of the gates is 12 times smaller
than that of the matrices, and alpha grows over the first 600 steps (300 of twice as many tokens
there). In the replication NAG was 0.0086 bits per byte worse than its baseline.
nag_replication_broken.py lists the differences. One more: there, alpha trains at the rate of the
gates and g_enc at a hundredth of the rate of scalars; here both have gate_lr.
torchrun --standalone --nproc_per_node=8 train.py config/nag_replication_repaired.py
"""

include = "nag_replication_broken.py"

out_dir = "out/nag_replication_repaired"

gate_lr = 0.0003333333333333333  # 4e-3 / 12
alpha_warmup_iters = 600
