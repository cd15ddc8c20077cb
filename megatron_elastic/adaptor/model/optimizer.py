"""``megatron.core.optimizer``: which update slices get, and which parameters are treated alike.

Megatron sorts parameters into groups by overrides: no weight decay for biases and one-dimensional parameters, another
learning rate for embedding and output layer (``--decoupled-lr``). A rank of it knows the groups of its parameters only
and asks the others for theirs; here all groups that can be made of the overrides exist on every rank, so that they mean
the same everywhere. Megatron's optimizers themselves are not used: they know ranks, not slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import combine_param_group_overrides

from megatron_elastic.adaptor.layers.router import is_bias
from megatron_elastic.config import UsageError
from megatron_elastic.state.optimizer import SIGNED, Adam, Optimizer, Sgd


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """The optimizer that Megatron would make of ``config``. Raises UsageError for one that slices cannot have."""
    match config.optimizer:
        case "adam":
            return Adam(config.adam_beta1, config.adam_beta2, config.adam_eps, config.decoupled_weight_decay)
        case "sgd":
            return Sgd(config.sgd_momentum)
    raise UsageError(f"--optimizer {config.optimizer} is not supported with --elastic: use adam or sgd")


class ParameterGroups:
    """Megatron's parameter groups; a group is named by its index.

    Group 0 has no override; the bits of an index say which overrides apply to the group's parameters.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._overrides = list(get_standard_config_overrides(config).items())
        self._base = {"max_lr": config.lr, "min_lr": config.min_lr, "wd_mult": 1.0, "lr_mult": 1.0,
                      "is_expert_parallel": False, "is_decoupled_lr": False}
        self._base |= {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}

    def index(self, name: str, parameter: torch.nn.Parameter) -> int:
        """The group of a parameter of Megatron's model, called ``name`` there."""
        if is_bias(name):
            return SIGNED
        return sum(1 << bit for bit, (key, _) in enumerate(self._overrides) if key.matches(parameter, name))

    def for_scheduler(self, max_lr: float | None = None, min_lr: float | None = None) -> list[dict[str, Any]]:
        """The groups, by index, as Megatron's scheduler wants them: it writes their learning rate and weight decay.

        ``max_lr``, ``min_lr``: of those without an override, if they are not the configuration's.
        """
        base = {**self._base, **({} if max_lr is None else {"max_lr": max_lr, "min_lr": min_lr})}
        return [
            {"params": [], "lr": base["max_lr"], "weight_decay": 0.0, **base, **self._of(index),
             "default_config": not any("lr" in name for name in self._of(index))}
            for index in range(1 << len(self._overrides))
        ]

    def _of(self, index: int) -> Mapping[str, Any]:
        chosen = [override for bit, (_, override) in enumerate(self._overrides) if index >> bit & 1]
        overrides: Mapping[str, Any] = combine_param_group_overrides(chosen)
        return overrides
