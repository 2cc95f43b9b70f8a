"""
The settings of the BHyT paper (arXiv 2601.09719) for dyt. Add this file after llama_1b.py,
llama_374m.py or llama_3b.py. Give each shape its own --out_dir.
At 3B the paper starts alpha lower: add --dyt_alpha='(0.2, 0.05, 0.05)'.
"""

out_dir = "out/llama_dyt"
residual = "dyt"
learning_rate = 1e-4
min_lr = 1e-5
warmup_iters = 0.1
weight_decay = 0.1
