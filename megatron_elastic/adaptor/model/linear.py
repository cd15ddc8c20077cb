"""``megatron.core.tensor_parallel.layers``: linear layers whose weights get their gradients later.

Megatron's backward of a linear layer computes the gradients of its input, its weight and its bias. Inside ``put_off``
the weight's is left out: a product that nothing else waits for, computed later from what the layer was given and the
gradient of what it made. It is the same product, so it has the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.adaptor import targets


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """A product that is due.

    Attributes:
        input: what the layer was given, [..., in]; with ``group`` the rank's part of the sequence.
        grad: the gradient of what the layer made, [tokens, out].
        group: over which the input has to be gathered.
    """

    weight: torch.nn.Parameter
    input: torch.Tensor
    grad: torch.Tensor
    group: dist.ProcessGroup | None

    def add(self) -> None:
        """Compute it, and hand it to the weight as a backward pass does."""
        whole = self.input if self.group is None else _gather(self.input, self.group)
        self.weight.backward(self.grad.t().matmul(_flat(whole)))


_due: list[WeightGradient] | None = None
"""Where they are noted while they are put off."""


def install() -> None:
    """Let linear layers be split. Idempotent."""
    targets.LINEAR_BACKWARD.wrap(_split)


@contextmanager
def put_off() -> Iterator[list[WeightGradient]]:
    """Meanwhile backward passes leave out weights' gradients; what has to be added for them is in the list."""
    global _due
    _due = []
    try:
        yield _due
    finally:
        _due = None


def _split(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        if _due is None:
            return original(ctx, grad_output)
        given, weight = ctx.saved_tensors
        grad_input, grad = grad_output.matmul(weight), _flat(grad_output)
        # What was saved may be a stand-in for the parameter (under hooks, as the meter's), good for this pass only.
        parameter = ctx.next_functions[1][0].variable
        _due.append(WeightGradient(parameter, given, grad, ctx.tp_group if ctx.sequence_parallel else None))
        if ctx.sequence_parallel:
            part = torch.empty_like(given)
            dist.reduce_scatter_tensor(part, grad_input, group=ctx.tp_group)
            grad_input = part
        elif ctx.allreduce_dgrad:
            dist.all_reduce(grad_input, group=ctx.tp_group)
        return grad_input, None, grad.sum(dim=0) if ctx.use_bias else None, *[None] * 6

    return backward


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1, tensor.shape[-1])


def _gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
