"""Policies of others against what their authors' code decides, and against examples worked by hand from their formulas.

``tests/answers/published.json`` was written by ``megatron-elastic bench published --cases 60 --save FILE`` with clones
of the authors' repositories: cases drawn by us, and what their code answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from planned import published

from megatron_elastic.fleet.admission import fill
from megatron_elastic.fleet.job import Job
from megatron_elastic.fleet.observation import Observation, Overhead
from megatron_elastic.fleet.policies.elasticflow import satisfactory_share, without
from megatron_elastic.fleet.policies.elasticflow import share as elasticflow_share
from megatron_elastic.fleet.policies.pollux import efficiency, step_s
from megatron_elastic.fleet.policies.pollux import share as pollux_share
from megatron_elastic.fleet.policies.rubick import share as rubick_share
from megatron_elastic.fleet.policies.rule import Rule
from megatron_elastic.fleet.simulated.simulation import Simulation
from megatron_elastic.fleet.speed_table import SpeedTable
from tests.fleet.fleet_jobs import member

CONCAVE = SpeedTable((1, 2), (1.0, 1.5))


@pytest.fixture(scope="module")
def answered() -> Mapping[str, Any]:
    """Cases, and what the authors' code made of them."""
    found: Mapping[str, Any] = json.loads((Path(__file__).parents[1] / "answers" / "published.json").read_text())
    return found


def nothing_seen(total: int, now: float = 0.0) -> Observation:
    return Observation(now, total, total, {}, 0, {}, [])


# ---- ElasticFlow -----------------------------------------------------------------------------


def test_elasticflows_admission_gives_the_same_shares(answered: Mapping[str, Any]) -> None:
    cases, theirs = answered["elasticflow"]["cases"], answered["elasticflow"]["answers"]
    figures = published.on_admissions(cases, theirs)
    assert figures["same_share"] == figures["same_verdict"] == len(cases) == 60
    assert 20 < figures["admitted"] < 40
    assert {share for share in theirs if share} >= {1, 2, 8, 16}


def test_shares_meet_deadlines_that_earliest_deadline_first_misses() -> None:
    """Two devices; one is 1 fast, both are 1.5. Two jobs of 3 work, to be done by 3 and by 3.5.

    Earliest deadline first gives the first job both: it ends at 3 / 1.5 = 2, the other at 2 + 2 = 4 > 3.5. The first
    job's minimum satisfactory share is one device: 3 x 1 = 3 by 3. That leaves one of two until 3 and two after, with
    which the second has 3 x 1 = 3 by 3 <= 3.5.
    """
    slots = [(0.0, 2)]
    assert satisfactory_share(CONCAVE, 3, 3, slots) == (1, 3)
    left = without(slots, CONCAVE, 1, 3)
    assert left == [(0.0, 1), (3, 2)]
    assert satisfactory_share(CONCAVE, 3, 3.5, left) == (1, 3)
    greedy = without(slots, CONCAVE, 2, 2)
    assert satisfactory_share(CONCAVE, 3, 3.5, greedy) is None
    jobs = [Job(0, "a", 0.0, 3.0, 1, 3.0, most=2), Job(1, "b", 0.0, 3.0, 1, 3.5, most=2)]
    rule = Rule("elasticflow", lambda own: CONCAVE, elasticflow_share, Overhead(0.0), lowest=True)
    outcome = Simulation(jobs, 2, rule).run()
    assert (outcome.deadlines, outcome.makespan) == (2, 3)


def test_what_is_left_goes_by_diminishing_returns() -> None:
    """Shares first, then whoever gains most for each further device, in powers of two; eight devices, two jobs.

    a: 1, 1.9, 3.4, 4.6 on 1, 2, 4, 8; 20 work by 11: 1 device has done 11, 2 have done 20.9, so its share is 2.
    b: 1, 1.6, 2.0, 2.1; 5 work by 12: 1 is enough. Five of eight are left. Two more for a bring (3.4 - 1.9) / 2 = 0.75
    each, one more for b 0.6, after that (2.0 - 1.6) / 2 = 0.2 and (4.6 - 3.4) / 4 = 0.3, which does not fit any more:
    a has 4, b has 4.
    """
    a = SpeedTable((1, 2, 4, 8), (1.0, 1.9, 3.4, 4.6))
    b = SpeedTable((1, 2, 4, 8), (1.0, 1.6, 2.0, 2.1))
    members = [
        member(0, a, 1, 1, remaining=20.0, deadline=11.0),
        member(1, b, 1, 1, remaining=5.0, deadline=12.0),
    ]
    found = satisfactory_share(a, 20, 11, [(0, 8)])
    assert found is not None and found == (2, 20 / 1.9)
    assert elasticflow_share(nothing_seen(8), members, 8) == {0: 4, 1: 4}
    assert elasticflow_share(nothing_seen(8), members, 6) == {0: 4, 1: 2}
    assert elasticflow_share(nothing_seen(8), members, 5) == {0: 4, 1: 1}
    assert elasticflow_share(nothing_seen(8), members, 4) == {0: 2, 1: 2}  # two for a are too many


# ---- Pollux ----------------------------------------------------------------------------------


def test_pollux_goodput_and_allocations_are_the_authors(answered: Mapping[str, Any]) -> None:
    """Their search is random and ours greedy: neither may be far from the best there is."""
    cases, theirs = answered["pollux"]["cases"], answered["pollux"]["answers"]
    figures = published.on_allocations(cases, theirs)
    assert figures["worst_goodput_difference"] < 1e-12
    assert figures["same_allocation"] >= 4
    assert figures["ours_to_best"]["least"] > 0.99
    assert figures["theirs_to_best"]["most"] <= 1


def test_the_best_value_is_that_of_the_best_allocation(answered: Mapping[str, Any]) -> None:
    """What allocations are held against, by trying all of them."""
    small = 0
    for case, answer in zip(answered["pollux"]["cases"], answered["pollux"]["answers"], strict=True):
        gpus, goodputs = case["gpus"], [own["goodput"] for own in answer]
        if (gpus + 1) ** len(goodputs) > 50_000:
            continue
        small += 1
        tried = (given for given in product(range(gpus + 1), repeat=len(goodputs)) if sum(given) <= gpus)
        most = max(published.fitness(case, goodputs, given) for given in tried)
        assert published.best(case, goodputs) == pytest.approx(most)
    assert small >= 2


def test_pollux_goodput_worked_by_hand() -> None:
    """T_grad = 0.1 + 0.01 m, T_sync = 0.2 + 0.05 (K - 2), g = 2; a batch of 64 on K = 4, submitted with 32.

    T_grad = 0.1 + 0.01 x 16 = 0.26, T_sync = 0.3, T = sqrt(0.26^2 + 0.3^2) = sqrt(0.1576) = 0.396988. With a noise
    scale of 32 samples (variance 1, squared mean 1 at 32) a batch of 64 is worth (32 + 32) / (32 + 64) = 2/3 a sample:
    goodput = 64 / 0.396988 x 2/3 = 107.47. As submitted on one GPU: T = 0.1 + 0.32, goodput = 32 / 0.42 = 76.19.
    """
    assert step_s(0.26, 0.3, 0, 2) == pytest.approx(0.1576**0.5)
    assert efficiency(2.0, 1.0) == pytest.approx(2 / 3)
    case = {"perf": (0.1, 0.01, 9.0, 9.0, 0.2, 0.05, 2.0), "grad": (1.0, 1.0), "batch": 32}
    assert published.goodput(case, 4, 64) == pytest.approx(107.475, rel=1e-4)
    assert published.goodput(case, 1, 32) == pytest.approx(76.190, rel=1e-4)


def test_pollux_factor_of_a_change_worked_by_hand() -> None:
    """A change pays if the speed-up that it brings exceeds the inverse of (age - changes x delay) / (age + delay).

    delay 30, once changed: at 100 s the factor is 70 / 130 = 0.538, 1 / 0.538 = 1.857; at 400 s 370 / 430 = 0.860 and
    1.162. Two jobs share four devices, so the fair share is two: one job alone goes from two to four for a speed of
    1.5 at 400 s, not at 100 s.
    """
    table = SpeedTable((1, 2, 3, 4), (0.6, 1.0, 1.3, 1.5))
    for age, devices in ((100.0, 2), (400.0, 4)):
        alone = [member(0, table, 2, 2, started=1000.0 - age, changes=1)]
        assert pollux_share(30.0)(nothing_seen(4, 1000.0), alone, 4) == {0: devices}


# ---- Rubick ----------------------------------------------------------------------------------


def test_rubicks_slopes_and_who_gets_devices_by_them(answered: Mapping[str, Any]) -> None:
    cases, theirs = answered["rubick"]["cases"], answered["rubick"]["answers"]
    figures = published.on_slopes(cases, theirs)
    assert figures["same_allocation"] == len(cases) == 60
    assert figures["worst_slope_difference"] < 1e-9


def test_rubicks_order_worked_by_hand() -> None:
    """Slopes are in units of the speed as submitted, so that a small model is not poorer for its few samples.

    a: 10, 18, 24, 28 samples/s, submitted at 10: 0.8, 0.6, 0.4 for the second, third and fourth device.
    b: 500, 950, 1200, 1300 samples/s, submitted at 500: 0.9, 0.5, 0.2.
    From one device each: b (0.9), a (0.8), a (0.6), b (0.5), a (0.4), b (0.2).
    """
    a = SpeedTable((1, 2, 3, 4), (1.0, 1.8, 2.4, 2.8))
    b = SpeedTable((1, 2, 3, 4), (1.0, 1.9, 2.4, 2.6))
    order = [{0: 1, 1: 1}, {0: 1, 1: 2}, {0: 2, 1: 2}, {0: 3, 1: 2}, {0: 3, 1: 3}, {0: 4, 1: 3}, {0: 4, 1: 4}]
    members = [member(0, a, 1), member(1, b, 1)]
    for devices, expected in enumerate(order, 2):
        assert rubick_share(60.0)(nothing_seen(devices), members, devices) == expected
        assert fill(members, devices, lambda own, count: own.table.speed(count)) == expected
