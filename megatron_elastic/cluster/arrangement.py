"""Arrangement: which units each stage should hold, as somebody asked for it or as costs suggest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_elastic.cluster.course import Course
from megatron_elastic.cluster.messages import Profile
from megatron_elastic.config import MEASURED
from megatron_elastic.layout import Layout
from megatron_elastic.plan import Costs, Sample, measured, replan


class Arrangement:
    """Costs of units, and the number of stages that is wanted.

    Args:
        course: where the job stands.
        write: writes a measured profile down.
    """

    def __init__(self, course: Course, write: Callable[[str], None]) -> None:
        self.stages: int | None = None
        """Number of pipeline stages that somebody has asked for."""
        self._course = course
        self._write = write
        self._costs: Costs | None = None
        self._samples: dict[int, Sample] = {}
        """What each rank measured last under the present layout."""
        self._fits = False
        """Whether units have been where they cost least since ranks last came or went."""

    def read(self, profile: str | None, layout: Layout) -> None:
        """Take costs from ``--elastic-profile``. Raises OSError or ProfileError."""
        if profile not in (None, MEASURED):
            self._costs = Costs.from_json(Path(profile).read_text(), layout.units)

    def measured(self, message: Profile) -> bool:
        """A rank has measured its stage. Returns whether there are new costs."""
        layout = self._course.layout
        if layout is None or message.epoch != layout.epoch or message.rank not in layout.ranks:
            return False
        self._samples[message.rank] = message.sample
        costs = measured(layout, self._samples.values())
        if costs is None:
            return False
        self._costs = costs
        self._write(costs.to_json(layout.units))
        return True

    def due(self, layout: Layout, newcomers: bool) -> bool:
        """Whether ``arrange`` may have something better than ``layout``."""
        self._fits = self._fits and not newcomers
        return self.stages not in (None, layout.pipeline_size) or not (self._costs is None or self._fits)

    def arrange(self, layout: Layout) -> Layout:
        """The stages there should be. Raises NoLayout if the cells cannot make the number that was asked for."""
        assert self._course.first is not None
        costs = self._costs or Costs.assumed(layout.units)
        stages = {layout.pipeline_size if self.stages is None else self.stages}
        return replan(layout, costs, layout.epoch, stages=stages, tied=self._course.first.tied)

    def reached(self) -> None:
        """The present layout is what costs suggest."""
        self._fits = self._costs is not None

    def disturbed(self) -> None:
        """Ranks are lost."""
        self._fits = False

    def new_layout(self) -> None:
        """What was measured was another layout's."""
        self._samples.clear()
