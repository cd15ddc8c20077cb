"""``megatron.core.optimizer_param_scheduler``: the learning rate and weight decay as functions of the step.

Megatron's scheduler is advanced step by step and writes into an optimizer; a step that is redone must get the same
values, so it is asked for a step instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True)
class Rates:
    """What the scheduler says about one step."""

    lr: float
    weight_decay: float


class Schedule:
    """Megatron's scheduler, asked by step.

    ``build`` makes it for an optimizer, of which it reads and writes ``param_groups``.
    """

    def __init__(self, args: argparse.Namespace, build: Callable[[Any], Any]) -> None:
        self._batch = args.global_batch_size
        self._group: dict[str, Any] = {
            "params": [], "lr": args.lr, "max_lr": args.lr, "min_lr": args.min_lr,
            "weight_decay": args.weight_decay, "wd_mult": 1.0, "lr_mult": 1.0,
        }  # fmt: skip
        self._scheduler = build(SimpleNamespace(param_groups=[self._group]))

    def at(self, step: int) -> Rates:
        """Rates of step ``step`` (1-based): the scheduler's after ``step - 1`` global batches."""
        self._scheduler.num_steps = 0
        self._scheduler.step(increment=(step - 1) * self._batch)
        return Rates(lr=float(self._group["lr"]), weight_decay=float(self._group["weight_decay"]))
