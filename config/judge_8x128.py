"""
The scale of train.py's defaults, to see which design should be the default: 1.8M parameters. Steps
are timed with two threads, as a default run has them on two cores:

    python runs/judge.py config/judge_8x128.py --threads=2 --residual=ihc
"""

max_iters = 1500
log_interval = 25
eval_tokens = None
