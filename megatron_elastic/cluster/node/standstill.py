"""Standstill: ways in which a process does not run that the kernel tells its parent nothing about."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_UNIFIED = _CGROUPS / "unified" if (_CGROUPS / "unified").is_dir() else _CGROUPS
"""Where version 2 is; beside version 1 it has a folder of its own."""


def standstill(pid: int) -> str | None:
    """What keeps a process from running, for people: a debugger, or a frozen cgroup (v1 or v2); None if it may run.

    A process that ended meanwhile, and a cgroup whose files cannot be read, count as running.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    if stat.rpartition(")")[2].split()[0] == "t":
        return "a debugger holds it"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "freezer" and _holds(_CGROUPS / "freezer" / group[1:] / "freezer.state", "FROZEN"):
            return f"its cgroup {group} is frozen"
        if not controllers and _holds(_UNIFIED / group[1:] / "cgroup.events", "frozen 1"):
            return f"its cgroup {group} is frozen"
    return None


def _holds(path: Path, line: str) -> bool:
    try:
        return line in path.read_text().splitlines()
    except OSError:
        return False
