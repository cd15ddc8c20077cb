"""Ending: training ends before its last step, with a checkpoint, because a scheduler asks for that, or soon will.

Megatron's ``--exit-signal-handler`` and ``--exit-signal`` (``megatron/training/dist_signal_handler.py``), and its
``--exit-duration-in-mins``.
"""

from __future__ import annotations

import argparse
import signal
import time

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


class TimeLimit:
    """Whether the job has gone on for more than ``minutes``; never, without them (None).

    ``began``: when this process did (``time.time()``). Ranks come and go, so all go by the first that there was.
    """

    def __init__(self, minutes: float | None, began: float) -> None:
        self._seconds = 60 * minutes if minutes else None
        self.began = began

    def agree(self) -> None:
        """Let all ranks of the layout know when the job began, as some of them do. All of them call it."""
        if self._seconds is not None:
            told = torch.tensor([self.began], dtype=torch.float64)
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN)
            self.began = told.item()

    def over(self) -> bool:
        """Asked by all of them at the same time, as ``somebody``."""
        return self._seconds is not None and somebody(time.time() - self.began > self._seconds)


def somebody(says: bool) -> bool:
    """Whether one of the ranks says yes. All of them ask at the same time, so that all get the same answer."""
    answer = torch.tensor([int(says)])
    torch.distributed.all_reduce(answer, torch.distributed.ReduceOp.MAX)
    return bool(answer.item())
