"""Helper: a thread that does what is asked of it, one after the other, so that nobody else waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Helper:
    """A daemon: what it waits for may never come, as from a device that hangs, and the process ends all the same."""

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def ask(self, function: Callable[[], Result]) -> Future[Result]:
        """Have a function called; what it returns or raises is in the future."""
        future: Future[Result] = Future()
        self._asked.put((future, function))
        return future

    def close(self) -> None:
        """Let the thread end when it has done what it was asked for. Does not wait."""
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            _answer(*asked)
            del asked  # it leads to all that was needed, and made, and there may be nothing else to do for long


def _answer(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
