"""Processor: what kind this host has, as far as results may depend on it. Nothing here imports torch."""

from __future__ import annotations

import platform
from pathlib import Path

_VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
"""Flags in /proc/cpuinfo by which libraries choose what they compute with."""


def processor(root: Path = Path("/")) -> str:
    """Its name, and which vectors it has, for people. ``root``: where /proc is."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or fields.get("CPU part") or platform.machine()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return " ".join([name, *(f"+{vector}" for vector in _VECTORS if vector in flags)])
