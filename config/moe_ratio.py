"""
What five shapes of experts have in common, of width over depth 80, 60, 40, 30 and 20: 0.84e9 parameters, 0.22e9 of them
active, within 2%. C4, 8 GPUs; a shape goes behind it:
torchrun --standalone --nproc_per_node=8 train.py config/moe_ratio.py config/moe_ratio_40.py --residual=nag
"""

data_dir = "data/c4"
init_from = "auto"

n_head = 8
block_size = 1024
vocab_size = 50304
init_scale = 0.02
activation = "swiglu"
moe_experts = 16
moe_top_k = 2

batch_size = 8
total_batch_tokens = 524288
max_iters = 19073
learning_rate = 1e-3
warmup_iters = 700
eval_tokens = 5242880
