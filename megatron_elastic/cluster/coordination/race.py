"""Race: waits of which the first to be over counts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def race(*waits: asyncio.Future[Any] | Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these is done; tasks among them that are not are cancelled.

    Raises what a coroutine among them has raised. A future or a task is its owner's to ask.
    """
    futures = [asyncio.ensure_future(each) for each in waits]
    begun = [future for future, wait in zip(futures, waits, strict=True) if future is not wait]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    finally:
        tasks = [each for each in futures if isinstance(each, asyncio.Task) and not each.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for each in begun:
        if each.done() and not each.cancelled():
            each.result()
