"""CUDA: GPUs of NVIDIA, and of AMD, which torch calls so, too. Not run yet: no machine of the project has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatron_elastic.device.accelerator import Accelerator


class Cuda(Accelerator):
    """See ``Device``."""

    name = "cuda"
    backend = "nccl"

    @property
    def generator(self) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[self._index]

    @contextmanager
    def building(self) -> Iterator[None]:
        current = torch.cuda.current_device
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
        try:
            yield
        finally:
            torch.cuda.current_device = current

    def settings(self, bitwise: bool) -> Mapping[str, Any]:
        return {"deterministic_mode": True} if bitwise else {}
