"""Stack: what a process is doing, written down before it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

_LIMIT = 3.0
"""Seconds that writing it down may take: the others wait meanwhile."""
_COMMAND = 'mkdir -p "$0" && exec "$1" dump --pid "$2" > "$3" 2>&1'
"""Its own process opens the file: the disk may stand still, and be what the rank waits for."""


async def save_stack(pid: int, path: Path) -> None:
    """Write down the stacks of a process's threads, by ``py-spy`` if that is installed. Does not raise."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return
    with contextlib.suppress(OSError):
        nowhere = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", _COMMAND, str(path.parent), program, str(pid), str(path),
            stdin=nowhere, stdout=nowhere, stderr=nowhere,
        )  # fmt: skip
        try:
            await asyncio.wait_for(process.wait(), _LIMIT)
        except TimeoutError:
            process.kill()
            with contextlib.suppress(TimeoutError):  # who waits for a disk does not die
                await asyncio.wait_for(process.wait(), _LIMIT)
