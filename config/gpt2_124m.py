"""
GPT-2's 124M shape on 10e9 tokens of C4, for 8 GPUs:
python prepare_c4.py --source=c4 --max_tokens=10e9
torchrun --standalone --nproc_per_node=8 train.py config/gpt2_124m.py
"""

include = "plain.py"

data_dir = "data/c4"
out_dir = "out/gpt2_124m"
init_from = "auto"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304
init_scale = 0.02

batch_size = 32
total_batch_tokens = 524288
max_iters = 19073
learning_rate = 6e-4
warmup_iters = 700
eval_tokens = 5242880
