"""
Fine-tune on the 1000 conversations of LIMA with adapters of rank 8, as in the BHyT paper (on the
attention; its release also adapts the MLP):
python train.py config/sft_lima.py --init_from=out/llama_1b --out_dir=out/sft
For a 1B model this is about 3 epochs. The learning rate is that of the base's training, 3e-4 for
llama_1b.py; the paper tries 1e-7 to 1e-4.
"""

sft_data = "hf://datasets/GAIR/lima/train.jsonl"
lora_rank = 8
optimizer = "adamw"
embed_lr = None
head_lr = None
schedule = "cosine"
weight_decay = 0.0
warmup_iters = 0.1
max_iters = 100
batch_size = 4
total_batch_tokens = 32768  # 32 rows of 1024 tokens
eval_interval = 25
save_interval = 25
