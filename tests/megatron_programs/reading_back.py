"""Reading back: a checkpoint is written and read by one rank, whose dials tell how far it is.

Prints, by chore, how much there was to do and how much was done when it was over, in bytes.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.device import stand_in

stand_in.install()

# ruff: noqa: E402 - Megatron comes after that.
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_elastic.adaptor.checkpoints import reader, writer
from megatron_elastic.adaptor.checkpoints.draft import Draft
from megatron_elastic.adaptor.checkpoints.folder import step_folder
from megatron_elastic.adaptor.checkpoints.saving import Saving
from megatron_elastic.faults.odometer import Odometer
from megatron_elastic.observe.dials import CHORES, Dials, read


class Noted(Dials):
    """What each chore comes to."""

    def __init__(self, words: memoryview) -> None:
        super().__init__(words)
        self.came_to: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def at(self, chore: int, size: int = 0) -> Iterator[None]:
        with super().at(chore, size):
            yield
            now = read(self._words, 0).chore
            assert now is not None and now.what == CHORES[chore]
            self.came_to[now.what] = now.size, now.done
        assert read(self._words, 0).chore is None


def state(value: float) -> dict[str, Any]:
    tensors = {"w": torch.full((3000, 7), value), "b": torch.full((5,), value, dtype=torch.bfloat16)}
    return {"model": {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in tensors.items()}}


def main(folder: Path) -> None:
    folder.mkdir()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer.apply()
    odometer = Odometer.alone()
    odometer.dials = noted = Noted.alone()
    saving = Saving(folder, 1, None, 0, 0, 60.0, odometer, lambda: None)
    saving.begin(1, 0, lambda partial: Draft(partial, state(2.0)))
    assert saving.complete() == (1, None)
    loaded = reader.read(step_folder(folder, 1), state(0.0), noted)
    assert all(bool((tensor == 2.0).all()) for tensor in loaded["model"].values())
    print(json.dumps(noted.came_to))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
