"""What the BHyT paper chose for dyt (arXiv 2601.09719), to put behind config/llama_*.py"""

residual = "dyt"
learning_rate = 0.0001
min_lr = 1e-05
warmup_iters = 0.1
weight_decay = 0.1
