"""How much of a unit's time a clock divides: as a profile says, a shape tells or a job measures; and what follows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replaced

from megatron_elastic.cluster.messages import Profile, RankExited, Settled
from megatron_elastic.cluster.protocol.effects import PlanClocks, WriteEvent, WriteProfile
from megatron_elastic.cluster.protocol.events import Clocked
from megatron_elastic.emulation.accelerators import ACCELERATORS
from megatron_elastic.emulation.derive import Batch, Grid, derive, layout_of
from megatron_elastic.emulation.forecast import Times, forecast
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.pipeline.prediction import predict
from megatron_elastic.pipeline.program import Op
from megatron_elastic.plan.choice import MOST_SIMULATED, step
from megatron_elastic.plan.costs.cost import Costs, ProfileError, UnitCost
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.plan.costs.profile import Sample, clock_shares
from megatron_elastic.plan.work.clock import foreseen, loads
from tests.faults.test_slow import later
from tests.plan.test_policies import LAYOUT, alike, make
from tests.play import SETTINGS, Play
from tests.tiers.examples import examples


def shared(costs: Costs, share: float) -> Costs:
    return replace(costs, units=tuple(replace(unit, clock_share=share) for unit in costs.units))


# ---- what profiles say ----------------------------------------------------------------------------


def test_a_profile_may_say_so_and_an_old_one_means_all() -> None:
    entry = {"forward_ms": 2.0, "backward_ms": 4.0, "parameter_bytes": 6, "optimizer_bytes": 12, "activation_bytes": 1}
    text = json.dumps({"units": {"layer": entry | {"clock_share": 0.5}, "head": entry}})
    costs = Costs.from_json(text, ["layer.0", "head"])
    assert [unit.clock_share for unit in costs.units] == [0.5, 1.0]
    assert [unit.at(2.0).grain_ms for unit in costs.units] == [4.5, 3.0]
    told = replace(costs, clocking=Clocking("energy"))
    assert Costs.from_json(told.to_json(["layer.0", "head"]), ["layer.0", "head"]) == costs, "no matter of a profile"
    for wrong, problem in ((1.5, "a share is at most 1"), (-0.5, "not negative")):
        with pytest.raises(ProfileError, match=problem):
            Costs.from_json(text.replace("0.5", str(wrong)), ["layer.0", "head"])
    with pytest.raises(ProfileError, match="'clocking'"):
        Costs.from_json(json.dumps({"units": {"layer": entry}, "clocking": {}}), ["layer.0"])


def test_what_a_shape_and_a_device_tell() -> None:
    """A layer of Llama-2 13B on an A100: 676e6 operations a token forward at half of 312e12 a second, and 34 bytes of
    each of its 5120 channels are written and read again, at 2.039e12 a second; thrice that with the backward pass.
    """
    def layer(device: str, tp: int = 1) -> UnitCost:
        shape, grid, batch = MODELS["llama2-13b"], Grid(tp, 4, 4), Batch(1, 4096, 32)
        profile = derive("llama2-13b", shape, device, ACCELERATORS[device], grid, batch, efficiency=0.5, time_scale=1.0,
                         step_seconds=2.0)  # fmt: skip
        layout = layout_of(shape, grid, batch)
        return profile.costs(layout.units).units[layout.units.index("layer.0")]

    products = 2 * (4 * 5120**2 + 3 * 5120 * 13824) + 2 * 4096 * 5120
    moved = 2 * 34 * 5120 / 2.039e12 / (products / 156e12)
    assert layer("a100").clock_share == pytest.approx(1 - moved, abs=1e-3)
    assert 0.9 < layer("h100").clock_share < layer("a100").clock_share, "more operations for each byte a second"
    assert layer("a100", tp=2).clock_share < layer("a100").clock_share - 0.01, "all-reduces are of the links"


# ---- what is made of it ---------------------------------------------------------------------------


def test_a_simulated_step_is_as_long_as_memory_makes_it() -> None:
    layout, fast = make(1, 1, layers=4, grains=3), {0: 2.0}
    for share, times in ((1.0, 0.5), (0.5, 0.75), (0.0, 1.0)):
        costs = shared(alike(layout), share)
        assert predict(layout, costs, fast).step_ms == pytest.approx(3 * 4 * 3 * times)
        assert step(layout, replace(costs, slow={0: 1.5}), ["1f1b"], fast) == pytest.approx(3 * 4 * 3 * times * 1.5)
        times_of = Times.of(layout, 0, costs, 2.0)
        assert times_of.ms(Op("forward", 0)) == pytest.approx(4 * times)
        assert times_of.ms(Op("backward_weight", 0)) == pytest.approx(4 * times)


def test_steps_that_are_too_long_to_simulate() -> None:
    layout = make(2, 1, layers=2, grains=MOST_SIMULATED)
    costs = shared(alike(layout), 0.5)
    usual = step(layout, costs, ["1f1b"], {})
    assert step(layout, costs, ["1f1b"], {0: 2.0, 1: 2.0}) == pytest.approx(0.75 * usual)
    assert step(layout, replace(costs, slow={1: 4.0}), ["1f1b"], {0: 2.0, 1: 2.0}) == pytest.approx(3 * usual)


def test_watts_go_where_a_clock_is_of_use() -> None:
    """The first stage waits for memory, as long as the second one computes: no clock makes it faster."""
    layout = make(2, 1, layers=2, grains=4)
    units = tuple(replace(unit, clock_share=0.0) if name == "layer.0" else unit
                  for name, unit in zip(layout.units, alike(layout).units, strict=True))  # fmt: skip
    power = PowerModel(90, 150, 250)
    costs = Costs(units, power=power, clock_steps=(0.5, 1.0, 1.5), clocking=Clocking("performance"))
    assert foreseen(layout, costs) == {0: 1.0, 1: 1.0}, "the other one would only wait"
    slower = replace(costs, units=tuple(replace(unit, forward_ms=2.0, backward_ms=4.0) if name == "layer.1" else unit
                                        for name, unit in zip(layout.units, units, strict=True)),
                     power=replace(power, host_w=power.watts(0.5) + power.watts(1.5)))  # fmt: skip
    assert foreseen(layout, slower) == {0: 0.5, 1: 1.5}
    assert {leader: load.at(clock) for (leader, load), clock in zip(loads(layout, slower).items(), (0.5, 1.5),
                                                                    strict=True)} == {0: 12.0, 1: 16.0}  # fmt: skip


def test_a_forecast_searches_an_order_for_what_cells_take_at_their_clocks() -> None:
    shape, grid, batch = MODELS["llama2-7b"], Grid(1, 2, 1), Batch(1, 4096, 4)
    profile = derive("llama2-7b", shape, "h200", ACCELERATORS["h200"], grid, batch, efficiency=0.5, time_scale=None,
                     step_seconds=1.0)  # fmt: skip
    layout = layout_of(shape, grid, batch)
    usual, fast = (forecast(layout, profile, "search", clocks) for clocks in ({}, {0: 1.2, 1: 1.2}))
    times = profile.costs(layout.units).times_as_long(range(len(layout.units)), 1.2)
    assert 1 / 1.2 < times < 0.9
    assert fast.pipeline_ms == pytest.approx(times * usual.pipeline_ms, rel=0.01)


# ---- what is measured -----------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(((1.0, 1.2), (0.6, 1.0, 1.2), (1.0, 1.5, 2.0))))
def test_what_was_measured_at_two_clocks_tells_the_share(layer: float, head: float, clocks: tuple[float, ...]) -> None:
    """Layers are alike, so those of another stage count, too."""
    costs = {unit: UnitCost(2.0, 4.0, 6 if name == "head" else 5, 12, 1, clock_share=head if name == "head" else layer)
             for unit, name in enumerate(LAYOUT.units)}  # fmt: skip
    last = len(LAYOUT.units) - 1
    seen = {(1, clocks[0]): costs[1].at(clocks[0]), (3, clocks[0]): costs[3].at(clocks[0])}
    assert clock_shares(LAYOUT, seen) == {}, "at one clock alone"
    seen |= {(2, clock): costs[2].at(clock) for clock in clocks[1:]} | {(last, 1.0): costs[last].at(1.0)}
    assert clock_shares(LAYOUT, seen) == pytest.approx(dict.fromkeys((1, 2, 3), layer), abs=1e-6)
    seen |= {(last, 1.25): costs[last].at(1.25)}
    assert clock_shares(LAYOUT, seen)[last] == pytest.approx(head, abs=1e-6)


def test_what_is_measured_is_a_share_whatever_the_noise() -> None:
    slower, faster, nothing = UnitCost(9, 0, 5, 12, 1), UnitCost(1, 0, 5, 12, 1), UnitCost(0, 0, 5, 12, 1)
    assert set(clock_shares(LAYOUT, {(1, 1.0): faster, (2, 1.2): slower}).values()) == {0.0}
    assert set(clock_shares(LAYOUT, {(1, 1.0): slower, (2, 1.2): faster}).values()) == {1.0}
    assert clock_shares(LAYOUT, {(1, 1.0): slower, (2, 1.05): faster}) == {}, "too near to tell"
    assert clock_shares(LAYOUT, {(1, 1.0): nothing, (2, 1.2): nothing}) == {}


@pytest.fixture
def play() -> Play:
    """A job that sets clocks. Ranks 0 and 1 are the cells of its stage."""
    play = Play(settings=replaced(SETTINGS, dvfs="performance", schedule="1f1b"))
    play.news(RankExited(rank=2, returncode=-9, time=1.0))
    play.say(Settled(rank=0, epoch=0), Settled(rank=1, epoch=0))
    costs = replace(Costs.assumed(play.first.units), power=PowerModel(1.0, 1.0, 1.0), clocking=Clocking("performance"))
    play.job = replaced(play.job, arrangement=replaced(play.job.arrangement, costs=costs))
    return play


def clocks_are(play: Play, clocks: dict[int, float]) -> None:
    play.happens(Clocked(now=1.0, epoch=0, clocks=clocks, step_ms=1.0, base_ms=1.0))


def measures(play: Play, rank: int, clock: float, share: float) -> None:
    """A rank tells what its units take at a clock."""
    units = {unit: UnitCost(0.0, 0.0, 6, 12, 1) if unit != 1 else UnitCost(2.0, 4.0, 5, 12, 1, clock_share=share)
             for unit in range(3)}  # fmt: skip
    told = {unit: replace(cost.at(clock), clock_share=1.0) for unit, cost in units.items()}
    play.say(Profile(rank=rank, epoch=0, sample=Sample(told, 10, None, 0.0)))


def test_a_job_learns_how_much_of_its_units_clocks_divide(play: Play) -> None:
    clocks_are(play, {1: 1.5})
    for _ in range(2):  # what comes first may be of both clocks
        measures(play, 0, 1.0, share=0.6)
    measures(play, 1, 1.2, share=0.6)
    later(play, 1)
    assert not play.effects
    measures(play, 1, 1.5, share=0.6)
    later(play, 1)
    (planned,) = [each for each in play.effects if isinstance(each, PlanClocks)]
    (written,) = [each for each in play.effects if isinstance(each, WriteProfile)]
    event, weighed = [each for each in play.effects if isinstance(each, WriteEvent)]
    assert (weighed.kind, weighed.fields["chosen"]) == ("considered", "reroute")
    assert planned.costs.units[1].clock_share == pytest.approx(0.6)
    assert [unit.forward_ms for unit in planned.costs.units] == [
        unit.forward_ms for unit in Costs.assumed(play.first.units).units], "how long it takes is what the profile says"
    assert Costs.from_json(written.text, play.first.units).units == planned.costs.units
    assert (event.kind, event.fields) == ("clock_shares", {"shares": {"layer.0": 0.6}})
    measures(play, 1, 1.5, share=0.65)
    later(play, 1)
    assert not play.effects, "much the same"
    clocks_are(play, {1: 2.0})
    measures(play, 1, 2.0, share=0.1)
    later(play, 1)
    assert not play.effects, "the first since clocks were set"


def test_slow_ranks_do_not_tell_what_clocks_divide(play: Play) -> None:
    play.job = replaced(play.job, pace=replaced(play.job.pace, believed=play.job.pace.believed.set(1, 3.0)))
    clocks_are(play, {1: 1.5})
    for rank, clock in ((0, 1.0), (0, 1.0), (1, 1.5), (1, 1.5)):
        measures(play, rank, clock, share=0.2)
    later(play, 1)
    assert play.job.arrangement.costs is not None and play.job.arrangement.costs.units[1].clock_share == 1.0
