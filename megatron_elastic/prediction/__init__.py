"""Prediction: ``megatron-elastic predict``, which says how long steps take and what memory they need, without a job."""

from megatron_elastic.prediction.command import main, make_parser

__all__ = ["main", "make_parser"]
