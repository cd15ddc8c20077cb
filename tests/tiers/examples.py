"""Examples: how many a property is tried with."""

from __future__ import annotations

from hypothesis import settings


def examples(most: int) -> int:
    """All where new ones are searched (the profile ``search``), a fifth in the gate, which has the same every time."""
    return most if settings.get_current_profile_name() == "search" else most // 5
