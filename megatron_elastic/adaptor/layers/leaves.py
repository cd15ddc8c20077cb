"""Leaves: modules that compute as others do, and whose gradients are summed apart."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

Leaf = Callable[[torch.nn.Parameter], torch.nn.Parameter]
"""Another leaf over the memory of a parameter."""


def with_leaves(module: torch.nn.Module, leaf: Leaf) -> torch.nn.Module:
    """The same module, hooks included, with other leaves in place of its parameters."""
    twin = copy.copy(module)
    twin._parameters = {name: None if own is None else leaf(own) for name, own in module._parameters.items()}
    twin._modules = {name: None if child is None else with_leaves(child, leaf)
                     for name, child in module._modules.items()}  # fmt: skip
    return twin
