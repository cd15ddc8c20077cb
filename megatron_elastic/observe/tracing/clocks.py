"""Clocks: how far those of hosts are apart, from messages between them.

A message arrives after it was sent. So messages from one host to another bound the offset of their clocks from one
side, and those that go back from the other. Of all offsets that no message contradicts, also over third hosts, the
middle is taken: it is wrong by half of the shortest round trip at most. Where every offset is contradicted, clocks run
at different rates: over a minute, or from one traced step to another a day later, that may be more than a message
takes. Then the rate is taken that leaves offsets the most room.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_MOST = 2e-4
"""By how much of itself a clock may be too fast or too slow; the worst crystals are so by half of that."""
_HALVINGS = 60


class Flight(NamedTuple):
    """A message: between which clocks, when it was sent by the one, and when it was there by the other."""

    source: str
    target: str
    sent: int
    arrived: int


class Rate(NamedTuple):
    """How much a clock gains or loses: ``drift`` of each nanosecond since ``since`` is to be added."""

    since: int = 0
    drift: float = 0.0

    def corrected(self, at: int) -> int:
        """What the clock would show if it ran like the first one, and was right at ``since``."""
        return at + round(self.drift * (at - self.since))


def rates(clocks: Sequence[str], flights: Sequence[Flight]) -> dict[str, Rate]:
    """Those of clocks beside the first one's; as that one's where no message says otherwise."""
    first, there, back = clocks[0], defaultdict[str, list[Flight]](list), defaultdict[str, list[Flight]](list)
    for flight in flights:
        if flight.source == first:
            there[flight.target].append(flight)
        elif flight.target == first:
            back[flight.source].append(flight)
    return {clock: _rate(there[clock], back[clock]) for clock in clocks}


def _rate(there: Sequence[Flight], back: Sequence[Flight]) -> Rate:
    """That of a clock, by messages to it from the first one, and from it."""
    # What is to be added to the clock is no more than these at these times, and no less than those.
    most = [(sent, arrived - sent) for _, _, sent, arrived in back]
    least = [(arrived, sent - arrived) for _, _, sent, arrived in there]
    if not most or not least:
        return Rate()
    since = min(most[0][0], least[0][0])

    def room(drift: float) -> float:
        return min(offset - drift * (at - since) for at, offset in most) - max(
            offset - drift * (at - since) for at, offset in least
        )

    if room(0.0) >= 0:
        return Rate()
    low, high = -_MOST, _MOST  # room is concave
    for _ in range(_HALVINGS):
        one, other = (2 * low + high) / 3, (low + 2 * high) / 3
        low, high = (one, high) if room(one) < room(other) else (low, other)
    drift = (low + high) / 2
    return Rate(since, drift) if room(drift) >= 0 else Rate()


def shortest_of(flights: Iterable[Flight], rates: Mapping[str, Rate]) -> dict[tuple[str, str], int]:
    """For (from, to) of clocks the shortest time that a message took, by them as they would be at one rate."""
    shortest: dict[tuple[str, str], int] = {}
    for each in flights:
        took = rates[each.target].corrected(each.arrived) - rates[each.source].corrected(each.sent)
        pair = each.source, each.target
        shortest[pair] = min(shortest.get(pair, took), took)
    return shortest


def align(hosts: Sequence[str], shortest: Mapping[tuple[str, str], int], guess: Mapping[str, int]) -> dict[str, int]:
    """What must be added to each host's clock to get the common one: that of the first host, and its ``guess``.

    ``shortest``: for (from, to) the shortest time from a message's being sent, by the clock there, to its arrival, by
    the other clock; negative if clocks are. ``guess``: for hosts that no messages connect both ways with the first, or
    whose messages contradict each other, because a clock was set meanwhile. Where those of third hosts contradict them,
    because rates are not known exactly, only those to and from the first count.
    """
    numbers = {host: number for number, host in enumerate(hosts)}
    direct = np.full((len(hosts), len(hosts)), math.inf)
    for (source, target), took in shortest.items():
        direct[numbers[source], numbers[target]] = took
    np.fill_diagonal(direct, 0)
    apart = direct.copy()
    for via in range(len(hosts)):
        np.minimum(apart, apart[:, via, None] + apart[via], out=apart)
    if apart.diagonal().min() < 0:
        apart = direct
    offsets = {}
    for host in hosts:
        # offset(a) - offset(b) <= apart[a, b]: both ends of this range fulfil all of these, and so does their middle.
        low, high = -float(apart[0, numbers[host]]), float(apart[numbers[host], 0])
        known = math.isfinite(low) and math.isfinite(high) and low <= high
        offsets[host] = guess[hosts[0]] + round((low + high) / 2) if known else guess[host]
    return offsets
