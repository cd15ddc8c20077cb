"""``megatron.core.datasets``: indices of data sets, which Megatron keeps in a cache beside the data.

Megatron lets rank 0 build an index and takes what lies there for it, whatever that is. Here any rank may come first, on
any node, so whoever finds none builds it while the others of that cache wait: one a node where each has a cache of its
own, one in all where they share it. It is built beside and renamed, so that none is cut short. One that is, all the
same, or that was made of other data, is built anew. And data that have no text for a part of the split are refused, for
which Megatron would look for ever, and data that were cut short, which it finds out when it comes to what is missing.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from megatron_elastic.adaptor import targets
from megatron_elastic.config import UsageError
from megatron_elastic.lock import locked
from megatron_elastic.support import check_uncut

_logger = logging.getLogger(__name__)
_SUFFIXES = (".idx", ".bin")


def install() -> None:
    """Have indices built so. Idempotent."""
    targets.INDICES.wrap(_of_text)
    targets.BLEND_INDICES.wrap(_of_blend)


@dataclass(frozen=True, slots=True)
class Index:
    """One index in a cache.

    Attributes:
        folder: the cache.
        base: what the names of its files begin with.
        arrays: what they end with, beside the description.
        sources: files of which it is made; none where its name says it all.
    """

    folder: Path
    base: str
    arrays: tuple[str, ...]
    sources: tuple[Path, ...]

    @property
    def files(self) -> list[Path]:
        """All that Megatron looks for; the description last."""
        return [self.folder / f"{self.base}-{name}" for name in (*self.arrays, "description.txt")]

    @property
    def _record(self) -> Path:
        """Which sources it was made of: size and time of each."""
        return self.folder / f"{self.base}-sources.json"

    def complete(self) -> bool:
        """Whether Megatron finds it."""
        return all(path.is_file() for path in self.files)

    def problem(self) -> str | None:
        """What is wrong with it, if it is there."""
        for path in self.files[:-1]:
            try:
                numpy.load(path, mmap_mode="r")
            except (OSError, ValueError, EOFError) as error:
                return f"{path.name} is cut short or damaged ({error})"
        try:
            recorded = json.loads(self._record.read_text())
        except (OSError, ValueError):
            # Of Megatron alone, or of an earlier version: as make has it.
            made = min(path.stat().st_mtime_ns for path in self.files)
            newer = [path.name for path in self.sources if path.stat().st_mtime_ns > made]
            return f"{newer[0]} is newer than it" if newer else None
        return None if recorded == self._state() else "it was made of other data, or they have changed since"

    def keep(self, folder: Path) -> None:
        """Put what was built in another folder of the same file system here. The description comes last."""
        self._record.with_name(f"{folder.name}.json").write_text(json.dumps(self._state()))
        os.replace(self._record.with_name(f"{folder.name}.json"), self._record)
        for path in self.files:
            os.replace(folder / path.name, path)

    def remove(self) -> None:
        """Take it out of the cache; the description, without which Megatron finds nothing, comes first."""
        for path in (*reversed(self.files), self._record):
            path.unlink(missing_ok=True)

    def _state(self) -> dict[str, list[int]]:
        return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in self.sources}


def _of_text(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Megatron's method that builds or loads the three indices of a ``GPTDataset``."""

    def build(data: Any) -> Any:
        _refuse_no_text(data)
        return original(data)

    def build_or_load(data: Any) -> Any:
        arrays = tuple(f"{name}_index.npy" for name in ("document", "sample", "shuffle"))
        prefix = getattr(data.dataset, "path_prefix", None)
        sources = tuple(path for suffix in _SUFFIXES if prefix and (path := Path(f"{prefix}{suffix}")).is_file())
        if sources:
            check_uncut("data", str(prefix))
        cache = data.config.path_to_cache
        if cache is None and prefix:
            cache = os.path.join(prefix, "cache", f"{type(data).__name__}_indices")
        return _found_or_built(data, build, original, cache, data.index_split.name, arrays, sources)

    return build_or_load


def _of_blend(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The one of a ``BlendedDataset``: its index follows from its description."""

    def build(data: Any) -> Any:
        arrays = ("dataset_index.npy", "dataset_sample_index.npy")
        return _found_or_built(data, original, original, data.config.path_to_cache, data.split.name, arrays, ())

    return build


def _found_or_built(
    data: Any, build: Callable[[Any], Any], load: Callable[[Any], Any], cache: str | None, split: str,
    arrays: tuple[str, ...], sources: tuple[Path, ...],
) -> Any:
    """What ``load`` finds in the cache, where ``build`` has put it if need be."""
    if _deferred(data.config):
        return load(data)
    if not cache or getattr(data.config, "mock", False):
        return build(data)
    index = Index(Path(cache), f"{data.unique_description_hash}-{type(data).__name__}-{split}", arrays, sources)
    if not index.complete() or index.problem() is not None:
        index.folder.mkdir(parents=True, exist_ok=True)
        with locked(index.folder / "indices.lock", f"the index {index.base}"):
            _build(data, build, index)
    return load(data)


def _deferred(config: Any) -> bool:
    """Whether indices are taken for there, and are not looked at before a sample is read."""
    return bool(getattr(config, "fast_cache_load", False) or getattr(config, "defer_npy_index_mmap", False))


def _build(data: Any, build: Callable[[Any], Any], index: Index) -> None:
    """Build an index, unless another has meanwhile. Nobody else does it in this cache."""
    if index.complete():
        problem = index.problem()
        if problem is None:
            return
        _logger.warning("the index %s in %s is built anew: %s", index.base, index.folder, problem)
        index.remove()
    with _folder_beside(index) as folder:
        config = data.config
        data.config = copy.copy(config)
        data.config.path_to_cache = str(folder)
        begun = time.monotonic()
        try:
            build(data)
        finally:
            data.config = config
        index.keep(folder)
        _logger.info("the index %s was built in %.1f s", index.base, time.monotonic() - begun)


@contextlib.contextmanager
def _folder_beside(index: Index) -> Iterator[Path]:
    """A folder in the cache to build in. Of who was killed there, what is left is taken out."""
    folder = index.folder / f"{index.base}.part"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_no_text(data: Any) -> None:
    """Raise UsageError for a part of the split that has no token, of which Megatron would count epochs for ever."""
    lengths = data.dataset.sequence_lengths
    if len(data.indices) and int(lengths[data.indices].sum()):
        return
    split = data.index_split.name
    part = {"valid": "validation"}.get(split, split)
    where = f"--split {data.config.split}: the {part} part" if data.config.split else f"the {part} data"
    otherwise = "" if split == "train" else ", or leave it out (0 in --split, --eval-iters 0)"
    raise UsageError(f"{where} has {len(data.indices)} of the {len(lengths)} documents of {data.dataset_path}, and no "
                     f"text: give it a larger share or more documents{otherwise}")
