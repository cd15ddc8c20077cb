"""World: a few forked processes with links between them, for tests below the launcher."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import select
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from megatron_elastic.cluster.rank.control import InterruptFlag
from megatron_elastic.comm.interrupts import Interruptible
from megatron_elastic.comm.peers import PeerAddress
from megatron_elastic.comm.transport import Transport

KEY = bytes(range(32))
_LIMIT = 60.0
"""Seconds that any wait in these tests may take."""


class Peer:
    """What one process knows: who it is, its transport (linked with the others'), and how to wait for them."""

    def __init__(self, rank: int, size: int, everybody: Any, survivors: Any, flag: Interruptible, apart: bool) -> None:
        self.rank = rank
        self.size = size
        self.flag = flag
        self.transport = Transport(rank, flag, _LIMIT)
        if apart:
            self.transport.listen()
            self.transport.trust(KEY)
        self.pids: list[int] = []
        self._everybody = everybody
        self._survivors = survivors

    def meet(self) -> None:
        """Wait until all have come here; not over the links."""
        self._everybody.wait(_LIMIT)

    def leave(self) -> None:
        """Close the transport, once all that live on come here: a link that ends early counts as broken."""
        self._survivors.wait(_LIMIT)
        self.transport.close()

    def await_death(self, rank: int) -> None:
        """Wait until a process has ended."""
        try:
            pidfd = os.pidfd_open(self.pids[rank])
        except ProcessLookupError:
            return
        assert select.select([pidfd], [], [], _LIMIT)[0], f"rank {rank} lives on"
        os.close(pidfd)


def run(
    body: Callable[[Peer], None],
    size: int = 4,
    killed: Collection[int] = (),
    make_flag: Callable[[], Interruptible] = InterruptFlag,
    apart: bool = False,
) -> None:
    """Run ``body`` in ``size`` processes. All must return, but those in ``killed``, which must not.

    ``apart``: as if each were on a host of its own, so that only links connect them.
    """
    context = multiprocessing.get_context("fork")
    barriers = context.Barrier(size), context.Barrier(size - len(killed))
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_live, args=(body, rank, barriers, pipes, make_flag, apart)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    ours = [mine for mine, _ in pipes]
    try:
        addresses = dict(enumerate(_receive(connection) for connection in ours))
        if apart:
            addresses = {rank: _elsewhere(rank, address) for rank, address in addresses.items()}
        for connection in ours:
            connection.send((addresses, [process.pid for process in processes]))
        answers = [_receive(connection) for connection in ours]
    finally:
        for connection in ours:
            connection.close()
        for process in processes:
            process.join(_LIMIT)
            process.kill()
            process.join()
            process.close()
    wrong = [
        f"rank {rank}: {answer}"
        for rank, answer in enumerate(answers)
        if answer != ("killed" if rank in killed else "done")
    ]
    assert not wrong, "\n".join(wrong)


def _elsewhere(rank: int, address: bytes) -> bytes:
    """The address of a rank on another host."""
    known = msgspec.msgpack.decode(address, type=PeerAddress)
    arena = msgspec.structs.replace(known.near.arena, place=f"host {rank}")
    near = msgspec.structs.replace(known.near, arena=arena)
    return msgspec.structs.replace(known, near=near).encode()


def _receive(connection: Connection) -> Any:
    if not connection.poll(_LIMIT):
        return "silent"
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return "killed"


def _live(
    body: Callable[[Peer], None], rank: int, barriers: tuple[Any, Any],
    pipes: Sequence[tuple[Connection, Connection]], make_flag: Callable[[], Interruptible],
    apart: bool,
) -> None:  # fmt: skip
    for index, (parents, childs) in enumerate(pipes):
        parents.close()
        if index != rank:
            childs.close()
    parent = pipes[rank][1]
    faulthandler.dump_traceback_later(0.9 * _LIMIT)  # where a rank hangs that the test then calls silent
    torch.set_num_threads(1)  # OpenMP's threads did not come along
    try:
        peer = Peer(rank, len(pipes), *barriers, make_flag(), apart)
        parent.send(peer.transport.address)
        addresses, peer.pids = parent.recv()
        peer.transport.add_peers(addresses)
        body(peer)
        parent.send("done")
    except BaseException:
        parent.send(traceback.format_exc())
    parent.close()
    os._exit(0)  # without the parent's cleaning up
