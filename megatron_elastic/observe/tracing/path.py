"""Path: what determined how long a step took, from its traces, and what would bring how much.

The step becomes a graph (``graph``): what each rank did between two points where it waits, sends, or begins with
something else is a node; it comes after what the rank did before, and after the messages that it waited for. A message
that was waited for took from when it was sent until the wait was over; of one that was there before nobody knows, and
it is taken to be as fast as is usual for its kind. So with nothing changed the graph takes as long as the step did.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import NamedTuple

from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.tracing.entries import MAIN, Phase, Wait
from megatron_elastic.observe.tracing.graph import Edge, Graph, Link, Node
from megatron_elastic.observe.tracing.reading import RankTrace, Section, Traces, answer
from megatron_elastic.observe.tracing.tracer import BETWEEN

EARLIER, BESIDE = "earlier step", "beside"
"""Lags of no message: until a rank comes to the step, and between what it does and what goes on beside that."""
_OTHERS = {-1: "coordinator", -2: "disk"}
"""Who is waited for besides ranks (``faults.odometer``)."""


class StepGraph(NamedTuple):
    """A step as a graph."""

    step: int
    rank: int
    """Whose commit ends it: the first that has the whole step."""
    graph: Graph
    end: int
    elapsed: int
    """Nanoseconds, from commit to commit, as measured."""

    @property
    def links(self) -> list[Link]:
        """What determined it."""
        return self.graph.critical(self.end)


@dataclass(slots=True, eq=False)
class _Draft:
    """A node while the graph is made."""

    kind: str
    rank: int
    took: int
    ended: int
    text: str = ""
    after: list[tuple[_Draft, int, str]] = field(default_factory=list)


_Lane = tuple[int, int]
"""Rank, and lane of it."""
_Cut = tuple[int, Phase | Wait | None]
"""When, and what begins."""


class _Maker:
    def __init__(self, traces: Traces, sections: Mapping[int, Section], rank: int) -> None:
        self.traces = traces
        self.sections = sections
        self.base = sections[rank].begun
        self.senders = traces.senders()
        self.start = _Draft("start", -1, 0, self.base)
        self.drafts: list[_Draft] = [self.start]
        self.lanes: dict[_Lane, list[_Draft]] = {}
        """Nodes in their order."""
        self.waits: list[tuple[_Draft, Wait, int]] = []
        self.usual: dict[str, int] = {}

    def make(self, rank: int, step: int) -> StepGraph:
        for each, section in self.sections.items():
            trace = self.traces.ranks[each]
            cuts = _cuts(trace, section)
            for lane in (MAIN, *trace.begun):
                self._lay(trace, lane, section, cuts.get(lane, ()))
        self._learn()
        for draft, wait, each in self.waits:
            self._join(draft, wait, each)
        end = self.lanes[rank, MAIN][-1]
        before = {draft: [source for source, _, _ in draft.after] for draft in self.drafts}
        order = list(TopologicalSorter(before).static_order())
        at = {draft: index for index, draft in enumerate(order)}
        nodes = [
            Node(
                draft.kind, draft.took, tuple(Edge(at[source], lag, kind) for source, lag, kind in draft.after),
                draft.rank, draft.text,
            )
            for draft in order
        ]  # fmt: skip
        return StepGraph(step, rank, Graph(nodes), at[end], self.sections[rank].ended - self.base)

    # ---- what a lane does, one after the other ----------------------------------------------

    def _lay(self, trace: RankTrace, lane: int, section: Section, cuts: Sequence[_Cut]) -> None:
        """Make the nodes of a lane, from cut to cut; waits are nodes that take no time, for now."""
        if lane == MAIN:
            begun, ended = section.begun, section.ended
        else:
            begun, ended = max(trace.begun[lane].at, section.begun), trace.ended.get(lane, section.ended)
        if ended <= begun or begun >= section.ended:
            return
        nodes = self.lanes[trace.rank, lane] = []
        origin: _Draft | None = None
        if lane != MAIN and trace.begun[lane].at > section.begun:
            origin = self.at(trace.rank, trace.begun[lane].out_of, begun)
        previous = (
            (self.start, begun - self.base, EARLIER) if origin is None else (origin, begun - origin.ended, BESIDE)
        )
        cursor, text = begun, ""
        kind = BETWEEN if lane == MAIN else trace.begun[lane].name

        def put(until: int, wait: Wait | None = None) -> None:
            nonlocal previous, cursor
            until = min(max(until, cursor), ended)
            if wait is None and until == cursor and nodes:
                return
            took = 0 if wait is not None else until - cursor
            draft = _Draft(kind, trace.rank, took, until, text, [previous])
            nodes.append(draft)
            self.drafts.append(draft)
            if wait is not None:
                self.waits.append((draft, wait, trace.rank))
            previous, cursor = (draft, 0, ""), until

        for at, what in cuts:
            if isinstance(what, Wait):
                put(what.begun)
                put(what.ended, what)
                continue
            put(at)
            if isinstance(what, Phase):
                kind, text = what.name, "" if what.grain is None else f"grain {what.grain}"
        put(ended)

    def at(self, rank: int, lane: int, when: int) -> _Draft | None:
        """The last node of a lane that had ended by then; None if the lane had not begun."""
        nodes = self.lanes.get((rank, lane), [])
        low, high = 0, len(nodes)
        while low < high:
            middle = (low + high) // 2
            if nodes[middle].ended <= when:
                low = middle + 1
            else:
                high = middle
        return nodes[low - 1] if low else None

    # ---- who waits for whom -----------------------------------------------------------------

    def _sources(self, wait: Wait, rank: int) -> Iterator[tuple[_Draft, int, str, bool]]:
        """(node, its end, kind of what lies between, whether it may have come last) of what was waited for."""
        for tag in wait.tags:
            found = answer(self.senders, rank, tag, wait.ended)
            if found is not None:
                source = self.at(found[0], found[1].lane, found[1].at)
                kind = self.traces.ranks[rank].channel(tag)
                yield source or self.start, found[1].at, kind, tag in wait.last_tags
        for lane in wait.lanes:
            if (rank, lane) in self.lanes:
                nodes = self.lanes[rank, lane]
                if nodes[-1].ended <= wait.ended:
                    yield nodes[-1], nodes[-1].ended, BESIDE, lane in wait.last_lanes

    def _learn(self) -> None:
        """How long messages of each channel usually take that somebody waits for."""
        took: dict[str, list[int]] = defaultdict(list)
        for _, wait, rank in self.waits:
            last = max((each for each in self._sources(wait, rank) if each[3]), key=lambda each: each[1], default=None)
            if last is not None:
                took[last[2]].append(wait.ended - last[1])
        self.usual = {kind: round(statistics.median(each)) for kind, each in took.items()}

    def _join(self, draft: _Draft, wait: Wait, rank: int) -> None:
        """Let a wait end when it did."""
        sources = list(self._sources(wait, rank))
        last = max((each for each in sources if each[3]), key=lambda each: each[1], default=None)
        for source, at, kind, _ in sources:
            lag = wait.ended - at
            if last is None or at != last[1]:
                lag = min(lag, self.usual.get(kind, 0))
            draft.after.append((source, lag + at - source.ended, kind))
        begins = max(source.ended + lag for source, lag, _ in draft.after)
        if last is None and draft.ended > begins:  # for something that sends no messages, in vain, or for who told none
            draft.took = draft.ended - begins
            draft.kind = _OTHERS.get(wait.whom[0], "waiting") if wait.whom else "waiting"


def _cuts(trace: RankTrace, section: Section) -> dict[int, list[_Cut]]:
    """Where nodes of each lane end, in the order of time: a phase or a wait begins, or nothing of note."""
    found: dict[int, list[_Cut]] = defaultdict(list)
    for phase in trace.phases:
        found[MAIN].append((phase.at, phase))
    for wait in trace.waits:
        found[wait.lane].append((max(wait.begun, min(wait.ended, section.begun)), wait))
    for sent in trace.sent:
        found[sent.lane].append((sent.at, None))
    for begun in trace.begun.values():
        found[begun.out_of].append((begun.at, None))
    for lane, cuts in found.items():
        within = [cut for cut in cuts if section.begun <= cut[0] < section.ended]
        found[lane] = sorted(within, key=lambda cut: (cut[0], not isinstance(cut[1], Phase)))
    return found


def graph_of(traces: Traces, step: int) -> StepGraph:
    """The graph of a step. Raises RecordsError if no rank has traced it from commit to commit."""
    sections = {
        trace.rank: section for trace in traces.ranks.values() for section in trace.sections() if section.step == step
    }
    whole = [rank for rank, section in sections.items() if section.whole]
    if not whole:
        have = ", ".join(map(str, traces.steps)) or "none"
        raise RecordsError(f"step {step} is not traced from one commit to the next; those that are: {have}")
    return _Maker(traces, sections, min(whole)).make(min(whole), step)

