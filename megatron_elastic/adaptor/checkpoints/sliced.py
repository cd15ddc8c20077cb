"""``megatron.core.dist_checkpointing``: checkpoints in Megatron's torch_dist format, whatever the layout.

Weights are saved as Megatron saves them. Optimizer state is put together, unit by unit, at the first cell of the
unit's home stage and saved parameter by parameter under Megatron's names (``optimizer.state.exp_avg.<parameter>``),
so a checkpoint can be loaded under any other layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_elastic.adaptor.checkpoints.folder import TRACKER, step_folder
from megatron_elastic.adaptor.model.units import unit_parameters
from megatron_elastic.cluster.control import Interrupted, JobStopped
from megatron_elastic.comm.operation import Recv, Send
from megatron_elastic.comm.tag import Channel, at_slice
from megatron_elastic.comm.transport import Transport
from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.optimizer import Optimizer
from megatron_elastic.state.store import StateStore

FlatStates = Mapping[int, tuple[torch.Tensor, ...]]
"""Unit index -> the parts of its optimizer state, flat and whole (this tensor-parallel index)."""


def parts(optimizer: Optimizer) -> tuple[str, ...]:
    """Megatron's names of ``SliceState.tensors``."""
    return "fp32_param", *optimizer.moments


def prepare(
    folder: Path, models: Sequence[GPTModel], layout: Layout, units: Mapping[int, UnitBuffer], store: StateStore,
    transport: Transport, step: int, apart: bool,
) -> AsyncRequest:  # fmt: skip
    """Plan to save the state after ``step`` steps into an empty folder; returns what writes it (``Saving``).

    Every rank of the layout calls it between the same two steps. With ``apart`` training may go on meanwhile.
    """
    whole = _collect(layout, units, store, transport)
    state = {**_sharded(models, parts(store.optimizer), units, whole), "iteration": step}
    if apart:  # optimizer state is collected into memory of its own in any case
        for entry in (entry for chunk in range(len(models)) for entry in state[f"model{chunk}"].values()):
            if isinstance(entry.data, torch.Tensor):
                entry.data = entry.data.clone()
    return dist_checkpointing.save(state, str(folder), async_sharded_save=True)


def load(
    directory: str | Path, models: Sequence[GPTModel], layout: Layout, rank: int, units: Mapping[int, UnitBuffer],
    optimizer: Optimizer, step: int,
) -> FlatStates:  # fmt: skip
    """Load the checkpoint of ``step`` steps: weights into the models; returns the state of the units homed here.

    Raises UsageError when it is damaged, or is another model's.
    """
    names = parts(optimizer)
    homed = _homed(layout, rank, units)
    empty = {unit: tuple(torch.zeros(buffer.params.shape) for _ in names) for unit, buffer in homed}
    state = _sharded(models, names, units, empty)
    folder = step_folder(Path(directory), step)
    try:
        loaded = dist_checkpointing.load(state, str(folder))
    except (Interrupted, JobStopped):
        raise
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"--load {directory}: {folder} cannot be loaded; give the flags of the model that was saved, or write the "
            f"number of an older checkpoint into {Path(directory) / TRACKER} ({why})"
        ) from error
    for chunk, model in enumerate(models):
        model.load_state_dict(loaded[f"model{chunk}"])
        with torch.no_grad():
            for name, target in _views(model, names, units, empty):
                target.copy_(loaded[f"optimizer{chunk}"][name])
    return empty


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
    stage = layout.stage_of(rank)
    for unit in layout.stages[stage].units:
        if layout.home(unit) == stage:
            yield unit, units[unit]


def _collect(layout: Layout, units: Mapping[int, UnitBuffer], store: StateStore, transport: Transport) -> FlatStates:
    """The whole optimizer state of each unit, at the first cell of its home stage; nothing elsewhere."""
    me, tp, names = transport.rank, layout.tp_index(transport.rank), parts(store.optimizer)
    whole: dict[int, tuple[torch.Tensor, ...]] = {}
    operations: list[Send | Recv] = []
    for unit, buffer in _homed(layout, me, units):
        saver = layout.stages[layout.home(unit)].cells[0].ranks[tp]
        if me == saver:
            whole[unit] = tuple(torch.zeros(buffer.params.shape) for _ in names)
        for k in range(layout.num_slices):
            owner = layout.owner(unit, k, tp)
            for part in range(len(names)):
                coordinate = at_slice(unit, k, part)
                if me == saver:
                    target = buffer.slice_of(whole[unit][part], k)
                    if owner == me:
                        target.copy_(store[unit, k].tensors[part])
                    else:
                        operations.append(transport.recv(owner, Channel.CHECKPOINT, coordinate, target))
                elif owner == me:
                    operations.append(
                        transport.send(saver, Channel.CHECKPOINT, coordinate, store[unit, k].tensors[part])
                    )
    transport.wait(*operations)
    return whole


def _views(
    model: GPTModel, names: Sequence[str], units: Mapping[int, UnitBuffer], whole: FlatStates
) -> Iterator[tuple[str, torch.Tensor]]:
    """("<part>.<parameter name>", its view in the flat state) for the model's parameters of the units in ``whole``."""
    parameters = {id(p): name for members in unit_parameters(model).values() for name, p in members}
    for unit, states in whole.items():
        for p, start in units[unit].bound:
            for part, flat in zip(names, states, strict=True):
                if id(p) in parameters:
                    yield f"{part}.{parameters[id(p)]}", flat[start : start + p.numel()].view_as(p)


def _sharded(
    models: Sequence[GPTModel], names: Sequence[str], units: Mapping[int, UnitBuffer], whole: FlatStates
) -> dict[str, Any]:
    """Weights and optimizer state of each chunk. In a checkpoint tensors have names of their own, in any chunk."""
    state: dict[str, Any] = {}
    for chunk, model in enumerate(models):
        weights = state[f"model{chunk}"] = model.sharded_state_dict()
        states = state[f"optimizer{chunk}"] = {}
        for name, view in _views(model, names, units, whole):
            part, _, parameter = name.partition(".")
            states[name] = make_sharded_optimizer_tensor(weights[parameter], view, f"optimizer.state.{part}")
    return state
