"""Batches: the job's data sets, and which of their samples are a part of a grain."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_elastic.adaptor.dataset import build_once, collate
from megatron_elastic.adaptor.model import groups
from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout, Part

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
DatasetsProvider = Callable[[argparse.Namespace], tuple[Any, Any, Any]]
"""(train, validation, test) map-style data sets; sample i is a dict of tensors."""


class Batches:
    """Batches of one rank. The data sets are made once, when it first gets a part of the model."""

    def __init__(self, args: argparse.Namespace, provider: DatasetsProvider) -> None:
        self.training: Any = None
        self.validation: Any = None
        self.test: Any = None
        self._args = args
        self._provider = provider

    def open(self) -> None:
        """Have the data sets. Idempotent. Raises UsageError if there is no room for their indices."""
        if self.training is None:
            try:
                with groups.alone(), build_once(Path(os.environ["MEGATRON_ELASTIC_RUN_DIR"])):
                    self.training, self.validation, self.test = self._provider(self._args)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                raise UsageError(f"the data's index cannot be written ({error}): make room there, or let it be written "
                                 "elsewhere (Megatron-LM's --data-cache-path)") from error

    def read(
        self, data: Sequence[dict[str, Any]], iteration: int, layout: Layout, part: Part
    ) -> Mapping[str, torch.Tensor]:
        """Samples of part of a grain: the global batch of an iteration is consecutive, and so are its grains."""
        size = self._args.global_batch_size // layout.num_grains
        piece = size // layout.samples
        first = iteration * self._args.global_batch_size + part.grain * size + part.start * piece
        return collate([data[i] for i in range(first, first + part.size * piece)])
