"""Layouts, units and transfers: the grid, its invariants, its text, and where missing state comes from."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from megatron_elastic.layout import (
    Cell,
    Holdings,
    Layout,
    LayoutError,
    SliceLost,
    SlicePart,
    Stage,
    Transfer,
    by_rank,
    decode,
    encode,
    gpt_units,
    transfers,
)


def gpt_grid(
    tp: int,
    pp: int,
    dp: int,
    *,
    layers: int = 4,
    tied: bool = True,
    grains: int = 8,
    slices: int | None = None,
    replicas: int = 1,
    ranks_per_host: int | None = None,
) -> Layout:
    units, stage_units = gpt_units(layers, pp, tied, positions=True)
    return Layout.grid(
        tp=tp,
        pp=pp,
        dp=dp,
        stage_units=stage_units,
        units=units,
        num_grains=grains,
        num_slices=slices or dp,
        replicas=replicas,
        ranks_per_host=ranks_per_host,
    )


def test_gpt_units_name_what_moves() -> None:
    assert gpt_units(4, 1, True, False) == (
        ["embedding", "layer.0", "layer.1", "layer.2", "layer.3", "head"],
        [[0, 1, 2, 3, 4, 5]],
    )
    names, stages = gpt_units(4, 2, True, True)
    assert names == ["embedding", "positions", "layer.0", "layer.1", "layer.2", "layer.3", "head"]
    assert stages == [[0, 1, 2, 3], [0, 4, 5, 6]]
    assert gpt_units(4, 2, False, True)[1] == [[0, 1, 2, 3], [4, 5, 6]]
    assert gpt_units(4, 4, False, False)[1] == [[0, 1], [2], [3], [4, 5]]
    names, stages = gpt_units(2, 2, False, False, routed=[1, 2, 3], mtp=2)
    assert names == ["embedding", "layer.0", "layer.1", "experts.1", "mtp.0", "experts.2", "mtp.1", "experts.3", "head"]
    assert stages == [[0, 1], [2, 3, 4, 5, 6, 7, 8]]
    with pytest.raises(LayoutError, match="4 layers cannot be split evenly over 3"):
        gpt_units(4, 3, True, True)


def test_grid_has_megatrons_rank_order() -> None:
    layout = gpt_grid(2, 2, 2)
    assert [[cell.ranks for cell in stage.cells] for stage in layout.stages] == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    assert layout.stages[0].cells[1].grains == (1, 3, 5, 7)
    assert layout.ranks == tuple(range(8))
    assert (layout.cell_size, layout.pipeline_size, layout.stages[1].width) == (2, 2, 2)
    assert [layout.tp_index(rank) for rank in range(8)] == [0, 1] * 4
    assert [layout.stage_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert layout.cell_of(7) is layout.stages[1].cells[1]
    assert layout.cell_of(7).leader == 6
    assert [cell.leader for cell, _ in layout.sharers(1, 3)] == [6]


def test_chunks_are_runs_of_units() -> None:
    units, stage_units = gpt_units(8, 2, tied=True, positions=True, chunks=2)
    assert stage_units == [[0, 1, 2, 3, 6, 7], [0, 4, 5, 8, 9, 10]]
    layout = Layout.grid(
        tp=1, pp=2, dp=2, stage_units=stage_units, units=units, num_grains=8, num_slices=2, replicas=1
    )
    assert layout.num_chunks == 2
    assert layout.chunks(0) == ((0, 1, 2, 3), (6, 7))
    assert layout.chunks(1) == ((4, 5), (0, 8, 9, 10)), "the output head has the tied embedding"
    assert Layout.from_json(layout.to_json()) == layout
    assert "stage 0  embedding..layer.1 layer.4..layer.5  0:" in str(layout)
    assert gpt_grid(1, 2, 2).num_chunks == 1
    stages = [[4, 5, 6, 7], [0, 1, 2, 3]]
    with pytest.raises(LayoutError, match=r"stage 1 begins units \[0, 1, 2, 3\], but they must come after 4"):
        Layout.grid(
            tp=1, pp=2, dp=2, stage_units=stages, units=units[:8], num_grains=8, num_slices=2, replicas=1
        )
    with pytest.raises(LayoutError, match="6 layers cannot be split evenly over 2 pipeline stages of 2 chunks"):
        gpt_units(6, 2, tied=True, positions=True, chunks=2)


def test_slices_live_in_the_home_stage_and_are_copied_to_the_next_cell() -> None:
    layout = gpt_grid(2, 2, 2, tied=True)
    assert layout.home(0) == 0, "the tied embedding is at home where it comes first"
    assert [cell.leader for cell in layout.holders(0)] == [0, 2, 4, 6]
    assert [cell.leader for cell in layout.holders(6)] == [4, 6]
    assert layout.owner(0, 1, 1) == 3
    assert layout.copies(0, 1, 1) == (1,)
    assert layout.replicas[0] == ((2,), (0,))
    assert layout.owned(3) == ((0, 1), (1, 1), (2, 1), (3, 1))
    assert layout.replicated(3) == ((0, 0), (1, 0), (2, 0), (3, 0))
    every = [pair for rank in layout.ranks if layout.tp_index(rank) == 0 for pair in layout.owned(rank)]
    assert sorted(every) == [(unit, k) for unit in range(7) for k in range(2)]


def test_ranks_of_a_cell_share_what_they_all_have_and_keep_their_own_experts() -> None:
    units, stage_units = gpt_units(2, 1, tied=True, positions=False, routed=[1], biased=True)
    assert units == ["embedding", "layer.0", "layer.1", "experts.1", "bias.1", "head"]
    layout = Layout.grid(
        tp=2, ep=2, pp=1, dp=2, stage_units=stage_units, units=units, num_grains=4, num_slices=4, replicas=1
    )
    assert [cell.ranks for cell in layout.stages[0].cells] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert (layout.cell_size, layout.tp, layout.num_batches) == (4, 2, 8)
    assert [layout.tp_index(rank) for rank in range(8)] == [0, 1] * 4
    assert [layout.batch_of(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    first, second = layout.stages[0].cells
    assert (layout.num_parts(1), layout.part_of(1, 7)) == (2, 1)
    assert [layout.keepers(second, 1, k) for k in range(4)] == [(4, 5), (4, 5), (6, 7), (6, 7)]
    assert layout.sharing(first, 1, 1) == (1, 3)
    assert (layout.num_parts(3), layout.part_of(3, 7)) == (4, 3)
    assert all(layout.keepers(second, 3, k) == (4, 5, 6, 7) for k in range(4))
    assert layout.sharing(first, 3, 1) == (1,)
    assert (layout.owner(1, 2, 1), layout.copies(1, 2, 1)) == (3, (7,))
    assert layout.owned(3) == ((0, 2), (1, 2), (2, 2), (3, 0), (3, 2), (4, 2), (5, 2))
    kept = [(unit, k, layout.part_of(unit, rank)) for rank in layout.ranks for unit, k in layout.owned(rank)]
    assert sorted(kept) == sorted(layout.parts)
    assert decode(encode(layout)) == Layout.from_json(layout.to_json()) == layout
    with pytest.raises(LayoutError, match="cannot have 1 context- and 3 expert-parallel indices"):
        replace(layout, ep=3).validate()


def test_contexts_and_experts_of_a_cell() -> None:
    """Four teams of one rank: two in a row share a micro-batch, or all share the experts."""
    units, stage_units = gpt_units(1, 1, tied=True, positions=False, routed=[0])
    grid = partial(Layout.grid, tp=1, pp=1, dp=1, stage_units=stage_units, units=units, num_grains=2, num_slices=4,
                   replicas=0)  # fmt: skip
    layout = grid(cp=2, ep=4)
    assert (layout.cell_size, layout.teams, layout.batches, layout.num_batches) == (4, 4, 2, 4)
    assert [(layout.cp_index(rank), layout.batch_of(rank)) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    experts, cell = units.index("experts.0"), layout.cell_of(0)
    assert (layout.num_parts(experts), layout.sharing(cell, experts, 3)) == (4, (3,))
    layout = grid(cp=4, ep=2)
    assert (layout.cell_size, layout.teams, layout.batches, layout.num_batches) == (4, 4, 1, 2)
    assert [(layout.cp_index(rank), layout.batch_of(rank)) for rank in range(4)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert (layout.num_parts(experts), layout.sharing(cell, experts, 1)) == (2, (1, 3))
    assert [layout.keepers(cell, experts, k) for k in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [layout.keepers(cell, 0, k) for k in range(4)] == [(0,), (1,), (2,), (3,)]
    kept = [(unit, k, layout.part_of(unit, rank)) for rank in layout.ranks for unit, k in layout.owned(rank)]
    assert sorted(kept) == sorted(layout.parts)
    assert decode(encode(layout)) == Layout.from_json(layout.to_json()) == layout
    with pytest.raises(LayoutError, match="context-parallel size 2 and expert-parallel size 3: one must divide"):
        grid(cp=2, ep=3)


@pytest.mark.parametrize(("dp", "replicas"), [(1, 1), (4, 0)])
def test_no_replicas_without_a_second_cell_or_when_unwanted(dp: int, replicas: int) -> None:
    layout = gpt_grid(1, 2, dp, replicas=replicas)
    assert all(copies == () for row in layout.replicas for copies in row)
    assert layout.copies(0, 0, 0) == ()
    assert layout.replicated(0) == ()


def test_replicas_are_on_other_hosts_first() -> None:
    layout = gpt_grid(1, 1, 6, replicas=2, ranks_per_host=2)
    assert layout.hosts == ((0, 1), (2, 3), (4, 5))
    for owner, copies in zip(layout.owners[0], layout.replicas[0], strict=True):
        assert {layout.host_of(rank) for rank in (owner, *copies)} == {0, 1, 2}
    # More of them than there are other hosts: a second one on each, and the owner's own host last.
    crowded = gpt_grid(1, 1, 6, replicas=5, ranks_per_host=2).replicas[0][0]
    assert crowded == (2, 4, 3, 5, 1)
    assert [layout.host_of(rank) for rank in (0, 3, 4)] == [0, 1, 2]


def test_a_shadow_is_a_cell_without_grains() -> None:
    layout = gpt_grid(1, 1, 2)
    first, second = layout.stages[0].cells
    cells = (replace(first, grains=tuple(range(8))), replace(second, grains=()))
    followed = replace(layout, stages=(replace(layout.stages[0], cells=cells),))
    followed.validate()
    assert [cell.shadow for cell in followed.stages[0].cells] == [False, True]


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2), (8, 1, 1), (1, 2, 4)])
def test_json_gives_the_same_layout_back(tp: int, pp: int, dp: int) -> None:
    layout = gpt_grid(tp, pp, dp)
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.to_json() == layout.to_json()


def test_the_table_for_people() -> None:
    assert str(gpt_grid(2, 2, 2, tied=True)).splitlines() == [
        "epoch 0: 8 ranks, 2 stages, cells of 2, 8 grains, 2 slices; spares -; lost -",
        "  stage 0  embedding..layer.1  0-1:[0 2 4 6]  2-3:[1 3 5 7]",
        "  stage 1  layer.2..head+embedding  4-5:[0 2 4 6]  6-7:[1 3 5 7]",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"epoch": "x"}', '{"epoch": Infinity}', "null"])
def test_json_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="no layout in JSON"):
        Layout.from_json(text)


def test_more_grains_than_memory_could_list_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"computes grains .* not each of 0"):
        replace(GOOD, num_grains=10**30).validate()


def test_lookups_do_not_change_identity() -> None:
    a, b = gpt_grid(1, 2, 2), gpt_grid(1, 2, 2)
    a.owned(0)
    assert a == b
    assert hash(a) == hash(b)


def test_a_rank_in_no_cell_is_refused_by_name() -> None:
    layout = gpt_grid(1, 1, 2)
    stage = Stage(layout.stages[0].units, (Cell((0,), tuple(range(8))),))
    owners = tuple(tuple(0 for _ in row) for row in layout.owners)
    replicas = tuple(tuple(() for _ in row) for row in layout.replicas)
    small = replace(layout, epoch=1, stages=(stage,), owners=owners, replicas=replicas, spares=(1,))
    small.validate()
    assert small.owned(1) == ()
    assert small.host_of(1) == 0
    with pytest.raises(LayoutError, match="rank 1 is in no cell at epoch 1: it is a spare"):
        small.stage_of(1)
    with pytest.raises(LayoutError, match="rank 1 is in no cell at epoch 1"):
        small.tp_index(1)
    with pytest.raises(LayoutError, match="rank 7 is on no host"):
        small.host_of(7)
    with pytest.raises(LayoutError, match="no cell of stage 0 computes grain 99"):
        small.sharers(0, 99)
    with pytest.raises(LayoutError, match="unit 99"):
        small.home(99)


GOOD = gpt_grid(1, 2, 2)


def with_incoming(*units: int) -> tuple[Stage, ...]:
    """GOOD's stages, but units are to move to the first cell of stage 0."""
    first, second = GOOD.stages
    return Stage(first.units, (replace(first.cells[0], incoming=units), *first.cells[1:])), second


def test_units_on_their_way_are_held_but_not_computed() -> None:
    layout = replace(GOOD, stages=with_incoming(4, 5))
    layout.validate()
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.held_by(0) == (0, 1, 2, 3, 4, 5)
    assert layout.held_by(1) == (0, 1, 2, 3)
    assert [cell.leader for cell in layout.holders(4)] == [2, 3, 0]
    assert [cell.leader for cell in layout.contributors(4)] == [2, 3]
    assert (layout.home(4), layout.home(0)) == (1, 0)
    assert [cell.leader for cell in layout.contributors(0)] == [0, 1, 2, 3], "tied: both stages compute it"


def test_a_replica_may_be_in_another_stage() -> None:
    layout = replace(GOOD, replicas=(((3,), (0,)), *GOOD.replicas[1:]))
    layout.validate()
    assert layout.copies(0, 0, 0) == (3,)
    assert (0, 0) in layout.replicated(3)
    assert 2 not in layout.held_by(3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spares": (0,)}, "rank 0 is listed 2 times"),
        ({"spares": (9,), "lost": (9,)}, "rank 9 is listed 2 times"),
        ({"spares": (9, 8)}, "must be ascending"),
        ({"num_grains": 9}, "not each of 0..8 once"),
        ({"units": GOOD.units[:-1]}, "but the names are"),
        ({"stages": ()}, "no stages"),
        ({"stages": (GOOD.stages[0], replace(GOOD.stages[1], units=(0,)))}, r"stage 1 begins units \[\], but"),
        ({"owners": GOOD.owners[:-1]}, "owners must have"),
        ({"owners": ((2, 3), *GOOD.owners[1:])}, "who leads no cell of home stage 0"),
        ({"owners": ((1, 1), *GOOD.owners[1:])}, "its owner 1 and its replicas \\(1,\\) not in different"),
        ({"replicas": (((9,), (0,)), *GOOD.replicas[1:])}, "slice 0 of embedding is at 9, who leads no cell"),
        ({"stages": with_incoming(4, 3)}, "cell 0 of stage 0 lists incoming units \\(4, 3\\)"),
        ({"stages": with_incoming(2)}, "cell 0 of stage 0 lists incoming units \\(2,\\): must be others'"),
        ({"stages": with_incoming(99)}, "cell 0 of stage 0 lists incoming units \\(99,\\)"),
        ({"replicas": (((1, 1), (0,)), *GOOD.replicas[1:])}, "slice 0 of embedding has its owner 0 and its replicas"),
        ({"hosts": ((0, 1, 2),)}, "hosts .* must list each"),
        ({"hosts": ((0, 1), (1, 2, 3))}, "hosts .* must list each"),
        ({"epoch": -1}, "out of range"),
    ],
)
def test_validate_names_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(GOOD, **changes).validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp": 0}, "must be positive"),
        ({"pp": 3}, "given for 2 stages"),
        ({"replicas": -1}, "replicas must be 0 or more"),
        ({"units": ["a", "b"]}, "the stages hold units"),
    ],
)
def test_grid_refuses_what_does_not_fit(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "tp": 1,
        "pp": 2,
        "dp": 2,
        "stage_units": [[0], [1]],
        "units": ["a", "b"],
        "num_grains": 4,
        "num_slices": 2,
        "replicas": 1,
    }
    if changes.get("units"):
        arguments["stage_units"] = [[0], [2]]
    with pytest.raises(LayoutError, match=message):
        Layout.grid(**{**arguments, **changes})  # type: ignore[arg-type]


def lacking(layout: Layout, *missing: tuple[int, SlicePart]) -> Holdings:
    """All that the layout asks for, but a part at a rank."""
    held = Holdings.of(layout)
    for rank, part in missing:
        held = held.replace(rank, held.of_rank(rank) - {part})
    return held


def test_nothing_to_transfer_where_all_hold_their_roles() -> None:
    layout = gpt_grid(2, 2, 2)
    assert transfers(layout, Holdings.of(layout)) == ()


def test_a_missing_replica_comes_from_the_owner_and_a_missing_owner_from_the_replica() -> None:
    layout = gpt_grid(2, 2, 2)
    held = lacking(layout, (2, (0, 0, 0)), (1, (0, 0, 1)))
    assert transfers(layout, held) == (Transfer(0, 0, 0, 0, 2, "replica"), Transfer(0, 0, 1, 3, 1, "owner"))


def test_other_holders_share_the_work_and_the_lost_are_no_source() -> None:
    units, stage_units = gpt_units(1, 1, True, False)
    layout = Layout.grid(tp=1, pp=1, dp=2, stage_units=stage_units, units=units, num_grains=2, num_slices=1, replicas=0)
    layout = replace(layout, spares=(5, 6), lost=(4,))
    everything = {(unit, 0, 0) for unit in range(3)}
    found = transfers(layout, Holdings.reported(layout, {4: everything, 5: everything, 6: everything}))
    assert [(t.src, t.dst) for t in found] == [(5, 0), (6, 0), (5, 0)]


def test_the_owner_is_the_source_however_busy_it_is() -> None:
    units, stage_units = gpt_units(1, 1, True, False)
    layout = Layout.grid(tp=1, pp=1, dp=2, stage_units=stage_units, units=units, num_grains=2, num_slices=1, replicas=1)
    everything = {(unit, 0, 0) for unit in range(3)}
    layout = replace(layout, spares=(5,))
    for source in (0, 1):
        held = Holdings.reported(layout, {source: everything, 5: everything})
        assert [t.src for t in transfers(layout, held)] == [source] * 3


def test_a_slice_that_nobody_holds_is_named() -> None:
    layout = gpt_grid(2, 2, 2)
    held = lacking(layout, (1, (2, 0, 1)), (3, (2, 0, 1)))
    with pytest.raises(SliceLost, match="part 1 of slice 0 of unit 2"):
        transfers(layout, held)


def test_each_rank_has_its_own_transfers_in_their_order() -> None:
    layout = gpt_grid(1, 2, 3)
    moves = transfers(layout, Holdings.of(layout).without([1, 4]))
    own = by_rank(moves)
    assert {move.dst for move in moves} == {1, 4}
    assert list(own) == sorted({rank for move in moves for rank in (move.src, move.dst)})
    for rank, of_rank in own.items():
        assert of_rank == tuple(move for move in moves if rank in (move.src, move.dst))
    assert by_rank(()) == {}
