"""Dataset: real text in Megatron's indexed format, with everything training has to know about it beside it.

``prepare`` writes a folder with ``data.bin``, ``data.idx`` (Megatron's), ``tokenizer.json`` (Hugging Face's
``tokenizers``) and ``data.json`` (``Prepared``). ``build_datasets`` gives Megatron's GPT datasets over such a folder.
Torch and Megatron are imported by the functions that need them, so that flags can be checked without.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_elastic.config import UsageError
from megatron_elastic.lock import locked
from megatron_elastic.support import check_uncut

if TYPE_CHECKING:
    from rich.console import Console

EOD = "<|endoftext|>"
_TRAINING_BYTES = 4_000_000
"""The tokenizer is trained on an even sample of about this many bytes: more text changes the merges little."""
_SKIPPED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", ".git"})
"""Folders of the standard library that are not text worth learning from."""
_SUFFIXES = (".idx", ".bin")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What ``data.json`` says about a prepared data set."""

    vocab_size: int
    eod: int
    documents: int
    tokens: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Location:
    """An indexed data set on disk: Megatron's path prefix (``.bin`` and ``.idx`` are appended) and its description."""

    prefix: Path
    prepared: Prepared | None


def locate(data_path: str | Path) -> Location:
    """Find the data set that ``--data-path`` names: a path prefix, or a folder written by ``prepare``.

    What is both means the prefix: Megatron's cache of indices can make a folder of that name beside the data.
    Raises UsageError when there is none, or when its description cannot be read.
    """
    path = Path(data_path)
    is_prefix = all(Path(f"{path}{suffix}").is_file() for suffix in _SUFFIXES)
    prefix = path / "data" if path.is_dir() and not is_prefix else path
    for suffix in _SUFFIXES:
        if not Path(f"{prefix}{suffix}").is_file():
            raise UsageError(f"--data-path {data_path}: {prefix}{suffix} does not exist; "
                             f"write it with: megatron-elastic data prepare {path}")
    check_uncut("--data-path", str(prefix))
    description = prefix.parent / "data.json"
    if prefix.name != "data" or not description.is_file():
        return Location(prefix.resolve(), None)
    try:
        prepared = Prepared(**json.loads(description.read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--data-path {data_path}: {description} cannot be read ({error}); "
                         f"write it again with: megatron-elastic data prepare {path}") from None
    return Location(prefix.resolve(), prepared)


# ---- writing -------------------------------------------------------------------------------


def standard_library() -> list[Path]:
    """The source files of the running Python's standard library, without its tests, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p for p in root.rglob("*.py") if _SKIPPED.isdisjoint(p.relative_to(root).parts[:-1]))


def text_files(paths: Iterable[Path]) -> tuple[list[Path], int]:
    """``paths`` with folders replaced by the files below them, sorted; and how many files are left out, as they are in
    hidden folders there or in ``__pycache__``. Raises UsageError if one does not exist.
    """
    files: list[Path] = []
    hidden = 0
    for path in paths:
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.is_file())
            shown = [p for p in below if not any(map(_is_hidden, p.relative_to(path).parts[:-1]))]
            files += shown
            hidden += len(below) - len(shown)
        elif path.is_file():
            files.append(path)
        else:
            raise UsageError(f"--text {path} does not exist; name a text file or a folder of text files")
    return files, hidden


def _is_hidden(folder: str) -> bool:
    return folder.startswith(".") or folder == "__pycache__"


def prepare(out: Path, text: Sequence[Path] = (), vocab_size: int = 4096) -> Prepared:
    """Train a byte-level BPE on ``text`` and write it and the encoded text to the folder ``out``.

    ``text`` are files and folders (default: the standard library's sources); every file is one document, closed by an
    end-of-document token. The same input gives the same bytes. Files are written beside and renamed when all of them
    are there, so jobs go on with the text that was there before; ``data.json`` comes last, so a folder that has it is
    complete. Raises UsageError for input that cannot work.
    """
    from rich.console import Console

    if vocab_size < 257:
        raise UsageError(f"--vocab-size must be at least 257 (256 bytes and end-of-document), got {vocab_size}")
    console = Console(stderr=True)
    files, hidden = text_files(text) if text else (standard_library(), 0)
    documents = list(_read(files))
    if not documents:
        raise UsageError(f"--text: no text in {len(files)} files (binary and empty files are left out, and {hidden} in "
                         "hidden folders or __pycache__)")
    size = sum(map(len, documents))
    console.print(f"{len(documents)} documents, {size / 1e6:.1f} MB of text"
                  + ("" if text else " (the standard library's sources)"))
    if text:
        _tell_left_out(console, hidden, len(files) - len(documents))
    try:
        out.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=out))
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; name a folder that can be written to") from None
    try:
        prepared = _make(part, documents, vocab_size, console)
        _put(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    console.print(f"{prepared.tokens} tokens in {out} (vocabulary {prepared.vocab_size}, {prepared.dtype})")
    return prepared


def _tell_left_out(console: Console, hidden: int, unread: int) -> None:
    for count, why in ((hidden, "in hidden folders or __pycache__"), (unread, "binary or empty")):
        if count:
            console.print(f"left out: {count} files, {why}")


def _make(part: Path, documents: list[str], vocab_size: int, console: Console) -> Prepared:
    """Write all files to the folder ``part``."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    sample = _sample(documents)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        training = progress.add_task(f"tokenizer on {sum(map(len, sample)) / 1e6:.1f} MB", total=len(sample))
        tokenizer = _train(progress.track(sample, task_id=training), vocab_size)
        found = tokenizer.get_vocab_size()
        if found != vocab_size:
            console.print(f"the text holds only {found} of {vocab_size} tokens; the vocabulary has {found}")
        tokenizer.save(str(part / "tokenizer.json"))
        writing = progress.add_task("encode and write", total=len(documents))
        prepared = _write(part, tokenizer, progress.track(documents, task_id=writing))
    (part / "data.json").write_text(json.dumps(asdict(prepared), indent=2) + "\n")
    return prepared


def _put(part: Path, out: Path) -> None:
    """Put all files of ``part`` where they belong. Without ``data.idx``, which goes first, nobody finds any text."""
    for name in ("data.idx", "data.json"):
        (out / name).unlink(missing_ok=True)
    shutil.rmtree(out / "cache", ignore_errors=True)  # an index of other text is found by name, not by content
    for name in ("tokenizer.json", "data.bin", "data.idx", "data.json"):
        os.replace(part / name, out / name)


def _read(files: Iterable[Path]) -> Iterator[str]:
    """The files' texts, without binary and empty ones; bytes that are no UTF-8 are replaced."""
    for path in files:
        content = path.read_bytes()
        if content and b"\0" not in content:
            yield content.decode("utf-8", errors="replace")


def _sample(documents: list[str]) -> list[str]:
    """Every n-th document, about ``_TRAINING_BYTES`` of them."""
    stride = max(1, round(sum(map(len, documents)) / _TRAINING_BYTES))
    return documents[::stride]


def _train(documents: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[EOD], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer


def _write(out: Path, tokenizer: Any, documents: Iterable[str]) -> Prepared:
    """Encode ``documents`` to ``data.bin`` and ``data.idx`` in the folder ``out``."""
    _prepare_megatron()
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocab_size = tokenizer.get_vocab_size()
    eod = tokenizer.token_to_id(EOD)
    dtype = DType.optimal_dtype(vocab_size)
    builder = IndexedDatasetBuilder(str(out / "data.bin"), dtype=dtype)
    count = tokens = 0
    for text in documents:
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, eod]
        builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(ids)])
        count, tokens = count + 1, tokens + len(ids)
    builder.finalize(str(out / "data.idx"))
    return Prepared(vocab_size=vocab_size, eod=eod, documents=count, tokens=tokens, dtype=numpy.dtype(dtype).name)


def _prepare_megatron() -> None:
    """Let Megatron be imported as training does, so that preparing data needs no GPU either."""
    from megatron_elastic.device import stand_in

    if "megatron.core" not in sys.modules:
        stand_in.install()


# ---- reading -------------------------------------------------------------------------------


class _Vocabulary:
    """The part of a tokenizer that Megatron's datasets ask for. Has no padding token: samples are full."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.unique_identifiers = {"class": "BPE", "vocab_size": vocab_size, "eod": eod}


def build_datasets(
    data_path: str | Path, *, split: str, seq_length: int, seed: int, samples: tuple[int, int, int],
    vocab_size: int | None = None,
) -> tuple[Any, Any, Any]:
    """Build the training, validation and test ``GPTDataset`` over one indexed data set.

    Sample i of each is a dict of ``tokens``, ``labels``, ``loss_mask`` and ``position_ids``, each of ``seq_length``.
    ``split`` weighs the documents of the three parts ("949,50,1"); ``samples`` says how many are needed of each (texts
    are repeated as needed); a part that nobody needs samples of may be None. Which samples come out depends on these
    arguments only, never on ranks. The index goes to ``cache/`` beside the data: rank 0 builds it and the others
    wait, so with torch.distributed up every rank must call this. ``vocab_size`` is for data without ``data.json``;
    their last token is then taken for end-of-document. Raises UsageError when a part has too little text.
    """
    _prepare_megatron()
    import torch.distributed
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    location = locate(data_path)
    vocabulary = _vocabulary(location, vocab_size)
    cache = location.prefix.parent / "cache"
    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, blend=([str(location.prefix)], None), split=split,
        path_to_cache=str(cache), tokenizer=vocabulary, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False,
    )

    text = GPTDataset.build_low_level_dataset(str(location.prefix), config)
    parts = [_documents(text, config, index, count) for index, count in enumerate(samples)]

    def build() -> tuple[Any, Any, Any]:
        prefix = text.path_prefix
        train, valid, test = (
            None if documents is None else GPTDataset(text, prefix, documents, count or None, part, config)
            for part, documents, count in zip(Split, parts, samples, strict=True)
        )
        return train, valid, test

    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not distributed or torch.distributed.get_rank() == 0:
        cache.mkdir(exist_ok=True)
        with locked(cache / "lock", "indices of the data"):
            datasets = build()
    if distributed:
        torch.distributed.barrier()
        if torch.distributed.get_rank() != 0:
            datasets = build()
    return datasets


def _vocabulary(location: Location, vocab_size: int | None) -> _Vocabulary:
    if location.prepared is not None:
        return _Vocabulary(location.prepared.vocab_size, location.prepared.eod)
    if vocab_size is None:
        raise UsageError(f"--vocab-size is needed: there is no data.json beside {location.prefix}.idx")
    return _Vocabulary(vocab_size, vocab_size - 1)


def _documents(text: Any, config: Any, index: int, samples: int) -> Any:
    """Numbers of the documents in one part of the split; None if they hold no sample and none is needed."""
    import numpy
    from megatron.core.datasets.utils import Split

    bounds = config.split_matrix[index]
    first, last = (0, 0) if bounds is None else (round(edge * len(text.sequence_lengths)) for edge in bounds)
    documents = numpy.arange(first, last, dtype=numpy.int32)
    tokens = int(text.sequence_lengths[documents].sum())
    if tokens > config.sequence_length:
        return documents
    if samples == 0:
        return None
    raise UsageError(f"--split {config.split}: the {Split(index).name} part has {tokens} tokens in {len(documents)} "
                     f"documents, too few for one sample of --seq-length {config.sequence_length}; " + (
                         "give it a larger share or more text, or a lower --seq-length" if index == Split.train.value
                         else "give it a larger share, or use --eval-iters 0 if it is not needed"))
