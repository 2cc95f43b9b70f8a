#!/usr/bin/env bash
# One FLOP budget, six rates: what tokens that skip save is spent on more tokens. 8 blocks of width 128, as many FLOPs as
# 500 dense steps of 2048 bytes; arguments are handed on, as in runs/isoflop.sh --mod_router=learned --seed=2
set -eu
cd "$(dirname "$0")/.."
for rate in 0 0.1 0.2 0.25 0.3 0.4; do
    out=results/isoflop/$(echo "$rate $*" | sed 's/ --/_/g; s/ *$//')
    python train.py --flops_budget=1.19e13 --mod_on=both --mod_rate=$rate --log_interval=10 --init_from=auto \
        --out_dir="$out" "$@"
done
