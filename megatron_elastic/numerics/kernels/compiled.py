"""Compiled: the kernels in C++, for tensors on the CPU, through ctypes. One pass over memory each.

The library is compiled at first use with the machine's compiler, for its processor, and kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megatron_elastic.compiler import run_compiler
from megatron_elastic.lock import locked
from megatron_elastic.numerics.kernels.reference import BLOCK, SCALE, AdamNumbers

SOURCE = Path(__file__).parent / "exact.cpp"
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread",
    "-ffp-contract=off",  # each operation is rounded
    "-fno-math-errno", "-fno-trapping-math",  # without these, roots and choices are not done in vectors
)  # fmt: skip
_LIMIT = 90.0
"""Seconds after which a process does without a library, whether it compiles or waits for one that does: fewer than a
job waits for its ranks to start. Compiling takes two of a processor."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
_SIGNATURES = {
    "quantise_add": (_INT, (_POINTER, _POINTER, _INT, _LONG, ctypes.c_float, _DOUBLE, _DOUBLE, _INT)),
    "mean": (None, (_POINTER, _POINTER, _LONG, _LONG, _DOUBLE, _INT)),
    "block_squares": (None, (_POINTER, _POINTER, _INT, _LONG)),
    "adam": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _INT)),
}


class Unavailable(Exception):
    """There is no library, and why."""


class Kernels:
    """The functions of a compiled library. They take what those of ``reference`` take, if ``takes`` says so."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"{path} cannot be loaded: {error}") from None
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"megatron_elastic_{name}")
            function.restype, function.argtypes = result, arguments
        self._quantise_add = library.megatron_elastic_quantise_add
        self._mean = library.megatron_elastic_mean
        self._block_squares = library.megatron_elastic_block_squares
        self._adam = library.megatron_elastic_adam

    @staticmethod
    def takes(*tensors: torch.Tensor) -> bool:
        """Whether these lie here in one piece each, and have types that kernels know."""
        return all(
            each.device.type == "cpu" and each.is_contiguous() and (each.dtype in _TYPES or each.dtype == torch.int64)
            for each in tensors
        )

    def quantise_add(self, total: torch.Tensor, value: torch.Tensor, factor: float, limit: float) -> bool:
        """See ``reference``."""
        return bool(
            self._quantise_add(
                total.data_ptr(), value.data_ptr(), _TYPES[value.dtype], value.numel(), SCALE * factor, factor, limit,
                torch.get_num_threads(),
            )
        )  # fmt: skip

    def mean(self, parts: Sequence[torch.Tensor], by: float) -> torch.Tensor:
        """See ``reference``."""
        result = torch.empty(parts[0].shape)
        pointers = (_POINTER * len(parts))(*(part.data_ptr() for part in parts))
        self._mean(result.data_ptr(), pointers, len(parts), result.numel(), by, torch.get_num_threads())
        return result

    def block_squares(self, pieces: Iterable[torch.Tensor]) -> npt.NDArray[np.float64]:
        """See ``reference``."""
        pieces = list(pieces)
        sums, filled = np.empty(sum(piece.numel() for piece in pieces) // BLOCK), 0
        for piece in pieces:
            blocks = piece.numel() // BLOCK
            self._block_squares(sums[filled:].ctypes.data, piece.data_ptr(), _TYPES[piece.dtype], blocks)
            filled += blocks
        return sums

    def adam(
        self, weights: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
        numbers: AdamNumbers,
    ) -> None:  # fmt: skip
        """See ``reference``."""
        given = (_DOUBLE * len(numbers))(*numbers)
        pointers = (each.data_ptr() for each in (weights, grad, exp_avg, exp_avg_sq))
        self._adam(*pointers, weights.numel(), given, torch.get_num_threads())


@functools.cache
def kernels() -> Kernels | None:
    """The compiled kernels; None, which the log says once in a process, where they cannot be had."""
    try:
        return Kernels(library(cache_folder()))
    except Unavailable as error:
        logging.getLogger(__name__).warning("exact sums and Adam are computed by torch, which takes longer: %s", error)
        return None


def cache_folder() -> Path:
    """Where libraries are kept. Raises Unavailable for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "megatron_elastic"
    except RuntimeError as error:
        raise Unavailable(f"{error} Name a folder with XDG_CACHE_HOME") from None


def library(folder: Path) -> Path:
    """The compiled library in a folder, made now if it is not there. Processes that come meanwhile wait for it.

    Its name is made of the source, the flags, the compiler and the processor. Raises Unavailable without a compiler
    (``$CXX``, c++ or g++), where it fails or takes too long, and where the folder cannot be written.
    """
    begun = time.monotonic()
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise Unavailable(f"there is no C++ compiler ({', '.join(names)})")
    try:
        path = folder / f"kernels-{_digest(compiler)}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / "lock", "kernels", _LIMIT):
                if not path.exists():
                    _compile(compiler, path, begun)
    except (OSError, RuntimeError) as error:
        raise Unavailable(str(error)) from None
    return path


def _digest(compiler: str) -> str:
    program = Path(compiler).resolve()
    stat = program.stat()
    known = [SOURCE.read_text(), *FLAGS, program, stat.st_size, stat.st_mtime_ns, _processor()]
    return hashlib.sha256("\0".join(map(str, known)).encode()).hexdigest()[:16]


def _processor() -> str:
    """What -march=native depends on: a home may be shared by machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("vendor_id", "cpu family", "model\t", "flags", "CPU part", "Features")
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(names)})])


def _compile(compiler: str, path: Path, begun: float) -> None:
    """Compile beside the path and rename, so that there is never a part of a library. Raises RuntimeError.

    ``begun``: when this process began to need it.
    """
    # A compiler that is ended may have others that go on for a moment.
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as directory:
        made = Path(directory, path.name)
        run_compiler([compiler, *FLAGS, "-o", str(made), str(SOURCE)], _LIMIT, time.monotonic() - begun)
        made.rename(path)
