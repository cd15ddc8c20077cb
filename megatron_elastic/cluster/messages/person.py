"""What a person asks of a running job, and the answer."""

from __future__ import annotations

from megatron_elastic.cluster.messages.common import Message


class Scale(Message, frozen=True):
    """Change the number of pipeline stages to ``stages``."""

    stages: int


class Drain(Message, frozen=True):
    """Let the ranks of a node leave."""

    node_rank: int


class Answer(Message, frozen=True):
    """Whether it will be done; ``text`` is for people."""

    ok: bool
    text: str
