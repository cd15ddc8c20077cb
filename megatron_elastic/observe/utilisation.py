"""Utilisation: what devices compute of a model a second, and which share that is of what they could."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

_PEAKS: Mapping[str, float] = {
    "V100-SXM2": 125e12, "V100-SXM3": 125e12, "V100-PCIE": 112e12, "A100": 312e12, "A800": 312e12,
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989.4e12, "H800": 989.4e12, "GH200": 989.4e12,
    "H200 NVL": 835e12, "H200": 989.4e12, "B200": 2250e12, "GB200": 2500e12,
    "MI300X": 1307.4e12, "MI325X": 1307.4e12, "Ascend910B3": 313e12,
}  # fmt: skip
"""Words of a device's name, as torch has it -> FLOP a second, dense, in bf16 (V100: fp16), by its maker's data sheet
(Ascend: by the press). The first ones that are found count."""


def peak_of(device: str) -> float | None:
    """FLOP a second in bf16 of a device with this name; None where no figure is known, and of a part of a GPU (MIG)."""
    if re.search(r"\bMIG\b", device):
        return None
    return next((peak for words, peak in _PEAKS.items() if re.search(rf"\b{words}\b", device)), None)


class Utilisation:
    """Figures of steps, from what ranks have told of their model and their devices in ``hello`` events."""

    def __init__(self, hellos: Iterable[Mapping[str, Any]] = ()) -> None:
        self.flops_per_token: float | None = None
        """Of the model, forward and backward; None where nobody has told, as where computing is emulated."""
        self.devices: set[str] = set()
        for hello in hellos:
            self.heard(hello)

    def heard(self, hello: Mapping[str, Any]) -> None:
        """A ``hello`` event."""
        self.flops_per_token = hello.get("flops_per_token") or self.flops_per_token
        if "device" in hello:
            self.devices.add(hello["device"])

    @property
    def peak(self) -> float | None:
        """FLOP a second that each device could do; None where that is not known, or not the same for all."""
        peaks = {peak_of(device) for device in self.devices}
        return peaks.pop() if len(peaks) == 1 else None

    def flops(self, record: Mapping[str, Any]) -> float | None:
        """Model FLOPs a second of all devices together in a step; ``record`` is its line of ``metrics.jsonl``."""
        return None if self.flops_per_token is None else float(self.flops_per_token * record["tokens_per_s"])

    def per_device(self, record: Mapping[str, Any]) -> float | None:
        """The same of one device: of those that trained."""
        flops = self.flops(record)
        return None if flops is None else flops / record["world_size"]

    def mfu(self, record: Mapping[str, Any]) -> float | None:
        """Model FLOPs utilisation in a step, from 0 to 1: the share of the devices' peak in bf16 (PaLM, arXiv
        2204.02311, appendix B).
        """
        each, peak = self.per_device(record), self.peak
        return None if each is None or peak is None else each / peak

    def usual(self, records: Iterable[Mapping[str, Any]]) -> tuple[float, float | None] | None:
        """Medians of ``per_device`` and ``mfu`` over steps; None where they are not known, or there are no steps."""
        each = [flops for record in records if (flops := self.per_device(record)) is not None]
        if not each:
            return None
        median = statistics.median(each)
        return median, None if self.peak is None else median / self.peak
