"""``megatron.core.optimizer.distrib_optimizer``: where its state lies in checkpoints of Megatron's default format.

Megatron calls it ``dp_reshardable``. What a model-parallel rank has of weights and moments lies there in flat tensors,
one for each *bucket* of its gradients: its parameters without names, in the order in which a backward pass gets to
them, each at a multiple of 64 elements, and those of experts that are divided among ranks apart. So it means something
to ranks with the same parameters only; how many there are of each, and how large their buckets were, is all the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel

from megatron_elastic.adaptor.layers.router import is_bias
from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout, joined, way

_NAME = re.compile(r"(?P<bucket>(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<rank>\d+)\."
                   r"gbuf_idx_(?P<buffer>\d+)\.dtype_.*\.bucket_idx_(?P<index>\d+))\.param")
_ALIGN = 64


class Place(NamedTuple):
    """Where a parameter is in a bucket of ``size`` elements."""

    bucket: str
    size: int
    start: int

    def tensor(self, part: str, data: torch.Tensor) -> ShardedTensor:
        """A part of the parameter's state, to be loaded into ``data``, which is contiguous. For each rank that asks."""
        flat = data.view(-1)
        return ShardedTensor(
            f"{self.bucket}.{part}", flat, flat.dtype, tuple(flat.shape), (self.size,), (self.start,),
            axis_fragmentations=None, replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )  # fmt: skip


def has_some(names: Collection[str]) -> bool:
    """Whether a checkpoint with tensors of these names is of this format."""
    return any(_NAME.fullmatch(name) for name in names)


def check_sizes(args: Any, layout: Layout) -> None:
    """Raise UsageError if the job that saved, with these flags, had other model-parallel sizes."""
    theirs = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size)
    chunks = args.virtual_pipeline_model_parallel_size or 1
    through = layout.through(layout.pipeline_size)
    if theirs != (layout.tp, layout.pipeline_size, layout.ep) or through != joined(way("loop", theirs[1], chunks)):
        raise _misfit(f"TP{theirs[0]} x PP{theirs[1]} x EP{theirs[2]}, {chunks} chunks a stage, had it")


def find(
    models: Sequence[GPTModel], layout: Layout, rank: int, saved: Mapping[str, ShardedTensor]
) -> list[dict[str, Place]]:
    """The places of a stage's parameters, by name, for each chunk; ``saved``: what is in the checkpoint, by name.

    Raises UsageError if it was saved with other parameters.
    """
    places: list[dict[str, Place]] = [{} for _ in models]
    for apart in (False, True):
        buffers = iter(_buffers(saved, _group(layout.stage_of(rank), apart), apart))
        for chunk, model in enumerate(models):
            members = [(name, p.numel()) for name, p in model.named_parameters()
                       if not is_bias(name) and getattr(p, "allreduce", True) != apart]
            if members:
                places[chunk].update(_lay_out(members, next(buffers, [])))
    return places


def _group(stage: int, apart: bool) -> int:
    """Megatron's number of the ranks that have the same parameters as this one."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    index: int = parallel_state.get_tensor_model_parallel_rank()
    if not apart:
        return stage * tp + index
    ep = parallel_state.get_expert_model_parallel_world_size()
    return (stage * ep + parallel_state.get_expert_model_parallel_rank()) * tp + index


def _buffers(saved: Mapping[str, ShardedTensor], group: int, apart: bool) -> list[list[tuple[str, int]]]:
    """Names and sizes of a group's buckets, in the order of the backward pass, for each chunk that has some."""
    found: dict[int, dict[int, tuple[str, int]]] = {}
    for name, tensor in saved.items():
        match = _NAME.fullmatch(name)
        if match and int(match["rank"]) == group and (match["optimizer"] == "1") == apart:
            buckets = found.setdefault(int(match["buffer"]), {})
            buckets[int(match["index"])] = match["bucket"], tensor.global_shape[0]
    return [[bucket for _, bucket in sorted(buckets.items())] for _, buckets in sorted(found.items())]


def _lay_out(members: Sequence[tuple[str, int]], buckets: Sequence[tuple[str, int]]) -> Iterator[tuple[str, Place]]:
    """Each parameter, of so many elements, with its place. A bucket ends where the next parameter has no room.

    Of a tied embedding, which has a bucket of its own, the one before it is filled up.
    """
    left = iter(buckets)
    bucket, size, end = "", 0, 0
    for name, count in reversed(members):
        start = _aligned(end)
        if start + count > size:
            _check_full(size, end)
            bucket, size = next(left, ("", 0))
            start = 0
        if count > size:
            raise _misfit("others had it")
        yield name, Place(bucket, size, start)
        end = start + count
    _check_full(size, end)
    if next(left, None) is not None:
        raise _misfit("others had it")


def _check_full(size: int, end: int) -> None:
    if size not in (end, _aligned(end)):
        raise _misfit("others had it")


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def _misfit(whose: str) -> UsageError:
    return UsageError(
        f"--load: the optimizer's state lies there as {whose}, in Megatron's default format, which ranks with other "
        "parameters cannot read: begin with the flags of the job that saved it, or with --finetune, or let Megatron "
        "save with --dist-ckpt-optim-fully-reshardable"
    )
