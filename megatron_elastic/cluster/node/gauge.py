"""Gauge: since when each of a node's ranks has come no further, as its agent sees it.

Time in which nothing could be seen does not count: the agent's own standstills, and what a rank's main thread waited
for a processor. So ranks that a busy machine keeps from running do not seem to hang.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_elastic.cluster.messages import Committed, RankReading
from megatron_elastic.faults.odometer import Odometers

_USUAL = 8
"""Steps whose durations say what is usual."""
_FEW = 3
"""Fewer say nothing."""


@dataclass(slots=True)
class _Mark:
    """Where a rank was when it was last seen to move."""

    moves: int
    since: float
    starved: float


class Gauge:
    """One node's.

    Args:
        slots: how many ranks it can have.
        every: seconds from one look to the next.
    """

    def __init__(self, slots: int, every: float) -> None:
        self.odometers = Odometers(slots)
        self._every = every
        self._marks: dict[int, _Mark] = {}
        self._looked = time.monotonic()
        self._steps: deque[tuple[int, float]] = deque(maxlen=_USUAL + 1)

    def look(self, pids: Mapping[int, int], slots: Mapping[int, int]) -> None:
        """Look at the ranks whose processes and slots are given. Must be called every so often."""
        now = time.monotonic()
        late = now - self._looked - self._every
        self._looked = now
        for rank in self._marks.keys() - pids.keys():
            del self._marks[rank]
        for rank, pid in pids.items():
            reading, mark = self.odometers.read(slots[rank]), self._marks.get(rank)
            moves = reading.moves + worked(pid, reading.worker)
            if mark is None or mark.moves != moves:
                self._marks[rank] = _Mark(moves, now, starved(pid))
            elif late > self._every:
                mark.since += late

    def committed(self, message: Committed) -> None:
        """A rank has finished a step."""
        if not self._steps or message.vote.step > self._steps[-1][0]:
            self._steps.append((message.vote.step, message.time))

    @property
    def usual(self) -> float | None:
        """Seconds that a step takes usually; None if that is not known yet."""
        times = [when for _, when in self._steps]
        durations = sorted(after - before for before, after in itertools.pairwise(times))
        return durations[len(durations) // 2] if len(durations) >= _FEW else None

    def readings(self, pids: Mapping[int, int], slots: Mapping[int, int]) -> list[RankReading]:
        """How far these ranks have come."""
        self.look(pids, slots)
        found = []
        for rank, pid in pids.items():
            mark, reading = self._marks[rank], self.odometers.read(slots[rank])
            stood = self._looked - mark.since - (starved(pid) - mark.starved)
            found.append(RankReading(
                rank=rank, stood=max(stood, 0.0), at=reading.point, step=reading.step, grain=reading.grain,
                waits=reading.waits, patient=reading.patient,
            ))  # fmt: skip
        return found


def worked(pid: int, thread: int) -> int:
    """Tenths of a second that a thread has had a processor, ever; 0 where the kernel does not say, or it has ended."""
    return _schedstat(pid, thread)[0] // 10**8 if thread else 0


def starved(pid: int) -> float:
    """Seconds that a process's main thread has waited for a processor, ever; 0 where the kernel does not say."""
    return _schedstat(pid, pid)[1] / 1e9


def _schedstat(pid: int, thread: int) -> tuple[int, int]:
    """Nanoseconds that a thread of a process has had a processor, and has waited for one."""
    try:
        ran, waited, *_ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        return int(ran), int(waited)
    except (OSError, ValueError):
        return 0, 0
