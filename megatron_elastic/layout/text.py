"""Text: layouts as JSON, for records, and as a table, for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from megatron_elastic.layout.cell import Cell
from megatron_elastic.layout.errors import LayoutError
from megatron_elastic.layout.lookup import spans
from megatron_elastic.layout.part import Part
from megatron_elastic.layout.stage import Stage
from megatron_elastic.layout.tables import Tables

_Kind = TypeVar("_Kind", bound=Tables)


def write(layout: Tables) -> str:
    """Stable JSON: the same text for equal layouts; one stage and one unit a line."""

    def rows(values: Iterable[Any]) -> str:
        return "[\n    " + ",\n    ".join(json.dumps(value) for value in values) + "\n  ]"

    stages = map(_stage_to_json, layout.stages)
    parts = {
        "epoch": json.dumps(layout.epoch),
        "num_slices": json.dumps(layout.num_slices),
        "num_replicas": json.dumps(layout.num_replicas),
        "num_grains": json.dumps(layout.num_grains),
        **({"samples": json.dumps(layout.samples)} if layout.samples > 1 else {}),
        **({"cp": json.dumps(layout.cp)} if layout.cp > 1 else {}),
        **({"ep": json.dumps(layout.ep)} if layout.ep > 1 else {}),
        **({} if layout.most_cells is None else {"most_cells": json.dumps(layout.most_cells)}),
        **({} if layout.tied is None else {"tied": json.dumps(layout.tied)}),
        **({"recomputed": json.dumps(layout.recomputed)} if layout.recomputed else {}),
        "units": json.dumps(layout.units),
        "stages": rows(stages),
        "owners": rows(layout.owners),
        "replicas": rows(layout.replicas),
        "spares": json.dumps(layout.spares),
        "lost": json.dumps(layout.lost),
        "hosts": json.dumps(layout.hosts),
    }
    return "{\n" + ",\n".join(f'  "{key}": {text}' for key, text in parts.items()) + "\n}\n"


def read(kind: type[_Kind], text: str | bytes) -> _Kind:
    """What ``write`` wrote, as a ``kind``; it is not validated. Raises LayoutError."""
    try:
        data = json.loads(text)
        return kind(
            epoch=int(data["epoch"]),
            num_slices=int(data["num_slices"]),
            num_replicas=int(data["num_replicas"]),
            num_grains=int(data["num_grains"]),
            units=tuple(str(name) for name in data["units"]),
            stages=tuple(
                Stage(
                    units=_ints(stage["units"]),
                    cells=tuple(
                        Cell(
                            _ints(cell["ranks"]),
                            _ints(cell["grains"]),
                            _ints(cell.get("incoming", ())),
                            tuple(Part(*_ints(part)) for part in cell.get("parts", ())),
                        )
                        for cell in stage["cells"]
                    ),
                    waiting=tuple((int(rank), int(place)) for rank, place in stage.get("waiting", ())),
                )
                for stage in data["stages"]
            ),
            owners=tuple(_ints(row) for row in data["owners"]),
            replicas=tuple(tuple(_ints(copies) for copies in row) for row in data["replicas"]),
            spares=_ints(data["spares"]),
            lost=_ints(data["lost"]),
            hosts=tuple(_ints(host) for host in data["hosts"]),
            samples=int(data.get("samples", 1)),
            cp=int(data.get("cp", 1)),
            ep=int(data.get("ep", 1)),
            most_cells=None if data.get("most_cells") is None else int(data["most_cells"]),
            tied=None if data.get("tied") is None else bool(data["tied"]),
            recomputed=_ints(data.get("recomputed", ())),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"this is no layout in JSON: {type(error).__name__}: {error}") from None


def table(layout: Tables) -> str:
    """A compact table: one stage a line, each cell as ranks:grains."""
    head = (
        f"epoch {layout.epoch}: {len(layout.ranks)} ranks, {layout.pipeline_size} stages, cells of {layout.cell_size}, "
        f"{layout.num_grains} grains, {layout.num_slices} slices; "
        f"spares {_spans(layout.spares)}; lost {_spans(layout.lost)}"
    )
    lines = [head]
    for index, stage in enumerate(layout.stages):
        homes = [[layout.units[unit] for unit in of if layout.home(unit) == index] for of in layout.chunks(index)]
        home = " ".join(
            f"{of[0]}..{of[-1]}" + (" (recomputed)" if layout.recomputes(index, chunk) else "")
            for chunk, of in enumerate(homes)
        )
        also = "".join(f"+{layout.units[unit]}" for unit in stage.units if layout.home(unit) != index)
        cells = "  ".join(
            f"{_spans(cell.ranks)}:[{' '.join(map(str, (*cell.grains, *cell.parts)))}]" for cell in stage.cells
        )
        lines.append(f"  stage {index}  {home}{also}  {cells}")
    return "\n".join(lines)


def _stage_to_json(stage: Stage) -> dict[str, Any]:
    parts = {"units": stage.units, "cells": [_cell_to_json(cell) for cell in stage.cells]}
    return {**parts, "waiting": stage.waiting} if stage.waiting else parts


def _cell_to_json(cell: Cell) -> dict[str, Any]:
    parts: dict[str, Any] = {"ranks": cell.ranks, "grains": cell.grains}
    if cell.incoming:
        parts["incoming"] = cell.incoming
    if cell.parts:
        parts["parts"] = cell.parts
    return parts


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def _spans(ranks: Sequence[int]) -> str:
    """``0-3,6`` for (0, 1, 2, 3, 6); a dash for nothing."""
    return ",".join(spans(ranks)) or "-"
