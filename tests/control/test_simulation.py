"""Histories of the protocol, and that they find what is wrong (``python -m tests.simulation``)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.plan.work.order import Order
from tests.simulation import aims, mutants, run
from tests.simulation.scenario import Scenario
from tests.simulation.shell.coordinator import Coordinator

WENT_WRONG = Path(__file__).parents[1] / "simulation" / "went_wrong.json"
"""Small histories that found a defect which no test of one module shows."""


def test_a_fixed_set_of_histories() -> None:
    total = run.some(range(300))
    assert not total.violations, "\n".join(f"python -m tests.simulation --seed {seed} --trace   # {text}"
                                           for seed, text in total.violations)
    assert total.ends["finished"] > total.seeds // 2
    assert set(total.faults) >= {"kill", "link", "join", "node lost", "partition", "stop", "flip", "scale",
                                 "coordinator", "depose"}


def test_orders_of_work_are_searched_while_all_kinds_of_things_happen() -> None:
    """A history in eight does so by itself; here all of some do."""
    found: Counter[bool] = Counter()

    def note(self: Coordinator, epoch: int, order: Order | None) -> None:
        found[order is not None and order.ms < order.present_ms] += 1
        tell(self, epoch, order)

    tell = Coordinator._found
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "_found", note)
        for seed in range(40):
            assert run.simulate(replace(Scenario.of(seed), searches=True))[1] is None, seed
    assert found[True] > 10 and found[False] > 10


def test_a_seed_is_one_history() -> None:
    traces: list[list[str]] = [[], []]
    for lines in traces:
        run.simulate(Scenario.of(7), lines)
    assert traces[0] == traces[1]


def test_a_scenario_can_be_written_down() -> None:
    scenario = Scenario.of(11)
    assert Scenario.from_json(scenario.to_json()) == scenario


@pytest.mark.parametrize("known", json.loads(WENT_WRONG.read_text()), ids=lambda known: known["what"])
def test_what_went_wrong_once_does_not_again(known: Mapping[str, Any]) -> None:
    scenario = Scenario.from_json(json.dumps(known["scenario"]))
    assert run.simulate(scenario)[1] is None


@pytest.mark.parametrize(("name", "seed"), json.loads(mutants.FOUND.read_text()).items())
def test_a_known_defect_is_found(name: str, seed: int) -> None:
    """By one history each, which goes well without it."""
    scenario = aims.scenario(name, seed)
    with mutants.put_back(name):
        assert run.simulate(scenario)[1] is not None
    assert run.simulate(scenario)[1] is None


@pytest.mark.parametrize("name", ["kept-is-ignored", "weights-are-not-sent-again"])
def test_a_defect_is_found_and_shrinks(name: str) -> None:
    with mutants.put_back(name):
        total = run.some(range(100))
        assert total.violations
        scenario = Scenario.of(total.violations[0][0])
        violation = run.simulate(scenario)[1]
        assert violation is not None
        small = run.shrunk(scenario, violation.kind)
        again = run.simulate(small)[1]
        assert again is not None and again.kind == violation.kind
        assert len(small.faults) <= len(scenario.faults) and small.steps <= scenario.steps
