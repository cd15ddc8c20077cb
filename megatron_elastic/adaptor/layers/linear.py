"""``megatron.core.tensor_parallel.layers``: linear layers whose weights get their gradients later.

Megatron's backward of a linear layer computes the gradients of its input, its weight and its bias. Inside ``put_off``
the weight's is left out: a product that nothing else waits for, computed later from what the layer was given and the
gradient of what it made. It is the same product, so it has the same bits. An output layer that makes several
predictions has a product of each, which are added up in the order in which autograd does it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_elastic.adaptor import targets


class Due(Protocol):
    """Gradients of a layer that are due."""

    def add(self) -> None:
        """Compute them, and hand them to the layer's parameters as a backward pass does."""

    def kept(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The weight, and what is kept until then to compute its gradient."""


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """The gradient of a weight that is due: a product for each use of the layer. Implements ``Due``.

    Attributes:
        uses: what the layer was given, [..., in], with ``group`` the rank's part of the sequence; and the gradient of
            what it made, [tokens, out].
        group: over which the input has to be gathered.
    """

    weight: torch.nn.Parameter
    group: dist.ProcessGroup | None
    uses: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self) -> None:
        self.weight.backward(reduce(torch.add, (self._product(given, grad) for given, grad in self.uses)))

    def kept(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.weight, [tensor for use in self.uses for tensor in use]

    def _product(self, given: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        whole = given if self.group is None else _gather(given, self.group)
        return grad.t().matmul(_flat(whole))


_due: dict[torch.nn.Parameter, Any] | None = None
"""Where they are noted, by weight, while they are put off."""


def install() -> None:
    """Let linear layers be split. Idempotent."""
    targets.LINEAR_BACKWARD.wrap(_split)


@contextmanager
def put_off() -> Iterator[Collection[Due]]:
    """Meanwhile backward passes leave out weights' gradients; what has to be added for them is in the collection."""
    global _due
    _due = {}
    try:
        yield _due.values()
    finally:
        _due = None


def noted() -> dict[torch.nn.Parameter, Any] | None:
    """What is due so far, each in the form of its kind of layer; None if nothing is put off."""
    return _due


def _split(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        if _due is None:
            return original(ctx, grad_output)
        given, weight = ctx.saved_tensors
        grad_input, grad = grad_output.matmul(weight), _flat(grad_output)
        # What was saved may be a stand-in for the parameter (under hooks, as the meter's), good for this pass only.
        parameter = ctx.next_functions[1][0].variable
        group = ctx.tp_group if ctx.sequence_parallel else None
        _due.setdefault(parameter, WeightGradient(parameter, group)).uses.append((given, grad))
        if ctx.sequence_parallel:
            part = torch.empty_like(given)
            dist.reduce_scatter_tensor(part, grad_input, group=ctx.tp_group)
            grad_input = part
        elif ctx.allreduce_dgrad:
            dist.all_reduce(grad_input, group=ctx.tp_group)
        others = len(ctx.needs_input_grad) - 3  # releases differ in what else a layer takes
        return grad_input, None, grad.sum(dim=0) if ctx.use_bias else None, *[None] * others

    return backward


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
