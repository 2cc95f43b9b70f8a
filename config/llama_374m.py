"""
The 374M shape of the norm papers (295M with this vocabulary). The rest is as in llama_1b.py:
torchrun --standalone --nproc_per_node=1 train.py config/llama_374m.py
For another mode, add its published_*.py and an --out_dir of its own.
The camera-ready version of the BHyT paper trains on 7.5e9 tokens: --max_iters=229000.
"""

include = "llama_1b.py"

out_dir = "out/llama_374m"

n_head = 16
n_kv_head = 4
n_embd = 1024
n_hidden = 4096

batch_size = 32
