"""
Mixture of experts with 0.85e9 parameters, 0.22e9 of them active per token. Width over depth is 40.
On C4 with 8 GPUs:
torchrun --standalone --nproc_per_node=8 train.py config/moe_840m.py

Shapes of equal size (within 2%) at the other ratios of width over depth in NAG's paper:
80  --n_layer=14 --n_embd=1152 --n_hidden=912
60  --n_layer=18 --n_embd=1056 --n_hidden=768
30  --n_layer=29 --n_embd=864 --n_hidden=592
20  --n_layer=38 --n_embd=768 --n_hidden=512
"""

include = "plain.py"

data_dir = "data/c4"
out_dir = "out/moe_840m"
init_from = "auto"

residual = "nag"
n_layer = 23
n_head = 8
n_embd = 944
n_hidden = 688
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
