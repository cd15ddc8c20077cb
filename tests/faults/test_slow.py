"""Ranks that are slower than others that do the same: they get less to do, and bits do not differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from immutables import Map
from msgspec.structs import replace

from megatron_elastic import cli
from megatron_elastic.cluster.messages import Invite, RankExited, Settled, Switched
from megatron_elastic.cluster.node.speedometer import Speedometer
from megatron_elastic.cluster.protocol import advance
from megatron_elastic.cluster.protocol.adoption import use
from megatron_elastic.cluster.protocol.changes import change, pace
from megatron_elastic.cluster.protocol.effects import PlanClocks, Record, WriteEvent
from megatron_elastic.cluster.protocol.events import Clocked, ClocksRefused, Paced, Recorded, Throttled
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.faults.odometer import Effort, Odometer, Odometers
from megatron_elastic.layout import Layout, Stage
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from tests.jobs import Grid, Job, Jobs
from tests.play import SETTINGS, Play

# ---- real ranks ------------------------------------------------------------------------------


def slow(step: int, factor: int) -> list[str]:
    """Flags with which rank 1 takes ``factor`` times as long from a step on."""
    return ["--elastic-inject", f"slow:rank=1,step={step},at=data,factor={factor}"]


def slowed(jobs: Jobs, grid: Grid, way: str, *slowness: str, flags: Sequence[str] = ()) -> Job:
    """A job in which a rank is slowed down, and which is the same as one without. ``flags``: of both."""
    reference = jobs.undisturbed(*grid.flags, *flags, ranks=grid.ranks)
    job = jobs.run(*grid.flags, *flags, "--elastic-slow", way, *slowness, ranks=grid.ranks)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert not job.events("recovered")
    return job


def test_a_slow_rank_gets_less_to_do_and_then_as_much_as_before(jobs: Jobs) -> None:
    job = slowed(jobs, Grid(tp=1, pp=1, steps=100, ranks=2), "share", *slow(15, 5), *slow(40, 1))
    assert_shared(job)


def test_micro_batches_are_cut_for_slow_ranks_too(jobs: Jobs) -> None:
    """Those that are cut differ by rounding: there is nothing to compare."""
    flags = Grid(tp=1, pp=1, steps=100, ranks=2).flags
    assert_shared(jobs.run(*flags, "--elastic-dataflow", "resize", "--micro-batch-size", "2", "--elastic-slow", "share",
                           *slow(15, 5), *slow(40, 1), ranks=2))


def assert_shared(job: Job) -> None:
    """It was found that rank 1 is slow, and that it is no longer; meanwhile it had less to do."""
    (found, *_) = [event for event in job.events("slow") if event["ranks"] == [1]]
    assert [event for event in job.events("well") if event["ranks"] == [1] and event["step"] > found["step"]]
    loads = [[layout.load(cell) for cell in layout.stages[0].cells] for layout in job.layouts()]
    assert any(mine < others for others, mine in loads)
    assert all(mine > 0 for _, mine in loads)


def test_a_rank_without_which_others_are_faster_is_taken_out(jobs: Jobs) -> None:
    # Who sleeps for what it computes is slower by less where others wait for a processor: by 6 instead of 40 beside a
    # dozen busy processes. Three ranks that share 12 grains are faster than with one that takes over 4 times as long.
    batch = ("--global-batch-size", "12")
    job = slowed(jobs, Grid(tp=1, pp=1, steps=40, ranks=4), "evict", *slow(10, 80), flags=batch)
    for kind in ("slow", "evicted"):  # others may seem slow for a while: processors are shared
        assert [1] in [event["ranks"] for event in job.events(kind)]
    assert any(layout.spares == (1,) for layout in job.layouts())


# ---- what is believed ------------------------------------------------------------------------


def paced(play: Play, *ms: float) -> None:
    """A node tells, and then the coordinator looks."""
    play.happens(Paced(now=1.0, node=1, epoch=play.job.layout.epoch if play.job.layout else 0,
                       paces=dict(enumerate(ms))))
    later(play, 0)


def later(play: Play, steps: int) -> None:
    """So many steps have been committed, with the last of which the coordinator looks again."""
    ledger = play.job.ledger
    assert ledger is not None
    turn = Turn(replace(play.job, ledger=replace(ledger, written=ledger.written + steps)), 1.0)
    change.stepped(turn)
    play.job, play.effects = turn.job, turn.effects
    for record in [effect for effect in turn.effects if isinstance(effect, Record)]:
        play.job, more = advance(play.job, Recorded(now=1.0, epoch=record.epoch))
        play.effects += more


def events(play: Play) -> list[str]:
    return [effect.kind for effect in play.effects if isinstance(effect, WriteEvent)]


def test_slow_at_once_and_well_after_some_steps_and_more_of_them_each_time() -> None:
    play = Play()
    for patience in (3, 6, 12):
        paced(play, 10.0, 20.0)
        assert events(play) == ["slow"]
        assert dict(play.job.pace.believed) == {1: 2.0}
        paced(play, 10.0, 22.0)
        assert events(play) == [], "that is noise"
        paced(play, 10.0, 10.5)
        later(play, patience - 1)
        assert events(play) == []
        later(play, 1)
        assert events(play) == ["well"]
        assert not play.job.pace.believed


def test_what_was_not_for_long_does_not_count() -> None:
    play = Play()
    paced(play, 10.0, 20.0)
    for _ in range(3):
        paced(play, 10.0, 10.0)
        later(play, 2)
        paced(play, 10.0, 20.0)
        later(play, 2)
    assert dict(play.job.pace.believed) == {1: 2.0}


def test_cells_are_compared_once_a_step_however_many_nodes_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of N nodes N cells were: 1,250 nodes kept the coordinator busy for seconds."""
    compared: list[int] = []
    times = pace._times

    def counted(job: Any, stage: Stage) -> dict[int, float]:
        compared.append(len(stage.cells))
        return times(job, stage)

    monkeypatch.setattr(pace, "_times", counted)
    play = Play()
    for rank, ms in ((0, 10.0), (1, 20.0), (0, 10.5), (1, 21.0)):
        play.happens(Paced(now=1.0, node=1, epoch=0, paces={rank: ms}))
    assert compared == []
    later(play, 1)
    assert compared == [2] and events(play) == ["slow"]
    later(play, 1)
    assert compared == [2], "nothing is new"


def switch(play: Play, number: int, ranks: Sequence[int] = (0, 1)) -> None:
    """The planned layout comes into force, and all that it asks for is there."""
    epoch = play.job.newest_epoch
    play.say(Switched(rank=0, epoch=epoch, step=number), *(Settled(rank=rank, epoch=epoch) for rank in ranks))


def test_less_to_do_first_then_taken_out_then_tried_again() -> None:
    play = Play(settings=replace(SETTINGS, slow="evict"))
    play.news(RankExited(rank=2, returncode=-9, time=1.0))
    play.say(Settled(rank=0, epoch=0), Settled(rank=1, epoch=0))
    assert play.job.idle
    paced(play, 10.0, 400.0)
    assert events(play) == ["slow"]
    switch(play, 2)
    assert play.job.layout is not None
    assert [len(cell.grains) for cell in play.job.layout.stages[0].cells] == [3, 1]
    paced(play, 10.0, 390.0)
    assert events(play) == ["evicted"]
    switch(play, 3)
    assert play.job.layout.spares == (1,)
    assert not play.job.pace.believed
    play.expires("evicted 1")
    assert play.sent(Invite).keys() == {1}


def test_a_loss_lets_those_who_were_taken_out_back() -> None:
    play = Play(settings=replace(SETTINGS, slow="evict"))
    play.job = replace(play.job, pace=replace(play.job.pace, evicted=Map({1: 1})))
    play.news(RankExited(rank=0, returncode=-9, time=1.0))
    assert not play.job.pace.evicted


def test_slow_enough_to_get_less_and_not_to_be_taken_out() -> None:
    play = Play(settings=replace(SETTINGS, slow="evict"))
    play.news(RankExited(rank=2, returncode=-9, time=1.0))
    play.say(Settled(rank=0, epoch=0), Settled(rank=1, epoch=0))
    paced(play, 10.0, 20.0)
    switch(play, 2)
    paced(play, 10.0, 20.0)
    assert events(play) == []
    assert not play.job.pace.evicted


# ---- layers ----------------------------------------------------------------------------------


def along_a_pipeline(width: int = 2) -> Play:
    """Two stages of so many cells and three layers, of which it is known what they cost."""
    play = Play(((0, 1, 2, 3), (4, 5, 6, 7)), layers=6, width=width)
    play.news(RankExited(rank=2 * width, returncode=-9, time=1.0))
    play.say(*(Settled(rank=rank, epoch=0) for rank in range(2 * width)))
    layer, other = UnitCost(1.0, 2.0, 6, 12, 1), UnitCost(0.0, 0.0, 6, 12, 1)
    costs = Costs(tuple(layer if name.startswith("layer") else other for name in play.first.units))
    play.job = replace(play.job, arrangement=replace(play.job.arrangement, costs=costs, fits=True))
    return play


def layers(layout: Layout) -> list[int]:
    """Of each stage."""
    return [sum(layout.units[unit].startswith("layer") for unit in stage.units) for stage in layout.stages]


def goal(play: Play) -> Layout:
    """What is planned, in the end."""
    change = play.job.change
    assert change is not None
    return change.goal or change.layout


def test_layers_leave_the_stage_of_who_is_slow_for_long() -> None:
    play = along_a_pipeline()
    paced(play, 10.0, 40.0, 10.0, 10.0)
    assert events(play) == ["slow"]
    assert layers(goal(play)) == [3, 3], "grains move at once, layers do not"
    switch(play, 2, range(4))
    paced(play, 10.0, 40.0, 10.0, 10.0)
    later(play, 7)
    assert play.job.change is None
    later(play, 1)
    assert events(play) == ["considered"]
    assert layers(goal(play)) == [2, 4]


def test_who_is_alone_at_its_stage_is_compared_by_what_units_cost() -> None:
    play = along_a_pipeline(width=1)
    paced(play, 10.0, 11.0)
    assert events(play) == []
    paced(play, 10.0, 20.0)
    assert events(play) == ["slow"] and dict(play.job.pace.believed) == {1: 2.0}
    assert goal(play).stages == play.first.stages, "there is nobody to share grains with, only slices can be spread"
    switch(play, 2, range(2))
    later(play, 8)
    assert layers(goal(play)) == [4, 2]
    unknown = along_a_pipeline(width=1)
    unknown.job = replace(unknown.job, arrangement=replace(unknown.job.arrangement, costs=None))
    paced(unknown, 10.0, 20.0)
    assert events(unknown) == []


def test_a_stage_whose_units_cost_nothing_is_compared_all_the_same() -> None:
    """Nobody can say what they should take, only what others of the stage do."""
    play = along_a_pipeline()
    assert play.job.arrangement.costs is not None
    free = tuple(UnitCost(0.0, 0.0, 6, 12, 1) for _ in play.first.units)
    costs = dataclasses.replace(play.job.arrangement.costs, units=free)
    play.job = replace(play.job, settings=replace(play.job.settings, policy="resihp"),
                       arrangement=replace(play.job.arrangement, costs=costs))  # fmt: skip
    paced(play, 10.0, 20.0, 10.0, 10.0)
    assert dict(play.job.pace.believed) == {1: 2.0}


def test_layers_move_later_each_time_for_who_is_slow_now_and_then() -> None:
    play = along_a_pipeline(width=1)
    for number, patience in enumerate((8, 16, 32)):
        paced(play, 10.0, 20.0)
        assert events(play) == ["slow"] and play.job.ledger is not None
        assert play.job.pace.lasts_at == play.job.ledger.written + patience
        paced(play, 10.0, 10.0)
        later(play, 3 << number)
        assert events(play)[0] == "well"


def test_layers_stay_where_who_is_slow_is_fast_again_before_long() -> None:
    play = along_a_pipeline()
    paced(play, 10.0, 40.0, 10.0, 10.0)
    switch(play, 2, range(4))
    paced(play, 10.0, 10.0, 10.0, 10.0)
    later(play, 3)
    assert events(play) == ["well"]
    switch(play, 3, range(4))
    for _ in range(10):
        later(play, 1)
        if play.job.change is not None:
            assert layers(goal(play)) == [3, 3]
            switch(play, 4, range(4))
    assert play.job.layout is not None and layers(play.job.layout) == [3, 3] and play.job.pace.lasts_at is None


def test_what_was_measured_counts_where_cells_do_the_same() -> None:
    play = along_a_pipeline()
    paced(play, 10.0, 40.0, 10.0, 10.0)
    switch(play, 2, range(4))
    assert dict(play.job.pace.measured) == {0: 10.0, 1: 40.0, 2: 10.0, 3: 10.0}, "they share grains otherwise"
    paced(play, 10.0, 10.0, 10.0, 10.0)
    later(play, 2)
    assert set(play.job.pace.better) == {1} and play.job.layout is not None
    present, turn = play.job.layout, Turn(play.job, 1.0)
    first, second = present.stages
    moved = (dataclasses.replace(first, units=first.units[:-1]),
             dataclasses.replace(second, units=(first.units[-1], *second.units)))  # fmt: skip
    use(turn, dataclasses.replace(present, epoch=present.epoch + 1, stages=moved))
    assert not turn.job.pace.measured and not turn.job.pace.better, "of other layers it says nothing"


def test_what_is_on_its_way_for_who_was_slow_is_weighed_anew() -> None:
    """Else layers move for a cell that is as fast as others again, and then back."""
    play = along_a_pipeline()
    paced(play, 10.0, 40.0, 10.0, 10.0)
    switch(play, 2, range(4))
    later(play, 8)
    assert layers(goal(play)) == [2, 4]
    play.say(Switched(rank=0, epoch=play.job.newest_epoch, step=9))
    assert play.job.goal is not None and layers(play.job.goal) == [2, 4], "what moves is being copied"
    paced(play, 10.0, 10.0, 10.0, 10.0)
    later(play, 3)
    assert events(play) == ["well"]
    play.say(*(Settled(rank=rank, epoch=play.job.epoch) for rank in range(4)))
    assert layers(goal(play)) == [3, 3]
    switch(play, 12, range(4))
    assert play.job.layout is not None and layers(play.job.layout) == [3, 3]
    assert not any(cell.incoming for stage in play.job.layout.stages for cell in stage.cells)


# ---- clocks ----------------------------------------------------------------------------------


@pytest.fixture
def clocked() -> Play:
    """A job whose clocks are planned, and whose ranks 0 and 1 do the same."""
    play = Play(settings=replace(SETTINGS, dvfs="performance"))
    play.news(RankExited(rank=2, returncode=-9, time=1.0))
    play.say(Settled(rank=0, epoch=0), Settled(rank=1, epoch=0))
    costs = dataclasses.replace(Costs.assumed(play.first.units), power=PowerModel(1.0, 1.0, 1.0),
                                clocking=Clocking("performance"))
    play.job = replace(play.job, arrangement=replace(play.job.arrangement, costs=costs))
    return play


def run_at(play: Play, clocks: dict[int, float]) -> None:
    """Clocks of the present layout are planned."""
    assert play.job.layout is not None
    play.happens(Clocked(now=1.0, epoch=play.job.layout.epoch, clocks=clocks, step_ms=1.0, base_ms=1.0))


def plans(play: Play) -> list[dict[int, float]]:
    """For what paces clocks are to be planned."""
    return [dict(effect.costs.slow) for effect in play.effects if isinstance(effect, PlanClocks)]


def test_who_runs_at_a_higher_clock_is_not_taken_for_a_faster_device(clocked: Play) -> None:
    run_at(clocked, {1: 1.5})
    paced(clocked, 15.0, 10.0)
    assert not clocked.job.pace.believed
    paced(clocked, 15.0, 15.0)
    assert dict(clocked.job.pace.believed) == {1: 1.5}, "it should be faster"


def test_speeds_are_compared_at_equal_clocks_by_what_these_divide(clocked: Play) -> None:
    """At one and a half times the clock half of the time is as it was: five sixths, and not two thirds."""
    costs = clocked.job.arrangement.costs
    assert costs is not None
    units = tuple(dataclasses.replace(unit, clock_share=0.5) for unit in costs.units)
    costs = dataclasses.replace(costs, units=units)
    clocked.job = replace(clocked.job, arrangement=replace(clocked.job.arrangement, costs=costs))
    run_at(clocked, {1: 1.5})
    paced(clocked, 30.0, 25.0)
    assert not clocked.job.pace.believed
    paced(clocked, 30.0, 40.0)
    assert dict(clocked.job.pace.believed) == {1: pytest.approx(1.6)}


def test_clocks_are_planned_for_slow_cells(clocked: Play) -> None:
    """In the layout in which they have less to do; if that is the present one, at once."""
    paced(clocked, 10.0, 20.0)
    assert plans(clocked) == [] and clocked.job.change is not None
    switch(clocked, 2)
    assert clocked.job.layout is not None
    assert [len(cell.grains) for cell in clocked.job.layout.stages[0].cells] == [3, 1]
    paced(clocked, 10.0, 30.0)
    assert events(clocked) == ["slow"]
    assert clocked.job.change is None and plans(clocked) == [{1: 3.0}], "nothing is left to be moved"


def test_what_was_measured_at_other_clocks_does_not_count(clocked: Play) -> None:
    paced(clocked, 10.0)
    run_at(clocked, {0: 1.5})
    clocked.happens(Paced(now=1.0, node=1, epoch=0, paces={1: 10.0}))
    later(clocked, 1)
    assert not clocked.job.pace.believed


def test_a_node_that_cannot_set_clocks(clocked: Play) -> None:
    clocked.happens(ClocksRefused(now=1.0, node=1, reason="it is not allowed"))
    run_at(clocked, {1: 1.5})
    paced(clocked, 10.0, 10.0)
    assert not clocked.job.pace.believed


def test_clocks_are_planned_for_devices_that_are_held_down(clocked: Play) -> None:
    """By heat, or for want of power: no higher than that, and nobody else's."""
    clocked.happens(Throttled(now=1.0, node=1, clocks={1: 0.8, 7: 0.5}))
    (wanted,) = [effect for effect in clocked.effects if isinstance(effect, PlanClocks)]
    assert wanted.costs.clocking is not None and wanted.costs.clocking.highest == {1: 0.8}
    assert events(clocked) == ["throttled", "considered"], "what else there could be is told once"


@pytest.mark.parametrize(("slow", "epoch", "node"), [("off", 0, 1), ("share", 7, 1), ("share", 0, 2)])
def test_what_does_not_count(slow: str, epoch: int, node: int) -> None:
    """It is not wanted; of another layout; of ranks of another node."""
    play = Play(settings=replace(SETTINGS, slow=slow))
    play.happens(Paced(now=1.0, node=node, epoch=epoch, paces={0: 10.0, 1: 90.0}))
    assert not play.job.pace.believed and not play.job.pace.measured


# ---- what is measured ------------------------------------------------------------------------


def test_what_is_new_is_told() -> None:
    odometers = Odometers(1)
    odometer = Odometer.of(odometers.environment(0))
    speedometer = Speedometer(odometers)
    busy, grains, began = 0.0, 0.0, 0

    def looks(seconds: float, epoch: int = 0, since: int = 0) -> list[dict[int, float]]:
        """Two grains take so long."""
        nonlocal busy, grains, began
        if since != began:
            busy, grains, began = 0.0, 0.0, since
        busy, grains = busy + seconds, grains + 2.0
        odometer.worked(Effort(epoch, since, busy, grains))
        return [{rank: round(ms) for rank, ms in each.paces.items()} for each in speedometer.look({7: 0})]

    assert [looks(0.2) for _ in range(4)] == [[], [], [{7: 100}], []]
    assert looks(0.6) == [], "one that was slow by chance"
    assert [looks(0.2) for _ in range(2)] == [[], []]
    assert [looks(0.6) for _ in range(2)] == [[], [{7: 300}]]
    assert not speedometer.look({7: 0}), "nothing was done meanwhile"
    assert looks(0.6, epoch=1) == [{7: 300}], "of another layout, in which it does the same"
    assert [looks(0.6, epoch=2, since=2) for _ in range(2)] == [[], [{7: 300}]], "of one in which it does not"
    speedometer.forget()
    assert looks(0.6, epoch=2, since=2) == [{7: 300}], "to somebody else"
    assert not speedometer.look({})
