"""What each policy makes of losses, predicted. ``megatron-elastic bench policies``.

Costs are those of Llama-2 13B (40 layers, hidden size 5120, feed-forward 13824, vocabulary 32000, sequences of 4096,
micro-batches of one) on devices that compute 140 TFLOP/s and exchange 25 GB/s; they are computed from these figures,
nothing is measured. Ranks are lost in one stage, or one in each of several stages and replicas.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from common import emit, progress

from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.plan.choice import SCHEDULES
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.planner.comparison import compare, figures

CASES = (((1, 4, 4), (1, 2, 3)), ((1, 8, 12), (1, 4, 12)), ((2, 6, 8), (1, 4, 12)))
"""Tensor-parallel, pipeline and data-parallel sizes, and how many ranks are lost."""
LAYERS, HIDDEN, FFN, VOCABULARY, SEQUENCE = 40, 5120, 13824, 32000, 4096
FLOPS, BANDWIDTH = 140e12, 25e9


def llama(tp: int, pp: int, dp: int, grains: int) -> tuple[Layout, Costs]:
    """The layout of so many grains a replica, and its costs; layers as evenly as they can be."""
    low, extra = divmod(LAYERS, pp)
    units, stages = gpt_units(LAYERS, pp, tied=False, positions=False, split=[[low + (s < extra)] for s in range(pp)])
    layout = Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stages, units=units, num_grains=grains * dp, num_slices=dp,
        replicas=min(dp - 1, 4), ranks_per_host=8,
    )  # fmt: skip
    layer = 4 * HIDDEN**2 + 3 * HIDDEN * FFN
    head = VOCABULARY * HIDDEN
    attention = 4 * SEQUENCE * SEQUENCE * HIDDEN / 2

    def cost(unit: str) -> UnitCost:
        weights = layer if unit.startswith("layer.") else head
        flops = {"embedding": 0.0, "head": 2.0 * head * SEQUENCE}.get(unit, 2.0 * layer * SEQUENCE + attention)
        forward = 1e3 * flops / FLOPS / tp
        return UnitCost(forward, 2 * forward, 6 * weights // tp, 12 * weights // tp, 34 * SEQUENCE * HIDDEN // tp)

    return layout, Costs(tuple(map(cost, units)), boundary_bytes=2 * SEQUENCE * HIDDEN, bandwidth=BANDWIDTH)


def lost(layout: Layout, count: int) -> Iterator[tuple[str, list[int]]]:
    """Where so many ranks are lost, each of another cell."""
    stages, width = layout.pipeline_size, layout.stages[0].width
    if count < width:
        yield "one stage", [cell.leader for cell in layout.stages[1].cells[:count]]
    if count > 1:
        yield "spread", [layout.stages[at % stages].cells[at % width].leader for at in range(count)]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench policies", description=__doc__)
    parser.add_argument("--grains", type=int, default=8, help="micro-batches of a replica (default: %(default)s)")
    parser.add_argument("--schedule", choices=SCHEDULES, help="the job's (default: the faster one)")
    options = parser.parse_args(argv)
    schedules = SCHEDULES if options.schedule is None else (options.schedule,)
    cases: list[dict[str, Any]] = []
    for (tp, pp, dp), counts in CASES:
        layout, costs = llama(tp, pp, dp, options.grains)
        for count in counts:
            for where, ranks in lost(layout, count):
                found = figures(compare(layout, ranks, costs, schedules=schedules), SEQUENCE)
                shares = {name: each.get("share", 0.0) for name, each in found["policies"].items()}
                progress(f"TP{tp} PP{pp} DP{dp}, {count} lost, {where}: limit {found['limit_share']:.3f}, "
                         + ", ".join(f"{name} {share:.3f}" for name, share in shares.items()))  # fmt: skip
                cases.append({"layout": f"TP{tp} PP{pp} DP{dp}", "lost": count, "where": where, **found})
    emit("policies", argv, {"cases": cases})
    return 0
