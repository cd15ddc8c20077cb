#!/usr/bin/env bash
# The gate: scripts/check.sh, and then the jobs that tests/tiers/gate.txt lists, some of them of a Megatron-LM checkout if
# MEGATRON_LM_PATH names one. With arguments, all go to pytest: bash scripts/test.sh tests/layout/test_layout.py -k grid
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $# -gt 0 ]]; then
    source scripts/setup.sh
    exec python -m pytest "$@"
fi
source scripts/check.sh
# Two at a time: a job waits for half of the time that it takes. A module stays with one worker, which keeps its undisturbed jobs.
echo "== pytest: jobs"
python -m pytest -m gate --once-more --numprocesses 2 --dist loadfile --durations 80
if [[ -s build/not-tested.txt ]]; then
    echo "not tested here: $(sort -u build/not-tested.txt | paste -sd ';' | sed 's/;/; /g')"
fi
