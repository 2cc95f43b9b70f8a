"""Width over depth 30: a shape to put behind config/moe_tiny.py"""

out_dir = "out/moe_tiny_30"
n_layer = 6
n_embd = 184
n_hidden = 280
