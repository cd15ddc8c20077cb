"""Orders of work that are looked for while training goes on: when, for which layout, and what becomes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    Back,
    Committed,
    Plan,
    RankDying,
    RankExited,
    Report,
    Settled,
    Switched,
    VoteResult,
)
from megatron_elastic.cluster.protocol.changes import change, ordering
from megatron_elastic.cluster.protocol.effects import Search, WriteEvent
from megatron_elastic.cluster.protocol.events import Found
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.search import fits
from megatron_elastic.pipeline.simulate import scheduled
from megatron_elastic.plan.choice import MOST_SIMULATED
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import device_bytes
from megatron_elastic.plan.work import order
from megatron_elastic.plan.work.order import Order, search, unpacked
from tests.faults.test_slow import along_a_pipeline, goal, later, layers, paced, switch
from tests.play import Play


def searching(*, places: bool = False, width: int = 1) -> Play:
    """A pipeline of two stages of so many cells each, whose first order is being looked for."""
    play = along_a_pipeline(width)
    settings = replace(play.job.settings, schedule="search", places=places)
    play.job = replace(play.job, settings=settings)
    turn = Turn(play.job, 1.0)
    change.consider(turn)
    play.job, play.effects = turn.job, turn.effects
    if play.job.change is not None:
        switch(play, 2, range(2 * width))
    return play


def sought(play: Play) -> list[Layout]:
    """The layouts for which an order is to be looked for, by what was just done."""
    return [effect.layout for effect in play.effects if isinstance(effect, Search)]


def found(play: Play, gain: float = 0.5) -> Order:
    """What was looked for is found, and takes so much less than the order that there is."""
    layout, costs = play.job.ordering.sought, play.job.ordering.costs
    assert layout is not None and costs is not None and play.job.ordering.searching
    order = search(layout, costs, None)
    assert order is not None
    order = dataclasses.replace(order, ms=order.present_ms * (1 - gain))
    play.happens(Found(now=1.0, epoch=layout.epoch, order=order, seconds=0.1))
    return order


def copying(play: Play, number: int) -> None:
    """The planned layout comes into force; what it asks for is on its way."""
    play.say(Switched(rank=0, epoch=play.job.newest_epoch, step=number))


def there(play: Play, ranks: Sequence[int] = (0, 1)) -> None:
    """All copies are there."""
    epoch = play.job.epoch
    play.say(*(Settled(rank=rank, epoch=epoch) for rank in ranks))


def a_slow_rank(play: Play) -> None:
    """A rank has been slow for so long that layers are to leave its stage; no order is better for that before."""
    paced(play, 10.0, 20.0)
    if not play.job.ordering.searching:
        later(play, 1)
    found(play, gain=0.0)
    later(play, 8)
    assert layers(goal(play)) == [4, 2]
    assert play.job.change is not None and layers(play.job.change.layout) == [3, 3]


def test_a_better_order_comes_into_force_like_a_layout() -> None:
    play = searching()
    assert play.job.ordering.searching and play.job.ordering.sought == play.job.layout
    order = found(play)
    assert play.sent(Plan)[0].program == order.program
    copying(play, 3)
    switched = [each for each in play.effects if isinstance(each, WriteEvent) and each.kind == "switched"]
    assert [each.fields.get("ordered") for each in switched] == [True]
    there(play)
    assert sought(play) == [] and play.job.idle, "it has been looked for"


def test_an_order_that_gains_next_to_nothing_is_left() -> None:
    play = searching()
    found(play, gain=0.005)
    assert play.job.change is None
    later(play, 1)
    assert sought(play) == []


def test_work_stays_in_its_order_while_layers_are_copied() -> None:
    """And begins with a known one where cells do something else, if looking for one takes long."""
    play = searching()
    order = found(play)
    switch(play, 3, range(2))
    a_slow_rank(play)
    assert play.sent(Plan)[0].program == order.program, "layers are only copied"
    copying(play, 12)
    assert [layers(layout) for layout in sought(play)] == [[4, 2]]
    there(play)
    assert play.job.change is not None and layers(play.job.change.layout) == [4, 2]
    assert not play.sent(Plan), "the order may be found in a moment"
    play.expires("order")
    assert play.sent(Plan)[0].program == begun_with(play.job, play.job.change.layout)
    switch(play, 13, range(2))
    late = found(play)
    assert play.sent(Plan)[0].program == late.program, "it was looked for already"


@pytest.mark.parametrize("gain", [0.5, 0.0])
def test_what_is_planned_waits_for_its_order(gain: float) -> None:
    """Grains dealt otherwise come in the order that was found for that, or in a known one if none is better."""
    play = searching(width=2)
    found(play, gain=0.0)
    later(play, 1)
    assert play.job.idle
    paced(play, 10.0, 40.0, 10.0, 10.0)
    change = play.job.change
    assert change is not None and change.unordered and not play.sent(Plan)
    assert sought(play) == [change.layout] and "order" in play.job.timers
    order = found(play, gain)
    assert play.job.change is not None
    program = order.program if gain else begun_with(play.job, play.job.change.layout)
    assert {each.program for each in play.sent(Plan).values()} == {program}
    assert "order" not in play.job.timers
    switch(play, 3, range(4))
    assert sought(play) == [] and play.job.idle, "it has been looked for"


def test_a_loss_overtakes_what_waits_for_its_order() -> None:
    play = searching(width=2)
    found(play, gain=0.0)
    later(play, 1)
    paced(play, 10.0, 40.0, 10.0, 10.0)
    play.news(RankDying(rank=0, time=1.0))
    assert play.job.change is None and "order" not in play.job.timers
    epoch = play.job.epoch
    found(play)
    assert not play.sent(Plan) and play.job.epoch == epoch


def test_who_only_follows_changes_no_order() -> None:
    """A newcomer gets copies for a while, and the others do what they did."""
    play = Play(((0, 1, 2, 3), (4, 5, 6, 7)), layers=6, width=1)
    play.job = replace(play.job, settings=replace(play.job.settings, schedule="search"), arrangement=replace(
        play.job.arrangement, costs=along_a_pipeline(width=1).job.costs, fits=True))  # fmt: skip
    assert play.job.layout is not None
    program = begun_with(play.job, play.job.layout)
    # As if none better had been found for it.
    play.job = replace(play.job, ordering=replace(
        play.job.ordering, epoch=play.job.epoch, program=program, sought=play.job.layout, costs=play.job.costs,
        before=program))  # fmt: skip
    play.say(Settled(rank=0, epoch=0), Settled(rank=1, epoch=0))
    change = play.job.change
    assert change is not None and change.entrants == {2}
    assert any(cell.shadow for cell in change.layout.cells.values())
    assert change.program == program and not change.unordered


def test_an_order_is_found_while_layers_are_copied() -> None:
    play = searching()
    switch_to(play, found(play), 3)
    a_slow_rank(play)
    copying(play, 12)
    order = found(play)
    assert play.job.change is None, "copies are under way"
    there(play)
    assert play.job.change is not None and layers(play.job.change.layout) == [4, 2]
    assert play.sent(Plan)[0].program == order.program
    switch(play, 13, range(2))
    assert sought(play) == [] and play.job.idle


@pytest.mark.parametrize("soon", [True, False])
def test_cells_leave_an_order_that_does_not_fit_beside_what_is_copied(soon: bool) -> None:
    """It was searched for all the memory that there was: a device that was sent a unit besides had too little. They
    take one that is searched for what is left, if that is found soon, and a known one else.
    """
    play = searching()
    layout, costs = play.job.layout, play.job.costs
    assert layout is not None and costs is not None
    units = tuple(dataclasses.replace(unit, activation_bytes=40) for unit in costs.units)
    costs = dataclasses.replace(costs, units=units)
    state = round(max(device_bytes(layout, rank, costs) for rank in layout.ranks))
    with_memory(play, dataclasses.replace(costs, memory_bytes=state + 640))
    order = found(play)
    switch_to(play, order, 3)
    program = unpacked(order.program, layout)
    least = next(room for room in range(1000) if fits(program, layout, costs, float(room)))
    costs = dataclasses.replace(costs, memory_bytes=state + least)
    with_memory(play, costs)
    a_slow_rank(play)
    assert play.job.change is not None
    between = play.job.change.layout
    assert not fits(program, between, costs)
    assert sought(play) == [between] and not play.sent(Plan)
    if soon:
        assert found(play).program in {each.program for each in play.sent(Plan).values()}
    else:
        play.expires("order")
    (other,) = {each.program for each in play.sent(Plan).values()}
    assert fits(scheduled("1f1b", between) if other is None else unpacked(other, between), between, costs)
    if not soon:
        found(play)
    copying(play, 12)
    found(play)
    there(play)
    assert play.job.change is not None and layers(play.job.change.layout) == [4, 2]


def test_where_it_takes_long_to_tell_what_fits_an_order_comes_where_nobody_holds_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Than in the layout that it was searched for; beside copies cells leave it."""
    for module in order, ordering:
        monkeypatch.setattr(module, "takes_long", lambda layout: True)
    play = searching()
    costs = play.job.costs
    assert costs is not None
    with_memory(play, dataclasses.replace(costs, memory_bytes=10_000))
    switch_to(play, found(play), 3)
    a_slow_rank(play)
    assert {each.program for each in play.sent(Plan).values()} == {None}
    copying(play, 12)
    better = found(play)
    there(play)
    assert {each.program for each in play.sent(Plan).values()} == {better.program}


def test_what_is_found_while_something_else_is_planned_waits() -> None:
    """Layers are copied already when an order comes for meanwhile: that of the goal is looked for next."""
    play = searching()
    a_slow_rank(play)
    assert play.job.ordering.searching
    play.expires("order")
    copying(play, 12)
    assert sought(play) == [], "one at a time"
    found(play)
    assert play.job.change is None
    assert [layers(layout) for layout in sought(play)] == [[4, 2]]
    order = found(play)
    there(play)
    assert play.sent(Plan)[0].program == order.program


def test_where_chunks_may_lie_elsewhere_orders_are_looked_for_when_layers_are_there() -> None:
    play = searching(places=True)
    switch_to(play, found(play), 3)
    a_slow_rank(play)
    copying(play, 12)
    assert sought(play) == []
    there(play)
    assert play.job.change is not None
    assert play.sent(Plan)[0].program == begun_with(play.job, play.job.change.layout)
    copying(play, 13)
    assert [layers(layout) for layout in sought(play)] == [[4, 2]]


def test_after_a_loss_that_leaves_no_cell_without_work_the_order_comes_back() -> None:
    """A recovered layout begins with the usual order, although cells may do the same as before."""
    play = searching()
    order = found(play)
    switch(play, 3, range(2))
    assert play.job.layout is not None
    # As after an interrupted step: the same work, another epoch.
    again = dataclasses.replace(play.job.layout, epoch=play.job.epoch + 1)
    play.job = replace(play.job, layout=again, epoch=again.epoch, newest_epoch=again.epoch)
    later(play, 1)
    turn = Turn(play.job, 1.0)
    change.replan(turn)
    assert turn.job.change is not None and turn.job.change.program == order.program


def test_an_order_is_for_what_cells_do_and_nothing_else() -> None:
    play = searching()
    switch_to(play, found(play), 3)
    a_slow_rank(play)
    copying(play, 12)
    order, job = found(play), play.job
    assert job.goal is not None and job.layout is not None
    assert ordering.planned(job, job.goal) == (job.goal, order.program)
    elsewhere = dataclasses.replace(job.layout, epoch=job.epoch + 1)
    assert ordering.planned(job, elsewhere) == (elsewhere, ordering.in_force(job, job.layout)), "they keep theirs"
    apart = turned(job.goal)
    assert ordering.planned(job, apart) == (apart, begun_with(job, apart))
    there, other = (dataclasses.replace(layout, epoch=job.epoch + 2) for layout in (job.goal, apart))
    assert ordering.due(job, there) is order and ordering.due(job, other) is None


@pytest.mark.parametrize("schedule", ["search", "1f1b"])
def test_after_a_loss_cells_begin_with_the_best_of_the_known_orders(schedule: str) -> None:
    play = along_a_pipeline()
    play.job = replace(play.job, settings=replace(play.job.settings, schedule=schedule))
    play.news(RankDying(rank=0, time=1.0))
    epoch = play.job.epoch
    play.say(*(Report(rank=rank, epoch=epoch, member=True, step=2, vote=None, last=None, held=None, interrupted_at=1.0)
               for rank in (1, 2, 3)))  # fmt: skip
    assert play.job.layout is not None and play.job.layout.lost == (0,)
    (program,) = {each.program for each in play.sent(Back).values()}
    assert ordering.in_force(play.job, play.job.layout) == program
    if schedule == "1f1b":
        assert program is None
        return
    assert program == begun_with(play.job, play.job.layout)
    order = unpacked(program, play.job.layout)
    assert {op.kind for ops in order.cells.values() for op in ops} >= {"backward_input", "backward_weight"}


def test_after_a_loss_an_order_is_looked_for_while_copies_are_under_way() -> None:
    """And comes with the next layout that is planned, in which only copies are made: steps until then are not few."""
    play = along_a_pipeline(width=3)
    play.job = replace(play.job, settings=replace(play.job.settings, schedule="search"))
    play.news(RankDying(rank=0, time=1.0))
    epoch = play.job.epoch
    play.say(*(Report(rank=rank, epoch=epoch, member=True, step=2, vote=None, last=None, held=None, interrupted_at=1.0)
               for rank in range(1, 6)))  # fmt: skip
    assert play.job.layout is not None and play.job.layout.lost == (0,) and not sought(play)
    play.news(RankExited(rank=0, returncode=-9, time=1.1))
    vote = VoteResult(step=2, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)
    play.say(Committed(rank=1, epoch=epoch, vote=vote, time=2.0, first=True))
    assert play.job.unsettled and sought(play) == [play.job.layout]
    order = found(play)
    assert not play.sent(Plan)
    there(play, range(1, 6))
    change = play.job.change
    assert change is not None and not change.unordered
    assert {each.program for each in play.sent(Plan).values()} == {order.program}


@pytest.mark.parametrize("searching", [False, True])
def test_units_that_move_at_once_come_with_the_order_that_is_searched(searching: bool) -> None:
    """All wait for the units anyway; nothing is looked for afterwards, unless a search was still under way."""
    play = along_a_pipeline(width=4)
    costs = play.job.costs
    assert costs is not None
    units = [dataclasses.replace(unit, forward_ms=600 * unit.forward_ms, backward_ms=600 * unit.backward_ms)
             for unit in costs.units]  # fmt: skip
    costs = dataclasses.replace(costs, units=tuple(units), latency_ms=300.0)
    play.job = replace(
        play.job, settings=replace(play.job.settings, schedule="search"),
        arrangement=replace(play.job.arrangement, costs=costs),
        ordering=replace(play.job.ordering, searching=searching, sought=play.job.layout),
    )  # fmt: skip
    for rank in (2, 3):
        play.news(RankDying(rank=rank, time=1.0))
    epoch = play.job.epoch
    play.say(*(Report(rank=rank, epoch=epoch, member=True, step=2, vote=None, last=None, held=None, interrupted_at=1.0)
               for rank in (0, 1, 4, 5, 6, 7)))  # fmt: skip
    layout, costs = play.job.layout, play.job.costs
    assert layout is not None and costs is not None and layout.lost == (2, 3)
    assert [len(stage.units) for stage in layout.stages] != [4, 4], "units have moved"
    order = search(layout, costs, None)
    assert order is not None and order.program != begun_with(play.job, layout)
    assert {each.program for each in play.sent(Back).values()} == {order.program}
    assert ordering.in_force(play.job, layout) == order.program
    assert [each.fields["name"] for each in play.effects if isinstance(each, WriteEvent) and each.kind == "ordered"]
    turn = Turn(play.job, 1.0)
    ordering.consider(turn, layout)
    assert not [effect for effect in turn.effects if isinstance(effect, Search)]
    if searching:
        play.happens(Found(now=1.0, epoch=0, order=order, seconds=0.1))
        turn = Turn(play.job, 1.0)
        ordering.consider(turn, layout)
        assert [effect.layout for effect in turn.effects if isinstance(effect, Search)] == [layout]


def test_the_known_order_is_one_that_fits() -> None:
    """Backwards in two keep more until they are done, most at the last stage."""
    play = along_a_pipeline(width=1)
    layout, costs = play.first, play.job.costs
    assert costs is not None
    units = [dataclasses.replace(unit, activation_bytes=10 if number < 4 else 30)
             for number, unit in enumerate(costs.units)]  # fmt: skip
    costs = dataclasses.replace(costs, units=tuple(units))
    split = order.known(layout, costs)
    assert split is not None and unpacked(split, layout) == scheduled("split", layout)
    needs = [next(room for room in range(1000) if fits(scheduled(each, layout), layout, costs, float(room)))
             for each in ("1f1b", "split")]  # fmt: skip
    assert needs[0] < needs[1]
    state = max(device_bytes(layout, rank, costs) for rank in layout.ranks)
    for room, found in zip(needs, (None, split), strict=True):
        assert order.known(layout, dataclasses.replace(costs, memory_bytes=round(state) + room)) == found
    alone = Layout.grid(tp=1, pp=1, dp=1, stage_units=(tuple(range(8)),), units=layout.units, num_grains=4,
                        num_slices=2, replicas=0)  # fmt: skip
    assert order.known(alone, costs) is None, "nobody waits for anybody"
    large = dataclasses.replace(layout, num_grains=MOST_SIMULATED)
    assert order.known(large, costs) is None, "it would take long"


def test_it_is_looked_for_again_where_cells_have_lost_the_order_that_was_the_best() -> None:
    play = searching()
    switch_to(play, found(play), 3)
    costs = play.job.arrangement.costs
    assert costs is not None
    slower = dataclasses.replace(costs, boundary_bytes=9_000_000, bandwidth=1e9)
    for again in (False, True):  # nothing is better than the order in force, by costs that have changed
        play.job = replace(play.job, arrangement=replace(play.job.arrangement, costs=dataclasses.replace(
            slower, units=tuple(dataclasses.replace(unit, forward_ms=2 * unit.forward_ms) for unit in slower.units))))
        if again:
            assert play.job.layout is not None
            anew = dataclasses.replace(play.job.layout, epoch=play.job.epoch + 1)
            play.job = replace(play.job, layout=anew, epoch=anew.epoch, newest_epoch=anew.epoch)
        turn = Turn(play.job, 1.0)
        change.replan(turn)
        play.job, play.effects = turn.job, turn.effects
        assert sought(play) == [play.job.layout]
        found(play, gain=0.0)


def test_chunks_are_placed_by_what_was_found_for_the_present_layout_alone() -> None:
    play = searching(places=True)
    layout, costs = play.job.ordering.sought, play.job.ordering.costs
    assert layout is not None and costs is not None
    order = search(layout, costs, None)
    assert order is not None
    placed = dataclasses.replace(order, stage_units=tuple(stage.units for stage in layout.stages), placed_ms=1.0)
    play.job = replace(play.job, layout=turned(layout))
    play.happens(Found(now=1.0, epoch=layout.epoch, order=placed, seconds=0.1))
    assert play.job.arrangement.placed is None


def with_memory(play: Play, costs: Costs) -> None:
    """Costs are these, also those by which an order is being looked for."""
    play.job = replace(play.job, arrangement=replace(play.job.arrangement, costs=costs),
                       ordering=replace(play.job.ordering, costs=costs))  # fmt: skip


def turned(layout: Layout) -> Layout:
    """The same, but cells do other work: their grains from the last to the first."""
    return dataclasses.replace(layout, stages=tuple(
        dataclasses.replace(stage, cells=tuple(
            dataclasses.replace(cell, grains=tuple(reversed(cell.grains))) for cell in stage.cells
        )) for stage in layout.stages
    ))  # fmt: skip


def begun_with(job: Job, layout: Layout) -> bytes:
    """The program of the best of the known orders, which is not the usual one."""
    assert job.costs is not None
    program = order.known(layout, job.costs)
    assert program is not None
    return program


def switch_to(play: Play, order: Order, number: int) -> None:
    """The order comes into force."""
    assert play.job.change is not None and play.job.change.program == order.program
    switch(play, number, range(2))
