"""Traced: jobs on machines that come and go by a trace of real spot instances, replayed faster than it was.

A part of the trace's machines is that part of the job's ranks, which are killed and started as the trace says. How much
faster time goes (``time_scale``) holds for all that is emulated, so a job has as much work to do between two changes as
one would on real devices; what this runtime itself takes, and starting processes, is not faster, and so costs more
than it would.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import JobFailed, progress

from emulated.availability import Change, TraceError, changes, presence, read
from emulated.job import Variant
from emulated.replayed import replay
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.plan.choice import SCHEDULES, SEARCH

_SLOWER = 0.1
"""Undisturbed steps that take so much longer than foreseen tell of this machine, and not of the devices."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of ``--trace``."""
    parser.add_argument("--trace", type=Path, metavar="FILE",
                        help="instead of losses at once: machines that come and go, lines of MS,add|remove,NAME")
    parser.add_argument("--hours", type=_window, default="0.5:2.5", metavar="FROM:TO",
                        help="of the trace (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=6.0, metavar="M",
                        help="in which they are replayed, for each policy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of which ranks go (default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw what --trace gives; needs the extra [plot]")


def check_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where they cannot be meant; ``happens`` are the changes, in emulated s."""
    begin, end = options.hours
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    if options.svg is not None:
        _plotting()
    # Emulated seconds for each of the trace: the steps are as long as that makes them.
    options.step_seconds, options.time_scale = None, 60 * options.minutes / (3600 * (end - begin))
    try:
        happens = changes(read(options.trace), options.layout.ranks, 3600 * begin, 3600 * end, options.seed)
    except (OSError, TraceError) as error:
        parser.error(f"--trace: {error}")
    options.happens = [Change(each.at * options.time_scale, each.slot, each.comes) for each in happens]
    options.replicas = max(options.replicas, 2)


def run(root: Path, options: argparse.Namespace, profile: Path, layout: Layout) -> dict[str, Any]:
    """All variants, one after the other: what ``--trace`` gives, and the plot."""
    seconds, slots = 60 * options.minutes, options.layout.ranks
    found: dict[str, dict[str, Any]] = {}
    for variant in options.variants:
        each = found[variant.name] = replay(root / variant.name, options, profile, variant, options.happens)
        progress(f"{variant.name}: {each['tokens']} tokens, {each['recoveries']} recoveries"
                 + (f"; it has ended: {each['ended']}" if each["ended"] else ""))
        each["slower"] = round(_foreseen(profile, layout, variant) / each["undisturbed_tokens_per_s"] - 1, 4)
        if each["slower"] > _SLOWER:
            progress(f"WARNING: undisturbed steps take {each['slower']:.0%} longer than those of the devices would, as "
                     "this machine is too slow: give more --minutes, or more --samples and fewer --grains")
    # All jobs are the same until the trace begins.
    rate = median(each["undisturbed_tokens_per_s"] for each in found.values())
    there = presence(options.happens, slots, seconds)[-1].done
    done = {name: [(time, tokens / (rate * seconds)) for time, tokens in each.pop("done")]
            for name, each in found.items()}  # fmt: skip
    for each in found.values():
        each["share_of_undisturbed"] = round(each["tokens"] / (rate * seconds), 4)
        each["share_of_limit"] = round(each["tokens"] / (rate * seconds * there), 4)
    if options.svg is not None:
        _plotting()(done, options.happens, slots, seconds, options.time_scale, options.svg)
    return {
        "trace": str(options.trace), "policies": found, "present": round(there, 4),
        "comes": sum(each.comes for each in options.happens), "goes": sum(not each.comes for each in options.happens),
    }  # fmt: skip


def _foreseen(profile: Path, layout: Layout, variant: Variant) -> float:
    """Tokens a second with which a job begins on real devices, in the usual order if one is searched."""
    told = Profile.read(profile)
    schedule = SCHEDULES[0] if variant.schedule == SEARCH else variant.schedule
    return layout.num_grains * told.emulation.tokens * 1e3 / forecast(layout, told, schedule).step_ms


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown; times lost are of the trace, in s."""
    lines = ["| policy | tokens | of undisturbed | of what is there | recoveries | fell back | lost until it was known "
             "| in recoveries | redone | slower |", "|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, each in found.items():
        lost = each["lost_s"]
        values = (name + (", ended" if each["ended"] else ""), each["tokens"], f"{each['share_of_undisturbed']:.3f}",
                  f"{each['share_of_limit']:.3f}", each["recoveries"], each["fallbacks"], f"{lost['detect']:.0f}",
                  f"{sum(s for part, s in lost.items() if part not in ('detect', 'redo')):.0f}",
                  f"{lost['redo']:.0f}", f"{each['slower']:.3f}")  # fmt: skip
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def ended(found: dict[str, dict[str, Any]]) -> Sequence[str]:
    """Policies whose jobs have ended before their time."""
    return [name for name, each in found.items() if each["ended"]]


def _window(text: str) -> tuple[float, float]:
    begin, _, end = text.partition(":")
    try:
        found = float(begin), float(end)
    except ValueError:
        found = 0.0, 0.0
    if not 0 <= found[0] < found[1]:
        raise argparse.ArgumentTypeError(f"{text} is not like 0.5:2.5, from the earlier to the later")
    return found


def _plotting() -> Any:
    """What draws. Raises JobFailed without matplotlib."""
    try:
        from emulated.plot import draw
    except ImportError as error:
        raise JobFailed(f"--svg needs matplotlib ({error}); install it: pip install 'megatron-elastic[plot]'") from None
    return draw
