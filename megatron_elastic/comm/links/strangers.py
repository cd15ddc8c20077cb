"""Strangers: frames of ranks whose address is not known yet, as those of a joiner that is faster than its letter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megatron_elastic.comm.host.mailbox import Frame

_LIMIT = 64 << 20
_FRAME = 256
"""Bytes that a frame takes besides its data."""


class Strangers:
    """Frames by who sent them.

    Args:
        rank: this rank, for messages of errors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._kept = 0
        self._frames: dict[int, list[Frame]] = defaultdict(list)

    def put(self, source: int, frame: Frame) -> None:
        """Keep a frame. Raises RuntimeError, naming its sender, when there is no room for it."""
        size = len(frame[-1]) + _FRAME
        if self._kept + size > _LIMIT:
            raise RuntimeError(
                f"rank {self._rank} dropped a frame from rank {source}, whose address it does not know: frames of "
                f"such ranks fill the {_LIMIT} bytes that they may take"
            )
        self._kept += size
        self._frames[source].append(frame)

    def take(self, source: int) -> Iterator[Frame]:
        """The frames of a rank, which are not kept any more."""
        frames = self._frames.pop(source, [])
        self._kept -= sum(len(frame[-1]) + _FRAME for frame in frames)
        return iter(frames)
