"""Progress: how far an elastic job is, how fast it was on each number of ranks, and who trains: from its records."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from megatron_elastic.fleet.speed_table import SpeedTable
from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.run import Run
from megatron_elastic.plan.predict import ScaleTable, ScaleTableError

_WARM = 2
"""First steps of a layout, which also make its groups and memory, and are not typical."""
_RECENT = 20
"""Steps whose median says how fast a job is on so many ranks."""
_TABLE = "scale_table.json"
"""What the job, or ``megatron-elastic predict``, predicts, in the run directory."""
_KEPT = 10
"""Records of steps that are kept."""


class Progress:
    """The job whose records are, or will be, in ``run_dir``."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._run: Run | None = None
        self._epoch = -1
        self._steps_of_epoch = 0
        self._events = 0
        self._times: dict[int, deque[float]] = {}
        self._following: set[int] = set()
        """Epochs in which somebody followed, so that what was copied took from the speed."""
        self._nodes: dict[int, frozenset[int]] = {}
        self.steps = 0
        """The last one that is done."""
        self.predicted: Mapping[int, float] = {}
        """Tokens a second by number of devices, by the scale table in the run directory, if there is one."""

    def refresh(self) -> None:
        """Read what was written since. Raises RecordsError if that cannot be read."""
        try:
            self._refresh()
        except (KeyError, TypeError, ValueError) as error:
            raise RecordsError(f"{self._run_dir} has a line that is damaged: {type(error).__name__} {error}") from None

    def _refresh(self) -> None:
        if self._run is None:
            if not (self._run_dir / "metrics.jsonl").is_file():
                return
            self._run = Run.of_folder(self._run_dir)
        else:
            self._run.refresh()
        run = self._run
        for event in run.events[self._events :]:
            if event["kind"] == "switched" and event["shadows"]:
                self._following.add(event["epoch"])
            elif event["kind"] == "spawned":
                node, ranks = event["node"], frozenset(event["ranks"])
                self._nodes[node] = self._nodes.get(node, frozenset()) | ranks
        self._events = len(run.events)
        self.predicted = _predicted(self._run_dir / _TABLE)
        for line in run.metrics:
            if line["step"] > self.steps:
                self._take(line)
        del run.metrics[:-_KEPT]

    def _take(self, line: Mapping[str, float]) -> None:
        self.steps, epoch = int(line["step"]), int(line["epoch"])
        if epoch != self._epoch:
            self._epoch, self._steps_of_epoch = epoch, 0
        self._steps_of_epoch += 1
        if self._steps_of_epoch > _WARM and epoch not in self._following and line["tokens_per_s"]:
            times = self._times.setdefault(int(line["world_size"]), deque(maxlen=_RECENT))
            times.append(1 / line["tokens_per_s"])

    def remaining(self, given: int) -> float | None:
        """Work left, in seconds of running on ``given`` devices; None as long as that is not known."""
        if self._run is None or self._run.total is None or given not in self._times:
            return None
        tokens_per_s = self.speeds()[given]
        line = self._run.metrics[-1]
        tokens = line["tokens_per_s"] * line["step_ms"] / 1e3
        return float((self._run.total - self.steps) * tokens / tokens_per_s)

    def speeds(self) -> dict[int, float]:
        """Tokens a second by number of ranks in cells: medians of what was measured."""
        return {ranks: 1 / statistics.median(times) for ranks, times in sorted(self._times.items())}

    def trains(self, node: int) -> bool:
        """Whether ranks of a node that has come compute their part."""
        layout = None if self._run is None else self._run.layout
        ranks = self._nodes.get(node, frozenset())
        if layout is None:
            return False
        return any(not layout.places[rank][1].shadow for rank in ranks if rank in layout.places)

    @property
    def total(self) -> int | None:
        """Steps that the job is to do."""
        return None if self._run is None else self._run.total

    @property
    def cell(self) -> int:
        """Ranks of a cell, by the newest layout; 1 before there is one."""
        layout = None if self._run is None else self._run.layout
        return 1 if layout is None else layout.cell_size

    @property
    def column(self) -> int:
        """Ranks of a cell for each stage: with fewer of them stages that get none would hold up the others."""
        layout = None if self._run is None else self._run.layout
        return 1 if layout is None else layout.cell_size * len(layout.stages)


def _predicted(path: Path) -> Mapping[int, float]:
    """By a scale table of a version that is known; empty if there is none that can be read."""
    try:
        table = ScaleTable.from_json(path.read_bytes())
    except (OSError, ScaleTableError):
        return {}
    return {devices: entry.tokens_per_s for devices, entry in table.entries.items()}


def table_of(
    speeds: Mapping[int, float], given: int, most: int, column: int, predicted: Mapping[int, float] | None = None
) -> SpeedTable:
    """The speed table of a job submitted with ``given`` devices that grows by ``column`` ranks, up to ``most`` devices.

    ``speeds``: tokens a second by number of devices, as far as measured, ``given`` among them. Between two measured
    numbers the speed is taken to be on a straight line, above them to rise as it last did, at most in proportion.
    Others than those of whole columns are on the way to these, and say nothing of them. ``predicted``, by the job's own
    scale table, says what numbers that were not measured are worth, as a ratio to ``given``.
    """
    known = sorted(devices for devices in speeds if devices >= given and (devices - given) % column == 0)

    def seconds(devices: int) -> float:
        if devices not in speeds and predicted and min(predicted.get(n, 0.0) for n in (given, devices)) > 0:
            return predicted[given] / predicted[devices] / speeds[given]
        return 1 / _speed(speeds, known, devices)

    return SpeedTable.of(given, seconds, range(given, most + 1, column), 1 / speeds[given])


def _speed(speeds: Mapping[int, float], known: list[int], devices: int) -> float:
    below = max(each for each in known if each <= devices)
    above = min((each for each in known if each > devices), default=None)
    if above is not None:
        slope = (speeds[above] - speeds[below]) / (above - below)
    else:
        slope = speeds[below] / below
        before = max((each for each in known if each < below), default=None)
        if before is not None:
            slope = min(slope, max(0.0, (speeds[below] - speeds[before]) / (below - before)))
    return max(speeds[below] + slope * (devices - below), 1e-9)
