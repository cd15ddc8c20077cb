"""``megatron.core.timers``: timers of one rank, which talk to nobody and forgive an interruption."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed
from megatron.core import timers


class LocalTimer(timers.Timer):
    """A timer that may be started again after what it timed was interrupted."""

    def start(self, barrier: bool = False) -> None:
        """Start, anew if it runs."""
        self._started = False
        super().start()

    def stop(self, barrier: bool = False) -> None:
        """Stop, if it runs."""
        if self._started:
            super().stop()


_BEGINS = {"data": "forward-backward", "grad_sync": "all-grads-sync", "vote": None, "apply": "optimizer",
           "interrupt": None}  # fmt: skip
"""What Megatron calls the part of a step that begins at a hook point; None: what it has no name for."""


class PartTimers:
    """Timers of a step's parts (``--timing-log-level 1``), which observe hook points."""

    def __init__(self, all_timers: timers.Timers) -> None:
        self._timers = all_timers
        self._running: timers.TimerBase | None = None

    def __call__(self, point: str, step: int, grain: int | None) -> None:
        """The part before ends where another one begins."""
        if point not in _BEGINS:
            return
        self.end()
        if name := _BEGINS[point]:
            self._running = self._timers(name, log_level=1)
            self._running.start()

    def end(self) -> None:
        """End the part that is under way, if there is one."""
        if self._running is not None:
            self._running.stop()
            self._running = None


class LocalTimers(timers.Timers):
    """Megatron's timers; times that are logged are this rank's alone."""

    def __call__(self, name: str, log_level: int | None = None) -> timers.TimerBase:
        """The timer of this name, a new one if there is none yet."""
        timer = super().__call__(name, log_level)
        if type(timer) is timers.Timer:
            timer = self._timers[name] = LocalTimer(name)
        return timer

    def _get_elapsed_time_all_ranks(self, names: Sequence[str], reset: bool, barrier: bool) -> torch.Tensor | None:
        """[world size, names] in seconds, 0 for the other ranks, which Megatron leaves out of what it prints."""
        if not names:
            return None
        times = torch.zeros(torch.distributed.get_world_size(), len(names))
        for index, name in enumerate(names):
            if name in self._timers:
                times[torch.distributed.get_rank(), index] = self._timers[name].elapsed(reset=reset)
        return times
