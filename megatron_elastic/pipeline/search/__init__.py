"""Search: the order of a step's operations that takes least within the devices' memory.

``find`` is for layouts, ``best`` for problems of any shape. ``exact`` needs OR-Tools and is not imported here.
"""

from megatron_elastic.pipeline.search.bound import lower_bound
from megatron_elastic.pipeline.search.candidates import NotFitting, best
from megatron_elastic.pipeline.search.found import Found, bound_of, find, fits, nearly
from megatron_elastic.pipeline.search.problem import Deadlock, Orders, Problem
from megatron_elastic.pipeline.search.recompute import choose

__all__ = [
    "Deadlock", "Found", "NotFitting", "Orders", "Problem", "best", "bound_of", "choose", "find", "fits",
    "lower_bound", "nearly",
]  # fmt: skip
