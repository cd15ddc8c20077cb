"""NPU: Ascend devices through torch_npu, which answers for them what Megatron asks of ``torch.cuda``.

Not run in CI, and not run on a device yet. Communication on the device is HCCL's, in ``megatron_elastic.comm``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_elastic.device.accelerator import Accelerator
from megatron_elastic.device.cuda import Cuda


def needed() -> bool:
    """Whether this machine has an NPU that torch can use, and torch_npu is installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    torch_npu = importlib.import_module("torch_npu")
    return bool(torch_npu.npu.is_available())


def install() -> None:
    """Let ``torch.cuda`` mean the NPUs in this process. Call it before Megatron is imported.

    Does nothing without an NPU. Raises RuntimeError if Megatron was imported first.
    """
    if not needed():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("device.npu.install() was called after megatron.core had been imported; call it first")
    # torch_npu's own shim: it redirects torch.cuda, Tensor.cuda and "cuda" devices, and maps nccl to hccl.
    importlib.import_module("torch_npu.contrib.transfer_to_npu")


class Npu(Accelerator):
    """See ``Device``."""

    name = "npu"
    backend = "hccl"

    @property
    def generator(self) -> torch.Generator:
        generators = self._module.default_generators
        return generators[self._index]

    def building(self) -> AbstractContextManager[None]:
        return Cuda.building(self)  # type: ignore[arg-type]  # torch.cuda means the NPUs

    def settings(self, bitwise: bool) -> Mapping[str, Any]:
        return {"deterministic_mode": True} if bitwise else {}
