"""
The scale of train.py's defaults, at which runs/judge.py decides which design is the default: 1.8M
parameters, 1,500 steps. Time steps with two threads, as a default run has them on two cores:

    python runs/judge.py config/judge_8x128.py --threads=2 --residual=ihc --hc_streams=2
"""

max_iters = 1500
log_interval = 25
eval_tokens = None
