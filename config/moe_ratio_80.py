"""Width over depth 80: a shape to put behind config/moe_ratio.py"""

out_dir = "out/moe_ratio_80"
n_layer = 14
n_embd = 1152
n_hidden = 912
