"""A program that knows nothing of megatron_elastic. ``check_arguments`` refuses the argument ``impossible``; the first
other one is what it does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path


def check_arguments(argv: list[str], world_size: int) -> None:
    """What the launcher calls before it starts anything."""
    from megatron_elastic.config import UsageError

    if "impossible" in argv:
        raise UsageError(f"impossible: {world_size} ranks cannot do this; leave it out")


def main() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
             "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "ROLE_NAME", "ROLE_RANK",
             "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
    own = {"argv": sys.argv, "path": sys.path[0], "file": __file__, "pid": os.getpid()}
    print(json.dumps({name: os.environ[name] for name in names} | own))
    act, *more = sys.argv[1:] or [""]
    if act == "usage":
        argparse.ArgumentParser(prog="train.py").parse_args(["--checkpoint-activations"])
    if act == "exit":
        print("first line\nlast line", file=sys.stderr)
        sys.exit(int(more[0]))
    if act == "say":
        print("to stdout")
        print("to stderr", file=sys.stderr)
    if act == "wait":
        print(Path(more[0]).read_text())
    if act == "fail" and os.environ["RANK"] == "1":
        raise ValueError("wrong on rank 1")
    if act in ("fail", "hang"):
        print("waiting")
        signal.pause()


if __name__ == "__main__":
    main()
