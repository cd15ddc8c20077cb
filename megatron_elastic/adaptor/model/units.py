"""``megatron.core.models.gpt``: which parameters of a stage's model belong to which unit, and how they are treated."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from megatron.core.models.gpt import GPTModel

from megatron_elastic.adaptor.layers import experts, mtp
from megatron_elastic.adaptor.layers.router import is_bias
from megatron_elastic.adaptor.layers.sequence import MARK, is_partial
from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.layout import EXPERTS, MTP, Layout, UnitShape
from megatron_elastic.numerics.exact import Accumulator, ExactAccumulator
from megatron_elastic.state.buffer import Member, UnitBuffer, shape_of
from megatron_elastic.state.partition import Partition

_IN_LAYER = re.compile(r"^(decoder|mtp)\.layers\.\d+\.")
"""What comes before the names of a layer's own parameters. Its number is that in the stage."""


class Use(NamedTuple):
    """A module of a stage with which a forward pass gets to a unit; ``needs``: the units whose parameters it uses."""

    unit: str
    module: torch.nn.Module
    needs: tuple[str, ...]


def uses(model: GPTModel) -> Iterator[Use]:
    """The uses of a model's units, in the order of a forward pass.

    Together the modules have all its parameters, but an embedding that is there for the end of the model alone.
    """
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
        for layer in model.mtp.layers if model.mtp_process else ():
            kinds = dict.fromkeys(_kind(name) for name, _ in layer.named_parameters())
            number = layer.layer_number - 1
            experts = (f"{kind}.{model.config.num_layers + number}" for kind in kinds if kind != "layer")
            yield Use(f"{MTP}.{number}", layer, (f"{MTP}.{number}", *experts, "embedding"))
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
        elif name.startswith("mtp.layers."):
            further, kind = int(parts[2]), _kind(name)
            unit = f"{MTP}.{further}" if kind == "layer" else f"{kind}.{model.config.num_layers + further}"
        elif name.startswith("decoder.final_layernorm."):
            unit = "head"
        elif name.startswith("output_layer."):
            unit = "embedding" if model.share_embeddings_and_output_weights else "head"
        else:
            raise ValueError(f"parameter {name} belongs to no unit that megatron_elastic knows")
        units.setdefault(unit, []).append((name, parameter))
    return units


def _num_experts(names: Iterable[str]) -> int:
    """How many experts these are the parameters of, by their names (``SequentialMLP``); 0 if of none."""
    found = (re.search(r"\bexperts\.local_experts\.(\d+)\.", name) for name in names)
    return len({expert[1] for expert in found if expert is not None})


def _kind(name: str) -> str:
    """Of which kind the unit of a layer's parameter is."""
    return "bias" if is_bias(name) else EXPERTS if "mlp.experts." in name else "layer"


class _Shared(NamedTuple):
    """How tensor-parallel ranks share a parameter (``state.buffer.Member``)."""

    runs: int = 0
    rows: int = 1


def _shared(name: str, parameter: torch.nn.Parameter) -> _Shared:
    """What Megatron has marked: the dimension that is cut, and with a stride how often that comes one after the other.

    Queries, keys and values are one matrix that is ordered by query group, and cut like any other. Transformer Engine
    marks all its weights as cut; those that each rank has whole, Megatron marks as norms are, for sequence parallelism.
    """
    if name.endswith(".softmax_offset"):  # one of each of the rank's heads, which Megatron does not mark
        return _Shared(1, parameter.numel())
    shared = vars(parameter)
    if not shared.get("tensor_model_parallel", False) or MARK in shared:
        return _Shared()
    dim, stride = shared["partition_dim"], shared["partition_stride"]
    return _Shared(stride * math.prod(parameter.shape[:dim]), parameter.shape[dim] // stride)


def bind_stage(
    models: Sequence[GPTModel],
    layout: Layout,
    stage: int,
    groups: ParameterGroups,
    partitions: dict[int, Partition],
    units: dict[int, UnitBuffer],
    make: Callable[[int, UnitShape], Partition],
    accumulator: Accumulator,
    device: torch.device | str = "cpu",
) -> None:
    """Make the parameters of a stage's models, one for each chunk, views of flat buffers, by unit index.

    Units that are in ``units`` already keep their values, and their views if the models have parameters that are
    these; for the others ``partitions`` and ``units`` get entries, with the models' values. Where the embedding is used
    more than once, each use gets a leaf of its own. Raises ValueError when the models are not what the layout says, or
    a unit has not the shape that it had before.
    """
    parameters: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    for model in models:
        for name, of_unit in unit_parameters(model).items():
            parameters.setdefault(name, of_unit)  # where both ends of the model are here, the embedding comes twice
    names = {layout.units[unit] for unit in layout.stages[stage].units}
    if names != set(parameters):
        raise ValueError(f"stage {stage} should hold units {sorted(names)}, but its models have {sorted(parameters)}")
    for unit in layout.stages[stage].units:
        name = layout.units[unit]
        members = [
            Member(
                parameter=parameter,
                group=groups.index(full_name, parameter),
                **_shared(full_name, parameter)._asdict(),
                partial=is_partial(full_name, parameter, models[0].config),
                name=f"{_IN_LAYER.sub('', full_name)} of {name}",
            )
            for full_name, parameter in parameters[name]
        ]
        if unit not in partitions:
            experts_here = _num_experts(full_name for full_name, _ in parameters[name])
            partitions[unit] = make(unit, shape_of(name, members, layout.tp, experts_here, layout.ep))
        # How parameters are treated is known from where they were drawn: Megatron marks them when it draws them.
        sizes = [member.parameter.numel() for member in members]
        if partitions[unit].sizes != sizes:
            raise ValueError(f"unit {name} has parameters of {sizes} elements, and is to have {partitions[unit].sizes}")
        known = unit in units
        if not known:
            units[unit] = UnitBuffer(partitions[unit], accumulator, device)
        if not units[unit].is_bound(members):
            units[unit].bind(members, fill=not known)
    _tell_uses_apart(models[0], models[-1], units.get(layout.units.index("embedding")))
    if isinstance(accumulator, ExactAccumulator):
        for use in (use for model in models for use in uses(model)):
            for unit in (layout.units.index(name) for name in use.needs if name.startswith(EXPERTS)):
                experts.tell_apart(use.module, units[unit].twin)


def _tell_uses_apart(first: GPTModel, last: GPTModel, embedding: UnitBuffer | None) -> None:
    """Give each use of the embedding in a stage a leaf of its own; the first use has the parameter.

    It is used where the model begins, and where it ends: in the first model of a stage, and in the last, or in one.
    """
    if embedding is None or not (first.pre_process or last.mtp_process):
        return  # then the output layer has the only one, if any
    weight = (first if first.pre_process else last).embedding.word_embeddings.weight
    if last.mtp_process and first.pre_process:
        if last is first:
            mtp.look_up_in(last, embedding.twin(weight))
        else:
            last.embedding.word_embeddings.weight = embedding.twin(weight)
    if last.post_process and last.share_embeddings_and_output_weights:
        output = embedding.twin(weight)
        if last is first or last.mtp_process:
            last.shared_embedding_or_output_weight = lambda: output
        else:
            last.output_layer.weight = output
