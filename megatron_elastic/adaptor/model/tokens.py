"""``megatron.core.distributed.finalize_model_grads``: what a token counts with ``--calculate-per-token-loss``.

Usually a step's loss is the mean over its micro-batches, each the mean over its own tokens. With the flag it is the
mean over all tokens that count, of which a micro-batch may have fewer than another; how many there are in all is known
when the last one is done. Here gradients are summed up as if all tokens counted, which is their order of magnitude, and
the vote finds how much that is too little.
"""

from __future__ import annotations

import argparse


def of_sums(args: argparse.Namespace) -> bool:
    """Whether losses are sums over tokens."""
    return bool(getattr(args, "calculate_per_token_loss", False))


def of_a_grain(args: argparse.Namespace) -> int:
    """By how many tokens the gradients of a micro-batch are divided as they are summed up."""
    return int(args.micro_batch_size * args.seq_length) if of_sums(args) else 1


def weight(args: argparse.Namespace, samples: int, tokens: int) -> float:
    """By how much the sums of gradients are too small, when ``tokens`` of a batch of ``samples`` counted."""
    return float(samples * args.seq_length / max(tokens, 1)) if of_sums(args) else 1.0
