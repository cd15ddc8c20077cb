"""Holdings: what ranks hold, told by a layout and exceptions, against the same told rank by rank."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Extent, Holdings, Layout, SlicePart, gpt_units
from tests.tiers.examples import examples


def grid(tp: int, pp: int, dp: int, slices: int, replicas: int, teams: tuple[int, int] = (1, 1)) -> Layout:
    cp, ep = teams
    units, stage_units = gpt_units(pp, pp, tied=True, positions=False, routed=range(pp) if ep > 1 else ())
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=dp, num_slices=slices, replicas=replicas,
        cp=cp, ep=ep,
    )  # fmt: skip


def told(layout: Layout, extent: Extent) -> dict[int, set[SlicePart]]:
    """What each rank holds if none differs."""
    found = {}
    for rank in layout.ranks:
        slices = {
            Extent.ROLES: [*layout.owned(rank), *layout.replicated(rank)],
            Extent.STAGE: [(u, k) for u in layout.held_by(rank) for k in range(layout.num_slices)],
            Extent.ALL: [(u, k) for u in range(len(layout.units)) for k in range(layout.num_slices)],
        }[extent]
        cell = layout.cell_of(rank)
        kept = [(unit, k) for unit, k in slices if rank in layout.keepers(cell, unit, k)]
        found[rank] = {(unit, k, layout.part_of(unit, rank)) for unit, k in kept}
    return found


def test_a_report_that_is_as_asked_is_no_exception() -> None:
    layout = grid(2, 2, 2, 2, 1)
    said = told(layout, Extent.ROLES)
    assert Holdings.reported(layout, said) == Holdings.of(layout)
    said[3].pop()
    held = Holdings.reported(layout, {rank: sorted(parts) for rank, parts in said.items() if rank != 5})
    assert held.exceptions == {3: said[3], 5: set()}
    briefly = {rank: None for rank in said if rank != 5} | {3: said[3]}
    assert Holdings.reported(layout, briefly) == held


@settings(max_examples=examples(300), deadline=None)
@given(
    tp=st.integers(1, 2), teams=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 4), (4, 2)]),
    pp=st.integers(1, 3), dp=st.integers(1, 4), slices=st.integers(1, 4),
    replicas=st.integers(0, 2), extent=st.sampled_from(Extent), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_holdings_say_what_each_rank_holds(
    tp: int, teams: tuple[int, int], pp: int, dp: int, slices: int, replicas: int, extent: Extent, seed: int
) -> None:
    layout = grid(tp, pp, dp, slices, replicas, teams)
    rng = random.Random(seed)
    held, plain = Holdings.of(layout, extent), told(layout, extent)
    for rank in rng.sample([*layout.ranks, 99], rng.randint(0, min(3, len(layout.ranks)))):
        if rng.random() < 0.5:
            held, plain[rank] = held.without([rank]), set()
        else:
            plain[rank] = set(rng.sample(layout.parts, rng.randint(0, len(layout.parts))))
            held = held.replace(rank, plain[rank])
    assert all(held.of_rank(rank) == parts for rank, parts in plain.items())
    for part in layout.parts:
        assert held.holders(part) == tuple(sorted(rank for rank, parts in plain.items() if part in parts))
    every = [(unit, k) for unit in range(len(layout.units)) for k in range(slices)]
    complete = held.complete(layout.cells, every)
    unsure = held.unsure(layout)
    assert unsure == sorted(set(unsure))
    for unit, k in every:
        having = {
            leader
            for leader, cell in layout.cells.items()
            if all((unit, k, part) in plain[rank] for part, rank in enumerate(layout.keepers(cell, unit, k)))
        }
        assert complete[unit, k] == having
        assert (unit, k) in unsure or having.issuperset((layout.owners[unit][k], *layout.replicas[unit][k]))
