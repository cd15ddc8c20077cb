"""Arrangement: which units each stage should hold, as somebody asked for it or as costs suggest."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Profile
from megatron_elastic.cluster.protocol.effects import WriteProfile
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout
from megatron_elastic.plan import Costs, replan
from megatron_elastic.plan import measured as costs_of


def measured(turn: Turn, message: Profile) -> bool:
    """A rank has measured its stage. Returns whether there are new costs."""
    job, layout = turn.job, turn.job.layout
    if layout is None or message.epoch != layout.epoch or message.rank not in layout.places:
        return False
    samples = job.arrangement.samples.set(message.rank, message.sample)
    costs = costs_of(layout, samples.values())
    turn.set(arrangement=replace(job.arrangement, samples=samples, costs=costs or job.arrangement.costs))
    if costs is None:
        return False
    turn.do(WriteProfile(costs.to_json(layout.units)))
    return True


def rearranging(turn: Turn, layout: Layout, newcomers: bool) -> Callable[[Layout], Layout] | None:
    """What chooses the stages there should be, if it may have something better than ``layout``."""
    arrangement = turn.job.arrangement
    if newcomers:
        arrangement = replace(arrangement, fits=False)
        turn.set(arrangement=arrangement)
    due = arrangement.stages not in (None, layout.pipeline_size) or not (arrangement.costs is None or arrangement.fits)
    job = turn.job
    return (lambda present: arranged(job, present)) if due else None


def reached(turn: Turn) -> None:
    """The present layout is what costs suggest."""
    turn.set(arrangement=replace(turn.job.arrangement, fits=turn.job.arrangement.costs is not None))


def arranged(job: Job, layout: Layout) -> Layout:
    """The stages there should be. Raises NoLayout if the cells cannot make the number that was asked for."""
    assert job.first is not None
    arrangement = job.arrangement
    costs = arrangement.costs or Costs.assumed(layout.units)
    stages = {layout.pipeline_size if arrangement.stages is None else arrangement.stages}
    return replan(layout, costs, layout.epoch, stages=stages, tied=job.first.tied)
