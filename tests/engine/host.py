"""What Transformer Engine's Python asks of torch and of other packages, answered on a machine without a GPU.

It alone is told that there is a CUDA device, and that tensors are on it; megatron_elastic's own answers
(``device.stand_in``) are for Megatron. It imports packages for what no CPU runs (kernels in Triton, exports to ONNX),
and gets hollow ones where they are not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

_HOLLOW = {
    "triton": ("triton", "triton.language", "triton.language.standard"),
    "onnx": ("onnx",),
    "onnxscript": ("onnxscript",),
    "einops": ("einops",),
}
"""Packages, and the modules of them that are imported."""
_IMPORTERS = ("triton.permutation", "triton.cross_entropy", "triton.pad", "export", "attention.inference")
"""Modules of ``transformer_engine.pytorch`` that import them."""


def prepare() -> None:
    """Answer from now on, in this process. ``transformer_engine_torch`` is there, and its user is being imported."""
    _show_a_device()
    importlib.import_module("torch._dynamo")  # asks for triton as well, and is to get the true answer
    with _hollow_packages():
        for name in _IMPORTERS:
            importlib.import_module(f"transformer_engine.pytorch.{name}")


def _show_a_device() -> None:
    available, is_cuda = torch.cuda.is_available, vars(torch._C.TensorBase)["is_cuda"]
    answers: dict[str, Any] = {
        "is_available": lambda: _asked_by_engine() or available(),
        "is_current_stream_capturing": lambda: False,
        "device": _current,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    vars(torch.cuda.nvtx)["range"] = _current
    on_device = property(lambda tensor: _asked_by_engine() or is_cuda.__get__(tensor))
    torch.Tensor.is_cuda = on_device  # type: ignore[assignment]


@contextlib.contextmanager
def _current(*_: object) -> Iterator[None]:
    """A device that is the only one; a range of calls that nobody looks at."""
    yield


def _asked_by_engine() -> bool:
    """Whether a function of Transformer Engine is what called our caller."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("transformer_engine.")


@contextlib.contextmanager
def _hollow_packages() -> Iterator[None]:
    """Meanwhile packages that are not installed can be imported. Torch and Megatron never see them."""
    made: list[str] = []
    for package, modules in _HOLLOW.items():
        if importlib.util.find_spec(package) is None:
            for name in modules:
                sys.modules[name] = _Hollow(name)
                made.append(name)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


class _Hollow(ModuleType):
    """A module that has every name."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Nothing:
    """What can be called, decorate, and have any attributes; and is nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()
