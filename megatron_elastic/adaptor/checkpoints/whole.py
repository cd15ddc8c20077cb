"""Whole: whether a folder holds a checkpoint of Megatron's torch_dist format, all of it.

Looked at before anything else is made of it. What is cut short is found by the index of the checkpoint (``.metadata``),
which says how long each file must be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.checkpoints.folder import COMPLETE, older
from megatron_elastic.adaptor.releases import running
from megatron_elastic.cluster.rank.control import Interrupted, JobStopped
from megatron_elastic.config import UsageError

_COMMON = "common.pt"
_INDEX = ".metadata"
_CONVERT = (
    "{flag}: {folder} is in the format {name}, and --elastic reads torch_dist: run pretrain_gpt.py without --elastic, "
    "with the flags of the job that saved it and --ckpt-format {name} --load {directory} --ckpt-convert-format "
    "torch_dist --ckpt-convert-save NEW --dist-ckpt-optim-fully-reshardable, and give --load NEW/torch_dist"
)
_FSDP = (
    " (on GPUs, which --use-torch-fsdp2 needs; what --use-megatron-fsdp has saved, fsdp_dtensor, looks the same, and "
    "Megatron-LM 0.16.1 cannot convert it)"
)


def check(folder: Path, flag: str, files: bool = True) -> None:
    """Raise UsageError, naming ``flag``, unless the folder holds a whole checkpoint in a format that can be read.

    ``files``: whether each is looked at. There are as many as ranks that saved, so one rank does it for all.
    """
    _check_format(folder, flag)
    if not files:
        return
    with reading(folder, flag):
        stored = FileSystemReader(folder).read_metadata().storage_data
        ends: dict[str, int] = defaultdict(int)
        for part in stored.values():
            ends[part.relative_path] = max(ends[part.relative_path], part.offset + part.length)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    for name, end in sorted(ends.items()):
        if name not in sizes:
            raise UsageError(f"{flag}: {folder} lacks the file {name}; {older(folder)}")
        if sizes[name] < end:
            raise UsageError(
                f"{flag}: {folder / name} was cut short: it has {sizes[name]} bytes of {end}; {older(folder)}"
            )


@contextmanager
def reading(folder: Path, flag: str) -> Iterator[None]:
    """Something is read from a checkpoint. Raises UsageError for all that goes wrong with it."""
    try:
        yield
    except (Interrupted, JobStopped, UsageError):
        raise
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"{flag}: {folder} cannot be loaded; give the flags of the model that was saved, or, if it is "
            f"damaged: {older(folder)} ({why})"
        ) from error


def _says_inside(folder: Path) -> bool:
    """Whether what a checkpoint says besides tensors is among them; what cannot be read does not."""
    try:
        names = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception:
        return False
    return any(name.startswith("common_state") for name in names)


def _check_format(folder: Path, flag: str) -> None:
    if not folder.is_dir():
        raise UsageError(f"{flag}: there is no {folder}; {older(folder)}")
    names = {path.name for path in folder.iterdir()}
    if COMPLETE in names and {_COMMON, _INDEX} <= names:
        return
    if COMPLETE in names and _INDEX in names and _says_inside(folder):
        if targets.COMMON_INSIDE.there:
            return
        raise UsageError(
            f"{flag}: {folder} was saved by Megatron 0.19 or later without --elastic, and Megatron {running()} cannot "
            "read it: go on with 0.19 there; what it saves with --elastic, both can read"
        )
    for name, found in (("torch", any(name.startswith("mp_rank_") for name in names)),
                        ("torch_dcp", _INDEX in names and not names & {COMPLETE, _COMMON})):  # fmt: skip
        if found:
            how = _CONVERT.format(flag=flag, folder=folder, name=name, directory=folder.parent)
            raise UsageError(how + _FSDP * (name == "torch_dcp"))
    missing = [name for name in (COMPLETE, _COMMON, _INDEX) if name not in names]
    raise UsageError(f"{flag}: {folder} is no complete checkpoint (no {', no '.join(missing)}); {older(folder)}")
