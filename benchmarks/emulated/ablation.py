"""Ablation: what each axis adds after a loss, one after the other, in jobs that are alike but for that."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, progress

from emulated.cases import Case
from emulated.job import Variant, measure
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.plan.choice import SEARCH

_RESIZE = ("--elastic-dataflow", "resize")
_CLOCK = (*_RESIZE, "--elastic-dvfs", "performance")


VARIANTS = (
    Variant("dataflow", "recycle"),
    Variant("+ resize", "recycle", _RESIZE),
    Variant("+ graph", "elastic-paused", _RESIZE),
    Variant("+ clock", "elastic-paused", _CLOCK),
    Variant("+ background", "elastic", _CLOCK),
    Variant("no clocks", "elastic", _RESIZE),
    Variant("energy", "elastic", (*_RESIZE, "--elastic-dvfs", "energy")),
    Variant("order", "elastic", (), SEARCH),
    Variant("order + clock", "elastic", ("--elastic-dvfs", "performance"), SEARCH),
)
"""The first ones each add an axis to the one before; *no clocks* and *energy* are to be compared with each other. That
the *order* of work is searched needs whole micro-batches."""


def ablate(
    root: Path, options: argparse.Namespace, profile: Path, layout: Layout, cases: Sequence[Case]
) -> list[dict[str, Any]]:
    """All variants in each case; tokens a second as a share of the undisturbed rate at the base clock, and of what is
    left to compute with.
    """
    return [_of_case(root, options, profile, layout, case) for case in cases]


def _of_case(root: Path, options: argparse.Namespace, profile: Path, layout: Layout, case: Case) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for number, variant in enumerate(VARIANTS):
        run_dir = root / f"{case.lost}-{case.where}-{number}"
        try:
            found[variant.name] = measure(run_dir, options, profile, layout, variant, case)
            del found[variant.name]["predicted_share"]  # which does not know resize
        except JobFailed as error:
            progress(f"{case.lost} lost ({case.where}), {variant.name}: {error}")
    before = [found[each.name]["undisturbed_tokens_per_s"] for each in VARIANTS
             if each.name in found and each.schedule != SEARCH and "performance" not in each.flags]  # fmt: skip
    usual = statistics.median(before) if before else math.inf
    undisturbed_ms = forecast(layout, Profile.read(profile), "split").step_ms
    for name, each in found.items():
        each["forecast_share"] = round(undisturbed_ms / each["forecast_step_ms"] / case.limit_share(layout), 4)
        each["share_of_undisturbed"] = round(each["tokens_per_s"] / usual, 4)
        each["share_of_limit"] = round(each["tokens_per_s"] / usual / case.limit_share(layout), 4)
        progress(f"{case.lost} lost ({case.where}), {name}: {each['share_of_limit']:.3f} of the limit, pause "
                 f"{each['pause_s']:.1f} s, {each['joules_per_token']:.3g} J a token")
    return {"lost": case.lost, "where": case.where, "ranks": list(case.ranks),
            "limit_share": round(case.limit_share(layout), 4), "variants": found}


def table(found: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| lost | stage | axes | tokens/s | of undisturbed | of the limit | forecast | J a token | pause, s | "
             "after, s |", "|---|---|---|---|---|---|---|---|---|---|"]
    for case in found:
        for name, each in case["variants"].items():
            values = (case["lost"], case["where"], name, f"{each['tokens_per_s']:.0f}",
                      f"{each['share_of_undisturbed']:.3f}", f"{each['share_of_limit']:.3f}",
                      f"{each['forecast_share']:.3f}", f"{each['joules_per_token']:.3g}", f"{each['pause_s']:.1f}",
                      f"{each['seconds_until']:.1f}")
            lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)
