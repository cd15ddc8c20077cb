"""Planning after losses: examples, and properties over any sequence of losses."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Layout, LayoutError, gpt_units, transfers
from megatron_elastic.plan import NoLayout, lose

Held = dict[int, set[tuple[int, int]]]


def make(
    tp: int, pp: int, dp: int, *, grains: int, slices: int, replicas: int, tied: bool = True
) -> tuple[Layout, Held]:
    units, stage_units = gpt_units(pp, pp, tied, positions=False)
    layout = Layout.grid(
        tp=tp,
        pp=pp,
        dp=dp,
        stage_units=stage_units,
        units=units,
        num_grains=grains,
        num_slices=slices,
        replicas=replicas,
    )
    return layout, {rank: {*layout.owned(rank), *layout.replicated(rank)} for rank in layout.ranks}


def without(held: Held, dead: Iterable[int]) -> Held:
    gone = set(dead)
    return {rank: pairs for rank, pairs in held.items() if rank not in gone}


def test_a_dead_rank_takes_its_column_out() -> None:
    layout, held = make(2, 2, 4, grains=8, slices=4, replicas=1)
    new = lose(layout, [11], without(held, [11]), epoch=1)
    assert (new.epoch, new.lost, new.spares) == (1, (11,), (2, 3, 10))
    assert [[cell.leader for cell in stage.cells] for stage in new.stages] == [[0, 4, 6], [8, 12, 14]]
    assert [cell.grains for cell in new.stages[0].cells] == [(0, 1, 4), (2, 5, 6), (3, 7)]
    assert [cell.grains for cell in new.stages[1].cells] == [(0, 1, 4), (2, 5, 6), (3, 7)]
    assert new.owners[0] == (0, 4, 4, 6), "slice 1 was owned by the column that left; its replica is promoted"
    assert new.replicas[0][1] in (0, 6)
    assert new.replicas[0][0] in (4, 6)


def test_the_same_loss_again_changes_nothing_but_the_epoch() -> None:
    layout, held = make(1, 2, 4, grains=8, slices=4, replicas=1)
    once = lose(layout, [1], without(held, [1]), epoch=1)
    twice = lose(once, [1], without(held, [1]), epoch=2)
    assert twice.epoch == 2
    assert twice.stages == once.stages
    assert (twice.owners, twice.replicas, twice.spares, twice.lost) == (
        once.owners,
        once.replicas,
        once.spares,
        once.lost,
    )


def test_a_spare_that_dies_costs_nothing_more() -> None:
    layout, held = make(1, 2, 4, grains=8, slices=4, replicas=1)
    once = lose(layout, [1], without(held, [1]), epoch=1)
    assert once.spares == (5,)
    twice = lose(once, [5], without(held, [1, 5]), epoch=2)
    assert twice.stages == once.stages
    assert (twice.spares, twice.lost) == ((), (1, 5))


def test_a_spare_still_gives_its_state_to_a_new_owner() -> None:
    layout, held = make(1, 2, 2, grains=4, slices=2, replicas=0)
    new = lose(layout, [3], without(held, [3]) | {2: held[2] | held[3]}, epoch=1)
    assert new.spares == (1,)
    assert {(t.src, t.dst) for t in transfers(new, without(held, [3]) | {2: held[2] | held[3]})} == {(1, 0)}


def test_a_promotion_needs_a_replica_that_holds_the_slice() -> None:
    layout, held = make(1, 1, 3, grains=3, slices=3, replicas=1)
    held[2].discard((0, 1))
    held[0].add((0, 1))
    new = lose(layout, [1], without(held, [1]), epoch=1)
    assert new.owners[0][1] == 0, "rank 2 was to be the replica, but never got the state; rank 0 has it"
    assert new.replicas[0][1] == 2


def test_without_a_usable_replica_a_cell_that_holds_the_slice_takes_over() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=0)
    held[2] |= held[3]
    new = lose(layout, [3], without(held, [3]), epoch=1)
    assert [row[3] for row in new.owners] == [2] * len(new.units)


def test_new_replicas_are_spread() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=1)
    new = lose(layout, [1], without(held, [1]), epoch=1)
    # For each unit slices 2 and 3 keep theirs at 3 and 0; slice 0 may go to 2 or 3, slice 1 to 0 or 3.
    assert Counter(at for row in new.replicas for at in row) == {0: 5, 2: 3, 3: 4}


def test_a_crowded_cell_gives_up_no_more_than_it_must() -> None:
    layout, held = make(1, 1, 3, grains=10, slices=3, replicas=1)
    crowded = zip(layout.stages[0].cells, ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9), ()), strict=True)
    stage = replace(layout.stages[0], cells=tuple(replace(cell, grains=grains) for cell, grains in crowded))
    new = lose(replace(layout, stages=(stage,)), [], held, epoch=1)
    assert [cell.grains for cell in new.stages[0].cells] == [(0, 1, 2, 3), (5, 6, 7), (4, 8, 9)]


def test_no_column_left() -> None:
    layout, held = make(1, 2, 2, grains=4, slices=2, replicas=1)
    with pytest.raises(
        NoLayout, match=r"every data-parallel column has lost a rank \(dead: rank 0, rank 3\).*restart the job"
    ):
        lose(layout, [0, 3], without(held, [0, 3]), epoch=1)


def test_owner_and_replica_dead_at_once() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=1)
    with pytest.raises(NoLayout, match=r"slice 1 of unit embedding .*dead: rank 1, rank 2\).*Restart the job"):
        lose(layout, [1, 2], without(held, [1, 2]), epoch=1)


def test_a_rank_that_never_was_is_refused() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=1)
    with pytest.raises(LayoutError, match=r"\[77\]"):
        lose(layout, [77], held, epoch=1)


def check(old: Layout, new: Layout, dead: set[int]) -> None:
    """Every invariant that a loss must keep, beyond those of ``validate`` (which ``lose`` calls)."""
    assert set(new.lost) == dead
    assert {*new.ranks, *new.spares, *new.lost} == {*old.ranks, *old.spares, *old.lost}
    for before, after in zip(old.stages, new.stages, strict=True):
        assert after.units == before.units
        kept = [cell for cell in before.cells if cell.leader in {c.leader for c in after.cells}]
        assert [cell.ranks for cell in kept] == [cell.ranks for cell in after.cells], "cells keep their order"
        sizes = [len(cell.grains) for cell in after.cells]
        assert max(sizes) - min(sizes) <= 1
        for cell, now in zip(kept, after.cells, strict=True):
            assert set(cell.grains) <= set(now.grains), "a grain of a cell that stays does not move"
            assert now.grains == tuple(sorted(now.grains))
        assert [c.grains for c in after.cells] == [c.grains for c in new.stages[0].cells], "columns stay columns"
    for unit in range(len(new.units)):
        home = new.stages[new.home(unit)]
        leaders = {cell.leader for cell in home.cells}
        for k in range(new.num_slices):
            if old.owners[unit][k] in leaders:
                assert new.owners[unit][k] == old.owners[unit][k], "an owner that stays keeps its slice"
            if old.replicas[unit][k] in leaders and old.replicas[unit][k] != new.owners[unit][k]:
                assert new.replicas[unit][k] == old.replicas[unit][k], "a replica that stays is kept"
            assert (new.replicas[unit][k] is None) == (old.replicas[unit][k] is None or home.width == 1)


shapes = st.fixed_dictionaries(
    {
        "tp": st.integers(1, 3),
        "pp": st.integers(1, 4),
        "dp": st.integers(1, 6),
        "grains": st.integers(1, 13),
        "slices": st.integers(1, 5),
        "replicas": st.integers(0, 1),
        "tied": st.booleans(),
    }
)


@settings(max_examples=2000, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32), finish=st.floats(0, 1))
def test_any_sequence_of_losses_keeps_every_invariant(shape: dict[str, int], seed: int, finish: float) -> None:
    """Ranks (spares too) die in random groups; transfers finish only sometimes before the next loss."""
    layout, held = make(**shape)  # type: ignore[arg-type]
    rng = random.Random(seed)
    dead: set[int] = set()
    for epoch in range(1, 8):
        alive = [*layout.ranks, *layout.spares]
        dead |= set(rng.sample(alive, rng.randint(1, min(2, len(alive)))))
        held = without(held, dead)
        parts = {(unit, k, layout.tp_index(rank)) for rank, pairs in held.items() for unit, k in pairs}
        complete = len(parts) == len(layout.units) * layout.num_slices * layout.cell_size
        columns = [
            column
            for column in range(layout.stages[0].width)
            if not any(rank in dead for stage in layout.stages for rank in stage.cells[column].ranks)
        ]
        if not complete or not columns:
            with pytest.raises(NoLayout):
                lose(layout, dead, held, epoch)
            return
        new = lose(layout, dead, held, epoch)
        check(layout, new, dead)
        moves = transfers(new, held)
        assert moves == transfers(Layout.from_json(new.to_json()), held)
        for move in moves:
            assert (move.unit, move.slice) in held[move.src]
            assert new.tp_index(move.src) == new.tp_index(move.dst) == move.tp
        for move in moves:
            if rng.random() <= finish:
                held[move.dst].add((move.unit, move.slice))
        layout = new


@settings(max_examples=1000, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32))
def test_one_loss_at_a_time_never_loses_a_slice(shape: dict[str, int], seed: int) -> None:
    """With replicas, and transfers done before the next loss, only the last column's death ends the job."""
    layout, held = make(**{**shape, "replicas": 1})  # type: ignore[arg-type]
    rng = random.Random(seed)
    dead: set[int] = set()
    for epoch in range(1, 8):
        victim = rng.choice(layout.ranks)
        dead.add(victim)
        held = without(held, dead)
        if layout.stages[0].width == 1:
            with pytest.raises(NoLayout, match="column"):
                lose(layout, dead, held, epoch)
            return
        layout = lose(layout, dead, held, epoch)
        for move in transfers(layout, held):
            held[move.dst].add((move.unit, move.slice))
        # Spares and cells drop what they no longer have a role for: the two copies must be enough.
        held = {rank: {*layout.owned(rank), *layout.replicated(rank)} for rank in held}


def test_owners_stay_balanced_when_no_replica_helps() -> None:
    layout, _ = make(1, 1, 4, grains=4, slices=12, replicas=0)
    all_state = {(unit, k) for unit in range(3) for k in range(12)}
    new = lose(layout, [3], {0: all_state, 1: all_state, 2: all_state}, epoch=1)
    loads = Counter(owner for row in new.owners for owner in row)
    assert max(loads.values()) - min(loads.values()) <= 1
