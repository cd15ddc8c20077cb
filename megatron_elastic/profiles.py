"""Profiles: whether the file of ``--elastic-profile`` is one that the job can go by, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_elastic.config import MEASURED, ElasticConfig, UsageError
from megatron_elastic.plan import Costs, ProfileError
from megatron_elastic.plan.costs import memory

_FLAG = "--elastic-profile"


def check(config: ElasticConfig) -> None:
    """Raise UsageError unless the file is there and a profile, of whatever model. For the node that coordinates first;
    others read it if they take over.
    """
    if not config.elastic or (path := config.profile_file) is None:
        return
    costs = _read(path)
    if config.dvfs is not None and costs.power is None:
        raise UsageError(f'--elastic-dvfs: {_FLAG} {path} has no "power", without which clocks cannot be '
                         "planned; docs/planning.md says what it is")


def check_units(args: Any, world_size: int) -> None:
    """Raise UsageError unless the profile is of the model that flags (Megatron-LM's names and ``elastic_*``) make.

    Without the file, on a node that will not read it, there is nothing to look at.
    """
    path = args.elastic_profile
    if args.elastic and path not in (None, MEASURED) and Path(path).is_file():
        _read(path, memory.first_layout(args, world_size).units)


def _read(path: str, units: tuple[str, ...] | None = None) -> Costs:
    try:
        return Costs.read(Path(path), units)
    except ProfileError as error:
        raise UsageError(f"{_FLAG} {error}") from None
