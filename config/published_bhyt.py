"""What the BHyT paper chose for its own mode (arXiv 2601.09719), to put behind config/llama_*.py"""

residual = "bhyt"
learning_rate = 5e-4
min_lr = 5e-6
warmup_iters = 0.1
weight_decay = 0.1
