"""Graph: pieces of work that wait for each other, and the longest chain of them, which determines how long all take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Edge(NamedTuple):
    """A piece of work begins ``lag`` after another one's end, at the earliest."""

    source: int
    lag: float
    kind: str = ""
    """What takes that long."""


@dataclass(frozen=True, slots=True)
class Node:
    """A piece of work. It begins when all that it is after is over."""

    kind: str
    took: float
    after: tuple[Edge, ...] = ()
    rank: int = -1
    text: str = ""


class Link(NamedTuple):
    """A part of the longest chain: a node, or the lag before it."""

    kind: str
    took: float
    node: int
    source: int | None = None
    """Of a lag: the node that it is counted from."""

    @property
    def lag(self) -> bool:
        """Whether it is one."""
        return self.source is not None


class Graph:
    """Nodes; each only after ones that come before it in the sequence. The first is where all begins."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)

    def ends(self, factors: Mapping[str, float] | None = None, rank: int | None = None) -> list[float]:
        """When each node ends. ``factors``: how many times as long what is of a kind takes; ``rank``: only there, and
        not what lies between nodes.
        """
        factors = factors or {}
        ends: list[float] = []
        for node in self.nodes:
            begins = max((ends[edge.source] + _lag(edge, factors, rank) for edge in node.after), default=0.0)
            takes = node.took * factors.get(node.kind, 1.0) if rank in (None, node.rank) else node.took
            ends.append(begins + takes)
        return ends

    def length(self, end: int, factors: Mapping[str, float] | None = None, rank: int | None = None) -> float:
        """How long it takes until a node ends (see ``ends``)."""
        return self.ends(factors, rank)[end]

    def critical(self, end: int) -> list[Link]:
        """The longest chain to a node, from the beginning. Its parts add up to the length."""
        ends, links, at = self.ends(), list[Link](), end
        while True:
            node = self.nodes[at]
            links.append(Link(node.kind, node.took, at))
            if not node.after:
                break
            edge = max(node.after, key=lambda edge: ends[edge.source] + edge.lag)
            if edge.lag:
                links.append(Link(edge.kind, edge.lag, at, edge.source))
            at = edge.source
        return [link for link in reversed(links) if link.took]


def shares(links: Sequence[Link]) -> dict[str, float]:
    """How much of a chain is of each kind, the most first."""
    total: dict[str, float] = defaultdict(float)
    for link in links:
        total[link.kind] += link.took
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _lag(edge: Edge, factors: Mapping[str, float], rank: int | None) -> float:
    return edge.lag * factors.get(edge.kind, 1.0) if rank is None else edge.lag
