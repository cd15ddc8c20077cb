"""Choice: which device a rank has: one of its own, or one that it shares with others where there are fewer."""

from __future__ import annotations

import os

import torch

from megatron_elastic.device import npu, stand_in, visible
from megatron_elastic.device.cpu import Cpu
from megatron_elastic.device.cuda import Cuda
from megatron_elastic.device.device import Device
from megatron_elastic.device.npu import Npu
from megatron_elastic.device.soft.device import Soft

_TYPES: dict[str, type[Device]] = {kind.name: kind for kind in (Cpu, Cuda, Npu, Soft)}


def choose(name: str | None, local_rank: int) -> Device:
    """The device of a rank, by its number on its machine. ``name``: of the type; None: what is there, or the CPU.

    Raises RuntimeError if there is none of this type.
    """
    os.environ.update(visible.own(os.environ, local_rank))
    kind = _TYPES[name or _there()]
    count = kind.count()
    if not count:
        raise RuntimeError(f"there is no device of type {kind.name} that torch can use")
    return kind(local_rank % count)


def _there() -> str:
    """The type of the devices that are there."""
    if npu.needed():
        return Npu.name
    return Cpu.name if stand_in.needed() or not torch.cuda.is_available() else Cuda.name
