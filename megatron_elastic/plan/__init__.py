"""Plans: an old layout and what happened in, a new layout out. Pure Python; knows neither torch nor processes."""

from megatron_elastic.plan.growth import improve
from megatron_elastic.plan.loss import NoLayout, StateLost, everything, lose

__all__ = ["NoLayout", "StateLost", "everything", "improve", "lose"]
