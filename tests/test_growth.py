"""Growth: ranks that join, and slices that spread, over any sequence of losses and joins."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Layout, gpt_units, transfers
from megatron_elastic.plan import NoLayout, improve, lose
from megatron_elastic.plan.growth import admit, settle, spread

Held = dict[int, set[tuple[int, int, int]]]
_STEPS = 8
"""Layouts that ``improve`` may take: newcomers, spread and settle, and what a loss left."""


def make(tp: int, pp: int, dp: int, *, replicas: int = 1, slices: int | None = None, grains: int = 12,
         per_host: int | None = None) -> Layout:  # fmt: skip
    units, stage_units = gpt_units(pp, pp, True, positions=False)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=slices or dp,
        replicas=replicas, ranks_per_host=per_host,
    )  # fmt: skip


def roles(layout: Layout) -> Held:
    """What ranks hold once all copies are live."""
    return {
        rank: {(unit, k, layout.tp_index(rank)) for unit, k in (*layout.owned(rank), *layout.replicated(rank))}
        for rank in layout.ranks
    }


def converge(layout: Layout, newcomers: dict[int, int], max_steps: int = _STEPS) -> list[Layout]:
    """All layouts from ``layout`` to the even one; a step must need no state that is not live."""
    path = [layout]
    waiting = dict(newcomers)
    while (new := improve(path[-1], waiting, path[-1].epoch + 1)) is not None:
        old = path[-1]
        moves = transfers(new, roles(old))
        assert all(move.role == "replica" for move in moves), "what a cell is to own was copied to it before"
        assert not moves or new.owners == old.owners
        known = {*new.ranks, *new.spares}
        waiting = {rank: host for rank, host in waiting.items() if rank not in known}
        path.append(new)
        assert len(path) <= max_steps, "does not converge"
    return path


def check_even(layout: Layout) -> None:
    """What the end of growth must be."""
    for index, stage in enumerate(layout.stages):
        leaders = [cell.leader for cell in stage.cells]
        slices = [(u, k) for u in stage.units if layout.home(u) == index for k in range(layout.num_slices)]
        counts = [sum(layout.owners[u][k] == leader for u, k in slices) for leader in leaders]
        assert max(counts) - min(counts) <= 1
        grains = [len(cell.grains) for cell in stage.cells]
        assert max(grains) - min(grains) <= 1
        assert sorted(g for cell in stage.cells for g in cell.grains) == list(range(layout.num_grains))
        hosts = {layout.host_of(leader) for leader in leaders}
        for unit, k in slices:
            owner, copies = layout.owners[unit][k], layout.replicas[unit][k]
            assert len({owner, *copies}) == 1 + min(layout.num_replicas, stage.width - 1) == 1 + len(copies)
            if layout.num_replicas:
                apart = {layout.host_of(at) for at in (owner, *copies)}
                assert len(apart) == min(len(hosts), 1 + len(copies)), "copies are on as many hosts as there are"


def test_the_first_layout_is_even_already() -> None:
    for dp in (1, 2, 4):
        assert improve(make(1, 2, dp), {}, 1) is None
        assert improve(make(1, 1, dp, per_host=2), {}, 1) is None


def test_a_rank_comes_back() -> None:
    """In three layouts: it follows, its slices are copied to it, and it owns them."""
    layout = make(1, 1, 4, slices=4)
    small = lose(layout, [2], {r: parts for r, parts in roles(layout).items() if r != 2}, 1)
    followed = improve(small, {4: 0}, 2)
    assert followed is not None
    assert [cell.ranks for cell in followed.stages[0].cells] == [(0,), (1,), (3,), (4,)]
    assert followed.cell_of(4).shadow
    assert followed.owners == small.owners
    path = converge(followed, {})
    check_even(path[-1])
    assert not path[-1].cell_of(4).shadow
    assert Counter(owner for row in path[-1].owners for owner in row)[4] == 3, "its share of 12 slices"


def test_ranks_that_form_no_cell_stay_spares() -> None:
    layout = make(2, 1, 2)
    one = improve(layout, {4: 0}, 1)
    assert one is None or one.spares == (4,)
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


def test_settle_without_spread_is_refused() -> None:
    with pytest.raises(ValueError, match="has no copy at cells"):
        settle(admit(make(1, 1, 2), {2: 0, 3: 0}, 1), 2)


def test_spread_adds_behind_what_is_wanted() -> None:
    """So that whoever cuts the list at ``num_replicas`` has the replicas of before."""
    layout = admit(make(1, 1, 3, replicas=2, slices=6), {3: 0}, 1)
    wider = spread(layout, 2)
    assert wider != layout
    for before, after in zip(layout.replicas, wider.replicas, strict=True):
        for copies, more in zip(before, after, strict=True):
            assert more[: len(copies)] == copies
    assert wider.owners == layout.owners


def test_growth_beyond_the_first_size() -> None:
    path = converge(make(1, 2, 2, slices=4), {rank: 1 for rank in range(4, 10)})
    assert [stage.width for stage in path[-1].stages] == [5, 5]
    check_even(path[-1])


shapes = st.fixed_dictionaries(
    {
        "tp": st.integers(1, 2),
        "pp": st.integers(1, 3),
        "dp": st.integers(1, 5),
        "slices": st.integers(1, 6),
        "replicas": st.integers(0, 3),
        "per_host": st.sampled_from([None, 1, 2, 4]),
    }
)


@settings(max_examples=400, deadline=None)
@given(shape=shapes, seed=st.integers(0, 2**32))
def test_any_sequence_of_losses_and_joins_ends_even(shape: dict[str, int], seed: int) -> None:
    """Also when the steps to an even layout are interrupted by the next loss or join."""
    layout = make(**shape)
    rng = random.Random(seed)
    dead: set[int] = set()
    next_rank = len(layout.ranks)
    for _ in range(6):
        newcomers: dict[int, int] = {}
        if rng.random() < 0.5:
            victims = {rng.choice([*layout.ranks, *layout.spares])}
            held = {rank: parts for rank, parts in roles(layout).items() if rank not in victims}
            held |= {rank: set() for rank in layout.spares if rank not in victims}
            try:
                layout = lose(layout, victims, held, layout.epoch + 1)
            except NoLayout:
                assert layout.num_replicas == 0 or any(stage.width == 1 for stage in layout.stages) or any(
                    all(cell.shadow or cell.leader in victims or victims & set(cell.ranks) for cell in stage.cells)
                    for stage in layout.stages
                )  # fmt: skip
                return
            dead |= victims
        else:
            for _ in range(rng.randint(1, 5)):
                newcomers[next_rank] = rng.randint(0, len(layout.hosts))
                next_rank += 1
        path = converge(layout, newcomers)
        assert set(path[-1].lost) == dead
        check_even(path[-1])
        assert improve(path[-1], {}, path[-1].epoch + 1) is None
        stop = rng.randrange(len(path)) if rng.random() < 0.3 else len(path) - 1
        layout = path[stop]
