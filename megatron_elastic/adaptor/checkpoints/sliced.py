"""``megatron.core.dist_checkpointing``: checkpoints in Megatron's torch_dist format, whatever the layout.

Weights and optimizer state are saved under Megatron's names (``optimizer.state.exp_avg.<parameter>``), each slice by
its owner, so a checkpoint can be loaded under any other layout, and by Megatron itself. What Megatron saves can be
loaded here if its optimizer's state lies there by parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_elastic.adaptor.checkpoints import common
from megatron_elastic.adaptor.checkpoints.folder import TRACKER, step_folder
from megatron_elastic.adaptor.checkpoints.part import Part
from megatron_elastic.adaptor.checkpoints.share import share
from megatron_elastic.adaptor.model.router import is_bias
from megatron_elastic.adaptor.model.units import unit_parameters
from megatron_elastic.cluster.control import Interrupted, JobStopped
from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.optimizer import Optimizer
from megatron_elastic.state.store import StateStore

FlatStates = Mapping[int, tuple[torch.Tensor, ...]]
"""Unit index -> the parts of its optimizer state, flat and whole (this tensor-parallel index)."""

_MASTERS = ("param", "fp32_param")
"""Megatron's names of the optimizer's weights: by parameter, and in formats that it no longer writes."""


def parts(optimizer: Optimizer) -> tuple[str, ...]:
    """Megatron's names of ``SliceState.tensors``."""
    return _MASTERS[0], *optimizer.moments


def prepare(
    folder: Path, models: Sequence[GPTModel], layout: Layout, rank: int, units: Mapping[int, UnitBuffer],
    store: StateStore, step: int, samples: int, besides: Mapping[str, Any], apart: bool,
) -> Part:  # fmt: skip
    """Plan to save the state after ``step`` steps, which took ``samples``, into a new folder (``Saving``).

    ``besides``: what only Megatron needs, to go on without us. Every rank of the layout calls it between the same two
    steps. With ``apart`` training may go on meanwhile.
    """
    mine = share(models, layout, rank, units, store, parts(store.optimizer), apart)
    told = {"iteration": step, common.SAMPLES: samples, "content_metadata": common.METADATA}
    return Part(folder, {"share": mine, **told, **besides})


def load(
    directory: str | Path, models: Sequence[GPTModel], layout: Layout, rank: int, units: Mapping[int, UnitBuffer],
    optimizer: Optimizer, step: int, samples: int,
) -> FlatStates:  # fmt: skip
    """Load the checkpoint of ``step`` steps: weights into the models; returns the state of the units homed here.

    Raises UsageError when it is damaged, is another model's, or its steps did not take ``samples``.
    """
    with _reading(directory, step) as folder:
        saved = common.samples(dist_checkpointing.load_common_state_dict(str(folder)))
        if saved not in (None, samples):
            raise _other_batch(directory, step, saved, samples)
        names = _saved_parts(folder, optimizer)
        homed = _homed(layout, rank, units)
        empty = {unit: tuple(torch.zeros(buffer.params.shape) for _ in names) for unit, buffer in homed}
        loaded = dist_checkpointing.load(_sharded(models, names, units, empty), str(folder))
    for chunk, model in enumerate(models):
        model.load_state_dict(loaded[f"model{chunk}"])
        with torch.no_grad():
            for name, target in _views(model, names, units, empty):
                target.copy_(loaded[f"optimizer{chunk}"][name])
    for unit, states in empty.items():
        if layout.units[unit].startswith("bias."):  # which no optimizer of Megatron knows
            states[0].copy_(units[unit].params)
    return empty


def load_weights(directory: str | Path, models: Sequence[GPTModel], step: int) -> None:
    """Load the weights of a checkpoint into the models, and nothing else. Raises UsageError as ``load``."""
    with _reading(directory, step) as folder:
        loaded = dist_checkpointing.load(_sharded(models, (), {}, {}), str(folder))
    for chunk, model in enumerate(models):
        model.load_state_dict(loaded[f"model{chunk}"])


@contextmanager
def _reading(directory: str | Path, step: int) -> Iterator[Path]:
    """The folder of a checkpoint that is read. Raises UsageError for all that goes wrong with it."""
    folder = step_folder(Path(directory), step)
    try:
        yield folder
    except (Interrupted, JobStopped, UsageError):
        raise
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(
            f"--load {directory}: {folder} cannot be loaded; give the flags of the model that was saved, or write the "
            f"number of an older checkpoint into {Path(directory) / TRACKER} ({why})"
        ) from error


def _saved_parts(folder: Path, optimizer: Optimizer) -> tuple[str, ...]:
    """The names that the parts of the optimizer's state have in a checkpoint. Raises UsageError if it has none."""
    saved = dist_checkpointing.load_tensors_metadata(str(folder))
    for master in _MASTERS:
        if any(key.startswith(f"optimizer.state.{master}.") for key in saved):
            return master, *optimizer.moments
    raise UsageError(
        f"--load {folder.parent}: {folder} has no optimizer state by parameter, which any layout could load: let "
        "Megatron save with --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    )


def _other_batch(directory: str | Path, step: int, saved: int, samples: int) -> UsageError:
    """Going on from the sample that follows from the steps would skip some, or take them twice."""
    return UsageError(f"--load {directory}: its {step} steps took {saved} samples, and with this --global-batch-size "
                      f"they would have taken {samples}: give --global-batch-size {saved // step}")


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


def _views(
    model: GPTModel, names: Sequence[str], units: Mapping[int, UnitBuffer], whole: FlatStates
) -> Iterator[tuple[str, torch.Tensor]]:
    """("<part>.<parameter name>", its view in the flat state) for the model's parameters of the units in ``whole``."""
    parameters = {id(p): name for members in unit_parameters(model).values() for name, p in members}
    for unit, states in whole.items():
        for p, start in units[unit].bound:
            for part, flat in zip(names, states, strict=True):
                if id(p) in parameters and not is_bias(parameters[id(p)]):
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
