"""The software accelerator as the device of a rank."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from megatron_elastic.device import soft, stand_in
from megatron_elastic.device.accelerator import Accelerator
from megatron_elastic.device.cpu import Cpu


class Soft(Accelerator):
    """See ``Device``."""

    name = "soft"
    backend = "softccl"
    equals_host = True

    def __init__(self, index: int) -> None:
        soft.load()
        super().__init__(index)

    @classmethod
    def count(cls) -> int:
        soft.load()
        return super().count()

    def use(self) -> None:
        super().use()
        stand_in.answer_with(self)

    @property
    def generator(self) -> torch.Generator:
        return self._module.default_generator(self._index)

    def harm(self, fault: str) -> None:
        self._module.inject(fault, self._index)

    def building(self) -> AbstractContextManager[None]:
        return stand_in.answering_with(Cpu())
