"""``megatron.core.parallel_state``: groups over the elastic backend, and their edit when the layout changes.

Megatron's groups are made once, by its own ``initialize_model_parallel``. A new layout edits the same objects; the
rank lists that ``parallel_state`` keeps beside them are renumbered with them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_elastic.comm import backend
from megatron_elastic.layout import Layout


def initialize(tensor: int, pipeline: int) -> None:
    """Make Megatron's groups. Every rank calls it once, before any edit."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)


def edit(layout: Layout) -> None:
    """Take everybody outside ``layout`` out of every group of this rank, which is in it. Idempotent."""
    group = dist.distributed_c10d._get_default_group()
    assert isinstance(group, backend.ElasticProcessGroup)
    before = group.group.ranks
    backend.keep(layout.ranks)
    position = {rank: index for index, rank in enumerate(layout.ranks)}
    renumbered = {old: position[rank] for old, rank in enumerate(before) if rank in position}
    for name in [name for name in vars(parallel_state) if name.endswith(("_GLOBAL_RANKS", "_GLOBAL_RANKS_WITH_CP"))]:
        setattr(parallel_state, name, _renumber(getattr(parallel_state, name), renumbered))


def _renumber(ranks: Any, renumbered: dict[int, int]) -> Any:
    if ranks is None:
        return None
    if ranks and isinstance(ranks[0], list):
        return [_renumber(part, renumbered) for part in ranks]
    return [renumbered[rank] for rank in ranks if rank in renumbered]
