"""
Llama-like 1B shape of the norm papers.
It trains for 50000 steps of 32 x 1024 tokens of C4, with the settings of the BHyT paper for
pre-norm (arXiv 2601.09719). For another mode, add its published_*.py after this file:
torchrun --standalone --nproc_per_node=2 train.py config/llama_1b.py
torchrun --standalone --nproc_per_node=2 train.py config/llama_1b.py config/published_bhyt.py
The camera-ready version of that paper trains on 20e9 tokens: --max_iters=610000.
"""

include = "plain.py"

data_dir = "data/c4"
out_dir = "out/llama_1b"
init_from = "auto"
init_out = "plain"

n_layer = 16
n_head = 32
n_kv_head = 8
n_embd = 2048
n_hidden = 8192
block_size = 1024
vocab_size = 50304
init_scale = 0.02
activation = "swiglu"
rope_base = 500000.0

batch_size = 16
total_batch_tokens = 32768
learning_rate = 3e-4
min_lr = 3e-5
warmup_iters = 0.1
weight_decay = 0.1
max_iters = 50000
eval_interval = 1000
eval_tokens = 5242880
