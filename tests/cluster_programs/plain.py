"""A program that knows nothing of megatron_elastic. ``check_arguments`` refuses the argument ``impossible``."""

from __future__ import annotations

import json
import os
import signal
import sys


def check_arguments(argv: list[str], world_size: int) -> None:
    """What the launcher calls before it starts anything."""
    from megatron_elastic.config import UsageError

    if "impossible" in argv:
        raise UsageError(f"impossible: {world_size} ranks cannot do this; leave it out")


def main() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
             "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")
    print(json.dumps({name: os.environ[name] for name in names} | {"argv": sys.argv, "path": sys.path[0]}))
    act = sys.argv[1] if len(sys.argv) > 1 else ""
    if act == "fail" and os.environ["RANK"] == "1":
        raise ValueError("wrong on rank 1")
    if act in ("fail", "hang"):
        print("waiting")
        signal.pause()


if __name__ == "__main__":
    main()
