"""Common: what a checkpoint says besides tensors, with ``--elastic`` and without, as Megatron's loading wants it."""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
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


def scheduled(common: Mapping[str, Any], samples: int) -> int:
    """How many samples of a checkpoint's steps the schedule counts; ``samples`` if it does not say."""
    return int(common.get("opt_param_scheduler", {}).get("num_steps", samples))


def scaler(common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The state of the loss scaler in a checkpoint; None, or an empty one, if there is none."""
    optimizer = common.get("optimizer", {})
    found: Mapping[str, Any] | None = optimizer.get("grad_scaler", optimizer.get(0, {}).get("grad_scaler"))
    return found


def samples(common: Mapping[str, Any]) -> int | None:
    """How many samples a checkpoint's steps have taken; None if it does not say. Megatron-LM has it in its flags."""
    return common.get(SAMPLES, getattr(common.get("args"), SAMPLES, None))
