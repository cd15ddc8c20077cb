"""``megatron.core.parallel_state``: groups over the elastic backend, and their edit when the layout changes.

Megatron's groups are made once, by its own ``initialize_model_parallel``. A new layout edits the same objects, because
dozens of Megatron's modules keep them; the rank lists that ``parallel_state`` keeps beside them follow. Which members a
group has is remembered as places in a cell, and whether it extends over cells and stages, so it has an answer in any
layout. In a small grid that could not be told from the members, so the groups are made for a model grid, with every
rank in its first corner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_elastic.comm.distributed import backend
from megatron_elastic.comm.transport import Transport
from megatron_elastic.layout import Layout

_PP, _DP = 3, 2
"""The model grid: large enough to see how groups extend."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Who is in a group: the ranks of these places of a cell, or of several.

    Attributes:
        places: ascending.
        data: of all cells of a stage.
        pipeline: of which stages; ``own``: that of the rank whose group it is, ``ends``: the first and the last one.
    """

    places: tuple[int, ...]
    data: bool
    pipeline: Literal["own", "first", "ends", "all"]

    @classmethod
    def of(cls, members: Sequence[int], size: int) -> Extent:
        """That of a group of ranks of the model grid, whose cells have this ``size``."""
        stages = {rank // (size * _DP) for rank in members}
        return cls(
            places=tuple(sorted({rank % size for rank in members})),
            data=len({rank // size % _DP for rank in members}) > 1,
            pipeline="own" if len(stages) == 1 else "all" if len(stages) == _PP else "ends",
        )

    def members(self, layout: Layout, rank: int) -> list[int]:
        """The group's members in a layout, as seen from ``rank``; in Megatron's order. It may not be among them.

        In stages of another width the cells are counted on from the first one.
        """
        own = layout.stage_of(rank)
        column = [cell.leader for cell in layout.stages[own].cells].index(layout.cell_of(rank).leader)
        last = layout.pipeline_size - 1
        stages = {"own": (own,), "first": (0,), "ends": sorted({0, last}), "all": range(last + 1)}[self.pipeline]
        members: list[int] = []
        for index in stages:
            cells = layout.stages[index].cells
            if not self.data:
                cells = (cells[column % len(cells)],)
            members += [cell.ranks[place] for cell in cells for place in self.places]
        return members


_extents: dict[backend.ElasticProcessGroup, Extent] = {}
_rank_lists: dict[str, Extent] = {}


def initialize(transport: Transport, layout: Layout, place: int, timeout: timedelta) -> None:
    """Make torch.distributed's default group over ``transport``, and Megatron's groups. Talks to nobody.

    Of ``layout`` the sizes count, of the rank its ``place`` in a cell. ``edit`` has to follow before they are used. May
    be called again by a rank that gets another place in a cell; its older groups are gone then.
    """
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    # Nobody has the other numbers.
    size = layout.cell_size
    ranks = [transport.rank if index == place else -1 - index for index in range(size * _DP * _PP)]
    backend.initialize(transport, ranks, timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=_PP, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )  # fmt: skip
    _extents.clear()
    _rank_lists.clear()
    index_of = {rank: index for index, rank in enumerate(ranks)}
    for number, group in enumerate(backend.groups()[1:], start=1):
        extent = Extent.of([index_of[rank] for rank in group.group.ranks], size)
        if group is parallel_state._POSITION_EMBEDDING_GROUP:
            extent = replace(extent, pipeline="first")
        _extents[group] = extent
        # Every rank of a corner has one group of each kind, and makes them in the same order: so all members agree.
        group.group.ident = number
    for name, value in vars(parallel_state).items():
        if "_RANKS" in name and isinstance(value, list):
            extent = Extent.of(value, size)
            first = value is parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS
            _rank_lists[name] = replace(extent, pipeline="first") if first else extent


def edit(layout: Layout, rank: int) -> None:
    """Give every group of ``rank``, which is in ``layout``, the members that it has there. Idempotent.

    Where Megatron would have no such group, as that of the embeddings in the stages between, the rank is alone in it.
    """
    world = backend.groups()[0]
    members = {group: extent.members(layout, rank) for group, extent in _extents.items()}
    here = {group: ranks if rank in ranks else [rank] for group, ranks in members.items()}
    backend.edit({world: layout.ranks, **here})
    position = {member: index for index, member in enumerate(layout.ranks)}
    for name, extent in _rank_lists.items():
        setattr(parallel_state, name, [position[member] for member in extent.members(layout, rank)])


@contextmanager
def looped(layout: Layout) -> Iterator[None]:
    """Meanwhile a chunk is known to be at an end of the model or not, where grains go round the stages: Megatron tells
    by the number of rounds. Without that it takes all chunks of the first and of the last stage for ends.
    """
    parallel_state.set_virtual_pipeline_model_parallel_world_size(layout.loops if layout.loops > 1 else None)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


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
