"""Torch's Adam under Megatron's distributed optimizer: loading a checkpoint leaves the right state behind.

Changes ``megatron.core.optimizer.distrib_optimizer.DistributedOptimizer`` (0.16.1), which was written for the fused
Adams. Those keep one ``step`` for each parameter group, torch's keeps a tensor for each parameter, and so
with torch's Adam

- loading asks for the step of an optimizer that has none yet, and fails;
- all parameters share one ``step`` tensor afterwards, which then advances once for each of them in every step;
- the state that the checkpoint is loaded into overwrites ``step``, or lacks it;
- fp32 parameters, which are views of leaves, are written to while gradients are recorded, and fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_elastic.adaptor import targets


def apply() -> None:
    """Correct ``DistributedOptimizer``. Idempotent; does nothing with Apex or Transformer Engine."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    targets.SET_MAIN_PARAM.replace(_set_state)
    targets.LOAD_OPTIMIZER.wrap(_with_own_steps)
    targets.SAVE_OPTIMIZER.wrap(_with_initial_state)


@torch.no_grad()
def _set_state(self: Any, model_param: torch.nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy one parameter's loaded shard of weights and moments into place; ``step`` is not for the shards to say."""
    group, order = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][order]
    main_param.copy_(tensors["param"])
    for name in ("exp_avg", "exp_avg_sq"):
        self.optimizer.state[main_param][name].copy_(tensors[name])


def _with_own_steps(load: Callable[..., None]) -> Callable[..., None]:
    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        load(self, state_dict)
        step = float(state_dict["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step, dtype=torch.float32)

    return load_state_dict


def _with_initial_state(sharded: Callable[..., Any]) -> Callable[..., Any]:
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                state = self.optimizer.state[param]
                if not state:
                    state["step"] = torch.tensor(0.0, dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(param, requires_grad=False)
                    state["exp_avg_sq"] = torch.zeros_like(param, requires_grad=False)
        return sharded(self, *args, **kwargs)

    return sharded_state_dict
