"""Width over depth 20: a shape to put behind config/moe_tiny.py"""

out_dir = "out/moe_tiny_20"
n_layer = 8
n_embd = 160
n_hidden = 240
