"""Seal: what does not come from a rank of the job, is meant for another, or has come before, is never delivered."""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic.comm.links.link import Links
from megatron_elastic.comm.links.seal import HEAD, WINDOW, Seal
from megatron_elastic.comm.tag import Channel, make_tag
from tests import world
from tests.world import KEY, Peer

OTHER_KEY = bytes(32)
TAG = make_tag(0, Channel.POINT_TO_POINT, 5, 0)
"""Of a message from rank 0."""
GENUINE = torch.arange(1000, dtype=torch.uint8)
FORGED = torch.zeros(1000, dtype=torch.uint8)
LIMIT = 1 << 20


# ---- the code and the numbers ------------------------------------------------------------------


@given(st.permutations(range(8)), st.sampled_from([0, 1, 17, 4096]))
def test_each_message_counts_once_in_whatever_order(order: list[int], size: int) -> None:
    sender, receiver = Seal(0, KEY), Seal(1, KEY)
    sealed = [sender.close(1, TAG, torch.full((size,), i, dtype=torch.uint8)) for i in range(8)]
    assert all(receiver.opens(TAG, sealed[i]) for i in order)
    assert not any(receiver.opens(TAG, sealed[i]) for i in order)


@given(st.data())
def test_nothing_of_a_message_can_be_changed(data: st.DataObject) -> None:
    sealed = Seal(0, KEY).close(1, TAG, GENUINE)
    receiver = Seal(1, KEY)
    changed = sealed.clone()
    changed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not receiver.opens(TAG, changed)
    assert not receiver.opens(TAG ^ 1 << data.draw(st.integers(0, 63)), sealed)
    assert not receiver.opens(TAG, sealed[: data.draw(st.integers(0, len(sealed) - 1))])
    assert receiver.opens(TAG, sealed), "what was refused has used nothing up"


def test_it_is_for_one_rank_under_one_key() -> None:
    sealed = Seal(0, KEY).close(1, TAG, GENUINE)
    assert not Seal(2, KEY).opens(TAG, sealed)
    assert not Seal(1, OTHER_KEY).opens(TAG, sealed)
    assert not Seal(1, KEY).opens(TAG, Seal(3, KEY).close(1, TAG, GENUINE)), "another rank says that it is rank 0"


def test_what_is_too_old_is_refused() -> None:
    sender, receiver = Seal(0, KEY), Seal(1, KEY)
    sealed = [sender.close(1, TAG, GENUINE) for _ in range(WINDOW + 1)]
    assert receiver.opens(TAG, sealed[WINDOW])
    assert not receiver.opens(TAG, sealed[0])
    assert receiver.opens(TAG, sealed[1])


# ---- over links --------------------------------------------------------------------------------


class Raw:
    """In place of a seal: sends bytes as they are."""

    def close(self, peer: int, tag: int, payload: torch.Tensor) -> torch.Tensor:
        return payload


def _links(rank: int, limit: int = LIMIT) -> Links:
    return Links(rank, lambda peer: None, lambda why: None, limit)


def _until(condition: Callable[[], bool], progress: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        progress()
        os.sched_yield()
        assert time.monotonic() < deadline


def _say(links: Links, address: bytes, messages: list[torch.Tensor]) -> None:
    """Send these bytes to rank 1, as if they were from rank 0."""
    links.seal = Raw()  # type: ignore[assignment]
    requests = [links.send(1, address, TAG, message) for message in messages]
    _until(lambda: all(request.done for request in requests), lambda: list(links.progress()))


def test_what_is_sent_is_let_go_of_when_that_is_over() -> None:
    """And not when so many more have been sent: messages may be as large as slices."""
    links = _links(0)
    requests = [SimpleNamespace(completed=False) for _ in range(3)]
    buffers = [torch.empty(HEAD) for _ in requests]
    for request, buffer in zip(requests, buffers, strict=True):
        links._keep(request, buffer)
    kept = [weakref.ref(buffer) for buffer in buffers]
    del buffers, buffer
    requests[0].completed = requests[1].completed = True
    assert list(links.progress()) == []
    assert [each() is not None for each in kept] == [False, False, True]
    requests[2].completed = True
    links.close()


@pytest.mark.job
@pytest.mark.parametrize("recorded", [False, True], ids=["forged", "replayed"])
def test_a_stranger_delivers_nothing(recorded: bool) -> None:
    """It knows where rank 1 listens, and perhaps what rank 0 has sent, but not the key."""

    def body(peer: Peer) -> None:
        transport = peer.transport
        if peer.rank == 2:
            once = Seal(0, KEY).close(1, TAG, GENUINE)
            attempts = [once, once, once] if recorded else [
                FORGED, Seal(0, OTHER_KEY).close(1, TAG, FORGED), torch.cat((once[:HEAD], FORGED)), FORGED[:3]]
            stranger = _links(2)
            _say(stranger, transport._peers.far[1], attempts)
            peer.meet()
            peer.meet()
            stranger.close()
        elif peer.rank == 1:
            got = torch.empty(1000, dtype=torch.uint8)
            recv = transport.recv(0, Channel.POINT_TO_POINT, 5, got)
            _until(lambda: transport.refused == (2 if recorded else 4), transport.progress)
            assert recv.done == recorded
            peer.meet()
            transport.wait(recv)
            assert torch.equal(got, GENUINE)
            assert not transport._inbox.has(0, TAG)
            peer.meet()
        else:
            peer.meet()
            if not recorded:
                transport.wait(transport.send(1, Channel.POINT_TO_POINT, 5, GENUINE))
            peer.meet()
        peer.leave()

    world.run(body, size=3, apart=True)


@pytest.mark.job
def test_what_is_not_proved_takes_no_more_than_its_limit() -> None:
    """A message that would is drained, and the next one comes through."""
    there, here = multiprocessing.get_context("fork").Pipe()

    def body(peer: Peer) -> None:
        links = _links(peer.rank)
        if peer.rank == 1:
            there.send_bytes(links.address)
            links.seal = Seal(1, KEY)
            came: list[int] = []
            _until(lambda: bool(came), lambda: came.extend(message.length for _, message in links.progress()))
            assert (came, links.refused) == ([1000], 1)
        else:
            _say(links, here.recv_bytes(), [torch.zeros(4 * LIMIT, dtype=torch.uint8),
                                            Seal(0, KEY).close(1, TAG, GENUINE)])
        peer.meet()
        links.close()
        peer.leave()

    world.run(body, size=2, apart=True)
