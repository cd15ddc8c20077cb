"""Plans: an old layout and what happened in, a new layout out. Pure Python; knows neither torch nor processes."""

from megatron_elastic.plan.costs.cost import Costs, ProfileError
from megatron_elastic.plan.costs.profile import Sample, measured
from megatron_elastic.plan.errors import NoLayout, StateLost
from megatron_elastic.plan.growth import admit, improve
from megatron_elastic.plan.loss import at_home, everything, lose, readable, release
from megatron_elastic.plan.replan import replan
from megatron_elastic.plan.reshape import reshape

__all__ = [
    "Costs", "NoLayout", "ProfileError", "Sample", "StateLost", "admit", "at_home", "everything", "improve", "lose",
    "measured", "readable", "release", "replan", "reshape",
]  # fmt: skip
