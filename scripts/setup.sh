# Sourced by the other scripts, which run at the top of the checkout under `set -euo pipefail`:
# makes .venv if it is missing or older than pyproject.toml, and activates it. Takes a moment when nothing changed.
#
# PYTHON=/path/to/python3.11 chooses the interpreter.

setup_fail() {
    echo "setup: error: $*" >&2
    exit 1
}

setup_suits() {
    # A name on the PATH may be a shim for an interpreter that is not there, so it has to run.
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

setup_find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        setup_suits "$PYTHON" || setup_fail "PYTHON=$PYTHON is no Python 3.11 or newer with venv"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        if setup_suits "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    setup_fail "no Python 3.11 or newer (with venv) found. Install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

setup_install() {
    local log=.venv/setup.log
    echo "setup: $1 (log: $log)"
    shift
    if ! "$@" >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        setup_fail "this failed: $*"
    fi
}

setup_venv() {
    local stamp=.venv/setup.stamp python wanted
    wanted=$(cat pyproject.toml scripts/setup.sh scripts/constraints.txt | cksum)
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
        return
    fi
    if [[ ! -x .venv/bin/python ]]; then
        python=$(setup_find_python) || exit 1
        echo "setup: making .venv with $("$python" --version)"
        "$python" -m venv .venv || setup_fail "'$python -m venv .venv' failed; is the venv module installed (python3-venv)?"
    fi
    # torch goes first and alone: which build of it is taken (CPU, CUDA) must not depend on what the others ask for.
    setup_install "installing torch" .venv/bin/python -m pip install --disable-pip-version-check torch==2.13.0
    setup_install "installing megatron-elastic and its tools" .venv/bin/python -m pip install --disable-pip-version-check \
        --constraint scripts/constraints.txt --editable '.[dev]'
    # Beside the packages: Megatron uses it wherever it finds it. Only tests do (tests/engine), without its libraries.
    setup_install "installing the Python of Transformer Engine" \
        .venv/bin/python -m pip install --disable-pip-version-check --no-deps --only-binary :all: --upgrade \
        --target .venv/transformer-engine transformer_engine==2.9.0
    echo "$wanted" >"$stamp"
    echo "setup: done"
}

setup_venv
# shellcheck disable=SC1091
source .venv/bin/activate
