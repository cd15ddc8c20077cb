"""``megatron.core.transformer``: which layers a stage holds.

Megatron derives them from the pipeline's rank and size, evenly or by a table that is the same for the whole run. Here
the layout says it, so the two functions that everybody asks are answered from there. A stage that is built anew
takes over the layers that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer import transformer_layer

from megatron_elastic.adaptor import targets
from megatron_elastic.layout import MTP


def hold(chunks: Sequence[Sequence[str]]) -> None:
    """From now on this rank's models have the layers among these units; ``vp_stage`` says which model it is."""
    layers = [layers_of(chunk) for chunk in chunks]
    further = [sum(name.startswith(MTP) for name in chunk) for chunk in chunks]
    for target in (targets.BLOCK_LAYERS, targets.SPECS_LAYERS):
        target.replace(lambda config, vp_stage=None, pp_rank=None: len(layers[vp_stage or 0]))
    for target in (targets.LAYER_OFFSET, targets.BLOCK_OFFSET, targets.SPECS_OFFSET, targets.MTP_OFFSET):
        target.replace(lambda config, vp_stage=None, pp_rank=None: layers[vp_stage or 0].start)
    targets.MTP_LAYERS.replace(lambda config, vp_stage=None, pp_rank=None: further[vp_stage or 0])
    targets.MTP_HERE.replace(lambda *_, vp_stage=None, **__: further[vp_stage or 0] > 0)


@contextmanager
def reused(units: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Meanwhile a model that is built gets these layers, by the names of their units, in place of new ones."""

    def taking(name: Callable[..., str]) -> Callable[..., Callable[..., torch.nn.Module]]:
        def make(build: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
            def take_or_build(spec: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
                layer = units.get(name(**kwargs)) if "layer_number" in kwargs else None
                return build(spec, *args, **kwargs) if layer is None else layer

            return take_or_build

        return make

    targets.BLOCK_BUILD.wrap(taking(lambda **kwargs: f"layer.{layer_index(**kwargs)}"))
    # What predicts further tokens is numbered from 1; the layer inside it, as all layers are.
    targets.MTP_BUILD.wrap(taking(lambda layer_number, **_: f"{MTP}.{layer_number - 1}"))
    try:
        yield
    finally:
        for target in (targets.BLOCK_BUILD, targets.MTP_BUILD):
            target.wrap(lambda build: build)


def layer_index(config: Any, layer_number: int, vp_stage: int | None, is_mtp_layer: bool = False, **_: Any) -> int:
    """Number in the whole model of a layer under construction, which Megatron numbers from its stage's first one.

    And those that predict further tokens by themselves (0.17 and later); here they are numbered on.
    """
    if is_mtp_layer:
        return int(config.num_layers) + layer_number - 1
    # As it is now: the layout says where a stage begins.
    return layer_number - 1 + int(transformer_layer.get_transformer_layer_offset(config, vp_stage))


def layers_of(names: Sequence[str]) -> range:
    """The consecutive layers among units with these names (``layer.3``); none where there are ends only."""
    numbers = [int(name.partition(".")[2]) for name in names if name.startswith("layer.")]
    return range(numbers[0], numbers[-1] + 1) if numbers else range(0)
