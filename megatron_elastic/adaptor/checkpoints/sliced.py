"""``megatron.core.dist_checkpointing``: checkpoints in Megatron's torch_dist format, whatever the layout.

Weights and optimizer state are saved under Megatron's names (``optimizer.state.exp_avg.<parameter>``), each slice by
its owner, so a checkpoint can be loaded under any other layout, and by Megatron itself. What Megatron saves can be
loaded here: any layout can load what lies there by parameter, a stage's own ranks what lies in their ``buckets``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.models.gpt import GPTModel

from megatron_elastic.adaptor.checkpoints import buckets, common, norms
from megatron_elastic.adaptor.checkpoints.buckets import Place
from megatron_elastic.adaptor.checkpoints.draft import Draft
from megatron_elastic.adaptor.checkpoints.owned import on_disk, owned
from megatron_elastic.adaptor.checkpoints.reader import read
from megatron_elastic.adaptor.checkpoints.whole import reading
from megatron_elastic.adaptor.layers.router import is_bias
from megatron_elastic.adaptor.model.units import unit_parameters
from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import Dials
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.optimizer import Optimizer
from megatron_elastic.state.store import StateStore

FlatStates = Mapping[int, tuple[torch.Tensor, ...]]
"""Unit index -> the parts of its optimizer state, flat and whole (this tensor-parallel index)."""

_MASTERS = ("param", "fp32_param")
"""Megatron's names of the optimizer's weights, by parameter: of its distributed optimizer, and of the usual one."""


class _Saved(NamedTuple):
    """How an optimizer's state lies in a checkpoint.

    Attributes:
        names: of the parts of a state; the weights' is None where there are none but the model's.
        places: of the parameters in buckets, by name, for each chunk; None where the state lies by parameter.
    """

    names: tuple[str | None, ...]
    places: list[dict[str, Place]] | None


def parts(optimizer: Optimizer) -> tuple[str, ...]:
    """Megatron's names of ``SliceState.tensors``."""
    return _MASTERS[0], *optimizer.moments


def prepare(
    folder: Path, models: Sequence[GPTModel], layout: Layout, rank: int, units: Mapping[int, UnitBuffer],
    store: StateStore, names: Sequence[str], step: int, samples: int, besides: Mapping[str, Any], apart: bool,
) -> Draft:  # fmt: skip
    """Plan to save the state after ``step`` steps, which took ``samples``, into a new folder (``Saving``).

    ``names``: of the parts of the optimizer's state, none if it is left out. ``besides``: what only Megatron needs, to
    go on without us. Every rank of the layout calls it between the same two steps. With ``apart`` training may go on
    meanwhile.
    """
    mine = owned(models, layout, rank, units, store, names, apart)
    told = {"iteration": step, common.SAMPLES: samples, "content_metadata": common.METADATA}
    return Draft(folder, {"owned": mine, **told, **besides})


def load(
    folder: Path, models: Sequence[GPTModel], layout: Layout, rank: int, units: Mapping[int, UnitBuffer],
    optimizer: Optimizer, samples: int, dials: Dials,
) -> tuple[FlatStates, Mapping[str, Any]]:  # fmt: skip
    """Load a checkpoint: weights into the models; returns the state of the units homed here, and what the checkpoint
    says besides tensors. ``dials`` show how much is read.

    Raises UsageError when it is damaged, is another model's, or its steps did not take ``samples``.
    """
    with _reading(folder):
        told = _told(folder, samples)
        saved = _saved(folder, models, layout, rank, optimizer, told.get("args"))
        homed = _homed(layout, rank, units)
        empty = {unit: tuple(torch.zeros(buffer.params.shape) for _ in saved.names) for unit, buffer in homed}
        loaded = _loaded(models, saved, units, empty, folder, dials)
    for chunk, model in enumerate(models):
        model.load_state_dict(loaded[f"model{chunk}"])
        with torch.no_grad():
            for name, target in _views(model, saved.names, units, empty):
                target.copy_(loaded[f"optimizer{chunk}"][name].view_as(target))
    for unit, states in empty.items():
        # A router's bias is what no optimizer of Megatron knows.
        if saved.names[0] is None or layout.units[unit].startswith("bias."):
            states[0].copy_(units[unit].params)
    return empty, told


def load_weights(folder: Path, models: Sequence[GPTModel], dials: Dials, samples: int | None = None) -> None:
    """Load the weights of a checkpoint into the models, and nothing else. Shows and raises as ``load``.

    ``samples``: which its steps must have taken, if training goes on with the next one.
    """
    with _reading(folder):
        if samples is not None:
            _told(folder, samples)
        loaded = _loaded(models, _Saved((), None), {}, {}, folder, dials)
    for chunk, model in enumerate(models):
        model.load_state_dict(loaded[f"model{chunk}"])


def _loaded(
    models: Sequence[GPTModel], saved: _Saved, units: Mapping[int, UnitBuffer], whole: FlatStates, folder: Path,
    dials: Dials,
) -> dict[str, Any]:  # fmt: skip
    """What a checkpoint has of weights and states. What modules keep besides tensors stays as it is where it has none
    of theirs: layers of Transformer Engine keep something, and others' do not, or not for the same modules.
    """
    there = load_sharded_metadata(str(folder))
    state = _sharded(models, saved, units, whole, {entry.key for entry in there.values()})
    kept: dict[str, dict[str, Any]] = {}
    for model in (f"model{chunk}" for chunk in range(len(models))):
        kept[model] = {name: entry.data for name, entry in state[model].items()
                       if isinstance(entry, ShardedObject) and entry.unique_key not in there}  # fmt: skip
        state[model] = {name: entry for name, entry in state[model].items() if name not in kept[model]}
    weights = (entry for model in kept for entry in state[model].values())
    _compare(folder, weights, {entry.key: entry for entry in there.values() if isinstance(entry, ShardedTensor)})
    loaded = read(folder, state, dials)
    for model, own in kept.items():
        loaded[model].update(own)
    return loaded


def _compare(folder: Path, entries: Iterable[Any], there: Mapping[str, ShardedTensor]) -> None:
    """Raise UsageError for the first of a model's parameters that a checkpoint has otherwise, or not at all."""
    for entry in entries:
        for tensor in () if isinstance(entry, ShardedObject) else on_disk(entry):
            if tensor.allow_shape_mismatch:  # the vocabulary may be padded otherwise
                continue
            saved, wanted = there.get(tensor.key), list(tensor.global_shape)
            if saved is None or list(saved.global_shape) != wanted:
                has = "is missing" if saved is None else f"has the shape {list(saved.global_shape)}"
                raise UsageError(
                    f"--load {folder.parent}: {folder} is of another model: {tensor.key} {has} there, and these flags "
                    f"make it {wanted}; give the flags of the model that was saved, or name another checkpoint"
                )


def _reading(folder: Path) -> AbstractContextManager[None]:
    return reading(folder, f"--load {folder.parent}")


def _told(folder: Path, samples: int) -> Mapping[str, Any]:
    """What a checkpoint says besides tensors. Raises UsageError if its steps did not take ``samples``."""
    told = common.told(folder)
    saved = common.samples(told)
    if saved not in (None, samples):
        raise UsageError(
            f"--load {folder.parent}: {folder} says that {saved} samples were taken, and this job has taken "
            f"{samples} until there: another job has saved it; name a --save of its own for each"
        )
    return told


def _saved(
    folder: Path, models: Sequence[GPTModel], layout: Layout, rank: int, optimizer: Optimizer, args: Any
) -> _Saved:
    """How the optimizer's state lies in a checkpoint, saved with the flags ``args`` if it says so.

    Raises UsageError if it has none, or none that these models can load.
    """
    tensors: Mapping[str, ShardedTensor] = dist_checkpointing.load_tensors_metadata(str(folder))
    if buckets.has_some(tensors):
        if args is not None:
            buckets.check_sizes(args, layout)
        return _Saved(parts(optimizer), buckets.find(models, layout, rank, tensors))
    found = {name for key in tensors if key.startswith("optimizer.state.") for name in key.split(".")[2:3]}
    master = next((name for name in _MASTERS if name in found), None)
    exact = master is not None or all(p.dtype == torch.float32 for model in models for p in model.parameters())
    if exact and found.issuperset(optimizer.moments):
        return _Saved((master, *optimizer.moments), None)
    raise UsageError(
        f"--load {folder.parent}: {folder} has no state of this optimizer: begin with the optimizer and the precision "
        "of the job that saved it (and without --no-save-optim), or with fresh states (--no-load-optim, --finetune)"
    )


def fill(store: StateStore, units: Mapping[int, UnitBuffer], states: FlatStates, step: int) -> None:
    """Give every state held in the store what was loaded."""
    for unit, k, _ in store.held():
        if unit not in states:
            continue  # a copy of another stage's
        state = store[unit, k]
        for tensor, flat in zip(state.tensors, states[unit], strict=True):
            tensor.copy_(units[unit].slice_of(flat, k))
        state.step = step


def _homed(layout: Layout, rank: int, units: Mapping[int, UnitBuffer]) -> Iterator[tuple[int, UnitBuffer]]:
    """Units whose home is the stage of ``rank``."""
    for unit in layout.at_home(layout.stage_of(rank)):
        yield unit, units[unit]


def _views(
    model: GPTModel, names: Sequence[str | None], units: Mapping[int, UnitBuffer], whole: FlatStates
) -> Iterator[tuple[str, torch.Tensor]]:
    """("<part>.<parameter name>", its view in the flat state) for the model's parameters of the units in ``whole``."""
    parameters = {id(p): name for members in unit_parameters(model).values() for name, p in members}
    for unit, states in whole.items():
        for p, start in units[unit].bound:
            for part, flat in zip(names, states, strict=True):
                if part is not None and id(p) in parameters and not is_bias(parameters[id(p)]):
                    yield f"{part}.{parameters[id(p)]}", flat[start : start + p.numel()].view_as(p)


def _sharded(
    models: Sequence[GPTModel], saved: _Saved, units: Mapping[int, UnitBuffer], whole: FlatStates,
    names: Collection[str],
) -> dict[str, Any]:  # fmt: skip
    """Weights and optimizer state of each chunk. In a checkpoint tensors have names of their own, in any chunk.

    ``names``: those that are there.
    """
    state: dict[str, Any] = {}
    for chunk, model in enumerate(models):
        weights = state[f"model{chunk}"] = norms.named_as_saved(common.sharded(model), names)
        states = state[f"optimizer{chunk}"] = {}
        for name, view in _views(model, saved.names, units, whole):
            part, _, parameter = name.partition(".")
            states[name] = (
                make_sharded_optimizer_tensor(weights[parameter], view, f"optimizer.state.{part}")
                if saved.places is None else saved.places[chunk][parameter].tensor(part, view)
            )  # fmt: skip
    return state
