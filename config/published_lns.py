"""
The settings of the BHyT paper (arXiv 2601.09719) for lns. Add this file after llama_1b.py,
llama_374m.py or llama_3b.py. Give each shape its own --out_dir.
"""

out_dir = "out/llama_lns"
residual = "lns"
learning_rate = 5e-4
min_lr = 5e-5
warmup_iters = 0.05
weight_decay = 0.1
