"""``megatron.core.transformer.multi_latent_attention``: the key that all heads share, over tensor-parallel ranks.

Each rank has some heads, and so a part of the gradient of the shared rotary key. Megatron never adds these parts up
where that key comes whole to each rank: with local layers, and with Transformer Engine's without sequence parallelism.
Here what makes the key hands it on so that they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_elastic.adaptor import targets


def install() -> None:
    """Let latent attention have the same gradients over any number of ranks. Idempotent."""
    targets.LATENT_ATTENTION.wrap(_constructing)


def _constructing(original: Callable[..., None]) -> Callable[..., None]:
    def construct(self: MLASelfAttention, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = self.config
        sizes = config.kv_lora_rank, config.qk_pos_emb_head_dim

        def hand_on(_: torch.nn.Module, given: Any, made: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
            """Latent keys and values and the rotary key, [sequence, ...], or with sequence parallelism its parts."""
            both, bias = made
            if parallel_state.get_tensor_model_parallel_world_size() == 1:
                return made
            if both.shape[-1] == sum(sizes):
                if config.sequence_parallel:
                    return made  # parts of the sequence, which Megatron gathers, and whose gradients it adds up
            else:
                both = gather_from_tensor_model_parallel_region(both)
                if config.sequence_parallel:
                    return scatter_to_sequence_parallel_region(both), bias
            latent, key = both.split(sizes, dim=-1)
            return torch.cat((latent, _Shared.apply(key)), dim=-1), bias

        self.linear_kv_down_proj.register_forward_hook(hand_on)

    return construct


class _Shared(torch.autograd.Function):
    """What all ranks have alike and use for different heads: its gradient is the sum of theirs.

    Megatron's own (``copy_to_tensor_model_parallel_region``) loses the sum if the gradient is not contiguous, as here.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].float().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total.to(grads[0].dtype)
