"""
NAG in a deep and narrow shape, 64 blocks of width 640, on C4 with 8 GPUs:
torchrun --standalone --nproc_per_node=8 train.py config/nag_64x640.py
"""

include = "plain.py"

data_dir = "data/c4"
out_dir = "out/nag_64x640"
init_from = "auto"

residual = "nag"
n_layer = 64
n_head = 10
n_embd = 640
block_size = 1024
vocab_size = 50304
init_scale = 0.03

batch_size = 8
total_batch_tokens = 524288
max_iters = 19073
learning_rate = 1e-3
warmup_iters = 700
eval_tokens = 5242880
