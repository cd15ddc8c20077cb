"""Clocks: at which each layout's ranks are to run (``--elastic-dvfs``), and who is told."""

from __future__ import annotations

from megatron_elastic.cluster.messages import SetClocks
from megatron_elastic.cluster.protocol.changes import pace
from megatron_elastic.cluster.protocol.effects import PlanClocks
from megatron_elastic.cluster.protocol.events import Clocked, ClocksRefused, Throttled
from megatron_elastic.cluster.protocol.turn import Turn


def plan(turn: Turn) -> None:
    """A layout has come into force, or some cells are not as fast as was believed: clocks are planned meanwhile. Where
    it is not known what units cost, as after another coordinator, devices run as they do by themselves.
    """
    job = turn.job
    if job.settings.dvfs is None or job.layout is None:
        return
    if job.arrangement.costs is None:
        for node in sorted(job.nodes):
            turn.tell(node, SetClocks(clocks={}))
        pace.clocked(turn, {})
    else:
        turn.do(PlanClocks(job.layout, job.arrangement.costs, job.settings.dvfs, job.settings.schedule,
                           pace.paces(job), pace.highest(job)))  # fmt: skip


def planned(turn: Turn, event: Clocked) -> None:
    """They are: agents are told, unless there is another layout by now."""
    job, layout = turn.job, turn.job.layout
    if layout is None or event.epoch != layout.epoch:
        return
    clocks = {rank: clock for leader, clock in event.clocks.items() for rank in layout.cells[leader].ranks}
    for node, each in sorted(job.nodes.items()):
        turn.tell(node, SetClocks(clocks={rank: clocks[rank] for rank in each.ranks if rank in clocks}))
    pace.clocked(turn, clocks)
    turn.record("clocks", mode=job.settings.dvfs, clocks={str(leader): clock for leader, clock in event.clocks.items()},
                step_ms=round(event.step_ms, 3), base_ms=round(event.base_ms, 3))  # fmt: skip


def throttled(turn: Turn, event: Throttled) -> None:
    """Some devices do not run as fast as they were told: clocks are planned with what they can do."""
    found = {rank: clock for rank, clock in event.clocks.items()
             if rank in turn.job.ranks and turn.job.ranks[rank].node == event.node and clock > 0}
    if not found:
        return
    pace.held_down(turn, found)
    ranks = ", ".join(f"rank {rank} at {clock:g}" for rank, clock in sorted(found.items()))
    turn.record("throttled", node=turn.job.nodes[event.node].node_rank,
                clocks={str(rank): clock for rank, clock in sorted(found.items())})  # fmt: skip
    turn.say(f"devices are held down by heat or for want of power: {ranks} of the base clock", "throttled")
    plan(turn)


def refused(turn: Turn, event: ClocksRefused) -> None:
    """A node cannot set clocks: training goes on all the same."""
    node = turn.job.nodes[event.node]
    pace.refused(turn, event.node)
    turn.record("clocks_refused", node=node.node_rank, host=node.host, reason=event.reason)
    turn.say(f"WARNING: node {node.node_rank} ({node.host}): {event.reason}")
