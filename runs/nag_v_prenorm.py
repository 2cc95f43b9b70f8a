"""
Does NAG lead pre-norm, does the lead grow with depth, and what drives it? On the embedded corpus, width 128.

    python runs/nag_v_prenorm.py depth        8, 16 and 32 blocks, the best learning rate of each with three seeds
    python runs/nag_v_prenorm.py ladder       from pre-norm to NAG and each piece taken out again, 16 blocks
    python runs/nag_v_prenorm.py tolerance    how far the learning rate can rise, AdamW and Muon, 8 blocks
"""

import sys

from sweep import sweep, table

COMMON = "--device=cpu --save_interval=100 --log_interval=10 --eval_tokens=65536".split()
LOOK = ["--what=depth", "--depth_tokens=4096", "--batch_size=8"]
PIECES = {  # in the order of the ladder, then NAG with one piece changed
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


def depth():
    for blocks, rates in ((8, [2e-3, 4e-3]), (16, [2e-3, 4e-3]), (32, [1e-3, 2e-3, 4e-3])):
        modes = {
            f"{mode}_{blocks}": [f"--n_layer={blocks}", "--max_iters=500", f"--residual={mode}"]
            for mode in ("prenorm", "nag")
        }
        table(sweep("nag_depth", modes, rates, [1, 2, 3], COMMON, LOOK))


def ladder():
    pieces = {name: ["--n_layer=16", "--max_iters=250", *args] for name, args in PIECES.items()}
    table(sweep("nag_ladder", pieces, [4e-3], [1, 2, 3], COMMON, LOOK))


def tolerance():
    rates = [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3]  # up to 4 and more times the best
    for optimizer, higher in (("adamw", []), ("muon", [64e-3])):
        modes = {
            f"{mode}_{optimizer}": [
                "--max_iters=250",
                f"--optimizer={optimizer}",
                f"--residual={mode}",
            ]
            for mode in ("prenorm", "nag")
        }
        table(sweep("nag_tolerance", modes, rates + higher, [1], COMMON))


{"depth": depth, "ladder": ladder, "tolerance": tolerance}[sys.argv[1]]()
