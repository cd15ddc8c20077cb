"""UnitBuffer: one unit's parameters and gradient sums as flat tensors, of which the model's parameters are views.

A model can be taken apart and put together anew, for another stage, over the same buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread

import torch

from megatron_elastic.layout import ParameterShape, UnitShape
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.state.optimizer import SIGNED
from megatron_elastic.state.partition import Partition


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a unit and how the optimizer treats it.

    ``group``: index of its group (see ``state.optimizer``). ``runs`` and ``rows``: how tensor-parallel ranks share it
    (``ParameterShape``), and how many rows of each run are here; without runs they all hold the same. ``partial``: all
    the same, but each of them computes a part of its gradient. ``name``: for messages.
    """

    parameter: torch.nn.Parameter
    group: int
    runs: int = 0
    rows: int = 1
    partial: bool = False
    name: str = "a parameter"


def shape_of(unit: str, members: Sequence[Member], tp: int = 1, experts: int = 0, ep: int = 1) -> UnitShape:
    """The shape of a unit with these parameters. Raises ValueError when they do not all have one type.

    ``tp``: how many ranks share tensors. ``experts``: how many experts the parameters are, which ``ep`` teams share; 0
    if they are none, or cannot be told apart.
    """
    types = sorted({str(member.parameter.dtype).removeprefix("torch.") for member in members})
    if len(types) > 1:
        raise ValueError(f"the parameters of unit {unit} have types {', '.join(types)}: cast them first")
    shared = [(member, tp if member.runs else 1) for member in members]
    every = tuple(
        ParameterShape(member.parameter.numel() * ranks, member.group, member.runs, member.rows * ranks)
        for member, ranks in shared
    )
    one = every[: len(every) // experts] if experts else ()
    return UnitShape(one, types[0], experts * ep) if experts and one * experts == every else UnitShape(every, types[0])


class UnitBuffer:
    """Flat storage of one unit on one rank. Undefined until it is filled, and the sums until ``zero``.

    Args:
        partition: where everything lies.
        accumulator: how gradients are summed.
        device: where.
    """

    def __init__(self, partition: Partition, accumulator: Accumulator, device: torch.device | str = "cpu") -> None:
        self.partition = partition
        self.params = torch.empty(partition.size, dtype=partition.dtype, device=device)
        self.sums = torch.empty(partition.size, dtype=accumulator.dtype, device=device)
        self._making_room: Thread | None = None
        self._accumulator = accumulator
        self._bound: list[torch.nn.Parameter] = []
        self._names: list[str] = []
        self._partial_sums: list[torch.Tensor] = []
        self._own: list[torch.Tensor] = []
        """What this rank's were before they were added up."""
        self._leaves = 0
        """Parameters and their twins: each adds a gradient for every grain."""
        self._missing = 0
        self._complete: Callable[[], None] = _nothing
        self.finite = True
        """Whether all gradients were that have been added since ``zero``."""

    def bind(self, members: Sequence[Member], *, fill: bool) -> None:
        """Make a model's parameters, in the model's order, views of the storage, and sum their gradients into it.

        ``fill``: with their values; else they take on those that are there.
        """
        if fill:
            self.params.zero_()  # what lies between slices, too
        self._bound, self._leaves = [member.parameter for member in members], 0
        self._names = [member.name for member in members]
        self._partial_sums = [
            self.sums[start : start + member.parameter.numel()]
            for member, start in zip(members, self.partition.starts, strict=True)
            if member.partial
        ]
        for (parameter, start), member in zip(self.bound, members, strict=True):
            view = self.params[start : start + parameter.numel()]
            if fill:
                view.copy_(parameter.detach().view(-1))
            parameter.data = view.view_as(parameter)
            self._accumulate(parameter, start, member.name, counts=member.group == SIGNED)

    def twin(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        """A second leaf over a bound parameter, for another use of it; what the two uses contribute is summed apart.

        Autograd would add both in floating point first, and ranks that hold one use each do not.
        """
        (place,) = (place for place, bound in enumerate(self._bound) if bound is parameter)
        twin = torch.nn.Parameter(parameter.detach())
        self._accumulate(twin, self.partition.starts[place], self._names[place])
        return twin

    def is_bound(self, members: Sequence[Member]) -> bool:
        """Whether these parameters are the views of the storage that were last made."""
        mine = self._bound
        return len(mine) == len(members) and all(a is b.parameter for a, b in zip(mine, members, strict=True))

    @property
    def bound(self) -> list[tuple[torch.nn.Parameter, int]]:
        """The parameters that are views of the storage, and where each begins."""
        return list(zip(self._bound, self.partition.starts, strict=True))

    def slice_of(self, flat: torch.Tensor, k: int) -> torch.Tensor:
        """View of slice k of a flat tensor of this unit (``params``, ``sums``)."""
        return self.partition.slice_of(flat, k)

    def expect(self, grains: int, complete: Callable[[], None]) -> None:
        """Call ``complete`` when the gradients of so many more grains or parts have been added; until ``zero``."""
        self._missing, self._complete = grains * self._leaves, complete

    def make_room(self) -> None:
        """Get the memory of sums that will be needed later, in another thread: the first touch of it takes its time.

        A device's is there.
        """
        if not self.sums.is_cpu:
            return
        self._making_room = Thread(target=self.sums.zero_, name="room")
        self._making_room.start()

    def zero(self) -> None:
        """Forget all gradients of the step."""
        if self._making_room is not None:
            self._making_room.join()
            self._making_room = None
        self._missing, self._complete = 0, _nothing
        self._own = []
        self.finite = True
        self.sums.zero_()
        for parameter in self._bound:
            parameter.grad = None

    def go_on(self) -> None:
        """Go on with the gradients that are there. What they were expected for is over."""
        self._missing, self._complete = 0, _nothing
        for part, own in zip(self._partial_sums, self._own, strict=False):
            part.copy_(own)
        self._own = []

    @property
    def divided(self) -> bool:
        """Whether there are sums that must be added up over the cell's ranks."""
        return bool(self._partial_sums)

    def partial_sums(self) -> list[torch.Tensor]:
        """Views of the sums that must be added up over the cell's ranks. ``go_on`` makes them what they are now."""
        self._own = [part.clone() for part in self._partial_sums]
        return self._partial_sums

    def _accumulate(self, parameter: torch.nn.Parameter, start: int, name: str, counts: bool = False) -> None:
        """``counts``: its gradient is of no loss, and so of no loss that is scaled."""
        sums = self.sums[start : start + parameter.numel()]
        self._leaves += 1
        # The collector does not see what such a hook leads to: a way back to the parameter would keep both for ever.
        mine = weakref.ref(self)

        def accumulate(p: torch.Tensor) -> None:
            # Without a gradient the backward pass has left it for later, and will come again.
            if p.grad is not None and (buffer := mine()) is not None:
                buffer._add(sums, p, name, counts)

        parameter.register_post_accumulate_grad_hook(accumulate)

    def _add(self, sums: torch.Tensor, p: torch.Tensor, name: str, counts: bool) -> None:
        assert p.grad is not None
        self.finite &= self._accumulator.add(sums, p.grad.view(-1), plain=counts, of=name)
        p.grad = None
        self._missing -= 1
        if self._missing == 0:
            complete, self._complete = self._complete, _nothing  # it leads to all that the rank holds
            complete()


def _nothing() -> None: ...
