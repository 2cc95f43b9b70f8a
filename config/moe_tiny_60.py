"""
Width over depth 60, of five shapes with 8.6e6 parameters, 2.8e6 of them active, within 2%. A CPU, the embedded corpus.
"""

out_dir = "out/moe_tiny_60"

n_layer = 4
n_head = 4
n_embd = 232
n_hidden = 336
init_scale = 0.04
activation = "swiglu"
moe_experts = 8
moe_top_k = 2
moe_rate = 1e-2
