"""Slowed: emulated jobs in which one rank becomes slower than the others, for good or in bursts."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import JobFailed, progress, run_job

from emulated.job import (
    EXECUTABLE,
    KILLED_AT,
    SCRIPT,
    Variant,
    drawn,
    flags_of_job,
    flags_under,
    joules,
    rate,
    rate_since,
    reason_of,
    undisturbed_steps,
    usual_rate,
)
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_events, read_metrics
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.work.order import foreseen

_HEEDING = ("elastic", "elastic-paused", "resihp", "chameleon")
"""Policies that do something about ranks that are slow."""


@dataclass(frozen=True, slots=True)
class Slow:
    """From step KILLED_AT on computing takes ``factor`` times as long on ``rank``; with ``bursts`` for so many steps,
    then as long as on others for as many, and so on.
    """

    rank: int
    factor: float
    bursts: int | None = None

    @classmethod
    def parse(cls, text: str) -> Slow:
        """Of ``RANK:FACTOR``. Raises ArgumentTypeError."""
        rank, _, factor = text.partition(":")
        try:
            found = cls(int(rank), float(factor))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text} is not like 5:2 (RANK:FACTOR)") from None
        if found.rank < 0 or not 1 < found.factor < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}: FACTOR is how many times as long computing takes, so above 1: "
                                             "for half the speed it is 2")
        return found

    def limit_share(self, layout: Layout) -> float:
        """Of what there is to compute with, how much is left: its cell is as slow as it is."""
        lost = (1 - 1 / self.factor) * (1.0 if self.bursts is None else 0.5)
        return 1 - lost / len(layout.cells)

    def flags(self, steps: int) -> list[str]:
        """Of a job of so many steps."""
        at = range(KILLED_AT, steps + 1, self.bursts or steps)
        factors = [(step, 1.0 if number % 2 else self.factor) for number, step in enumerate(at)]
        return [text for step, factor in factors
                for text in ("--elastic-inject", f"slow:rank={self.rank},step={step},at=forward,factor={factor:g}")]


def predict_case(options: argparse.Namespace, profile: Profile, layout: Layout, slow: Slow) -> dict[str, Any]:
    """What planners and simulation say of all variants, when all that they do about it is done."""
    found: dict[str, dict[str, Any]] = {}
    for variant in options.variants:
        try:
            found[variant.name] = {"predicted_share": predicted_share(profile, variant, layout, slow)}
        except NoLayout as error:
            found[variant.name] = {"failed": str(error)}
    return _case(slow, layout) | {"policies": found}


def predicted_share(profile: Profile, variant: Variant, layout: Layout, slow: Slow) -> float | None:
    """What planners and simulation say of ``settled_share``; None for what comes and goes, and with planned clocks.
    Raises NoLayout.
    """
    if slow.bursts is not None or variant.dvfs is not None:
        return None
    costs, policy, schedules = profile.costs(layout.units), EXECUTABLE[variant.policy], foreseen(variant.schedule)
    usual = policy.settle(layout, costs, schedules)
    heeded = variant.policy in _HEEDING and slow.rank in usual.ranks
    known = {usual.cell_of(slow.rank).leader: slow.factor} if heeded else {}
    reached = policy.settle(usual, replace(costs, slow=known), schedules)
    after = forecast(reached, profile, variant.schedule, {slow.rank: 1 / slow.factor}).step_ms
    return round(forecast(layout, profile, variant.schedule).step_ms / after / slow.limit_share(layout), 4)


def _case(slow: Slow, layout: Layout) -> dict[str, Any]:
    return {"slow": f"{slow.rank}:{slow.factor:g}", "bursts": slow.bursts,
            "limit_share": round(slow.limit_share(layout), 4)}


def run_case(
    root: Path, options: argparse.Namespace, profile: Path, layout: Layout, slow: Slow
) -> dict[str, Any]:
    """All variants."""
    found: dict[str, dict[str, Any]] = {}
    for number, variant in enumerate(options.variants):
        try:
            run_dir = root / f"slow-{slow.rank}-{slow.factor:g}-{number}"
            found[variant.name] = _measure(run_dir, options, profile, layout, variant, slow)
            found[variant.name]["predicted_share"] = predicted_share(Profile.read(profile), variant, layout, slow)
        except JobFailed as error:
            found[variant.name] = {"tokens_per_s": 0.0, "share_of_limit": 0.0, "failed": reason_of(str(error))}
    undisturbed = usual_rate(options.variants, [found])
    for name, each in found.items():
        if "failed" not in each and undisturbed:
            each["share_of_limit"] = round(each["tokens_per_s"] / undisturbed / slow.limit_share(layout), 4)
            each["settled_share"] = round(each["settled_tokens_per_s"] / undisturbed / slow.limit_share(layout), 4)
        progress(f"rank {slow.rank} {slow.factor:g} times as slow, {name}: {each}")
    return _case(slow, layout) | {"undisturbed_tokens_per_s": undisturbed, "policies": found}


def _measure(
    run_dir: Path, options: argparse.Namespace, profile: Path, layout: Layout, variant: Variant, slow: Slow
) -> dict[str, Any]:
    heeds = "share" if variant.policy in _HEEDING else "off"
    flags = [*flags_of_job(options, options.steps), *flags_under(variant, profile), "--elastic-slow", heeds]
    run_job(run_dir, len(layout.ranks), [*flags, *slow.flags(options.steps)], SCRIPT)
    return figures(run_dir, Profile.read(profile), slow)


def figures(run_dir: Path, profile: Profile, slow: Slow) -> dict[str, Any]:
    """Of a job that has ended. ``tokens_per_s``: of all the time since it began; ``settled_tokens_per_s``: the median
    of the last half of the steps. ``alarms``: how often a rank was taken for slow, which was (``right``) or was not.
    """
    metrics, noted = read_metrics(run_dir), drawn(run_dir)
    after = [step for step in metrics if step >= KILLED_AT]
    alarms = Counter("right" if slow.rank in event["ranks"] else "wrong" for event in read_events(run_dir)
                     if event["kind"] == "slow")  # fmt: skip
    return {
        "tokens_per_s": round(rate_since(metrics, profile, noted, KILLED_AT), 1),
        "settled_tokens_per_s": round(rate(metrics, profile, after[len(after) // 2 :]), 1),
        "undisturbed_tokens_per_s": round(rate(metrics, profile, undisturbed_steps(metrics)), 1),
        "joules_per_token": round(joules(metrics, profile, noted, after), 5),
        "alarms": {"right": alarms["right"], "wrong": alarms["wrong"]},
        "changes": sum(event["kind"] == "switched" for event in read_events(run_dir)),
        "late_ms": round(statistics.median(noted.late_ms[step] for step in after), 1),
    }


def predictions(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """What ``predict_case`` says of cases and variants, in Markdown."""
    lines = [f"| slow | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for case in found:
        shares = [_share(case["policies"][name].get("predicted_share")) for name in names]
        lines.append(f"| {case['slow']} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.3f}"


def table(found: list[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| slow | policy | tokens/s | of the limit | at the end | predicted | alarms: right, wrong | changes |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for case in found:
        for name, each in case["policies"].items():
            if "failed" not in each:
                values = (case["slow"] + ("" if case["bursts"] is None else f", {case['bursts']} steps in turn"), name,
                          f"{each['tokens_per_s']:.0f}", f"{each['share_of_limit']:.3f}",
                          f"{each['settled_share']:.3f}", _share(each["predicted_share"]),
                          f"{each['alarms']['right']}, {each['alarms']['wrong']}",
                          each["changes"])  # fmt: skip
                lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)
