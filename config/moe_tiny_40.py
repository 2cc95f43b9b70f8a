"""Width over depth 40: a shape to put behind config/moe_tiny.py"""

out_dir = "out/moe_tiny_40"
n_layer = 5
n_embd = 200
n_hidden = 312
