"""
The settings of the BHyT paper (arXiv 2601.09719) for bhyt. Add this file after llama_1b.py,
llama_374m.py or llama_3b.py. Give each shape its own --out_dir.
"""

out_dir = "out/llama_bhyt"
residual = "bhyt"
learning_rate = 5e-4
min_lr = 5e-6
warmup_iters = 0.1
weight_decay = 0.1
