"""Layouts: who computes and who owns what. Pure Python; knows neither torch nor processes."""

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.encoding.codec import decode, encode
from megatron_elastic.layout.encoding.difference import changed, difference
from megatron_elastic.layout.errors import LayoutError, SliceLost
from megatron_elastic.layout.holdings import Extent, Holdings, SlicePart
from megatron_elastic.layout.layout import Layout
from megatron_elastic.layout.part import Part
from megatron_elastic.layout.shape import ParameterShape, UnitShape
from megatron_elastic.layout.stage import Stage
from megatron_elastic.layout.transfer import Transfer, by_rank, transfers
from megatron_elastic.layout.unit import EXPERTS, MTP, gpt_units
from megatron_elastic.layout.way import PLACEMENTS, Placement, Position, joined, placement_of, positions, way

__all__ = [
    "EXPERTS", "MTP", "PLACEMENTS", "Cell", "Extent", "Holdings", "Layout", "LayoutError", "ParameterShape", "Part",
    "Placement", "Position", "SliceLost", "SlicePart", "Stage", "Transfer", "UnitShape", "by_rank", "changed", "decode",
    "difference", "encode", "gpt_units", "joined", "placement_of", "positions", "transfers", "way",
]  # fmt: skip
