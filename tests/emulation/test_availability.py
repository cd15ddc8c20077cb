"""Availability by a trace: which ranks of a replayed job come and go, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulated import availability
from hypothesis import given
from hypothesis import strategies as st


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n1500,remove,a\n2000,add,c\n")
    assert availability.read(path) == [(0.0, 1), (0.0, 2), (1.5, 1), (2.0, 2)]


@pytest.mark.parametrize(("text", "says"), [
    ("", "is empty"),
    ("0,add\n", "line 1: expected MS,add|remove,NAME, got 0,add"),
    ("0,add,a\nx,remove,a\n", "line 2: expected"),
    ("0,add,a\n1,add,a\n", "line 2: add a at 0.001 s does not follow"),
    ("0,remove,a\n", "line 1: remove a"),
    ("5,add,a\n1,add,b\n", "line 2: add b"),
    ("0,lose,a\n", "line 1: lose a"),
])
def test_a_trace_that_is_none_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(availability.TraceError) as caught:
        availability.read(path)
    assert says in str(caught.value)


@given(
    machines=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 32)), min_size=1, max_size=30),
    slots=st.integers(1, 16), begin=st.integers(0, 50), length=st.integers(1, 60), seed=st.integers(0, 5),
)  # fmt: skip
def test_as_large_a_part_of_the_ranks_is_there(
    machines: list[tuple[int, int]], slots: int, begin: int, length: int, seed: int
) -> None:
    """At every time; the same slot never comes or goes twice in a row, and one stays."""
    machines = [*sorted(machines), (1000, 32)]
    found = availability.changes(machines, slots, begin, begin + length, seed)
    assert [each.at for each in found] == sorted(each.at for each in found)
    for time in range(length):
        present = set(range(slots))
        for change in found:
            if change.at <= time:
                assert (change.slot in present) != change.comes
                present ^= {change.slot}
        count = next((count for at, count in reversed(machines) if at <= begin + time), 0)
        assert len(present) == max(1, -(-slots * count // 32))
    mean = sum(
        len({slot for slot in range(slots)
             if next((c.comes for c in reversed(found) if c.slot == slot and c.at <= time), True)})
        for time in range(length)
    ) / (slots * length)  # fmt: skip
    assert availability.presence(found, slots, length)[-1].done == pytest.approx(mean)
