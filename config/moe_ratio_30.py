"""Width over depth 30: a shape to put behind config/moe_ratio.py"""

out_dir = "out/moe_ratio_30"
n_layer = 29
n_embd = 864
n_hidden = 592
