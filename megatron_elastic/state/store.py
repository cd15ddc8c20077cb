"""StateStore: the slice states that one rank holds, as owner or as replica, and how they move between ranks.

A state is *live* when it equals the owner's. A replica being copied is *loading*: it is fetched in the background
(``state.copying``) while gradients for it are kept, and when it is here it catches up by replaying those. Where whole
states are replayed (``state.replay``), it is loading whenever the owner has made a step, and keeps what it had until
then.

A rank computes updates of what it owns on its device; replicas are in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron_elastic.comm.operation import Recv, Sending, Steps, Task
from megatron_elastic.comm.tag import Channel
from megatron_elastic.comm.transport import Transport
from megatron_elastic.device.cpu import Cpu
from megatron_elastic.device.device import Device
from megatron_elastic.layout import Layout, Transfer
from megatron_elastic.numerics import deferred
from megatron_elastic.numerics.kernels import block_squares
from megatron_elastic.observe.dials import Dials
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.copying import Rate, SliceId, fetch, part_of, serve
from megatron_elastic.state.optimizer import Optimizer, Update
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.slice import SliceState

_HOST = torch.device("cpu")


@dataclass
class _Loading:
    """A replica on its way: where its state is being received, and what has to be replayed on it.

    ``recvs`` are there if it is sent unasked. ``begun``, ``here``: it has been asked for, has arrived. ``stale`` is
    what was here before, if that is kept. ``due``: bytes that dials do not count as arrived yet.
    """

    state: SliceState
    recvs: tuple[Recv, ...] = ()
    begun: bool = False
    here: bool = False
    missed: list[tuple[Update, torch.Tensor]] = field(default_factory=list)
    grad: torch.Tensor | None = None
    stale: SliceState | None = None
    due: int = 0


def _unlimited(unit: int) -> float:
    return 0.0


class StateStore:
    """Slice states of one rank, keyed by (unit, slice); this rank's part of each.

    Args:
        partitions: of all units of which slices are to be held; may grow. The units' modules need not be here.
        keeps: whole states are replayed, and everything is kept as it was one step before, too.
        rate: at which replicas that are missing are fetched.
        device: where this rank computes.
        dials: show what is held, and how far copies are.
    """

    def __init__(
        self, partitions: Mapping[int, Partition], optimizer: Optimizer, transport: Transport,
        keeps: bool = False, rate: Rate = _unlimited, device: Device | None = None, dials: Dials | None = None,
    ) -> None:  # fmt: skip
        self._partitions = partitions
        self.optimizer = optimizer
        self._transport = transport
        self._device = device or Cpu()
        self._dials = dials or Dials.alone()
        self._done = 0
        """The newest step whose update was done here."""
        self._owned: frozenset[SliceId] = frozenset()
        """What is to be on the device."""
        self._live: dict[SliceId, SliceState] = {}
        self._loading: dict[SliceId, _Loading] = {}
        self._outgoing: list[Sending] = []
        self._due: list[Steps] = []
        """Copying to and from here that is to begin."""
        self._copying: list[Task] = []
        """Copying under way."""
        self._keeps = keeps
        self.rate = rate
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

    def create(self, layout: Layout, units: Mapping[int, UnitBuffer], step: int = 0) -> None:
        """Make fresh states, from the model's weights, for every slice of ``units`` this rank owns or replicates.

        ``step``: how many have been done, with other states.
        """
        for unit, k in (*layout.owned(self._transport.rank), *layout.replicated(self._transport.rank)):
            if unit not in units:
                continue  # a copy kept for another stage has to come from there
            buffer = units[unit]
            state = SliceState(buffer.slice_of(buffer.params, k).to(torch.float32, copy=True), self.optimizer)
            state.step = step
            state.move(self._home((unit, k)))
            self._live[unit, k] = state

    def take(self, states: Mapping[SliceId, SliceState]) -> None:
        """Have these states, live."""
        self._live |= states

    def own(self, slices: Iterable[SliceId]) -> None:
        """From now on this rank is the owner of these slices, and of no others: let states be where they are updated.

        Waits for the device if some leave it.
        """
        self._owned = frozenset(slices)
        for at, state in self._live.items():
            state.move(self._home(at))

    def _home(self, at: SliceId) -> torch.device:
        """Where a slice's state is to be."""
        return self._device.torch if at in self._owned else _HOST

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

    def squares(self, slices: Iterable[SliceId]) -> torch.Tensor:
        """This rank's part of the squared gradient norm of some slices that it owns, by blocks: flat, float64, where
        it computes.
        """
        return self._squares(
            part for at in slices for part in self._live[at].counted(self._partitions[at[0]].segments(at[1]))
        )

    def squared_weights(self, slices: Iterable[SliceId]) -> torch.Tensor:
        """The same of the weights' norm."""
        return self._squares(
            part for at in slices for part in self._live[at].counted_weights(self._partitions[at[0]].segments(at[1]))
        )

    def _squares(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        if self._device.is_host:
            return torch.from_numpy(block_squares(parts))
        return deferred.block_squares(parts, self._device.torch)

    def zeros(self, slices: Iterable[SliceId]) -> torch.Tensor:
        """How many elements of the gradients of slices that it owns are 0, of those that this rank's part counts: one
        number, where it computes.
        """
        total = torch.zeros(1, dtype=torch.int64, device=self._device.torch)
        for unit, k in slices:
            partition = self._partitions[unit]
            total += partition.elements(k)
            for part in self._live[unit, k].counted(partition.segments(k)):
                total -= part.count_nonzero()
        return total

    def apply(self, update: Update) -> None:
        """Do the update on everything live that has not done it; loading replicas keep it for later.

        Where whole states are replayed, replicas have no gradient, and are sent what the owners make. May be
        interrupted between two slices, and done again.
        """
        self._done = update.step
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

        Each rank passes those from and to it, all between the same two updates. What training does not wait for is
        fetched in the background (``copy_in_background``).
        """
        me = self._transport.rank
        wanted: list[tuple[int, SliceId]] = []
        served: dict[int, list[SliceId]] = {}
        fresh = False
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
                if loading.stale is None or not self._keeps:  # else it is sent as in every step
                    fresh, loading.due = True, _bytes(state)
                if fetched:
                    wanted.append((transfer.src, at))
                else:
                    loading.begun = True
                    loading.recvs = tuple(
                        self._transport.recv(transfer.src, Channel.STATE, part_of(at, part), tensor)
                        for part, tensor in enumerate(state.tensors)
                    )
        if fresh:
            self._dials.expect(layout.epoch, sum(loading.due for loading in self._loading.values()))
        self._due += [serve(self._transport, peer, slices, self._snapshot) for peer, slices in served.items()]
        if wanted:
            self._due.append(
                fetch(self._transport, wanted, self._begin, self._came, self._arrived, self.rate)
            )

    def copy_in_background(self) -> None:
        """Start what ``replicate`` has left to the background; apart from it, so that a recovery is over first."""
        self._copying += [self._transport.start(steps, "copy") for steps in self._due]
        self._due.clear()

    def _snapshot(self, at: SliceId) -> tuple[int, tuple[torch.Tensor, ...]]:
        with self._changing:
            state = self._live[at]
            return state.step, tuple(tensor.to(_HOST, copy=True) for tensor in state.tensors)

    def _begin(self, source: int, at: SliceId) -> tuple[torch.Tensor, ...]:
        loading = self._loading[at]
        loading.begun = True
        self._dials.fetch(at[0], source)
        return loading.state.tensors

    def _came(self, at: SliceId, size: int) -> None:
        self._loading[at].due -= size
        self._dials.copied(size)

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
            if loading.due:
                self._dials.copied(loading.due)
            state.move(self._home(at))
            for update, grad in loading.missed:
                if state.step < update.step:
                    state.grad = grad
                    state.move(self._home(at))
                state.apply(update, self._partitions[at[0]].segments(at[1]))
            state.grad = loading.grad
            if self._keeps and loading.stale is not None:
                state.previous, loading.stale.previous = loading.stale, None
            self._live[at] = state
        if arrived and not self._loading:
            self._dials.complete()
        oldest = min(((each.stale or each.state).step for each in self._loading.values()), default=self._done)
        self._dials.lag(max(0, self._done - oldest))
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
        self._dials.expect(0, 0)
        self._dials.lag(0)
        for each in (self._outgoing, self._due, self._copying):
            each.clear()

    def retire(self, keep: Iterable[SliceId]) -> None:
        """Drop every live state but those in ``keep``."""
        kept = set(keep)
        for at in [at for at in self._live if at not in kept]:
            del self._live[at]
        self._stale.clear()
        self.show_held()

    def show_held(self) -> None:
        """Let dials show what is held. It takes a microsecond for each slice."""
        loading = (state for each in self._loading.values() for state in (each.state, each.stale) if state is not None)
        self._dials.hold(sum(map(_bytes, (*self._live.values(), *self._stale.values(), *loading))))

    def return_to(self, step: int, keep: Iterable[SliceId]) -> None:
        """Let those in ``keep`` be live as after ``step`` steps, or as after one less with a gradient for that step.

        The others are not live any more; what is older is kept until a newer one has arrived or it is retired.
        """
        kept, self._done = set(keep), step
        states = self._stale | self._live
        self._live, self._stale = {}, {}
        for at, state in states.items():
            if state.step > step and state.previous is not None:
                state = state.previous
            if at in kept:
                state.move(self._home(at))
                self._live[at] = state
            elif self._keeps and state.step < step:
                self._stale[at] = state


def _bytes(state: SliceState) -> int:
    own = sum(tensor.nbytes for tensor in state.tensors)
    return own if state.previous is None else own + _bytes(state.previous)


def _received(recvs: Sequence[Recv]) -> bool:
    return bool(recvs) and all(recv.done for recv in recvs)
