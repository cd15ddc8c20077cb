"""Bound: no orders are faster than this, whatever they are."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megatron_elastic.pipeline.search.problem import BACKWARD, FORWARD, INPUT, WEIGHT, Problem


def lower_bound(problem: Problem) -> float:
    """Milliseconds that no orders within the memory can be below.

    Of each device, and of what it does at any of its positions and those behind: it cannot begin before the first grain
    has come there, and then has all that work to do. After the last of these forwards and inputs' gradients, which is
    one of the latter, that grain still has to go back to the beginning of the model, where weights' gradients come
    last. And what it keeps fills so much memory for so long: from a forward's beginning until the backward is over,
    which is not before the grain has been to the end of the model and back. Until the backward begins it is the input,
    where that can be all.
    """
    shares: list[list[_Share]] = [[] for _ in range(problem.devices)]
    for way, count in Counter(problem.route).items():
        alone = _Alone(problem, way)
        for position, device in enumerate(way):
            first, whole = alone.first[position], alone.whole[position]
            kept, late = problem.kept[position], problem.late[position]
            back = kept + (problem.again[position] if problem.again else 0.0)
            early = min(kept, problem.inlet[position]) if problem.inlet else kept
            shares[device].append(_Share(
                position, alone.before[position], alone.after[position], count * (alone.forward[position] + first),
                count * (alone.forward[position] + whole),
                count * (early * alone.until[position] + back * first + late * (whole - first)),
            ))  # fmt: skip
    return max(_of_device(each, room) for each, room in zip(shares, problem.room, strict=True) if each)


class _Share(NamedTuple):
    """What a device does at a position for the grains that come one way: times, and bytes times milliseconds."""

    position: int
    before: float
    after: float
    passes: float
    work: float
    filled: float


def _of_device(shares: list[_Share], room: float) -> float:
    begin = after = float("inf")
    passes = work = filled = bound = 0.0
    for share in sorted(shares, reverse=True):
        begin, after = min(begin, share.before), min(after, share.after)
        passes, work, filled = passes + share.passes, work + share.work, filled + share.filled
        full = (filled / room if room else float("inf")) if filled else 0.0
        bound = max(bound, begin + max(work, passes + after, full))
    return bound


class _Alone:
    """A grain that nothing holds up on its way; all by position.

    Attributes:
        forward: of a forward.
        first: until the input's gradient is there, at least.
        whole: until the weights' gradients are, too.
        before: until it comes there.
        until: from the beginning of its forward to that of its backward.
        after: from the end of its input's gradient to that of all its backward, at the beginning of the model.
    """

    def __init__(self, problem: Problem, way: tuple[int, ...]) -> None:
        count = problem.positions
        times = [problem.durations[device] for device in way]

        def ms(kind: int, position: int) -> float:
            return times[position][kind * count + position]

        links = [problem.link[at] if way[at] != way[at + 1] else 0.0 for at in range(count - 1)]
        self.forward = [ms(FORWARD, at) for at in range(count)]
        self.first = [min(ms(INPUT, at), ms(BACKWARD, at)) for at in range(count)]
        self.whole = [min(ms(INPUT, at) + ms(WEIGHT, at), ms(BACKWARD, at)) for at in range(count)]
        self.before = [0.0] * count
        for at in range(1, count):
            self.before[at] = self.before[at - 1] + self.forward[at - 1] + links[at - 1]
        self.after = [self.whole[0] - self.first[0]] * count
        for at in range(1, count):
            self.after[at] = self.after[at - 1] + self.first[at - 1] + links[at - 1]
        self.until = self.forward[:]
        for at in range(count - 2, -1, -1):
            self.until[at] += self.until[at + 1] + self.first[at + 1] + 2 * links[at]
