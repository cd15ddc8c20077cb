#!/usr/bin/env bash
# In place of torchrun: takes its command line and the variables that its users set, and starts the job elastically.
#
#   - torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}"
#   + bash launch_torchrun_compat.sh "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}"
#
# Its flags are torchrun's, and so are the variables that stand for them: PET_NNODES for --nnodes, and so on. What becomes
# of each is in docs/launching.md.
#
# Environment:
#   MEGATRON_ELASTIC_TOKEN   the job's secret, the same on every node; needed with several nodes
#   RUN_DIR                  where node 0 puts the records, and each node its ranks' logs (default: runs/<date>-<time>)
#   ELASTIC=0                start plain Megatron instead, which knows no RUN_DIR: its logs are where the default is
set -euo pipefail

launcher=()
for variable in "${!PET_@}"; do
    name=${variable#PET_}
    flag=${name,,}
    flag=--${flag//_/-}
    case $name in
        STANDALONE | MODULE | NO_PYTHON | RUN_PATH | VIRTUAL_LOCAL_RANK)  # switches; 0 is off
            if [ "${!variable:-0}" != 0 ]; then launcher+=("$flag"); fi ;;
        *) if [ -n "${!variable}" ]; then launcher+=("$flag" "${!variable}"); fi ;;
    esac
done

elastic=()
if [ "${ELASTIC:-1}" = 1 ]; then
    elastic=(--elastic)
    if [ -n "${RUN_DIR:-}" ]; then
        # Behind what was given this would win over it, and before it would be the launcher's.
        case " ${MEGATRON_ELASTIC_ARGS:-} $* " in
            *" --elastic-run-dir "* | *" --elastic-run-dir="*) ;;
            *) elastic+=("--elastic-run-dir=$RUN_DIR") ;;   # one word, as two are a script's name if none is given
        esac
    fi
elif [ -n "${RUN_DIR:-}" ]; then
    echo "$0: RUN_DIR=$RUN_DIR is not used: with ELASTIC=0 no script is given --elastic-run-dir" >&2
fi
# The command line comes after the variables, so it wins; the flags at the end are the script's.
exec megatron-elastic run "${launcher[@]}" "$@" "${elastic[@]}"
