"""Layouts: read once, whoever gets them and in however many histories."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from megatron_elastic.layout import Layout, decode, encode, gpt_units


@lru_cache(1 << 14)
def decoded(data: bytes) -> Layout:
    """The layout of these bytes; validated."""
    layout = decode(data)
    layout.validate()
    return layout


@lru_cache(1 << 10)
def first_layout(
    tp: int, pp: int, dp: int, layers: int, tied: bool, slices: int, replicas: int, per_host: int,
    divided: str, spares: bool,
) -> tuple[Layout, bytes]:
    """The layout that a job begins with, and its bytes."""
    cp, ep = tp if divided in ("contexts", "both") else 1, tp if divided in ("experts", "both") else 1
    units, stages = gpt_units(layers, pp, tied, positions=False, routed=range(layers) if ep > 1 else ())
    tp = tp if divided == "tensors" else 1
    layout = Layout.grid(tp=tp, cp=cp, ep=ep, pp=pp, dp=dp, stage_units=stages, units=units, num_grains=2 * dp,
                         num_slices=slices, replicas=replicas, ranks_per_host=per_host)
    layout = replace(layout, most_cells=pp * dp) if spares else layout
    return layout, encode(layout)
