"""``megatron.core.models.gpt``: layers that do not look beyond the document of a token, or the conversation.

Where documents end in a sample, says a mask that its data set makes (``--reset-attention-mask``). Megatron reads it
with the tokens, in the first and last stage of a pipeline; layers in the stages between get none, and look at
everything before a token. Where conversations end, a list of bounds says (``--sft``), which Megatron gives to
Transformer Engine's attention, in the same stages. Here every stage reads the samples of the grain that it computes,
bounds become masks, and each context-parallel rank has the rows of its own tokens. What rotary embeddings say depends
on distances, which are the same within a conversation wherever it begins.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_elastic.adaptor.layers import context

_BOUNDS = ("cu_seqlens", "max_seqlen")
_MASK = "conversations"
"""Of a sample: the mask that its bounds make. Scripts, which know nothing of it, leave it alone."""


def kept_apart(args: argparse.Namespace) -> bool:
    """Whether tokens look at those of their own document, or conversation, only."""
    return bool(getattr(args, "reset_attention_mask", False) or getattr(args, "sft", False))


def unpacked(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A sample with a mask in place of the bounds of its conversations, if it has some; others have others."""
    bounds = sample.get("cu_seqlens")
    if bounds is None:
        return sample
    at = torch.arange(len(sample["tokens"]), dtype=bounds.dtype)
    which = torch.searchsorted(bounds, at, right=True)
    mask = (which.unsqueeze(1) != which) | (at.unsqueeze(1) < at)
    return {**{name: value for name, value in sample.items() if name not in _BOUNDS}, _MASK: mask.unsqueeze(0)}


@contextmanager
def looked_at(model: GPTModel, batch: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Meanwhile a model's layers get the masks of a batch, [samples, 1, sequence, sequence], whoever asks.

    True is what a token does not look at. What is computed again in a backward pass, gets the same.
    """
    whole = batch[_MASK if _MASK in batch else "attention_mask"]
    mask = context.own(whole.movedim(2, 0)).movedim(0, 2)

    def look(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": mask}

    blocks = [model.decoder, *([model.mtp] if model.mtp_process else [])]
    hooks = [block.register_forward_pre_hook(look, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
