#!/usr/bin/env bash
# In place of torchrun: takes its command line and the variables that its users set, and starts the job elastically.
#
#   - torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}"
#   + bash launch_torchrun_compat.sh "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}"
#
# --nproc-per-node, --nnodes, --node-rank, --master-addr, --master-port, --rdzv-endpoint and --standalone mean what they
# mean to torchrun, and are read from PET_NPROC_PER_NODE, PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT and
# PET_RDZV_ENDPOINT where the command line has none, as torchrun does. Nothing is restarted, so --max-restarts does nothing.
#
# Environment:
#   MEGATRON_ELASTIC_TOKEN   the job's secret, the same on every node; needed with several nodes
#   RUN_DIR                  where node 0 puts the records, and each node its ranks' logs (default: runs/<date>-<time>)
#   ELASTIC=0                start plain Megatron instead
set -euo pipefail

launcher=()
for name in NPROC_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT RDZV_ENDPOINT; do
    variable=PET_$name
    if [ -n "${!variable:-}" ]; then
        flag=${name,,}
        launcher+=("--${flag//_/-}" "${!variable}")
    fi
done

elastic=()
if [ "${ELASTIC:-1}" = 1 ]; then
    elastic=(--elastic --elastic-run-dir "${RUN_DIR:-runs/$(date +%Y%m%d-%H%M%S)}")
fi
# The command line comes after the variables, so it wins; the flags at the end are the script's.
exec megatron-elastic run "${launcher[@]}" "$@" "${elastic[@]}"
