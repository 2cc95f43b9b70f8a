#!/usr/bin/env bash
# NAG's router at rates 0 to 0.4 with equal FLOPs, 3 seeds. For another scale, run once per rate:
# python train.py config/plain.py --residual=nag --flops_budget=1e19 --mod_on=both --mod_rate=0.25 --learning_rate=...
set -eu
cd "$(dirname "$0")/.."
python runs/mod_v_dense.py isoflop
