"""
What the public replication of NAG chose, as far as it bears on the mathematics: logits divided by d, all gains zero at
the start, gates at the learning rate of the matrices.
"""

residual = "nag"
nag_first_logits = None
