"""``megatron.core.transformer.moe.router``: auxiliary losses, and the bias of experts; who adds them up.

A router's bias (``--moe-router-enable-expert-bias``) moves by a fixed rate towards experts that got fewer tokens than
the mean, which Megatron counts in a buffer from forward to forward and adds up over its groups. Here it is a parameter
whose gradient is how many tokens more than the mean an expert got of a grain. These are summed up exactly, as all
gradients are, and their sign is what Megatron's bias moves by. So a bias has slices, replicas and a place like any
other state. It is float32 in any model, and so a unit of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers import measures, sequence
from megatron_elastic.plan.split import mtp_layers

_TOKEN = 2.0**-24
"""What a token more than the mean counts in a gradient: sums of many are within what can be summed up exactly."""


def install(by_token: bool) -> None:
    """Let routers note what their losses are, tell their biases what they choose, and look at whole micro-batches.

    ``by_token``: whether gradients are those of losses that are summed over tokens. Idempotent.
    """
    targets.ROUTER_LOSS.replace(_record if targets.ROUTER_LOSS.takes("needs_dp_avg") else _note)
    targets.AUXILIARY.replace(_OfAllTokens if by_token else MoEAuxLossAutoScaler)
    targets.SINKHORN.wrap(_over_all_tokens)
    targets.ROUTING.wrap(_counting)


class _OfAllTokens:
    """In place of ``MoEAuxLossAutoScaler`` in routers, with ``--calculate-per-token-loss``.

    So that an auxiliary loss is in proportion to a sum over tokens, Megatron multiplies it by the tokens that a rank
    has; but that sum is one over the tokens of all who share a micro-batch.
    """

    @staticmethod
    def apply(activation: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, loss * _sharers())
        return scaled


def _over_all_tokens(sinkhorn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let tokens be dealt out to experts over all that the ranks have of a micro-batch. Megatron's are a rank's own."""

    def deal(cost: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _sharers() == 1:
            return sinkhorn(cost, *args, **kwargs)
        group = parallel_state.get_tensor_and_context_parallel_group()
        whole = cost.new_empty(group.size() * len(cost), *cost.shape[1:])
        dist.all_gather_into_tensor(whole, cost.contiguous(), group=group)
        return sinkhorn(whole, *args, **kwargs).chunk(group.size())[group.rank()]

    return deal


def _sharers() -> int:
    """How many ranks have each a part of the tokens of a micro-batch."""
    size: int = parallel_state.get_tensor_and_context_parallel_world_size()
    return size


def is_bias(name: str) -> bool:
    """Whether a parameter is a router's bias of experts, by its name in Megatron's model."""
    return name.endswith("router.expert_bias")


@contextmanager
def biases_aside(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Make the biases of these models parameters, and keep them out of what is done to their parameters meanwhile."""
    routers = [module for model in models for module in model.modules()
               if isinstance(module, TopKRouter) and module.enable_expert_bias]
    biases = []
    for router in routers:
        if "expert_bias" in router._buffers:
            buffer = router._buffers.pop("expert_bias")
            assert buffer is not None
            bias = torch.nn.Parameter(buffer.float())
            setattr(bias, sequence.MARK, router.config.sequence_parallel)
            biases.append(bias)
        else:
            biases.append(router._parameters.pop("expert_bias"))
    yield
    for router, bias in zip(routers, biases, strict=True):
        router.expert_bias = bias


def _counting(routing: Callable[..., Any]) -> Callable[..., Any]:
    """Let a router tell its bias what it has chosen."""

    def route(self: TopKRouter, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, chosen = routing(self, logits, *args, **kwargs)
        if isinstance(self.expert_bias, torch.nn.Parameter) and self.training and torch.is_grad_enabled():
            tokens = chosen.sum(dim=0)
            probs = _Told.apply(probs, self.expert_bias, tokens * len(tokens) - tokens.sum())
        return probs, chosen

    return route


class _Told(torch.autograd.Function):
    """Its first argument, and the third as the gradient of the second."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, bias: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(more)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (more,) = ctx.saved_tensors
        return grads[0], more.float() * _TOKEN, None


def names(args: argparse.Namespace) -> tuple[str, ...]:
    """What the losses of a job are called, as in Megatron's log; none without experts.

    With ``--moe-per-layer-logging`` those of a layer have its number, from 1, behind a slash.
    """
    if not getattr(args, "num_experts", None):
        return ()
    kinds, balancing = [], args.moe_router_load_balancing_type
    if "aux_loss" in balancing:
        kinds.append("load_balancing_loss")
    if "seq_aux_loss" in balancing:
        kinds.append("seq_load_balancing_loss")
    if args.moe_z_loss_coeff is not None:
        kinds.append("z_loss")
    if not getattr(args, "moe_per_layer_logging", False):
        return tuple(kinds)
    layers = args.num_layers + mtp_layers(args)
    return tuple(f"{kind}/{layer}" for kind in kinds for layer in range(1, layers + 1))


def _note(
    name: str, loss: torch.Tensor, layer_number: int, num_layers: int, reduce_group: object = None,
    avg_group: object = None, reduce_group_has_dp: bool = False,
) -> None:
    """In place of ``save_to_aux_losses_tracker``. With a group the loss is the sum of what its members tell.

    Without one it is the mean over what those tell who have a part of the tokens; Megatron's log has what the first
    tensor-parallel rank tells.
    """
    measures.note(name, layer_number, loss if reduce_group is not None else loss / _sharers())


def _record(
    tracker: object, name: str, value: torch.Tensor, layer_number: int, num_layers: int, reduce_group: object = None,
    avg_group: object = None, needs_dp_avg: bool = True,
) -> None:  # fmt: skip
    """In place of ``MoEMetricsTracker.record`` (0.18), which is told the same."""
    _note(name, value, layer_number, num_layers, reduce_group)
