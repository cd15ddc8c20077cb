"""Models: FlexTrain's three models, and how long a step takes in a layout of them.

The sizes are those of FlexTrain's slides (MLSys 2026, "Experiment"). Their measured points are in pictures only, so
times come from a model of 1F1B: docs/fleet.md says what it leaves out.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache
from math import ceil, gcd

_FLOPS = 160e12
"""Of a device: a GPU of 400 TFLOP/s at 40 %."""
_BYTES = 25e9
"""That a device sends in a second to others of its layers: a network of 400 Gbit/s at half of its speed."""


@dataclass(frozen=True, slots=True)
class Model:
    """One column of FlexTrain's table. A cell is the ranks that share a stage: TP x the larger of CP and EP."""

    name: str
    layers: int
    predictions: int
    """Heads that predict further tokens."""
    batch: int
    """Sequences of a step."""
    sequence: int
    parameters: float
    active: float
    """Parameters that one token uses."""
    stages: int
    width: int
    """Cells of a stage, as submitted."""
    cell: int
    """Ranks."""
    bundle: int
    """Micro-batches of one sequence that a cell computes at once."""

    @property
    def devices(self) -> int:
        """As submitted in the table."""
        return self.stages * self.width * self.cell

    @property
    def units(self) -> int:
        """What is divided among stages: layers, further predictions and the head, each taken to cost the same."""
        return self.layers + self.predictions + 1

    @property
    def grains(self) -> int:
        """Bundles of a step."""
        return self.batch // self.bundle

    def unit_s(self, cell: int) -> float:
        """Seconds of one unit of one grain, forward and backward, on ``cell`` ranks."""
        return 6 * self.active / self.units * self.sequence * self.bundle / (cell * _FLOPS)

    def sync_s(self, stages: int, width: int, cell: int) -> float:
        """Seconds of a ring all-reduce of a rank's gradients in bfloat16 among ``width`` cells, not overlapped."""
        return 2 * 2 * self.parameters / (stages * cell) * (width - 1) / width / _BYTES


SMALL = Model("small", 15, 2, 1024, 8192, 7e9, 1e9, 4, 1, 8, 1)
MEDIUM = Model("medium", 29, 2, 256, 32768, 60e9, 6e9, 4, 2, 8, 1)
LARGE = Model("large", 61, 2, 768, 8192, 600e9, 30e9, 8, 2, 16, 2)
MODELS = (SMALL, MEDIUM, LARGE)
GROWTH = 4
"""Times as many devices as submitted a job of the table uses at most."""


def model_of(devices: int) -> Model | None:
    """The largest model of the table that is submitted with at most ``devices``; None where there is none."""
    return max((model for model in MODELS if model.devices <= devices), key=lambda model: model.devices, default=None)


class Layouts:
    """The layouts that a job of ``model``, submitted with ``devices``, can have, and how long a step takes in them."""

    def __init__(self, model: Model, devices: int) -> None:
        self.model = model
        self.cell = gcd(devices, model.cell)
        self.cells = devices // self.cell
        self.stages, self.width = self._submitted()
        self.most_cells = GROWTH * self.cells

    def _submitted(self) -> tuple[int, int]:
        """Stages and width as submitted: the table's number of stages, or the next that divides the cells."""
        usable = [p for p in range(1, min(self.cells, self.model.units) + 1) if self.cells % p == 0]
        stages = min(usable, key=lambda p: (abs(p - self.model.stages), p))
        return stages, self.cells // stages

    def even_s(self, stages: int, width: int, batch: float | None = None) -> float:
        """Seconds of a step of 1F1B with ``width`` cells in every stage, which share the grains of the batch evenly.

        ``batch``: sequences (default: the model's). The slowest stage has ``ceil(units / stages)`` units.
        """
        grains = (self.model.batch if batch is None else batch) / self.model.bundle
        slowest = ceil(self.model.units / stages) * self.model.unit_s(self.cell)
        return (ceil(grains / width) + stages - 1) * slowest + self.model.sync_s(stages, width, self.cell)

    def uneven_s(self, cells: int) -> float:
        """Seconds of a step on ``cells`` cells where stages may differ in width, with the best number of stages.

        There are at least as many stages as submitted.
        Extra cells go to the slowest stage, one after the other. A step takes what the slowest stage takes for its
        grains, and one grain in each of the others.
        """
        return min(self._widened(stages, cells) for stages in range(self.stages, min(cells, self.model.units) + 1))

    def _widened(self, stages: int, cells: int) -> float:
        model = self.model
        units = [model.units // stages + (stage < model.units % stages) for stage in range(stages)]
        load = [(-own * model.grains, own, 1) for own in units]
        heapq.heapify(load)
        for _ in range(cells - stages):
            _, own, width = load[0]
            heapq.heapreplace(load, (-own * ceil(model.grains / (width + 1)), own, width + 1))
        slowest, own, _ = load[0]
        widest = max(width for _, _, width in load)
        return (-slowest + model.units - own) * model.unit_s(self.cell) + model.sync_s(stages, widest, self.cell)


@cache
def layouts_of(model: Model, devices: int) -> Layouts:
    """The layouts of a job, made once."""
    return Layouts(model, devices)
