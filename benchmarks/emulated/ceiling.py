"""Ceiling: what could at most be made of a loss, by the bound that no layout is below."""

from __future__ import annotations

from dataclasses import replace

from emulated.cases import Case
from emulated.job import EXECUTABLE, foresee
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.bound import least_step_ms

_RIVALS = ("recycle", "column")
_THEIRS = "split"
"""The schedule by which they are foreseen."""


def ceiling(layout: Layout, profile: Profile, case: Case, replicas: int) -> dict[str, float | None]:
    """What the bound is as a share of the limit, and as a multiple of what each rival is foreseen to come to; None for
    one that cannot go on. At the base clock.
    """
    costs = replace(profile.costs(layout.units), overhead_ms=0.0)
    least = least_step_ms(costs, len(layout.cells) - case.lost, layout.num_grains, layout.samples, replicas)
    found: dict[str, float | None] = {
        "share_of_limit": round(forecast(layout, profile, _THEIRS).step_ms / least / case.limit_share(layout), 4)
    }
    for name in _RIVALS:
        try:
            reached = foresee(EXECUTABLE[name], layout, case.ranks, costs, _THEIRS)
        except NoLayout:
            found[name] = None
        else:
            found[name] = round(forecast(reached, profile, _THEIRS).step_ms / least, 4)
    return found
