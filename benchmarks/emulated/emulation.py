"""What does emulating cost, and is a step as long as it should be? ``megatron-elastic bench emulation``.

Jobs without losses take turns: ranks that compute next to nothing and emulate nothing (``bare``), that emulate devices
of no time (``instant``), and that emulate a model on named devices (``emulated``). Of the last the step is held against
the forecast; between the others lies what emulation itself costs. A step cannot be emulated faster than ``instant``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import emit, load_average, progress, run_job, run_root

from emulated.job import SCRIPT, asked_for, drawn, flags_of_job
from megatron_elastic.emulation import command
from megatron_elastic.emulation.derive import scaled
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_metrics

_INSTANT = 1e-6
"""Of the times of the profile."""
_LEFT_OUT = 2
"""Steps at the beginning, which also warm things up."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench emulation",
        description="What emulated accelerators cost, and whether a step takes what it should.")
    parser.add_argument("--emulate", choices=tuple(MODELS), default="llama2-13b", help="default: %(default)s")
    command.add_flags(parser)
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="of each job (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="jobs of each kind (default: %(default)s)")
    parser.add_argument("--kinds", default="bare,instant,emulated", metavar="NAMES", help="default: %(default)s")
    options = parser.parse_args(argv)
    options.model, options.kinds = options.emulate, options.kinds.split(",")
    if unknown := [kind for kind in options.kinds if kind not in ("bare", "instant", "emulated")]:
        parser.error(f"unknown kind {', '.join(unknown)}: bare, instant, emulated")
    if options.steps <= _LEFT_OUT or options.rounds < 1:
        parser.error(f"--steps must be more than {_LEFT_OUT} and --rounds at least 1")
    return options


def figures(times: dict[str, list[float]], late: Sequence[float], profile: Profile, layout: Layout) -> dict[str, Any]:
    """Medians, what emulation costs, and by how much the forecast is off."""
    found: dict[str, Any] = {"step_ms": {kind: round(statistics.median(each), 1) for kind, each in times.items()}}
    step = found["step_ms"]
    if {"bare", "instant"} <= times.keys():
        found["cost_ms"] = round(step["instant"] - step["bare"], 1)
    if "emulated" in times:
        expected = forecast(layout, profile, "1f1b").step_ms
        found |= {"forecast_step_ms": round(expected, 1), "forecast_error": round(expected / step["emulated"] - 1, 4),
                  "worst_step_ms": round(max(times["emulated"]), 1), "late_ms": round(statistics.median(late), 1)}
    return found


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options, load = parse_args(argv), load_average()
    profile, layout = asked_for(options)
    times: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    late: list[float] = []
    with run_root() as root:
        flags = flags_of_job(options, options.steps)
        for turn in range(options.rounds):
            for kind in options.kinds:
                run_dir = root / f"round{turn + 1}-{kind}"
                run_job(run_dir, len(layout.ranks), [*flags, *_flags_of(kind, profile, layout, root)], SCRIPT)
                steps = [line["step_ms"] for step, line in read_metrics(run_dir).items() if step > _LEFT_OUT]
                times[kind] += steps
                if kind == "emulated":
                    late += [ms for step, ms in drawn(run_dir).late_ms.items() if step > _LEFT_OUT]
                progress(f"{kind}: {statistics.median(steps):.0f} ms a step")
    found = figures(times, late, profile, layout)
    print(found, file=sys.stderr)
    emit("emulation", argv, {
        **found, "model": options.emulate, "device": options.device, "ranks": len(layout.ranks),
        "grains": layout.num_grains, "steps_counted": (options.steps - _LEFT_OUT) * options.rounds,
        "load_before": load,
    })
    return 0


def _flags_of(kind: str, profile: Profile, layout: Layout, root: Path) -> list[str]:
    if kind == "bare":
        return []
    path = root / f"{kind}.json"
    path.write_text((scaled(profile, layout, _INSTANT) if kind == "instant" else profile).text)
    return ["--elastic-emulate", str(path)]
