"""Layouts: read once, whoever gets them and in however many histories."""

from __future__ import annotations

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
    experts: bool,
) -> tuple[Layout, bytes]:
    """The layout that a job begins with, and its bytes."""
    units, stages = gpt_units(layers, pp, tied, positions=False, routed=range(layers) if experts else ())
    tp, ep = (1, tp) if experts else (tp, 1)
    layout = Layout.grid(tp=tp, ep=ep, pp=pp, dp=dp, stage_units=stages, units=units, num_grains=2 * dp,
                         num_slices=slices, replicas=replicas, ranks_per_host=per_host)
    return layout, encode(layout)
