"""Devices: which device of an actuator is whose rank's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from megatron_elastic.device import visible
from megatron_elastic.power.actuator import Actuator
from megatron_elastic.power.cpufreq import Cpufreq
from megatron_elastic.power.emulated import Emulated
from megatron_elastic.power.nvidia import Nvidia
from megatron_elastic.power.quota import GROUPS, Quota

FOLDER = "clocks"
"""In a run's directory: the clocks of emulated devices, a file for each rank, named by its number."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: its number, its number on its node, and its process."""

    rank: int
    local_rank: int
    pid: int


def actuators() -> tuple[Actuator, ...]:
    """One of each kind."""
    return Emulated(), Nvidia(), Cpufreq(), Quota()


def devices(name: str, run_dir: Path, places: list[Place]) -> dict[int, str]:
    """[rank] = its device, for the actuator ``name``; a rank whose process is gone has none any more. Raises OSError if
    that is not known, or not its own.
    """
    found = {}
    for place in places:
        with contextlib.suppress(ProcessLookupError):
            found[place.rank] = _NAMED[name](run_dir, place)
    for one, other in combinations(found, 2):
        if shared := {*found[one].split(",")}.intersection(found[other].split(",")):
            raise OSError(f"ranks {one} and {other} share {', '.join(sorted(shared))}: each needs a device of its own")
    return found


def _emulated(run_dir: Path, place: Place) -> str:
    return str(run_dir / FOLDER / str(place.rank))


def _gpu(run_dir: Path, place: Place) -> str:
    """What NVML knows a GPU by: its index, or its UUID if that is what is named. Clocks are those of whole GPUs."""
    names = visible.shown(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if names is None:
        return str(place.local_rank)
    name = names[place.local_rank] if place.local_rank < len(names) else ""
    if not (name.isdecimal() or name.startswith("GPU-")):
        raise OSError(f"CUDA_VISIBLE_DEVICES={','.join(names)} does not say which GPU is local rank "
                      f"{place.local_rank}'s")
    return name


def _processors(run_dir: Path, place: Place) -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(place.pid))))


def _group(run_dir: Path, place: Place) -> str:
    """The control group that says what a process may have of processors; of either version."""
    try:
        lines = [line.split(":", 2) for line in Path(f"/proc/{place.pid}/cgroup").read_text().splitlines()]
    except FileNotFoundError as error:
        raise ProcessLookupError(*error.args) from None
    for _, controllers, path in lines:
        if "cpu" in controllers.split(","):
            return str(GROUPS / "cpu" / path.lstrip("/"))
    for _, controllers, path in lines:
        if not controllers:
            return str(GROUPS / path.lstrip("/"))
    raise OSError(f"rank {place.rank} is in no control group")


_NAMED: Mapping[str, Callable[[Path, Place], str]] = {
    Emulated.name: _emulated, Nvidia.name: _gpu, Cpufreq.name: _processors, Quota.name: _group,
}
NAMES = tuple(_NAMED)
"""Of all actuators."""
