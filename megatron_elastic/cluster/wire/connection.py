"""Connection: an encrypted one in an event loop, whose two ends have proven to each other that they know the token."""

from __future__ import annotations

import asyncio
import contextlib
import random
import select
import socket
import ssl
from typing import Generic, TypeVar

import msgspec

from megatron_elastic.cluster.wire import proof
from megatron_elastic.cluster.wire.framing import Unsendable, WireError, decode, encode, frame, read_frame
from megatron_elastic.cluster.wire.tcp import tune
from megatron_elastic.cluster.wire.tls import CLOSED, Credentials, ServerSide, client_context, refusal
from megatron_elastic.config import UsageError

UNSENT_LIMIT = 4 * (64 << 20)
"""Bytes that may wait for the other end to read them; a connection with more is cut."""
_FAREWELL = 5.0
"""Seconds that the other end has, once this one has closed, to take what was sent and to close as well."""
_PAUSE = 0.2
"""Seconds between two attempts to connect, on average."""
_LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR

T = TypeVar("T")


class Broken(WireError):
    """A message was not sent because the connection has ended."""


class AsyncWire(Generic[T]):
    """One connection. What comes is decoded by ``decoder``, made for the messages that the other end may send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                 decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._poll = select.poll()
        self._poll.register(writer.get_extra_info("socket"), _LEFT)

    @classmethod
    async def connect(cls, host: str, port: int, credentials: Credentials, silence: float,
                      decoder: msgspec.msgpack.Decoder[T], limit: float) -> AsyncWire[T]:
        """Connect to the coordinator; try again for ``limit`` seconds while nobody answers or too many others ask.

        The connection breaks when the other machine is gone for ``silence`` seconds. Raises WireError if who answers
        is not this job's coordinator, TimeoutError if nobody does, from what went wrong last.
        """
        last: OSError | UsageError | None = None
        try:
            async with asyncio.timeout(limit):
                while True:
                    try:
                        context = client_context(credentials.certificates)
                        return await cls._connect(host, port, context, credentials.token, silence, decoder)
                    except (OSError, UsageError) as error:  # UsageError: certificates that are being replaced
                        last = error
                        if (final := refusal(error)) is not None:
                            raise final from None
                    await asyncio.sleep(_PAUSE * random.uniform(0.5, 1.5))
        except TimeoutError:
            raise TimeoutError(f"no coordinator at {host}:{port} within {limit:g} s"
                               + (f": {last}" if last is not None else "")) from last

    @classmethod
    async def _connect(cls, host: str, port: int, context: ssl.SSLContext, token: str, silence: float,
                       decoder: msgspec.msgpack.Decoder[T]) -> AsyncWire[T]:
        sock = await _connected(host, port)
        reader, writer = await asyncio.open_connection(sock=sock, ssl=context, server_hostname=host,
                                                       ssl_shutdown_timeout=_FAREWELL)
        wire = cls(reader, writer, decoder)
        try:
            tune(writer.get_extra_info("socket"), silence)
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            own = proof.ClientProof(await wire._expect(), proof.fingerprint(certificate), token)
            writer.write(frame(own.frame))
            own.check(await wire._expect())
        except BaseException:
            wire.abort()
            raise
        return wire

    @classmethod
    async def accept(cls, sock: socket.socket, side: ServerSide, token: str, silence: float,
                     decoder: msgspec.msgpack.Decoder[T]) -> AsyncWire[T]:
        """The coordinator's side of ``connect``, without a limit of its own. Owns ``sock`` from now on.

        Raises WireError if the client does not know the token, OSError if it left or does not speak TLS 1.3.
        """
        tune(sock, silence)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=side.context,
                                                          ssl_shutdown_timeout=_FAREWELL)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        wire = cls(reader, writer, decoder)
        try:
            sent = proof.challenge()
            writer.write(frame(sent))
            try:
                answer = proof.answer_client(sent, await wire._expect(), side.fingerprint, token)
            except WireError:
                writer.write(frame(proof.REFUSED))  # it is in the kernel's hands at once, so that abort() leaves it
                raise
            writer.write(frame(answer))
        except BaseException:
            wire.abort()
            raise
        return wire

    async def _expect(self) -> bytes:
        """The next frame of the proof. Raises OSError if the connection has ended instead."""
        payload = await read_frame(self._reader, proof.LONGEST)
        if payload is None:
            raise self._reader.exception() or ConnectionResetError(CLOSED)
        return payload

    @property
    def local_host(self) -> str:
        """This machine's address, as the other end reaches it."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def receive(self) -> T | None:
        """The next message; None when the stream ended or broke. Raises WireError if what came is no message."""
        payload = await read_frame(self._reader)
        return None if payload is None else decode(payload, self._decoder)

    def send(self, message: msgspec.Struct) -> Unsendable | Broken | None:
        """Send now if the socket takes it, else as soon as it does. Returns, never raises, why it is not sent.

        ``Unsendable`` is the message's fault, and the connection as good as before; ``Broken`` is the connection's.
        """
        try:
            return self.send_encoded(encode(message))
        except Unsendable as error:
            return error

    def send_encoded(self, encoded: bytes) -> Broken | None:
        """Send what ``encode`` has made, for a message that many get. Returns, never raises, why it is not sent."""
        if self._writer.is_closing():
            return Broken("the connection is closed")
        if self._poll.poll(0):
            # A process that stood still, or had no processor, comes here before it has looked what has come. Saying
            # anything to who has left would fail, and asyncio then throws away what is yet to be read: why it left.
            return Broken("the other end has closed")
        if (waiting := self._writer.transport.get_write_buffer_size()) > UNSENT_LIMIT:
            self.abort()
            return Broken(f"the other end does not read: {waiting} bytes waited for it")
        try:
            self._writer.write(encoded)
        except RuntimeError as error:  # the loop is closed
            return Broken(str(error))
        return None

    def close(self) -> None:
        """Close after what was sent has left. Closing twice is fine."""
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._writer.close()

    async def closed(self) -> None:
        """Wait until the connection that was closed is, which takes at most some seconds."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def abort(self) -> None:
        """Cut the connection: nothing is sent any more, and ``receive`` returns None."""
        self._writer.transport.abort()


async def _connected(host: str, port: int) -> socket.socket:
    """A connection to the first of a host's addresses that takes one. Raises OSError: of the last, if none does.

    asyncio would make one error of all, of no kind.
    """
    loop, problem = asyncio.get_running_loop(), OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:  # no IPv6 here
            problem = error
            continue
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            return sock
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
    raise problem
