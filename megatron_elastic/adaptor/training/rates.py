"""``megatron.core.optimizer_param_scheduler``: the learning rate and weight decay as functions of the step.

Megatron's scheduler is advanced step by step and writes into an optimizer; a step that is redone must get the same
values, so it is asked for a step instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.state.optimizer import Rates


class RatesByStep:
    """Megatron's scheduler, asked by step.

    ``build`` makes it for an optimizer, of which it reads and writes ``param_groups``.
    """

    def __init__(self, args: argparse.Namespace, build: Callable[[Any], Any], groups: ParameterGroups) -> None:
        self._batch = args.global_batch_size
        self._groups = groups.for_scheduler()
        self._scheduler = build(SimpleNamespace(param_groups=self._groups))

    def at(self, step: int) -> tuple[Rates, ...]:
        """Rates of all groups in step ``step`` (1-based): the scheduler's after ``step - 1`` global batches."""
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=(step - 1) * self._batch)
        return tuple(Rates(lr=float(group["lr"]), weight_decay=float(group["weight_decay"])) for group in self._groups)
