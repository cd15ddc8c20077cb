"""Embedded: Raft among some of the job's own agents (``Member``), of whom the others ask (``Observer``).

Nothing is on disk: a member that ends is forgotten, and one that is started again is a new member under a new address
(``Member.replace``), because a member that has forgotten how it voted could vote twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from pysyncobj.utility import TcpUtility, UtilityException

from megatron_elastic.cluster.leadership.raft import ASK, TICK, Answer, Raft, password
from megatron_elastic.cluster.leadership.store import Deposed, Durable, Leader, pack, unpack

_LONGEST_PAUSE = 2.0


def seats(nodes: int) -> int:
    """How many of so many nodes are members: 3 survive one loss at a time, 5 two."""
    return 5 if nodes >= 5 else 3


class Member:
    """A store on a member. Every member must campaign, always: only the leader that Raft elects can win.

    Args:
        listening: this member's socket, see ``door.reserve``; closed by ``close``.
        me: its address as the others reach it, ``host:port``.
        members: addresses of all members, this one included; the same on all.
        token: the job's token; whoever does not know it is not heard.
        limit: seconds without the leader after which others stand for election.
    """

    def __init__(self, listening: socket.socket, me: str, members: Sequence[str], token: str, limit: float) -> None:
        self._listening = listening
        self._me = me
        self._others = [member for member in members if member != me]
        self._token = token
        self._limit = limit
        self._opened: Raft | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._reign = 0
        """Of Raft, in which the newest term of this process was begun."""
        self._term = 0

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened = await asyncio.to_thread(Raft, self._listening, self._me, self._others, self._token, self._limit,
                                               lambda: self._post(self._wake))

    async def lead(self, address: str) -> int:
        raft = self._raft
        while True:
            await self._until(lambda: raft.leading)
            reign = raft.reign
            # A claim that gets lost with Raft's leadership can still come in, late, under the next leader. That one is
            # deposed by it then, and claims again.
            term = await self._apply(raft.book.claim, address)
            if term is not None and raft.leading and raft.reign == reign:
                self._reign, self._term = reign, term
                return int(term)

    async def record(self, durable: Durable) -> None:
        data = pack(durable)
        lost = asyncio.create_task(self.deposed(durable.term))
        try:
            while self._leads(durable.term):
                written = await self._apply(self._raft.book.record, durable.term, data, unless=lost)
                if written is not None:
                    if written:
                        return
                    break
        finally:
            lost.cancel()
        raise Deposed(f"term {durable.term} does not lead any more")

    async def recall(self) -> Durable | None:
        while True:
            data = await self._apply(self._raft.book.recall)
            if data is not None:
                return unpack(data) if data else None

    async def deposed(self, term: int) -> None:
        await self._until(lambda: not self._leads(term))

    def leader(self) -> Leader | None:
        return self._raft.book.leader()

    async def followed(self, after: int) -> Leader:
        await self._until(lambda: self._raft.book.term > after)
        leader = self._raft.book.leader()
        assert leader is not None
        return leader

    def members(self) -> list[str]:
        """Addresses of all members, this one included, as far as this one knows."""
        return self._raft.members()

    async def replace(self, lost: str | None, by: str | None) -> None:
        """Let ``by`` be a member in the place of ``lost``; either may be None. On the leader only, one at a time.

        ``by`` is opened when this has returned. Raises Deposed if this process has ceased to lead meanwhile.
        """
        # First out, then in: the majority of those that live never needs more of them than before.
        for address, change, wanted in ((lost, self._raft.dismiss, False), (by, self._raft.admit, True)):
            while address is not None and (address in self._raft.members()) != wanted:
                self._check()
                await self._ask(functools.partial(change, address))
        # A change is seen here before it is committed. What comes after it in the order is committed after it.
        while await self._apply(self._raft.book.recall) is None:
            self._check()

    async def close(self) -> None:
        if self._opened is None:
            self._listening.close()
        else:
            await asyncio.to_thread(self._opened.close)

    @property
    def _raft(self) -> Raft:
        assert self._opened is not None, "open() comes first"
        return self._opened

    def _check(self) -> None:
        if not self._leads(self._term):
            raise Deposed(f"term {self._term} does not lead any more")

    def _leads(self, term: int) -> bool:
        raft = self._raft
        return raft.leading and term == self._term == raft.book.term and self._reign == raft.reign

    async def _apply(self, method: Callable[..., Any], *args: Any, unless: asyncio.Task[None] | None = None) -> Any:
        return await self._ask(lambda done: self._raft.apply(method, *args, done=done), unless)

    async def _ask(self, question: Callable[[Callable[[Any], None]], None],
                   unless: asyncio.Task[None] | None = None) -> Any:
        """The answer; None if there was none, or if ``unless`` came first. Takes a tick at least then."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        question(lambda result: self._post(_settle, answer, result))
        waiting = (answer,) if unless is None else (answer, unless)
        # Lost questions are not answered. One that is asked again does no harm, they all keep their order.
        await asyncio.wait(waiting, timeout=2 * self._limit, return_when=asyncio.FIRST_COMPLETED)
        if answer.done() and (result := answer.result()) is not None:
            return result
        answer.cancel()
        await asyncio.sleep(TICK)
        return None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        """Call ``function`` in the event loop; from Raft's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and whoever waited with it
            self._loop.call_soon_threadsafe(function, *args)


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


class Observer:
    """A store on an agent that is no member: it learns the leader from members, and leads never.

    Args:
        members: addresses of the members; later ones are learnt from them.
        token: the job's token.
        limit: seconds that a member may take to answer.
    """

    def __init__(self, members: Sequence[str], token: str, limit: float) -> None:
        self._members = list(members)
        self._token = token
        self._limit = limit
        self._leader: Leader | None = None
        self._utility: TcpUtility | None = None
        # pysyncobj's client blocks, and asks one at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leadership")

    async def open(self) -> None:
        # Deriving the key takes a while.
        self._utility = await self._in_thread(lambda: TcpUtility(password(self._token), self._limit))

    async def lead(self, address: str) -> int:
        return int(await asyncio.get_running_loop().create_future())

    async def record(self, durable: Durable) -> None:
        raise Deposed(f"term {durable.term} does not lead here: this node is no member")

    async def recall(self) -> Durable | None:
        while True:
            answer = await self._asked(lambda answer: answer.durable is not None, "recall")
            if answer is not None:
                return unpack(answer.durable) if answer.durable else None

    async def deposed(self, term: int) -> None:
        return

    def leader(self) -> Leader | None:
        return self._leader

    async def followed(self, after: int) -> Leader:
        def is_later(answer: Answer) -> bool:
            return answer.leader is not None and answer.leader.term > after

        await self._asked(is_later, "leader")
        assert self._leader is not None
        return self._leader

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    async def _asked(self, enough: Callable[[Answer], bool], question: str) -> Answer:
        """Ask the members in turn, with growing pauses, until an answer is ``enough``."""
        pause = self._limit / 8
        while True:
            for member in random.sample(self._members, len(self._members)):
                answer = await self._in_thread(functools.partial(self._ask, member, question))
                if answer is None:
                    continue
                self._learn(answer)
                if enough(answer):
                    return answer
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _ask(self, member: str, question: str) -> Answer | None:
        assert self._utility is not None, "open() comes first"
        try:
            return msgspec.msgpack.decode(self._utility.executeCommand(member, [ASK, question]), type=Answer)
        except (UtilityException, OSError, msgspec.MsgspecError, TypeError):
            return None  # it is gone, or cannot say

    def _learn(self, answer: Answer) -> None:
        if answer.members:
            self._members = answer.members
        if answer.leader is not None and (self._leader is None or answer.leader.term > self._leader.term):
            self._leader = answer.leader

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)
