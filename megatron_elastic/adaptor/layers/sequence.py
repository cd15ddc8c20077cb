"""``megatron.core.transformer.torch_norm``, ``core.distributed.finalize_model_grads``: sequence parallelism.

Between a stage's tensor-parallel layers each of a cell's ranks has its part of the sequence. Norms, and biases that are
added there, are the same on all of them, but their gradients are of that part only and must be added up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_elastic.adaptor import targets


def allow_torch_norms() -> None:
    """Let models with sequence parallelism have torch's norms, which Megatron has where Apex is not. Idempotent.

    Megatron refuses them because nobody marks their parameters for ``finalize_model_grads``; here they are marked.
    """
    targets.TORCH_NORM.wrap(_marked)


def _marked(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    def make(cls: type, config: TransformerConfig, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            setattr(parameter, MARK, config.sequence_parallel)
        return norm

    return make


MARK = "sequence_parallel"
"""Megatron's name for it, on parameters."""


def is_partial(name: str, parameter: torch.nn.Parameter, config: TransformerConfig) -> bool:
    """Whether each rank of a cell computes a part of this parameter's gradient, of which the sum is the gradient.

    Norms of queries and keys see the whole sequence, but only the rank's own heads. Those of latent attention come
    before there are heads; Megatron, which adds up what is whole already, has their gradients TP times.
    """
    of_heads = not config.multi_latent_attention and ("q_layernorm" in name or "k_layernorm" in name)
    return of_heads or (config.sequence_parallel and bool(getattr(parameter, MARK, False)))
