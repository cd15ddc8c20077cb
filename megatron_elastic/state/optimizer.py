"""Optimizer: how a step changes the state of a slice. Adam and SGD with momentum, as Megatron has them.

Elements that are treated alike form a *group*: whether weight decay applies, and which learning rate. All ranks know
the same groups in the same order. An optimizer is a value without state of its own; owner and replica do the same
update, so that they stay equal bit for bit. Adam consists of operations that are rounded once each: it gives the same
bits on every processor, however the elements are cut into slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_elastic.numerics import kernels

SIGNED = -1
"""The group of elements that move by the sign of their gradient alone, with the rate that is the last of all. They have
no part in the gradient's norm."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rate and weight decay of one group in one step."""

    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Update:
    """What one step's update needs besides the gradient; the same on every rank.

    ``factor`` multiplies the gradient. ``rates`` are the groups', from the scheduler. ``skipped``: some gradient was
    not finite, and the step changes nothing, as when Megatron's loss scaler finds that; but what moves by its sign
    alone moves. ``skips``: steps before this one that the optimizer does not count.
    """

    step: int
    factor: float
    rates: tuple[Rates, ...]
    skipped: bool = False
    skips: int = 0


class Optimizer(Protocol):
    """Updates flat float32 tensors in place."""

    @property
    def elementwise(self) -> bool:
        """Whether each element gets the same bits, however elements are cut into tensors."""
        ...

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the tensors that it keeps for each weight, as in torch's ``state_dict``; they begin with zeros."""
        ...

    def update(
        self, step: int, weights: torch.Tensor, grad: torch.Tensor, moments: Sequence[torch.Tensor], rates: Rates
    ) -> None:
        """Do step ``step`` (from 1) on some elements. All tensors are flat, float32 and of one size."""
        ...


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam. ``decoupled``: weight decay shrinks the weights (AdamW); otherwise it is added to the gradient.

    Not torch's fused one, which multiplies and adds in one operation where a processor can, but at the end of a tensor.
    """

    beta1: float
    beta2: float
    eps: float
    decoupled: bool = True

    @property
    def elementwise(self) -> bool:
        """Its operations are rounded once each."""
        return True

    @property
    def moments(self) -> tuple[str, ...]:
        """Both moments."""
        return "exp_avg", "exp_avg_sq"

    def update(
        self, step: int, weights: torch.Tensor, grad: torch.Tensor, moments: Sequence[torch.Tensor], rates: Rates
    ) -> None:
        """See ``Optimizer``."""
        numbers = kernels.AdamNumbers(
            shrink=1 - rates.lr * rates.weight_decay if self.decoupled else 1.0,
            decay=0.0 if self.decoupled else rates.weight_decay,
            keep=self.beta1, take=1 - self.beta1, keep_sq=self.beta2, take_sq=1 - self.beta2,
            unbias=(1 - self.beta2**step) ** -0.5, eps=self.eps, move=-rates.lr / (1 - self.beta1**step),
        )  # fmt: skip
        exp_avg, exp_avg_sq = moments
        kernels.adam(weights, grad, exp_avg, exp_avg_sq, numbers)


@dataclass(frozen=True, slots=True)
class Sgd:
    """SGD with momentum (no dampening, not Nesterov's); weight decay is added to the gradient."""

    momentum: float

    @property
    def elementwise(self) -> bool:
        """torch rounds what is left at a tensor's end otherwise."""
        return False

    @property
    def moments(self) -> tuple[str, ...]:
        """The momentum, if there is any."""
        return ("momentum_buffer",) if self.momentum else ()

    def update(
        self, step: int, weights: torch.Tensor, grad: torch.Tensor, moments: Sequence[torch.Tensor], rates: Rates
    ) -> None:
        """See ``Optimizer``."""
        # torch begins with the first gradient as momentum, which is what a momentum of zeros becomes, too.
        torch._fused_sgd_(
            [weights], [grad], list(moments), lr=rates.lr, momentum=self.momentum, weight_decay=rates.weight_decay,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
