"""Meeting: an exchange among the ranks of a layout."""

from __future__ import annotations

from typing import Any


class Meeting:
    """Who has come here may go on when all have. ``key``: (epoch, kind, step)."""

    __slots__ = ("blind", "key", "members", "posted", "waiting")

    def __init__(self, key: tuple[int, str, int], members: tuple[int, ...]) -> None:
        self.key = key
        self.members = members
        self.posted: dict[int, Any] = {}
        self.waiting: dict[int, None] = {}
        self.blind: set[int] = set()
        """Who will never see all: a message to it died with its sender, or with their link."""
