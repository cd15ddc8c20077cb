"""``megatron.core.optimizer_param_scheduler``: the learning rate and weight decay as functions of the step.

Megatron's scheduler is advanced step by step and writes into an optimizer; a step that is redone must get the same
values, so it is asked for a step instead.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from megatron_elastic.adaptor.checkpoints.common import SHARDING
from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.config import UsageError
from megatron_elastic.state.optimizer import Rates

_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
"""Megatron's names of how a learning rate, or the weight decay, changes."""


class RatesByStep:
    """Megatron's scheduler, asked by what it has counted: its steps are samples.

    ``build`` makes it for an optimizer, of which it reads and writes ``param_groups``. Its values are those of flags,
    or of a checkpoint (``--use-checkpoint-opt_param-scheduler``), which only who was there at the start knows.
    """

    def __init__(self, args: argparse.Namespace, build: Callable[[Any], Any], groups: ParameterGroups) -> None:
        self._signed = Rates(getattr(args, "moe_router_bias_update_rate", 0.0), 0.0)
        self._parameter_groups = groups
        self._groups = groups.for_scheduler()
        self._scheduler = build(SimpleNamespace(param_groups=self._groups))
        self._follows_checkpoint: bool = self._scheduler.use_checkpoint_opt_param_scheduler
        self._known = not self._follows_checkpoint

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """The job begins with the state of a scheduler that a checkpoint has, or without one (None).

        Raises UsageError if flags lack what such a schedule needs besides.
        """
        self._known = True
        if saved is None or not self._follows_checkpoint:
            return
        if saved.get("lr_decay_style") == "WSD" and self._scheduler.wsd_decay_steps is None:
            raise UsageError("--use-checkpoint-opt_param-scheduler: the checkpoint's --lr-decay-style is WSD, and how "
                             "long that decays is not in it: add --lr-wsd-decay-iters, or --lr-wsd-decay-samples")
        self._take(saved)

    def agree(self) -> None:
        """Let all ranks of the layout know the values, as some of them do. All of them call it."""
        if not self._follows_checkpoint:
            return
        values = self._scheduler.state_dict()
        numbers = [_STYLES.index(value) if isinstance(value, str) else value for value in values.values()]
        told = torch.tensor(numbers if self._known else [-math.inf] * len(values), dtype=torch.float64)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        if not self._known:
            assert math.isfinite(told[0]), "nobody knows the schedule that the checkpoint has"
            self._take({name: _STYLES[int(number)] if isinstance(value, str) else number
                        for (name, value), number in zip(values.items(), told.tolist(), strict=True)})  # fmt: skip
        self._known = True

    def _take(self, saved: Mapping[str, Any]) -> None:
        """Take the values of a scheduler's state, for groups of parameters without their own as well."""
        self._scheduler.load_state_dict(saved)
        now = self._parameter_groups.for_scheduler(self._scheduler.max_lr, self._scheduler.min_lr)
        for group, taken in zip(self._groups, now, strict=True):
            group.update(taken)

    def at(self, counted: int) -> tuple[Rates, ...]:
        """Rates of all groups in a step before which so many samples were counted.

        The last is that of routers' biases (``SIGNED``), which no scheduler knows.
        """
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=counted)
        rates = (Rates(lr=float(group["lr"]), weight_decay=float(group["weight_decay"])) for group in self._groups)
        return *rates, self._signed

    def state(self, updates: int, counted: int, apart: bool) -> dict[str, Any]:
        """What Megatron's own optimizer and scheduler would save besides tensors: after so many ``updates`` of the
        optimizer, and so many samples ``counted``. ``apart``: experts have an optimizer of their own.
        """
        self.at(counted)
        usual, experts = (
            {"optimizer": {"param_groups": self._saved(updates, expert)}, "param_state_sharding_type": SHARDING}
            for expert in (False, True)
        )
        return {
            "optimizer": {0: usual, 1: experts} if apart else usual,
            "opt_param_scheduler": self._scheduler.state_dict(),
        }

    def _saved(self, updates: int, expert: bool) -> list[dict[str, Any]]:
        return [
            {**{name: value for name, value in group.items() if name != "params"}, "step": float(updates),
             "is_expert_parallel": expert}
            for group in self._groups
        ]  # fmt: skip
