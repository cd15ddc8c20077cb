"""Draft: one rank's part of a checkpoint in Megatron's torch_dist format: planned by all, written by each.

What Megatron's own saving does in one call is in three here. Only the middle one takes time, and it needs nobody else,
so a thread can do it. And no disk is touched between two collectives, where a rank whose disk is full, or stands still,
would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from torch.distributed.checkpoint.planner import SavePlan

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.checkpoints.writer import size_of, write_files

Written = list[Any]
"""What the index says of a part: torch's ``WriteResult`` for each thing in it."""


class _Writer(FileSystemWriterAsync):
    """Megatron's, which makes the folder already when it plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan


class Draft:
    """Plan a checkpoint of ``state``, Megatron's sharded state, in a new folder. Every rank calls it.

    What is to be written is copied if it is part of something larger, and else must not change until it is written.
    """

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self._folder, self._first = folder, dist.get_rank() == 0
        sharded, self._common = save_preprocess(state)
        mine, _, _ = targets.BY_KEY.find()(sharded, True)
        self._writer = _Writer(str(folder), thread_count=1)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planned, *_ = targets.PLAN.find()(mcore_to_pyt_state_dict(mine), self._writer, planner=planner)
        self._index = planned[1]
        self._buckets = self._writer.preload_tensors(self._writer.write_buckets)
        self.size = size_of(self._buckets)
        """Bytes of this rank's tensors in it."""

    def write(self, finished: Callable[[int], None]) -> Written:
        """Write this rank's files; ``finished`` is told the bytes of each tensor.

        Raises OSError, or the RuntimeError that torch makes of one.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._first:
            # A file of its own, as any release reads it; Megatron writes it into the others from 0.19 on.
            torch.save(self._common, self._folder / COMMON_STATE_FNAME)
        files = write_files(self._buckets, [self._writer.transforms], finished=finished)
        return [result for file in files.values() for result in file]

    def complete(self, written: Sequence[Written]) -> None:
        """Write the index of what all ranks have written; the first rank does. Raises as ``write``."""
        self._writer.finish(self._index, list(written))
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
