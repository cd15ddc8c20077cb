"""Clocks: at which the devices of a job run. Whoever sets them may be another process than the ranks that read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_elastic.power.devices import FOLDER
from megatron_elastic.power.emulated import Emulated


class Clocks:
    """Of all ranks of a job, as multiples of the nominal clock.

    Args:
        run_dir: of the job.
        begin: with what ranks begin; 1 for who is not there.
    """

    def __init__(self, run_dir: Path, begin: Mapping[int, float]) -> None:
        self._folder = run_dir / FOLDER
        self._begin = begin

    def set_clock(self, rank: int, factor: float) -> None:
        """Let a rank's device run at this clock from its next step on. Raises ValueError unless it is positive."""
        if not factor > 0:
            raise ValueError(f"the clock of rank {rank} must be positive, got {factor:g}")
        Emulated().write(str(self._folder / str(rank)), factor)

    def slowest(self, ranks: Iterable[int]) -> float:
        """Of some ranks, as they are now."""
        return min(map(self._of, ranks))

    def _of(self, rank: int) -> float:
        device = str(self._folder / str(rank))
        try:
            clock = float(Path(device).read_text())
        except FileNotFoundError:
            clock = self._begin.get(rank, 1.0)
        most = Emulated().actual(device)
        return clock if most is None else min(clock, most)
