"""Every test must leave nothing behind: no process, no thread, no socket. And the jobs that several files run."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.jobs import Jobs, environment
from tests.nursery import Nursery, await_exits

_PROC = Path("/proc")
_MARK = "MEGATRON_ELASTIC_TEST_RUN"
"""Inherited by whatever tests start, so that processes are found whose parents are gone."""

_PATIENCE = 60.0
"""Seconds that what is ending already may take to end; nothing is waited for when nothing is left."""
_POLL = 0.01
"""Seconds between two looks at what cannot be waited for."""


# What an example takes says what else the machine does. The same examples every time: what new ones find (the profile
# "search", in scripts/long.sh) becomes a case of its own.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("tests")

pytest_plugins = ["tests.tiers.selection", "tests.tiers.resuming", "tests.tiers.telling", "tests.tiers.unsteady"]


def pytest_configure() -> None:
    if core := os.environ.get("MEGATRON_CORE_PATH"):
        sys.path.insert(0, core)
        importlib.import_module("megatron_elastic.adaptor")  # puts in what it lacks, whichever test imports it first
    os.environ[_MARK] = uuid.uuid4().hex


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "MEGATRON_LM_PATH" not in os.environ:
        skip = pytest.mark.skip(reason="a Megatron-LM checkout: MEGATRON_LM_PATH names none (core_v0.16.1)")
        for item in items:
            if item.get_closest_marker("checkout") is not None:
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests have measured, a line each."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "measured" and report.when == "call":
                terminalreporter.write_line(f"measured: {value} ({report.nodeid})")


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Takes what a test has measured; it is printed at the end."""
    return lambda what: record_property("measured", str(what))


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Starts elastic jobs on a tiny data set."""
    from megatron_elastic.adaptor.dataset import prepare

    data = tmp_path_factory.mktemp("data")
    prepare(data, [Path(json.__file__).parent], vocab_size=400)
    nursery = Nursery(environment())
    yield Jobs(tmp_path_factory.mktemp("jobs"), data, nursery)
    nursery.close()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaves a process, a non-daemon thread or a socket; and kill such processes."""
    processes, threads, sockets = _processes(), set(threading.enumerate()), _sockets()
    yield
    left = _await_exits(_processes() - processes)
    descriptions = [_describe(pid) for pid in sorted(left)]
    for pid in left:
        _kill(pid)
    assert not left, f"the test left processes behind (killed now): {'; '.join(descriptions)}"

    deadline = time.monotonic() + _PATIENCE
    alive = []
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                alive.append(thread.name)
    assert not alive, f"the test left threads running: {alive}"

    if _sockets() - sockets:
        gc.collect()  # a socket in a reference cycle is closed with it
    while (open_now := _sockets() - sockets) and time.monotonic() < deadline:  # daemon threads may be closing theirs
        time.sleep(_POLL)
    assert not open_now, f"the test left sockets open: {[_socket_name(inode) for inode in sorted(open_now)]}"


def _processes() -> set[int]:
    """Children of this process, and all processes that inherited this run's mark."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    me = os.getpid()
    found = set()
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == me:
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == me or mark in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
        except OSError:
            continue  # it ended while we looked, or is none of ours
    return found


def _await_exits(pids: set[int]) -> set[int]:
    """Which of ``pids`` are still there, once those that are just ending had time to."""
    await_exits(pids, _PATIENCE)
    return pids & _processes()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass  # gone already, or not a child: then its parent or init reaps it


def _describe(pid: int) -> str:
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"{pid} ({command or 'ended, but nobody waited for it'})"


def _sockets() -> set[int]:
    """Inodes of the sockets that this process has open."""
    found = set()
    for fd in (_PROC / "self" / "fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(int(target[len("socket:[") : -1]))
    return found


def _socket_name(inode: int) -> str:
    """``tcp 0100007F:1F90`` as the kernel lists it, or just the inode."""
    for kind in ("tcp", "tcp6", "udp", "unix"):
        for line in (_PROC / "net" / kind).read_text().splitlines()[1:]:
            fields = line.split()
            if str(inode) in fields:
                return f"{kind} {fields[1]}" if kind != "unix" else f"unix {fields[-1]}"
    return f"socket {inode}"
