"""``megatron.core.utils``, ``core.pipeline_parallel.schedules``: sequences and losses over context-parallel ranks.

Of 2 * CP chunks of every sequence a rank has two, one counted from the beginning and one from the end, so that under a
causal mask all have as much to do (``get_batch_on_this_cp_rank``).

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


def in_order(part: torch.Tensor) -> torch.Tensor:
    """What all ranks have of a sequence, each [sequence / CP, ...], in the sequence's order: [sequence, ...]."""
    size = _size()
    if size == 1:
        return part
    found = part.new_empty(size * len(part), *part.shape[1:])
    dist.all_gather_into_tensor(found, part.contiguous(), group=parallel_state.get_context_parallel_group())
    chunks = found.view(size, 2, len(part) // 2, *part.shape[1:])
    return torch.cat((chunks[:, 0], chunks[:, 1].flip(0))).flatten(0, 1)


def own(whole: torch.Tensor) -> torch.Tensor:
    """What this rank has of a sequence, [sequence, ...]."""
    return whole if _size() == 1 else torch.cat([whole[rows.start : rows.stop] for rows in own_rows(len(whole))])


def own_rows(length: int) -> tuple[range, ...]:
    """Where what this rank has is in a sequence of ``length`` tokens, chunk by chunk."""
    size = _size()
    return (range(length),) if size == 1 else chunks(length, size, parallel_state.get_context_parallel_rank())


def chunks(length: int, size: int, index: int) -> tuple[range, range]:
    """Where the two chunks of a rank, by its index, are in a sequence of ``length`` tokens."""
    chunk = length // (2 * size)
    first, second = index * chunk, (2 * size - 1 - index) * chunk
    return range(first, first + chunk), range(second, second + chunk)


def _size() -> int:
    size: int = parallel_state.get_context_parallel_world_size()
    return size
