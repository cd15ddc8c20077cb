"""Graph planning against brute force, profiles, and how long it takes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import gpt_units
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.costs.cost import Costs, ProfileError, UnitCost
from megatron_elastic.plan.graph import Graph, Planner
from tests.tiers.examples import examples


def model(layers: int, rng: random.Random, memory: int | None = None) -> tuple[list[str], Costs]:
    """Units of a GPT with random costs; small whole numbers, so that there are many ties."""
    names, _ = gpt_units(layers, 1, tied=True, positions=rng.random() < 0.5, mtp=rng.choice([0, 0, 2]))
    units = tuple(
        UnitCost(rng.randint(0, 3), rng.randint(0, 6), rng.randint(0, 5), rng.randint(0, 12), rng.randint(0, 2))
        for _ in names
    )
    return names, Costs(units, memory_bytes=memory)


def brute_force(
    names: list[str], costs: Costs, tied: bool, grains: int, widths: tuple[int, ...], held: list[set[int]] | None
) -> Iterator[tuple[float, int]]:
    """(slowest stage, moved bytes) of every way to cut before layers, and before what predicts at the end."""
    layers = [unit for unit, name in enumerate(names) if name.startswith("layer.")]
    stages, end = len(widths), names.index("mtp.0" if "mtp.0" in names else "head")
    for inner in combinations(sorted({*layers, end}), stages - 1):
        cuts = [0, *inner, len(names)]
        slowest, moved = 0.0, 0
        for stage, (a, b) in enumerate(pairwise(cuts)):
            units = [costs.units[unit] for unit in range(a, b)]
            fixed = sum(u.parameter_bytes + (stages - stage) * u.activation_bytes for u in units)
            if tied and 0 < stage == stages - 1:
                fixed += costs.units[0].parameter_bytes
            state = sum(u.optimizer_bytes for u in units)
            if costs.memory_bytes is not None and fixed + state / widths[stage] > costs.memory_bytes:
                break
            slowest = max(slowest, sum(u.grain_ms for u in units) * math.ceil(grains / widths[stage]))
            if held:
                moved += sum(costs.units[unit].optimizer_bytes for unit in range(a, b) if unit not in held[stage])
        else:
            yield slowest, moved


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *inner, total)))


def check(graph: Graph, names: list[str], costs: Costs, tied: bool, grains: int) -> None:
    """What a graph says of itself is so."""
    own = [units[1:] if tied and 0 < i == len(graph.widths) - 1 else units for i, units in enumerate(graph.stage_units)]
    assert [unit for units in own for unit in units] == list(range(len(names)))
    assert all(units for units in own)
    assert "positions" not in names or len({0, 1}.intersection(own[0])) == 2, "embeddings stay together"
    if tied and len(own) > 1:
        assert graph.stage_units[-1][0] == 0
    times = [
        sum(costs.units[unit].grain_ms for unit in units) * math.ceil(grains / width)
        for units, width in zip(own, graph.widths, strict=True)
    ]
    assert graph.slowest_ms == pytest.approx(max(times))


shapes = {
    "layers": st.integers(1, 7),
    "tied": st.booleans(),
    "grains": st.integers(1, 12),
    "memory": st.none() | st.integers(5, 60),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=examples(2000), deadline=None)
@given(**shapes, widths=st.lists(st.integers(1, 5), min_size=1, max_size=5), slack=st.sampled_from([0.0, 0.1, 1.0]))
def test_no_split_is_better(
    layers: int, tied: bool, grains: int, memory: int | None, seed: int, widths: list[int], slack: float
) -> None:
    """The slowest stage is as fast as in the best of all cuts; among those within the slack, it moves the least."""
    rng = random.Random(seed)
    names, costs = model(layers, rng, memory)
    planner = Planner(names, costs, tied, grains)
    held = [{unit for unit in range(len(names)) if rng.random() < 0.5} for _ in widths]
    every = list(brute_force(names, costs, tied, grains, tuple(widths), held))
    if not every:
        with pytest.raises(NoLayout, match=r"can make 1 to|does not fit"):
            planner.split(widths)
        return
    best = min(slowest for slowest, _ in every)
    graph = planner.split(widths, held, slack)
    check(graph, names, costs, tied, grains)
    assert graph.slowest_ms <= best * (1 + slack) + 1e-6
    stages = [units[1:] if tied and 0 < i == len(widths) - 1 else units for i, units in enumerate(graph.stage_units)]
    moved = sum(
        costs.units[unit].optimizer_bytes
        for units, has in zip(stages, held, strict=True)
        for unit in units
        if unit not in has
    )
    assert moved == min(moved for slowest, moved in every if slowest <= best * (1 + slack) + 1e-6)
    check(planner.split(widths), names, costs, tied, grains)


@settings(max_examples=examples(2000), deadline=None)
@given(**shapes, stages=st.integers(1, 4), cells=st.integers(1, 9), spare=st.none() | st.integers(0, 4))
def test_no_widths_are_better(
    layers: int, tied: bool, grains: int, memory: int | None, seed: int, stages: int, cells: int, spare: int | None
) -> None:
    most = None if spare is None else math.ceil(cells / stages) + spare
    rng = random.Random(seed)
    names, costs = model(layers, rng, memory)
    planner = Planner(names, costs, tied, grains)
    every = [
        slowest
        for widths in compositions(cells, stages)
        if max(widths) <= (most or cells)
        for slowest, _ in brute_force(names, costs, tied, grains, widths, None)
    ]
    if not every:
        with pytest.raises(NoLayout):
            planner.widths(stages, cells, most)
        return
    widths = planner.widths(stages, cells, most)
    assert sum(widths) == cells
    assert max(widths) <= (most or cells)
    graph = planner.split(widths)
    check(graph, names, costs, tied, grains)
    assert graph.slowest_ms == pytest.approx(min(every))


def test_an_even_model_is_cut_evenly() -> None:
    names, stages = gpt_units(12, 4, tied=True, positions=True)
    costs = Costs(tuple(UnitCost(float(name.startswith("layer.")), 0.0, 1, 1, 1) for name in names))
    planner = Planner(names, costs, tied=True, grains=16)
    assert planner.split([2, 2, 2, 2]).stage_units == tuple(map(tuple, stages))
    assert planner.widths(4, 8) == (2, 2, 2, 2)
    # One cell of stage 1 is lost: it gives one of its three layers to a neighbour.
    graph = planner.split([2, 1, 2, 2], [set(units) for units in stages])
    layers = [sum(names[unit].startswith("layer.") for unit in units) for units in graph.stage_units]
    assert layers in ([4, 2, 3, 3], [3, 2, 4, 3])
    assert graph.slowest_ms == 4 * 8


def test_impossible_graphs_say_why() -> None:
    names, _ = gpt_units(4, 1, tied=False, positions=False)
    costs = replace(Costs.assumed(names), memory_bytes=10_000_000)
    planner = Planner(names, costs, tied=False, grains=4)
    with pytest.raises(NoLayout, match="4 layers, embedding and head can make 1 to 6 pipeline stages, not 7"):
        planner.split([1] * 7)
    with pytest.raises(NoLayout, match="3 pipeline stages need at least as many cells, but 2 are left"):
        planner.widths(3, 2)
    with pytest.raises(NoLayout, match=r"does not fit 2 pipeline stages of widths 1, 1 with 10000000 bytes"):
        planner.split([1, 1])
    with pytest.raises(NoLayout, match="does not fit"):
        planner.widths(2, 2)
    with pytest.raises(NoLayout, match="contain none"):
        Planner(["embedding", "head"], costs, tied=False, grains=4)


def test_128_layers_over_64_stages() -> None:
    """Of any widths, and with what they hold already. How long that takes is in docs/planning.md."""
    rng = random.Random(0)
    names, costs = model(128, rng, memory=200)
    planner = Planner(names, costs, tied=True, grains=1560)
    widths = [24] * 30 + [23] + [24] * 33
    even = planner.split([24] * 64)
    held = [set(units) for units in even.stage_units]
    split = planner.split(widths, held)
    assert len(split.stage_units) == 64
    assert planner.split([24] * 64, held).stage_units == even.stage_units


# ---- profiles -------------------------------------------------------------------------------


def test_a_profile_is_read_back_as_it_was() -> None:
    names, costs = model(3, random.Random(1), memory=1000)
    assert Costs.from_json(costs.to_json(names), names) == costs
    unlimited = replace(costs, memory_bytes=None)
    assert Costs.from_json(unlimited.to_json(names), names) == unlimited


def entry(**change: object) -> dict[str, object]:
    values = {"forward_ms": 1.0, "backward_ms": 2.0, "parameter_bytes": 3, "optimizer_bytes": 4, "activation_bytes": 5}
    return {**values, **change}


def test_one_entry_can_stand_for_all_layers() -> None:
    names, _ = gpt_units(3, 1, tied=True, positions=False)
    units = {name: entry() for name in ("embedding", "layer", "head")} | {"layer.1": entry(forward_ms=7.0)}
    costs = Costs.from_json(json.dumps({"units": units, "latency_ms": 2, "bandwidth": 1000}), names)
    assert [unit.forward_ms for unit in costs.units] == [1.0, 1.0, 7.0, 1.0, 1.0]
    assert costs.transfer_ms(5) == 7.0


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ("{", "not JSON"),
        ("[]", 'must be an object with an object "units"'),
        ('{"units": []}', 'must be an object with an object "units"'),
        (json.dumps({"units": {}}), "no entry for unit 'embedding'"),
        (json.dumps({"units": {}, "bandwith": 3}), "has 'bandwith', which is none of"),
        (json.dumps({"units": {"layer.9": entry()}}), "has unit 'layer.9', but the layout has"),
        (json.dumps({"units": {"embedding": {"forward_ms": 1}}}), "must have forward_ms, backward_ms"),
        (json.dumps({"units": {"embedding": entry(forward_ms="1")}}), "'1' for 'embedding: forward_ms'"),
        (json.dumps({"units": {"embedding": entry(forward_ms=-1)}}), "not negative"),
        (json.dumps({"units": {"embedding": entry(), "layer": entry(), "head": entry()}, "bandwidth": 0}), "positive"),
        (json.dumps({"units": dict.fromkeys(("embedding", "layer", "head"), entry(forward_ms=0, backward_ms=0))}),
         "no unit of the profile takes any time"),
    ],
)
def test_a_bad_profile_says_which_entry(profile: str, message: str) -> None:
    names, _ = gpt_units(2, 1, tied=True, positions=False)
    with pytest.raises(ProfileError, match=message):
        Costs.from_json(profile, names)


def test_assumed_costs_follow_the_parameters() -> None:
    names, _ = gpt_units(2, 1, tied=True, positions=True)
    costs = Costs.assumed(names, {"embedding": 4_000_000, "layer.1": 2_000_000})
    assert [unit.forward_ms for unit in costs.units] == [0, 0, 1, 2, 4]
    assert [unit.optimizer_bytes for unit in costs.units] == [48_000_000, 1_200_000, 12_000_000, 24_000_000, 12_000]
