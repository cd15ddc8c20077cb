"""``megatron.core.pipeline_parallel.schedules``: losses over context-parallel ranks.

The loss of a micro-batch is the mean over all its tokens that count. Megatron takes the mean over those that a rank
has, and then the mean of these means, which is another number where ranks have different numbers of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

LossFunction = Callable[..., Any]
"""Megatron's: output -> (loss, tokens that count, what is reported), or without the second."""


def over_all_tokens(loss_function: LossFunction) -> LossFunction:
    """A loss function whose number of tokens is that of all context-parallel ranks; what it reports is its own."""
    return partial(_over_all_tokens, loss_function) if _size() > 1 else loss_function


def _over_all_tokens(loss_function: LossFunction, *args: Any, **kwargs: Any) -> Any:
    result = loss_function(*args, **kwargs)
    if not isinstance(result, tuple) or len(result) != 3:
        return result  # the share that a rank has in the mean, by Megatron's convention
    loss, tokens, reported = result
    return loss, add_up(tokens), reported


def add_up(number: torch.Tensor) -> torch.Tensor:
    """The sum over the context-parallel ranks."""
    total = number.clone()
    if _size() > 1:
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return total


def _size() -> int:
    size: int = parallel_state.get_context_parallel_world_size()
    return size
