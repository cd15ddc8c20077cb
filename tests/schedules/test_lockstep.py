"""Lockstep: ranks of a cell that are interrupted at different points finish what they can, and none waits for ever."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from megatron_elastic.cluster.rank.control import Interrupted, InterruptFlag
from megatron_elastic.comm.group import Group
from megatron_elastic.pipeline.lockstep import Lockstep
from tests import world
from tests.world import Peer

pytestmark = pytest.mark.job

OPERATIONS, AT = 6, 3


def run(peer: Peer, interrupt_at: int | None, inside: bool = False) -> tuple[int, bool]:
    """Operations that all ranks do together, of which this one is interrupted before one or inside it.

    Returns how many were done, and whether another was begun.
    """
    flag, transport = peer.flag, peer.transport
    assert isinstance(flag, InterruptFlag)
    lockstep, group = Lockstep(transport, range(peer.size)), Group(transport, 1, range(peer.size))
    done, begun = 0, False
    try:
        with lockstep.step():
            for number in range(OPERATIONS):
                if number == interrupt_at and not inside:
                    flag.raise_for(1, frozenset())
                transport.look()
                with lockstep.whole():
                    begun = True
                    if number == interrupt_at and inside:
                        flag.raise_for(1, frozenset())
                        transport.look()
                    for _ in range(2):
                        transport.run(group.all_reduce(torch.ones(1), torch.Tensor.add_))
                    done, begun = done + 1, False
                lockstep.next()
    except Interrupted:
        return done, begun
    raise AssertionError("nobody was interrupted")


def test_what_all_are_in_is_finished() -> None:
    def body(peer: Peer) -> None:
        peer.transport.advance(1, ())
        assert run(peer, AT, inside=True) == (AT + 1, False)
        peer.leave()

    world.run(body, size=3)


@pytest.mark.parametrize("apart", [False, True])
def test_who_is_ahead_gives_up_what_another_has_not_begun(apart: bool) -> None:
    """It is interrupted, too, but in the next operation, which it cannot finish alone."""

    def body(peer: Peer) -> None:
        peer.transport.advance(1, ())
        done, begun = run(peer, AT, inside=peer.rank > 0)
        assert (done, begun) == (AT, peer.rank > 0)
        peer.leave()

    world.run(body, size=3, apart=apart)


def reduce_or_die(peer: Peer, lockstep: Lockstep, group: Group) -> None:
    """Rank 1 dies in an operation."""
    with lockstep.step(), lockstep.whole():
        if peer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        peer.transport.run(group.all_reduce(torch.ones(1), torch.Tensor.add_))


def test_a_partner_that_dies_ends_it() -> None:
    """Nobody waits for the coordinator's word."""

    def body(peer: Peer) -> None:
        peer.transport.advance(1, ())
        lockstep, group = Lockstep(peer.transport, range(2)), Group(peer.transport, 1, range(2))
        with pytest.raises(Interrupted) as caught:
            reduce_or_die(peer, lockstep, group)
        assert caught.value.suspects == (1,)
        peer.leave()

    world.run(body, size=2, killed=[1])
