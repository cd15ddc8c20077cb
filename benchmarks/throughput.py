"""How fast is a job after losses, by policy? ``megatron-elastic bench throughput``.

Ranks emulate accelerators (``--elastic-emulate``): a published model on named devices, in real processes under the real
runtime. Cells are lost at once, in one stage or in different ones; every job has as many replicas of each slice as the
largest case needs, in order not to lose state. When a policy has done all that it does about that,
tokens a second count, as a share of what is left to compute with (``share_of_limit``), beside what its planner
predicted, and energy. All are figures of the real devices; only ``step_ms`` are emulated milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, emit, load_average, progress, run, run_root
from emulated import ablation
from emulated.cases import WHERE, Case, cases
from emulated.job import KILLED_AT, add_flags, asked_for, check_flags, measure, reason_of

from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench throughput",
        description="Tokens a second and energy after losses, on emulated accelerators, for each policy.")
    add_flags(parser)
    parser.add_argument("--lose", default="1,2,3", metavar="N,...", help="cells at once (default: %(default)s)")
    parser.add_argument("--where", default=",".join(WHERE), metavar="NAMES",
                        help="same: stage; different: ones (default: %(default)s)")
    parser.add_argument("--ablate", action="store_true",
                        help="instead of policies: what dataflow, resize, graph, clock and background migration each "
                        "add; cutting micro-batches needs --samples of 2 or more")
    parser.add_argument("--steps", type=int, default=24, metavar="N",
                        help=f"of each job; the loss is in step {KILLED_AT} (default: %(default)s)")
    options = parser.parse_args(argv)
    check_flags(parser, options)
    options.places = options.where.split(",")
    if unknown := [name for name in options.places if name not in WHERE]:
        parser.error(f"--where {', '.join(unknown)}: one of {', '.join(WHERE)}")
    if not all(count.isdecimal() and int(count) for count in options.lose.split(",")):
        parser.error(f"--lose {options.lose} is not like 1,2,3")
    options.counts = [int(count) for count in options.lose.split(",")]
    # Cells that go at once may be all that have a slice, unless there is one copy more.
    options.replicas = max(options.replicas, *options.counts)
    if options.steps < KILLED_AT + 4:
        parser.error(f"--steps must be at least {KILLED_AT + 4}: the loss is in step {KILLED_AT}")
    return options


def run_case(root: Path, options: argparse.Namespace, profile: Path, layout: Layout, case: Case) -> dict[str, Any]:
    """All policies in one case."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.policies:
        run_dir = root / f"{case.lost}-{case.where}-{name}"
        try:
            found[name] = measure(run_dir, options, profile, layout, name, case)
        except JobFailed as error:
            found[name] = {"tokens_per_s": 0.0, "share_of_undisturbed": 0.0, "share_of_limit": 0.0,
                           "failed": reason_of(str(error))}
            progress(f"{case.lost} lost ({case.where}), {name}: {error}")
    limit, going_on = case.limit_share(layout), {name: each for name, each in found.items() if "failed" not in each}
    # All jobs are the same until then; of two steps each, some are early or late.
    before = [each["undisturbed_tokens_per_s"] for each in going_on.values()]
    undisturbed = statistics.median(before) if before else 0.0
    for name, each in going_on.items():
        each["share_of_undisturbed"] = round(each["tokens_per_s"] / undisturbed, 4)
        each["share_of_limit"] = round(each["tokens_per_s"] / undisturbed / limit, 4)
        progress(f"{case.lost} lost ({case.where}), {name}: {each['share_of_limit']:.3f} of the limit, predicted "
                 f"{each['predicted_share']:.3f}; {each['joules_per_token']:.3g} J a token; forecast off by "
                 f"{each['forecast_error']:+.1%}")
    return {"lost": case.lost, "where": case.where, "ranks": list(case.ranks), "limit_share": round(limit, 4),
            "undisturbed_tokens_per_s": undisturbed, "policies": found}


def table(found: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| lost | stage | policy | tokens/s | of undisturbed | of the limit | predicted | J a token | after, s |",
             "|---|---|---|---|---|---|---|---|---|"]
    for case in found:
        for name, each in _going_on(case):
            values = (case["lost"], case["where"], name, f"{each['tokens_per_s']:.0f}",
                      f"{each['share_of_undisturbed']:.3f}", f"{each['share_of_limit']:.3f}",
                      f"{each['predicted_share']:.3f}", f"{each['joules_per_token']:.3g}",
                      f"{each['seconds_until']:.1f}")
            lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def _going_on(case: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Policies with which the job went on."""
    return [(name, each) for name, each in case["policies"].items() if "failed" not in each]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished."""
    options, load = parse_args(argv), load_average()
    profile, layout = asked_for(options)
    wanted = list(cases(layout, options.counts, options.places))
    if not wanted:
        raise JobFailed(f"--lose {options.lose}: a stage of {options.layout.dp} cells has none left")
    with run_root() as root:
        path = root / "profile.json"
        path.write_text(profile.text)
        if options.ablate:
            axes = ablation.ablate(root, options, path, layout, wanted)
        else:
            found = [run_case(root, options, path, layout, case) for case in wanted]
    if options.ablate:
        print(ablation.table(axes), file=sys.stderr)
        emit("throughput", argv, {"ablation": axes, **_common(options, profile, layout), "load_before": load})
        return 0
    print(table(found), file=sys.stderr)
    errors = [abs(each["forecast_error"]) for case in found for _, each in _going_on(case)]
    emit("throughput", argv, {
        "cases": found, **_common(options, profile, layout), "worst_forecast_error": max(errors, default=None),
        "load_before": load,
    })
    return 0


def _common(options: argparse.Namespace, profile: Profile, layout: Layout) -> dict[str, Any]:
    """What was asked for."""
    return {"model": options.emulate, "device": options.device, "ranks": options.layout.ranks,
            "grains": layout.num_grains, "tokens_per_grain": profile.emulation.tokens,
            "efficiency": options.efficiency, "time_scale": round(profile.emulation.time_scale, 4),
            "steps": options.steps, "schedule": options.schedule}


if __name__ == "__main__":
    run("throughput", main)
