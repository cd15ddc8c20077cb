"""The codec: layouts as bytes, back again, and what is no layout."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Holdings, Layout, LayoutError, changed, decode, difference, encode, gpt_units
from megatron_elastic.plan import improve, lose
from tests.tiers.examples import examples


def grid(tp: int, pp: int, dp: int, samples: int = 1, per_host: int | None = None) -> Layout:
    units, stage_units = gpt_units(2 * pp, pp, tied=True, positions=True)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=2 * dp + 1, num_slices=dp, replicas=1,
        ranks_per_host=per_host, samples=samples,
    )  # fmt: skip


@settings(max_examples=examples(100), deadline=None)
@given(
    tp=st.integers(1, 2), pp=st.integers(1, 3), dp=st.integers(2, 5), samples=st.sampled_from([1, 3]),
    per_host=st.sampled_from([None, 2]), data=st.data(),
)  # fmt: skip
def test_layouts_of_all_kinds_come_back(
    tp: int, pp: int, dp: int, samples: int, per_host: int | None, data: st.DataObject
) -> None:
    layout = replace(grid(tp, pp, dp, samples, per_host), tied=data.draw(st.sampled_from([None, True, False])))
    lost = data.draw(st.sampled_from(layout.ranks))
    small = lose(layout, [lost], Holdings.of(layout).without([lost]), 1)
    newcomers = {max(layout.ranks) + i + 1: len(layout.hosts) for i in range(tp)}
    grown = improve(small, newcomers, 2)
    assert grown is not None
    following = [layout, small, *filter(None, grown)]
    for old, new in itertools.pairwise(following):
        told = difference(old, new)
        assert told is not None
        assert changed(old, told) == new
    for one in following:
        again = decode(encode(one))
        assert again == one
        assert encode(again) == encode(one)
        assert again.to_json() == one.to_json()
        again.validate()


def test_whoever_made_a_layout_has_validated_it() -> None:
    """Reading costs no more than it must, so that what is odd but has the shape of a layout is read."""
    odd = replace(grid(1, 1, 2), lost=(0,))
    assert decode(encode(odd)) == odd
    with pytest.raises(LayoutError, match="rank 0 is listed 2 times"):
        decode(encode(odd)).validate()


FIELDS = msgspec.msgpack.decode(encode(grid(2, 2, 2)))


def with_field(at: int, value: object) -> bytes:
    return msgspec.msgpack.encode([*FIELDS[:at], value, *FIELDS[at + 1 :]])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no layout in MessagePack: .*truncated"),
        (b"{}", "no layout in MessagePack"),
        (encode(grid(1, 1, 2))[:-1], "no layout in MessagePack"),
        (encode(grid(1, 1, 2)) + b"\0", "no layout in MessagePack"),
        (msgspec.msgpack.encode(FIELDS[:-1]), "no layout in MessagePack: .*length"),
        (msgspec.msgpack.encode([*FIELDS, 1]), "no layout in MessagePack: .*length"),
        (with_field(0, "1"), "no layout in MessagePack: Expected `int`, got `str`"),
        (with_field(4, [b"\xff"]), "no layout in MessagePack"),
        (with_field(5, []), "a stage has no cells"),
        (with_field(5, [*FIELDS[5][:1], [FIELDS[5][1][0], []]]), "a stage has no cells"),
        (with_field(5, [[FIELDS[5][0][0], [[[0], [0, 1], [], []], *FIELDS[5][0][1][1:]]]]), "more ranks than another"),
        (with_field(6, FIELDS[6][:-1]), "owners and replicas must be 7 rows of 2 slices"),
        (with_field(7, [row[:1] for row in FIELDS[7]]), "owners and replicas must be 7 rows of 2 slices"),
    ],
)
def test_bytes_that_are_no_layout_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        decode(data)


@settings(max_examples=examples(300), deadline=None)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_damaged_bytes_are_a_layout_or_refused(at: int, byte: int) -> None:
    data = bytearray(encode(grid(2, 2, 2)))
    data[at % len(data)] = byte
    with contextlib.suppress(LayoutError):
        assert decode(bytes(data)).units
