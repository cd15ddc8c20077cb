"""Planner: ``megatron-elastic plan``, which shows what an event would make of a layout, without a job."""

from megatron_elastic.planner.command import main, make_parser
from megatron_elastic.planner.outcome import plan

__all__ = ["main", "make_parser", "plan"]
