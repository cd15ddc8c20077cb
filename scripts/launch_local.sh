#!/usr/bin/env bash
# One machine: start a Megatron-LM script elastically on all of its devices.
#
#   bash scripts/launch_local.sh ~/Megatron-LM/pretrain_gpt.py --tensor-model-parallel-size 2 ...
#
# Environment:
#   RANKS     processes to start (default: one for each GPU, or for each CPU core without GPUs)
#   RUN_DIR   where records and logs go (default: runs/<date>-<time>)
set -euo pipefail

if [ $# -lt 1 ] || [ ! -f "$1" ]; then
    echo "usage: RANKS=8 bash $0 SCRIPT [Megatron-LM's flags]; SCRIPT is a file, like ~/Megatron-LM/pretrain_gpt.py" >&2
    exit 2
fi
script=$1
shift

launcher=(
    --standalone                        # one node, any free port
    --nproc-per-node "${RANKS:-auto}"   # a number, or auto
)
elastic=(--elastic)                     # without it the same command is plain Megatron
if [ -n "${RUN_DIR:-}" ]; then
    case " ${MEGATRON_ELASTIC_ARGS:-} $* " in   # what is given there wins
        *" --elastic-run-dir "* | *" --elastic-run-dir="*) ;;
        *) elastic+=(--elastic-run-dir "$RUN_DIR") ;;
    esac
fi
exec megatron-elastic run "${launcher[@]}" "$script" "${elastic[@]}" "$@"
