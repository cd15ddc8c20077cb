"""Planning after losses: examples, and properties over any sequence of losses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Cell, Holdings, Layout, LayoutError, Stage, gpt_units, transfers
from megatron_elastic.plan import NoLayout, StateLost, everything, improve, lose, readable
from megatron_elastic.plan.work.reroute import reroute
from tests.tiers.examples import examples


def make(
    tp: int, pp: int, dp: int, *, grains: int, slices: int, replicas: int, tied: bool = True,
    teams: tuple[int, int] = (1, 1),
) -> tuple[Layout, Holdings]:
    cp, ep = teams
    units, stage_units = gpt_units(pp, pp, tied, positions=False, routed=range(1, pp) if ep > 1 else ())
    layout = Layout.grid(
        tp=tp,
        pp=pp,
        dp=dp,
        stage_units=stage_units,
        units=units,
        num_grains=grains,
        num_slices=slices,
        replicas=replicas,
        cp=cp,
        ep=ep,
    )
    return layout, Holdings.of(layout)


def test_a_dead_rank_takes_its_cell_out_and_no_more() -> None:
    layout, held = make(2, 2, 4, grains=8, slices=4, replicas=1)
    new = lose(layout, [11], held.without([11]), epoch=1)
    assert (new.epoch, new.lost, new.spares) == (1, (11,), (10,))
    assert [[cell.leader for cell in stage.cells] for stage in new.stages] == [[0, 2, 4, 6], [8, 12, 14]]
    assert new.stages[0] == layout.stages[0], "the other stage works on as before"
    assert [cell.grains for cell in new.stages[1].cells] == [(0, 4, 5), (1, 2, 6), (3, 7)]
    head = len(new.units) - 1
    assert new.owners[head] == (8, 12, 12, 14), "slice 1 was owned by the cell that left; its replica is promoted"
    assert new.replicas[head][1][0] in (8, 14)
    assert new.replicas[head][0][0] in (12, 14)


def test_the_same_loss_again_changes_nothing_but_the_epoch() -> None:
    layout, held = make(1, 2, 4, grains=8, slices=4, replicas=1)
    once = lose(layout, [1], held.without([1]), epoch=1)
    twice = lose(once, [1], held.without([1]), epoch=2)
    assert twice.epoch == 2
    assert (twice.stages[0].cells, twice.stages[0].waiting) == (once.stages[0].cells, ())
    assert (twice.owners, twice.replicas, twice.spares, twice.lost) == (
        once.owners,
        once.replicas,
        once.spares,
        once.lost,
    )


def test_a_spare_that_dies_costs_nothing_more() -> None:
    layout, held = make(2, 1, 4, grains=8, slices=4, replicas=1)
    once = lose(layout, [1], held.without([1]), epoch=1)
    assert once.spares == (0,)
    twice = lose(once, [0], held.without([0, 1]), epoch=2)
    assert (twice.stages[0].cells, twice.stages[0].waiting) == (once.stages[0].cells, ())
    assert (twice.spares, twice.lost) == ((), (0, 1))


def test_a_spare_still_gives_its_state_to_a_new_owner() -> None:
    layout, held = make(2, 1, 2, grains=4, slices=2, replicas=0)
    held = held.without([3])
    held = held.replace(1, held.of_rank(1) | {(unit, 1, 1) for unit in range(len(layout.units))})
    new = lose(layout, [3], held, epoch=1)
    assert new.spares == (2,)
    assert {(t.src, t.dst) for t in transfers(new, held)} == {(2, 0)}


def test_a_promotion_needs_a_replica_that_holds_the_slice() -> None:
    layout, held = make(1, 1, 3, grains=3, slices=3, replicas=1)
    held = held.replace(2, held.of_rank(2) - {(0, 1, 0)}).replace(0, held.of_rank(0) | {(0, 1, 0)})
    new = lose(layout, [1], held.without([1]), epoch=1)
    assert new.owners[0][1] == 0, "rank 2 was to be the replica, but never got the state; rank 0 has it"
    assert new.replicas[0][1] == (2,)


def test_without_a_usable_replica_a_cell_that_holds_the_slice_takes_over() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=0)
    held = held.replace(2, held.of_rank(2) | held.of_rank(3))
    new = lose(layout, [3], held.without([3]), epoch=1)
    assert [row[3] for row in new.owners] == [2] * len(new.units)


def test_new_replicas_are_spread() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=1)
    new = lose(layout, [1], held.without([1]), epoch=1)
    # For each unit slices 2 and 3 keep theirs at 3 and 0; slice 0 may go to 2 or 3, slice 1 to 0 or 3.
    assert Counter(at for row in new.replicas for copies in row for at in copies) == {0: 5, 2: 3, 3: 4}


def test_a_crowded_cell_gives_up_no_more_than_it_must() -> None:
    crowded = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9), ())
    assert reroute(crowded, 10) == [(0, 2, 3, 4), (5, 6, 8), (1, 7, 9)]


def test_a_shadow_stays_one() -> None:
    layout, held = make(1, 1, 3, grains=6, slices=3, replicas=1)
    grains = ((0, 1, 2), (3, 4, 5), ())
    cells = tuple(replace(cell, grains=g) for cell, g in zip(layout.stages[0].cells, grains, strict=True))
    layout = replace(layout, stages=(replace(layout.stages[0], cells=cells),))
    new = lose(layout, [0], held.without([0]), epoch=1)
    assert [cell.grains for cell in new.stages[0].cells] == [tuple(range(6)), ()]
    with pytest.raises(NoLayout, match=r"no working cell is left \(dead: ranks 0-1\)"):
        lose(layout, [0, 1], everything(layout).without([0, 1]), epoch=1)


def test_who_is_dead_is_told_briefly() -> None:
    """A long job may have lost thousands of ranks, in a row or two of every four."""
    layout, held = make(1, 1, 100, grains=100, slices=100, replicas=1)
    lost = [*range(99)]
    with pytest.raises(StateLost, match=r"\(dead: ranks 0-98\)"):
        lose(layout, lost, held.without(lost), epoch=1)
    lost = [rank for rank in range(100) if rank % 4 < 2]
    with pytest.raises(StateLost, match=r"\(dead: ranks 0-1, 4-5, (\d+-\d+, ){14}and 18 others\)"):
        lose(layout, lost, held.without(lost), epoch=1)


def test_a_stage_without_cells_is_dissolved() -> None:
    """Into those that have some, and only once somebody else has its state."""
    layout, held = make(1, 2, 2, grains=4, slices=2, replicas=1)
    assert lose(layout, [0, 3], held.without([0, 3]), epoch=1).ranks == (1, 2), "one of each stage is enough"
    with pytest.raises(StateLost, match=r"slice 0 of unit layer\.1 .*dead: ranks 2-3\)\. Restart"):
        lose(layout, [2, 3], held.without([2, 3]), epoch=1)
    narrow = lose(layout, [2], held.without([2]), epoch=1)
    head = len(layout.units) - 1
    assert (narrow.owners[head], narrow.replicas[head]) == ((3, 3), ((0,), (1,))), "copies go to the other stage"
    assert all(move.src == 3 for move in transfers(narrow, held.without([2])) if move.unit == head)
    held = Holdings.of(narrow)
    wide = lose(narrow, [3], held.without([3]), epoch=2)
    assert (wide.pipeline_size, wide.stages[0].units, wide.ranks) == (1, tuple(range(len(layout.units))), (0, 1))
    assert [len(cell.grains) for cell in wide.stages[0].cells] == [2, 2]


def test_two_stages_are_dissolved_at_once() -> None:
    layout, _ = make(1, 4, 1, grains=4, slices=1, replicas=0)
    held = Holdings.reported(layout, {1: {(unit, 0, 0) for unit in range(len(layout.units))}})
    new = lose(layout, [0, 2], held, epoch=1)
    assert (new.pipeline_size, new.ranks, new.lost) == (2, (1, 3), (0, 2))


def test_what_cannot_help_a_dissolved_stage_becomes_spare() -> None:
    """Shadows, whose parameters may be of no step, and the live ranks of a broken cell."""
    layout, held = make(2, 2, 2, grains=4, slices=2, replicas=1)
    first, second = layout.stages
    cells = (replace(second.cells[0], grains=(0, 1, 2, 3)), replace(second.cells[1], grains=()))
    layout = replace(layout, stages=(first, replace(second, cells=cells)))
    new = lose(layout, [4], held.without([4]), epoch=1)
    assert (new.pipeline_size, new.ranks, new.spares, new.lost) == (1, (0, 1, 2, 3), (5, 6, 7), (4,))


def test_owner_and_replica_dead_at_once() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=1)
    with pytest.raises(StateLost, match=r"slice 1 of unit embedding .*dead: ranks 1-2\).*Restart the job"):
        lose(layout, [1, 2], held.without([1, 2]), epoch=1)


def test_two_replicas_survive_two_deaths_at_once() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=2)
    new = lose(layout, [1, 2], held.without([1, 2]), epoch=1)
    assert new.owners[0] == (0, 3, 0, 3)
    assert all(len(copies) == 1 for row in new.replicas for copies in row), "there is room for one only"


def test_replicas_are_placed_anew_on_other_hosts() -> None:
    units, stage_units = gpt_units(1, 1, True, False)
    layout = Layout.grid(
        tp=1, pp=1, dp=6, stage_units=stage_units, units=units, num_grains=6, num_slices=6, replicas=1, ranks_per_host=2
    )
    new = lose(layout, [2], Holdings.of(layout).without([2]), epoch=1)
    for owners, replicas in zip(new.owners, new.replicas, strict=True):
        for owner, (copy,) in zip(owners, replicas, strict=True):
            assert new.host_of(owner) != new.host_of(copy)


def test_everything_is_held_after_a_checkpoint() -> None:
    layout, _ = make(2, 2, 2, grains=4, slices=2, replicas=1)
    held = everything(layout)
    lost = [0, 1, 4]  # what column 0 of stage 0 and a rank of stage 1 owned
    assert lose(layout, lost, held.without(lost), epoch=1).ranks == (2, 3, 6, 7)


def test_a_checkpoint_brings_a_dissolved_stage_back() -> None:
    layout, held = make(2, 2, 2, grains=4, slices=2, replicas=1)
    with pytest.raises(StateLost):
        lose(layout, [4, 6], held.without([4, 6]), epoch=1)
    new = lose(layout, [4, 6], readable(layout), epoch=1)
    assert (new.pipeline_size, new.ranks, new.spares) == (1, (0, 1, 2, 3), (5, 7))


def test_a_rank_that_never_was_is_refused() -> None:
    layout, held = make(1, 1, 4, grains=4, slices=4, replicas=1)
    with pytest.raises(LayoutError, match=r"\[77\]"):
        lose(layout, [77], held, epoch=1)


def check(old: Layout, new: Layout, held: Holdings, dead: set[int]) -> None:
    """Every invariant that a loss must keep, beyond those of ``validate`` (which ``lose`` calls)."""
    assert set(new.lost) == dead
    assert {*new.ranks, *new.spares, *new.lost} == {*old.ranks, *old.spares, *old.lost}
    for stage in new.stages:
        # Of more cells than grains some have none. They only follow: what a loss leaves over does not go to them.
        sizes = [len(cell.grains) for cell in stage.cells if not cell.shadow]
        assert max(sizes) - min(sizes) <= 1
    if all(working(stage, dead) for stage in old.stages):
        check_kept(old, new, held, dead)
    else:
        cells = {cell.ranks for stage in old.stages for cell in working(stage, dead)}
        assert {cell.ranks for stage in new.stages for cell in stage.cells} == cells
        assert new.pipeline_size <= old.pipeline_size


def working(stage: Stage, dead: set[int]) -> list[Cell]:
    """Cells that no death touches."""
    return [cell for cell in stage.cells if dead.isdisjoint(cell.ranks)]


def check_kept(old: Layout, new: Layout, held: Holdings, dead: set[int]) -> None:
    """Every stage has cells left: nothing moves that need not."""
    for before, after in zip(old.stages, new.stages, strict=True):
        assert after.units == before.units
        kept = working(before, dead)
        assert [cell.ranks for cell in kept] == [cell.ranks for cell in after.cells], "just the cells of the dead leave"
        for cell, now in zip(kept, after.cells, strict=True):
            assert set(cell.grains) <= set(now.grains), "a grain of a cell that stays does not move"
            assert now.grains == tuple(sorted(now.grains))
    cells = {cell.leader: cell for stage in new.stages for cell in stage.cells}
    for unit in range(len(new.units)):
        home = {cell.leader for cell in new.stages[new.home(unit)].cells}
        for k in range(new.num_slices):
            holds = {
                leader
                for leader, cell in cells.items()
                if all((unit, k, part) in held.of_rank(rank) for part, rank in enumerate(new.keepers(cell, unit, k)))
            }
            owner, copies = new.owners[unit][k], new.replicas[unit][k]
            if old.owners[unit][k] in holds:
                assert owner == old.owners[unit][k], "an owner that stays and has the state keeps its slice"
            assert owner in holds or not holds & home, "who has the state comes first"
            assert set(old.replicas[unit][k]) & holds <= {owner, *copies}, "a live replica that stays is kept"
            assert len(copies) >= min(new.num_replicas, len(cells) - 1)
            if set(copies) - set(old.replicas[unit][k]) - home:
                assert home <= {owner, *copies}, "copies go to other stages only where the own one is too narrow"


shapes = st.fixed_dictionaries(
    {
        "tp": st.integers(1, 3),
        "teams": st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 4), (4, 2)]),
        "pp": st.integers(1, 4),
        "dp": st.integers(1, 6),
        "grains": st.integers(6, 13),
        "slices": st.integers(1, 5),
        "replicas": st.integers(0, 3),
        "tied": st.booleans(),
    }
)


@settings(max_examples=examples(1000), deadline=None)
@example(  # a stage gets more cells than there are grains
    shape={"tp": 1, "pp": 4, "dp": 5, "grains": 6, "slices": 1, "replicas": 3, "tied": False}, seed=234236, finish=0.25
)
@given(shape=shapes, seed=st.integers(0, 2**32), finish=st.floats(0, 1))
def test_any_sequence_of_losses_keeps_every_invariant(shape: dict[str, int], seed: int, finish: float) -> None:
    """Ranks (spares too) die in random groups; transfers finish only sometimes before the next loss."""
    layout, held = make(**shape)  # type: ignore[arg-type]
    rng = random.Random(seed)
    dead: set[int] = set()
    for epoch in range(1, 8):
        alive = [*layout.ranks, *layout.spares]
        dead |= set(rng.sample(alive, rng.randint(1, min(2, len(alive)))))
        held = held.without(dead)
        parts = {part for rank in alive for part in held.of_rank(rank)}
        if not any(working(stage, dead) for stage in layout.stages):
            with pytest.raises(NoLayout):
                lose(layout, dead, held, epoch)
            return
        if len(parts) < len(layout.parts):
            with pytest.raises(StateLost):
                lose(layout, dead, held, epoch)
            return
        new = lose(layout, dead, held, epoch)
        check(layout, new, held, dead)
        moves = transfers(new, held)
        assert moves == transfers(Layout.from_json(new.to_json()), held)
        for move in moves:
            part = (move.unit, move.slice, move.part)
            assert part in held.of_rank(move.src)
            assert part not in held.of_rank(move.dst)
            assert new.part_of(move.unit, move.dst) == move.part
        for move in moves:
            if rng.random() <= finish:
                held = held.replace(move.dst, held.of_rank(move.dst) | {(move.unit, move.slice, move.part)})
        layout = new


@settings(max_examples=examples(500), deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32))
def test_one_loss_at_a_time_never_loses_a_slice(shape: dict[str, int], seed: int) -> None:
    """With replicas, and time for what follows a loss before the next one, only the last cell's end is that of all."""
    layout, _ = make(**{**shape, "replicas": max(1, shape["replicas"])})  # type: ignore[arg-type]
    rng = random.Random(seed)
    dead: set[int] = set()
    while True:
        # The layouts that follow make new copies, in other stages if the own one is too narrow.
        while (better := improve(layout, {}, layout.epoch + 1)) is not None:
            layout = better[0]
        victim = rng.choice(layout.ranks)
        dead.add(victim)
        # Spares and cells drop what they no longer have a role for: the copies that are asked for must be enough.
        held = Holdings.of(layout).without(dead)
        if sum(stage.width for stage in layout.stages) == 1:
            with pytest.raises(NoLayout):
                lose(layout, dead, held, layout.epoch + 1)
            return
        layout = lose(layout, dead, held, layout.epoch + 1)


def test_owners_stay_balanced_when_no_replica_helps() -> None:
    layout, _ = make(1, 1, 4, grains=4, slices=12, replicas=0)
    all_state = {(unit, k, 0) for unit in range(3) for k in range(12)}
    new = lose(layout, [3], Holdings.reported(layout, dict.fromkeys(range(3), all_state)), epoch=1)
    loads = Counter(owner for row in new.owners for owner in row)
    assert max(loads.values()) - min(loads.values()) <= 1
