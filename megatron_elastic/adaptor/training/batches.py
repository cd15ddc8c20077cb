"""Batches: the job's data sets, and which of their samples are a part of a grain.

Making a data set's indices may take hours, in code that knows nothing of interruptions. So a thread does it, and goes
on while its rank answers what happens to others.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from megatron_elastic.adaptor.dataset import build_once, collate
from megatron_elastic.adaptor.model import groups
from megatron_elastic.config import UsageError
from megatron_elastic.faults.odometer import Odometer
from megatron_elastic.layout import Layout, Part

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
DatasetsProvider = Callable[[argparse.Namespace], tuple[Any, Any, Any]]
"""(train, validation, test) map-style data sets; sample i is a dict of tensors."""


_LOOK = 0.02
"""Seconds between two looks whether data sets are made."""


class Batches:
    """Batches of one rank. The data sets are made once, when it first gets a part of the model.

    Args:
        args: Megatron's flags.
        provider: makes the data sets.
        odometer: notes that it comes further.
        check: raises if a wait must end.
    """

    def __init__(
        self, args: argparse.Namespace, provider: DatasetsProvider, odometer: Odometer, check: Callable[[], None]
    ) -> None:
        self.training: Any = None
        self.validation: Any = None
        self.test: Any = None
        self._args = args
        self._size = args.micro_batch_size  # while a part of one is computed, Megatron's flag may say the part's
        self._provider = provider
        self._odometer = odometer
        self._check = check
        self._making: _Making | None = None

    def open(self) -> None:
        """Have the data sets. Idempotent. Raises UsageError if there is no room for their indices.

        If it is interrupted they are made all the same, and the next call has them.
        """
        if self.training is not None:
            return
        if self._making is None:
            self._making = _Making(self._make)
        self.settle()
        making, self._making = self._making, None
        self.training, self.validation, self.test = making.result.result()

    def settle(self) -> None:
        """Wait until no data set is being made: meanwhile this rank's groups are not those of a layout.

        A rank comes further as long as that uses a processor.
        """
        making = self._making
        while making is not None and not making.ended.wait(_LOOK):
            if making.works():
                self._odometer.moved()
            self._check()

    def _make(self) -> tuple[Any, Any, Any]:
        try:
            with groups.alone(), build_once(Path(os.environ["MEGATRON_ELASTIC_RUN_DIR"])):
                return self._provider(self._args)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise UsageError(f"the data's index cannot be written ({error}): make room there, or let it be written "
                             "elsewhere (Megatron-LM's --data-cache-path)") from error

    def read(
        self, data: Sequence[dict[str, Any]], iteration: int, layout: Layout, rank: int, part: Part
    ) -> Mapping[str, torch.Tensor]:
        """Samples that a rank computes of part of a grain: an iteration's global batch is consecutive, and so are its
        grains, and in these the micro-batches.
        """
        size = self._size
        piece, number = size // layout.samples, part.grain * layout.batches + layout.batch_of(rank)
        first = iteration * self._args.global_batch_size + number * size + part.start * piece
        return collate([data[i] for i in range(first, first + part.size * piece)])


class _Making:
    """Data sets on their way, in a thread of their own."""

    def __init__(self, make: Callable[[], tuple[Any, Any, Any]]) -> None:
        self.result: Future[tuple[Any, Any, Any]] = Future()
        self.ended = threading.Event()
        self._make = make
        self._clock: int | None = None
        """Of the thread's processor time, once it runs."""
        self._used = 0.0
        threading.Thread(target=self._run, name="data", daemon=True).start()

    def works(self) -> bool:
        """Whether it has used a processor since the last call."""
        before = self._used
        if self._clock is not None:
            with contextlib.suppress(OSError):  # it has just ended
                self._used = time.clock_gettime(self._clock)
        return self._used > before

    def _run(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self.result.set_result(self._make())
        except BaseException as error:
            self.result.set_exception(error)
        self.ended.set()
