"""Common: what a checkpoint says besides tensors, with ``--elastic`` and without, as Megatron's loading wants it."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel

SAMPLES = "consumed_train_samples"
"""Megatron's name of how many samples the steps have taken."""
SHARDING = "fully_reshardable"
"""How Megatron calls an optimizer's state that lies in a checkpoint by parameter, so that any layout can load it."""
METADATA: dict[str, Any] = {
    "distrib_optim_sharding_type": SHARDING, "chained_optim_avoid_prefix": True, "singleton_local_shards": False,
    "distrib_optim_fully_reshardable_mem_efficient": False,
}  # fmt: skip
"""Megatron's description of what is in a checkpoint."""


def allow_enums() -> None:
    """Let torch read the flags in a checkpoint that a Python from 3.11.0 to 3.11.3 has written. Idempotent.

    These write a member of an enumeration as ``getattr(its class, its name)``, or a signal as a variable of ``signal``;
    torch wants to know what it may call or take.
    """
    signals: list[Any] = [(member, f"signal.{member.name}") for member in signal.Signals]
    torch.serialization.add_safe_globals([(_member, "builtins.getattr"), *signals])


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise TypeError(f"a checkpoint asks for {name} of {kind}, which is no enumeration")
    return kind[name]


def sharded(model: GPTModel) -> dict[str, Any]:
    """What a model is in a checkpoint: Megatron's sharded tensors, and factories of such, by parameter."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    entries: dict[str, Any] = model.sharded_state_dict(metadata={"dp_cp_group": group})
    return entries


def told(folder: Path) -> Mapping[str, Any]:
    """What a checkpoint says besides tensors."""
    found: Mapping[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
    return found


def iteration(told: Mapping[str, Any]) -> int:
    """Steps done."""
    return int(told["iteration"])


def updates(told: Mapping[str, Any], done: int) -> int:
    """Adam's step; ``done`` if the optimizer counts none.

    torch's Adam says it in each group of parameters with Megatron's distributed optimizer, and else beside the states.
    """
    optimizer = _first(told)
    inner = optimizer.get("optimizer", optimizer)
    steps = [group["step"] for group in inner.get("param_groups", ()) if group.get("step") is not None]
    steps += [step] if (step := inner.get("state", {}).get("common_step")) is not None else []
    return int(max(steps, default=done))


def _first(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of the optimizer; of the first where experts have one of their own."""
    optimizer = told.get("optimizer", {})
    first: Mapping[str, Any] = optimizer.get(0, optimizer)
    return first


def schedule(common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The state of Megatron's scheduler in a checkpoint; None if there is none."""
    found: Mapping[str, Any] | None = common.get("opt_param_scheduler")
    return found


def scheduled(common: Mapping[str, Any], samples: int) -> int:
    """How many samples of a checkpoint's steps the schedule counts; ``samples`` if it does not say."""
    return int((schedule(common) or {}).get("num_steps", samples))


def scaler(common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The state of the loss scaler in a checkpoint; None, or an empty one, if there is none."""
    found: Mapping[str, Any] | None = _first(common).get("grad_scaler")
    return found


def samples(common: Mapping[str, Any]) -> int | None:
    """How many samples a checkpoint's steps have taken; None if it does not say. Megatron-LM has it in its flags."""
    return common.get(SAMPLES, getattr(common.get("args"), SAMPLES, None))
