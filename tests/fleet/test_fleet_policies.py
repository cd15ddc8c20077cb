"""Policies against examples worked by hand, and the controller's estimates against simulations of their assumptions."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, exp, log
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.fleet.admission import fill
from megatron_elastic.fleet.arrivals import Rates
from megatron_elastic.fleet.benefit import gain, used_window
from megatron_elastic.fleet.controller import Controller, give_back
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Observation, Overhead, Resize, Running, Start
from megatron_elastic.fleet.policies import NAMES, RESTART, policy
from megatron_elastic.fleet.policies.elasticflow import satisfactory_share, slots_of, without
from megatron_elastic.fleet.policies.pollux import efficiency, goodputs, step_s
from megatron_elastic.fleet.policies.pollux import share as pollux_share
from megatron_elastic.fleet.policies.rubick import share as rubick_share
from megatron_elastic.fleet.policies.tables import (
    both,
    data_parallel,
    logical_workers,
    pipeline_parallel,
    powers_of_two,
    uneven,
)
from megatron_elastic.fleet.policies.torchelastic import torchelastic
from megatron_elastic.fleet.simulated.models import LARGE, MEDIUM, MODELS, SMALL, Layouts, model_of
from megatron_elastic.fleet.speed_table import SpeedTable
from tests.fleet.fleet_jobs import job, member
from tests.tiers.examples import examples

TABLES = (data_parallel, powers_of_two, pipeline_parallel, both, uneven, logical_workers, goodputs)
HALVING = SpeedTable((1, 2, 4), (1.0, 1.5, 2.0))
LINEAR = SpeedTable((32, 64, 96, 128), (1.0, 2.0, 3.0, 4.0))
FLAT = SpeedTable((32, 64, 96, 128), (1.0, 1.2, 1.3, 1.35))


def seen(
    total: int, running: Sequence[Running] = (), queue: Sequence[Job] = (),
    rigid: Mapping[int, tuple[float, int]] = MappingProxyType({}), now: float = 0.0, arrived: Sequence[int] = (),
) -> Observation:  # fmt: skip
    rigid_devices = sum(devices for _, devices in rigid.values())
    free = total - rigid_devices - sum(run.devices for run in running)
    by_index = {run.job.index: run for run in running}
    return Observation(now, total, free, rigid, rigid_devices, by_index, queue, arrived, 0)


# ---- models and tables -----------------------------------------------------------------------


def test_the_table_of_the_slides() -> None:
    assert [model.devices for model in MODELS] == [32, 64, 256]
    assert [max(uneven(job(0, 0, 1, model.devices)).devices) for model in MODELS] == [128, 256, 1024]
    assert [model_of(n) for n in (31, 32, 63, 64, 255, 256, 999)] == [None, SMALL, SMALL, MEDIUM, MEDIUM, LARGE, LARGE]


def test_stages_worked_by_hand() -> None:
    # 18 units: 4 stages have at most 5, 5 at most 4, 6 three, 9 two. 1024 grains in one cell of each stage.
    table = pipeline_parallel(job(0, 0, 1, 32))
    assert table.devices == (32, 40, 48, 72)
    steps = [(1024 + stages - 1) * ceil(18 / stages) for stages in (4, 5, 6, 9)]
    assert table.speeds == pytest.approx([steps[0] / step for step in steps])


def test_uneven_widths_worked_by_hand() -> None:
    # Five cells, four stages of 5, 5, 4 and 4 units: a second cell for one of the first two leaves the other.
    # So five stages are better: 4, 4, 4, 3 and 3 units, 1024 grains, 4 x 1024 + 4 + 4 + 3 + 3.
    layouts = Layouts(SMALL, 32)
    assert layouts.uneven_s(5) == pytest.approx((4 * 1024 + 14) * SMALL.unit_s(8))
    assert layouts.uneven_s(4) == pytest.approx((5 * 1024 + 13) * SMALL.unit_s(8))


@pytest.mark.parametrize("devices", [32, 33, 40, 48, 64, 96, 100, 256, 512])
@pytest.mark.parametrize("table_of", TABLES)
def test_tables_rise(devices: int, table_of: object) -> None:
    assert callable(table_of)
    table = table_of(job(0, 0, 1, devices))
    assert table.speed(devices) == 1.0
    assert list(table.devices) == sorted(set(table.devices))
    assert max(table.devices) <= 4 * devices
    for slower, faster in zip(table.speeds, table.speeds[1:], strict=False):
        assert faster >= 1.0099 * slower
    assert table.speed(table.devices[0] - 1) == 0
    assert table.fit(10**6) == table.devices[-1]


def test_uneven_is_never_slower_than_even() -> None:
    for model in MODELS:
        own = job(0, 0, 1, model.devices)
        even, free = both(own), uneven(own)
        assert all(
            free.speed(devices) >= speed - 0.011 for devices, speed in zip(even.devices, even.speeds, strict=True)
        )


def test_rigid_jobs_have_one_entry() -> None:
    for table_of in (data_parallel, both, uneven, goodputs):
        assert table_of(job(0, 0, 1, 8)) == SpeedTable((8,), (1.0,))


# ---- estimates -------------------------------------------------------------------------------


def test_rates_of_a_poisson_process() -> None:
    draw = random.Random(1)
    now, rates = 0.0, Rates(0.0, 0.0)
    estimates = []
    for index in range(4000):
        now += draw.expovariate(1 / 100)
        rates = rates.seen(now, [draw.choice([1, 8, 64])], 1)
        if index > 1000:
            estimates.append([rates.above(n, now) * 100 for n in (0, 1, 8, 64)] + [rates.ending(now) * 100])
    means = [sum(column) / len(column) for column in zip(*estimates, strict=True)]
    one_more = 100 / (6 * 3600)
    expected = [1 + one_more, 2 / 3 + one_more, 1 / 3 + one_more, one_more, 1 + one_more]
    assert means == pytest.approx(expected, rel=0.05)
    assert rates.usual_devices == pytest.approx((1 + 8 + 64) / 3, rel=0.25)


def test_silence_counts() -> None:
    rates = Rates(0.0, 0.0).seen(0.0, [8], 0)
    assert rates.above(4, 0.0) == 2 / 60  # nothing is concluded from less than a minute
    assert rates.above(4, 1e7) == pytest.approx(1 / 21600, rel=1e-3)
    assert rates.above(8, 3600.0) == pytest.approx(1 / (21600 * (1 - exp(-1 / 6))))
    later = [rates.above(4, hour * 3600.0) for hour in range(1, 48)]
    assert later == sorted(later, reverse=True)


@pytest.mark.parametrize("rate", [1e-12, 1e-5, 1e-3, 1e-1])
@pytest.mark.parametrize("remaining", [50.0, 5_000.0, 500_000.0])
@pytest.mark.parametrize("overhead", [Overhead(0.0), Overhead(0.1, 30.0), Overhead(60.0), Overhead(300.0)])
def test_benefit_against_a_simulation_of_its_assumptions(rate: float, remaining: float, overhead: Overhead) -> None:
    """Windows are drawn, and a job is followed second by second, with the growth and without.

    The formula takes the whole pause for granted, and its horizon does not move by the overhead. So it may promise less
    than comes, by at most what happens in the overhead, and never more.
    """
    speed, faster, newcomer, given_devices = 1.0, 2.5, 8.0, 32
    draw = random.Random(7)
    horizon = remaining / faster
    gains = []
    for _ in range(20_000):
        window = draw.expovariate(rate)
        end = min(window, horizon)
        lead = min(end, overhead.lead_s)
        pause = min(end - lead, overhead.pause_s)
        grown = speed * lead + faster * (end - lead - pause)
        stayed = speed * end
        if window < horizon:  # both go on at the old speed, the grown one after a pause in which the newcomer waits
            stayed += (speed + newcomer / given_devices) * overhead.pause_s
        gains.append(grown - stayed)
    mean = sum(gains) / len(gains)
    error = (sum((value - mean) ** 2 for value in gains) / len(gains) / len(gains)) ** 0.5
    promised = gain(speed, faster, remaining, rate, overhead, newcomer, given_devices)
    assert promised <= mean + 4 * error + 1e-6
    assert promised >= mean - 4 * error - speed * overhead.pause_s - 1e-6 * remaining


@settings(max_examples=examples(2000))
@given(rate=st.floats(0, 10), overhead=st.floats(0, 1e4), horizon=st.floats(0, 1e7))
def test_used_window_is_a_part_of_the_window(rate: float, overhead: float, horizon: float) -> None:
    used = used_window(rate, overhead, horizon)
    assert 0 <= used <= max(0.0, horizon - overhead) * (1 + 1e-6)
    if rate > 0:
        assert used <= exp(-rate * overhead) / rate * (1 + 1e-6)


def test_benefit_worked_by_hand() -> None:
    # Without costs and end it is (r' - r) / l; with costs, (r' - r) exp(-l c) / l - r (c + c); then 8 devices wait.
    assert gain(1, 2, 1e12, 0.01, Overhead(0.0), 8, 32) == pytest.approx(100)
    assert gain(1, 2, 1e12, 0.01, Overhead(60.0), 0, 32) == pytest.approx(100 * exp(-0.6) - 120)
    assert gain(1, 2, 1e12, 0.01, Overhead(60.0), 8, 32) == pytest.approx(100 * exp(-0.6) - 120 - 60 * 8 / 32)
    # Half of the windows last beyond the end of the job.
    assert gain(1, 2, 200 * log(2), 0.01, Overhead(0.0), 8, 32) == pytest.approx(50)


# ---- the controller --------------------------------------------------------------------------


def controller(pause: float) -> Controller:
    return Controller("test", lambda own: LINEAR, Overhead(pause))


def busy(pace_s: float, now: float, devices: int) -> Rates:
    """Jobs of so many devices have come every ``pace_s`` seconds."""
    rates = Rates(0.0, 0.0)
    for count in range(1, int(now / pace_s) + 1):
        rates = rates.seen(count * pace_s, [devices], 1)
    return rates


def test_growth_pays_when_it_costs_little() -> None:
    runs = [Running(job(0, 0, 1e6, 32), 32, 1e6, 0.0)]
    state = busy(300.0, 21_600.0, 8)
    tight = seen(64, runs, now=21_600.0)
    assert controller(0.1).decide(state, tight)[1].changes == [Resize(0, 64)]
    assert controller(300.0).decide(state, tight)[1].changes == []
    # Where who comes fits beside it, nobody ends the window: then five minutes are worth it, but not for all devices.
    assert controller(300.0).decide(state, seen(104, runs, now=21_600.0))[1].changes == [Resize(0, 96)]
    assert controller(300.0).decide(state, seen(96, runs, now=21_600.0))[1].changes == [Resize(0, 64)]
    assert controller(0.1).decide(state, seen(96, runs, now=21_600.0))[1].changes == [Resize(0, 96)]


def test_it_asks_again_where_somebody_could_grow() -> None:
    runs = [Running(job(0, 0, 1e6, 32), 32, 1e6, 0.0)]
    assert controller(300.0).decide(busy(300.0, 21_600.0, 8), seen(64, runs, now=21_600.0))[1].again_s == 60.0
    assert controller(0.1).decide(None, seen(32, runs))[1].again_s is None


def test_who_waits_for_long_ends_the_window_when_a_job_ends() -> None:
    # 200 devices are asked for and cannot be had, so newcomers do not count; jobs end every 300 s, or never did.
    runs = [Running(job(0, 0, 1e6, 32), 32, 1e6, 0.0)]
    blocked = seen(232, runs, [job(2, 0, 1, 200)], rigid={1: (1e9, 136)}, now=21_600.0)
    often = busy(300.0, 21_600.0, 8)
    assert controller(300.0).decide(often, blocked)[1].changes == []
    assert controller(300.0).decide(replace(often, ends=0.0), blocked)[1].changes == [Resize(0, 96)]


def test_a_newcomer_gets_what_was_lent_and_no_more() -> None:
    runs = [Running(job(0, 0, 1e6, 32), 128, 1e6, 0.0)]
    newcomer = job(1, 50, 100, 8)
    _, (changes, _) = controller(0.1).decide(None, seen(128, runs, [newcomer], now=50.0, arrived=[8]))
    assert changes == [Resize(0, 96)]  # it starts when they are free
    runs[0].devices = 96
    _, (changes, _) = controller(0.1).decide(None, seen(128, runs, [newcomer], now=50.1))
    assert changes == [Start(1, 8)]


def test_never_below_what_was_given() -> None:
    runs = [Running(job(0, 0, 1e6, 32), 64, 1e6, 0.0), Running(job(1, 0, 1e6, 32), 32, 1e6, 0.0)]
    waiting = [job(2, 50, 100, 40), job(3, 51, 100, 8)]
    _, (changes, _) = controller(0.1).decide(None, seen(96, runs, waiting, now=51.0))
    assert changes == []  # 40 could not be had even so, and 8 does not overtake


def test_who_loses_least_gives_back() -> None:
    members = [member(0, LINEAR, 32, 128), member(1, FLAT, 32, 128)]
    targets = {0: 128, 1: 128}
    give_back(members, targets, 60)
    assert targets == {0: 128, 1: 64}
    give_back(members, targets, 33)
    assert targets == {0: 96, 1: 32}
    with pytest.raises(ValueError, match="promised"):
        give_back(members, targets, 97)


def test_what_was_taken_beyond_the_need_is_left() -> None:
    # 8 more come from the flat curve for less a device; then 64 are needed at once, and those 8 are not.
    small_steps = SpeedTable((32, 40), (1.0, 1.01))
    targets = {0: 40, 1: 96}
    give_back([member(0, small_steps, 32, 40), member(1, SpeedTable((32, 96), (1.0, 3.0)), 32, 96)], targets, 64)
    assert targets == {0: 40, 1: 32}


@settings(max_examples=examples(2000))
@given(
    st.lists(
        st.tuples(st.sampled_from([LINEAR, FLAT, SpeedTable((32, 128), (1.0, 3.0))]), st.integers(0, 3)), min_size=1
    ),
    st.integers(0, 400),
)
def test_give_back_is_enough_and_in_the_tables(drawn: list[tuple[SpeedTable, int]], need: int) -> None:
    members = [
        member(i, table, 32, table.devices[min(at, len(table.devices) - 1)]) for i, (table, at) in enumerate(drawn)
    ]
    targets = {own.job.index: own.devices for own in members}
    before = dict(targets)
    can = sum(own.devices - 32 for own in members)
    if need > can:
        with pytest.raises(ValueError, match="promised"):
            give_back(members, targets, need)
        return
    give_back(members, targets, need)
    assert sum(before.values()) - sum(targets.values()) >= need
    for own in members:
        assert 32 <= targets[own.job.index] <= before[own.job.index]
        assert targets[own.job.index] in own.table.devices


# ---- others ----------------------------------------------------------------------------------


def test_elasticflow_minimum_satisfactory_share() -> None:
    # Throughput 1, 1.5 and 2 on 1, 2 and 4 devices.
    assert satisfactory_share(HALVING, 10, 10, [(0, 4)]) == (1, 10)
    assert satisfactory_share(HALVING, 12, 8, [(0, 4)]) == (2, 8)
    assert satisfactory_share(HALVING, 13, 8, [(0, 4)]) == (4, 6.5)
    assert satisfactory_share(HALVING, 17, 8, [(0, 4)]) is None
    # One device until 4, four after that: 4 x 1 + 4 x 1.5 is not enough for 12, 4 x 1 + 4 x 2 is.
    assert satisfactory_share(HALVING, 12, 8, [(0, 1), (4, 4)]) == (4, 8)
    # Another job's share is gone: two of four until 6, so 6 x 1.5 + 2 x 2 for 13.
    left = without([(0, 4)], HALVING, 2, 6)
    assert left == [(0, 2), (6, 4)]
    assert satisfactory_share(HALVING, 13, 8, left) == (4, 8)


def test_elasticflow_knows_when_others_end() -> None:
    observation = seen(20, rigid={5: (130.0, 4), 6: (60.0, 8), 7: (240.0, 1)}, now=0.0)
    assert slots_of(observation, 7)[:5] == [(0.0, 7), (60.0, 15), (120.0, 15), (240.0, 20), (480.0, 20)]
    assert slots_of(seen(20, rigid={5: (1e12, 4)}), 16)[-2:] == [(60.0 * 2**17, 16), (60.0 * 2**18, 20)]


def test_elasticflow_meets_the_nearer_deadline_first() -> None:
    # Both would like 128; the second has to run at almost twice its speed, the first has time.
    runs = [
        Running(job(0, 0, 1000, 32, deadline=1e9), 32, 1000, 0.0),
        Running(job(1, 0, 1000, 32, deadline=520), 32, 1000, 0.0),
    ]
    _, (changes, _) = policy("elasticflow").decide(None, seen(96, runs))
    assert changes == [Resize(1, 64)]


def test_pollux_formulas() -> None:
    assert efficiency(1, 3.0) == 1
    assert efficiency(2, 1.0) == pytest.approx(2 / 3)
    var, mean, m = 12.0, 2.0, 4.0
    assert efficiency(m, var / mean**2) == pytest.approx(((var + mean**2) / (var / m + mean**2)) / m)
    assert step_s(3, 4, 0, 2) == pytest.approx(5)
    assert step_s(3, 4, 2, 2) == pytest.approx(11)
    assert step_s(3, 4, 0, 1) == pytest.approx(7)
    assert step_s(3, 4, 0, 10) == pytest.approx(4, rel=0.01)


def test_pollux_is_fair_and_shy_of_changes() -> None:
    members = [member(0, LINEAR, 32), member(1, LINEAR, 32)]
    share = pollux_share(60.0)
    assert share(seen(128), members, 128) == {0: 64, 1: 64}
    # Started 100 s ago, changed once: (100 - 60) / (100 + 60) of twice the speed is less than the present speed.
    settled = [member(0, LINEAR, 32, 32, started=0.0, changes=1)]
    assert share(seen(64, now=100.0), settled, 64) == {0: 32}
    assert share(seen(64, now=10_000.0), settled, 64) == {0: 64}


def test_rubick_goes_by_slopes_and_spares_who_was_changed_often() -> None:
    members = [member(0, LINEAR, 32), member(1, FLAT, 32)]
    share = rubick_share(60.0)
    assert share(seen(160), members, 160) == {0: 128, 1: 32}
    # 10,000 s old and changed 4 times: a fifth change leaves 97 % of its time, a sixth does not.
    for changes, devices in ((4, 128), (5, 64)):
        changed = [member(0, LINEAR, 32, 64, changes=changes)]
        assert share(seen(128, now=10_000.0), changed, 128) == {0: devices}


def test_easyscale_takes_turns() -> None:
    # Four logical workers: three cells are no faster than two, as one of them has two turns.
    assert logical_workers(job(0, 0, 1, 32)).devices == (32, 64, 128)
    # Eight of them for the medium model, which has two as submitted: 8, 4, 3, 2 and 1 turns.
    table = logical_workers(job(0, 0, 1, 64))
    assert table.devices == (32, 64, 96, 128, 256)
    grains = 256 / 8
    busy_s = [(ceil(8 / q) * grains + 3) * 8 * MEDIUM.unit_s(8) + MEDIUM.sync_s(4, q, 8) for q in (1, 2, 3, 4, 8)]
    assert table.speeds == pytest.approx([busy_s[1] / own for own in busy_s])


def test_torchelastic_first_come_first_served() -> None:
    runs = [Running(job(0, 0, 1e6, 32), 32, 1e6, 5.0), Running(job(1, 0, 1e6, 32), 64, 1e6, 0.0)]
    _, (changes, _) = torchelastic(RESTART).decide(None, seen(160, runs))
    assert changes == [Resize(1, 128)]
    runs[1].devices = 128
    _, (changes, _) = torchelastic(RESTART).decide(None, seen(168, runs, [job(2, 0, 1, 16)]))
    assert changes == [Resize(1, 96)]


def test_fill_steps_over_plateaus() -> None:
    stepped = SpeedTable((32, 40, 64), (1.0, 1.001, 3.0))
    assert fill([member(0, stepped, 32)], 64, lambda own, n: own.table.speed(n)) == {0: 64}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(300))
@given(
    total=st.integers(64, 700),
    given_devices=st.lists(st.sampled_from([32, 40, 64, 128]), max_size=5),
    waiting=st.lists(st.sampled_from([1, 8, 16, 32, 64]), max_size=5),
    now=st.floats(0, 1e6),
)
def test_decisions_fit(name: str, total: int, given_devices: list[int], waiting: list[int], now: float) -> None:
    """What is decided can be done in the order given, and keeps to the tables."""
    chosen = policy(name)
    runs: list[Running] = []
    for index, devices in enumerate(given_devices):
        if sum(run.devices for run in runs) + devices <= total:
            runs.append(Running(job(index, 0, 1e6, devices, deadline=2e6), devices, 5e5, 0.0))
    queue = [job(10 + index, 0, 1000, devices, deadline=2e6) for index, devices in enumerate(waiting)]
    observation = seen(total, runs, queue, now=now, arrived=waiting)
    before = [(run.job.index, run.devices) for run in runs]
    state, decisions = chosen.decide(chosen.begin(), observation)
    assert chosen.decide(chosen.begin(), observation) == (state, decisions)
    assert [(run.job.index, run.devices) for run in runs] == before
    free = observation.free
    order = [change.job for change in decisions.changes if isinstance(change, Start)]
    assert order == [own.index for own in queue[: len(order)]]
    for change in decisions.changes:
        own = next(own for own in [run.job for run in runs] + queue if own.index == change.job)
        had = 0 if isinstance(change, Start) else dict(before)[change.job]
        assert change.devices - had <= free
        assert chosen.speed(own, change.devices) > 0 if own.elastic else change.devices == own.devices
        if change.devices > had:  # what is given back is free later
            free -= change.devices - had
