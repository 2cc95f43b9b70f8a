"""Width over depth 60: a shape to put behind config/moe_ratio.py"""

out_dir = "out/moe_ratio_60"
n_layer = 18
n_embd = 1056
n_hidden = 768
