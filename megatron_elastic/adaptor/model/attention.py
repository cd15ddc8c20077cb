"""``megatron.core.transformer.dot_product_attention``: local attention for what Megatron leaves to Transformer Engine.

Contexts: of 2 * CP chunks of every sequence a context-parallel rank has two, one counted from the beginning and one
from the end, so that under a causal mask all have as much to do (``get_batch_on_this_cp_rank``). Keys and values are
gathered in the order of the sequence, and Megatron's own attention computes the rank's rows of the scores. What these
say about the keys and values of others is added up in the backward pass, in float32 and in the order of the ranks.

Latent attention: heads of values have another size than those of queries and keys. Megatron's attention computes with
any sizes, but takes only one when it is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_elastic.adaptor import targets


def install() -> None:
    """Let local attention work over the context-parallel ranks, and for latent attention. Idempotent."""
    targets.ATTENTION.wrap(_constructing)
    targets.ATTEND.wrap(_attending)


def _constructing(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's can be had for a context-parallel size of 1 only, and for heads of one size."""

    def construct(
        self: DotProductAttention, config: Any, *args: Any, k_channels: int | None = None,
        v_channels: int | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *args, **kwargs)  # with latent attention the scale is given, which the size would say
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return construct


def _attending(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attend(
        self: DotProductAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        size = parallel_state.get_context_parallel_world_size()
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
