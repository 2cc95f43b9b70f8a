"""
Compare NAG with pre-norm at width 128: does its lead grow with depth, and which piece causes it?

    python runs/nag_v_prenorm.py depth        8, 16 and 32 blocks, 3 seeds at the best learning rate
    python runs/nag_v_prenorm.py ladder       from pre-norm to NAG piece by piece, 16 blocks
    python runs/nag_v_prenorm.py tolerance    many learning rates with AdamW and Muon, 8 blocks
"""

import sys

from sweep import COMMON, LOOK, sweep, table

PIECES = {  # from pre-norm to NAG, then NAG with one piece changed
    "prenorm": ["--residual=prenorm"],
    "prenorm_wide": ["--residual=prenorm", "--n_hidden=544"],  # as many parameters as NAG
    "orthogonal": ["--residual=orthogonal"],
    "rotation_only": "--nag_centre=False --nag_directions=0 --nag_lane=False".split(),
    "and_centred": "--nag_directions=0 --nag_lane=False".split(),
    "and_modulated": ["--nag_lane=False"],
    "nag": [],
    "nag_not_orthogonal": ["--nag_orthogonal=False"],
    "nag_not_centred": ["--nag_centre=False"],
    "nag_not_modulated": ["--nag_directions=0"],
    "nag_beta_1": ["--nag_beta=1"],
    "nag_alpha_0": ["--nag_alpha_power=0"],
    "nag_alpha_1": ["--nag_alpha_power=1"],
    "nag_alpha_warmup": ["--alpha_warmup_iters=50"],
    "replication": ["--nag_first_logits=None"],
}


def modes(suffix, *args):
    return {f"{mode}_{suffix}": [*args, f"--residual={mode}"] for mode in ("prenorm", "nag")}


def depth():
    for blocks, rates in ((8, [2e-3, 4e-3]), (16, [2e-3, 4e-3]), (32, [1e-3, 2e-3, 4e-3])):
        variants = modes(blocks, f"--n_layer={blocks}", "--max_iters=500")
        table(sweep("nag_depth", variants, rates, [1, 2, 3], COMMON, LOOK))


def ladder():
    pieces = {name: ["--n_layer=16", "--max_iters=250", *args] for name, args in PIECES.items()}
    table(sweep("nag_ladder", pieces, [4e-3], [1, 2, 3], COMMON, LOOK))


def tolerance():
    rates = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
    for optimizer, higher in (("adamw", []), ("muon", [64e-3])):
        variants = modes(optimizer, "--max_iters=250", f"--optimizer={optimizer}")
        table(sweep("nag_tolerance", variants, rates + higher, [1], COMMON))


{"depth": depth, "ladder": ladder, "tolerance": tolerance}[sys.argv[1]]()
