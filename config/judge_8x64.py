"""
The scale at which runs/judge.py compares residual modes on a CPU: 0.5M parameters, 8 bytes of
training text per parameter, and train.py's default recipe.
"""

n_layer = 8
n_head = 2
n_embd = 64
batch_size = 4
block_size = 256
max_iters = 4000
log_interval = 25
eval_tokens = None
