"""Plot: tokens done over time by policy, above the ranks that were there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path

from figures import COLOURS, figure

from emulated.availability import Change, presence

_STYLES = ("-", ":")
"""Of those that have each colour."""


def draw(
    done: Mapping[str, Sequence[tuple[float, float]]], happens: Sequence[Change], slots: int, seconds: float,
    time_scale: float, file: Path,
) -> None:
    """Write the plot as SVG. ``done``: by policy (s, tokens as a share of what all slots would do in all the time).

    Times are shown as those of the trace, ``time_scale`` emulated seconds for each of its own.
    """
    hours = 1 / (3600 * time_scale)
    with figure(file, 8.2, 4.6) as drawn:
        tokens, ranks = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        there = presence(happens, slots, seconds)
        times = [each.at * hours for each in there]
        tokens.plot(times, [each.done for each in there], color="#999999", linestyle=(0, (4, 3)),
                    label="as much as is there could do")  # fmt: skip
        order = sorted(done, key=lambda name: -done[name][-1][1])
        for name, (style, colour) in zip(order, cycle(product(_STYLES, COLOURS)), strict=False):
            tokens.plot([time * hours for time, _ in done[name]], [share for _, share in done[name]], color=colour,
                        linestyle=style, linewidth=1.8, label=name)  # fmt: skip
        tokens.set_ylabel("tokens, of what all ranks\ncould do in all the time")
        tokens.legend(frameon=False, fontsize=9)
        ranks.step(times, [each.slots for each in there], where="post", color="#333333")
        ranks.set(ylim=(0, slots + 1), ylabel="ranks", xlabel="hours of the trace", xlim=(0, seconds * hours))
        for axes in (tokens, ranks):
            axes.grid(axis="y")
