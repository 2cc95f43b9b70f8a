"""The rungs of runs/nag_v_prenorm.py: 8, 16 and 32 blocks of width 128 on the embedded corpus, minutes each on 2 CPU cores"""

n_layer = 32
max_iters = 500
