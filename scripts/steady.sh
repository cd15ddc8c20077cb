#!/usr/bin/env bash
# Tests again and again beside busy processes, and how often each failed: bash scripts/steady.sh TEST... [--runs 20] [--load 4]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
exec python -m tests.tiers.steady "$@"
