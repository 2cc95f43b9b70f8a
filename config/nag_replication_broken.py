"""
The public replication of NAG (github.com/AlxSp/nag-nanochat, 0c362cc) before its repair. The gates
have the learning rate of the matrices and alpha has no warm-up. In the replication the gates
collapsed, and NAG was 0.0355 bits per byte worse than its baseline. Run it with:
torchrun --standalone --nproc_per_node=8 train.py config/nag_replication_broken.py

Same as the replication: 64 blocks of width 640, heads of 128, normalised queries and keys, ReLU
squared in the MLP, untied embedding with standard deviation 0.8, output projections that start at
zero, logits divided by d, all gains starting at zero, Muon for the matrices, rotary base 100,000.
The learning rate has 40 steps of warm-up, is constant, and falls linearly to 5% over the last 65%.

Different:
- Start of the up projection: 0.63 / sqrt(d) here, 0.4 / sqrt(d) there.
- Start of the linears: Xavier normal here, uniform with standard deviation 1 / sqrt(d) there.
- Learning rate of the matrices: 0.004 here, with Muon's updates matched to AdamW's; 0.012 there,
  times 1.41 for the batch.
- Learning rate of embedding and head: 0.18 and 0.006; there 1.55 times as much.
- Weight decay: 0.1 here, for the embedding too; there cautious and falling to zero for matrices,
  0.001 for the embedding and 0.01 for the head.
- Muon: momentum from 0.85 to 0.95 here; there from 0.85 to 0.97, then down to 0.9, and a variance
  of its updates.
- Gradient: clipped here, not there.
- Queries and keys: normed after the rotation, without gains, and multiplied by 1.2 there.
- Embedding and head: centred and scaled after each step there; here the head's rows as they are
  read, and the embedding as it is read.
- AdamW: (0.8, 0.95) for the gates, (0.8, 0.995) and (0.8, 0.96) for embedding and head, and epsilon
  1e-10 there; the betas of model.py here.
- Data: C4 with gpt2's tokenizer, context 1024 and 2^19 tokens a step here; ClimbMix with 32768
  token ids, context 2048 and 2^20 tokens a step there.
- Length: max_iters here. The replication stopped at 3e19 FLOPs, after 9.9e9 tokens.

Neither has a soft cap on NAG's logits. The replication's own GPT has one, of 15.
"""

include = "plain.py"

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
activation = "relu2"
qk_norm = True
rope_base = 100000.0
tied = False
init = "xavier"
init_scale = 0.8
init_out = "zero"

optimizer = "muon"
learning_rate = 4e-3
embed_lr = 0.18
head_lr = 0.006
min_lr = 2e-4
warmup_iters = 40
schedule = "wsd"
wsd_share = 0.65

batch_size = 16
total_batch_tokens = 524288
max_iters = 19000
eval_tokens = 5242880
