"""BHyT small enough for minutes on 2 CPU cores: 16 blocks of width 128 on the embedded corpus, a rung of runs/bhyt_v_norms.py"""

out_dir = "out/bhyt_16x128"
residual = "bhyt"
n_layer = 16
max_iters = 250
