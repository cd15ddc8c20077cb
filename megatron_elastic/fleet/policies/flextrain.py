"""FlexTrain: elastic jobs grow, in stages or in stages and widths, when a Poisson estimate says that it pays.

Source: FlexTrain's slides (MLSys 2026); they give no formula, and ``benefit.py`` is our reading, the same as for our
own policy. What differs is which layouts there are, and that a change goes through a resharded checkpoint.
"""

from __future__ import annotations

from megatron_elastic.fleet.controller import Controller
from megatron_elastic.fleet.observation import Overhead
from megatron_elastic.fleet.policies.tables import both, pipeline_parallel


def flextrain_pp(overhead: Overhead) -> Controller:
    """Stages are added and taken away."""
    return Controller("flextrain-pp", pipeline_parallel, overhead)


def flextrain_dp_pp(overhead: Overhead) -> Controller:
    """Stages and widths change."""
    return Controller("flextrain-dp-pp", both, overhead)
