"""Stack: what a process is doing, written down before it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from pathlib import Path

_LIMIT = 3.0
"""Seconds that writing it down may take: the others wait meanwhile."""


async def save_stack(pid: int, path: Path) -> None:
    """Write down the stacks of a process's threads, by ``py-spy`` if that is installed. Does not raise."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                program, "dump", "--pid", str(pid), stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=file
            )
        try:
            await asyncio.wait_for(process.wait(), _LIMIT)
        except TimeoutError:
            process.kill()
            await process.wait()
