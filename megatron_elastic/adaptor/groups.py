"""``megatron.core.parallel_state``: groups over the elastic backend, and their edit when the layout changes.

Megatron's groups are made once, by its own ``initialize_model_parallel``. A new layout edits the same objects, because
dozens of Megatron's modules keep them; the rank lists that ``parallel_state`` keeps beside them follow. Which members a
group has is remembered as the directions in which it extends, so it has an answer in any layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_elastic.comm import backend
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout

_OCCURRENCES = 64
"""Groups of one extent that a rank may have."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The directions in which a group extends from a rank; ``ends``: over the first and the last stage only."""

    tensor: bool
    data: bool
    pipeline: Literal["own", "ends", "all"]

    @classmethod
    def of(cls, members: Sequence[int], tp: int, dp: int, pp: int) -> Extent:
        """What a group of ranks of Megatron's grid extends over."""
        stages = {rank // (tp * dp) for rank in members}
        return cls(
            tensor=len({rank % tp for rank in members}) > 1,
            data=len({rank // tp % dp for rank in members}) > 1,
            pipeline="own" if len(stages) == 1 else "all" if len(stages) == pp else "ends",
        )

    def members(self, layout: Layout, rank: int) -> list[int]:
        """The group's members in a layout, as seen from ``rank``, which is in it; in Megatron's order.

        In stages of another width the cells are counted on from the first one.
        """
        own, tp = layout.stage_of(rank), layout.tp_index(rank)
        column = [cell.leader for cell in layout.stages[own].cells].index(layout.cell_of(rank).leader)
        last = layout.pipeline_size - 1
        members: list[int] = []
        for index, stage in enumerate(layout.stages):
            if index == own or self.pipeline == "all" or (self.pipeline == "ends" and index in (0, last)):
                cells = stage.cells if self.data else (stage.cells[column % stage.width],)
                members += [r for cell in cells for r in (cell.ranks if self.tensor else (cell.ranks[tp],))]
        return members

    @property
    def number(self) -> int:
        """A different small number for each extent."""
        return (self.tensor + 2 * self.data) * 3 + ("own", "ends", "all").index(self.pipeline)


_extents: dict[backend.ElasticProcessGroup, Extent] = {}
_rank_lists: dict[str, Extent] = {}


def initialize(
    transport: Transport, tp: int, pp: int, dp: int, timeout: timedelta, position: int | None = None
) -> None:
    """Make torch.distributed's default group over ``transport``, and Megatron's groups. Talks to nobody.

    ``position``: for a rank that joins, that of the rank in the fault-free job whose kind of groups it is to have.
    May be called again, by a rank that gets another position; its older groups are gone then.
    """
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    ranks = list(range(tp * pp * dp))
    if position is not None:
        if transport.rank in ranks:
            ranks[transport.rank] = ranks[position]
        ranks[position] = transport.rank
    backend.initialize(transport, ranks, timeout)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    _extents.clear()
    _rank_lists.clear()
    place = {rank: index for index, rank in enumerate(ranks)}
    seen: Counter[Extent] = Counter()
    for group in backend.groups()[1:]:
        extent = Extent.of([place[rank] for rank in group.group.ranks], tp, dp, pp)
        _extents[group] = extent
        # The groups of one extent are disjoint, and every rank makes them in the same order: so all members agree.
        group.group.ident = 1 + extent.number * _OCCURRENCES + seen[extent]
        seen[extent] += 1
    for name, value in vars(parallel_state).items():
        if name.endswith(("_GLOBAL_RANKS", "_GLOBAL_RANKS_WITH_CP")) and value is not None:
            _rank_lists[name] = Extent.of(value, tp, dp, pp)


def edit(layout: Layout, rank: int) -> None:
    """Give every group of ``rank``, which is in ``layout``, the members that it has there. Idempotent."""
    world = backend.groups()[0]
    backend.edit({world: layout.ranks, **{group: extent.members(layout, rank) for group, extent in _extents.items()}})
    position = {member: index for index, member in enumerate(layout.ranks)}
    for name, extent in _rank_lists.items():
        setattr(parallel_state, name, [position[member] for member in extent.members(layout, rank)])


@contextmanager
def alone() -> Iterator[None]:
    """Meanwhile this rank is the only member of the groups over which a model and its data are built together.

    These are the default group (barriers) and those of the tied embeddings (whose first values are exchanged).
    """
    embedding = (parallel_state._EMBEDDING_GROUP, parallel_state._POSITION_EMBEDDING_GROUP)
    views = [group.group for group in (backend.groups()[0], *embedding) if group is not None]
    members = [view.ranks for view in views]
    for view in views:
        view.edit([view.transport.rank])
    try:
        yield
    finally:
        for view, ranks in zip(views, members, strict=True):
            view.edit(ranks)
