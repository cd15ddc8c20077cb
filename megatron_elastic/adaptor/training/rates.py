"""``megatron.core.optimizer_param_scheduler``: the learning rate and weight decay as functions of the step.

Megatron's scheduler is advanced step by step and writes into an optimizer; a step that is redone must get the same
values, so it is asked for a step instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_elastic.adaptor.checkpoints.common import SHARDING
from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.state.optimizer import Rates


class RatesByStep:
    """Megatron's scheduler, asked by what it has counted: its steps are samples.

    ``build`` makes it for an optimizer, of which it reads and writes ``param_groups``.
    """

    def __init__(self, args: argparse.Namespace, build: Callable[[Any], Any], groups: ParameterGroups) -> None:
        self._signed = Rates(getattr(args, "moe_router_bias_update_rate", 0.0), 0.0)
        self._groups = groups.for_scheduler()
        self._scheduler = build(SimpleNamespace(param_groups=self._groups))

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
