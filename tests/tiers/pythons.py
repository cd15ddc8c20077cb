"""Pythons: what needs neither torch nor Megatron, under newer Pythons than the one of ``.venv``.

    python -m tests.tiers.pythons 3.12 3.13

Layouts, plans, the control plane and its simulation: pure tests, each Python in an environment of its own in ``build``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.jobs import ROOT

TESTS = (
    "layout/test_layout.py", "layout/test_codec.py", "plan/test_plan.py", "plan/test_replan.py", "plan/test_growth.py",
    "control/test_cluster.py", "control/test_protocol.py", "control/test_standing.py", "control/test_simulation.py",
)  # fmt: skip
"""Modules of tests that are run."""
_NEEDS = (
    "cryptography", "hypothesis", "immutables", "msgspec", "numpy", "prometheus-client", "pysyncobj", "pytest",
    "pytest-timeout", "pytest-xdist", "pyyaml", "rich", "setproctitle", "shtab",
)  # fmt: skip
_RUNS = "import sys, venv; print(sys.executable)"


def interpreter(version: str) -> str | None:
    """Where Python ``version`` (``3.12``) is; None if it is not here. pyenv's are found by their names, too."""
    shims = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (f"python{version}", *map(str, sorted(shims.glob(f"versions/{version}.*/bin/python")))):
        try:
            done = subprocess.run([candidate, "-c", _RUNS], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return done.stdout.strip()
    return None


def main(versions: list[str]) -> int:
    """Returns the exit code: 1 if tests fail under one of them. One that is not here is said to be so."""
    failed = False
    for version in versions:
        python = interpreter(version)
        if python is None:
            print(f"not tested here: Python {version}, of which there is none", flush=True)
            continue
        print(f"{python}:", flush=True)
        folder = ROOT / "build" / f"python{version}"
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        own = str(folder / "bin" / "python")
        constraints = ["--constraint", str(ROOT / "scripts" / "constraints.txt")]
        subprocess.run([own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *constraints, *_NEEDS],
                       check=True)  # fmt: skip
        files = [f"tests/{name}" for name in TESTS]
        tests = [own, "-m", "pytest", "-m", "pure", "-q", *files]
        failed |= subprocess.run(tests, cwd=ROOT, check=False).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
