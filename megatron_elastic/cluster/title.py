"""Title: what ``ps`` and ``top`` call a process, so that one sees which is which."""

from __future__ import annotations

import os
import sys

from setproctitle import getproctitle, setproctitle

# The title takes the room of the arguments alone: schedulers find processes by their environment in /proc.
os.environ.setdefault("SPT_NOENV", "1")
getproctitle()  # finds that room, which it does not once the environment has been replaced


def entitle(what: str, program: str | None = None) -> None:
    """Call this process ``megatron-elastic WHAT: PROGRAM``, as far as there is room for it: what its command line took.

    ``program``: None: what Python was told to run.
    """
    setproctitle(f"megatron-elastic {what}: {os.path.basename(sys.argv[0] if program is None else program)}")
