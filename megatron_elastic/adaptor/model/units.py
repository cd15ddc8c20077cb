"""``megatron.core.models.gpt``: which parameters of a stage's model belong to which unit, and how they are treated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.adaptor.model.router import is_bias
from megatron_elastic.adaptor.model.sequence import is_partial
from megatron_elastic.layout import EXPERTS, Layout, UnitShape
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.state.buffer import Member, UnitBuffer, shape_of
from megatron_elastic.state.partition import Partition


class Use(NamedTuple):
    """A module of a stage with which a forward pass gets to a unit; ``needs``: the units whose parameters it uses."""

    unit: str
    module: torch.nn.Module
    needs: tuple[str, ...]


def uses(model: GPTModel) -> Iterator[Use]:
    """The uses of a model's units, in the order of a forward pass. Together the modules have all its parameters."""
    if model.pre_process:
        positions = ("positions",) if model.embedding.add_position_embedding else ()
        yield Use("embedding", model.embedding, ("embedding", *positions))
    for layer in model.decoder.layers:
        unit = f"layer.{layer.layer_number - 1}"
        kinds = dict.fromkeys(_kind(name) for name, _ in layer.named_parameters())
        yield Use(unit, layer, tuple(f"{kind}.{layer.layer_number - 1}" for kind in kinds))
    if model.post_process:
        if model.decoder.final_layernorm is not None:
            yield Use("head", model.decoder.final_layernorm, ("head",))
        tied = ("embedding",) if model.share_embeddings_and_output_weights else ()
        yield Use("head", model.output_layer, ("head", *tied))


def unit_parameters(model: GPTModel) -> dict[str, list[tuple[str, torch.nn.Parameter]]]:
    """Unit name -> (parameter name, parameter) in the model's order.

    A tied output layer is the embedding unit. Raises ValueError for a parameter that belongs to no known unit.
    """
    first_layer = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    units: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if name.startswith("embedding.word_embeddings."):
            unit = "embedding"
        elif name.startswith("embedding.position_embeddings."):
            unit = "positions"
        elif name.startswith("decoder.layers."):
            unit = f"{_kind(name)}.{first_layer + int(parts[2])}"
        elif name.startswith("decoder.final_layernorm."):
            unit = "head"
        elif name.startswith("output_layer."):
            unit = "embedding" if model.share_embeddings_and_output_weights else "head"
        else:
            raise ValueError(f"parameter {name} belongs to no unit that megatron_elastic knows")
        units.setdefault(unit, []).append((name, parameter))
    return units


def _kind(name: str) -> str:
    """Of which kind the unit of a layer's parameter is."""
    return "bias" if is_bias(name) else EXPERTS if "mlp.experts." in name else "layer"


def bind_stage(
    models: Sequence[GPTModel],
    layout: Layout,
    stage: int,
    groups: ParameterGroups,
    partitions: dict[int, Partition],
    units: dict[int, UnitBuffer],
    make: Callable[[int, UnitShape], Partition],
    accumulator: Accumulator,
) -> None:
    """Make the parameters of a stage's models, one for each chunk, views of flat buffers, by unit index.

    Units that are in ``units`` already keep their values, and their views if the models have parameters that are
    these; for the others ``partitions`` and ``units`` get entries, with the models' values. Where a tied embedding is
    used twice, both uses get leaves of their own. Raises ValueError when the models are not what the layout says, or a
    unit has not the shape that it had before.
    """
    parameters = {unit: members for model in models for unit, members in unit_parameters(model).items()}
    names = {layout.units[unit] for unit in layout.stages[stage].units}
    if names != set(parameters):
        raise ValueError(f"stage {stage} should hold units {sorted(names)}, but its models have {sorted(parameters)}")
    for unit in layout.stages[stage].units:
        name = layout.units[unit]
        members = [
            Member(
                parameter=parameter,
                group=groups.index(full_name, parameter),
                sharded=bool(getattr(parameter, "tensor_model_parallel", False)),
                partial=is_partial(full_name, parameter, models[0].config),
            )
            for full_name, parameter in parameters[name]
        ]
        shape = shape_of(name, members)
        if unit not in partitions:
            partitions[unit] = make(unit, shape)
        # How parameters are treated is known from where they were drawn: Megatron marks them when it draws them.
        if partitions[unit].sizes != [member[0] for member in shape.members]:
            raise ValueError(f"unit {name} has shape {shape}, but had {partitions[unit].shape} in another stage")
        known = unit in units
        if not known:
            units[unit] = UnitBuffer(partitions[unit], accumulator)
        if not units[unit].is_bound(members):
            units[unit].bind(members, fill=not known)
    first, last = models[0], models[-1]
    if first.pre_process and last.post_process and last.share_embeddings_and_output_weights:
        twin = units[layout.units.index("embedding")].twin(first.embedding.word_embeddings.weight)
        last.shared_embedding_or_output_weight = lambda: twin
