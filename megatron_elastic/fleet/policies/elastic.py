"""Elastic: our own. Any number of cells, while training goes on, and bit for bit the same."""

from __future__ import annotations

from megatron_elastic.fleet.controller import Controller
from megatron_elastic.fleet.observation import Overhead
from megatron_elastic.fleet.policies.tables import uneven


def elastic(overhead: Overhead) -> Controller:
    """``overhead``: a pause at the switch, and before it the time in which new ranks start and are filled."""
    return Controller("elastic", uneven, overhead, keeps_work=True)
