"""The example script, with damage to the memory of rank 5 before it switches to a planned layout for the first time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

if TYPE_CHECKING:
    from megatron_elastic.adaptor.training.trainer import Trainer
    from megatron_elastic.cluster.messages import VoteResult

__all__ = ["check_arguments"]


def install() -> None:
    """Once."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    from megatron_elastic.adaptor.training.trainer import Trainer

    committed, switches = Trainer.committed, set[int]()

    def damaged(self: Trainer, result: VoteResult) -> None:
        committed(self, result)
        if self.rank == 5 and self.standing.agreed and not switches:
            switches.add(result.step)
            self._flip("moments")

    Trainer.committed = damaged  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(pretrain_gpt.main())
