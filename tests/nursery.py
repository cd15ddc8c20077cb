"""Nursery: launchers forked by one process that has imported all that they, and the ranks they start, need.

Each is a process of its own, with a zygote, ranks and connections of its own, as ``megatron-elastic run`` has them.
Only the seconds are saved in which it, and its zygote, would import torch and Megatron once more: half of a small job.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NoReturn

from megatron_elastic import cli
from megatron_elastic.cluster.launch import launcher as _launcher  # noqa: F401  # what `run` imports
from megatron_elastic.cluster.rank import zygote
from megatron_elastic.cluster.rank.deathwatch import Deathwatch

_ROOM = 1 << 20
"""Bytes of a request, at most."""
_NUMBER = struct.Struct("q")
_TITLES = "room for the titles of launchers, zygotes and ranks ".ljust(100, ".")
"""An argument that nobody reads."""


class Nursery:
    """The process, as the tests see it. ``env``: its environment."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nursery", str(theirs.fileno()), _TITLES],
                pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def start(self, arguments: Sequence[str], env: Mapping[str, str]) -> Launched:
        """Start ``megatron-elastic ARGUMENTS`` with this environment, here."""
        ours, theirs = socket.socketpair()
        output, written = os.pipe()
        with theirs, os.fdopen(written, "wb") as sink:
            request = {"arguments": list(arguments), "env": dict(env), "directory": os.getcwd()}
            _send(self._line, request, [sink.fileno(), theirs.fileno()])
        return Launched(ours, output)

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.wait()


class Launched:
    """A launcher, in the way of ``subprocess.Popen``."""

    def __init__(self, line: socket.socket, output: int) -> None:
        self._line = line
        self.pid = self._number()
        self.returncode: int | None = None
        self.stdout: IO[str] = open(output)  # noqa: SIM115  # closed when the process has ended

    def poll(self) -> int | None:
        """Exit code, if it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("megatron-elastic", timeout or 0.0) from None
            self._line.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """The rest of what it prints, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.stdout.closed:
            return "", None
        return rest_of(self, timeout), None

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        data = self._line.recv(_NUMBER.size)
        assert len(data) == _NUMBER.size, "the process that starts launchers has ended"
        (number,) = _NUMBER.unpack(data)
        assert isinstance(number, int)
        return number


def await_exits(pids: Iterable[int], limit: float) -> None:
    """Wait until processes have ended, whoever's they are, ``limit`` seconds at most for all of them."""
    deadline = time.monotonic() + limit
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            finally:
                os.close(pidfd)


def output_until(launcher: Launched | subprocess.Popen[str], text: str, limit: float) -> tuple[str, str]:
    """What a launcher prints up to the line with ``text``, and that line.

    Raises AssertionError when the launcher ends before, or is killed as it printed nothing for ``limit`` seconds: a
    busy machine makes it slow, and not silent.
    """
    output = ""
    how = f"ended without printing {text!r}"
    try:
        for line in _lines(launcher, limit):
            output += line
            if text in line:
                return output, line
    except subprocess.TimeoutExpired:
        how = f"printed nothing for {limit:g} s, and not {text!r} before"
    raise AssertionError(f"the launcher {how}:\n{output}")


def rest_of(launcher: Launched | subprocess.Popen[str], limit: float | None) -> str:
    """The rest of what a launcher prints, once it has ended, with what its ``stdout`` has read ahead.

    (``Popen.communicate`` leaves that out.) Raises subprocess.TimeoutExpired when it has been killed, as it printed
    nothing for ``limit`` seconds and did not end.
    """
    rest: list[str] = []
    try:
        rest.extend(_lines(launcher, limit))
    except subprocess.TimeoutExpired as late:
        late.output = "".join(rest)
        raise
    finally:
        launcher.wait()
        assert launcher.stdout is not None
        launcher.stdout.close()
    return "".join(rest)


def _lines(launcher: Launched | subprocess.Popen[str], limit: float | None) -> Iterator[str]:
    assert launcher.stdout is not None
    heard, silent, over = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        while heard.wait(limit):
            heard.clear()
            if over.is_set():
                return
        silent.set()
        launcher.kill()  # which ends the reading, too

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for line in launcher.stdout:
            heard.set()
            yield line
    finally:
        over.set()
        heard.set()
        watcher.join()
    if silent.is_set():
        raise subprocess.TimeoutExpired("megatron-elastic", limit or 0.0)


# ---- in the process --------------------------------------------------------------------------


def main(descriptor: int) -> NoReturn:
    """Import all, and fork a launcher for each request until the tests are over."""
    for module in zygote.PRELOAD:
        zygote._preload(module)
    line = socket.socket(fileno=descriptor)
    selector = selectors.DefaultSelector()
    selector.register(line, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                pid, teller = key.data
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, int)
                os.close(key.fileobj)
                _, status = os.waitpid(pid, 0)
                teller.send(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
                teller.close()
                continue
            request, descriptors = _receive(line)
            if request is None:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                line.close()
                selector.close()
                _launch(request, *descriptors)
            os.close(descriptors[0])
            teller = socket.socket(fileno=descriptors[1])
            teller.send(_NUMBER.pack(pid))
            selector.register(os.pidfd_open(pid), selectors.EVENT_READ, data=(pid, teller))


def _launch(request: Mapping[str, Any], output: int, teller: int) -> NoReturn:
    """Be a launcher."""
    os.close(teller)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for name, target in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(io.FileIO(target, "w", closefd=False))))
    random.seed()  # elections wait for random times, which must not be the same everywhere
    zygote.start = _Waiting().start  # type: ignore[assignment]
    sys.argv = ["megatron-elastic", *request["arguments"]]
    _end(lambda: cli.main(request["arguments"]))


class _Waiting:
    """A zygote that waits for who needs it: forked now, while the launcher has one thread."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self._line.close()
            os.setpgid(0, 0)
            null = os.open(os.devnull, os.O_RDWR)
            for target in (0, 1, 2):
                os.dup2(null, target)
            request, descriptors = _receive(theirs)
            theirs.close()
            if request is None:
                os._exit(0)  # the launcher needs none
            agent, deathwatch, log = descriptors
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.clear()
            os.environ.update(request["env"])
            _end(lambda: zygote.main(agent, deathwatch, request["slots"], request["directory"]))
        theirs.close()

    def start(
        self, agent: socket.socket, deathwatch: Deathwatch, directory: str, log: IO[bytes], env: Mapping[str, str]
    ) -> _Waiting:
        """In place of ``zygote.start``."""
        request = {"env": dict(env), "slots": deathwatch.slots, "directory": directory}
        _send(self._line, request, [agent.fileno(), deathwatch.fd, log.fileno()])
        return self

    def wait(self) -> int:
        """As ``subprocess.Popen`` has it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


def _end(program: Any) -> NoReturn:
    """Run ``program`` and end as a rank does."""
    try:
        code = program()
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
        code = 1
    zygote._end(code or 0)


# ---- between them ----------------------------------------------------------------------------


def _send(line: socket.socket, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    socket.send_fds(line, [json.dumps(request).encode()], list(descriptors))


def _receive(line: socket.socket) -> tuple[Any, list[int]]:
    """A request and its descriptors; None when the other end is closed."""
    data, descriptors, _, _ = socket.recv_fds(line, _ROOM, 4)
    return (json.loads(data) if data else None), descriptors


if __name__ == "__main__":
    main(int(sys.argv[1]))
