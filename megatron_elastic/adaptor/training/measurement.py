"""Measurement: what a rank tells of its stage, for planning."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.meter import Measured
from megatron_elastic.plan import Sample
from megatron_elastic.plan.costs.cost import UnitCost
from megatron_elastic.state.buffer import UnitBuffer

_STATE_BYTES = 4
"""Of an element of the master weights and of each moment."""


def of_stage(
    layout: Layout,
    rank: int,
    times: Mapping[str, Measured],
    overhead_ms: float,
    boundary: tuple[int, float | None],
    units: Mapping[int, UnitBuffer],
    moments: int,
) -> Sample:
    """Costs of the units that are at home in the rank's stage.

    ``boundary``: bytes of a grain's activation, and its ms to the next stage. ``moments``: how many tensors the
    optimizer keeps for each weight besides the master weights.
    """
    costs = {}
    nothing = Measured(0.0, 0.0, 0)
    for unit in layout.at_home(layout.stage_of(rank)):
        ms, buffer = times.get(layout.units[unit], nothing), units[unit]
        costs[unit] = UnitCost(
            forward_ms=ms.forward_ms,
            backward_ms=ms.backward_ms,
            parameter_bytes=buffer.params.nbytes + buffer.sums.nbytes,
            optimizer_bytes=buffer.params.numel() * _STATE_BYTES * (1 + moments),
            activation_bytes=ms.activation_bytes,
            late_bytes=ms.late_bytes,
        )
    return Sample(costs, boundary[0], boundary[1], overhead_ms)
