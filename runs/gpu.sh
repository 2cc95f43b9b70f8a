#!/usr/bin/env bash
# All measurements for a machine with CUDA, the most important first. Logs go to results/gpu.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p results/gpu
python -m pytest -q tests/test_slow.py -k on_cuda | tee results/gpu/tests.txt
all=prenorm,prenorm,nag,bhyt,bhyt_exact,perinorm,lns,dyt
big="--device=cuda --n_layer=4 --n_head=32 --n_kv_head=8 --n_embd=2048 --n_hidden=8192 --activation=swiglu --block_size=1024"
deep="--device=cuda --n_layer=64 --n_head=10 --n_embd=640 --block_size=1024"
python bench.py config/plain.py --what=forward,residual,train --modes=$all $big --out=results/gpu/big.json
python bench.py config/plain.py --what=forward,residual,train --modes=$all $deep --out=results/gpu/deep.json
python bench.py config/plain.py --what=generate --modes=prenorm,nag,bhyt $big --n_layer=16 --vocab_size=50304 \
    --new_tokens=128,512,1024 --rounds=5 --out=results/gpu/generate.json
gpt2="--device=cuda --n_layer=12 --n_head=12 --n_embd=768 --block_size=1024 --vocab_size=50304 --init_scale=0.02"
python bench.py config/plain.py --what=train,recipe,cold,memory --modes=$all $gpt2 --out=results/gpu/gpt2.json
for mode in nag prenorm; do
    python bench.py config/plain.py --what=mod --modes=$mode $gpt2 --out=results/gpu/mod_$mode.json
done
