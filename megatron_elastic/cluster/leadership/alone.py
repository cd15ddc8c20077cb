"""Alone: one node leads for as long as the job lives. There is nobody to fail over to."""

from __future__ import annotations

import asyncio

from megatron_elastic.cluster.leadership.store import Deposed, Durable, Leader

_TERM = 1


class Alone:
    """A store in the memory of the one process that leads.

    Args:
        leads_at: on every other node, the address of the coordinator; None on the node that leads.
    """

    def __init__(self, leads_at: str | None = None) -> None:
        self._follows = leads_at is not None
        self._leader = Leader(_TERM, leads_at) if leads_at is not None else None
        self._durable: Durable | None = None
        self._led = asyncio.Event()

    async def open(self) -> None:
        if self._follows:
            self._led.set()

    async def lead(self, address: str) -> int:
        if self._follows:
            await _for_ever()
        self._leader = Leader(_TERM, address)
        self._led.set()
        return _TERM

    async def record(self, durable: Durable) -> None:
        if self._follows or durable.term != _TERM:
            raise Deposed(f"term {durable.term} does not lead here")
        self._durable = durable

    async def recall(self) -> Durable | None:
        return self._durable

    async def deposed(self, term: int) -> None:
        if not self._follows and term == _TERM:
            await _for_ever()

    def leader(self) -> Leader | None:
        return self._leader

    async def followed(self, after: int) -> Leader:
        if after >= _TERM:
            await _for_ever()
        await self._led.wait()
        assert self._leader is not None
        return self._leader

    async def close(self) -> None:
        pass


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()
