"""
The 3B shape of the norm papers, trained for 60000 steps. The rest is as in llama_1b.py:
torchrun --standalone --nproc_per_node=8 train.py config/llama_3b.py
For another mode, add its published_*.py and an --out_dir of its own.
The camera-ready version of the BHyT paper trains on 20e9 tokens: --max_iters=610000.
"""

include = "llama_1b.py"

out_dir = "out/llama_3b"

n_layer = 28
n_head = 24
n_embd = 3072
shard = "fsdp"

batch_size = 4
max_iters = 60000
