"""Door: where the coordinator listens. Strangers are few at a time, do not stay, and matter to nobody."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from megatron_elastic.cluster.wire.certificate import self_signed
from megatron_elastic.cluster.wire.connection import AsyncWire
from megatron_elastic.cluster.wire.tally import Tally
from megatron_elastic.cluster.wire.tcp import listen
from megatron_elastic.cluster.wire.tls import Credentials, Renewed, ServerSide, server_side_of

STRANGERS = 32
"""Connections at a time that have not proven the token; fewer where the process may open few files."""
_PATIENCE = 5.0
"""Seconds that a stranger has to prove it."""
_SILENT, _SPEAKING = 0.1, 1.0
"""Seconds that nobody is sent away for others, before and after the first byte.

A client speaks at once. Whoever fails keeps its place for as long, so that nobody costs us more than so many
handshakes a second, while those who know the token are let in as fast as we can.
"""
_LOOK = 2.0
"""Seconds that looking at the user's certificates may take; those that were seen last are shown while it takes longer.
"""
_BACKLOG = 1024

T = TypeVar("T")


class Door(Generic[T]):
    """Listens, and calls ``serve`` with each connection whose other end knows the token.

    The connection is closed when ``serve`` returns. What it raises goes to the loop's exception handler.

    Args:
        credentials: what clients must show, and are shown.
        decoder: of the messages that clients send.
        serve: looks after one connection until that ends.
        silence: seconds after which a machine that does not answer counts as gone.
        say: prints one line for people.
        patience: seconds that a client has to prove that it knows the token.
    """

    def __init__(self, credentials: Credentials, decoder: msgspec.msgpack.Decoder[T],
                 serve: Callable[[AsyncWire[T]], Awaitable[None]], silence: float, say: Callable[[str], None],
                 patience: float = _PATIENCE) -> None:
        given = credentials.certificates
        self._side = server_side_of(self_signed()) if given is None else Renewed(given)
        self._looking: asyncio.Future[None] | None = None
        self._token = credentials.token
        self._decoder = decoder
        self._serve = serve
        self._silence = silence
        self._patience = patience
        self._tally = Tally(say, "connections of strangers were closed")
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._strangers: dict[asyncio.Task[None], float] = {}
        """With the time until which each may stay even if others come."""
        self._guests: dict[asyncio.Task[None], AsyncWire[T]] = {}
        self._places = STRANGERS
        self._room = asyncio.Event()

    def open(self, host: str, port: int, clients: int = 0) -> int:
        """Listen for about ``clients`` of them; port 0 takes a free one. Returns the port. Raises OSError."""
        self._places = min(STRANGERS, max(1, _raise_open_files() // 4))
        self._listener = listen(host, port, max(_BACKLOG, clients))
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    async def close(self, timeout: float) -> None:
        """Listen no longer, and wait until all connections have ended; those left after ``timeout`` seconds are cut."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
        strangers = list(self._strangers)
        for task in strangers:
            task.cancel()
        if self._guests:
            await asyncio.wait(set(self._guests), timeout=timeout)
        guests = dict(self._guests)
        for task, wire in guests.items():
            wire.abort()
            task.cancel()
        await asyncio.gather(*strangers, *guests, return_exceptions=True)
        self._tally.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._make_room()
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:  # it has left already, or this process may open nothing more for now
                self._tally.note(f"cannot accept a connection: {error}")
                await asyncio.sleep(_SILENT)
                continue
            task = loop.create_task(self._meet(sock, peer))
            self._strangers[task] = loop.time() + _SILENT
            await asyncio.sleep(0)  # accepting may succeed for ever without letting anybody else run

    async def _make_room(self) -> None:
        """Wait until one more stranger may come in; for it the one is sent away that may stay no longer."""
        loop = asyncio.get_running_loop()
        while len(self._strangers) >= self._places:
            task, until = min(self._strangers.items(), key=lambda item: item[1])
            if until <= loop.time():
                del self._strangers[task]
                task.cancel()
                continue
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room.wait(), until - loop.time())

    async def _meet(self, sock: socket.socket, peer: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            wire = await self._let_in(sock, task)
        except asyncio.CancelledError:
            self._tally.note(f"closed a connection from {peer}: it had not proven that it knows the job token when "
                             "others came")
            return
        except Exception as error:  # whatever a stranger may provoke, it ends with the stranger
            late = f"it had not proven that it knows the job token within {self._patience:g} s"
            self._tally.note(f"closed a connection from {peer}: {str(error) or late}")
            await self._keep_place(task)
            return
        self._leave(task)
        self._guests[task] = wire
        try:
            await self._serve(wire)
        except asyncio.CancelledError:
            pass  # close() ends connections that outlast the job
        except Exception as error:
            asyncio.get_running_loop().call_exception_handler({
                "message": f"error while serving {peer}", "exception": error})
        finally:
            wire.close()
            del self._guests[task]
            await wire.closed()

    async def _let_in(self, sock: socket.socket, task: asyncio.Task[None]) -> AsyncWire[T]:
        async with asyncio.timeout(self._patience):
            try:
                await _readable(sock)
                side = await self._shown()
            except BaseException:
                sock.close()
                raise
            self._strangers[task] = asyncio.get_running_loop().time() + _SPEAKING
            return await AsyncWire.accept(sock, side, self._token, self._silence, self._decoder)

    async def _shown(self) -> ServerSide:
        """What a client is shown. Files are looked at in a thread, in one at a time: their disk may stall."""
        if isinstance(self._side, ServerSide):
            return self._side
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._side.look))
        await asyncio.wait([self._looking], timeout=_LOOK)
        return self._side.side

    async def _keep_place(self, task: asyncio.Task[None]) -> None:
        until = self._strangers.get(task, 0.0)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(until - asyncio.get_running_loop().time())
        self._leave(task)

    def _leave(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)
        self._room.set()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    spoke = asyncio.Event()
    loop.add_reader(sock, spoke.set)
    try:
        await spoke.wait()
    finally:
        loop.remove_reader(sock)


def _raise_open_files() -> int:
    """Let this process open as many files as it may, for every client is one; returns how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a container may forbid what its limits promise
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return STRANGERS * 4 if soft == resource.RLIM_INFINITY else soft
