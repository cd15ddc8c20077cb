"""Copying: states on their way between model ranks, as ``state.copying`` and ``state.replay`` do it.

What is to be live at once is sent by who has it; what may come later is fetched in the background, one after the other
(``state.copying`` asks for a few ahead: slices do not depend on each other, so that only changes when they come).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megatron_elastic.layout import Layout, Transfer
from tests.simulation.errors import Violation
from tests.simulation.ranks.store import SliceId, Store

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank


class _Fetch(NamedTuple):
    """A chain of copies from others, under the layout of ``epoch``."""

    wanted: Sequence[tuple[int, SliceId]]
    """(source, slice) of what is missing; the first one is asked for now."""
    epoch: int
    token: int
    """As in ``Store``."""


class Copies:
    """Those to and from one rank."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._mail: dict[tuple[int, SliceId], deque[tuple[int, bool]]] = {}
        """(epoch, slice) -> what was sent here of it: the step, and whether it is damaged."""
        self._due: list[tuple[int, SliceId]] = []
        """(source, slice) of what is to be fetched in the background."""
        self._requests: list[tuple[int, Callable[[], None]]] = []
        """Requests for slices that came before the copying of their epoch began here."""
        self._serving = -1
        """Epoch whose copies are served."""

    @property
    def _store(self) -> Store:
        assert self._rank.store is not None
        return self._rank.store

    def advance(self, epoch: int) -> None:
        """An epoch begins: what was sent in older ones does not count."""
        self._mail = {key: value for key, value in self._mail.items() if key[0] >= epoch}

    def abandon(self) -> None:
        """Forget what is on its way."""
        self._store.abandon_loading()
        self._due.clear()

    def replicate(self, moves: Sequence[Transfer], layout: Layout, done: int) -> None:
        """Send what others are to have as after ``done`` steps, and expect what is to come here."""
        rank, world, store = self._rank, self._rank.world, self._store
        known, shapes = rank.transport.known, rank.parameters.shapes
        for move in moves:
            at = (move.unit, move.slice)
            keepers = (layout.owner(*at, move.part), *layout.copies(*at, move.part))
            fetched = not world.keeps and move.role == "replica" and move.src in keepers
            if move.src == rank.rank and not fetched:
                state = store.live.get(at)
                if state is None:
                    raise Violation("invented", f"rank {rank.rank} is to send slice {at}, which it has not ({move})")
                self._send(move.dst, at, state.step, state.bad)
            if move.dst == rank.rank:
                if move.src not in known:
                    raise Violation("no address", f"rank {rank.rank} does not know where rank {move.src} is")
                if move.unit not in shapes:
                    raise Violation("no shape", f"rank {rank.rank} is to keep a slice of unit {move.unit}")
                store.expect(at, not fetched, done)
                if fetched:
                    self._due.append((move.src, at))

    def send_updated(self, layout: Layout, step: int) -> None:
        """Send whole states after an update: ``StateReplay.after_update``."""
        rank, store = self._rank.rank, self._store
        for at in layout.owned(rank):
            for copy in layout.copies(*at, layout.part_of(at[0], rank)):
                self._send(copy, at, step, store.live[at].bad)
        for at in layout.replicated(rank):
            store.expect(at, True, step)

    def _send(self, dst: int, at: SliceId, step: int, bad: bool) -> None:
        rank, world, store = self._rank, self._rank.world, self._store
        store.busy += 1
        world.after(world.delay(0.01), self._delivered, dst, (rank.transport.epoch, at), step, bad, store.token)

    def _delivered(self, dst: int, key: tuple[int, SliceId], step: int, bad: bool, token: int) -> None:
        rank, store, peer = self._rank, self._rank.store, self._rank.world.ranks.get(dst)
        if store is not None and store.token == token and rank.alive:
            store.busy -= 1
        if peer is not None and peer.alive and peer.transport.epoch <= key[0]:
            peer.copies._mail.setdefault(key, deque()).append((step, bad))
            peer.poke()
        rank.poke()

    def sent_here(self, slices: Sequence[SliceId]) -> bool:
        """Whether something has been sent here, in this epoch, of each of these."""
        epoch = self._rank.transport.epoch
        return all(self._mail.get((epoch, at)) for at in slices)

    def pull(self) -> None:
        """Match what has arrived with what is expected."""
        rank, store, epoch = self._rank.rank, self._store, self._rank.transport.epoch
        for at, loading in store.loading.items():
            if loading.begun and not loading.here and (mail := self._mail.get((epoch, at))):
                step, bad = mail.popleft()
                if step != loading.step:
                    raise Violation("wrong step", f"rank {rank} gets slice {at} after {step} steps and takes it "
                                                  f"for {loading.step}")
                store.arrived(at, step, bad)

    def all_arrived(self) -> bool:
        """Whether nothing is expected any more."""
        self.pull()
        return all(loading.here for loading in self._store.loading.values())

    # ---- in the background -----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to fetch what is due, and to serve what others ask for."""
        store, epoch = self._store, self._rank.transport.epoch
        self._serving = epoch
        requests, self._requests = self._requests, []
        for asked, serve in requests:
            if asked == epoch:
                serve()
            elif asked > epoch:
                self._requests.append((asked, serve))
        if self._due:
            due, self._due = self._due, []
            store.busy += 1
            self._fetch(_Fetch(due, epoch, store.token))

    def _current(self, fetch: _Fetch) -> bool:
        """Whether a chain of copies to here still counts."""
        rank = self._rank
        return (rank.alive and rank.store is not None and rank.store.token == fetch.token
                and rank.transport.epoch == fetch.epoch)

    def _fetch(self, fetch: _Fetch) -> None:
        if not self._current(fetch):
            return
        world, store = self._rank.world, self._store
        if not fetch.wanted:
            store.busy -= 1
            self._rank.poke()
            return
        source, at = fetch.wanted[0]
        store.loading[at].begun = True
        world.after(world.delay(0.01), world.ranks[source].copies._asked_for, self, fetch)

    def _asked_for(self, dst: Copies, fetch: _Fetch) -> None:
        rank, world, now = self._rank, self._rank.world, self._rank.transport.epoch
        apart = rank.rank in dst._rank.transport.broken or dst._rank.rank in rank.transport.broken
        if not rank.alive or fetch.epoch < now or apart:
            return
        if rank.stopped:
            world.held(rank, self._asked_for, dst, fetch)
            return
        if self._serving != fetch.epoch or now != fetch.epoch:
            self._requests.append((fetch.epoch, lambda: self._asked_for(dst, fetch)))
            return
        at = fetch.wanted[0][1]
        state = self._store.live.get(at)
        if state is None:
            if rank.want == () or rank.control.epoch > fetch.epoch:
                return  # it has found damage, and dropped what is damaged; an interrupt follows, or has come
            raise Violation("invented", f"rank {rank.rank} is asked for slice {at}, which it has not")
        world.after(world.copy_delay(), dst._got, fetch, state.step, state.bad)

    def _got(self, fetch: _Fetch, step: int, bad: bool) -> None:
        if not self._current(fetch):
            return
        if self._rank.stopped:
            self._rank.world.held(self._rank, self._got, fetch, step, bad)
            return
        self._store.arrived(fetch.wanted[0][1], step, bad)
        self._fetch(fetch._replace(wanted=fetch.wanted[1:]))
