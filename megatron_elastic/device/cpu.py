"""CPU: the device of a rank that has no other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megatron_elastic.device.device import Arrival, Device, Memory


class _Here(NamedTuple):
    """Tensors that need not be brought anywhere."""

    tensors: Mapping[str, torch.Tensor]

    def wait(self) -> Mapping[str, torch.Tensor]:
        return self.tensors


class Cpu(Device):
    """See ``Device``. What it counts of memory is nothing: it is the host's."""

    name = "cpu"
    backend = None
    is_host = equals_host = True

    def __init__(self, index: int | None = None) -> None:
        super().__init__(None)

    @classmethod
    def count(cls) -> int:
        return 1

    def use(self) -> None:
        """It is what there is without any other."""

    @property
    def generator(self) -> torch.Generator:
        return torch.default_generator

    def building(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronise(self) -> None:
        """It has done everything."""

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def bring(self, tensors: Mapping[str, torch.Tensor]) -> Arrival:
        return _Here(tensors)

    def room_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[np.float64]]:
        return [tensor.detach().double().numpy() for tensor in tensors]

    def memory(self) -> Memory:
        return Memory(0, 0, 0)

    def is_fault(self, error: BaseException) -> bool:
        return False

    def is_short(self, error: BaseException) -> bool:
        return False

    def settings(self, bitwise: bool) -> Mapping[str, Any]:
        return {}
