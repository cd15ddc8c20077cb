"""Replanning: layouts to work towards after losses, for newcomers, and for another number of stages."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Holdings, Layout, gpt_units, transfers
from megatron_elastic.plan import NoLayout, lose
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.growth import admit
from megatron_elastic.plan.replan import WORTH, replan
from tests.tiers.examples import examples


def make(
    tp: int, pp: int, dp: int, *, layers: int, grains: int, slices: int = 2, replicas: int = 1, tied: bool = True
) -> Layout:
    units, stage_units = gpt_units(layers, pp, tied, positions=False)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=slices,
        replicas=replicas, ranks_per_host=2 * tp,
    )  # fmt: skip


def even(layout: Layout) -> Costs:
    """Only layers take time, 3 ms each."""
    return Costs(
        tuple(UnitCost(float(n.startswith("layer.")), 2.0 * n.startswith("layer."), 6, 12, 1) for n in layout.units)
    )


def layers(layout: Layout) -> list[int]:
    return [sum(layout.units[unit].startswith("layer.") for unit in stage.units) for stage in layout.stages]


def widths(layout: Layout) -> list[int]:
    return [stage.width for stage in layout.stages]


def test_a_stage_that_lost_a_cell_gives_layers_away() -> None:
    layout = make(1, 4, 2, layers=12, grains=16)
    interim = lose(layout, [2], Holdings.of(layout).without([2]), 1)
    new = replan(interim, even(layout), 2, cells_stay=True)
    assert (new.epoch, new.lost, widths(new)) == (2, (2,), [2, 1, 2, 2])
    assert layers(new) in ([4, 2, 3, 3], [3, 2, 4, 3])
    # Copies in other stages are asked for at once; here they have not arrived.
    moves = transfers(new, Holdings.of(replace(interim, replicas=((((),) * 2),) * len(interim.units))))
    owners = [move for move in moves if move.role == "owner"]
    assert {interim.units[move.unit] for move in owners} in ({"layer.3"}, {"layer.5"})
    assert {move.src for move in owners} == {3}
    assert len({move.dst for move in owners}) == len(owners) == 2, "slice k goes to the k-th cell"


def test_cells_move_too_where_that_is_better() -> None:
    """Two live activations are few for a narrow stage in the middle, but all that a last stage needs."""
    layout = make(1, 4, 2, layers=12, grains=16)
    interim = lose(layout, [2], Holdings.of(layout).without([2]), 1)
    costs = even(layout)
    free, stay = (replan(interim, costs, 2, cells_stay=stay) for stay in (False, True))
    assert widths(free) == [2, 2, 2, 1]
    assert costs.pace_of(free).step_ms < costs.pace_of(stay).step_ms * (1 - WORTH)
    roomy = replace(costs, memory_bytes=10**6)
    assert widths(replan(interim, roomy, 2, stages=[4])) == [2, 1, 2, 2]


def test_a_whole_layer_moves_between_disjoint_pairs() -> None:
    """Slices of a layer that changes between stages of four cells go from four ranks to four others."""
    layout = make(1, 2, 4, layers=4, grains=16, slices=4, replicas=0)
    heavy = even(layout)
    costs = replace(heavy, units=(*heavy.units[:-1], replace(heavy.units[-1], forward_ms=4.0)))
    new = replan(layout, costs, 1)
    assert (layers(new), widths(new)) == ([3, 1], [4, 4])
    pairs = [(move.src, move.dst) for move in transfers(new, Holdings.of(layout))]
    assert sorted(pairs) == [(4, 0), (5, 1), (6, 2), (7, 3)]


def test_what_cannot_be_better_stays_as_it_is() -> None:
    layout = make(2, 2, 2, layers=4, grains=8)
    new = replan(layout, even(layout), 1)
    assert replace(new, epoch=0) == layout
    assert transfers(new, Holdings.of(layout)) == ()


def test_the_number_of_stages_changes_on_request_and_back() -> None:
    layout = make(1, 4, 2, layers=12, grains=16)
    for stages, shape in ((2, [6, 6]), (3, [4, 4, 4]), (1, [12]), (4, [3, 3, 3, 3])):
        new = replan(layout, even(layout), layout.epoch + 1, stages=[stages], tied=True)
        assert (new.pipeline_size, new.ranks) == (stages, tuple(range(8)))
        if stages != 3:
            assert layers(new) == shape
        assert (0 in new.stages[-1].units) and new.home(0) == 0
        assert {rank for move in transfers(new, Holdings.of(layout)) for rank in (move.src, move.dst)} <= set(range(8))
        layout = new


def test_a_stage_without_cells_is_taken_over() -> None:
    layout = make(1, 3, 1, layers=6, grains=4, replicas=0, slices=1)
    new = replan(layout, even(layout), 1, lost=[1])
    assert (new.pipeline_size, layers(new), new.lost, new.spares) == (2, [3, 3], (1,), ())
    wide = make(1, 2, 3, layers=4, grains=12)
    new = replan(wide, even(wide), 1, lost=[3, 4, 5])
    assert (sum(widths(new)), new.lost) == (3, (3, 4, 5))


def test_newcomers_widen_stages() -> None:
    layout = make(1, 2, 2, layers=4, grains=12)
    grown = admit(layout, {4: 2, 5: 2}, 1)
    assert any(cell.shadow for stage in grown.stages for cell in stage.cells)
    new = replan(grown, even(layout), 2)
    assert widths(new) == [3, 3]
    assert {len(cell.grains) for stage in new.stages for cell in stage.cells} == {4}


def test_fewer_stages_are_taken_only_where_memory_is_known_to_allow_it() -> None:
    layout = make(1, 4, 2, layers=4, grains=4, tied=False)
    slow_links = replace(even(layout), boundary_bytes=10**8)
    assert replan(layout, slow_links, 1).pipeline_size == 4
    assert replan(layout, replace(slow_links, memory_bytes=10**6), 1).pipeline_size == 3


def test_what_is_impossible_is_refused() -> None:
    layout = make(1, 2, 2, layers=4, grains=4)
    with pytest.raises(NoLayout, match="9 pipeline stages cannot be made of 4 cells and 6 blocks"):
        replan(layout, even(layout), 1, stages=[9])
    with pytest.raises(NoLayout, match="does not fit"):
        replan(layout, replace(even(layout), memory_bytes=5), 1)
    with pytest.raises(NoLayout, match="of 0 cells"):
        replan(layout, even(layout), 1, lost=[0, 1, 2, 3])


@settings(max_examples=examples(400), deadline=None)
@given(
    tp=st.integers(1, 2),
    pp=st.integers(1, 4),
    dp=st.integers(1, 4),
    each=st.integers(1, 3),
    grains=st.integers(1, 12),
    replicas=st.integers(0, 2),
    tied=st.booleans(),
    limited=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_replanned_layout_is_sound(
    tp: int, pp: int, dp: int, each: int, grains: int, replicas: int, tied: bool, limited: bool, seed: int
) -> None:
    """Random costs, losses (of whole stages too), newcomers and numbers of stages, one after another."""
    rng = random.Random(seed)
    layout = make(tp, pp, dp, layers=pp * each, grains=grains, slices=dp, replicas=replicas, tied=tied)
    units = tuple(UnitCost(rng.uniform(0, 4), rng.uniform(0, 8), 6, 12, rng.randint(0, 3)) for _ in layout.units)
    costs = Costs(units, memory_bytes=rng.randint(50, 500) if limited else None)
    newest = max(layout.ranks)
    for epoch in range(1, 5):
        lost: list[int] = []
        stages: list[int] | None = None
        what = rng.choice(["lose", "stage", "join", "costs"])
        if what == "lose":
            lost = rng.sample(layout.ranks, rng.randint(1, min(3, len(layout.ranks))))
        elif what == "stage":
            stages = [rng.randint(1, pp * each)]
        elif what == "join":
            joining = {newest + i + 1: len(layout.hosts) for i in range(rng.randint(1, 2 * tp))}
            newest = max(joining)
            layout = admit(layout, joining, epoch)
        try:
            new = replan(layout, costs, epoch, lost=lost, stages=stages, tied=tied)
        except NoLayout:
            return
        assert {*new.ranks, *new.spares, *new.lost} == {*layout.ranks, *layout.spares, *layout.lost}
        assert set(lost) <= set(new.lost)
        if stages:
            assert new.pipeline_size == stages[0]
        for stage in new.stages:
            sizes = [len(cell.grains) for cell in stage.cells]
            assert max(sizes) - min(sizes) <= 1
            assert new.stages == layout.stages or not any(cell.shadow for cell in stage.cells if stage.width <= grains)
        for unit in range(len(new.units)):
            wanted = min(new.num_replicas, sum(widths(new)) - 1)
            assert all(len(copies) == wanted for copies in new.replicas[unit])
        kept = sum(new.owners[unit][k] == layout.owners[unit][k] for unit in range(len(new.units)) for k in range(dp))
        if new.stages == layout.stages:
            assert kept == len(new.units) * dp
        assert replan(layout, costs, epoch, lost=lost, stages=stages, tied=tied) == new, "everybody plans the same"
        layout = new


@settings(max_examples=examples(300), deadline=None)
@given(pp=st.integers(1, 4), dp=st.integers(1, 4), each=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_the_estimate_never_gets_worse_without_a_loss(pp: int, dp: int, each: int, seed: int) -> None:
    rng = random.Random(seed)
    layout = make(1, pp, dp, layers=pp * each, grains=3 * dp)
    costs = Costs(tuple(UnitCost(rng.uniform(0, 4), rng.uniform(0, 8), 6, 12, 1) for _ in layout.units))
    before, after = costs.pace_of(layout).step_ms, costs.pace_of(replan(layout, costs, 1)).step_ms
    assert after == pytest.approx(before) or after < before * (1 - WORTH) + 1e-9


def test_slices_of_a_stage_that_narrows_are_spread() -> None:
    layout = make(1, 2, 4, layers=4, grains=16, slices=8)
    new = replan(layout, even(layout), 1, stages=[4])
    for unit in range(len(new.units)):
        owned = Counter(new.owners[unit])
        assert len(owned) == new.stages[new.home(unit)].width


def test_100_000_ranks_are_replanned() -> None:
    """How long that takes is in docs/planning.md."""
    units, stage_units = gpt_units(128, 64, tied=True, positions=False)
    layout = Layout.grid(
        tp=8, pp=64, dp=195, stage_units=stage_units, units=units, num_grains=1560, num_slices=16, replicas=1,
        ranks_per_host=8,
    )  # fmt: skip
    costs = even(layout)
    assert len(layout.ranks) == 99_840
    new = replan(layout, costs, 1, lost=[5])
    assert len(new.ranks) == 99_832
