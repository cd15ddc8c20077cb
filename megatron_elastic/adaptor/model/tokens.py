"""``megatron.core.distributed.finalize_model_grads``: what a token counts with ``--calculate-per-token-loss``.

Usually a step's loss is the mean over its micro-batches, each the mean over its own tokens. With the flag it is the
mean over all tokens that count, of which a micro-batch may have fewer than another; how many there are in all is known
when the last one is done. Here gradients are summed up as if all tokens counted, which is their order of magnitude, and
the vote finds how much that is too little.
"""

from __future__ import annotations

import argparse

import torch
from megatron.core.transformer import TransformerConfig


def of_sums(args: argparse.Namespace) -> bool:
    """Whether losses are sums over tokens."""
    return bool(getattr(args, "calculate_per_token_loss", False))


def install(args: argparse.Namespace, config: TransformerConfig) -> None:
    """Let a model's backward passes begin with a token's share of a micro-batch, if losses are sums."""
    if of_sums(args):
        whole = args.micro_batch_size * args.seq_length

        def share(loss: torch.Tensor) -> torch.Tensor:
            return loss / whole

        config.grad_scale_func = share


def weight(args: argparse.Namespace, tokens: int) -> float:
    """By how much the sums of gradients are too small, when ``tokens`` of the global batch counted."""
    return float(args.global_batch_size * args.seq_length / max(tokens, 1)) if of_sums(args) else 1.0
