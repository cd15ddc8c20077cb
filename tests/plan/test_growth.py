"""Growth: ranks that join, slices that spread and units that move, over any sequence of losses, joins and requests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Holdings, Layout, changed, decode, difference, encode, gpt_units, transfers
from megatron_elastic.plan import Costs, NoLayout, StateLost, improve, lose, replan
from megatron_elastic.plan.growth import admit, approach, even
from tests.tiers.examples import examples

_STEPS = 4
"""Layouts that it may take until nothing gets better: twice one to approach a goal, and the goal."""
Rearrange = Callable[[Layout], Layout]


def make(tp: int, pp: int, dp: int, *, replicas: int = 1, slices: int | None = None, grains: int = 12,
         per_host: int | None = None, tied: bool = True, each: int = 1,
         teams: tuple[int, int] = (1, 1)) -> Layout:  # fmt: skip
    cp, ep = teams
    units, stage_units = gpt_units(pp * each, pp, tied, positions=False, routed=range(1, pp * each) if ep > 1 else ())
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=slices or dp,
        replicas=replicas, ranks_per_host=per_host, cp=cp, ep=ep,
    )  # fmt: skip


def to_stages(count: int, tied: bool = True) -> Rearrange:
    """What chooses ``count`` stages."""
    return lambda layout: replan(layout, Costs.assumed(layout.units), layout.epoch, stages={count}, tied=tied)


def converge(layout: Layout, newcomers: dict[int, int], rearrange: Rearrange | None = None) -> list[Layout]:
    """All layouts from ``layout`` to the one that is the best; what is in between must cost nothing."""
    path = [layout]
    waiting = dict(newcomers)
    goal: Layout | None = None
    while (found := improve(path[-1], waiting, path[-1].epoch + 1, goal, rearrange)) is not None:
        new, goal = found
        old = path[-1]
        moves = transfers(new, Holdings.of(old))
        assert all(move.role == "replica" for move in moves), "what a cell is to own was copied to it before"
        # Where more copies or shadows are all that is wanted, what leads to the goal is the goal itself.
        if goal is not None or moves or new.ranks != old.ranks:
            check_work_stays(old, new)
        else:
            check_entered(old, new)
        waiting = {rank: host for rank, host in waiting.items() if rank not in (*new.ranks, *new.spares)}
        path.append(new)
        assert len(path) <= 1 + _STEPS, "does not converge"
    return path


def check_work_stays(old: Layout, new: Layout) -> None:
    """On the way to a goal nobody loses what it computes, owns or holds; cells may come as shadows."""
    assert new.owners == old.owners
    for before, after in zip(old.replicas, new.replicas, strict=True):
        assert all(more[: len(copies)] == copies for copies, more in zip(before, after, strict=True))
    assert [stage.units for stage in new.stages] == [stage.units for stage in old.stages]
    for was, stage in zip(old.stages, new.stages, strict=True):
        assert [(cell.ranks, cell.grains) for cell in was.cells] == [
            (cell.ranks, cell.grains) for cell in stage.cells[: was.width]
        ]
        assert all(cell.shadow for cell in stage.cells[was.width :])


def check_entered(old: Layout, new: Layout) -> None:
    """A goal needs nothing that is not there: neither state nor parameters."""
    assert transfers(new, Holdings.of(old)) == ()
    for rank in new.ranks:
        assert set(new.held_by(rank)) <= set(old.held_by(rank))


def check_even(layout: Layout) -> None:
    """What the end of growth must be."""
    cells = [cell for stage in layout.stages for cell in stage.cells]
    assert not any(cell.incoming for cell in cells)
    for index, stage in enumerate(layout.stages):
        leaders = [cell.leader for cell in stage.cells]
        slices = [(u, k) for u in layout.at_home(index) for k in range(layout.num_slices)]
        counts = [sum(layout.owners[u][k] == leader for u, k in slices) for leader in leaders]
        assert max(counts) - min(counts) <= 1
        grains = [len(cell.grains) for cell in stage.cells]
        assert max(grains) - min(grains) <= 1
        hosts = {layout.host_of(leader) for leader in leaders}
        for unit, k in slices:
            owner, copies = layout.owners[unit][k], layout.replicas[unit][k]
            assert len({owner, *copies}) == 1 + min(layout.num_replicas, len(cells) - 1) == 1 + len(copies)
            elsewhere = set(copies) - set(leaders)
            narrow = stage.width <= layout.num_replicas
            assert not elsewhere or narrow or len(hosts) == 1, "only where the own stage is too narrow, or on one host"
            if copies and len({layout.host_of(cell.leader) for cell in cells}) > 1:
                assert len({layout.host_of(at) for at in (owner, *copies)}) > 1, "no host has all there is of a slice"
            if not elsewhere:
                apart = {layout.host_of(at) for at in (owner, *copies)}
                assert len(apart) == min(len(hosts), 1 + len(copies)), "copies are on as many hosts as there are"


def test_the_first_layout_is_even_already() -> None:
    for dp in (2, 4):
        assert improve(make(1, 2, dp), {}, 1) is None
        assert improve(make(1, 1, dp, per_host=2), {}, 1) is None
    assert improve(make(1, 1, 1), {}, 1) is None


def test_stages_of_one_cell_keep_copies_for_each_other() -> None:
    """In one layout: the copies are all that changes, so what is on the way to it is the goal itself."""
    layout = make(1, 2, 1)
    found = improve(layout, {}, 1)
    assert found is not None
    new, goal = found
    assert goal is None
    assert new.stages == layout.stages
    assert [copies for row in new.replicas for copies in row] == [(1,), (1,), (0,), (0,)]
    assert improve(new, {}, 2) is None
    path = converge(new, {2: 0, 3: 0})
    assert [stage.width for stage in path[-1].stages] == [2, 2], "newcomers are not overlooked"


def test_a_rank_comes_back() -> None:
    """In two layouts: it follows while its slices are copied to it, and it takes part."""
    layout = make(1, 1, 4, slices=4)
    small = lose(layout, [2], Holdings.of(layout).without([2]), 1)
    found = improve(small, {4: 0}, 2)
    assert found is not None
    followed, goal = found
    assert goal is not None
    assert [cell.ranks for cell in followed.stages[0].cells] == [(0,), (1,), (3,), (4,)]
    assert followed.cell_of(4).shadow
    assert followed.owners == small.owners
    path = converge(small, {4: 0})
    assert path[1] == followed
    assert len(path) == 3
    check_even(path[-1])
    assert not path[-1].cell_of(4).shadow
    assert Counter(owner for row in path[-1].owners for owner in row)[4] == 3, "its share of 12 slices"


def test_ranks_that_form_no_cell_stay_spares() -> None:
    layout = make(2, 1, 2)
    assert improve(layout, {4: 0}, 1) is None
    admitted = admit(layout, {4: 0}, 1)
    assert (admitted.spares, admitted.ranks) == ((4,), layout.ranks)
    two = admit(admitted, {5: 1}, 2)
    assert (two.spares, two.stages[0].cells[-1].ranks) == ((), (4, 5))
    assert two.hosts == ((0, 1, 2, 3, 4), (5,))


def test_new_cells_go_to_the_narrowest_stage_and_stay_on_a_host() -> None:
    layout = make(2, 2, 2)
    admitted = admit(layout, {8: 1, 9: 2, 10: 1, 11: 2}, 1)
    assert [[cell.ranks for cell in stage.cells] for stage in admitted.stages] == [
        [(0, 1), (2, 3), (8, 10)],
        [(4, 5), (6, 7), (9, 11)],
    ]


def test_a_cell_is_made_whole_at_the_place_that_was_lost() -> None:
    """Whether by a newcomer, a spare, or a rank of another broken cell; on the way there is nothing to build again."""
    layout = make(2, 2, 2, teams=(1, 2))
    broken = lose(layout, [9], Holdings.of(layout).without([9]), 1)
    assert broken.stages[1].waiting == ((8, 0), (10, 2), (11, 3))
    assert improve(broken, {}, 2) is None, "three ranks are no cell"
    repaired = admit(broken, {16: 0}, 2)
    assert [cell.ranks for cell in repaired.stages[1].cells] == [(12, 13, 14, 15), (8, 16, 10, 11)]
    assert not repaired.stages[1].waiting and not repaired.spares


def test_broken_cells_of_a_stage_make_a_whole_one_of_what_is_left() -> None:
    layout = make(2, 1, 3)
    broken = lose(layout, [0, 3], Holdings.of(layout).without([0, 3]), 1)
    assert broken.stages[0].waiting == ((1, 1), (2, 0))
    assert admit(broken, {}, 2).stages[0].cells[-1].ranks == (2, 1)
    assert admit(broken, {6: 0}, 2).spares == (6,)


@settings(max_examples=examples(200), deadline=None)
@given(
    tp=st.integers(1, 3), pp=st.integers(1, 3), dp=st.integers(2, 4), per_host=st.sampled_from([None, 2, 3]),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_who_is_left_of_broken_cells_keeps_its_place(
    tp: int, pp: int, dp: int, per_host: int | None, seed: int
) -> None:
    """Once as many have come as were lost, wherever they are, all others are where they were."""
    rng = random.Random(seed)
    layout = make(tp, pp, dp, per_host=per_host, replicas=dp)
    whole = [rng.choice(stage.cells) for stage in layout.stages]
    others = [rank for rank in layout.ranks if not any(rank in cell.ranks for cell in whole)]
    lost = rng.sample(others, rng.randint(1, len(others)))
    broken = lose(layout, lost, Holdings.of(layout).without(lost), 1)
    came = {len(layout.ranks) + i: rng.randint(0, len(layout.hosts)) for i in range(len(lost))}
    repaired = admit(broken, came, 2)
    assert repaired.spares == () and not any(stage.waiting for stage in repaired.stages)
    for rank in set(layout.ranks) - set(lost):
        assert (repaired.stage_of(rank), repaired.place_of(rank)) == (layout.stage_of(rank), layout.place_of(rank))


@settings(max_examples=examples(100), deadline=None)
@given(
    tp=st.integers(1, 2), pp=st.integers(1, 3), dp=st.integers(2, 4), per_host=st.sampled_from([None, 2, 3]),
    replicas=st.integers(0, 2), data=st.data(),
)  # fmt: skip
def test_cells_leave_and_come_again(
    tp: int, pp: int, dp: int, per_host: int | None, replicas: int, data: st.DataObject
) -> None:
    """Owners are never waited for, and who comes again is where it was, unless another stage needs it more."""
    first = layout = make(tp, pp, dp, per_host=per_host, replicas=replicas)
    few = data.draw(st.integers(pp, pp * dp - 1))
    for most in (few, pp * dp):
        goal = None
        for _ in range(2 * _STEPS):
            found = improve(layout, {}, layout.epoch + 1, goal, most_cells=most)
            if found is None:
                break
            new, goal = found
            assert all(move.role == "replica" for move in transfers(new, Holdings.of(layout)))
            told = difference(layout, new)
            assert told is not None and changed(layout, told) == new == decode(encode(new))
            assert Layout.from_json(new.to_json()) == new
            layout = new
        assert found is None and layout.most_cells == most == len(layout.cells)
        check_even(layout)
        widths = [stage.width for stage in layout.stages]
        assert max(widths) - min(widths) <= 1
    assert [{cell.ranks for cell in stage.cells} for stage in layout.stages] == [
        {cell.ranks for cell in stage.cells} for stage in first.stages
    ]


def test_a_spare_takes_a_lost_place_and_no_other() -> None:
    layout = replace(make(2, 1, 2), most_cells=2)
    assert improve(layout, {4: 0, 5: 0}, 1) is None, "they could form a cell"
    broken = lose(layout, [2], Holdings.of(layout).without([2]), 1)
    repaired = admit(broken, {4: 0, 5: 0}, 2)
    assert (repaired.stages[0].cells[-1].ranks, repaired.spares) == ((4, 3), (5,))


def test_the_order_in_which_ranks_of_a_host_get_ready_does_not_show() -> None:
    layout = make(1, 1, 2, slices=4)
    together = admit(layout, {2: 1, 3: 1}, 2)
    assert admit(admit(layout, {3: 1}, 1), {2: 1}, 2).hosts == together.hosts == ((0, 1), (2, 3))


def test_an_approach_adds_behind_what_is_wanted() -> None:
    """So that whoever cuts the list at ``num_replicas`` has the replicas of before."""
    layout = admit(make(1, 1, 3, replicas=2, slices=6), {3: 0}, 1)
    goal = even(layout, 2)
    wider = approach(layout, goal, 2)
    assert wider != layout
    check_work_stays(layout, wider)
    check_entered(wider, replace(goal, epoch=3))


def test_growth_beyond_the_first_size() -> None:
    path = converge(make(1, 2, 2, slices=4), {rank: 1 for rank in range(4, 10)})
    assert [stage.width for stage in path[-1].stages] == [5, 5]
    check_even(path[-1])


def test_a_cell_that_changes_its_stage_holds_both() -> None:
    """The parameters of its new stage come to it after every step while it still computes its old one."""
    layout = make(1, 4, 2, each=3)
    path = converge(layout, {}, to_stages(2))
    assert len(path) == 3
    before, after = path[1], path[2]
    assert [len(stage.units) for stage in after.stages] == [7, 8]
    for rank in after.ranks:
        units = set(after.stages[after.stage_of(rank)].units)
        old = before.stages[before.stage_of(rank)].units
        assert before.cell_of(rank).incoming == tuple(sorted(units.difference(old)))
    check_even(after)


def test_stages_as_asked_one_after_the_other() -> None:
    """Four, two, three and four again: each in two layouts, over all ranks."""
    layout = make(1, 4, 2, each=3)
    for count in (2, 3, 4, 1, 4):
        path = converge(layout, {}, to_stages(count))
        assert len(path) == 3
        layout = path[-1]
        assert (layout.pipeline_size, layout.ranks) == (count, tuple(range(8)))
        check_even(layout)


shapes = st.fixed_dictionaries(
    {
        "tp": st.integers(1, 2),
        "teams": st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 2)]),
        "pp": st.integers(1, 3),
        "dp": st.integers(1, 5),
        "slices": st.integers(1, 6),
        "replicas": st.integers(0, 3),
        "per_host": st.sampled_from([None, 1, 2, 4]),
        "tied": st.booleans(),
        "each": st.integers(1, 2),
    }
)


@settings(max_examples=examples(400), deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32))
def test_any_sequence_ends_even(shape: dict[str, int], seed: int) -> None:
    """Losses (of whole stages too), joins and other numbers of stages; each may come while the last is on its way."""
    layout = make(**shape)  # type: ignore[arg-type]
    layers = sum(name.startswith("layer.") for name in layout.units)
    rng = random.Random(seed)
    dead: set[int] = set()
    wanted: int | None = None
    next_rank = len(layout.ranks)
    held = Holdings.of(layout)
    for _ in range(6):
        newcomers: dict[int, int] = {}
        what = rng.choice(["lose", "lose", "join", "stages"])
        if what == "lose":
            alive = [*layout.ranks, *layout.spares]
            victims = set(rng.sample(alive, rng.randint(1, min(2, len(alive)))))
            dead |= victims
            held = held.without(dead)
            parts_alive = {part for rank in alive for part in held.of_rank(rank)}
            complete = len(parts_alive) == len(layout.parts)
            try:
                layout = lose(layout, victims, held, layout.epoch + 1)
            except StateLost:
                assert not complete
                return
            except NoLayout:
                assert not any(
                    not cell.shadow and dead.isdisjoint(cell.ranks) for stage in layout.stages for cell in stage.cells
                )
                return
            transfers(layout, held)
        elif what == "join":
            newcomers = {next_rank + i: rng.randint(0, len(layout.hosts)) for i in range(rng.randint(1, 5))}
            next_rank += len(newcomers)
        else:
            wanted = rng.randint(1, layers)
        cells = len(layout.ranks) // layout.cell_size
        rearrange = to_stages(wanted, bool(shape["tied"])) if wanted and wanted <= cells else None
        path = converge(layout, newcomers, rearrange)
        assert set(path[-1].lost) == dead
        check_even(path[-1])
        if rearrange is not None:
            assert path[-1].pipeline_size == wanted
        stop = rng.randrange(len(path)) if rng.random() < 0.3 else len(path) - 1
        layout = path[stop]
        # What the last of these layouts asks for first may be on its way still.
        before, asked = (Holdings.of(one) for one in (path[max(stop - 1, 0)], layout))
        held = Holdings.reported(
            layout,
            {
                rank: {part for part in asked.of_rank(rank) if part in before.of_rank(rank) or rng.random() < 0.5}
                for rank in layout.ranks
            },
        )
