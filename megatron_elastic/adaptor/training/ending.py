"""Ending: training ends before its last step, with a checkpoint, because a scheduler asks for that.

Megatron's ``--exit-signal-handler`` and ``--exit-signal`` (``megatron/training/dist_signal_handler.py``).
"""

from __future__ import annotations

import argparse
import signal

import torch
import torch.distributed


class ExitSignal:
    """Whether this process has been sent ``args.exit_signal``; never, without ``args.exit_signal_handler``."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.listens: bool = args.exit_signal_handler
        self.received = False
        if self.listens:
            signal.signal(args.exit_signal, lambda number, frame: self._receive())

    def _receive(self) -> None:
        self.received = True


def somebody(says: bool) -> bool:
    """Whether one of the ranks says yes. All of them ask at the same time, so that all get the same answer."""
    answer = torch.tensor([int(says)])
    torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX)
    return bool(answer.item())
