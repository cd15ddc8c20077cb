"""Lock: one process of all that share a folder does something, and the others wait for it."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_logger = logging.getLogger(__name__)
_LOOK, _SELDOM = 0.02, 1.0
"""Seconds between two attempts to get a lock: at first, and at most. In between they are a tenth of those that it has
been waited for, as thousands may ask one file server."""
_SAID_AFTER = 2.0
"""Seconds after which it is said what is waited for."""


@contextmanager
def locked(path: Path, what: str, limit: float = math.inf) -> Iterator[None]:
    """Hold ``path``, which is made if it is not there. ``what``: what another may be making meanwhile.

    Raises TimeoutError after ``limit`` seconds. Who waits uses a processor now and then, so it does not count as
    hanging (``training.batches``).
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait(file, path, what, limit)
        yield
    finally:
        os.close(file)


def _wait(file: int, path: Path, what: str, limit: float) -> None:
    begun, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begun
        if waited >= limit:
            raise TimeoutError(f"another process makes {what} for more than {limit:g} s, or stands still meanwhile "
                               f"(it has {path})")
        if not said and waited > _SAID_AFTER:
            said = True
            _logger.warning("waiting for another process, which makes %s (%s)", what, path)
        time.sleep(min(max(waited / 10, _LOOK), _SELDOM, limit - waited))
