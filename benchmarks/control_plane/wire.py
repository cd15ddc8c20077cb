"""What does the encryption of control connections cost, and what do strangers? ``megatron-elastic bench wire``.

The same messages go to a process and back in the open and through a door; both take turns. Then the door has a guest
that goes on asking, while others connect as fast as they can: without a word, and with a wrong token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from common import emit, load_average, progress

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import Failed, Heartbeat
from megatron_elastic.cluster.wire.door import Door
from megatron_elastic.cluster.wire.token import make_token

HOST = "127.0.0.1"
LIMIT = 30.0
_decoder: msgspec.msgpack.Decoder[Failed | Heartbeat] = msgspec.msgpack.Decoder(Failed | Heartbeat)
_TCP_INFO_BYTES = 120  # offset of tcpi_bytes_acked, which tcpi_bytes_received follows


class Echo:
    """A process that sends back what it gets: in the open on ``plain_port``, through a door on ``door_port``."""

    def __init__(self, credentials: wire.Credentials) -> None:
        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(credentials, there))
        self._process.start()
        self._stop = here
        self.plain_port, self.door_port = here.recv()

    def processor_ms(self) -> float:
        """Processor time that it has used."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e6

    def close(self) -> None:
        self._stop.send(None)
        self._process.join()


def _serve(credentials: wire.Credentials, pipe: Connection) -> None:
    async def serve(line: wire.AsyncWire[Failed | Heartbeat]) -> None:
        while (message := await line.receive()) is not None:
            line.send(message)

    async def serve_plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire.tune(writer.get_extra_info("socket"), LIMIT)
        await serve(wire.AsyncWire(reader, writer, _decoder))
        writer.close()

    async def all_of_it() -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), over.set)
        door = Door(credentials, _decoder, serve, LIMIT, progress)
        plain = await asyncio.start_server(serve_plain, HOST, 0)
        pipe.send((plain.sockets[0].getsockname()[1], door.open(HOST, 0)))
        await over.wait()
        plain.close()
        await door.close(timeout=1)

    asyncio.run(all_of_it())


def timed(do: Callable[[], object]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def ask(sock: socket.socket, encoded: bytes) -> None:
    """A message there and back."""
    sock.sendall(encoded)
    wire.receive_frame(sock)


def bytes_of(sock: socket.socket) -> int:
    """Bytes of both directions so far, as TCP counts them."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return sum(struct.unpack_from("QQ", info, _TCP_INFO_BYTES))


def messages(echo: Echo, connect: dict[str, Callable[[], socket.socket]], count: int) -> dict[str, Any]:
    """Times of a connection and of messages, and their bytes, in the open and encrypted."""
    small, large = wire.encode(Heartbeat()), wire.encode(Failed(rank=0, traceback="x" * (1 << 20)))
    times: dict[str, dict[str, list[float]]] = {name: {"connect": [], "small": [], "large": []} for name in connect}
    sizes, cost = {}, {}
    for _ in range(5):
        for name, open_ in connect.items():
            before, each = echo.processor_ms(), count // 20
            for _ in range(each):
                began = time.perf_counter()
                sock = open_()
                times[name]["connect"].append(time.perf_counter() - began)
                sock.close()
            cost[name] = (echo.processor_ms() - before) / each
            with open_() as sock:
                begun = bytes_of(sock)
                times[name]["small"] += [timed(partial(ask, sock, small)) for _ in range(count)]
                sizes[name] = {"connect": begun, "small": round((bytes_of(sock) - begun) / 2 / count)}
                times[name]["large"] += [timed(partial(ask, sock, large)) for _ in range(10)]
    median = {name: {what: statistics.median(values) for what, values in each.items()} for name, each in times.items()}
    return {
        "connect_ms": {name: round(each["connect"] * 1e3, 2) for name, each in median.items()},
        "connect_processor_ms": {name: round(value, 2) for name, value in cost.items()},
        "round_trip_us": {name: round(each["small"] * 1e6) for name, each in median.items()},
        "round_trip_1mib_ms": {name: round(each["large"] * 1e3, 2) for name, each in median.items()},
        "bytes": sizes,
    }


@contextlib.contextmanager
def flood(attack: Callable[[], None]) -> Iterator[list[int]]:
    """Go on attacking on a thread; how often is in the list."""
    over, done = threading.Event(), [0]

    def go_on() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, wire.WireError):
                done[0] += 1
                attack()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def under(attack: Callable[[], None] | None, echo: Echo, guest: socket.socket, seconds: float) -> dict[str, float]:
    """What a guest that asks every 10 ms, and the processor of the door, feel of an attack."""
    with flood(attack) if attack is not None else contextlib.nullcontext([0]) as attacks:
        before, began = echo.processor_ms(), time.perf_counter()
        trips = []
        while time.perf_counter() - began < seconds:
            trips.append(timed(lambda: ask(guest, wire.encode(Heartbeat()))))
            time.sleep(0.01)
        used = (echo.processor_ms() - before) / 1e3 / seconds
    return {"attacks_a_second": round(attacks[0] / seconds), "door_processor_percent": round(100 * used, 1),
            "round_trip_us": round(statistics.median(trips) * 1e6), "worst_ms": round(max(trips) * 1e3, 1)}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; always 0."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench wire", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="small messages a round (default: 1000)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each attack (default: 5)")
    options = parser.parse_args(argv)
    load = load_average()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    credentials = wire.Credentials(make_token())
    echo = Echo(credentials)
    idle: list[socket.socket] = []

    def say_nothing() -> None:
        sock = socket.create_connection((HOST, echo.door_port), timeout=1)
        idle.append(sock)
        if len(idle) > 1500:
            idle.pop(0).close()

    def guess() -> None:
        wire.connect(HOST, echo.door_port, wire.Credentials(make_token()), LIMIT, LIMIT).close()

    connect: dict[str, Callable[[], socket.socket]] = {
        "plain": lambda: socket.create_connection((HOST, echo.plain_port), timeout=LIMIT),
        "tls": lambda: wire.connect(HOST, echo.door_port, credentials, LIMIT, LIMIT),
    }
    try:
        figures = messages(echo, connect, options.count)
        progress("messages are measured; strangers follow")
        with connect["tls"]() as guest:
            figures["strangers"] = {name: under(attack, echo, guest, options.seconds)
                                    for name, attack in (("none", None), ("wrong token", guess), ("idle", say_nothing))}
    finally:
        for sock in idle:
            sock.close()
        echo.close()
    emit("wire", argv, {**figures, "load_before": load})
    return 0
