"""What the BHyT paper chose for lns (arXiv 2601.09719), to put behind config/llama_*.py"""

residual = "lns"
learning_rate = 0.0005
min_lr = 5e-05
warmup_iters = 0.05
weight_decay = 0.1
