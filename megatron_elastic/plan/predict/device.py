"""Device: what one accelerator and the links around it can do, by the makers' figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_elastic.usage import is_amount


class DeviceError(Exception):
    """A device is not known or its figures cannot be read. The message says what is known or needed."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device in nodes of one kind.

    Attributes:
        name: as in ``DEVICES``, or of one's own.
        flops: peak of dense matrix products in bf16 or fp16, FLOP a second.
        memory_bytes: of one device.
        memory_bandwidth: of its memory, bytes a second.
        link_bandwidth: from one device to the others of its node, one way, bytes a second.
        link_latency: of one message inside a node, seconds.
        per_node: devices of a node.
        node_bandwidth: from a node to others, one way, all its adapters together, bytes a second.
        node_latency: of one message between nodes, seconds.
    """

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float = 5e-6
    per_node: int = 8
    node_bandwidth: float = 100e9
    node_latency: float = 15e-6

    @classmethod
    def named(cls, name: str) -> Device:
        """A known device, or one from a file of JSON that names one as ``like`` and says what is different.

        Raises DeviceError.
        """
        if name.lower() in DEVICES:
            return DEVICES[name.lower()]
        path = Path(name)
        if not path.is_file():
            raise DeviceError(
                f"device {name!r} is neither a file nor one of {', '.join(DEVICES)}: "
                'write {"like": "a100", "flops": ..., ...} to a file and give its path'
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DeviceError(f"{path}: not JSON: {error}") from None
        return cls.from_dict(data, path.stem)

    @classmethod
    def from_dict(cls, data: Any, name: str) -> Device:
        """From a JSON object: the fields of ``Device``, or ``like`` and those that differ. Raises DeviceError."""
        if not isinstance(data, Mapping):
            raise DeviceError(f"device {name!r} must be a JSON object, not {type(data).__name__}")
        figures = {str(key): value for key, value in data.items() if key not in ("like", "name")}
        known = [field.name for field in fields(cls)[1:]]
        if unknown := sorted(set(figures) - set(known)):
            raise DeviceError(f"device {name!r} has {unknown[0]!r}, which is none of like, name, {', '.join(known)}")
        for key, value in figures.items():
            if not (is_amount(value) and value):
                raise DeviceError(f"device {name!r} has {value!r} for {key!r}, but it must be a positive number")
            if key == "per_node" and value != int(value):
                raise DeviceError(f"device {name!r} has {value:g} for {key!r}, but it must be a whole number")
        name = str(data.get("name", name))
        if "like" in data:
            if not isinstance(data["like"], str) or data["like"] not in DEVICES:
                raise DeviceError(f"device {name!r} is like {data['like']!r}, which is none of {', '.join(DEVICES)}")
            return replace(DEVICES[data["like"]], name=name, **figures)
        try:
            return cls(name=name, **figures)
        except TypeError:
            needed = [key for key in known[:4] if key not in figures]
            raise DeviceError(f"device {name!r} lacks {', '.join(needed)}: add them, or a device it is like") from None


_GB = 1e9
DEVICES: Mapping[str, Device] = {
    "v100": Device("v100", 125e12, 32 * _GB, 900 * _GB, 150 * _GB, node_bandwidth=50 * _GB),
    "a100": Device("a100", 312e12, 40 * _GB, 1555 * _GB, 300 * _GB),
    "a100-80g": Device("a100-80g", 312e12, 80 * _GB, 2039 * _GB, 300 * _GB),
    "h100": Device("h100", 989e12, 80 * _GB, 3350 * _GB, 450 * _GB, node_bandwidth=400 * _GB),
    "h200": Device("h200", 989e12, 141 * _GB, 4800 * _GB, 450 * _GB, node_bandwidth=400 * _GB),
    "b200": Device("b200", 2250e12, 180 * _GB, 7700 * _GB, 900 * _GB, node_bandwidth=400 * _GB),
    "mi300x": Device("mi300x", 1307e12, 192 * _GB, 5300 * _GB, 448 * _GB, node_bandwidth=400 * _GB),
}
"""Known devices, by their makers' data sheets: SXM and OAM modules, nodes of eight. What joins nodes is a
choice: 800 Gbit/s a node of A100s, 400 of V100s, 400 a device of others."""
