"""Store: the states that a model rank holds, as ``state.store`` does it, with numbers of steps in place of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron_elastic.layout import Layout
from tests.simulation.errors import Violation

SliceId = tuple[int, int]
"""(unit, slice)"""
Part = tuple[int, int, int]


class State:
    """One slice after ``step`` updates. ``bad``: its memory has been damaged."""

    __slots__ = ("bad", "grad", "previous", "step", "told")

    def __init__(self, step: int, bad: bool = False) -> None:
        self.step = step
        self.bad = bad
        self.told: int | None = None
        """Newest epoch when the coordinator was told of damage here."""
        self.grad = False
        self.previous: State | None = None

    def apply(self, step: int, who: str) -> None:
        if self.step >= step:
            return
        if self.step != step - 1 or not self.grad:
            raise Violation("wrong step", f"{who} is at step {self.step}, "
                                          f"{'with' if self.grad else 'without'} a gradient, and is to do step {step}")
        self.step, self.grad = step, False

    def keep(self) -> None:
        self.previous = State(self.step, self.bad)


class Loading:
    """A copy on its way. ``begun``: asked for; ``here``: arrived, as after ``step`` steps."""

    __slots__ = ("bad", "begun", "grad", "here", "missed", "stale", "step")

    def __init__(self, begun: bool, stale: State | None, step: int) -> None:
        self.begun = begun
        self.stale = stale
        self.step = step
        self.here = False
        self.bad = False
        self.grad = False
        self.missed: list[int] = []


class Store:
    """The slices of one rank, with its place in ``layout``. ``keeps``: whole states are replayed."""

    def __init__(self, rank: int, layout: Layout, keeps: bool) -> None:
        self.rank = rank
        self.place = layout.place_of(rank)
        self._parts = [layout.part_of(unit, rank) for unit in range(len(layout.units))]
        self._shape = layout.tp, layout.cp, layout.ep
        self.keeps = keeps
        self.live: dict[SliceId, State] = {}
        self.loading: dict[SliceId, Loading] = {}
        self.stale: dict[SliceId, State] = {}
        self.busy = 0
        """Copies from here that are not sent yet, and chains of copies to here that are not over."""
        self.token = 0
        """Changes when copies under way are forgotten."""

    def fits(self, layout: Layout) -> bool:
        """Whether parts of slices are in ``layout`` what they are here."""
        return self._shape == (layout.tp, layout.cp, layout.ep)

    @property
    def replicating(self) -> bool:
        return bool(self.loading or self.busy)

    def held(self) -> list[Part]:
        return [self.part(at) for at in sorted(self.live)]

    def part(self, at: SliceId) -> Part:
        return (*at, self._parts[at[0]])

    def versions(self) -> dict[int, list[Part]]:
        found: dict[int, list[Part]] = {}
        for at, state in sorted((self.stale | self.live).items()):
            steps = [state.step, *([state.step + 1] if state.grad else [])]
            for step in (*steps, *([state.previous.step] if state.previous is not None else [])):
                found.setdefault(step, []).append(self.part(at))
        return found

    def create(self, slices: Iterable[SliceId], step: int) -> None:
        for at in slices:
            self.live[at] = State(step)

    def set_gradient(self, at: SliceId) -> None:
        if at in self.live:
            self.live[at].grad = True
        elif at in self.loading:
            self.loading[at].grad = True
        else:
            raise Violation("no copy", f"rank {self.rank} is to replay slice {at}, which it neither has nor gets")

    def drop_gradients(self) -> None:
        for state in self.live.values():
            state.grad = False

    def apply(self, step: int, limit: int | None = None) -> None:
        """Do the update on everything, or on the first ``limit`` slices alone."""
        for at, state in list(self.live.items())[:limit]:
            if self.keeps and state.step < step:
                if not state.grad:
                    continue
                state.keep()
            state.apply(step, f"slice {at} of rank {self.rank}")
        if limit is not None:
            return
        for loading in self.loading.values():
            if loading.grad:
                if not loading.begun:
                    loading.missed.clear()
                loading.missed.append(step)
                loading.grad = False

    def expect(self, at: SliceId, begun: bool, step: int) -> None:
        stale = self.live.pop(at, None) or self.stale.pop(at, None)
        self.loading[at] = Loading(begun, stale, step)

    def arrived(self, at: SliceId, step: int, bad: bool) -> None:
        loading = self.loading[at]
        loading.step, loading.bad, loading.here = step, bad, True

    def settle(self) -> None:
        for at in [at for at, loading in self.loading.items() if loading.here]:
            loading = self.loading.pop(at)
            state = State(loading.step, loading.bad)
            for step in loading.missed:
                if state.step < step:
                    state.grad = True
                state.apply(step, f"the copy of slice {at} to rank {self.rank}")
            state.grad = loading.grad
            if self.keeps and loading.stale is not None:
                state.previous, loading.stale.previous = loading.stale, None
            self.live[at] = state

    def abandon_loading(self) -> None:
        self.stale |= {at: each.stale for at, each in self.loading.items() if each.stale is not None}
        self.loading.clear()
        self.busy = 0
        self.token += 1

    def retire(self, keep: Collection[SliceId]) -> None:
        for at in [at for at in self.live if at not in keep]:
            del self.live[at]
        self.stale.clear()

    def return_to(self, step: int, keep: Collection[SliceId]) -> None:
        states = self.stale | self.live
        self.live, self.stale = {}, {}
        for at, state in states.items():
            if state.step > step and state.previous is not None:
                state = state.previous
            if at in keep:
                self.live[at] = state
            elif self.keeps and state.step < step:
                self.stale[at] = state
