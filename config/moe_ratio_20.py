"""Width over depth 20: a shape to put behind config/moe_ratio.py"""

out_dir = "out/moe_ratio_20"
n_layer = 38
n_embd = 768
n_hidden = 512
