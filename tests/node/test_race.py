"""Waits of which the first counts: what one raises is not lost, and a store that errs is not asked without a pause."""

from __future__ import annotations

import asyncio
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from megatron_elastic.cluster.coordination.race import race
from megatron_elastic.cluster.leadership import Leader, StoreError
from megatron_elastic.cluster.messages import Members
from megatron_elastic.cluster.node.station import Station


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def refuse() -> None:
    raise StoreError("it refuses")


def test_what_a_wait_raises_is_raised() -> None:
    async def both() -> None:
        await race(for_ever(), refuse())

    with pytest.raises(StoreError, match="it refuses"):
        asyncio.run(both())


def test_what_somebody_elses_task_raises_is_theirs_to_ask() -> None:
    async def both() -> str:
        task = asyncio.ensure_future(refuse())
        await race(for_ever(), task)
        return str(task.exception())

    assert asyncio.run(both()) == "it refuses"


class Refusing:
    """A store that refuses to say who leads, the first ``times`` times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.asked = 0

    async def followed(self, after: int) -> Leader:
        self.asked += 1
        if self.asked <= self.times:
            raise StoreError("it refuses")
        return Leader(term=after + 1, address="h:1")


def station_of(store: Refusing) -> tuple[Any, list[str]]:
    """What of a node looks for a coordinator, and what it notes."""
    loop, notes = asyncio.get_running_loop(), list[str]()
    found: asyncio.Future[Any] = loop.create_future()
    found.set_result(store)
    members: asyncio.Future[Members] = loop.create_future()
    members.set_result(Members(addresses=[], name="n", term=1))
    station: Any = SimpleNamespace(
        _agent=SimpleNamespace(members=members, over=loop.create_future()), _term=0, _leader="", _note=notes.append,
        _config=SimpleNamespace(heartbeat_timeout=0.05), _office=SimpleNamespace(store=found, change=for_ever),
    )  # fmt: skip
    station._another = MethodType(Station._another, station)
    return station, notes


def test_a_store_that_refuses_is_asked_again_after_a_pause_and_no_longer_than_the_limit() -> None:
    async def look() -> tuple[bool, list[str]]:
        station, notes = station_of(store)
        return await Station._look(station), notes

    store = Refusing(times=1000)
    anybody, notes = asyncio.run(look())
    assert not anybody
    assert store.asked <= 3 and set(notes) == {"--elastic-store: it refuses"}


def test_a_store_that_refuses_once_is_believed_later() -> None:
    async def another() -> Leader:
        return await Station._another(station_of(store)[0], "")

    store = Refusing(times=1)
    assert asyncio.run(another()) == Leader(term=2, address="h:1")
    assert store.asked == 2


def test_a_defect_in_following_a_coordinator_is_raised() -> None:
    """Else this node would look for another coordinator, though it can follow none."""
    async def follow() -> str:
        async def fail(*_: object) -> str:
            raise ValueError("a defect")

        station, _ = station_of(Refusing(times=0))
        station._brief = SimpleNamespace(choice=SimpleNamespace(kind="alone"))
        station._uplink = SimpleNamespace(follow=fail)
        station._another = lambda address: for_ever()
        return await Station._follow(station, "h:1", station)

    with pytest.raises(ValueError, match="a defect"):
        asyncio.run(follow())
