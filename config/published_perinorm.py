"""What the BHyT paper chose for perinorm (arXiv 2601.09719), to put behind config/llama_*.py"""

residual = "perinorm"
learning_rate = 0.0003
min_lr = 3e-05
warmup_iters = 0.1
weight_decay = 0.1
