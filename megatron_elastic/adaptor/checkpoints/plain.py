"""Plain checkpoints: of a model and Megatron's own optimizer (``torch_dist``), without ``--elastic``."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_elastic.adaptor.checkpoints import common
from megatron_elastic.adaptor.checkpoints.folder import RELEASE, mark_newest, newest_folder, step_folder, sync


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a checkpoint got: steps done, and training samples used by them."""

    iteration: int
    consumed_samples: int


def save(folder: Path, progress: Reached, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Write a checkpoint and make it the newest. Every rank calls this; returns when all have written.

    ``model`` is the bare model (not wrapped for data parallelism), ``optimizer`` Megatron's.
    """
    path = step_folder(folder, progress.iteration)
    if torch.distributed.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _sharded_state(model, optimizer, is_loading=False)
    state |= {"iteration": progress.iteration, common.SAMPLES: progress.consumed_samples}
    state["opt_param_scheduler"] = scheduler.state_dict()
    dist_checkpointing.save(state, str(path), ("torch_dist", 1), content_metadata=common.METADATA)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        sync(path)
        mark_newest(folder, progress.iteration)
    torch.distributed.barrier()


def load(folder: Path, model: Any, optimizer: Any, scheduler: Any) -> Reached:
    """Load the newest checkpoint into ``model``, ``optimizer``, ``scheduler`` and the random generators.

    The parallel sizes may differ from those of the job that saved; then the generators' states, which
    belong to its ranks, are left as they are. Of one that was converted only weights are taken.
    """
    path = newest_folder(folder)
    assert path is not None, "there is one to load"
    template = _sharded_state(model, optimizer, is_loading=True)
    if path.name == RELEASE:
        model.load_state_dict(dist_checkpointing.load({"model": template["model"]}, str(path))["model"])
        optimizer.reload_model_params()
        return Reached(0, 0)
    saved = dist_checkpointing.load_common_state_dict(str(path))
    if saved.get("grid") != _grid():  # or --elastic has saved it: then random numbers are no state
        del template["random"]
    state = dist_checkpointing.load(template, str(path))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["opt_param_scheduler"])
    if "random" in state:
        _set_random_state(state["random"])
    return Reached(state["iteration"], state[common.SAMPLES])


def _grid() -> list[int]:
    """Tensor-, pipeline- and data-parallel size."""
    return [parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_data_parallel_world_size()]


def _sharded_state(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    metadata = {**common.METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = model.sharded_state_dict(metadata=metadata)
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    shape = tuple(_grid())
    place = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank(),
             parallel_state.get_data_parallel_rank())
    return {"model": weights, "optimizer": moments, "grid": _grid(),
            "random": ShardedObject("random", _random_state(), shape, place)}


def _random_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state(),
            "device": torch.cuda.get_rng_state(), "streams": tensor_parallel.get_cuda_rng_tracker().get_states()}


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["streams"])
