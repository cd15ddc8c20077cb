"""Trains like examples/pretrain_gpt.py. In step 3 rank 1 has a gradient that is infinite."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pretrain_gpt import check_arguments, main

if TYPE_CHECKING:
    from megatron_elastic.adaptor.training.trainer import Trainer

__all__ = ["check_arguments"]


def install() -> None:
    """Let the gradient grow."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    from megatron_elastic.adaptor.training.trainer import Trainer

    begin = Trainer.__init__

    def begin_to_look(self: Trainer, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.hooks.attach(lambda point, step, grain: look(self, point, step))

    def look(trainer: Trainer, point: str, step: int) -> None:
        if (trainer.rank, point, step) == (1, "grad_sync", 3):
            next(iter(trainer.stage.units.values())).sums[0] = float("inf")

    Trainer.__init__ = begin_to_look  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(main())
