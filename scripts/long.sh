#!/usr/bin/env bash
# Checks that take longer than those of scripts/test.sh, which come first. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

echo "== simulation: histories that are new with every commit, and the same for all who check it"
first=$((16#$(git rev-parse --short=7 HEAD | cut -c1-7)))
timeout --kill-after 30 600 python -m tests.simulation --seeds "$first:$((first + 2000))" --jobs 2

echo "== hosts that are lost"
export MEGATRON_ELASTIC_LONG=1
# Longer than all of them take, so that nothing hangs for ever.
timeout --kill-after 30 1800 python -m pytest tests/test_lost_hosts.py "$@"

echo "== the launch script under Slurm"
timeout --kill-after 30 900 python -m pytest tests/test_slurm.py -rs "$@"

echo "== jobs in further combinations"
timeout --kill-after 30 1500 python -m pytest -m long --ignore tests/test_lost_hosts.py --ignore tests/test_slurm.py \
    --numprocesses 2 --dist loadfile "$@"

echo "== chaos: random faults, new with every commit"
timeout --kill-after 30 900 megatron-elastic chaos --seed "$first" --minutes 2 --faults 20

echo "== a Megatron-LM checkout"
if [[ -z ${MEGATRON_LM_PATH:-} ]]; then
    echo "skipped: MEGATRON_LM_PATH names none (core_v0.16.1)"
    exit
fi
python -m pip install --quiet --disable-pip-version-check six regex pydantic tensorboard # megatron.training imports them
exec timeout --kill-after 30 1800 python -m pytest tests/test_checkout.py tests/test_models.py \
    --numprocesses 2 --dist loadfile "$@"
