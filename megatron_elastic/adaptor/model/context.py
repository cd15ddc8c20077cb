"""``megatron.core.transformer.dot_product_attention``: attention over context-parallel ranks, and losses over them.

Of 2 * CP chunks of every sequence a context-parallel rank has two, one counted from the beginning and one from the end,
so that under a causal mask all have as much to do (``get_batch_on_this_cp_rank``). Megatron leaves attention over them
to Transformer Engine. Here keys and values are gathered in the order of the sequence, and Megatron's own attention
computes the rank's rows of the scores. What these say about the keys and values of others is added up in the backward
pass, in float32 and in the order of the ranks.

The loss of a micro-batch is the mean over all its tokens that count. Megatron takes the mean over those that a rank
has, and then the mean of these means, which is another number where ranks have different numbers of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_elastic.adaptor import targets

LossFunction = Callable[..., Any]
"""Megatron's: output -> (loss, tokens that count, what is reported), or without the second."""


def install() -> None:
    """Let local attention work over the context-parallel ranks. Idempotent."""
    targets.ATTENTION.wrap(_constructing)
    targets.ATTEND.wrap(_attending)


# ---- losses --------------------------------------------------------------------------------


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


# ---- attention -----------------------------------------------------------------------------


def _constructing(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's local attention can be had for a context-parallel size of 1 only."""

    def construct(self: DotProductAttention, config: Any, *args: Any, **kwargs: Any) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *args, **kwargs)
        self.config = config

    return construct


def _attending(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attend(
        self: DotProductAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        size = _size()
        if size == 1:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        softmax, rows = self.scale_mask_softmax, _rows(len(query), size, parallel_state.get_context_parallel_rank())
        both: torch.Tensor = _Gathered.apply(torch.cat((key, value), dim=-1))
        key, value = (part.contiguous() for part in both.split([key.shape[-1], value.shape[-1]], dim=-1))
        # As Megatron's softmax makes them, for the rows of this rank.
        window = softmax.window_size
        if window is not None or (attention_mask is None and softmax.attn_mask_type == AttnMaskType.causal):
            attention_mask = _mask(rows, len(key), window)
        softmax.window_size = None
        try:
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        finally:
            softmax.window_size = window

    return attend


def _rows(length: int, size: int, index: int) -> torch.Tensor:
    """Where in the sequence the ``length`` tokens of a rank are."""
    chunk = length // 2
    first, second = index * chunk, (2 * size - 1 - index) * chunk
    return torch.cat((torch.arange(first, first + chunk), torch.arange(second, second + chunk)))


def _mask(rows: torch.Tensor, length: int, window: tuple[int, int] | None) -> torch.Tensor:
    """What tokens do not look at, [rows, length]: what comes after them or, with a ``window``, is not within it."""
    ahead = torch.arange(length) - rows.unsqueeze(1)
    return ahead > 0 if window is None else (ahead < -window[0]) | (ahead > window[1])


class _Gathered(torch.autograd.Function):
    """Parts of all context-parallel ranks, [sequence / CP, ...], in the sequence's order, [sequence, ...]."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        group = parallel_state.get_context_parallel_group()
        found = part.new_empty(group.size() * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(found, part.contiguous(), group=group)
        chunks = found.view(group.size(), 2, len(part) // 2, *part.shape[1:])
        return torch.cat((chunks[:, 0], chunks[:, 1].flip(0))).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,), group = grads, parallel_state.get_context_parallel_group()
        size = group.size()
        chunks = grad.float().view(2 * size, -1, *grad.shape[1:])
        by_rank = torch.stack((chunks[:size], chunks[size:].flip(0)), dim=1).flatten(0, 2)
        part = by_rank.new_empty(len(grad) // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(part, by_rank, group=group)
        return part.to(grad.dtype)
