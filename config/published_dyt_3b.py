"""What the BHyT paper chose for dyt at 3B (arXiv 2601.09719), to put behind config/llama_3b.py"""

residual = "dyt"
learning_rate = 0.0001
min_lr = 1e-05
warmup_iters = 0.1
weight_decay = 0.1
dyt_alpha = (0.2, 0.05, 0.05)  # what DyT wants at this size
