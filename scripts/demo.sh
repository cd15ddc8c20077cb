#!/usr/bin/env bash
# The main job, twice: 8 processes train a GPT on real text, undisturbed and then with three of them killed.
# Ends with 0 only if the losses, gradient norms, final weights and optimizer states of both are equal bit for bit.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

data=data/stdlib
runs=runs/demo-$(date +%Y%m%d-%H%M%S)

say() { printf '\n== %s\n' "$*"; }

train() {
    local run_dir=$1
    shift
    megatron-elastic run --nproc-per-node 8 examples/pretrain_gpt.py --elastic --elastic-run-dir "$run_dir" \
        --data-path "$data" --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \
        --attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size 1 --global-batch-size 16 \
        --train-iters 40 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 4 --eval-iters 0 "$@"
}

if [[ ! -f $data/data.json ]]; then
    say "Data: the standard library's sources, as tokens"
    megatron-elastic data prepare "$data"
fi

say "The undisturbed run: 8 ranks, 2 pipeline stages x 4 data-parallel columns"
train "$runs/undisturbed"

# Rank r computes stage r / 4 in column r % 4. A dead rank takes its column away, so these kills leave one column.
say "The same, and three ranks are killed"
echo "rank 5 in the backward pass of step 10; rank 2 while the others recover from that; rank 3 in the optimizer of step 25"
train "$runs/disturbed" \
    --elastic-inject kill:rank=5,step=10,at=backward,grain=5 \
    --elastic-inject kill:rank=2,step=10,at=edit \
    --elastic-inject kill:rank=3,step=25,at=apply

say "What happened"
megatron-elastic report "$runs/disturbed"

say "Are the two runs equal?"
code=0
megatron-elastic compare "$runs/undisturbed" "$runs/disturbed" || code=$?
echo
echo "Records and logs: $runs/undisturbed and $runs/disturbed"
exit "$code"
