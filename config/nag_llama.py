"""
NAG at the Llama shapes, to put behind config/llama_*.py. Not tuned there by us:
torchrun --standalone --nproc_per_node=2 train.py config/llama_1b.py config/nag_llama.py
"""

out_dir = "out/llama_nag"
residual = "nag"
learning_rate = 1e-3
min_lr = 1e-4
warmup_iters = 0.05
weight_decay = 0.1
alpha_warmup_iters = 1000
