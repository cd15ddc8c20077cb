"""Stress: a thousand edits of groups while collectives run, interrupts come and ranks are killed in the middle."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from megatron_elastic.cluster.rank.control import Interrupted, InterruptFlag
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.transport import Transport

pytestmark = pytest.mark.job

RANKS = 8
EDITS = 1000
KILL_EVERY = 25
INTERRUPT_EVERY = 4
GROUPS = 3
_LIMIT = 60.0
fork = multiprocessing.get_context("fork")


@dataclass
class Edit:
    """What all ranks are told: the members of each group, and the operations that members then run."""

    epoch: int
    members: list[list[int]]
    lost: list[int]
    addresses: dict[int, bytes]
    seed: int


@dataclass
class Member:
    """The parent's view of one rank."""

    process: multiprocessing.process.BaseProcess
    orders: multiprocessing.connection.Connection
    reports: multiprocessing.connection.Connection
    address: bytes = b""
    fds: list[int] = field(default_factory=list)


# ---- a rank ----------------------------------------------------------------------------------


def collective(group: Group, draw: random.Random) -> Callable[[], None]:
    """Start a random collective with known numbers; the result waits for it and checks them."""
    size, me, run = group.size, group.index, group.transport
    length = draw.choice([1, 7, 300, 5000, 40_000])
    kind = draw.choice(["all_reduce", "gather_all", "scatter_sum", "to_all", "broadcast"])
    background = draw.random() < 0.5
    source = draw.randrange(size)
    mine = torch.full((length,), me + 1, dtype=torch.int64)
    expected: list[tuple[torch.Tensor, int]]
    if kind == "all_reduce":
        steps, expected = group.all_reduce(mine, torch.Tensor.add_), [(mine, size * (size + 1) // 2)]
    elif kind == "gather_all":
        parts = [torch.zeros_like(mine) for _ in range(size)]
        steps, expected = group.all_gather(parts, mine), [(part, i + 1) for i, part in enumerate(parts)]
    elif kind == "scatter_sum":
        chunks = [torch.full((length,), i * (me + 1), dtype=torch.int64) for i in range(size)]
        output = torch.zeros_like(mine)
        steps = group.reduce_scatter(output, chunks, torch.Tensor.add_)
        expected = [(output, me * size * (size + 1) // 2)]
    elif kind == "to_all":
        outputs = [torch.zeros_like(mine) for _ in range(size)]
        inputs = [torch.full((length,), 100 * me + i, dtype=torch.int64) for i in range(size)]
        steps, expected = group.all_to_all(outputs, inputs), [(out, 100 * i + me) for i, out in enumerate(outputs)]
    else:
        steps, expected = group.broadcast(mine, source), [(mine, source + 1)]
    task = run.start(steps) if background else None

    def finish() -> None:
        run.wait(task) if task is not None else run.run(steps)
        for tensor, value in expected:
            assert bool((tensor == value).all()), f"{kind} over {group.ranks}: {tensor[:3]} is not {value}"

    if task is None:
        finish()
        return lambda: None
    return finish


def operate(groups: list[Group], edit: Edit) -> int:
    """Run the edit's operations on every group this rank is in; returns how many were right."""
    draws = [random.Random(edit.seed + i) for i in range(GROUPS)]
    done = 0
    for _ in range(3):
        begun = [collective(group, draw) for group, draw in zip(groups, draws, strict=True) if group.index >= 0]
        for finish in begun:
            finish()
            done += 1
    return done


def listen(orders: multiprocessing.connection.Connection, inbox: list[Edit], news: threading.Condition,
           flag: InterruptFlag) -> None:
    """Thread of a rank: an edit interrupts whatever the rank is doing."""
    while True:
        try:
            edit = orders.recv()
        except EOFError:
            edit = None
        with news:
            inbox.append(edit)
            if edit is not None:
                flag.raise_for(edit.epoch, frozenset(edit.lost))
            news.notify()
        if edit is None:
            return


def rank_main(rank: int, orders: multiprocessing.connection.Connection,
              reports: multiprocessing.connection.Connection) -> None:
    """A rank: obeys edits until the parent hangs up."""
    torch.set_num_threads(1)
    flag = InterruptFlag()
    transport = Transport(rank, flag, _LIMIT)
    reports.send(transport.address)
    groups = [Group(transport, ident, []) for ident in range(GROUPS)]
    inbox: list[Edit] = []
    news = threading.Condition()
    listener = threading.Thread(target=listen, args=(orders, inbox, news, flag))
    listener.start()
    counted: list[int] = []
    while True:
        with news:
            assert news.wait_for(lambda: inbox, timeout=_LIMIT), "no orders"
            edit = inbox.pop(0)
            if edit is None:
                break
            stale = bool(inbox)
        if stale:
            continue
        flag.acknowledge(edit.epoch)
        transport.add_peers(edit.addresses)
        transport.advance(edit.epoch, edit.lost)
        for group, members in zip(groups, edit.members, strict=True):
            group.edit(members)
        try:
            outcome: tuple[str, object] = ("right", operate(groups, edit))
        except Interrupted as interrupted:
            outcome = ("interrupted", interrupted.suspects)
        counted.append(len(os.listdir("/proc/self/fd")))
        reports.send((rank, edit.epoch, outcome, counted[-1], threading.active_count()))
    listener.join()
    transport.close()
    assert not transport._pump._tasks and threading.active_count() == 1
    reports.send("closed")


def rank_process(rank: int, *pipes: multiprocessing.connection.Connection) -> None:
    """Ends without the parent's clean-up, which is the parent's."""
    try:
        rank_main(rank, *pipes)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


# ---- the parent ------------------------------------------------------------------------------


class Fleet:
    """Starts, kills and directs ranks; ids are never used twice."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.members: dict[int, Member] = {}
        self.lost: list[int] = []
        self.right = self.interrupted = 0
        self.next_id = 0

    def spawn(self) -> int:
        """Start a rank with a new id."""
        rank, self.next_id = self.next_id, self.next_id + 1
        orders_out, orders_in = fork.Pipe(duplex=False)
        reports_out, reports_in = fork.Pipe(duplex=False)
        process = fork.Process(target=self._child, args=(rank, orders_out, orders_in, reports_in))
        process.start()
        orders_out.close()
        reports_in.close()
        member = Member(process, orders_in, reports_out)
        assert reports_out.poll(_LIMIT)
        member.address = reports_out.recv()
        self.members[rank] = member
        return rank

    def _child(self, rank: int, orders: multiprocessing.connection.Connection,
                other_end: multiprocessing.connection.Connection,
               reports: multiprocessing.connection.Connection) -> None:
        other_end.close()
        for member in self.members.values():  # a sibling must see the end of its pipe
            member.orders.close()
        rank_process(rank, orders, reports)

    def order(self, epoch: int) -> None:
        """Tell everybody the next edit."""
        alive = sorted(self.members)
        lists = []
        for _ in range(GROUPS):
            chosen = self.draw.sample(alive, self.draw.randint(2, len(alive)))
            lists.append(chosen)
        addresses = {rank: member.address for rank, member in self.members.items()}
        edit = Edit(epoch, lists, list(self.lost), addresses, self.draw.getrandbits(30))
        for member in self.members.values():
            member.orders.send(edit)

    def collect(self, epoch: int) -> None:
        """Wait for everybody's report of an edit."""
        for rank, member in self.members.items():
            while True:
                assert member.reports.poll(_LIMIT), f"rank {rank} never reported epoch {epoch}"
                _, at, (kind, value), fds, threads = member.reports.recv()
                assert threads <= 3, f"rank {rank} has {threads} threads"
                if kind == "right":
                    self.right += value
                else:
                    self.interrupted += 1
                if at == epoch:
                    assert kind == "right", f"rank {rank} was interrupted in epoch {epoch} by {value}"
                    member.fds.append(fds)
                    break

    def kill(self) -> None:
        """SIGKILL a random rank, whatever it is doing."""
        rank = self.draw.choice(sorted(self.members))
        member = self.members.pop(rank)
        assert member.process.pid is not None
        os.kill(member.process.pid, signal.SIGKILL)
        member.process.join()
        member.orders.close()
        member.reports.close()
        self.lost.append(rank)

    def dismiss(self) -> None:
        """Hang up, and see everybody end in order."""
        for member in self.members.values():
            member.orders.close()
        for rank, member in self.members.items():
            assert member.reports.poll(_LIMIT) and member.reports.recv() == "closed", f"rank {rank} did not close"
            member.process.join(_LIMIT)
            assert member.process.exitcode == 0
            member.reports.close()


def test_a_thousand_edits_under_fire() -> None:
    draw = random.Random(20261121)
    fleet = Fleet(draw)
    for _ in range(RANKS):
        fleet.spawn()
    for epoch in range(1, EDITS + 1):
        fleet.order(epoch)
        if epoch % KILL_EVERY == 0:
            fleet.kill()
            fleet.spawn()
        elif epoch % INTERRUPT_EVERY != 0:
            fleet.collect(epoch)
        # Otherwise the next edit comes while this one's operations run.
    fleet.order(EDITS + 1)
    fleet.collect(EDITS + 1)
    growth = {rank: member.fds[-1] - min(member.fds) for rank, member in fleet.members.items() if member.fds}
    fleet.dismiss()
    assert fleet.right > EDITS and fleet.interrupted > EDITS // 20, (fleet.right, fleet.interrupted)
    # Open files are links: one socket for each peer that lives, none for the dead.
    assert max(growth.values()) <= 4 * RANKS, growth
