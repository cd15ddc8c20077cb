"""StateStore: the slice states that one rank holds, as owner or as replica, and how they move between ranks.

A state is *live* when it equals the owner's. A replica being copied is *loading*: it is fetched in the background
(``state.copying``) while gradients for it are kept, and when it is here it catches up by replaying those. Where whole
states are replayed (``state.replay``), it is loading whenever the owner has made a step, and keeps what it had until
then.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_elastic.comm.operation import Recv, Send, Steps, Task
from megatron_elastic.comm.tag import Channel
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout, Transfer
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.copying import SliceId, fetch, part_of, serve
from megatron_elastic.state.optimizer import Optimizer, Update
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.slice import SliceState


@dataclass
class _Loading:
    """A replica on its way: where its state is being received, and what has to be replayed on it.

    ``recvs`` are there if it is sent unasked. ``begun``, ``here``: it has been asked for, has arrived. ``stale`` is
    what was here before, if that is kept.
    """

    state: SliceState
    recvs: tuple[Recv, ...] = ()
    begun: bool = False
    here: bool = False
    missed: list[tuple[Update, torch.Tensor]] = field(default_factory=list)
    grad: torch.Tensor | None = None
    stale: SliceState | None = None


class StateStore:
    """Slice states of one rank, keyed by (unit, slice); this rank's part of each.

    Args:
        partitions: of all units of which slices are to be held; may grow. The units' modules need not be here.
        keeps: whole states are replayed, and everything is kept as it was one step before, too.
        rate: bytes a second that may be fetched in the background; 0: no limit.
    """

    def __init__(
        self, partitions: Mapping[int, Partition], optimizer: Optimizer, transport: Transport,
        keeps: bool = False, rate: float = 0.0,
    ) -> None:  # fmt: skip
        self._partitions = partitions
        self.optimizer = optimizer
        self._transport = transport
        self._live: dict[SliceId, SliceState] = {}
        self._loading: dict[SliceId, _Loading] = {}
        self._outgoing: list[Send] = []
        self._due: list[Steps] = []
        """Copying to and from here that is to begin."""
        self._copying: list[Task] = []
        """Copying under way."""
        self._keeps = keeps
        self._rate = rate
        self._changing = threading.Lock()
        """Held while states change: snapshots of them are taken in the background."""
        self._stale: dict[SliceId, SliceState] = {}
        """States of fewer steps than the others have, until newer ones arrive."""

    def __getitem__(self, at: SliceId) -> SliceState:
        """The live state of a slice. Raises KeyError if it is not live here."""
        return self._live[at]

    def empty_gradient(self, at: SliceId, dtype: torch.dtype) -> torch.Tensor:
        """Room for the slice's reduced gradient."""
        return torch.empty(self._partitions[at[0]].slice_size, dtype=dtype)

    def held(self) -> list[tuple[int, int, int]]:
        """(unit, slice, part) of everything live here, ascending."""
        return [(unit, k, self._partitions[unit].part) for unit, k in sorted(self._live)]

    def versions(self) -> dict[int, list[tuple[int, int, int]]]:
        """Number of steps -> what is here after so many, or can be made with the vote of the last one of them."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for at, state in sorted((self._stale | self._live).items()):
            steps = [state.step, *([state.step + 1] if state.grad is not None else [])]
            for step in (*steps, *([state.previous.step] if state.previous is not None else [])):
                found.setdefault(step, []).append((*at, self._partitions[at[0]].part))
        return found

    def create(self, layout: Layout, units: Mapping[int, UnitBuffer]) -> None:
        """Make fresh states, from the model's weights, for every slice of ``units`` this rank owns or replicates."""
        for unit, k in (*layout.owned(self._transport.rank), *layout.replicated(self._transport.rank)):
            if unit not in units:
                continue  # a copy kept for another stage has to come from there
            buffer = units[unit]
            self._live[unit, k] = SliceState(
                buffer.slice_of(buffer.params, k).to(torch.float32, copy=True), self.optimizer
            )

    # ---- a step -----------------------------------------------------------------------------

    def set_gradient(self, at: SliceId, grad: torch.Tensor) -> None:
        """Give the slice its reduced gradient of the step in progress."""
        if at in self._live:
            self._live[at].grad = grad
        else:
            self._loading[at].grad = grad

    def drop_gradients(self) -> None:
        """The step in progress begins anew."""
        for state in self._live.values():
            state.grad = None

    def sum_of_squares(self, at: SliceId) -> float:
        """This rank's part of the slice's squared gradient norm."""
        return self._live[at].sum_of_squares(self._partitions[at[0]].segments(at[1]))

    def apply(self, update: Update) -> None:
        """Do the update on everything live that has not done it; loading replicas keep it for later.

        Where whole states are replayed, replicas have no gradient, and are sent what the owners make. May be
        interrupted between two slices, and done again.
        """
        with self._changing:
            for (unit, k), state in self._live.items():
                self._transport.look()
                if self._keeps and state.step < update.step:
                    if state.grad is None:
                        continue
                    state.keep()
                state.apply(update, self._partitions[unit].segments(k))
        for loading in self._loading.values():
            if loading.grad is not None:
                if not loading.begun:
                    loading.missed.clear()
                loading.missed.append((update, loading.grad))
                loading.grad = None

    # ---- replicate, promote, retire ----------------------------------------------------------

    def replicate(self, transfers: Iterable[Transfer], layout: Layout, step: int) -> None:
        """Begin this rank's part in copying slices, as they are after ``step`` steps or more.

        All ranks pass the same transfers, between the same two updates. What training does not wait for is fetched in
        the background (``copy_in_background``).
        """
        me = self._transport.rank
        wanted: list[tuple[int, SliceId]] = []
        served: dict[int, list[SliceId]] = {}
        for transfer in transfers:
            at = (transfer.unit, transfer.slice)
            # Whole states are sent in every step. And a source without a role in the layout will not keep the slice.
            keepers = layout.owner(*at, transfer.part), *layout.copies(*at, transfer.part)
            fetched = not self._keeps and transfer.role == "replica" and transfer.src in keepers
            if transfer.src == me and fetched:
                served.setdefault(transfer.dst, []).append(at)
            elif transfer.src == me:
                for part, tensor in enumerate(self._live[at].tensors):
                    # A snapshot: training goes on and changes the state while the copy is under way. Where whole
                    # states are replayed, the next update waits for it.
                    sent = tensor if self._keeps else tensor.clone()
                    self._outgoing.append(self._transport.send(transfer.dst, Channel.STATE, part_of(at, part), sent))
            if transfer.dst == me:
                state = SliceState.room(self._partitions[transfer.unit].slice_size, self.optimizer, step)
                loading = self._loading[at] = _Loading(state)
                loading.stale = self._live.pop(at, None) or self._stale.pop(at, None)
                if fetched:
                    wanted.append((transfer.src, at))
                else:
                    loading.begun = True
                    loading.recvs = tuple(
                        self._transport.recv(transfer.src, Channel.STATE, part_of(at, part), tensor)
                        for part, tensor in enumerate(state.tensors)
                    )
        self._due += [serve(self._transport, peer, slices, self._snapshot) for peer, slices in served.items()]
        if wanted:
            self._due.append(fetch(self._transport, wanted, self._begin, self._arrived, self._rate))

    def copy_in_background(self) -> None:
        """Start what ``replicate`` has left to the background; apart from it, so that a recovery is over first."""
        self._copying += [self._transport.start(steps) for steps in self._due]
        self._due.clear()

    def _snapshot(self, at: SliceId) -> tuple[int, tuple[torch.Tensor, ...]]:
        with self._changing:
            state = self._live[at]
            return state.step, tuple(tensor.clone() for tensor in state.tensors)

    def _begin(self, at: SliceId) -> tuple[torch.Tensor, ...]:
        loading = self._loading[at]
        loading.begun = True
        return loading.state.tensors

    def _arrived(self, at: SliceId, step: int) -> None:
        loading = self._loading[at]
        loading.state.step, loading.here = step, True

    def arrive(self) -> None:
        """Block until all copies that this rank is to get are live."""
        recvs = [recv for loading in self._loading.values() for recv in loading.recvs]
        self._transport.wait(*recvs, *self._copying)
        self.settle()

    def settle(self, wait: Sequence[Transfer] = ()) -> list[SliceId]:
        """Turn loading replicas whose bytes have arrived into live ones; returns them.

        Blocks for the transfers in ``wait``.
        """
        me = self._transport.rank
        self._transport.wait(
            *(r for t in wait if t.dst == me for r in self._loading[t.unit, t.slice].recvs)
        )
        if self.replicating:
            self._transport.progress()
            self._outgoing = [send for send in self._outgoing if not send.done]
            self._copying = [task for task in self._copying if not task.done]
        arrived = [at for at, loading in self._loading.items() if loading.here or _received(loading.recvs)]
        for at in arrived:
            loading = self._loading.pop(at)
            state = loading.state
            for update, grad in loading.missed:
                if state.step < update.step:
                    state.grad = grad
                state.apply(update, self._partitions[at[0]].segments(at[1]))
            state.grad = loading.grad
            if self._keeps and loading.stale is not None:
                state.previous, loading.stale.previous = loading.stale, None
            self._live[at] = state
        return arrived

    @property
    def replicating(self) -> bool:
        """Whether copies to or from this rank are under way."""
        return bool(self._loading or self._outgoing or self._due or self._copying)

    def flush(self) -> None:
        """Block until all copies from this rank are on their way."""
        self._transport.wait(*self._outgoing, *self._copying)
        self._outgoing.clear()
        self._copying.clear()

    def abandon_loading(self) -> None:
        """Forget copies under way: the layout they were meant for is gone."""
        self._stale |= {at: loading.stale for at, loading in self._loading.items() if loading.stale is not None}
        self._loading.clear()
        for each in (self._outgoing, self._due, self._copying):
            each.clear()

    def retire(self, keep: Iterable[SliceId]) -> None:
        """Drop every live state but those in ``keep``."""
        kept = set(keep)
        for at in [at for at in self._live if at not in kept]:
            del self._live[at]
        self._stale.clear()

    def return_to(self, step: int, keep: Iterable[SliceId]) -> None:
        """Let those in ``keep`` be live as after ``step`` steps, or as after one less with a gradient for that step.

        The others are not live any more; what is older is kept until a newer one has arrived or it is retired.
        """
        kept = set(keep)
        states = self._stale | self._live
        self._live, self._stale = {}, {}
        for at, state in states.items():
            if state.step > step and state.previous is not None:
                state = state.previous
            if at in kept:
                self._live[at] = state
            elif self._keeps and state.step < step:
                self._stale[at] = state


def _received(recvs: Sequence[Recv]) -> bool:
    return bool(recvs) and all(recv.done for recv in recvs)
