"""How fast is a job after losses, with slow ranks, or on machines that come and go, by policy?
``megatron-elastic bench throughput``.

Ranks emulate accelerators (``--elastic-emulate``): a published model on named devices, in real processes under the real
runtime. Cells are lost at once, in one stage or in different ones; every job has as many replicas of each slice as the
largest case needs, in order not to lose state. When a policy has done all that it does about that,
tokens a second count, as a share of what is left to compute with (``share_of_limit``), beside what its planner
predicted, and energy; ``share_of_limit_since`` is that of all the time since the loss, transitions counted. All are
figures of the real devices; only ``step_ms`` are emulated milliseconds. ``ceiling`` is what no layout can pass, as a
share of the limit, and as a multiple of what recycle and column are predicted to come to.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, emit, load_average, progress, run_root

from emulated import ablation, slowed, traced
from emulated.cases import WHERE, Case, cases, most_of_a_stage
from emulated.ceiling import ceiling
from emulated.job import (
    KILLED_AT,
    Variant,
    add_flags,
    asked_for,
    check_flags,
    measure,
    predicted_share,
    reason_of,
    usual_rate,
)
from emulated.slowed import Slow
from megatron_elastic import usage
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.plan import NoLayout


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench throughput",
        description="Tokens a second and energy after losses, with slow ranks, or on machines that come and go, on "
        "emulated accelerators, for each policy.")
    add_flags(parser)
    parser.add_argument("--lose", default="1,2,3", metavar="N,...", help="cells at once (default: %(default)s)")
    parser.add_argument("--where", default=",".join(WHERE), metavar="NAMES",
                        help="same: stage; different: ones (default: %(default)s)")
    parser.add_argument("--slow", type=Slow.parse, action="append", default=[], metavar="RANK:FACTOR",
                        help="instead of losses: computing takes FACTOR times as long there; may be repeated, "
                        "for several cases")
    parser.add_argument("--bursts", type=usage.count, metavar="N",
                        help="with --slow: for N steps in turn, and not for good")
    traced.add_flags(parser)
    parser.add_argument("--ablate", action="store_true",
                        help="instead of policies: what dataflow, resize, graph, clock and background migration each "
                        "add; cutting micro-batches needs --samples of 2 or more")
    parser.add_argument("--steps", type=usage.count, default=24, metavar="N",
                        help=f"of each job; the loss is in step {KILLED_AT} (default: %(default)s)")
    parser.add_argument("--predict", action="store_true",
                        help="run nothing: what planners and simulation say of losses, or of --slow, as shares of the "
                        "limit")
    parser.add_argument("--rounds", type=usage.count, default=1, metavar="N",
                        help="jobs of each policy and loss, whose medians count (default: %(default)s)")
    options = parser.parse_args(argv)
    check_flags(parser, options)
    asked = (("--slow", options.slow), ("--trace", options.trace), ("--ablate", options.ablate),
             ("--predict", options.predict))
    kinds = [flag for flag, given in asked if given]
    if len(kinds) > 1 and kinds != ["--slow", "--predict"]:
        parser.error(f"{' and '.join(kinds)}: one at a time")
    if options.bursts is not None and not options.slow:
        parser.error("--bursts is about --slow: give that, too")
    if options.svg is not None and options.trace is None:
        parser.error("--svg draws what --trace gives: give that, too")
    options.slow = [Slow(each.rank, each.factor, options.bursts) for each in options.slow]
    for each in options.slow:
        if each.rank >= options.layout.ranks:
            parser.error(f"--slow {each.rank}:{each.factor:g}: there are ranks 0 to {options.layout.ranks - 1}")
    if options.steps < KILLED_AT + 4:
        parser.error(f"--steps must be at least {KILLED_AT + 4}: the loss is in step {KILLED_AT}")
    if options.trace is not None:
        traced.check_flags(parser, options)
    elif not options.slow:
        _check_losses(parser, options)
    return options


def _check_losses(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.places = options.where.split(",")
    if unknown := [name for name in options.places if name not in WHERE]:
        parser.error(f"--where {', '.join(unknown)}: one of {', '.join(WHERE)}")
    if not all(count.isdecimal() and int(count) for count in options.lose.split(",")):
        parser.error(f"--lose {options.lose} is not like 1,2,3")
    options.counts = [int(count) for count in options.lose.split(",")]
    # Cells that go at once may be all that have a slice, unless there is one copy more.
    of_a_stage = most_of_a_stage(options.layout.pp, options.layout.dp, options.counts, options.places)
    options.replicas = max(options.replicas, of_a_stage)


def run_case(root: Path, options: argparse.Namespace, profile: Path, layout: Layout, case: Case) -> dict[str, Any]:
    """All policies in one case."""
    found: dict[str, dict[str, Any]] = {}
    for number, variant in enumerate(options.variants):
        run_dir = root / f"{case.lost}-{case.where}-{number}"
        try:
            rounds = [measure(run_dir.with_suffix(f".{turn}"), options, profile, layout, variant, case)
                      for turn in range(options.rounds)]  # fmt: skip
            found[variant.name] = _median(rounds)
        except JobFailed as error:
            found[variant.name] = {"tokens_per_s": 0.0, "share_of_undisturbed": 0.0, "share_of_limit": 0.0,
                                   "failed": reason_of(str(error))}
            progress(f"{case.lost} lost ({case.where}), {variant.name}: {error}")
        else:
            each = found[variant.name]
            progress(f"{case.lost} lost ({case.where}), {variant.name}: {each['tokens_per_s']:.0f} tokens/s, "
                     f"{each['joules_per_token']:.3g} J a token; forecast off by {each['forecast_error']:+.1%}")
    told, limit = Profile.read(profile), case.limit_share(layout)
    costs = told.costs(layout.units)
    highest = costs.clock_steps[-1]
    boosted = limit / costs.times_as_long(range(len(layout.units)), highest)
    return {"lost": case.lost, "where": case.where, "ranks": list(case.ranks), "limit_share": round(limit, 4),
            "limit_share_at_highest_clock": round(boosted, 4), "highest_clock": highest,
            "ceiling": ceiling(layout, told, case, options.replicas), "policies": found}


def predict_case(options: argparse.Namespace, profile: Profile, layout: Layout, case: Case) -> dict[str, Any]:
    """All policies in one case, of which no job is run."""
    most = ceiling(layout, profile, case, options.replicas)
    found: dict[str, dict[str, Any]] = {}
    for variant in options.variants:
        try:
            share = predicted_share(profile, variant, layout, case)
            found[variant.name] = {"predicted_share": share}
        except NoLayout as error:
            found[variant.name] = {"predicted_share": 0.0, "failed": str(error)}
    return {"lost": case.lost, "where": case.where, "ranks": list(case.ranks),
            "limit_share": round(case.limit_share(layout), 4), "ceiling": most, "policies": found}


def predictions(found: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """In Markdown."""
    lines = [f"| lost | stage | ceiling | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for case in found:
        shares = [f"{case['policies'][name]['predicted_share']:.3f}" for name in names]
        values = (case["lost"], case["where"], f"{case['ceiling']['share_of_limit']:.3f}", *shares)
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def add_shares(found: Sequence[dict[str, Any]], variants: Sequence[Variant]) -> None:
    """Of the undisturbed rate, which jobs of all cases tell, of the limit, and of the ceiling."""
    undisturbed = usual_rate(variants, [case["policies"] for case in found])
    if not undisturbed:
        raise JobFailed("no job without clocks went on, so there is nothing that rates could be shares of: see above "
                        "why, and ask for a --policy that goes on")
    for case in found:
        case["undisturbed_tokens_per_s"] = undisturbed
        for _, each in _going_on(case):
            each["share_of_undisturbed"] = round(each["tokens_per_s"] / undisturbed, 4)
            each["share_of_limit"] = round(each["share_of_undisturbed"] / case["limit_share"], 4)
            each["share_of_limit_since"] = round(each["tokens_per_s_since"] / undisturbed / case["limit_share"], 4)
            each["share_of_ceiling"] = round(each["share_of_limit"] / case["ceiling"]["share_of_limit"], 4)


def _median(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of figures; of tokens a second also the least and the most."""
    found = {name: statistics.median(each[name] for each in rounds) if isinstance(value, float) else value
             for name, value in rounds[-1].items()}  # fmt: skip
    if len(rounds) > 1:
        rates = [each["tokens_per_s"] for each in rounds]
        found["spread"] = [min(rates), max(rates)]
        found["deviation"] = round(statistics.stdev(rates) / statistics.mean(rates), 5)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| lost | stage | policy | tokens/s | of undisturbed | of the limit | predicted | of the ceiling | "
             "since the loss | J a token | after, s |", "|---|---|---|---|---|---|---|---|---|---|---|"]
    for case in found:
        for name, each in _going_on(case):
            values = (case["lost"], case["where"], name, f"{each['tokens_per_s']:.0f}",
                      f"{each['share_of_undisturbed']:.3f}", f"{each['share_of_limit']:.3f}",
                      f"{each['predicted_share']:.3f}", f"{each['share_of_ceiling']:.3f}",
                      f"{each['share_of_limit_since']:.3f}",
                      f"{each['joules_per_token']:.3g}", f"{each['seconds_until']:.1f}")
            lines.append(f"| {' | '.join(map(str, values))} |")
    lines.append("")
    for case in found:
        lines.append(f"{case['lost']} lost ({case['where']}): the limit is {case['limit_share']:.3f} of undisturbed; "
                     f"at a clock of {case['highest_clock']:g} it is {case['limit_share_at_highest_clock']:.3f}")
    return "\n".join(lines)


def _going_on(case: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Policies with which the job went on."""
    return [(name, each) for name, each in case["policies"].items() if "failed" not in each]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if it could be done, and with --trace no job has ended before its time."""
    options, load = parse_args(argv), load_average()
    profile, layout = asked_for(options)
    wanted = [] if options.slow or options.trace else list(cases(layout, options.counts, options.places))
    if not (wanted or options.slow or options.trace):
        raise JobFailed(f"--lose {options.lose}: a stage of {options.layout.dp} cells has none left")
    if options.predict:
        names = [each.name for each in options.variants]
        if options.slow:
            foreseen = [slowed.predict_case(options, profile, layout, each) for each in options.slow]
            text = slowed.predictions(foreseen, names)
        else:
            foreseen = [predict_case(options, profile, layout, case) for case in wanted]
            text = predictions(foreseen, names)
        print(text, file=sys.stderr)
        emit("throughput", argv, {"predicted": True, "cases": foreseen, **_common(options, profile, layout)})
        return 0
    with run_root() as root:
        path = root / "profile.json"
        path.write_text(profile.text)
        figures, text, code = _measure(root, options, path, layout, wanted)
    print(text, file=sys.stderr)
    emit("throughput", argv, {**figures, **_common(options, profile, layout), "load_before": load})
    return code


def _measure(
    root: Path, options: argparse.Namespace, profile: Path, layout: Layout, wanted: Sequence[Case]
) -> tuple[dict[str, Any], str, int]:
    """Figures, as a table as well, and the exit code."""
    if options.trace is not None:
        replayed = traced.run(root, options, profile, layout)
        return replayed, traced.table(replayed["policies"]), int(bool(traced.ended(replayed["policies"])))
    if options.slow:
        slow = [slowed.run_case(root, options, profile, layout, each) for each in options.slow]
        return {"cases": slow}, slowed.table(slow), 0
    if options.ablate:
        axes = ablation.ablate(root, options, profile, layout, wanted)
        return {"ablation": axes}, ablation.table(axes), 0
    found = [run_case(root, options, profile, layout, case) for case in wanted]
    add_shares(found, options.variants)
    errors = [abs(each["forecast_error"]) for case in found for _, each in _going_on(case)]
    off = [abs(each["predicted_share"] / each["share_of_limit"] - 1) for case in found for _, each in _going_on(case)
           if each["share_of_limit"]]  # fmt: skip
    return {"cases": found, "worst_forecast_error": max(errors, default=None),
            "median_prediction_error": round(statistics.median(off), 4) if off else None,
            "worst_prediction_error": round(max(off), 4) if off else None}, table(found), 0


def _common(options: argparse.Namespace, profile: Profile, layout: Layout) -> dict[str, Any]:
    """What was asked for."""
    variants: Sequence[Variant] = options.variants
    return {"model": options.emulate, "device": options.device, "ranks": options.layout.ranks,
            "grains": layout.num_grains, "tokens_per_grain": profile.emulation.tokens,
            "efficiency": options.efficiency, "time_scale": round(profile.emulation.time_scale, 4),
            "steps": options.steps, "schedules": {each.name: each.schedule for each in variants}}
