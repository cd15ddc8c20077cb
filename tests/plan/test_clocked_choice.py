"""Clocks and layers together: what a clock does as well is not done by moving layers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from megatron_elastic.cluster.messages import Committed, RankExited, Report, Settled, VoteResult
from megatron_elastic.cluster.protocol.effects import WriteEvent
from megatron_elastic.cluster.protocol.job import Settings
from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.pipeline.prediction import predict
from megatron_elastic.plan.choice import best, step, ways
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.plan.errors import NoLayout
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.plan.work.clock import Budget, Limits, foreseen, loads
from tests.plan.test_policies import LAYOUT, alike, random_job
from tests.play import SETTINGS, Play
from tests.tiers.examples import examples

POWER = PowerModel(idle_w=90, static_w=150, dynamic_w=250)
ELASTIC = POLICIES["elastic"]
VOTE = VoteResult(step=1, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=4, tokens=4)


def costs(*steps: float, boosted: int, mode: str = "performance", share: float = 1.0) -> Costs:
    """Of a host whose watts let so many of its 15 devices run at the highest clock, the others at the base clock."""
    usual = alike(LAYOUT)
    host_w = boosted * POWER.watts(steps[-1]) + (15 - boosted) * POWER.watts(1.0)
    units = tuple(replace(unit, clock_share=share) for unit in usual.units)
    return replace(usual, units=units, power=replace(POWER, host_w=host_w), clock_steps=steps, clocking=Clocking(mode))


def after(told: Costs) -> Layout:
    """Rank 5 is lost: stage 1 has three cells, of which two have eleven grains in place of eight."""
    return ELASTIC.lose(LAYOUT, [5], Holdings.of(LAYOUT).without([5]), 1, told)


def test_a_layer_is_not_moved_if_a_clock_does_it() -> None:
    told = costs(1.0, 1.5, boosted=3)
    layout = after(told)
    found = ways(layout, told, tied=False)
    chosen, unclocked = best(found), best(found, clocked=False)
    assert (chosen.name, unclocked.name) == ("reroute", "cells")
    assert {leader for leader, clock in chosen.clocks.items() if clock == 1.5} == {
        cell.leader for cell in layout.stages[1].cells}, "who has more to do"
    assert chosen.step_ms < min(unclocked.step_ms, unclocked.base_ms) < chosen.base_ms
    assert ELASTIC.settle(layout, told).stages == layout.stages, "nothing moves"
    assert ELASTIC.settle(layout, replace(told, clocking=None)).stages != layout.stages


@pytest.mark.parametrize(("steps", "boosted", "share"), [((1.0, 1.1), 15, 1.0), ((1.0, 1.5), 2, 1.0),
                                                         ((1.0, 1.5), 3, 0.3)])  # fmt: skip
def test_layers_move_where_no_clock_is_enough_and_clocks_help_then(
    steps: tuple[float, ...], boosted: int, share: float
) -> None:
    """There is no higher one; a host has no watts for all who need it; or memory is what most of the time goes to."""
    told = costs(*steps, boosted=boosted, share=share)
    layout = after(told)
    found = ways(layout, told, tied=False)
    chosen = best(found)
    assert chosen.name != "reroute"
    assert chosen.step_ms < found[0].step_ms < found[0].base_ms
    if boosted == 15:
        assert max(chosen.clocks.values()) == steps[-1] and chosen.step_ms < chosen.base_ms
    settled = ELASTIC.settle(layout, told)
    assert [stage.width for stage in settled.stages] == [stage.width for stage in chosen.layout.stages]
    assert [stage.units for stage in settled.stages] == [stage.units for stage in chosen.layout.stages]


def test_to_save_energy_layouts_are_compared_at_the_base_clock() -> None:
    """No step is to take longer than there, and none less."""
    told = costs(0.8, 1.0, 1.4, boosted=15, mode="energy")
    found = ways(after(told), told, tied=False)
    assert best(found) is best(found, clocked=False)
    assert all(way.step_ms == way.base_ms for way in found)


def test_devices_that_are_held_down_do_not_count_as_faster() -> None:
    told = costs(1.0, 1.5, boosted=3)
    layout = after(told)
    hot = layout.stages[1].cells[0].leader
    assert told.clocking is not None
    held = replace(told, clocking=replace(told.clocking, highest={hot: 1.0}))
    found = ways(layout, held, tied=False)
    assert found[0].clocks[hot] == 1.0 and best(found).name != "reroute"


def test_ways_are_weighed_at_the_best_clocks_of_each() -> None:
    """Against all clocks there could be, in small jobs with a limit of watts: nothing lets the slowest cell be earlier,
    and no other way is better than the one that is chosen.
    """
    tried = 0
    for seed in range(examples(150)):
        rng = random.Random(seed)
        layout, usual, lost = random_job(rng)
        left = len(layout.cells) - len(lost)
        if left > 6:
            continue
        units = tuple(replace(unit, clock_share=rng.choice((1.0, 0.5))) for unit in usual.units)
        power = replace(POWER, host_w=rng.uniform(0.8, 1.5) * left * POWER.watts(1.0))
        told = replace(usual, units=units, power=power, clock_steps=(0.8, 1.0, 1.25), clocking=Clocking("performance"))
        try:
            interim = ELASTIC.lose(layout, lost, Holdings.of(layout).without(lost), 1, told)
        except NoLayout:
            continue
        found = ways(interim, told, tied=False, schedules=["1f1b"])
        for way in found:
            work = loads(way.layout, told)
            budget = Budget.of(way.layout, Limits.under(way.layout, told), power)
            possible = [dict(zip(work, chosen, strict=True)) for chosen in product((0.8, 1.0, 1.25), repeat=len(work))]
            affordable = [clocks for clocks in possible if budget.affords(clocks)] or [dict.fromkeys(work, 0.8)]
            least = min(max(work[leader].at(clocks[leader]) for leader in work) for clocks in affordable)
            clocks = foreseen(way.layout, told)
            assert max(work[leader].at(clocks[leader]) for leader in work) == pytest.approx(least), seed
            assert budget.affords(clocks) or set(clocks.values()) == {0.8}
            assert way.step_ms == predict(way.layout, told, way.clocks, schedules=["1f1b"]).step_ms
            assert way.step_ms == step(way.layout, told, ["1f1b"])
        assert best(found).gain >= max(way.gain for way in found) / (1 + 1e-3) ** len(found)
        tried += 1
    assert tried >= examples(150) // 15


def considered(told: Costs, settings: Settings) -> Mapping[str, Any]:
    """The one event that tells what was weighed, in a job of two stages of two cells, one of which is lost."""
    play = Play(((0, 1), (2,)), settings)
    play.job = replaced(play.job, arrangement=replaced(play.job.arrangement, costs=told))
    play.news(RankExited(rank=4, returncode=-9, time=1.0))  # who could take the lost one's place
    play.news(RankExited(rank=0, returncode=-9, time=1.0))
    for rank in (1, 2, 3):
        play.say(Report(rank=rank, epoch=1, member=True, step=1, vote=None, last=None, held=None, interrupted_at=1.0))
    play.say(Committed(rank=1, epoch=1, vote=VOTE, time=1.0, first=True))
    events = []
    for rank in (1, 2, 3):
        play.say(Settled(rank=rank, epoch=1))
        events += [each.fields for each in play.effects if isinstance(each, WriteEvent) and each.kind == "considered"]
    (event,) = events
    return event


def test_the_event_tells_what_was_weighed_where_nothing_moves() -> None:
    """The other stage has nearly all to do."""
    told = Costs((UnitCost(0, 0, 6, 12, 1), UnitCost(0.1, 0.2, 6, 12, 1), UnitCost(2, 4, 6, 12, 1)))
    event = considered(told, replaced(SETTINGS, schedule="1f1b"))
    assert event["chosen"] == "reroute" and len(event["ways"]) > 1


def test_the_event_tells_what_clocks_have_changed() -> None:
    """At twice the clock the cell that is left of a stage does what both did."""
    settings = replaced(SETTINGS, dvfs="performance", schedule="1f1b")
    costs_of = {"embedding": UnitCost(0, 0, 6, 12, 1), "layer.0": UnitCost(2, 4, 6, 12, 1),
                "head": UnitCost(1, 2, 6, 12, 1)}  # fmt: skip
    for steps, chosen, boosted in (((1.0, 2.0), "reroute", 1), ((1.0, 1.1), "cells", 3)):
        host_w = boosted * POWER.watts(steps[-1]) + (3 - boosted) * POWER.watts(1.0)
        told = Costs(tuple(costs_of.values()), power=replace(POWER, host_w=host_w), clock_steps=steps,
                     clocking=Clocking("performance"))  # fmt: skip
        event = considered(told, settings)
        assert event["chosen"] == chosen and event["without_clocks"] == "cells"
        stays, *_ = event["ways"]
        assert stays["clocks"] == ({"1": 2, "2": 1} if chosen == "reroute" else {"1": 2, "1.1": 1})
        assert stays["step_ms"] < stays["base_ms"]
