"""Batches: the job's data sets, and which of their samples are a part of a grain.

Making a data set's indices may take hours, in code that knows nothing of interruptions. So a thread does it, and goes
on while its rank answers what happens to others. Samples of training are read ahead (``read_ahead``): which a grain
has depends on nothing but its step and its number, so it does not matter who reads them, and when.
"""

from __future__ import annotations

import argparse
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_elastic.adaptor.layers import documents
from megatron_elastic.adaptor.model import groups
from megatron_elastic.adaptor.samples import indices
from megatron_elastic.adaptor.samples.order import in_order, order_of
from megatron_elastic.adaptor.samples.read_ahead import ReadAhead
from megatron_elastic.adaptor.samples.sample import Reader, Samples, collate
from megatron_elastic.adaptor.samples.worker import Batch, Wish, Worker
from megatron_elastic.cluster.title import entitle
from megatron_elastic.config import UsageError
from megatron_elastic.device.device import Device
from megatron_elastic.faults.odometer import Odometer
from megatron_elastic.layout import Layout, Part
from megatron_elastic.lock import locked
from megatron_elastic.observe.dials import DATA
from megatron_elastic.pipeline.route import Leg

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
DatasetsProvider = Callable[[argparse.Namespace], tuple[Any, Any, Any]]
"""(train, validation, test) map-style data sets; sample i is a dict of tensors. Validation may be a list of them."""


_LOOK = 0.02
"""Seconds between two looks whether data sets are made."""


class Batches:
    """Batches of one rank. The data sets are made once, when it first gets a part of the model.

    Args:
        args: Megatron's flags.
        provider: makes the data sets.
        odometer: notes that it comes further.
        check: raises if a wait must end.
        device: where batches are needed.
        rank: this one.
    """

    def __init__(
        self, args: argparse.Namespace, provider: DatasetsProvider, odometer: Odometer, check: Callable[[], None],
        device: Device, rank: int,
    ) -> None:
        self.training: Reader | None = None
        self.evaluation: dict[str, list[tuple[str, Reader]]] = {"validation": [], "test": []}
        """What training does not see, by what it is for: data sets with their names."""
        self._args = args
        self._size = args.micro_batch_size  # while a part of one is computed, Megatron's flag may say the part's
        self._provider = provider
        self._odometer = odometer
        self._check = check
        self._device = device
        self._rank = rank
        self._making: _Making | None = None
        self._ahead = ReadAhead(self._training, device.bring, getattr(args, "num_workers", 0), self._begin, check)

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
        training, *others = making.result.result()
        for kind, data in zip(self.evaluation, others, strict=True):
            whole = takes_all(self._args, kind)
            self.evaluation[kind] = [(name, self._reader(of, whole)) for name, of in _named(kind, data)]
        self.training = None if training is None else self._reader(training)

    def settle(self) -> None:
        """Wait until no data set is being made: meanwhile this rank's groups are not those of a layout."""
        if self._making is not None:
            with self._odometer.through(self._making.thread), self._odometer.dials.at(DATA):
                while not self._making.ended.wait(_LOOK):
                    self._check()

    def _reader(self, data: Samples, whole: bool = False) -> Reader:
        return Reader(data, self._args.seed, in_order if whole else order_of(self._args, len(data)))

    def _make(self) -> tuple[Any, Any, Any]:
        try:
            indices.install()
            with groups.alone(), _one_first(Path(os.environ["MEGATRON_ELASTIC_RUN_DIR"])):
                return self._provider(self._args)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise UsageError(f"the data's index cannot be written ({error}): make room there, or let it be written "
                             "elsewhere (Megatron-LM's --data-cache-path)") from error

    def expect(
        self, layout: Layout, rank: int, steps: Iterable[tuple[int, Iterable[Leg]]], asking: Collection[int]
    ) -> None:
        """Read ahead, from now on, what a rank computes in these steps: of each the number of its first sample, and
        what is done. ``asking``: the chunks that want samples, as far as is known.
        """
        self._ahead.want(
            (self._wish(first, layout, rank, leg.op.chunk, leg.part)
             for first, legs in steps for leg in legs if leg.op.kind == "forward"),
            asking,
        )  # fmt: skip

    def take(self, first: int, layout: Layout, rank: int, chunk: int, part: Part) -> Mapping[str, torch.Tensor]:
        """Samples for training that a rank computes of part of a grain, on its device: the global batch that begins
        with sample ``first`` is consecutive, and so are its grains, and in these the micro-batches.
        """
        return self._ahead.take(self._wish(first, layout, rank, chunk, part)).wait()

    def read(
        self, data: Samples, first: int, layout: Layout, rank: int, chunk: int, part: Part
    ) -> Mapping[str, torch.Tensor]:
        """The same of other data, read at once."""
        return self._device.bring(_read(data, self._wish(first, layout, rank, chunk, part))).wait()

    def close(self) -> None:
        """Read nothing more."""
        self._ahead.close()

    def _wish(self, begin: int, layout: Layout, rank: int, chunk: int, part: Part) -> Wish:
        piece, number = self._size // layout.samples, part.grain * layout.batches + layout.batch_of(rank)
        return Wish(chunk, begin + number * self._size + part.start * piece, part.size * piece)

    def _training(self, wish: Wish) -> Batch:
        assert self.training is not None
        return _read(self.training, wish)

    def _begin(self) -> Worker:
        return Worker(self._training, lambda: entitle(f"rank {self._rank} (reads samples)"))


def _read(data: Samples, wish: Wish) -> Batch:
    return collate([documents.unpacked(data[number]) for number in range(wish.first, wish.first + wish.samples)])


def takes_all(args: argparse.Namespace, kind: str) -> bool:
    """Whether an evaluation takes all samples of this kind."""
    return kind == "validation" and bool(getattr(args, "full_validation", False))


def _named(kind: str, data: Any) -> list[tuple[str, Samples]]:
    """Data sets of one kind; each of ``--multiple-validation-sets`` has its number."""
    if isinstance(data, list):
        return [(f"{kind}-{index}", each) for index, each in enumerate(data)]
    return [] if data is None else [(kind, data)]


class _Making:
    """Data sets on their way, in a thread of their own."""

    def __init__(self, make: Callable[[], tuple[Any, Any, Any]]) -> None:
        self.result: Future[tuple[Any, Any, Any]] = Future()
        self.ended = threading.Event()
        self._make = make
        thread = threading.Thread(target=self._run, name="data", daemon=True)
        thread.start()
        self.thread = thread.native_id or 0

    def _run(self) -> None:
        try:
            self.result.set_result(self._make())
        except BaseException as error:
            self.result.set_exception(error)
        self.ended.set()


@contextmanager
def _one_first(run_dir: Path) -> Iterator[None]:
    """Around making a job's data sets: the first rank that comes does it alone, so that the others find the indices.

    Where ranks do not share what the first one makes, they share no more than the order.
    """
    made = run_dir / "data.made"
    with locked(run_dir / "data.lock", "the data sets' indices"):
        if not made.exists():
            yield
            made.touch()
            return
    yield
