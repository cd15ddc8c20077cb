"""A simulated cluster: no device is held twice, all work is done, and what can be worked out by hand comes out."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.fleet.faults import Drawn, Fault, FaultsError, Recorded
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Decisions, Observation, Overhead, Resize, Start
from megatron_elastic.fleet.placement import Buddies, Nodes, Placement
from megatron_elastic.fleet.policies import NAMES, policy
from megatron_elastic.fleet.policies.elastic import elastic
from megatron_elastic.fleet.policies.fifo import fifo
from megatron_elastic.fleet.simulated.course import Course
from megatron_elastic.fleet.simulated.simulation import Simulation
from megatron_elastic.fleet.simulated.usage import Usage
from tests.fleet.fleet_jobs import KEEPS_GIVEN, Watched, job
from tests.tiers.examples import examples

TRACES = st.lists(
    st.tuples(
        st.integers(0, 4000),
        st.integers(1, 5000),
        st.sampled_from([1, 2, 3, 8, 16, 32, 40, 64, 96, 128]),
        st.floats(0.5, 1.5),
    ),
    min_size=1,
    max_size=14,
)


def jobs_of(drawn: list[tuple[int, int, int, float]]) -> list[Job]:
    ordered = sorted(drawn)
    return [job(i, s, d, n, s + tight * d) for i, (s, d, n, tight) in enumerate(ordered)]


def test_fifo_worked_by_hand() -> None:
    # Eight devices. A holds four until 10; B needs all eight and goes first; C would fit beside A and waits behind B.
    jobs = [job(0, 0, 10, 4), job(1, 1, 5, 8, deadline=14), job(2, 2, 3, 4, deadline=18)]
    watched = Watched(jobs, 8, fifo())
    outcome = watched.run()
    assert {index: times[0][0] for index, times in watched.held.items()} == {0: 0, 1: 10, 2: 15}
    figures = outcome.figures()
    assert figures["mean_jct_s"] == round((10 + 14 + 16) / 3, 1)
    assert figures["mean_other_queue_s"] == round((0 + 9 + 13) / 3, 1)
    assert figures["mean_elastic_jct_s"] is None
    assert figures["makespan_s"] == 18
    assert figures["utilisation"] == round((4 * 10 + 8 * 5 + 4 * 3) / (8 * 18), 4)
    assert figures["deadlines_met"] == round(2 / 3, 4)  # B is late by a second
    assert figures["goodput"] == 1.0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(150))
@given(drawn=TRACES, pause=st.sampled_from([0.0, 1.0, 60.0, 700.0]), total=st.integers(128, 300))
def test_work_is_conserved(name: str, drawn: list[tuple[int, int, int, float]], pause: float, total: int) -> None:
    jobs = jobs_of(drawn)
    chosen = elastic(Overhead(pause)) if name == "elastic" else policy(name, pause)
    ends: dict[int, float] = {}
    watched = Watched(jobs, total, chosen)
    simulation = watched.simulation
    proceed = simulation._end

    def end(course: Course) -> None:
        ends[course.job.index] = simulation.now
        proceed(course)

    simulation._end = end  # type: ignore[method-assign]
    outcome = watched.run()
    assert outcome.jobs == len(jobs) == len(ends)
    for own in jobs:
        held = watched.held.get(own.index, [])
        assert held or ends[own.index] == own.submitted
        done = 0.0
        for at, (since, devices) in enumerate(held):
            until = held[at + 1][0] if at + 1 < len(held) else ends[own.index]
            working = until - since if at == 0 else max(0.0, until - since - pause)
            done += working * (chosen.speed(own, devices) if own.elastic else 1.0)
            assert own.elastic or devices == own.devices
            assert devices >= own.devices or name not in KEEPS_GIVEN
        assert held[0][0] >= own.submitted
        assert done == pytest.approx(own.duration, rel=1e-6, abs=1e-6)
    starts = [held[0][0] for _, held in sorted(watched.held.items())]
    assert starts == sorted(starts), "somebody was overtaken"


@pytest.mark.parametrize("name", NAMES)
def test_the_same_twice(name: str) -> None:
    drawn = random.Random(5)
    jobs = jobs_of([(drawn.randrange(9000), drawn.randrange(1, 9000), 2 ** drawn.randrange(7), 1.0) for _ in range(60)])
    figures = [Simulation(jobs, 136, policy(name), Drawn(6000.0), seed=3).run().figures() for _ in range(2)]
    assert {**figures[0], "simulated_in_s": 0} == {**figures[1], "simulated_in_s": 0}
    other = Simulation(jobs, 136, policy(name), Drawn(6000.0), seed=4).run().figures()
    assert other["failures"] != figures[0]["failures"] or other["mean_jct_s"] != figures[0]["mean_jct_s"]


def test_growth_by_steps_of_a_course() -> None:
    # Twice as fast after a lead of 30 and a pause of 10, decided at 5: 5 + 30 + 0 + 2 x 32.5 = 100.
    course = Course(job(0, 0, 100, 32), 32, 0.0, 100.0, 0.0, [(inf, 1.0)])
    course.proceed(5.0)
    course.change(64, 2.0, Overhead(10.0, 30.0))
    assert course.end() == 45 + 32.5
    course.proceed(20.0)
    assert course.remaining == 80
    # Given back in the lead: nothing was gained, and the pause is lost.
    course.change(32, 1.0, Overhead(10.0, 30.0))
    assert course.end() == 20 + 10 + 80
    course.proceed(110.0)
    assert course.remaining == pytest.approx(0.0)


def test_devices_that_are_given_back_are_free_after_the_pause() -> None:
    # The first job has all 64 devices, at speed 1.99, when 32 are asked for: they come after 100 s.
    jobs = [job(0, 0, 100_000, 32), job(1, 5000, 10, 32, elastic=False)]
    watched = Watched(jobs, 64, policy("torchelastic", 100.0))
    outcome = watched.run()
    assert watched.held[0][:2] == [(0, 64), (5000, 32)]
    assert watched.held[1] == [(5100, 32)]
    assert outcome.other_queue == 100
    assert outcome.scalings == 2  # and back when that has ended


def test_failures_cost_the_work_since_the_checkpoint() -> None:
    (alone,) = [job(0, 0, 100_000, 8, elastic=False)]
    outcome = Simulation([alone], 8, fifo(), faults=Drawn(20_000.0), seed=1).run()
    assert outcome.failures > 5
    assert 0 < outcome.lost < 1800 * outcome.failures
    assert outcome.jct == pytest.approx(100_000 + outcome.lost + 60 * outcome.failures, abs=60 * 2)


def test_failures_cost_our_elastic_jobs_a_pause() -> None:
    lone = [job(0, 0, 1_000_000, 32)]
    undisturbed = Simulation(lone, 32, policy("elastic")).run()
    ours = Simulation(lone, 32, policy("elastic"), faults=Drawn(2000.0), seed=1).run()
    theirs = Simulation(lone, 32, policy("flextrain-dp-pp"), faults=Drawn(2000.0), seed=1).run()
    assert ours.failures == pytest.approx(theirs.failures, rel=0.2)
    assert ours.lost == 0 < theirs.lost
    assert ours.jct == pytest.approx(undisturbed.jct + 0.1 * ours.failures)
    assert theirs.jct > undisturbed.jct + theirs.lost


class Given:
    """Faults of one's own."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults

    def of(self, nodes: int, seed: int) -> Iterator[Fault]:
        return iter(self._faults)


def test_nodes_that_are_away_are_nobodys() -> None:
    # Node 0 of two is away from 10 to 50. A, which held it, loses 10 s, stands still for 60, and goes on on node 1; B,
    # which asks for both, begins when A has ended (and node 0 is back).
    jobs = [job(0, 0, 100, 8), job(1, 20, 5, 16)]
    watched = Watched(jobs, 16, fifo(), Given(Fault(10, 0, 40)))
    outcome = watched.run()
    assert outcome.failures == 1 and watched.held[1][0][0] == 170
    assert outcome.held == 170 * 8 + 5 * 16
    # C waits for its node: no other is free.
    waits = Watched([job(0, 20, 5, 16)], 16, fifo(), Given(Fault(10, 1, 40)))
    waits.run()
    assert waits.held[0][0][0] == 50
    # What jobs hold is away when they end: of the 16 devices eight are left for who comes then.
    owed = Watched([job(0, 0, 100, 16), job(1, 1, 5, 16)], 16, fifo(), Given(Fault(10, 1, 400)))
    owed.run()
    assert owed.held[1][0][0] == 410


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=examples(60))
@given(
    drawn=TRACES,
    total=st.integers(128, 300),
    faults=st.lists(
        st.tuples(st.floats(0, 9000), st.integers(0, 15), st.sampled_from([0.0, 50.0, 5000.0])), max_size=9
    ),
)
def test_what_must_hold_with_nodes_away(
    name: str, drawn: list[tuple[int, int, int, float]], total: int, faults: list[tuple[float, int, float]]
) -> None:
    jobs = jobs_of(drawn)
    watched = Watched(jobs, total, policy(name), Given(*(Fault(*fault) for fault in sorted(faults))))
    assert watched.run().jobs == len(jobs)
    least = {index: min(devices for _, devices in held) for index, held in watched.held.items()}
    if name in KEEPS_GIVEN:
        assert all(least.get(own.index, own.devices) >= own.devices for own in jobs)


def test_a_trace_of_faults(tmp_path: Path) -> None:
    """Two faults at once are one, and one that does not end lasts as long as the trace."""
    events = [
        {"node_id": "a", "event_time": 1, "event_type": "fault_start", "fault_type": {"Class": "GPU"}},
        {"node_id": "a", "event_time": 2, "event_type": "fault_start"},
        {"node_id": "b", "event_time": 4, "event_type": "fault_start"},
        {"node_id": "a", "event_time": 3, "event_type": "fault_end"},
        {"node_id": "a", "event_time": 5, "event_type": "fault_end"},
    ]
    path = tmp_path / "faults.json.gz"
    path.write_bytes(gzip.compress(json.dumps(events).encode()))
    recorded = Recorded.read(path)
    day = 86400.0
    assert recorded.servers[:3] == (((day, 5 * day),), ((4 * day, 5 * day),), ())
    assert len(recorded.servers) == 400
    happened = list(recorded.of(400, seed=1))
    assert [(fault.at, fault.repair_s) for fault in happened] == [(day, 4 * day), (4 * day, day)]
    assert happened == list(recorded.of(400, seed=1)) != list(recorded.of(400, seed=2))
    ill = '[{"node_id": "a", "event_time": 1, "event_type": "x"}]'
    never = [ill.replace("1", time).replace("x", "fault_start") for time in ("NaN", "-1", "1e999")]
    for text in ("", "{}", "[]", '[{"node_id": "a"}]', ill, *never):
        path.write_text(text)
        with pytest.raises(FaultsError, match=r"faults\.json\.gz"):
            Recorded.read(path)


def test_a_job_larger_than_the_cluster() -> None:
    with pytest.raises(ValueError, match=r"job0 asks for 64 devices, and there are 32: set --devices higher"):
        Simulation([job(0, 0, 1, 64)], 32, fifo())


class Wrong:
    """Decides what it is told."""

    name, overhead, buddy, keeps_work = "wrong", Overhead(0.0), False, False

    def __init__(self, *changes: Start | Resize) -> None:
        self.changes = changes

    def begin(self) -> None:
        return None

    def speed(self, job: Job, devices: int) -> float:
        return 1.0

    def decide(self, state: None, seen: Observation) -> tuple[None, Decisions]:
        return None, Decisions(self.changes)


@pytest.mark.parametrize(
    "change", [Start(0, 4), Start(7, 8), Start(0, 0), Start(0, 64), Resize(0, 8)], ids=lambda change: repr(change)
)
def test_decisions_that_cannot_be(change: Start | Resize) -> None:
    with pytest.raises(ValueError, match=r"policy wrong: .* cannot be"):
        Simulation([job(0, 0, 1, 8)], 32, Wrong(change)).run()


def test_nobody_waits_for_ever_in_silence() -> None:
    with pytest.raises(ValueError, match="job0 waits for ever"):
        Simulation([job(0, 0, 1, 8)], 32, Wrong()).run()


@settings(max_examples=examples(300))
@given(
    total=st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 64), st.booleans()), max_size=40),
    buddy=st.booleans(),
)
def test_placement(total: int, steps: list[tuple[int, int, bool]], buddy: bool) -> None:
    placement: Placement = Buddies(total) if buddy else Nodes(total)
    sizes: dict[int, int] = {}
    leaver = -1
    for index, devices, leaving in steps:
        if leaving and 0 < devices < sizes.get(index, 0):
            placement.part(index, devices, leaver)
            sizes[leaver], sizes[index] = sizes[index] - devices, devices
            leaver -= 1
        elif devices - sizes.get(index, 0) > total - sum(sizes.values()):
            with pytest.raises(ValueError, match="are free"):
                placement.resize(index, devices)
            break
        else:
            placement.resize(index, devices)
            sizes[index] = devices
        owned = [device for own in sizes for device in placement.of(own)]
        assert len(owned) == len(set(owned)) == sum(sizes.values())
        assert set(owned) <= set(range(total))
        assert {own: len(placement.of(own)) for own in sizes} == sizes
        for node in range(-(-total // 8)):
            assert placement.holders(node) == sorted(
                own for own in sizes if any(device // 8 == node for device in placement.of(own))
            )


@settings(max_examples=examples(300))
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=40))
def test_buddies_hold_aligned_blocks(steps: list[tuple[int, int]]) -> None:
    """On a power of two, whoever asks for a power of two that is free gets it as one aligned block."""
    buddies = Buddies(64)
    sizes: dict[int, int] = {}
    for index, power in steps:
        devices = 1 << power
        if devices <= 64 - sum(sizes.values()) + sizes.get(index, 0):
            buddies.resize(index, devices)
            sizes[index] = devices
        for own, size in sizes.items():
            held = sorted(buddies.of(own))
            assert held == list(range(held[0], held[0] + size))
            assert held[0] % size == 0


def test_buddies_migrate() -> None:
    buddies = Buddies(8)
    for index in range(8):
        buddies.resize(index, 1)
    for index in range(0, 8, 2):
        buddies.resize(index, 0)
    buddies.resize(9, 4)  # four are free, no two of them side by side
    assert len(buddies.of(9)) == 4
    assert 0 < buddies.moved <= 4


def test_small_jobs_share_a_node() -> None:
    nodes = Nodes(24)
    nodes.resize(0, 3)
    nodes.resize(1, 8)
    nodes.resize(2, 4)
    assert nodes.holders(nodes.of(0)[0] // 8) == [0, 2]
    assert len({device // 8 for device in nodes.of(1)}) == 1


def test_usage_is_averaged() -> None:
    usage = Usage()
    usage.note(0.0, 4, 0, 0)
    usage.note(10.0, 8, 0, 0)
    usage.note(10.0, 2, 0, 0)
    usage.note(15.0, 0, 0, 0)
    assert usage.means(usage.rigid, 20.0, 4) == [4, 4, 2, 0]
    assert usage.means(usage.rigid, 20.0, 1) == [2.5]


@pytest.mark.parametrize("name", NAMES)
def test_two_months_of_a_large_cluster(name: str, measured: object) -> None:
    """60 days of 15,800 jobs, with about the sizes and the load of ElasticFlow's fourth cluster: under a minute."""
    drawn = random.Random(4)
    days = 60 * 86400.0
    sizes = drawn.choices([1, 8, 16, 32, 64], [78, 18, 1.6, 1.6, 0.3], k=15_800)
    moments = sorted(drawn.uniform(0, days) for _ in sizes)
    jobs = []
    for index, (moment, devices) in enumerate(zip(moments, sizes, strict=True)):
        duration = drawn.lognormvariate(8.7, 1.5) * (4 if devices >= 32 else 1)
        jobs.append(job(index, moment, duration, devices, moment + duration * drawn.uniform(0.5, 1.5)))
    outcome = Simulation(jobs, 752, policy(name)).run()
    assert callable(measured)
    measured(f"{name}: {outcome.elapsed:.1f} s, {outcome.held / outcome.capacity:.0%} in use")
    assert outcome.jobs == 15_800
    assert outcome.elapsed < 60
