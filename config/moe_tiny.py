"""
What five small shapes of experts have in common, of width over depth 80, 60, 40, 30 and 20: 8.3e6 parameters within 2%,
2.8e6 of them active, within 2.5% (widths are multiples of 8, as bfloat16 wants them). A CPU, the embedded corpus; a
shape goes behind it:
python train.py config/moe_tiny.py config/moe_tiny_40.py --residual=nag
"""

n_head = 4
init_scale = 0.04
activation = "swiglu"
moe_experts = 8
moe_top_k = 2
moe_rate = 1e-2
