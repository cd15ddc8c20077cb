"""Leased: leadership by a lease in somebody else's store, which the leader renews and the others wait for.

The store is asked through blocking clients, so each call runs in a thread; every call has a limit of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from megatron_elastic.cluster.leadership.store import Deposed, Durable, Leader, StoreError

_T = TypeVar("_T")

_RENEWALS = 4
"""How often a lease is renewed within its time."""
_SURE = 0.8
"""Part of the lease's time for which the leader trusts it, counted from when the renewal was sent: the lease is counted
from its arrival, and clocks may run a little apart."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
"""Of those between attempts to reach a store that is away; or as long as between two renewals, if that is shorter: who
finds it last must not be taken for lost by who finds it first.
"""
_OPEN_LIMIT = 10.0
_THREADS = 4
"""One for the renewals, one for a renewal that was given up but has not ended yet, and as many for the rest; writes
have one of their own.
"""


class Unreachable(Exception):
    """The store does not answer now; it may later."""


class Backend(Protocol):
    """A store's own operations, blocking for half of ``limit`` seconds at most. Called from several threads.

    All raise Unreachable when they cannot say, and StoreError when the store refuses it.
    """

    limit: float
    """Seconds that a lease lasts."""

    def claim(self, address: str) -> int | None:
        """Take the lease if nobody has it: the new term, or None."""

    def renew(self, term: int) -> bool:
        """Renew the lease; False if ``term`` does not have it any more."""

    def resign(self, term: int) -> None:
        """Give the lease back, if ``term`` has it."""

    def write(self, durable: Durable) -> bool:
        """Write if ``durable.term`` has the lease, in one step with that check; False if it has not.

        Never called while another call of it runs. What it has asked for must not happen after it has returned and
        another has written, even if it gave up waiting for the answer.
        """

    def read(self) -> Durable | None:
        """The newest record, linearizably."""

    def holder(self) -> Leader | None:
        """Who has the lease."""

    def close(self) -> None:
        """Close all connections."""


class _Reign:
    """A term in which this process leads."""

    def __init__(self, term: int, until: float) -> None:
        self.term = term
        self.until = until
        """Until when (``time.monotonic()``) nobody else can have the lease."""
        self.lost = asyncio.Event()
        self.resigned = False
        """Whether the store has been asked to take the lease back, or is about to be."""

    @property
    def over(self) -> bool:
        # The clock is looked at, too: after this process was stopped, the timer that tells may not have run yet.
        return self.lost.is_set() or time.monotonic() >= self.until


class Leased:
    """A store over ``backend``.

    A refusal ends nobody's term, as long as the lease can be renewed: rights and room can be given back. ``note`` is
    told of it, in a line for people.
    """

    def __init__(self, backend: Backend, note: Callable[[str], None] = lambda line: None) -> None:
        self._backend = backend
        self._note = note
        self._limit = backend.limit
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="leadership")
        # A write that was cancelled goes on in its thread; a later one waits for its end, or the older would stay.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="leadership writes")
        self._reign: _Reign | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._leader: Leader | None = None

    async def open(self) -> None:
        deadline = time.monotonic() + _OPEN_LIMIT
        for pause in _pauses(self._limit):
            try:
                self._leader = await self._call(self._backend.holder)
                return
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise StoreError(f"{error}; is it running, and the address in --elastic-store right?") from None
            await asyncio.sleep(pause)

    async def lead(self, address: str) -> int:
        sent = 0.0

        def claim() -> int | None:
            nonlocal sent
            sent = time.monotonic()  # of this attempt: a store may have been away before it
            return self._backend.claim(address)

        while (term := await self._persist(claim, refused=StoreError)) is None:
            await asyncio.sleep(self._limit / _RENEWALS)
        self._reign = _Reign(term, sent + _SURE * self._limit)
        self._hear(Leader(term, address))
        await self._end_keeper()
        self._keeper = asyncio.create_task(self._keep(self._reign))
        return term

    async def _keep(self, reign: _Reign) -> None:
        """Renew the lease until it is lost; then give it back, if that is still to be done."""
        renewed, told = True, ""
        try:
            while renewed and not reign.over:
                await asyncio.sleep(self._limit / _RENEWALS)
                sent = time.monotonic()
                try:
                    async with asyncio.timeout(reign.until - sent):
                        renewed = await self._call(lambda: self._backend.renew(reign.term))
                    reign.until = sent + _SURE * self._limit
                except Unreachable:
                    pass
                except StoreError as error:
                    told = self._tell(error, told)
        except TimeoutError:
            pass  # no renewal has come back in the time that the last one bought
        finally:
            reign.lost.set()
        await self._resign(reign)

    async def _resign(self, reign: _Reign) -> None:
        """Give the lease back, once, even if whoever waits for that is cancelled: ``close`` waits for the threads."""
        if not reign.resigned:
            reign.resigned = True
            with contextlib.suppress(Unreachable, StoreError):
                await asyncio.shield(self._call(lambda: self._backend.resign(reign.term)))

    async def record(self, durable: Durable) -> None:
        reign = self._reign
        if reign is None or reign.term != durable.term or reign.over:
            raise Deposed(f"term {durable.term} has lost its lease")
        write = asyncio.create_task(self._persist(lambda: self._backend.write(durable), self._writer))
        lost = asyncio.create_task(reign.lost.wait())
        try:
            await asyncio.wait((write, lost), return_when=asyncio.FIRST_COMPLETED)
            if not write.done() or not write.result():
                raise Deposed(f"term {durable.term} has lost its lease")
        finally:
            await _end(write, lost)

    async def recall(self) -> Durable | None:
        return await self._persist(self._backend.read)

    async def deposed(self, term: int) -> None:
        if self._reign is not None and self._reign.term == term:
            await self._reign.lost.wait()

    def leader(self) -> Leader | None:
        return self._leader

    async def followed(self, after: int) -> Leader:
        while True:
            leader = await self._persist(self._backend.holder)
            if leader is not None:
                self._hear(leader)
            if self._leader is not None and self._leader.term > after:
                return self._leader
            # All followers ask when a leader is lost; not all at once.
            await asyncio.sleep(self._limit / _RENEWALS * random.uniform(0.5, 1.0))

    async def close(self) -> None:
        await self._end_keeper()
        if self._reign is not None:
            self._reign.lost.set()
            await self._resign(self._reign)
        for pool in (self._writer, self._pool):
            await asyncio.to_thread(pool.shutdown)
        self._backend.close()

    def _hear(self, leader: Leader) -> None:
        if self._leader is None or leader.term > self._leader.term:
            self._leader = leader

    async def _end_keeper(self) -> None:
        if self._keeper is not None:
            await _end(self._keeper)
            self._keeper = None

    async def _call(self, operation: Callable[[], _T], pool: ThreadPoolExecutor | None = None) -> _T:
        return await asyncio.get_running_loop().run_in_executor(pool or self._pool, operation)

    async def _persist(self, operation: Callable[[], _T], pool: ThreadPoolExecutor | None = None,
                       refused: type[StoreError] | tuple[()] = ()) -> _T:
        """Call until the store answers; a refusal is none, but where it is to be raised (``refused``)."""
        told = ""
        for pause in _pauses(self._limit):
            try:
                return await self._call(operation, pool)
            except refused:
                raise
            except Unreachable:
                pass
            except StoreError as error:
                told = self._tell(error, told)
            await asyncio.sleep(pause)
        raise AssertionError("pauses do not end")

    def _tell(self, error: StoreError, told: str) -> str:
        """Say what the store has refused, if that is not what was said last."""
        if str(error) != told:
            self._note(f"--elastic-store: {error}; it is asked again, and training goes on meanwhile")
        return str(error)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel ``tasks`` and wait until they have ended, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _pauses(limit: float) -> Iterator[float]:
    """Seconds to wait before each further attempt, for ever."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(2 * pause, _LONGEST_PAUSE, limit / _RENEWALS)
