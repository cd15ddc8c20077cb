"""Outgoing: one message to the ranks of many nodes, encoded once, or once for each layout that nodes have.

A layout of ten thousand ranks is a hundred kilobytes, and what a loss changes in it some hundred bytes. So a node that
was sent a layout is told the next one as the difference. What cells keep of a step is half as much, of which a node
needs what is about its own grains: it is told beside the message.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Decision, Invite, Plan, Relay, Resume, Start, ToRank
from megatron_elastic.cluster.protocol import Job
from megatron_elastic.cluster.protocol.salvage import Needed
from megatron_elastic.layout import Layout, difference

_encoder = msgspec.msgpack.Encoder()


class Outgoing:
    """A message on its way; ``job`` is as it was sent."""

    def __init__(self, message: ToRank, job: Job) -> None:
        self.leaves: Layout | None = None
        """The layout that a node has that was sent this message, if that says one."""
        self._message = message
        self._layout: Layout | None = None
        if isinstance(message, Invite | Plan | Decision):
            known = (job.layout, None if job.change is None else job.change.layout)
            self._layout = next((each for each in known if each is not None and each.epoch == message.epoch), None)
        if isinstance(message, Plan | Decision):
            self.leaves = self._layout
        elif isinstance(message, Start):
            self.leaves = job.layout
        self._needed: Needed | None = None
        if isinstance(message, Resume) and self._layout is not None:
            self._needed = Needed(self._layout, message.kept)
            self._message = replace(message, kept=[])
        self._encoded: dict[int, Relay] = {}
        """By the epoch of the layout that a node was sent last; -1: none that helps."""

    def to(self, ranks: Sequence[int], base: Layout | None) -> Relay:
        """For these ranks of a node that was sent ``base`` last."""
        epoch = -1 if base is None or self._layout is None else base.epoch
        if epoch not in self._encoded:
            self._encoded[epoch] = self._encode(base if epoch >= 0 else None)
        kept = [] if self._needed is None else self._needed.of(ranks)
        return replace(self._encoded[epoch], ranks=list(ranks), kept=kept)

    def _encode(self, base: Layout | None) -> Relay:
        message, told = self._message, None
        if base is not None and self._layout is not None:
            told = difference(base, self._layout)
        if told is not None:
            assert isinstance(message, Invite | Plan | Decision)
            message = replace(message, layout=told)
        return Relay(ranks=[], message=msgspec.Raw(_encoder.encode(message)), differs=told is not None)
