#!/usr/bin/env bash
# What one runs before a commit: sets up .venv, then linters, types, import contracts and all tests that start no job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

echo "== ruff"
ruff check .
echo "== import-linter"
lint-imports
echo "== mypy"
mypy
echo "== pytest: pure tests"
rm -f build/not-tested.txt
python -m pytest -m pure --numprocesses 2 --dist worksteal
