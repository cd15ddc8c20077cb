"""Processes: the coordinator in one of its own, the nodes in a few, and how each is told what to do."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import traceback
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import JobFailed

_FAREWELL = 60.0
"""Seconds to end in good order."""
LIMIT = 1200.0
"""Seconds that one order may take."""
Order = Callable[..., Any]


class Process:
    """A process with an event loop, which ``begin`` makes something in that obeys orders.

    An order is a name and arguments; what the method of that name returns is the answer.
    """

    def __init__(self, begin: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        self._pipe, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_live, args=(there, begin, arguments), daemon=True)
        process.start()
        there.close()
        self._process = process

    def ask(self, order: str, *arguments: Any) -> Any:
        """Give an order and wait for the answer. Raises JobFailed if it cannot be done."""
        self.tell(order, *arguments)
        return self.answer()

    def tell(self, order: str, *arguments: Any) -> None:
        """Give an order; ``answer`` has to follow."""
        self._pipe.send((order, arguments))

    def answer(self) -> Any:
        """What came of the order. Raises JobFailed."""
        if not self._pipe.poll(LIMIT):
            raise JobFailed(f"no answer within {LIMIT:g} s")
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            raise JobFailed("a process has ended") from None
        if not ok:
            raise JobFailed(value)
        return value

    @property
    def processor_s(self) -> float:
        """Seconds of the processor that all its threads have used."""
        return sum(int(task.joinpath("schedstat").read_text().split()[0])
                   for task in Path(f"/proc/{self._process.pid}/task").iterdir()) / 1e9

    @property
    def loop_s(self) -> float:
        """Seconds of the processor that its event loop's thread has used."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def end(self) -> None:
        """End it, in good order if it can."""
        with contextlib.suppress(OSError):
            self.tell("end")
        self._process.join(_FAREWELL)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()


def _live(pipe: Connection, begin: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
    asyncio.run(_obey(pipe, begin, arguments))


async def _obey(pipe: Connection, begin: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
    target = await begin(*arguments)
    arrived = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), arrived.set)
    while True:
        await arrived.wait()
        arrived.clear()
        while pipe.poll():
            try:
                order, given = pipe.recv()
            except EOFError:
                order, given = "end", ()
            if order == "end":
                await target.end()
                return
            try:
                value = getattr(target, order)(*given)
                pipe.send((True, await value if asyncio.iscoroutine(value) else value))
            except Exception:
                pipe.send((False, traceback.format_exc()))
