"""Replay: how replicas follow their owners, one step after the other.

``gradient`` (the default): the owner sends the mean gradient of each slice, and who holds a replica does the same
update. A rank enters the vote of a step only when the gradients of all slices that it owns or replicates are here; so
past the vote every gradient exists twice, and the step can be finished whoever dies.

``state``: the owner sends the whole new state after the update, while training goes on; for optimizers that do not
give the same bits on another type of device. It costs the whole state in traffic and a second copy of it in memory,
because a replica is behind its owner for a while, and an owner may die then. The rule of it:

- *A rank enters the vote of step s only when the states after step s - 1 of all replicas that it holds are here.* So
  past the vote of step s every state after step s - 1 exists twice.
- *Owners and replicas keep the state of one step before* until the next update, which comes after that vote, and a
  replica keeps what it has until the newer one has arrived whole.

So whoever dies, there is a step after which every slice is held by somebody alive: with the vote of step s passed by
anybody it is s - 1 at least, and before that s - 2 at least. Ranks report what they hold after how many steps
(``Report.versions``). The coordinator goes on from the newest number of steps after which all slices are there: the
step that is voted is finished if nothing of it is lost, and otherwise one step or two are done again
(``cluster.protocol.faults.decision``). Done again they give the same numbers, and are recorded once.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_elastic.comm.operation import Recv, Sending
from megatron_elastic.comm.tag import Channel, at_slice
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout, Transfer
from megatron_elastic.state.store import StateStore


class Replay(Protocol):
    """What one rank does for replicas in a step, under one layout."""

    def before_vote(self) -> None:
        """Return when everything is here that must exist twice before the step is voted."""
        ...

    def after_update(self, step: int) -> None:
        """The update of ``step`` has been done here. Does not wait."""
        ...

    def finish(self) -> None:
        """Return when replicas are where their owners are."""
        ...


class GradientReplay:
    """Replicas do the same update on the same gradient."""

    def __init__(self, layout: Layout, transport: Transport, store: StateStore, dtype: torch.dtype) -> None:
        self._layout = layout
        self._transport = transport
        self._store = store
        self._dtype = dtype

    def before_vote(self) -> None:
        """Send the gradients of owned slices to the holders of their replicas, and receive those of replicas here."""
        me = self._transport.rank
        sends: list[Sending] = []
        for unit, k in self._layout.owned(me):
            grad = self._store[unit, k].grad
            assert grad is not None
            sends += self._transport.send_all(
                self._layout.copies(unit, k, self._layout.part_of(unit, me)), Channel.REPLAY, at_slice(unit, k), grad
            )
        recvs: list[Recv] = []
        for unit, k in self._layout.replicated(me):
            grad = self._store.empty_gradient((unit, k), self._dtype)
            owner = self._layout.owner(unit, k, self._layout.part_of(unit, me))
            recvs.append(self._transport.recv(owner, Channel.REPLAY, at_slice(unit, k), grad))
        self._transport.wait(*recvs, *sends)
        for at, recv in zip(self._layout.replicated(me), recvs, strict=True):
            self._store.set_gradient(at, recv.buffer)

    def after_update(self, step: int) -> None:
        """Nothing: replicas have done the update, too."""

    def finish(self) -> None:
        """Nothing: they always are."""


class StateReplay:
    """Replicas are sent what the update made of the state."""

    def __init__(self, layout: Layout, rank: int, store: StateStore) -> None:
        self._layout = layout
        self._store = store
        # Those of the whole job would take longer than a step where there are many ranks.
        every = (
            Transfer(unit, k, part, layout.owner(unit, k, part), copy, "replica")
            for unit, k in (*layout.owned(rank), *layout.replicated(rank))
            for part in (layout.part_of(unit, rank),)
            for copy in layout.copies(unit, k, part)
        )
        self._copies = [copy for copy in every if rank in (copy.src, copy.dst)]

    def before_vote(self) -> None:
        """Wait for the states that are on their way."""
        self._store.arrive()

    def after_update(self, step: int) -> None:
        """Send the new states; they arrive while the next step is computed."""
        self._store.replicate(self._copies, self._layout, step)

    def finish(self) -> None:
        """Wait for the states that are on their way, from here too."""
        self._store.arrive()
        self._store.flush()
