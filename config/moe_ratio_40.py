"""Width over depth 40: a shape to put behind config/moe_ratio.py"""

out_dir = "out/moe_ratio_40"
n_layer = 23
n_embd = 944
n_hidden = 688
