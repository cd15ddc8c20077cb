"""Launcher: one process of ``megatron-elastic run``, and what it has printed. Several are one job."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from common import CHECKOUT
from namespaces import Host

Heard: TypeAlias = "queue.Queue[tuple[Launcher, str]]"
"""Who has printed which line, of all launchers of a job; an empty one when a launcher has ended."""


class Launcher:
    """One launcher.

    Args:
        command: what it is.
        heard: gets what it prints.
        env: additions to our environment.
        host: where it runs; None for this machine itself. With a host, killing it kills all that it has started.
    """

    def __init__(self, command: Sequence[str], heard: Heard, env: Mapping[str, str], host: Host | None = None) -> None:
        self.host = host
        self.output = ""
        self.process = subprocess.Popen(
            command if host is None else host.command(command), text=True, cwd=CHECKOUT, env={**os.environ, **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._heard = heard
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        """Of its host."""
        assert self.host is not None
        return self.host.address

    def kill(self) -> float:
        """SIGKILL it, and all that runs on its host with it. Returns when."""
        now = time.time()
        self.process.kill()
        self.process.wait()
        return now

    def interrupt(self) -> None:
        """SIGINT: it ends its ranks, and then itself."""
        self.process.send_signal(signal.SIGINT)
        if self.host is None:
            self.process.wait()

    def end(self) -> None:
        """End it, however it is, and read the rest."""
        self.kill()
        self._reader.join()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line
                self._heard.put((self, line))
        self.process.wait()
        self._heard.put((self, ""))
