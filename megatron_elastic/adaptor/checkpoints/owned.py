"""Owned: what one rank writes of a checkpoint: weights and optimizer state of the slices that it owns.

A slice is a run of a unit's flat tensor, and a checkpoint has Megatron's tensors, any boxes of them. So a slice is
written as it lies, as the boxes that it makes in each tensor; all ranks write, and none collects anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel

from megatron_elastic.adaptor.checkpoints import common
from megatron_elastic.adaptor.layers.router import is_bias
from megatron_elastic.adaptor.model.units import unit_parameters
from megatron_elastic.layout import Layout
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.store import StateStore

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and size in each dimension."""


def owned(
    models: Sequence[GPTModel], layout: Layout, rank: int, units: Mapping[int, UnitBuffer], store: StateStore,
    names: Sequence[str], copy: bool,
) -> list[ShardedBase]:  # fmt: skip
    """What a rank owns, as Megatron's sharded tensors in host memory; ``names``: of the parts of an optimizer state
    that are saved.

    With ``copy`` it stays as it is whatever training does.
    """
    found: list[ShardedBase] = []
    for model in models:
        sharded = common.sharded(model)
        found += [entry for entry in sharded.values() if isinstance(entry, ShardedObject)]
        for name, members in unit_parameters(model).items():
            unit = layout.units.index(name)
            mine = {k: store[unit, k].tensors for each, k in layout.owned(rank) if each == unit}
            buffer = units[unit]
            weights = {k: buffer.slice_of(buffer.params, k).cpu() for k in mine}
            mine = {k: tuple(tensor.cpu() for tensor in state) for k, state in mine.items()}
            for parameter, _ in members if mine else ():
                saved = () if is_bias(parameter) else names  # Megatron's optimizer does not know it
                for tensor in _tensors(sharded[parameter]):
                    found += _pieces(tensor, buffer, weights, mine, saved, copy and buffer.params.is_cpu)
    return found


def on_disk(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """What a parameter is on disk."""
    return entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]


def _tensors(entry: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """The same, but nothing where another rank of the cell has it."""
    return [tensor for tensor in on_disk(entry) if not any(tensor.replica_id[:-1])]


def _pieces(
    tensor: ShardedTensor, buffer: UnitBuffer, weights: Mapping[int, torch.Tensor],
    mine: Mapping[int, Sequence[torch.Tensor]], names: Sequence[str], copy: bool,
) -> Iterator[ShardedTensor]:  # fmt: skip
    """What the slices ``mine`` have of a tensor that is a view of ``buffer.params``: ``weights``, and their states."""
    start = (tensor.data.data_ptr() - buffer.params.data_ptr()) // buffer.params.itemsize
    assert tensor.data.is_contiguous() and 0 <= start <= buffer.params.numel() - tensor.data.numel(), tensor.key
    ahead = tensor.prepend_axis_num
    origin = tensor.global_offset[ahead:]
    for k, state in mine.items():
        first = k * buffer.partition.slice_size
        low = max(start, first)
        high = min(start + tensor.data.numel(), first + buffer.partition.slice_size)
        if low >= high:
            continue
        flats = [(tensor.key, weights[k])]
        flats += [(f"optimizer.state.{name}.{tensor.key}", flat) for name, flat in zip(names, state, strict=False)]
        at = low - first
        for offset, size in boxes(tensor.local_shape, low - start, high - start):
            shape = (1,) * ahead + size
            here = (*tensor.global_offset[:ahead], *(a + b for a, b in zip(origin, offset, strict=True)))
            for key, flat in flats:
                data = flat[at : at + math.prod(size)].view(shape)
                yield replace(
                    tensor, key=key, data=data.clone() if copy else data, dtype=data.dtype, local_shape=shape,
                    global_offset=here, axis_fragmentations=None, prepend_axis_num=0, replica_id=0,
                )  # fmt: skip
            at += math.prod(size)


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[Box]:
    """The boxes that elements [low, high) of a contiguous tensor make in it, in their order."""
    if low >= high:
        return
    if len(shape) <= 1:
        yield ((low,), (high - low,)) if shape else ((), ())
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    first, last = -(-low // row), high // row
    if first > last:  # all within one row
        yield from _in_row(last, inner, low - last * row, high - last * row)
        return
    yield from _in_row(first - 1, inner, low - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from _in_row(last, inner, 0, high - last * row)


def _in_row(row: int, inner: Sequence[int], low: int, high: int) -> Iterator[Box]:
    for offset, size in boxes(inner, low, high):
        yield (row, *offset), (1, *size)
