"""Dataflow: ranges of samples, and what crosses the boundary between stages of different widths."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.plan.dataflow import Exchange, Samples, exchanges, resize
from megatron_elastic.plan.reroute import reroute

sizes = {"samples": st.integers(1, 60), "micro_batches": st.integers(1, 8)}


def test_three_cells_take_over_what_four_had() -> None:
    assert resize(8, 2, 4)[1] == (Samples(1, 2), Samples(5, 6))
    assert resize(8, 2, 3) == (
        (Samples(0, 2), Samples(4, 5)),
        (Samples(2, 3), Samples(5, 7)),
        (Samples(3, 4), Samples(7, 8)),
    )
    four, three = ([share[0] for share in resize(8, 2, width)] for width in (4, 3))
    assert list(exchanges(four, three)) == [
        Exchange(0, 0, Samples(0, 1)),
        Exchange(1, 0, Samples(1, 2)),
        Exchange(2, 1, Samples(2, 3)),
        Exchange(3, 2, Samples(3, 4)),
    ]


@settings(max_examples=1000, deadline=None)
@given(**sizes, width=st.integers(1, 9))
def test_every_sample_is_computed_once_and_evenly(samples: int, micro_batches: int, width: int) -> None:
    shares = resize(samples, micro_batches, width)
    assert [len(share) for share in shares] == [micro_batches] * width
    in_order = [share[index] for index in range(micro_batches) for share in shares]
    assert in_order[0].start == 0
    assert in_order[-1].stop == samples
    assert all(before.stop == after.start for before, after in pairwise(in_order))
    for index in range(micro_batches):
        parts = [share[index] for share in shares]
        assert max(part.size for part in parts) - min(part.size for part in parts) <= 1
        assert parts[0].start == samples * index // micro_batches, "micro-batches do not depend on the width"
    totals = [sum(part.size for part in share) for share in shares]
    assert max(totals) - min(totals) <= 1


@settings(max_examples=1000, deadline=None)
@given(**sizes, widths=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_what_is_sent_is_what_both_sides_have(samples: int, micro_batches: int, widths: tuple[int, int]) -> None:
    before, after = (resize(samples, micro_batches, width) for width in widths)
    for index in range(micro_batches):
        senders, receivers = [share[index] for share in before], [share[index] for share in after]
        sent = list(exchanges(senders, receivers))
        assert len(sent) <= sum(widths) - 1
        for end, ranges in (("sender", senders), ("receiver", receivers)):
            for cell, whole in enumerate(ranges):
                parts = [exchange.samples for exchange in sent if getattr(exchange, end) == cell]
                assert [at for part in parts for at in range(*part)] == list(range(*whole))


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_share_out(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        resize(*arguments)


def test_stages_with_different_samples_have_no_boundary() -> None:
    with pytest.raises(ValueError, match=r"samples 0 to 3 .* 0 to 4"):
        list(exchanges([Samples(0, 4)], [Samples(0, 5)]))


@settings(max_examples=1000, deadline=None)
@given(
    at=st.lists(st.integers(-1, 5), min_size=1, max_size=24),
    width=st.integers(1, 6),
    idle=st.none() | st.lists(st.integers(0, 3).map(float), min_size=6, max_size=6),
)
def test_reroute_is_balanced_and_moves_few(at: list[int], width: int, idle: list[float] | None) -> None:
    """A grain moves only from a cell that is gone, or would have too many; of equals the idlest take more."""
    old = [[grain for grain, cell in enumerate(at) if cell == index] for index in range(width)]
    idle = None if idle is None else idle[:width]
    new = reroute(old, len(at), idle)
    assert sorted(grain for share in new for grain in share) == list(range(len(at)))
    sizes = [len(share) for share in new]
    assert max(sizes) - min(sizes) <= 1
    low, extra = divmod(len(at), width)
    kept = sum(len(set(was) & set(now)) for was, now in zip(old, new, strict=True))
    fuller = sum(len(was) > low for was in old)
    assert kept == sum(min(len(was), low) for was in old) + min(extra, fuller), "as many stay as can"
    if idle is not None:
        for i, j in ((i, j) for i in range(width) for j in range(width) if len(old[i]) == len(old[j])):
            assert idle[i] <= idle[j] or sizes[i] >= sizes[j]
