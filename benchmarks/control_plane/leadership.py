"""Elections and records. ``megatron-elastic bench leadership``.

Candidates are processes on this machine. The leader records, and is killed (SIGKILL); the time is taken until another
leads, that is, until its claim is in the store. Anew, so many times.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import secrets
import socket
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from common import JobFailed, emit, progress

from megatron_elastic.cluster.leadership import Choice, Durable, Place, make, parse, reserve
from megatron_elastic.config import UsageError

_FORK = multiprocessing.get_context("fork")
_PATIENCE = 60.0


async def campaign(
    choice: Choice, job: str, limit: float, place: Place | None, records: int, to: Connection
) -> None:
    """Lead, record, tell how long each took, and go on until killed."""
    store = make(choice, job, limit, place=place)
    await store.open()
    term = await store.lead("127.0.0.1:1")
    led_at = time.monotonic()
    times = []
    for epoch in range(records):
        durable = Durable(term, epoch, 0)
        start = time.monotonic()
        await store.record(durable)
        times.append((time.monotonic() - start) * 1e3)
    to.send((term, led_at, times))
    await asyncio.get_running_loop().create_future()


def live(sockets: Sequence[socket.socket], me: int, arguments: tuple[Any, ...]) -> None:
    """A candidate's process."""
    for other in (*sockets[:me], *sockets[me + 1 :]):
        other.close()
    asyncio.run(campaign(*arguments))


def told(pipes: Sequence[Connection]) -> tuple[int, int, float, list[float]]:
    """(candidate, term, when it led, its records' times) of the next that leads."""
    for ready in wait(pipes, _PATIENCE):
        assert isinstance(ready, Connection)
        return pipes.index(ready), *ready.recv()
    raise JobFailed(f"nobody led for {_PATIENCE:g} s")


def once(options: argparse.Namespace, choice: Choice) -> tuple[float, list[float]]:
    """(seconds from the kill to the next leader, each record's ms)."""
    job, token = secrets.token_hex(8), secrets.token_hex(32)
    places: list[Place | None] = [None] * options.nodes
    sockets: list[socket.socket] = []
    if choice.kind == "embedded":
        sockets = [reserve() for _ in range(options.nodes)]
        members = tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)
        places = [Place(members, token, me, sock) for me, sock in zip(members, sockets, strict=True)]
    pipes, processes = [], []
    try:
        for me, place in enumerate(places):
            here, there = _FORK.Pipe(duplex=False)
            arguments = (choice, job, options.limit, place, options.records, there)
            process = _FORK.Process(target=live, args=(sockets, me, arguments), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        for sock in sockets:
            sock.close()
        leader, term, _, times = told(pipes)
        killed_at = time.monotonic()
        processes[leader].kill()
        _, later, led_at, _ = told([pipe for i, pipe in enumerate(pipes) if i != leader])
        if later <= term:
            raise JobFailed(f"term {later} came after {term}")
        return led_at - killed_at, times
    finally:
        for process in processes:
            process.kill()
            process.join()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="megatron-elastic bench leadership", description=__doc__)
    parser.add_argument("--store", default="embedded", help="as --elastic-store; the store must be running")
    parser.add_argument("--nodes", type=int, default=3, help="candidates")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds without a leader until others may lead")
    parser.add_argument("--repeat", type=int, default=10, help="elections")
    parser.add_argument("--records", type=int, default=200, help="of each leader")
    options = parser.parse_args(argv)
    try:
        choice = parse(options.store, options.nodes)
    except UsageError as error:
        parser.error(str(error))
    elections, records = [], []
    for i in range(options.repeat):
        election, times = once(options, choice)
        elections.append(election)
        records += times
        progress(f"{i + 1} of {options.repeat}: another led after {election:.2f} s; "
                 f"a record took {statistics.median(times):.1f} ms")
    emit("leadership", argv, {
        "store": options.store, "nodes": options.nodes, "limit_s": options.limit,
        "election_s": {"median": round(statistics.median(elections), 3), "worst": round(max(elections), 3)},
        "record_ms": {"median": round(statistics.median(records), 2), "worst": round(max(records), 2)}})
    return 0
