#!/usr/bin/env bash
# Sets up .venv and runs the tests. Without arguments the linters and the type checker run first;
# with arguments, all go to pytest: bash scripts/test.sh tests/test_layout.py -k grid
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh

if [[ $# -eq 0 ]]; then
    echo "== ruff"
    ruff check .
    echo "== mypy"
    mypy
    echo "== import-linter"
    lint-imports
    echo "== pytest"
    # A job starts with imports on one core: two files at once use the other, too.
    set -- --numprocesses 2 --dist loadfile
fi
exec python -m pytest "$@"
