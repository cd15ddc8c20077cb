"""Keeper: keeps the zygote that a node's ranks are forked from, and puts another in the place of one that has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.node.assignment import END_LIMIT, Assignment
from megatron_elastic.cluster.rank import zygote
from megatron_elastic.cluster.rank.deathwatch import Deathwatch
from megatron_elastic.cluster.rank.zygote import Broken, Continued, Exited, Kill, Ready, Spawn, Spawned, Stopped

OfRank = Spawned | Exited | Stopped | Continued
"""What a zygote tells of a rank's process."""
_Answer = Ready | Broken | OfRank
_answers: msgspec.msgpack.Decoder[_Answer] = msgspec.msgpack.Decoder(_Answer)


class CannotStart(Exception):
    """This node's ranks cannot be started."""


class Keeper:
    """One node's.

    Args:
        assignment: what the node runs.
        deathwatch: what the ranks' deaths are seen by.
        heard: is told what happens to a rank's process. One that cannot be started has ended.
        lost: the zygote has ended, and with it all ranks, but not what these have started.
        broken: is told what nobody has foreseen, after which nothing is heard any more.
    """

    def __init__(self, assignment: Assignment, deathwatch: Deathwatch, heard: Callable[[OfRank], object],
                 lost: Callable[[], object], broken: Callable[[BaseException], object]) -> None:
        self._assignment = assignment
        self._deathwatch = deathwatch
        self._heard = heard
        self._lost = lost
        self._broken = broken
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._import_limit = 0.0
        self._ready = False
        """Whether the zygote is there and has imported everything."""
        self._requests: list[Spawn | Kill] = []
        """What waits for it."""
        self._wanted = asyncio.Event()
        """Whether anything does."""
        self._tender: asyncio.Task[None] | None = None

    async def begin(self, timeout: float) -> Ready:
        """Start the zygote and wait until it has imported everything. Raises CannotStart.

        Another takes the place of one that ends, when ranks are to be started, and has as many seconds.
        """
        self._import_limit = timeout
        ready = await self._start()
        self._tender = asyncio.create_task(self._tend())
        self._tender.add_done_callback(self._tended)
        return ready

    def send(self, request: Spawn | Kill) -> None:
        """Have a rank started or signalled; once there is a zygote again, if there is none."""
        if self._ready:
            assert self._writer is not None
            self._writer.write(wire.encode(request))
        elif isinstance(request, Spawn) or self._requests:
            self._requests.append(request)
            self._wanted.set()

    async def end(self) -> None:
        """End the zygote, which kills what is left of the ranks first."""
        self._ready = False
        if self._tender is not None:
            self._tender.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([self._tender])
        await self._end()

    # ---- one zygote ----------------------------------------------------------------------

    async def _start(self) -> Ready:
        """Start one, and wait until it has imported everything. Raises CannotStart."""
        log = self._assignment.log_dir / f"zygote{self._assignment.node_rank}.log"
        env = {
            **os.environ,
            # Torch reads these when it is imported; ranks that share a machine must not all use every core.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            # Counting devices must not initialise CUDA before the fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        env.pop(wire.TOKEN_VARIABLE, None)  # ranks have no use for it
        try:
            ours, theirs = socket.socketpair()
            with theirs, log.open("ab") as output:
                self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
                self._process = zygote.start(theirs, self._deathwatch, self._assignment.program.directory, output, env)
        except OSError as error:
            raise CannotStart(f"the process that starts the ranks cannot be started: {error}") from None
        try:
            answer = await asyncio.wait_for(self._receive(), self._import_limit)
        except TimeoutError:
            raise CannotStart(f"importing the modules that ranks need took longer than {self._import_limit:g} s "
                              f"(--elastic-start-timeout); see {log}") from None
        if isinstance(answer, Broken):
            raise CannotStart(f"cannot import {answer.module}, which ranks need:\n{answer.traceback}")
        if not isinstance(answer, Ready):
            raise CannotStart(f"the process that starts the ranks ended while importing; see {log}")
        self._ready = True
        return answer

    async def _receive(self) -> _Answer | None:
        assert self._reader is not None
        with contextlib.suppress(wire.WireError):  # what speaks no sense is no better than one that has ended
            if (payload := await wire.read_frame(self._reader)) is not None:
                return wire.decode(payload, _answers)
        return None

    async def _end(self) -> None:
        """Let it end, if it has not."""
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), END_LIMIT)
        except TimeoutError:
            self._process.kill()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._process.wait()
        self._process = None

    # ---- one after the other -------------------------------------------------------------

    async def _tend(self) -> None:
        """Hear what the zygote says, and replace one that has ended as soon as there is anything to start."""
        while True:
            while isinstance(answer := await self._receive(), OfRank):
                self._heard(answer)
            self._ready = False
            self._lost()
            while not self._ready:
                await self._wanted.wait()
                await self._end()
                try:
                    await self._start()
                except CannotStart as error:
                    self._not_started(str(error).partition("\n")[0])
            for request in self._taken():
                self.send(request)

    def _tended(self, tender: asyncio.Task[None]) -> None:
        if not tender.cancelled() and (error := tender.exception()) is not None:
            self._broken(error)

    def _not_started(self, cause: str) -> None:
        """No rank that waits for a zygote can be started. Whether to try again is the coordinator's to say."""
        for request in self._taken():
            if isinstance(request, Spawn):
                self._heard(Exited(request.rank, -signal.SIGKILL, time.time(), cause))

    def _taken(self) -> list[Spawn | Kill]:
        """What has waited for the zygote."""
        requests, self._requests = self._requests, []
        self._wanted.clear()
        return requests
