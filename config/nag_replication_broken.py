"""
The public replication of NAG (github.com/AlxSp/nag-nanochat, 0c362cc) as it first failed: gates at the learning rate of
the matrices, no warm-up of alpha. Its gates collapsed, and it trailed its baseline by 0.0355 bits a byte.
torchrun --standalone --nproc_per_node=8 train.py config/nag_replication_broken.py

Shared with it: 64 blocks of width 640, heads of 128, queries and keys normalised, ReLU in the MLP, untied embedding of
standard deviation 0.8, output projections from zero, logits divided by d with all gains zero, Muon for the matrices,
40 steps of warm-up, then constant, then linear over the last 65% down to 5%.

What differs, because our settings cannot express it or would need a setting for nothing else:
- ReLU is not squared, and the up projection starts at 0.63 / sqrt(d), theirs at 0.4 / sqrt(d).
- Linears start from Xavier's normal distribution, theirs from a uniform one of standard deviation 1 / sqrt(d).
- The embedding, the head and the matrices share one learning rate, in Muon's units matched to AdamW's; theirs are
  0.18, 0.006 and 0.012. One weight decay, 0.1; theirs is cautious and falls to zero.
- No logit soft-cap; the data is C4, theirs is ClimbMix; the tokenizer is gpt2's.
- Ours has no limit on its FLOPs; theirs stopped at 3e19, after 9.9e9 tokens.
"""

data_dir = "data/c4"
out_dir = "out/nag_replication_broken"
init_from = "auto"

residual = "nag"
nag_first_logits = None
n_layer = 64
n_head = 5
n_embd = 640
block_size = 1024
vocab_size = 50304
activation = "relu"
qk_norm = True
tied = False
init = "xavier"
init_scale = 0.8
init_out = "zero"

optimizer = "muon"
learning_rate = 4e-3
min_lr = 2e-4
warmup_iters = 40
schedule = "wsd"
wsd_share = 0.65

batch_size = 16
total_batch_tokens = 524288
max_iters = 19000
eval_tokens = 5242880
