"""Lock: one process of all that share a folder does something, and the others wait for it."""

from __future__ import annotations

import fcntl
import logging
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
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold ``path``, which is made if it is not there. ``what``: what another may be making meanwhile.

    Who waits uses a processor now and then, so it does not count as hanging (``training.batches``).
    """
    with path.open("w") as file:
        begun, said = time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - begun
                if not said and waited > _SAID_AFTER:
                    said = True
                    _logger.warning("waiting for another process, which makes %s (%s)", what, path)
                time.sleep(min(max(waited / 10, _LOOK), _SELDOM))
        yield


@contextmanager
def one_first(directory: Path) -> Iterator[None]:
    """Around making a job's data sets: the first rank that comes does it alone, so that the others find the indices.

    ``directory`` is the job's. Where ranks do not share what the first one makes, they share no more than the order.
    """
    made = directory / "data.made"
    with locked(directory / "data.lock", "the data sets' indices"):
        if not made.exists():
            yield
            made.touch()
            return
    yield
