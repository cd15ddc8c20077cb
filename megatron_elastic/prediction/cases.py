"""Cases: the layouts that the flags of ``megatron-elastic predict`` ask for."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import product

from megatron_elastic.config import UsageError
from megatron_elastic.plan.predict import Case


def refuse(options: argparse.Namespace, flags: Sequence[str], why: str) -> None:
    """Raise UsageError for the first of ``flags`` that is given."""
    for flag in flags:
        if getattr(options, flag):
            raise UsageError(f"--{flag.replace('_', '-')} {why}")


def cases_of(options: argparse.Namespace, per_node: int) -> list[Case]:
    """What is asked for, on nodes of ``per_node`` devices. Raises UsageError."""
    needed = {"--layers": options.layers, "--hidden": options.hidden, "--heads": options.heads, "--seq": options.seq,
              "--global-batch-size": options.global_batch_size}  # fmt: skip
    if missing := [name for name, value in needed.items() if value is None]:
        raise UsageError(f"{', '.join(missing)} must be given, or --check TABLE.csv; see --help")
    degrees = _degrees_of(options, per_node)
    return [
        Case(
            layers=options.layers, hidden=options.hidden, heads=options.heads, seq_length=options.seq,
            vocab_size=options.vocab, ffn=options.ffn, groups=options.groups, gated=options.swiglu, tp=tp, pp=pp, dp=dp,
            micro_batch=micro_batch, global_batch=options.global_batch_size, chunks=chunks,
            recompute=options.recompute == "full", overlap=options.overlap_grad_reduce,
            sharded=options.use_distributed_optimizer,
        )
        for tp, pp, dp in degrees
        for micro_batch, chunks in product(options.micro_batch_size, options.virtual_stages)
        if not (options.devices and chunks > 1 and pp == 1)
    ]  # fmt: skip


def _degrees_of(options: argparse.Namespace, per_node: int) -> Iterator[tuple[int, int, int]]:
    """TP, PP and DP: all combinations of what is given, or those that make ``--devices``."""
    if not options.devices:
        yield from product(options.tp or [1], options.pp or [1], options.dp or [1])
        return
    for count in options.devices:
        for tp in options.tp or range(1, min(per_node, options.heads) + 1):
            for pp in options.pp or range(1, min(count // tp, options.layers) + 1):
                dp, rest = divmod(count, tp * pp)
                if not rest and dp and (options.dp is None or dp in options.dp):
                    yield tp, pp, dp
