"""``megatron.core.datasets.helpers_cpp``: the C++ part of the data sets, where a checkout does not have it yet.

Megatron compiles it at start with whatever ``python3-config`` comes first in PATH, which need not be of the Python that
runs. Here an installed megatron-core that has it of the same source, as all from 0.16 to 0.19 have, lends its compiled
one; only without that it is compiled.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from megatron_elastic.compiler import run_compiler
from megatron_elastic.config import UsageError
from megatron_elastic.lock import locked

_NAME = "megatron.core.datasets.helpers_cpp"
_SOURCE = "helpers.cpp"
_LIMIT = 300.0
"""Seconds that a rank waits for another which compiles, and for the compiler, which takes some ten."""


def provide() -> None:
    """See to it that ``helpers_cpp`` can be imported. Any number of ranks may call it at once. Raises UsageError."""
    if borrow():
        return
    import megatron.core.datasets as datasets

    folder = Path(datasets.__path__[0])
    try:
        with locked(folder / "Makefile", "helpers_cpp", _LIMIT):
            if not _importable():
                _compile(folder)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"cannot compile {folder / _SOURCE}: {error}") from None


def _importable() -> bool:
    importlib.invalidate_caches()
    return _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None


def borrow() -> bool:
    """Where it cannot be imported, take it from another megatron-core on the module search path, of the same source.

    Says whether it can be imported now. It is this process's alone, and that of those it forks.
    """
    if _importable():
        return True
    import megatron.core

    own = Path(megatron.core.__path__[0]) / "datasets"
    for entry in map(Path, sys.path):
        other = entry / "megatron" / "core" / "datasets"
        library = other / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
        if other == own or not library.is_file():
            continue
        if (other / _SOURCE).read_bytes() != (own / _SOURCE).read_bytes():
            continue
        spec = importlib.util.spec_from_file_location(_NAME, library)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_NAME] = module
        return True
    return False


def _compile(folder: Path) -> None:
    if importlib.util.find_spec("pybind11") is None:
        raise UsageError(f"{folder} has no compiled helpers_cpp, and compiling it needs pybind11: pip install "
                         "pybind11, or a megatron-core from 0.16.1 to 0.19, which has it compiled")
    pybind11: Any = importlib.import_module("pybind11")
    includes = f"-I{pybind11.get_include()} -I{sysconfig.get_path('include')}"
    command = ["make", "-C", str(folder), f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}", f"CPPFLAGS={includes}"]
    run_compiler(command, _LIMIT)
    importlib.invalidate_caches()
