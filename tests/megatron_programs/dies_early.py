"""Trains like examples/pretrain_gpt.py. Rank 3 is killed before training begins, as often as ``EARLY_DEATHS`` says."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pretrain_gpt import check_arguments, main

__all__ = ["check_arguments"]


if __name__ == "__main__":
    died = Path(os.environ["MEGATRON_ELASTIC_RUN_DIR"], "died")
    deaths = died.stat().st_size if died.exists() else 0
    if os.environ["RANK"] == "3" and deaths < int(os.environ["EARLY_DEATHS"]):
        with died.open("a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(main())
