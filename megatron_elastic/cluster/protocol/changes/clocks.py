"""Clocks: at which each layout's ranks are to run (``--elastic-dvfs``), and who is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Profile, SetClocks
from megatron_elastic.cluster.protocol.changes import ordering, pace
from megatron_elastic.cluster.protocol.effects import PlanClocks, WriteProfile
from megatron_elastic.cluster.protocol.events import Clocked, ClocksRefused, Throttled
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.profile import clock_shares

_NEWS = 0.1
"""By which a share has to differ from what was believed: what is measured is not better than that."""


def plan(turn: Turn) -> None:
    """A layout has come into force, or some cells are not as fast as was believed: clocks are planned meanwhile. Where
    it is not known what units cost, as when who took over has no profile, devices run as they do by themselves.
    """
    job, costs = turn.job, turn.job.costs
    if job.settings.dvfs is None or job.layout is None:
        return
    if costs is None:
        for node in sorted(job.nodes):
            turn.tell(node, SetClocks(clocks={}, watts={}))
        pace.clocked(turn, {})
    else:
        turn.do(PlanClocks(job.layout, costs, job.settings.schedule, ordering.in_force(job, job.layout)))


def planned(turn: Turn, event: Clocked) -> None:
    """They are: agents are told, unless there is another layout by now."""
    job, layout = turn.job, turn.job.layout
    if layout is None or event.epoch != layout.epoch:
        return
    clocks = {rank: clock for leader, clock in event.clocks.items() for rank in layout.cells[leader].ranks}
    watts = _watts(job, layout, clocks)
    for node, each in sorted(job.nodes.items()):
        turn.tell(node, SetClocks(clocks={rank: clocks[rank] for rank in each.ranks if rank in clocks},
                                  watts={rank: watts[rank] for rank in each.ranks if rank in watts}))  # fmt: skip
    pace.clocked(turn, clocks)
    turn.record("clocks", mode=job.settings.dvfs, clocks={str(leader): clock for leader, clock in event.clocks.items()},
                step_ms=round(event.step_ms, 3), base_ms=round(event.base_ms, 3))  # fmt: skip


def _watts(job: Job, layout: Layout, clocks: Mapping[int, float]) -> dict[int, float]:
    """What devices may draw, if there are limits: where those of a host share one, what was planned for each."""
    power = None if job.arrangement.costs is None else job.arrangement.costs.power
    if power is not None and power.host_w is not None:
        return {rank: power.watts(clocks.get(rank, 1.0)) for rank in layout.ranks}
    return {} if power is None or power.device_w is None else dict.fromkeys(layout.ranks, power.device_w)


def measured(turn: Turn, message: Profile) -> None:
    """A rank has measured its units, at the clock of its cell."""
    job, layout, rank = turn.job, turn.job.layout, message.rank
    if layout is None or message.epoch != layout.epoch or rank not in layout.places:
        return
    cell = layout.cell_of(rank)
    if rank not in job.pace.settled or cell.leader in job.pace.believed:
        turn.set(pace=replace(job.pace, settled=job.pace.settled.set(rank, None)))
        return
    clock = min(job.pace.clocks.get(member, 1.0) for member in cell.ranks)
    seen = job.arrangement.at_clocks.update({(unit, clock): cost for unit, cost in message.sample.units.items()})
    turn.set(arrangement=replace(job.arrangement, at_clocks=seen, fitted=False))


def fitted(turn: Turn) -> bool:
    """A step has been committed. Returns whether it is news how much of units' time clocks divide, which is known of
    those that have been measured at clocks that differ enough.
    """
    job, layout, costs = turn.job, turn.job.layout, turn.job.arrangement.costs
    if job.arrangement.fitted or layout is None or costs is None:
        return False
    turn.set(arrangement=replace(job.arrangement, fitted=True))
    shares = {unit: share for unit, share in clock_shares(layout, job.arrangement.at_clocks).items()
              if abs(share - costs.units[unit].clock_share) > _NEWS}  # fmt: skip
    if not shares:
        return False
    units = tuple(dataclasses.replace(cost, clock_share=shares.get(unit, cost.clock_share))
                  for unit, cost in enumerate(costs.units))  # fmt: skip
    costs = dataclasses.replace(costs, units=units)
    turn.set(arrangement=replace(turn.job.arrangement, costs=costs, fits=False))
    turn.do(WriteProfile(costs.to_json(layout.units)))
    turn.record("clock_shares", shares={layout.units[unit]: round(share, 2) for unit, share in shares.items()})
    return True


def throttled(turn: Turn, event: Throttled) -> bool:
    """Some devices do not run as fast as they were told: from now on what they can do counts. Returns whether any do
    not.
    """
    costs = turn.job.arrangement.costs
    found = {rank: clock for rank, clock in event.clocks.items()
             if rank in turn.job.ranks and turn.job.ranks[rank].node == event.node and clock > 0}
    if not found:
        return False
    pace.forget_measured(turn)
    if costs is not None and costs.clocking is not None:
        clocking = dataclasses.replace(costs.clocking, highest={**costs.clocking.highest, **found})
        costs = dataclasses.replace(costs, clocking=clocking)
        turn.set(arrangement=replace(turn.job.arrangement, costs=costs, fits=False))
    ranks = ", ".join(f"rank {rank} at {clock:g}" for rank, clock in sorted(found.items()))
    turn.record("throttled", node=turn.job.nodes[event.node].node_rank,
                clocks={str(rank): clock for rank, clock in sorted(found.items())})  # fmt: skip
    turn.say(f"devices are held down by heat or for want of power: {ranks} of the base clock", "throttled")
    return True


def refused(turn: Turn, event: ClocksRefused) -> None:
    """A node cannot set clocks: training goes on all the same."""
    node = turn.job.nodes[event.node]
    pace.refused(turn, event.node)
    turn.record("clocks_refused", node=node.node_rank, host=node.host, reason=event.reason)
    turn.say(f"WARNING: node {node.node_rank} ({node.host}): {event.reason}")
