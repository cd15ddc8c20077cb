"""Trains like examples/pretrain_gpt.py. Rank 0 begins each step with taking a lock: who holds it makes the job wait.

Environment: ``PACE``: the file that is locked.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pretrain_gpt import check_arguments, main

__all__ = ["check_arguments"]


def install() -> None:
    """Let rank 0 wait where it gets its data."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    from megatron_elastic.adaptor.training.trainer import Trainer

    begin = Trainer.__init__

    def wait(point: str, step: int, grain: int | None) -> None:
        if point == "data":
            with Path(os.environ["PACE"]).open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)

    def begin_to_wait(self: Trainer, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.rank == 0:
            self.hooks.attach(wait)

    Trainer.__init__ = begin_to_wait  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(main())
