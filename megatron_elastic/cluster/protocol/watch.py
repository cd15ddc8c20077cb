"""Watch: the time after which somebody looks whether a rank hangs (``protocol.hang``) begins anew with each step."""

from __future__ import annotations

from megatron_elastic.cluster.protocol.job import Watch
from megatron_elastic.cluster.protocol.turn import Turn

EARLY = 0.9
"""Part of a limit after which it is acted on: an agent looks now and then, and its answer takes a moment."""


def anew(turn: Turn) -> None:
    """A step has been committed, or training begins: nobody hangs for now."""
    turn.set(watch=Watch(freed=turn.job.watch.freed, circle=turn.job.watch.circle))
    turn.set_timer("hang", turn.job.settings.hang_timeout * EARLY)
