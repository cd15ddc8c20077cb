"""Reduction: gradients and weights are really exchanged, and then take as long as the emulated ones would.

That counts from the end of the rank's passes, and from its vote. Who waits for a slower rank there has its own part
done meanwhile; the slowest one's comes on top, and the vote waits for it.
"""

from __future__ import annotations

from typing import Any

from megatron_elastic.emulation.accelerator import Accelerator
from megatron_elastic.state.reduction import Reduction


class EmulatedReduction(Reduction):
    """The data-parallel traffic of one step under one layout, for one rank, by the time of its accelerator."""

    def __init__(self, *arguments: Any, accelerator: Accelerator) -> None:
        super().__init__(*arguments)
        self._accelerator = accelerator

    def reduce_gradients(self, grains: int) -> None:
        """As the reduction does."""
        super().reduce_gradients(grains)
        self._accelerator.reduced()

    def start_gathering(self) -> None:
        """As the reduction does."""
        self._accelerator.updating()
        super().start_gathering()

    def finish_gathering(self) -> None:
        """As the reduction does."""
        gathered = bool(self._gathering)
        super().finish_gathering()
        if gathered:
            self._accelerator.spread()
