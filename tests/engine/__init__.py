"""Transformer Engine without a GPU, for tests: its own Python, over a library that is written in torch.

What NVIDIA publishes as ``transformer_engine`` is Python, and runs here as it is. What it calls is
``transformer_engine_torch``, compiled for CUDA; ``library`` stands in for that, with the same functions on the CPU.
So what a layer does around its kernels is real (parameters and their marks, groups, what it saves for the backward
pass, collectives, delayed gradients), and what a kernel computes, how fast, and on which stream, is not.

Nothing outside ``tests/`` knows of it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from megatron_elastic.device.soft import build

VERSION = "2.9.0"
"""The release whose Python ``scripts/setup.sh`` installs: the oldest that core_v0.16.1 asks for."""
WHEEL = Path(sys.prefix) / "transformer-engine"
"""Where it is, beside everything else: whoever finds it takes it to be there in earnest."""
_HERE = Path(__file__).parent
_LIBRARY = "transformer_engine_torch"


def missing() -> str:
    """Why Transformer Engine cannot run here; empty if it can."""
    if not (WHEEL / "transformer_engine").is_dir():
        return f"no Python of Transformer Engine in {WHEEL} (scripts/setup.sh installs it)"
    return "" if build.compiler() else "no C++ compiler (g++, or what CXX names)"


def provide(folder: Path) -> dict[str, str]:
    """Put Transformer Engine together in an empty folder. Returns what it needs in the environment, beside
    ``PYTHONPATH``, where the folder has to be.
    """
    for entry in WHEEL.iterdir():
        (folder / entry.name).symlink_to(entry)
    (folder / "software_engine").symlink_to(_HERE)
    compiler = build.compiler()
    assert compiler is not None
    subprocess.run(
        [compiler, "-x", "c", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", str(_HERE / "library.c"),
         "-o", str(folder / f"{_LIBRARY}.so")],
        check=True,
    )  # fmt: skip
    return {
        "NVTE_PROJECT_BUILDING": "1",  # else it looks for CUDA's libraries when it is imported
        "NVTE_TORCH_COMPILE": "0",
    }
