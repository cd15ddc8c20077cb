"""Plans: an old layout and what happened in, a new layout out. Pure Python; knows neither torch nor processes."""

from megatron_elastic.plan.loss import NoLayout, lose

__all__ = ["NoLayout", "lose"]
