"""Unit: what moves between stages. The embedding, the positions, one transformer layer, its experts, the head."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, islice

from megatron_elastic.layout.errors import LayoutError

EXPERTS = "experts"
"""What the names of units of experts begin with."""


def gpt_units(
    num_layers: int, pp: int, tied: bool, positions: bool, chunks: int = 1,
    split: Sequence[Sequence[int]] | None = None, routed: Collection[int] = (), biased: bool = False,
) -> tuple[list[str], list[list[int]]]:
    """Names of a GPT's units, and the ascending unit indices of each of ``pp`` stages.

    The units are ``embedding`` (the word embeddings alone), ``positions`` (only where they are learned), ``layer.0``
    to ``layer.{num_layers-1}``, and ``head`` (final norm, and the output weight when untied). After a layer that is
    ``routed`` come its ``experts.{layer}``, which the ranks of a cell divide in another way, and if routers are
    ``biased``, ``bias.{layer}``, which has a type of its own. Layers are split evenly over the stages, or into
    ``chunks`` for each stage, which all stages take in turn; or as ``split`` says, which is the number of layers of
    each stage's chunks.
    A tied embedding is one unit of two stages: with ``tied`` and pp > 1 the last stage holds it too, which is why
    positions, which the last stage lacks, are a unit of their own. Raises LayoutError when the layers cannot be split
    evenly.
    """
    if split is None:
        if pp < 1 or chunks < 1 or num_layers < 1 or num_layers % (pp * chunks) != 0:
            of = f" of {chunks} chunks" if chunks > 1 else ""
            raise LayoutError(f"{num_layers} layers cannot be split evenly over {pp} pipeline stages{of}")
        split = [[num_layers // (pp * chunks)] * chunks] * pp
    before = ["embedding", "positions"] if positions else ["embedding"]
    names, layers = list(before), []
    for layer in range(num_layers):
        kinds = ["layer", EXPERTS, *(["bias"] if biased else [])] if layer in routed else ["layer"]
        layers.append(list(range(len(names), len(names) + len(kinds))))
        names += [f"{kind}.{layer}" for kind in kinds]
    names.append("head")
    left = iter(layers)
    stages: list[list[int]] = [[] for _ in split]
    for chunk in zip(*split, strict=True):
        for stage, count in zip(stages, chunk, strict=True):
            stage.extend(chain.from_iterable(islice(left, count)))
    stages[0] = [*range(len(before)), *stages[0]]
    stages[-1] = [*stages[-1], len(names) - 1]
    if tied and pp > 1:
        stages[-1] = [0, *stages[-1]]
    return names, stages
