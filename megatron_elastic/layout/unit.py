"""Unit: what moves between stages. Embedding, positions, a layer, its experts, a prediction further ahead, the head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, islice

from megatron_elastic.layout.errors import LayoutError
from megatron_elastic.layout.way import way

EXPERTS = "experts"
"""What the names of units of experts begin with."""
MTP = "mtp"
"""What the names of units begin with that predict further tokens (multi-token prediction)."""


def gpt_units(
    num_layers: int, pp: int, tied: bool, positions: bool, chunks: int = 1,
    split: Sequence[Sequence[int]] | None = None, routed: Collection[int] = (), biased: bool = False, mtp: int = 0,
    through: Sequence[int] | None = None,
) -> tuple[list[str], list[list[int]]]:
    """Names of a GPT's units, and the ascending unit indices of each of ``pp`` stages.

    The units are ``embedding`` (the word embeddings alone), ``positions`` (only where they are learned), ``layer.0``
    to ``layer.{num_layers-1}``, and ``head`` (final norm, and the output weight when untied). After a layer that is
    ``routed`` come its ``experts.{layer}``, which the ranks of a cell divide in another way, and if routers are
    ``biased``, ``bias.{layer}``, which has a type of its own. Before the head, and always with it, are ``mtp`` layers
    that predict further tokens, ``mtp.0`` on; experts of these have the numbers that follow on the last layer's.
    Layers are split evenly over the stages, or into ``chunks`` for each stage; or as ``split`` says, which is the
    number of layers of each stage's chunks. ``through`` says on which stages they are in turn (``layout.way``); by
    default all stages have one, and then the next.
    With ``tied`` the end of the model needs the embedding, too. If that is in another stage, both hold it, which is why
    positions, which the end lacks, are a unit of their own. Raises LayoutError when the layers cannot be split evenly.
    """
    if split is None:
        if pp < 1 or chunks < 1 or num_layers < 1 or num_layers % (pp * chunks) != 0:
            of = f" of {chunks} chunks" if chunks > 1 else ""
            raise LayoutError(f"{num_layers} layers cannot be split evenly over {pp} pipeline stages{of}")
        split = [[num_layers // (pp * chunks)] * chunks] * pp
    before = ["embedding", "positions"] if positions else ["embedding"]
    names, layers = list(before), []
    for layer in range(num_layers + mtp):
        first = len(names)
        names.append(f"layer.{layer}" if layer < num_layers else f"{MTP}.{layer - num_layers}")
        if layer in routed:
            names += [f"{kind}.{layer}" for kind in (EXPERTS, *(["bias"] if biased else []))]
        layers.append(list(range(first, len(names))))
    names.append("head")
    left = iter(layers[:num_layers])
    stages: list[list[int]] = [[] for _ in split]
    counts = [iter(each) for each in split]
    through = way("loop", len(split), len(split[0])) if through is None else through
    for stage in through:
        stages[stage].extend(chain.from_iterable(islice(left, next(counts[stage]))))
    stages[0] = [*range(len(before)), *stages[0]]
    end = stages[through[-1]]
    end += [*chain.from_iterable(layers[num_layers:]), len(names) - 1]
    if tied and through[-1] != 0:
        end.insert(0, 0)
    return names, stages
