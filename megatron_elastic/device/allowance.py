"""Allowance: how much of its machine this process may use. In a container that is what its control groups allow.

A limit of a group counts for all groups below it. Where a container does not see its own path in the hierarchy, what is
mounted is its own group. Both versions of control groups are read, also side by side. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_V1_UNLIMITED = 1 << 60
"""Bytes; version 1 has no word for no limit, but a number near 2^63."""


class Limits(NamedTuple):
    """What control groups allow; None where they set no limit."""

    cores: float | None
    """Processors, as much time as so many have."""
    memory: int | None
    """Bytes."""
    processes: int | None
    """Processes and threads that may still be started, besides those that are there."""


def limits(root: Path = Path("/")) -> Limits:
    """Those of this process. ``root``: where /proc and /sys are."""
    own = _paths(root)
    return Limits(
        min((each for group in _groups(root, own, "cpu") if (each := _cores(group)) is not None), default=None),
        min((each for group in _groups(root, own, "memory") for each in _memory(group)), default=None),
        min((each for group in _groups(root, own, "pids") if (each := _processes(group)) is not None), default=None),
    )


def processes() -> int:
    """Processes and threads that this machine can have at a time."""
    return int(Path("/proc/sys/kernel/pid_max").read_text())


def cores() -> float:
    """Processors that this process may use, at least a part of one."""
    mine, allowed = float(len(os.sched_getaffinity(0))), limits().cores
    return mine if allowed is None else min(mine, allowed)


def memory() -> int:
    """Bytes of memory that this process may use, with others that share the limit."""
    machine, allowed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), limits().memory
    return machine if allowed is None else min(machine, allowed)


def crowded(ranks: int) -> bool:
    """Whether so many ranks of this host have less than a processor each."""
    return ranks > cores()


def _paths(root: Path) -> dict[str, str]:
    """Where this process is in the hierarchy of each controller of version 1, and, under "", of version 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {name: path for _, names, path in fields for name in names.split(",")}


def _groups(root: Path, own: dict[str, str], controller: str) -> Iterator[Path]:
    """Folders of the groups whose limits count, of both versions."""
    top = root / "sys/fs/cgroup"
    hierarchies = [(top / "unified" if (top / "unified").is_dir() else top, own.get("", "/"))]
    if controller in own:
        hierarchies.append((top / controller, own[controller]))
    for mounted, path in hierarchies:
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from (mounted.joinpath(*parts[:n]) for n in range(len(parts), -1, -1))


def _cores(group: Path) -> float | None:
    quota, period = _words(group / "cpu.max", 2) or (
        *_words(group / "cpu.cfs_quota_us", 1), *_words(group / "cpu.cfs_period_us", 1)) or ("max", "")
    return int(quota) / int(period) if quota.isdecimal() and int(period) > 0 else None


def _memory(group: Path) -> Iterator[int]:
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        for word in _words(group / name, 1):
            if word.isdecimal() and int(word) < _V1_UNLIMITED:
                yield int(word)


def _processes(group: Path) -> int | None:
    most, there = _words(group / "pids.max", 1), _words(group / "pids.current", 1)
    return max(int(most[0]) - int(there[0]), 0) if most and there and most[0].isdecimal() else None


def _words(path: Path, count: int) -> tuple[str, ...]:
    """Those of a file, if it is there and has so many."""
    try:
        words = tuple(path.read_text().split())
    except OSError:
        return ()
    return words if len(words) == count else ()
