"""How long planning takes. ``megatron-elastic bench planning``.

The graph of a GPT of 128 layers with random costs over 64 stages, and layouts of 100,000 ranks that lose one: the
interim layout (``lose``) and the one to work towards (``replan``). Then layouts of growing size (``--ranks``): what
travels and is looked up, losses, what has to be copied then, and a node that joins. Processor time is given besides
wall-clock time, because it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from common import emit, load_average, progress

from megatron_elastic.layout import Holdings, Layout, by_rank, decode, encode, gpt_units, transfers
from megatron_elastic.plan import improve, lose
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.power import PowerModel
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.replan import replan
from megatron_elastic.plan.work.clock import Budget, Limits, balance, loads

SHAPES = ((8, 64, 195), (8, 8, 1560), (1, 64, 1560))
"""Tensor-parallel, pipeline and data-parallel sizes of about 100,000 ranks each."""
LAYERS = 128
SLICES = 64
NODE = 8
"""Ranks of a host."""


def timed(what: str, action: Callable[[], Any], repeat: int) -> dict[str, float]:
    """Median wall-clock and processor time of ``action`` in ms."""
    walls, cpus = [], []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    result = {"wall_ms": round(statistics.median(walls), 1), "cpu_ms": round(statistics.median(cpus), 1)}
    progress(f"{what}: {result['wall_ms']} ms ({result['cpu_ms']} ms of the processor)")
    return result


def random_costs(names: Sequence[str], rng: random.Random) -> Costs:
    """Costs of no pattern, with a limit of memory."""
    units = (UnitCost(rng.uniform(1, 3), rng.uniform(2, 6), rng.randint(10**9, 2 * 10**9), 10**9, 10**8) for _ in names)
    return Costs(tuple(units), memory_bytes=80 * 10**9)


def graph(repeat: int) -> dict[str, dict[str, float]]:
    """Planning 128 layers over 64 stages, one of which has lost a cell."""
    names, _ = gpt_units(LAYERS, 64, tied=True, positions=False)
    planner = Planner(names, random_costs(names, random.Random(0)), tied=True, grains=1560)
    widths = [24] * 64
    held = [set(units) for units in planner.split(widths).stage_units]
    widths[30] -= 1
    return {
        "split": timed("units of 64 stages of given widths", lambda: planner.split(widths, held), repeat),
        "widths": timed("widths of 64 stages", lambda: planner.widths(64, sum(widths)), repeat),
    }


def clocks(repeat: int) -> dict[str, float]:
    """The clocks of 64 stages of 128 cells each, one of which is lost, on 13 clocks."""
    names, stages = gpt_units(LAYERS, 64, tied=True, positions=False)
    whole = Layout.grid(tp=1, pp=64, dp=128, stage_units=stages, units=names, num_grains=512, num_slices=SLICES,
                        replicas=1, ranks_per_host=NODE)  # fmt: skip
    left = lose(whole, [5], Holdings.of(whole).without([5]), 1)
    costs, power = random_costs(names, random.Random(0)), PowerModel(80.0, 230.0, 470.0, device_w=900.0)
    limits = Limits(tuple(step / 20 for step in range(12, 25)))
    return timed("clocks of 64 stages of 128 cells",
                 lambda: balance(loads(left, costs), Budget.of(left, limits, power)), repeat)


def layout(tp: int, pp: int, dp: int, repeat: int) -> dict[str, Any]:
    """Planning for a layout of TP x PP x DP ranks that loses one."""
    units, stage_units = gpt_units(LAYERS, pp, tied=True, positions=False)
    old = Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=4 * dp, num_slices=SLICES, replicas=1,
        ranks_per_host=NODE,
    )  # fmt: skip
    held = Holdings.of(old).without([5])
    costs = Costs.assumed(units)
    name = f"TP{tp} x PP{pp} x DP{dp}"
    return {
        "layout": name,
        "ranks": len(old.ranks),
        "lose": timed(f"{name}: lose", lambda: lose(old, [5], held, 1), repeat),
        "replan": timed(f"{name}: replan", lambda: replan(old, costs, 1, lost=[5]), repeat),
    }


def size(ranks: int, repeat: int) -> dict[str, Any]:
    """Layouts of about so many ranks: 8 x 8 x DP, or 2 x 2 x DP where that is too many; K is DP, replicas 1."""
    tp = pp = 8 if ranks >= 2 * 8 * 8 else 2
    dp = max(2, ranks // (tp * pp))
    units, stage_units = gpt_units(56, pp, tied=True, positions=True)

    def grid() -> Layout:
        return Layout.grid(
            tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=4 * dp, num_slices=dp, replicas=1,
            ranks_per_host=NODE,
        )  # fmt: skip

    fresh = grid()
    text, data = fresh.to_json(), encode(fresh)
    count = len(fresh.ranks)
    newcomers = {count + i: len(fresh.hosts) for i in range(NODE)}

    def ask(layout: Layout) -> None:
        layout.owner(0, 0, 0), layout.owned(0), layout.replicated(0), layout.holders(0), layout.contributors(0)
        layout.stage_of(0), layout.sharers(0, 0), layout.host_of(0), layout.ranks, layout.chunks(0)

    def measure(what: str, action: Callable[[], Any]) -> dict[str, float]:
        return timed(f"{count} ranks: {what}", action, repeat)

    def losing(ranks: Sequence[int]) -> dict[str, Any]:
        held = Holdings.of(fresh).without(ranks)
        new = lose(fresh, ranks, held, 1)
        moves = transfers(new, held)
        return {
            "lose": measure(f"lose {len(ranks)}", lambda: lose(fresh, ranks, held, 1)),
            "transfers": measure("transfers", lambda: transfers(new, held)),
            "by_rank": measure("transfers by rank", lambda: by_rank(moves)),
            "moves": len(moves),
        }

    return {
        "ranks": count,
        "json_bytes": len(text),
        "bytes": len(data),
        "grid": measure("grid", grid),
        "to_json": measure("to_json", fresh.to_json),
        "from_json": measure("from_json", lambda: Layout.from_json(text)),
        "encode": measure("encode", lambda: encode(fresh)),
        "decode": measure("decode", lambda: decode(data)),
        "decode_and_look_up": measure("decode and look up", lambda: ask(decode(data))),
        "validate": measure("validate", fresh.validate),
        "rank_lost": losing([5]),
        **({"node_lost": losing(range(NODE))} if count > 2 * NODE else {}),
        "improve": measure("improve with a new node", lambda: improve(fresh, newcomers, 1)),
    }


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and return the exit code."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench planning", description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="times of each (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=_sizes, default=[1000, 10_000, 100_000], metavar="N,...",
        help="sizes of layouts that grow (default: 1000,10000,100000)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {options.repeat}")
    load = load_average()
    figures = {
        "graph": graph(options.repeat),
        "clocks": clocks(options.repeat),
        "layouts": [layout(*shape, options.repeat) for shape in SHAPES],
        "sizes": [size(ranks, options.repeat) for ranks in options.ranks],
    }
    emit("planning", argv, {**figures, "load_before": load})
    return 0
