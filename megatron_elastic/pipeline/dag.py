"""DAG: what a step executes, as a graph: computing and messages with time and memory, and what waits for what.

Nodes are the operations of a program (forward, backward, or halves of one), and for each result that goes to another
stage its sending and receiving. Edges: a node needs what another makes, or comes after it on its device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.program import Op, Program, Result, needs, result
from megatron_elastic.pipeline.simulate import Timeline, run
from megatron_elastic.plan.costs.cost import Costs

NodeKind = Literal[
    "forward", "backward", "backward_input", "backward_weight", "send_forward", "receive_forward", "send_backward",
    "receive_backward",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a step.

    Attributes:
        cell: leader of the cell that does it.
        start_ms, end_ms: from the beginning of the passes. A message is sent as long as it is on its way, and received
            the moment it is there: neither takes a device's time.
        allocated_bytes: when it begins.
        kept_bytes: of that, after it has ended.
        freed_bytes: of what others have allocated, when it ends.
    """

    kind: NodeKind
    cell: int
    stage: int
    grain: int
    chunk: int
    start_ms: float
    end_ms: float
    allocated_bytes: int = 0
    kept_bytes: int = 0
    freed_bytes: int = 0

    @property
    def name(self) -> str:
        """As in a program's text, with the direction of messages."""
        letters = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
        return f"{letters.get(self.kind, self.kind + ' ')}{self.grain}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Dag:
    """Nodes, and edges between them by their indices: what an earlier node makes a later one needs (``data``), or it
    comes after it on its device (``order``).
    """

    nodes: tuple[Node, ...]
    data: tuple[tuple[int, int], ...]
    order: tuple[tuple[int, int], ...]
    timeline: Timeline
    layout: Layout

    @classmethod
    def of(cls, program: Program, layout: Layout, costs: Costs, clocks: Mapping[int, float] | None = None) -> Dag:
        """A step of ``program``; arguments as ``simulate.run`` has them. Raises ProgramError if it has a cycle."""
        return _Builder(program, layout, costs, run(program, layout, costs, clocks)).dag()

    def to_json(self) -> str:
        """A trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: a track for each cell, one for what it
        sends and receives, its memory, and arrows along messages. Besides, under ``"dag"``, nodes and edges.
        """
        return json.dumps({
            "displayTimeUnit": "ms", "traceEvents": list(self._events()),
            "dag": {
                "nodes": [{"name": node.name, **{name: getattr(node, name) for name in Node.__slots__}}
                          for node in self.nodes],
                "data": self.data, "order": self.order,
            },
        })  # fmt: skip

    @property
    def peaks(self) -> dict[int, int]:
        """Leader -> bytes of activations that its cell keeps at most."""
        most = dict.fromkeys((node.cell for node in self.nodes), 0)
        for _, cell, size in self._memory():
            most[cell] = max(most[cell], size)
        return most

    def _memory(self) -> Iterator[tuple[float, int, int]]:
        """(ms, cell, bytes of activations from then on) of each change. What is freed, is before others need room."""
        changes = []
        for node in self.nodes:
            gone = node.allocated_bytes - node.kept_bytes + node.freed_bytes
            changes += [(node.start_ms, node.allocated_bytes, node.cell), (node.end_ms, -gone, node.cell)]
        now: dict[int, int] = {}
        for when, change, cell in sorted(changes):
            if change:
                now[cell] = now.get(cell, 0) + change
                yield when, cell, now[cell]

    def _events(self) -> Iterator[dict[str, Any]]:
        for stage, leader in ((stage, cell.leader) for stage, each in enumerate(self.layout.stages)
                              for cell in each.cells if not cell.shadow):  # fmt: skip
            yield {"ph": "M", "name": "process_name", "pid": leader, "args": {"name": f"stage {stage}, cell {leader}"}}
            yield {"ph": "M", "name": "process_sort_index", "pid": leader, "args": {"sort_index": stage}}
            for track, name in ((0, "computes"), (1, "messages")):
                yield {"ph": "M", "name": "thread_name", "pid": leader, "tid": track, "args": {"name": name}}
        for index in sorted(range(len(self.nodes)), key=lambda index: self.nodes[index].start_ms):
            node = self.nodes[index]
            message = node.kind.startswith(("send", "receive"))
            yield {
                "ph": "X", "name": node.name, "cat": node.kind, "pid": node.cell, "tid": int(message),
                "ts": 1e3 * node.start_ms, "dur": 1e3 * (node.end_ms - node.start_ms),
                "args": {"node": index, "grain": node.grain, "chunk": node.chunk,
                         "allocated_bytes": node.allocated_bytes, "kept_bytes": node.kept_bytes,
                         "freed_bytes": node.freed_bytes},
            }  # fmt: skip
        for when, cell, size in self._memory():
            yield {"ph": "C", "name": "activations", "pid": cell, "ts": 1e3 * when, "args": {"bytes": size}}
        for number, (before, after) in enumerate(self.data):
            source, target = self.nodes[before], self.nodes[after]
            if source.cell != target.cell:
                common = {"name": "message", "cat": "message", "id": number, "tid": 1}
                yield {"ph": "s", **common, "pid": source.cell, "ts": 1e3 * source.start_ms}
                yield {"ph": "f", "bp": "e", **common, "pid": target.cell, "ts": 1e3 * target.start_ms}


class _Builder:
    def __init__(self, program: Program, layout: Layout, costs: Costs, line: Timeline) -> None:
        self._program, self._layout, self._costs, self._line = program, layout, costs, line
        self._nodes: list[Node] = []
        self._data: list[tuple[int, int]] = []
        self._order: list[tuple[int, int]] = []
        self._makers: dict[Result, int] = {}
        """The node that makes a result, for those of its stage."""

    def dag(self) -> Dag:
        """Nodes first, as results may come from cells that are listed later."""
        layout = self._layout
        stage_of = {cell.leader: stage for stage, each in enumerate(layout.stages) for cell in each.cells}
        todo: list[tuple[int, int, Op]] = []
        for leader, spans in self._line.spans.items():
            before = None
            for span in spans:
                node = self._computing(leader, stage_of[leader], span.op, span.start, span.end)
                todo.append((node, leader, span.op))
                if before is not None:
                    self._order.append((before, node))
                before = node
                if (made := result(leader, stage_of[leader], span.op)) is not None:
                    self._makers[made] = node
        for node, leader, op in todo:
            for need in needs(layout, leader, stage_of[leader], op):
                maker = self._makers[need]
                if need.stage == stage_of[leader]:
                    self._data.append((maker, node))
                else:
                    self._message(need, maker, node)
        return Dag(tuple(self._nodes), tuple(self._data), tuple(self._order), self._line, layout)

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _computing(self, leader: int, stage: int, op: Op, start: float, end: float) -> int:
        layout = self._layout
        held = [unit for unit in layout.chunks(stage)[op.chunk] if layout.home(unit) == stage]
        share = layout.part(leader, op.grain).size / layout.samples
        costs = [self._costs.units[unit] for unit in held]
        size = left = round(share * sum(cost.activation_bytes for cost in costs))
        late = round(share * sum(cost.late for cost in costs))
        if layout.recomputes(stage, op.chunk):
            left = min(size, round(share * self._costs.inlet_bytes(layout.position(stage, op.chunk))))
        allocated, kept, freed = {
            "forward": (left, left, 0), "backward": (size - left, 0, left),
            "backward_input": (size - left, max(0, late - left), max(0, left - late)),
            "backward_weight": (0, 0, late),
        }[op.kind]  # fmt: skip
        return self._add(Node(op.kind, leader, stage, op.grain, op.chunk, start, end, allocated, kept, freed))

    def _message(self, what: Result, maker: int, user: int) -> None:
        """From the cell that makes a result to one that needs it."""
        way: Literal["forward", "backward"] = "forward" if what.what == "output" else "backward"
        source, target = self._nodes[maker], self._nodes[user]
        share = self._layout.part(source.cell, source.grain).size / self._layout.samples
        begun, there = source.end_ms, source.end_ms + self._costs.transfer_ms(self._costs.boundary_bytes * share)
        kinds: tuple[NodeKind, NodeKind] = (
            ("send_forward", "receive_forward") if way == "forward" else ("send_backward", "receive_backward")
        )
        sent = self._add(Node(kinds[0], source.cell, source.stage, source.grain, source.chunk, begun, there))
        got = self._add(Node(kinds[1], target.cell, target.stage, target.grain, target.chunk, there, there))
        self._data += [(maker, sent), (sent, got), (got, user)]
