"""How much does a job get done on machines that come and go? ``megatron-elastic bench spot``.

A trace of real spot instances is replayed, faster than it was, against one job after the other, each under another
policy: emulated accelerators in real processes under the real runtime, killed and started as the trace says. A part of
the trace's machines is that part of the job's ranks. How much faster time goes (``time_scale``) holds for all that is
emulated, so a job has as much work to do between two changes as one would on real devices; what this runtime itself
takes, and starting processes, is not faster, and so costs more than it would.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import JobFailed, emit, load_average, progress, run, run_root
from emulated.availability import Change, TraceError, changes, presence, read
from emulated.job import add_flags, asked_for, check_flags
from emulated.replayed import replay


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags; ``happens`` are the changes, in emulated s."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench spot",
        description="Tokens done on machines that come and go by a trace, on emulated accelerators, for each policy.")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="lines of MS,add|remove,NAME")
    parser.add_argument("--hours", type=_window, default="0.5:2.5", metavar="FROM:TO",
                        help="of the trace (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=6.0, metavar="M",
                        help="in which they are replayed, for each policy (default: %(default)s)")
    add_flags(parser)
    parser.set_defaults(replicas=2)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of which ranks go (default: %(default)s)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it; needs the extra [plot]")
    options = parser.parse_args(argv)
    check_flags(parser, options)
    begin, end = options.hours
    if options.minutes <= 0:
        parser.error(f"--minutes must be above 0, got {options.minutes:g}")
    # Emulated seconds for each of the trace: the steps are as long as that makes them.
    options.step_seconds, options.time_scale = None, 60 * options.minutes / (3600 * (end - begin))
    try:
        happens = changes(read(options.trace), options.layout.ranks, 3600 * begin, 3600 * end, options.seed)
    except (OSError, TraceError) as error:
        parser.error(str(error))
    options.happens = [Change(each.at * options.time_scale, each.slot, each.comes) for each in happens]
    return options


def _window(text: str) -> tuple[float, float]:
    begin, colon, end = text.partition(":")
    if not colon or not 0 <= float(begin) < float(end):
        raise ValueError(text)
    return float(begin), float(end)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if no job ended before its time."""
    options, load = parse_args(argv), load_average()
    seconds, slots = 60 * options.minutes, options.layout.ranks
    profile, _ = asked_for(options)
    found: dict[str, dict[str, Any]] = {}
    with run_root() as root:
        path = root / "profile.json"
        path.write_text(profile.text)
        for name in options.policies:
            found[name] = replay(root / name, options, path, name, options.happens)
            progress(f"{name}: {found[name]['tokens']} tokens, {found[name]['recoveries']} recoveries"
                     + (f"; it has ended: {found[name]['ended']}" if found[name]["ended"] else ""))
    # All jobs are the same until the trace begins.
    rate = median(each["undisturbed_tokens_per_s"] for each in found.values())
    there = presence(options.happens, slots, seconds)[-1].done
    done = {name: [(time, tokens / (rate * seconds)) for time, tokens in each.pop("done")]
            for name, each in found.items()}  # fmt: skip
    for each in found.values():
        each["share_of_undisturbed"] = round(each["tokens"] / (rate * seconds), 4)
        each["share_of_limit"] = round(each["tokens"] / (rate * seconds * there), 4)
    if options.svg is not None:
        _draw(options, done)
    print(table(found), file=sys.stderr)
    emit("spot", argv, {
        "policies": found, "ranks": slots, "present": round(there, 4), "time_scale": round(options.time_scale, 5),
        "comes": sum(each.comes for each in options.happens), "goes": sum(not each.comes for each in options.happens),
        "load_before": load,
    })  # fmt: skip
    return 1 if any(each["ended"] for each in found.values()) else 0


def table(found: dict[str, dict[str, Any]]) -> str:
    """In Markdown."""
    lines = ["| policy | tokens | of undisturbed | of what is there | recoveries | fell back |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, each in found.items():
        values = (name + (", ended" if each["ended"] else ""), each["tokens"], f"{each['share_of_undisturbed']:.3f}",
                  f"{each['share_of_limit']:.3f}", each["recoveries"], each["fallbacks"])  # fmt: skip
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def _draw(options: argparse.Namespace, done: dict[str, list[tuple[float, float]]]) -> None:
    try:
        from emulated.plot import draw
    except ImportError as error:
        raise JobFailed(f"--svg needs matplotlib ({error}); install it: pip install 'megatron-elastic[plot]'") from None
    draw(done, options.happens, options.layout.ranks, 60 * options.minutes, options.time_scale, options.svg)


if __name__ == "__main__":
    run("spot", main)
