"""The example script, of which each rank tells in its log what the passes of each step have allocated on its device at
most: bytes after ``kept``, without what was there before them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

from megatron_elastic.pipeline.executor import Executor

__all__ = ["check_arguments"]


def _tell() -> None:
    run = Executor.run

    def told(self: Executor, *arguments: Any) -> None:
        device: Any = torch.get_device_module()
        before = device.memory_allocated()
        device.reset_peak_memory_stats()
        run(self, *arguments)
        print("kept", device.max_memory_allocated() - before, flush=True)

    Executor.run = told  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    _tell()
    sys.exit(pretrain_gpt.main())
