"""Build: the extension, compiled once for each state of its sources and each version of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.utils import cpp_extension

from megatron_elastic.compiler import run_compiler
from megatron_elastic.lock import locked

_HERE = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")

_LIMIT = 600.0
"""Seconds that one process waits for another which compiles, and for a compiler; it takes one or two minutes."""


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or g++, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def library() -> Path:
    """The compiled extension; compiled now if it is not there. Two processes at once compile it once.

    It is kept in ``$TORCH_EXTENSIONS_DIR``, or in ``~/.cache/torch_extensions``. Raises RuntimeError without a
    compiler, with its output if it fails, where it or another process that compiles takes too long, and where nothing
    can be written.
    """
    sources = sorted(_HERE.glob("*.cpp"))
    digest = hashlib.sha256(" ".join((torch.__version__, *_FLAGS)).encode())
    for path in (*sources, *sorted(_HERE.glob("*.h"))):
        digest.update(path.read_bytes())
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    made = root / "megatron_elastic_soft" / f"soft-{digest.hexdigest()[:16]}.so"
    if made.exists():
        return made
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with locked(made.parent / "lock", "the extension of the soft device", _LIMIT):
            if not made.exists():
                _compile(sources, made)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(f"soft: the extension cannot be made: {error}") from None
    return made


def _compile(sources: Sequence[Path], made: Path) -> None:
    program = compiler()
    if program is None:
        raise RuntimeError("there is no C++ compiler (g++, or what CXX names): install one (Debian: g++)")
    torch_lib = Path(torch.__file__).parent / "lib"
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    with tempfile.TemporaryDirectory(dir=made.parent) as directory:
        objects = [Path(directory, f"{source.stem}.o") for source in sources]
        commands = [
            (program, *_FLAGS, *includes, "-c", str(source), "-o", str(to))
            for source, to in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(partial(run_compiler, limit=_LIMIT), commands))
        linked = Path(directory, made.name)
        run_compiler((program, "-shared", *map(str, objects), "-o", str(linked), f"-L{torch_lib}", "-ltorch_cpu",
                      "-lc10", f"-Wl,-rpath,{torch_lib}"), _LIMIT)
        linked.rename(made)
