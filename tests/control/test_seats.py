"""Seats: who takes a lost member's place in the embedded store."""

from __future__ import annotations

import pytest

from megatron_elastic.cluster.coordination.seats import vacancy
from megatron_elastic.cluster.protocol.job import Node


def nodes(*members: str) -> list[Node]:
    return [Node(node_rank=rank, host="", slots=1, member=member) for rank, member in enumerate(members)]


@pytest.mark.parametrize(
    ("members", "there", "change"),
    [
        ("abc", "abc", (None, None)),
        ("abc", "abcd", (None, None)),  # all seats are taken
        ("abc", "bc", ("a", None)),  # nobody to take it
        ("abc", "bcde", ("a", "d")),
        ("bc", "bcd", (None, "d")),  # the leader before had got half-way
        ("abc", "cde", ("a", "d")),  # one at a time
    ],
)
def test_vacancy(members: str, there: str, change: tuple[str | None, str | None]) -> None:
    assert vacancy(members, nodes(*there), 3) == change


def test_nodes_that_cannot_be_members_get_no_seat() -> None:
    assert vacancy("abc", nodes("", "b", "c"), 3) == ("a", None)
