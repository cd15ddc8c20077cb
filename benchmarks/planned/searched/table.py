"""Table: known schedules, what a search makes of each placement, the optimum of small pipelines, and a bound."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common import progress

from megatron_elastic.layout import MTP
from megatron_elastic.pipeline.search import NotFitting, Orders, Problem, best, lower_bound
from megatron_elastic.pipeline.search.candidates import v_shaped
from planned.searched.pipelines import Model, balanced, model_of, problem_of, schedules

MEMORY = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Of a device, as multiples of what 1F1B keeps on the one where it keeps most."""
CHUNKS = 2
_FOR_EACH = 4
"""Grains for each stage."""
_SMALL = 200
"""Operations up to which the optimum is looked for."""


def rows(models: Sequence[str], device: str, stages: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """One for each model, number of stages and limit of memory: milliseconds of a step; None where something does not
    fit, or was not looked for. ``seconds``: for the optimum of each small pipeline.
    """
    for name in models:
        model = model_of(name, device)
        for count in stages:
            if (cut := balanced(model, count)) is not None:
                for memory in MEMORY:
                    yield {"model": name, "stages": count, "memory": memory, **_row(model, cut, count, memory, seconds)}


def _row(model: Model, cut: Sequence[Sequence[int]], stages: int, memory: float, seconds: float) -> dict[str, Any]:
    grains = _FOR_EACH * stages
    plain = problem_of(model, cut, stages, grains)
    known = schedules(stages, grains, 1)
    limit = memory * max(plain.peaks(known["1f1b"]))
    plain = plain.within([limit] * stages)
    found: dict[str, Any] = {name: _ms(plain, orders) for name, orders in known.items()}
    begun = time.process_time()
    search = _search(plain, known)
    found |= {"search_s": round(time.process_time() - begun, 3)}
    placements = [None if search is None else plain.makespan(search)]
    found["search"], bounds = placements[0], [lower_bound(plain)]
    found |= dict.fromkeys(("interleaved", "zb-v", "optimum", "proved"))
    if (halves := balanced(model, CHUNKS * stages)) is not None:
        loop = problem_of(model, halves, stages, grains).within([limit] * stages)
        v = problem_of(model, halves, stages, grains, v=True).within([limit] * stages)
        for name, problem, orders in (
            ("interleaved", loop, schedules(stages, grains, CHUNKS)), ("zb-v", v, {"zb-v": v_shaped(v)}),
        ):  # fmt: skip
            found[name] = _ms(problem, orders[name])
            searched = _search(problem, orders)
            placements.append(None if searched is None else problem.makespan(searched))
            bounds.append(lower_bound(problem))
    found["search_any"] = min((ms for ms in placements if ms is not None), default=None)
    found["bound"], found["bound_any"] = bounds[0], min(bounds)
    if seconds and search is not None and 3 * grains * stages <= _SMALL:
        from megatron_elastic.pipeline.search.exact import solve  # needs OR-Tools

        solved = solve(plain, search, seconds, workers=2)
        found |= {"optimum": solved.makespan, "proved": solved.proved, "bound": max(found["bound"], solved.bound)}
    progress(f"{stages} stages, memory {memory:g}: " + ", ".join(
        f"{name} {value:.0f}" for name, value in found.items() if isinstance(value, float) and name != "search_s"))
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in found.items()}


def _ms(problem: Problem, orders: Orders) -> float | None:
    return problem.makespan(orders) if problem.fits(orders) else None


def _search(problem: Problem, known: Mapping[str, Orders]) -> Orders | None:
    try:
        return best(problem, known).orders
    except NotFitting:
        return None


COLUMNS = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "search", "optimum", "search_any", "bound_any")


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """A table in which every time is a multiple of the bound of one chunk a stage."""
    lines = [
        "| model | stages | memory | " + " | ".join(COLUMNS) + " |", "|---" * (3 + len(COLUMNS)) + "|",
    ]  # fmt: skip
    for row in found:
        cells = []
        for column in COLUMNS:
            value = row[column]
            mark = " (not proved)" if column == "optimum" and value is not None and not row["proved"] else ""
            cells.append("-" if value is None else f"{value / row['bound']:.3f}{mark}")
        lines.append(f"| {row['model']} | {row['stages']} | {row['memory']:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the search is from the optimum, and what it gains."""
    gaps = [row["search"] / row["optimum"] for row in found if row["optimum"] is not None]
    gains = [_known_best(row) / row["search"] for row in found if _known_best(row) is not None]
    against = [row["1f1b"] / row["search"] for row in found if row["1f1b"] is not None]
    return {
        "rows": len(found),
        "optimum": {"rows": len(gaps), "proved": sum(bool(row["proved"]) for row in found),
                    "mean": _rounded(gaps and sum(gaps) / len(gaps)), "worst": _rounded(max(gaps, default=None))},
        "gain_over_best_known": {"mean": _rounded(sum(gains) / len(gains)), "most": _rounded(max(gains)),
                                 "least": _rounded(min(gains))},
        "gain_over_1f1b": {"mean": _rounded(sum(against) / len(against)), "most": _rounded(max(against)),
                           "least": _rounded(min(against))},
        "fits_where_nothing_known_does": sum(
            _known_best(row) is None and row["search"] is not None for row in found),
        "slowest_search_s": max(row["search_s"] for row in found),
    }  # fmt: skip


def _known_best(row: Mapping[str, Any]) -> Any:
    return min((row[name] for name in ("1f1b", "zb-h1", "zb-h2") if row[name] is not None), default=None)


def _rounded(value: Any) -> Any:
    return None if not isinstance(value, float) else round(value, 4)


# ---- pipelines of any number of stages -----------------------------------------------------------


def no_ops(models: Sequence[str], device: str, stages: Sequence[int], further: int) -> Iterator[dict[str, Any]]:
    """Layers that are cut by what they cost against layers that are filled up with no-ops: steps under 1F1B, and what a
    search makes of ours.

    ``padded``: all stages have as many places for layers, which are filled in their order; embedding, predictions and
    head are beside them. ``ends_counted``: predictions and head take a place each of the last stage, too. ``apart``: a
    place each wherever that is, which layouts cannot have here.
    """
    for name in models:
        model = model_of(name, device, further)
        for count in stages:
            cut = balanced(model, count)
            if cut is None:
                continue
            known = schedules(count, _FOR_EACH * count, 1)
            ours = problem_of(model, cut, count, _FOR_EACH * count)
            row: dict[str, Any] = {"model": name, "layers": model.layers, "stages": count}
            for kind in ("padded", "ends_counted", "apart"):
                padded = _padded(model, count, 0 if kind == "padded" else further + 1, kind == "apart")
                problem = problem_of(model, padded, count, _FOR_EACH * count)
                row[kind] = round(problem.makespan(known["1f1b"]), 3)
            row["by_cost"] = round(ours.makespan(known["1f1b"]), 3)
            limited = ours.within([max(ours.peaks(known["1f1b"]))] * count)
            row["by_cost_search"] = round(best(limited, known).ms, 3)
            yield row


def _padded(model: Model, stages: int, ends: int, apart: bool) -> list[list[int]]:
    """Units by stage, if every stage has as many places, of which predictions and head take ``ends``."""
    places = -(-(model.layers + ends) // stages)
    cut: list[list[int]] = [[] for _ in range(stages)]
    place = -1
    for unit, name in enumerate(model.names):
        place += name.startswith("layer.") or (apart and name.startswith((MTP, "head")))
        last = not apart and name.startswith((MTP, "head"))
        cut[stages - 1 if last else min(max(place, 0) // places, stages - 1)].append(unit)
    return cut


def no_ops_markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """A table in which times are multiples of those of layers cut by cost."""
    lines = [
        "| model | layers | stages | no-ops at the end | ends counted | predictions apart | by cost | and searched |",
        "|---" * 8 + "|",
    ]  # fmt: skip
    for row in found:
        kinds = ("padded", "ends_counted", "apart", "by_cost", "by_cost_search")
        cells = (row[kind] / row["by_cost"] for kind in kinds)
        lines.append(f"| {row['model']} | {row['layers']} | {row['stages']} | "
                     + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return "\n".join(lines)
