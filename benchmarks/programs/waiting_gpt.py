"""The example script as if it had devices: each grain's forward also takes a while in which the processor is free.

``MEGATRON_ELASTIC_BENCH_DEVICE_MS`` says how long.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

if TYPE_CHECKING:
    import torch

__all__ = ["check_arguments"]

VARIABLE = "MEGATRON_ELASTIC_BENCH_DEVICE_MS"
_compute = pretrain_gpt.forward_step


def forward_step(
    data_iterator: Iterator[Mapping[str, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The example's, after the time a device would take."""
    time.sleep(float(os.environ[VARIABLE]) / 1e3)
    return _compute(data_iterator, model)


if __name__ == "__main__":
    pretrain_gpt.forward_step = forward_step
    sys.exit(pretrain_gpt.main())
