#!/usr/bin/env bash
# What the gate does not run, by part: bash scripts/long.sh [PART...]; --help names them. Results: build/long.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
exec python -m tests.tiers.long "$@"
