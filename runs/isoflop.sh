#!/usr/bin/env bash
# One FLOP budget, rates 0 to 0.4, NAG's router, three seeds: tokens that skip are paid back in more tokens. Another scale:
# python train.py --flops_budget=1e19 --mod_on=both --mod_rate=0.25 --learning_rate=... , once for each rate.
set -eu
cd "$(dirname "$0")/.."
python runs/mod_v_dense.py isoflop
