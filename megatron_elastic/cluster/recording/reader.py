"""Reader: lets people who ask see what is on record. It reads in a thread, so that a stalled disk stops nobody."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megatron_elastic.cluster.messages import Answer, ReadLog, ReadRecords, Shown
from megatron_elastic.cluster.recording.recorder import Clerk
from megatron_elastic.observe.place import Folder
from megatron_elastic.observe.records import RecordsError

_Wanted = tuple[ReadRecords | ReadLog, "asyncio.Future[Shown | Answer]"]


class Reader:
    """Of one run directory. The thread is there from the first question on."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = Folder(run_dir)
        self._clerk: Clerk[_Wanted] | None = None

    async def answer(self, request: ReadRecords | ReadLog) -> Shown | Answer:
        """Waits until it can be read. What nobody waits for any more is not."""
        loop = asyncio.get_running_loop()
        self._clerk = self._clerk or Clerk("reader", self._read, lambda _: None)
        future: asyncio.Future[Shown | Answer] = loop.create_future()
        self._clerk.put((request, future))
        return await future

    def close(self, limit: float) -> None:
        """End the thread, or leave it alone after ``limit`` seconds."""
        if self._clerk is not None:
            self._clerk.drop()
            self._clerk.close(limit)

    def _read(self, wanted: _Wanted) -> None:
        request, future = wanted
        if future.done():
            return
        try:
            answer = self._shown(request)
        except (RecordsError, OSError) as error:
            answer = Answer(ok=False, text=str(error))
        except Exception as error:  # it may ask for what cannot be
            answer = Answer(ok=False, text=f"what is on record cannot be shown: {error!r}")
        loop = future.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(_settle, future, answer)

    def _shown(self, request: ReadRecords | ReadLog) -> Shown | Answer:
        match request:
            case ReadRecords():
                return Shown(growth=self._folder.grown(request.metrics, request.events, request.epoch))
            case ReadLog():
                return Answer(ok=True, text=self._folder.log(request.rank))


def _settle(future: asyncio.Future[Shown | Answer], answer: Shown | Answer) -> None:
    if not future.done():
        future.set_result(answer)
