"""Width over depth 60: a shape to put behind config/moe_tiny.py"""

out_dir = "out/moe_tiny_60"
n_layer = 4
n_embd = 232
n_hidden = 328
