"""Width over depth 80: a shape to put behind config/moe_tiny.py"""

out_dir = "out/moe_tiny_80"
n_layer = 3
n_embd = 248
n_hidden = 424
