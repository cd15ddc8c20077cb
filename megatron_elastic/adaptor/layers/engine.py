"""``transformer_engine.pytorch.module``: linear layers of Transformer Engine whose weights get their gradients later.

Its layers hand what is left of a backward pass to a store that each of them has, if the store says that they are to.
Here every store says so inside ``linear.put_off``, and notes it there. Together with a weight's gradient the layer
computes that of its bias.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers import linear

_LAYER = "_megatron_elastic_layer"
"""Of a store: the layer that has it."""


def used(args: argparse.Namespace) -> bool:
    """Whether the model has layers of Transformer Engine."""
    return bool(args.transformer_impl == "transformer_engine")


def install(bitwise: bool) -> None:
    """Let its layers be split, and, for ``bitwise``, choose kernels that give the same bits each time. Idempotent."""
    if bitwise:
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Megatron asks for it with deterministic_mode
    targets.WGRAD_DELAYED.replace(_delayed)
    targets.WGRAD_PUT.replace(_put)


def know(layer: torch.nn.Module) -> None:
    """Remember whose store a layer's is, if it has one. Idempotent."""
    store = getattr(layer, "wgrad_store", None)
    if store is not None:
        setattr(store, _LAYER, layer)


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """Gradients of a layer's weight and bias that are due: a product for each use of it. Implements ``linear.Due``.

    Attributes:
        uses: what computes the two, and from what; None in place of a bias's if there is none.
    """

    layer: Any
    uses: list[tuple[Callable[..., tuple[torch.Tensor, torch.Tensor | None]], Sequence[torch.Tensor]]] = field(
        default_factory=list
    )

    def add(self) -> None:
        made = [compute(*given) for compute, given in self.uses]
        self.layer.weight.backward(reduce(torch.add, (weight for weight, _ in made)).to(self.layer.weight.dtype))
        biases = [bias for _, bias in made if bias is not None]
        if biases and self.layer.use_bias:
            self.layer.bias.backward(reduce(torch.add, biases).to(self.layer.bias.dtype))

    def kept(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.layer.weight, [each for _, given in self.uses for each in given if isinstance(each, torch.Tensor)]


def _delayed(_: Any) -> bool:
    """In place of ``WeightGradStore.delay_wgrad_compute``."""
    return linear.noted() is not None


def _put(self: Any, tensor_list: Sequence[torch.Tensor], func: Callable[..., Any]) -> None:
    """In place of ``WeightGradStore.put``."""
    due, layer = linear.noted(), getattr(self, _LAYER)
    assert due is not None
    due.setdefault(layer.weight, LayerGradients(layer)).uses.append((func, tensor_list))
