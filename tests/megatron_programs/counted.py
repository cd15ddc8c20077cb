"""The example script, and what each of its steps asks of the software accelerator, a line of JSON each in the log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

if TYPE_CHECKING:
    from megatron_elastic.adaptor.training.tenure import Tenure
    from megatron_elastic.adaptor.training.trainer import Trainer

__all__ = ["check_arguments"]


def install() -> None:
    """Count from the begin of a step to its end."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    import torch

    from megatron_elastic.adaptor.training import step

    take = step.take

    def counted(trainer: Trainer, tenure: Tenure) -> None:
        device = torch.get_device_module("soft")
        number = trainer.standing.step
        device.synchronize()
        device.reset_counters()
        take(trainer, tenure)
        waits, figures = device.synchronised_by(), device.counters()._asdict()
        layout, owned = tenure.layout, [unit for unit, _ in tenure.layout.owned(trainer.rank)]
        sizes = [
            (buffer.partition.size, owned.count(unit) * buffer.partition.slice_size, len(layout.contributors(unit)))
            for unit, buffer in trainer.stage.units.items()
        ]
        print(json.dumps({"step": number, "waits": waits, **figures, "units": sizes}), flush=True)

    step.take = counted


if __name__ == "__main__":
    install()
    sys.exit(pretrain_gpt.main())
