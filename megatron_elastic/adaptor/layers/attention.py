"""``megatron.core.transformer.dot_product_attention``: local attention for what Megatron leaves to Transformer Engine.

Contexts: keys and values are gathered in the order of the sequence (``context``), and Megatron's own attention computes
the rank's rows of the scores, for each of its two chunks up to where that one's mask ends. What these say about the
keys and values of others is added up in the backward pass, in float32 and in the order of the ranks.

Documents (``documents``): layers with a window look at what is both within it and in a token's document. Megatron's
softmax takes one mask, and makes that of the window in place of any other.

Latent attention: heads of values have another size than those of queries and keys. Megatron's attention computes with
any sizes, but takes only one when it is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers import context


def install(documents: bool = False) -> None:
    """Let local attention work over the context-parallel ranks, and for latent attention. Idempotent.

    ``documents``: whether the masks that it gets are those of documents, and not what it would make itself.
    """
    targets.ATTENTION.wrap(_constructing)
    targets.ATTEND.wrap(partial(_attending, documents))


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


def _attending(documents: bool, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def attend(
        self: DotProductAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        size = parallel_state.get_context_parallel_world_size()
        softmax = self.scale_mask_softmax
        window = softmax.window_size
        if size == 1 and not (documents and window):
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        if size > 1:
            both: torch.Tensor = _Gathered.apply(torch.cat((key, value), dim=-1))
            key, value = (part.contiguous() for part in both.split([key.shape[-1], value.shape[-1]], dim=-1))
        own = attention_mask if documents else None
        if own is None and not window and (attention_mask is not None or softmax.attn_mask_type != AttnMaskType.causal):
            return original(self, query, key, value, attention_mask, *args, **kwargs)
        # Whatever mask Megatron's softmax would make, it makes for all rows.
        softmax.window_size = None
        try:
            chunks = context.own_rows(len(key))
            beyond = [None] * len(chunks) if own is None else own.chunk(len(chunks), dim=2)
            made = []
            for rows, part, other_documents in zip(chunks, query.chunk(len(chunks)), beyond, strict=True):
                mask = _mask(rows, len(key), window, key.device)
                end = mask.shape[1]
                if other_documents is not None:
                    mask = mask | other_documents[..., :end]
                made.append(original(self, part, key[:end], value[:end], mask, *args, **kwargs))
            return torch.cat(made)
        finally:
            softmax.window_size = window

    return attend


@lru_cache(maxsize=4)  # two chunks, and layers with a window and without
def _mask(rows: range, length: int, window: tuple[int, int] | None, device: torch.device) -> torch.Tensor:
    """What tokens do not look at: what comes after them or, with a ``window``, is not within it.

    [rows, columns], without the columns at the end of ``length`` that none of them looks at. All layers have the same.
    """
    end = min(rows.stop + (window[1] if window else 0), length)
    columns = torch.arange(end, device=device)
    own = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    return columns > own if window is None else (columns < own - window[0]) | (columns > own + window[1])


class _Gathered(torch.autograd.Function):
    """Parts of all context-parallel ranks, [sequence / CP, ...], in the sequence's order, [sequence, ...]."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        return context.in_order(part)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (grad,), group = grads, parallel_state.get_context_parallel_group()
        size = group.size()
        chunks = grad.float().view(2 * size, -1, *grad.shape[1:])
        by_rank = torch.stack((chunks[:size], chunks[size:].flip(0)), dim=1).flatten(0, 2)
        part = by_rank.new_empty(len(grad) // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(part, by_rank, group=group)
        return part.to(grad.dtype)
