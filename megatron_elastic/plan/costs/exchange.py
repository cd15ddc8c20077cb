"""Exchange: what each rank sends and receives in a step besides activations, and how long that takes.

What ``state.reduction`` and ``state.replay`` do: who computes a unit sends its sums of each slice to the slice's owner,
which sends the mean to the holders of replicas, updates, and sends the weights to all that hold the unit. Links to the
own host and to others carry at the same time; what a rank sends shares them, and so does what it receives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_elastic.layout import Layout


@dataclass(frozen=True, slots=True)
class Link:
    """``bandwidth`` in each direction, in bytes a second."""

    bandwidth: float
    latency_ms: float

    def transfer_ms(self, size: float) -> float:
        """Time of ``size`` bytes."""
        return self.latency_ms + 1e3 * size / self.bandwidth


@dataclass(slots=True)
class Traffic:
    """Bytes of one rank: ``sent`` and ``received``, [0] within its host, [1] from and to others."""

    sent: list[float] = field(default_factory=lambda: [0.0, 0.0])
    received: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def ms(self, near: Link, far: Link) -> float:
        """How long that takes at least."""
        sizes = zip((near, far), map(max, self.sent, self.received), strict=True)
        return max((link.transfer_ms(size) for link, size in sizes if size), default=0.0)


@dataclass(slots=True)
class RankTraffic:
    """Of one rank in a step: gradients before the vote, and weights after it."""

    gradients: Traffic = field(default_factory=Traffic)
    weights: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True, slots=True)
class Phases:
    """Milliseconds of one rank or cell in a step: gradients to owners and replicas, before the vote; the update and
    weights to holders, after it.
    """

    reduce_ms: float
    spread_ms: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a job's exchange is like. Part of its costs.

    Attributes:
        sum_bytes, gradient_bytes, weight_bytes: of a parameter: as a sum on its way to the owner, as a mean on its way
            to replicas, and as a weight. ``UnitCost.parameter_bytes`` are those of sums and weights.
        near_bandwidth, near_latency_ms: of a link within a host; None: as between hosts.
        memory_bandwidth: of a device, by which an update is limited, in bytes a second; None: it takes no time.
        ranks_per_host: ranks whose numbers follow each other share a host; None: as the layout says.
    """

    sum_bytes: int
    gradient_bytes: int
    weight_bytes: int
    near_bandwidth: float | None = None
    near_latency_ms: float | None = None
    memory_bandwidth: float | None = None
    ranks_per_host: int | None = None

    def parameters(self, parameter_bytes: float) -> float:
        """Of a unit on one rank."""
        return parameter_bytes / (self.sum_bytes + self.weight_bytes)

    def scaled(self, by: float) -> Exchange:
        """The same with all times multiplied, and bandwidths divided."""
        near, latency, memory = self.near_bandwidth, self.near_latency_ms, self.memory_bandwidth
        return replace(
            self, near_bandwidth=None if near is None else near / by,
            near_latency_ms=None if latency is None else latency * by,
            memory_bandwidth=None if memory is None else memory / by,
        )  # fmt: skip

    def near(self, far: Link) -> Link:
        """The link within a host, given that between hosts."""
        return Link(
            far.bandwidth if self.near_bandwidth is None else self.near_bandwidth,
            far.latency_ms if self.near_latency_ms is None else self.near_latency_ms,
        )

    def host_of(self, layout: Layout, rank: int) -> int:
        """Index of the host that counts for a rank's links."""
        return layout.host_of(rank) if self.ranks_per_host is None else rank // self.ranks_per_host

    def traffic(self, layout: Layout, parameters: Sequence[float]) -> dict[int, RankTraffic]:
        """What each rank of ``layout`` sends and receives; ``parameters``: of each unit, on one rank."""
        found = {rank: RankTraffic() for rank in layout.ranks}
        hosts = {rank: self.host_of(layout, rank) for rank in layout.ranks}
        for unit, count in _alike(layout, parameters):
            each = count / layout.num_slices
            for part in range(layout.num_parts(unit)):
                owned = Counter(layout.owner(unit, k, part) for k in range(layout.num_slices))
                computing = [rank for cell in layout.contributors(unit) for rank in layout.sharing(cell, unit, part)]
                holding = [rank for cell in layout.holders(unit) for rank in layout.sharing(cell, unit, part)]
                to_owners = _Sides({rank: found[rank].gradients for rank in {*owned, *computing}}, hosts)
                to_owners.gather(computing, owned, each * self.sum_bytes)
                to_holders = _Sides({rank: found[rank].weights for rank in {*owned, *holding}}, hosts)
                to_holders.scatter(owned, holding, each * self.weight_bytes)
                for k in range(layout.num_slices):
                    owner = layout.owner(unit, k, part)
                    for copy in layout.copies(unit, k, part):
                        far = hosts[owner] != hosts[copy]
                        found[owner].gradients.sent[far] += each * self.gradient_bytes
                        found[copy].gradients.received[far] += each * self.gradient_bytes
        return found


def _alike(layout: Layout, parameters: Sequence[float]) -> Iterable[tuple[int, float]]:
    """One of all units whose slices are owned, copied and held by the same cells, with the parameters of them all."""
    totals: dict[object, tuple[int, float]] = {}
    for unit, count in enumerate(parameters):
        cells = (tuple(cell.leader for cell in of) for of in (layout.contributors(unit), layout.holders(unit)))
        key = layout.owners[unit], layout.replicas[unit], layout.num_parts(unit), *cells
        first, total = totals.get(key, (unit, 0.0))
        totals[key] = first, total + count
    return totals.values()


class _Sides:
    """All slices of a part of a unit on their way between owners and others, counted by host."""

    def __init__(self, of: Mapping[int, Traffic], hosts: Mapping[int, int]) -> None:
        self._of = of
        self._hosts = hosts

    def gather(self, others: Sequence[int], owned: Mapping[int, int], size: float) -> None:
        """Each of ``others`` sends ``size`` bytes of each slice to its owner."""
        for rank, near, far in self._counts(others, owned):
            self._of[rank].sent[0] += near * size
            self._of[rank].sent[1] += far * size
        for rank, near, far in self._counts(owned, Counter(others)):
            self._of[rank].received[0] += owned[rank] * near * size
            self._of[rank].received[1] += owned[rank] * far * size

    def scatter(self, owned: Mapping[int, int], others: Sequence[int], size: float) -> None:
        """Each owner sends ``size`` bytes of each of its slices to all ``others``."""
        for rank, near, far in self._counts(owned, Counter(others)):
            self._of[rank].sent[0] += owned[rank] * near * size
            self._of[rank].sent[1] += owned[rank] * far * size
        for rank, near, far in self._counts(others, owned):
            self._of[rank].received[0] += near * size
            self._of[rank].received[1] += far * size

    def _counts(self, ranks: Iterable[int], others: Mapping[int, int]) -> Iterable[tuple[int, int, int]]:
        """(rank, how many of ``others`` are on its host besides itself, and on other hosts)."""
        total, on_host = sum(others.values()), Counter[int]()
        for other, count in others.items():
            on_host[self._hosts[other]] += count
        for rank in ranks:
            here = on_host[self._hosts[rank]]
            yield rank, here - others.get(rank, 0), total - here
