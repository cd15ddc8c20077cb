"""Limits of a process that stands still, and of one that is always late."""

from __future__ import annotations

import asyncio

import pytest

from megatron_elastic.cluster.coordination import timers
from megatron_elastic.cluster.coordination.timers import Timers


@pytest.mark.parametrize("anew", [0, 3])
def test_a_limit_begins_anew_a_few_times_and_then_counts(monkeypatch: pytest.MonkeyPatch, anew: int) -> None:
    """Of a process on a busy machine each timer fires late: it never ran out."""
    monkeypatch.setattr(timers, "_LATE", -1.0)  # every one counts as late
    monkeypatch.setattr(timers, "_ANEW", anew)
    monkeypatch.setattr(timers, "_GRACE", 0.0)
    begun: list[tuple[object, ...]] = []

    class Counted(Timers):
        def _set(self, *args: object) -> None:
            begun.append(args[:2])
            super()._set(*args)  # type: ignore[arg-type]

    async def run_out() -> None:
        over = asyncio.Event()
        Counted().set("limit", 1e-3, over.set)
        await over.wait()

    asyncio.run(run_out())
    assert begun == [("limit", 1e-3), *[("limit", 0.0)] * anew], "not for as long as at first"
