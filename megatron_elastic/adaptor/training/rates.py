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
from megatron_elastic.plan.ramp import Ramp
from megatron_elastic.state.optimizer import Rates


class RatesByStep:
    """Megatron's scheduler, asked by step.

    ``build`` makes it for an optimizer, of which it reads and writes ``param_groups``. ``ramp``: its steps are samples.
    """

    def __init__(
        self, args: argparse.Namespace, build: Callable[[Any], Any], groups: ParameterGroups, ramp: Ramp
    ) -> None:
        self._ramp = ramp
        self._signed = Rates(getattr(args, "moe_router_bias_update_rate", 0.0), 0.0)
        self._groups = groups.for_scheduler()
        self._scheduler = build(SimpleNamespace(param_groups=self._groups))

    def at(self, step: int, left_out: int = 0) -> tuple[Rates, ...]:
        """Rates of all groups in step ``step`` (1-based): the scheduler's after the samples of those before it, but for
        so many that are ``left_out``.

        The last is that of routers' biases (``SIGNED``), which no scheduler knows.
        """
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=self._ramp.before(step) - left_out)
        rates = (Rates(lr=float(group["lr"]), weight_decay=float(group["weight_decay"])) for group in self._groups)
        return *rates, self._signed

    def state(self, done: int, step: int, left_out: int) -> dict[str, Any]:
        """What Megatron's own optimizer and scheduler would save before ``step``, besides tensors: after ``done`` steps
        of the optimizer, and of samples but for those ``left_out``.
        """
        self.at(step, left_out)
        groups = [
            {**{name: value for name, value in group.items() if name != "params"}, "step": float(done)}
            for group in self._groups
        ]
        return {
            "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": SHARDING},
            "opt_param_scheduler": self._scheduler.state_dict(),
        }
