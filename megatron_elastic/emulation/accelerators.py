"""Accelerators: figures as their makers or the press state them. What nobody states is an assumption, and said so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_elastic.plan.costs.exchange import Link
from megatron_elastic.plan.costs.power import PowerModel


@dataclass(frozen=True, slots=True)
class Figures:
    """One accelerator.

    Attributes:
        flops: a second, dense, in bf16.
        memory: bytes, and bytes a second.
        near: to others of its host.
        far: to other hosts: one network port for each device.
        clock_steps: assumed, as multiples of the clock at which the other figures hold.
        power: the limit is stated; a third of it is taken to be static, and what it draws when idle is assumed.
        per_host: devices of a host.
    """

    flops: float
    memory: int
    memory_bandwidth: float
    near: Link
    far: Link
    power: PowerModel
    clock_steps: tuple[float, ...] = tuple(step / 20 for step in range(12, 25))
    per_host: int = 8


_LATENCY_MS = 0.01
"""Of any link; assumed."""


def _figures(flops: float, memory: float, memory_bandwidth: float, near: float, far: float, limit: float,
             idle: float) -> Figures:
    return Figures(
        flops, int(memory), memory_bandwidth, Link(near, _LATENCY_MS), Link(far, _LATENCY_MS),
        PowerModel(idle_w=idle, static_w=round(limit / 3, 1), dynamic_w=round(limit * 2 / 3, 1)),
    )


ACCELERATORS: Mapping[str, Figures] = {
    # NVIDIA A100 80GB SXM: 312 TFLOPs, 2.039 TB/s, NVLink 600 GB/s both ways together, 400 W; 200 Gb/s InfiniBand.
    "a100": _figures(312e12, 80e9, 2.039e12, 300e9, 25e9, 400, 60),
    # NVIDIA H100 SXM: 989.4 TFLOPs without sparsity, 3.35 TB/s, NVLink 900 GB/s, 700 W; 400 Gb/s InfiniBand.
    "h100": _figures(989.4e12, 80e9, 3.35e12, 450e9, 50e9, 700, 80),
    # NVIDIA H200 SXM: as the H100, but 141 GB at 4.8 TB/s.
    "h200": _figures(989.4e12, 141e9, 4.8e12, 450e9, 50e9, 700, 80),
    # Huawei Ascend 910B3, by the press: 313 TFLOPs, 64 GB at 1.6 TB/s, HCCS 392 GB/s, 400 W; 200 Gb/s RoCE.
    "910b": _figures(313e12, 64e9, 1.6e12, 196e9, 25e9, 400, 90),
}
