"""Layouts: who computes and who owns what. Pure Python; knows neither torch nor processes."""

from megatron_elastic.layout.codec import decode, encode
from megatron_elastic.layout.layout import Cell, Layout, LayoutError, Stage
from megatron_elastic.layout.part import Part
from megatron_elastic.layout.shape import UnitShape
from megatron_elastic.layout.transfer import Held, SliceLost, Transfer, transfers
from megatron_elastic.layout.unit import gpt_units

__all__ = [
    "Cell", "Held", "Layout", "LayoutError", "Part", "SliceLost", "Stage", "Transfer", "UnitShape", "decode", "encode", "gpt_units",
    "transfers",
]  # fmt: skip
