"""Checkpoint reader: what a rank reads of a checkpoint, and how far it is with that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from megatron_elastic.adaptor import targets
from megatron_elastic.observe.dials import LOAD, Dials

_Commit = Callable[[Any, Any, torch.Tensor], None]


def read(folder: Path, state: dict[str, Any], dials: Dials) -> dict[str, Any]:
    """A checkpoint's tensors, read into those of ``state``: two levels of dicts of Megatron's sharded tensors and
    objects. Every rank calls it. ``dials`` show how much is read. (``megatron.core.dist_checkpointing.load``)
    """
    targets.LOADED.wrap(partial(_counted, finished=partial(dials.finish, LOAD)))
    size = sum(entry.data.nbytes for entries in state.values() for entry in entries.values()
               if isinstance(entry.data, torch.Tensor))  # fmt: skip
    with dials.at(LOAD, size):
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def _counted(original: _Commit, finished: Callable[[int], None]) -> _Commit:
    """Megatron's method that takes a tensor, or a part of one, which was read."""

    def commit_tensor(self: Any, read_item: Any, tensor: torch.Tensor) -> None:
        original(self, read_item, tensor)
        finished(tensor.nbytes)

    return commit_tensor
