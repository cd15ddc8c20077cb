"""Unit: what moves between stages. The embedding, the positions, one transformer layer, the head."""

from __future__ import annotations

from megatron_elastic.layout.errors import LayoutError


def gpt_units(
    num_layers: int, pp: int, tied: bool, positions: bool, chunks: int = 1
) -> tuple[list[str], list[list[int]]]:
    """Names of a GPT's units, and the ascending unit indices of each of ``pp`` stages.

    The units are ``embedding`` (the word embeddings alone), ``positions`` (only where they are learned), ``layer.0``
    to ``layer.{num_layers-1}``, and ``head`` (final norm, and the output weight when untied). Layers are split evenly
    over the stages, or into ``chunks`` for each stage, which all stages take in turn.
    A tied embedding is one unit of two stages: with ``tied`` and pp > 1 the last stage holds it too, which is why
    positions, which the last stage lacks, are a unit of their own. Raises LayoutError when the layers cannot be split
    evenly.
    """
    if pp < 1 or chunks < 1 or num_layers < 1 or num_layers % (pp * chunks) != 0:
        of = f" of {chunks} chunks" if chunks > 1 else ""
        raise LayoutError(f"{num_layers} layers cannot be split evenly over {pp} pipeline stages{of}")
    before = ["embedding", "positions"] if positions else ["embedding"]
    names = [*before, *(f"layer.{layer}" for layer in range(num_layers)), "head"]
    each = num_layers // (pp * chunks)
    layers = range(len(before), len(before) + num_layers)
    stages = [[unit for unit in layers if (unit - len(before)) // each % pp == stage] for stage in range(pp)]
    stages[0] = [*range(len(before)), *stages[0]]
    stages[-1] = [*stages[-1], len(names) - 1]
    if tied and pp > 1:
        stages[-1] = [0, *stages[-1]]
    return names, stages
