#!/usr/bin/env bash
# What one runs before a commit: sets up .venv, then linters, types, import contracts and all tests that start no job.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

echo "== ruff"
ruff check .
echo "== import-linter"
lint-imports
echo "== pytest: pure tests, and mypy beside them"
mkdir -p build
rm -f build/not-tested.txt
mypy >build/mypy.log 2>&1 &
types=$!
tests=0
python -m pytest -m pure --numprocesses 2 --dist worksteal || tests=$?
if ! wait "$types"; then
    echo "== mypy"
    cat build/mypy.log
    exit 1
fi
tail -n 1 build/mypy.log
((tests == 0)) || exit "$tests"
