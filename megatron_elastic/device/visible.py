"""Visible: how many accelerators of its machine a process may use, told without asking a driver, and without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

_CUDA = "CUDA_VISIBLE_DEVICES"
_MIG = "MIG-"


def count(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs of NVIDIA, else of AMD, else NPUs; as many as ``environment`` shows. ``root``: where /dev and /sys are."""
    named = shown(environment.get(_CUDA))
    parts = [name for name in named or () if name.startswith(_MIG)]
    if parts:
        return len(parts)
    amd = _at_most(_at_most(_amd(root), shown(environment.get("ROCR_VISIBLE_DEVICES"))),
                   shown(environment.get("HIP_VISIBLE_DEVICES")))
    npus = _at_most(_numbered(root / "dev", "davinci"), shown(environment.get("ASCEND_RT_VISIBLE_DEVICES")))
    return _at_most(_numbered(root / "dev", "nvidia"), named) or _at_most(amd, named) or npus


def own(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """What a rank changes in its environment before it starts a GPU: of parts of GPUs (MIG) a process sees one only."""
    parts = [name for name in shown(environment.get(_CUDA)) or () if name.startswith(_MIG)]
    return {_CUDA: parts[local_rank % len(parts)]} if len(parts) > 1 else {}


def shown(value: str | None) -> list[str] | None:
    """What a variable names, up to the first that is none, which hides all that follow; None: all are shown."""
    if value is None:
        return None
    found: list[str] = []
    for name in map(str.strip, value.split(",")):
        if not name or name.startswith("-"):
            break
        found.append(name)
    return found


def _at_most(there: int, names: Iterable[str] | None) -> int:
    return there if names is None else min(there, len(list(names)))


def _numbered(folder: Path, name: str) -> int:
    return sum(path.name.removeprefix(name).isdecimal() for path in folder.glob(f"{name}*"))


def _amd(root: Path) -> int:
    """Nodes of the driver's topology that compute as GPUs do; others are processors. What a container may not use is
    there, but cannot be read.
    """
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = (line.split() for path in nodes for line in _lines(path))
    return sum(words[0] == "simd_count" and int(words[1]) > 0 for words in lines if len(words) == 2)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
