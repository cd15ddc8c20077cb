"""What a person asks of a running job, and the answer."""

from __future__ import annotations

from megatron_elastic.cluster.messages.common import Message
from megatron_elastic.observe.place import Growth


class Scale(Message, frozen=True):
    """Have so many pipeline ``stages``, and so many cells in each (its ``width``) or as many as ``ranks`` can form; or
    cells of another context- (``cp``) and expert-parallel size (``ep``), or tensor-parallel size (``tp``).

    What is None stays as it is.
    """

    stages: int | None = None
    width: int | None = None
    ranks: int | None = None
    cp: int | None = None
    ep: int | None = None
    tp: int | None = None


class Drain(Message, frozen=True):
    """Let the ranks of these nodes leave, all of them together or none."""

    node_ranks: tuple[int, ...]


class ReadRecords(Message, frozen=True):
    """Let see what is on record after so many bytes of ``metrics.jsonl`` and of ``events.jsonl``, and the layout if it
    is another one than that of ``epoch`` (-1: none is known). The answer is ``Shown``.
    """

    metrics: int
    events: int
    epoch: int


class ReadLog(Message, frozen=True):
    """Let see the end of a rank's log, as far as it is where records are. The answer is ``Answer``."""

    rank: int


class Shown(Message, frozen=True):
    """What was asked for."""

    growth: Growth


class Answer(Message, frozen=True):
    """Whether it will be, or was, done; ``text`` is for people."""

    ok: bool
    text: str
