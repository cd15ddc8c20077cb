"""``megatron.core.transformer``: which layers a stage holds.

Megatron derives them from the pipeline's rank and size, evenly or by a table that is the same for the whole run. Here
the layout says it, so the two functions that everybody asks are answered from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_elastic.adaptor import targets


def hold(chunks: Sequence[range]) -> None:
    """From now on this rank's models have these layers, numbered from 0; ``vp_stage`` says which model it is."""
    for target in (targets.BLOCK_LAYERS, targets.SPECS_LAYERS):
        target.replace(lambda config, vp_stage=None, pp_rank=None: len(chunks[vp_stage or 0]))
    for target in (targets.LAYER_OFFSET, targets.BLOCK_OFFSET, targets.SPECS_OFFSET):
        target.replace(lambda config, vp_stage=None, pp_rank=None: chunks[vp_stage or 0].start)


def layers_of(names: Sequence[str]) -> range:
    """The consecutive layers among units with these names (``layer.3``). Raises ValueError if there are none."""
    numbers = [int(name.partition(".")[2]) for name in names if name.startswith("layer.")]
    if not numbers:
        raise ValueError(f"a chunk of units {list(names)} has no transformer layer")
    return range(numbers[0], numbers[-1] + 1)
