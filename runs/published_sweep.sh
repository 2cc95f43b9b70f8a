#!/usr/bin/env bash
# Run a grid that the BHyT paper searched (arXiv 2601.09719). Other arguments go to train.py:
#   runs/published_sweep.sh pretraining out/sweep_bhyt config/llama_374m.py config/published_bhyt.py
#   runs/published_sweep.sh sft out/sweep_sft config/sft_lima.py --init_from=out/llama_1b
# Started again, it leaves finished runs and continues interrupted ones. It names runs that fail.
set -eu
cd "$(dirname "$0")/.."
kind=$1
folder=$2
shift 2
run() { # name, arguments of train.py
    out=$folder/$1
    shift
    if ls "$out"/ckpt* > /dev/null 2>&1; then set -- "$@" --init_from=resume; fi
    torchrun --standalone --nproc_per_node="$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')" \
        train.py "$@" --out_dir="$out" || echo "$out did not finish" >&2
}
case $kind in
pretraining) rates="1e-4 3e-4 5e-4 1e-3 3e-3" lasts="0.1 0.01" warms="0.05 0.1" ;;
sft) rates="1e-7 5e-7 1e-6 1e-5 5e-5 1e-4" lasts="0.1 0.01 0.001" warms="0.03 0.05 0.1" ;;
*) echo "choose pretraining or sft, not $kind" >&2; exit 2 ;;
esac
for lr in $rates; do for decay in 0.0 0.1; do for last in $lasts; do for warm in $warms; do
    run "$lr-$decay-$last-$warm" "$@" --learning_rate=$lr --weight_decay=$decay --warmup_share=$warm \
        --min_lr="$(python -c "print($lr * $last)")"
done; done; done; done
