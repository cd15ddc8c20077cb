"""Accelerator: what all devices apart from the host have in common, through torch's module for their type."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_elastic.device.copies import DeviceCopy, HostCopy, to_device
from megatron_elastic.device.device import Arrival, Device, Memory


class Accelerator(Device):
    """See ``Device``."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._index = index

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.name)

    @classmethod
    def count(cls) -> int:
        return int(torch.get_device_module(cls.name).device_count())

    def use(self) -> None:
        self._module.set_device(self._index)

    @property
    @abstractmethod
    def generator(self) -> torch.Generator: ...

    def synchronise(self) -> None:
        self._module.synchronize(self._index)

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.torch)

    def bring(self, tensors: Mapping[str, torch.Tensor]) -> Arrival:
        self._module.set_device(self._index)
        return DeviceCopy(tensors, self.torch)

    def room_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[np.float64]]:
        if not tensors:
            return []
        there = torch.cat([self.from_host(tensor.detach()).double() for tensor in tensors])
        whole = HostCopy(there).wait().numpy()
        return np.split(whole, np.cumsum([tensor.numel() for tensor in tensors[:-1]]))

    def memory(self) -> Memory:
        module, index = self._module, self._index
        total = module.mem_get_info(index)[1]
        return Memory(module.memory_allocated(index), module.max_memory_allocated(index), total)

    def is_fault(self, error: BaseException) -> bool:
        """Torch's AcceleratorError says so."""
        return isinstance(error, torch.AcceleratorError)

    def is_short(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def settings(self, bitwise: bool) -> Mapping[str, Any]:
        return {}
