"""Device: the one interface of what a rank computes on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch


class Memory(NamedTuple):
    """Bytes of a device: in tensors now, at most so far, and in all; all 0 where nobody counts them."""

    used: int
    peak: int
    total: int


class Arrival(Protocol):
    """Tensors of the host on their way to a device."""

    def wait(self) -> Mapping[str, torch.Tensor]:
        """They, there, for what the calling thread tells the device from now on. The thread itself does not wait."""


class Device(ABC):
    """One device, which one rank has.

    Attributes:
        name: its type, as torch has it.
        backend: torch's name of the backend that does collectives there; None: they are ours.
        is_host: its memory is the host's, and what it is told to do is done when the call returns.
        equals_host: its kernels give the bits of the CPU's, so that a copy of a state in host memory that does the same
            updates stays equal to it.
        torch: what torch calls it.
    """

    name: ClassVar[str]
    backend: ClassVar[str | None]
    is_host: ClassVar[bool] = False
    equals_host: ClassVar[bool] = False

    def __init__(self, index: int | None) -> None:
        self.torch = torch.device(self.name) if index is None else torch.device(self.name, index)

    @property
    def label(self) -> str:
        """What it is, for people, as ``cuda:0``."""
        return str(self.torch)

    @property
    def product(self) -> str:
        """What is sold under that name, as ``NVIDIA H100 80GB HBM3``, or its type where torch knows of no names."""
        named = getattr(torch.get_device_module(self.torch), "get_device_name", None)
        return self.torch.type if named is None else str(named(self.torch))

    @classmethod
    @abstractmethod
    def count(cls) -> int:
        """How many there are that this process can use."""

    @abstractmethod
    def use(self) -> None:
        """Make it the calling thread's, and what Megatron's "cuda" means. Raises RuntimeError if it cannot be used."""

    @property
    @abstractmethod
    def generator(self) -> torch.Generator:
        """What draws that name no generator draw from there."""

    @abstractmethod
    def building(self) -> AbstractContextManager[None]:
        """Meanwhile Megatron builds models in host memory, so that their first weights are those of a CPU."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait until it has done all that it was told. Raises its fault, if it has one."""

    @abstractmethod
    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host, there; it may change afterwards, if it is not in pinned memory. Does not wait."""

    @abstractmethod
    def bring(self, tensors: Mapping[str, torch.Tensor]) -> Arrival:
        """Begin to bring tensors of the host there, beside what else it is told. Any thread may, and has it then."""

    @abstractmethod
    def room_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, which the device reads without a detour. Contents are arbitrary."""

    @abstractmethod
    def read(self, tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[np.float64]]:
        """What flat tensors hold, as float64, with one wait for all of them together."""

    @abstractmethod
    def memory(self) -> Memory:
        """Its memory."""

    @abstractmethod
    def is_fault(self, error: BaseException) -> bool:
        """Whether an error is of the device, and not of the program."""

    @abstractmethod
    def is_short(self, error: BaseException) -> bool:
        """Whether an error says that its memory was short, which it can get over."""

    def harm(self, fault: str) -> None:
        """Let a fault happen to it on purpose (``--elastic-inject device``). RuntimeError where that cannot be."""
        raise RuntimeError(f"nothing can happen to {self.name} on purpose, only to soft")

    @abstractmethod
    def settings(self, bitwise: bool) -> Mapping[str, Any]:
        """Fields of Megatron's configuration that this type of device wants; ``bitwise``: results are to be repeated
        bit for bit.
        """
