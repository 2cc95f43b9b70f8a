"""
The shape of nanoGPT's character-level Shakespeare model, on the source of Python's standard
library:
python train.py config/byte_6x384.py
results/speed/nanogpt_6x384.txt has nanoGPT's speed beside ours.
"""

include = "plain.py"

out_dir = "out/byte_6x384"

n_layer = 6
n_head = 6
n_embd = 384
init_scale = 0.03
batch_size = 16
max_iters = 300
learning_rate = 1e-3
