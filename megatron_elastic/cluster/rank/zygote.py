"""Zygote: one process that imports what every rank needs, and then forks the ranks.

Importing torch and Megatron takes seconds; forking after it takes milliseconds and shares the memory. The zygote has
one thread, so that forking is safe, waits for its children through pidfds, hears by SIGCHLD when one is stopped or goes
on, and dies with the agent that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import io
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.program import Log, Program
from megatron_elastic.cluster.rank.deathwatch import Deathwatch
from megatron_elastic.cluster.title import entitle
from megatron_elastic.device.names import NAMES

PRELOAD_VARIABLE = "MEGATRON_ELASTIC_PRELOAD"
"""Environment variable with the modules to import before forking, separated by commas; empty for none."""

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "megatron_elastic.comm.transport",  # loads UCX: fine before the fork as long as no context exists
    "megatron_elastic.device.npu",
    "megatron_elastic.device.stand_in",
    "megatron_elastic.adaptor.lacking",  # puts in what Megatron imports and is not here
    "megatron.core",
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron_elastic.adaptor.without_cuda.stand_ins",
    "megatron_elastic.adaptor.training.entry",
    "megatron.training",  # of a Megatron-LM checkout
)
"""What is imported by default; modules that are not installed are left out."""

_INSTALLED = frozenset({
    "megatron_elastic.device.npu", "megatron_elastic.device.stand_in",
    "megatron_elastic.adaptor.without_cuda.stand_ins",
})
"""Modules whose ``install`` makes Megatron run on the devices that are there; the first two before it is imported."""
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_LONGEST_CAUSE = 4096
"""Bytes."""
_REFUSED = "it could not be started: "

_FOR_OTHERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What a terminal or a scheduler sends to all processes of a job, and is for the launcher and the ranks to answer."""


class Spawn(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: start a rank with these additions to the environment, which prints to ``log`` and ``errors``.

    ``ignores``: signals that the launcher alone answers: SIGHUP with ``nohup``, SIGTERM where ranks can leave.
    """

    rank: int
    env: dict[str, str]
    log: str
    errors: str
    program: Program
    ignores: tuple[int, ...]


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Agent to zygote: send ``signal`` to the rank and every process of its group. Who ignores SIGTERM is killed."""

    rank: int
    signal: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: imports are done."""

    seconds: float
    threads: int


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: an import raised; the zygote has ended."""

    module: str
    traceback: str


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: the rank runs."""

    rank: int
    pid: int


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: the rank's process ended; ``returncode`` as in ``subprocess``.

    ``cause``: why it could not be started, for people, if it was not.
    """

    rank: int
    returncode: int
    time: float
    cause: str = ""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: a signal stopped the rank's process; it is there but does not run."""

    rank: int
    signal: int
    time: float


class Continued(msgspec.Struct, frozen=True, tag=True):
    """Zygote to agent: the stopped rank's process runs again."""

    rank: int
    time: float


_requests: msgspec.msgpack.Decoder[Spawn | Kill] = msgspec.msgpack.Decoder(Spawn | Kill)


def start(
    agent: socket.socket, deathwatch: Deathwatch, directory: str, log: IO[bytes], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a zygote, which serves who has the other end of ``agent``, and writes to ``log``."""
    arguments = f"{agent.fileno()}, {deathwatch.fd}, {deathwatch.slots}, {directory!r}"
    return subprocess.Popen(
        [sys.executable, "-c", f"from megatron_elastic.cluster.rank.zygote import main; main({arguments})"],
        stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, pass_fds=[agent.fileno(), deathwatch.fd],
        process_group=0,
    )  # fmt: skip


def main(descriptor: int, deathwatch: int, slots: int, directory: str) -> NoReturn:
    """Serve the agent at the other end of the socket ``descriptor``; in a forked rank, run the program. Then exit.

    ``deathwatch`` and ``slots``: the descriptor of the agent's ``Deathwatch``, and its size. ``directory``: the
    program's; modules there come before installed ones of the same name, so a checkout's ``megatron`` is the one used.
    """
    _put_first(directory)
    entitle("zygote", directory)
    _die_with_parent(os.getppid())
    for number in _FOR_OTHERS:
        signal.signal(number, signal.SIG_IGN)  # the agent ends us and the ranks in order
    agent = socket.socket(fileno=descriptor)
    started = time.monotonic()
    # How torch sees whether there is CUDA without starting it, which would have to be before the fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        module = ""
        before: list[str] = []
        for module in _preload_list():
            _preload(module)
            if _device_started():
                _begin_again(f"main({descriptor}, {deathwatch}, {slots}, {directory!r})", module, before,
                             [descriptor, deathwatch])
            before.append(module)
    except Exception:
        agent.sendall(wire.encode(Broken(module, traceback.format_exc())))
        sys.exit(1)
    zygote = _Zygote(agent, Deathwatch(slots, deathwatch))
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so unshare, every page of the modules
    agent.sendall(wire.encode(Ready(time.monotonic() - started, len(os.listdir("/proc/self/task")))))
    program = zygote.serve()
    if program is None:
        _end(0)
    code = program.run()
    zygote.leave()
    _end(code)


def _preload_list() -> Sequence[str]:
    chosen = os.environ.get(PRELOAD_VARIABLE)
    return PRELOAD if chosen is None else [name for name in chosen.split(",") if name]


def _preload(name: str) -> None:
    if not _is_there(name):
        return
    module = importlib.import_module(name)
    if name in _INSTALLED:
        module.install()


def _device_started() -> bool:
    """Whether an import has started a device, which no process can use that is forked from this one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    modules = (getattr(torch, name, None) for name in NAMES if name != "cpu")
    return any(bool(getattr(module, "is_initialized", bool)()) for module in modules)


def _begin_again(call: str, module: str, before: Sequence[str], descriptors: Sequence[int]) -> NoReturn:
    """Be a process anew that imports only what comes before a module; each rank imports that, and what follows."""
    print(f"{module} starts a device when it is imported: it is left to the ranks, and so is what follows",
          file=sys.stderr, flush=True)
    os.environ[PRELOAD_VARIABLE] = ",".join(before)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    os.execv(sys.executable, [sys.executable, "-c", f"from megatron_elastic.cluster.rank.zygote import main; {call}"])


def _is_there(name: str) -> bool:
    """Whether a module, and every package that it is in, can be found."""
    parts = name.split(".")
    return all(importlib.util.find_spec(".".join(parts[:n])) is not None for n in range(1, len(parts) + 1))


class _Zygote:
    """The loop that forks ranks on request and reports when they end, are stopped or go on."""

    def __init__(self, agent: socket.socket, deathwatch: Deathwatch) -> None:
        self._agent = agent
        self._agent_pid = os.getppid()
        self._deathwatch = deathwatch
        self._slot = -1
        """In a rank: its mutex in the deathwatch."""
        self._pids: dict[int, int] = {}
        self._starting: dict[int, socket.socket] = {}
        """By what ranks that were forked say that they have begun."""
        self._refused: dict[int, str] = {}
        """Why ranks end that could not."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(agent, selectors.EVENT_READ)
        # Pidfds tell of ends only. For the rest SIGCHLD makes a descriptor readable, if it has a handler in Python.
        self._noticed, self._notice = socket.socketpair()
        self._noticed.setblocking(False)
        self._notice.setblocking(False)
        signal.set_wakeup_fd(self._notice.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._noticed, selectors.EVENT_READ, data=self._tell_stops)

    def serve(self) -> Program | None:
        """Return None when the agent is gone and every rank has been killed; in a forked rank, its program."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    key.data()
                    continue
                payload = self._receive()
                if payload is None:
                    self._kill_all()
                    return None
                request = _requests.decode(payload)
                if isinstance(request, Kill):
                    self._kill(request.rank, request.signal)
                elif self._fork(request):
                    return request.program

    def _receive(self) -> bytes | None:
        try:
            return wire.receive_frame(self._agent)
        except OSError:  # it has ended with something of ours unread
            return None

    def _fork(self, request: Spawn) -> bool:
        """Whether this is the rank. What the machine refuses it is that rank's end, and no other's."""
        zygote, rank, pid = os.getpid(), request.rank, 0
        try:
            held, hold = socket.socketpair()
        except OSError as error:
            self._refuse(rank, error)
            return False
        try:
            with hold:
                pid = os.fork()
                if pid == 0:
                    held.close()
                    self._become(request, zygote, hold)
                    return True
            os.setpgid(pid, pid)  # the child does the same; whoever comes first, a Kill finds the group
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            held.close()
            if pid:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self._refuse(rank, error)
            return False
        self._pids[rank], self._starting[rank] = pid, held
        reap: Callable[[], None] = functools.partial(self._reap, rank, pid, pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, data=reap)
        # Its log may be on a disk that stands still: nobody else is to wait for it.
        self._selector.register(held, selectors.EVENT_READ, data=functools.partial(self._begun, rank))
        return False

    def _refuse(self, rank: int, error: OSError) -> None:
        self._agent.sendall(wire.encode(Exited(rank, -signal.SIGKILL, time.time(), _REFUSED + str(error))))

    def _begun(self, rank: int) -> None:
        """A rank holds its mutex, or has said why it cannot begin, or is dead already. Nothing if that is known."""
        held = self._starting.pop(rank, None)
        if held is None:
            return
        self._selector.unregister(held)
        with held:
            cause = held.recv(_LONGEST_CAUSE).decode(errors="replace")
        if cause:
            self._refused[rank] = _REFUSED + cause
        else:
            self._agent.sendall(wire.encode(Spawned(rank, self._pids[rank])))

    def _become(self, request: Spawn, zygote: int, hold: socket.socket) -> None:
        """In the rank's process: be that rank. If the machine does not let it, say so through ``hold`` and end."""
        try:
            _die_with_parent(zygote)
            be_traced_by(self._agent_pid)
            self._forget()
            _become_rank(request)
            self._slot = int(request.env["LOCAL_RANK"])
            self._deathwatch.hold(self._slot)
        except OSError as error:
            hold.sendall(str(error).encode()[:_LONGEST_CAUSE])
            os._exit(1)

    def leave(self) -> None:
        """In a rank whose program is over: what comes now is no death."""
        self._deathwatch.release(self._slot)

    def _forget(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        # Closed, never unregistered: the epoll instance is still the zygote's as well.
        for key in self._selector.get_map().values():
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
        self._selector.close()
        for sock in (self._noticed, self._notice, self._agent, *self._starting.values()):
            sock.close()

    def _tell_stops(self) -> None:
        self._noticed.recv(4096)
        now = time.time()
        ranks = {pid: rank for rank, pid in self._pids.items()}
        if not ranks:
            return
        for status in _stops():
            rank = ranks.get(status.si_pid)
            if rank is None:
                continue  # something that an import started
            went_on = status.si_code == os.CLD_CONTINUED
            self._agent.sendall(wire.encode(Continued(rank, now) if went_on else Stopped(rank, status.si_status, now)))

    def _reap(self, rank: int, pid: int, pidfd: int) -> None:
        now = time.time()
        self._begun(rank)  # what it said comes before its end
        self._signal_group(pid, signal.SIGKILL)  # data loader workers and the like; before the pid can be reused
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del self._pids[rank]
        cause = self._refused.pop(rank, "")
        code = -signal.SIGKILL if cause else os.waitstatus_to_exitcode(status)
        self._agent.sendall(wire.encode(Exited(rank, code, now, cause)))

    def _kill(self, rank: int, number: int) -> None:
        if rank in self._pids:
            if number == signal.SIGTERM and _ignores(self._pids[rank], number):
                number = signal.SIGKILL
            self._signal_group(self._pids[rank], number)
            if number == signal.SIGTERM:  # a stopped process would only notice it when it goes on
                self._signal_group(self._pids[rank], signal.SIGCONT)

    @staticmethod
    def _signal_group(pid: int, number: int) -> None:
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            return

    def _kill_all(self) -> None:
        for pid in self._pids.values():
            self._signal_group(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)


def _stops() -> Iterator[os.waitid_result]:
    """Children that were stopped or went on since the last look. Ends are left for the pidfds.

    A child that was stopped and went on before we looked has only gone on.
    """
    try:
        while (status := os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)) is not None:
            yield status
    except ChildProcessError:
        return  # every child has ended and waits for its pidfd's turn


def _ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _die_with_parent(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request was in place
        os._exit(1)


def be_traced_by(pid: int) -> None:
    """Let that process and what it starts look into this one, also where Yama allows that to its ancestors alone:
    the agent starts py-spy for a rank that hangs.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # fails where there is no Yama


def _become_rank(request: Spawn) -> None:
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    logs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) for path in (request.log, request.errors)]
    for target, source in enumerate((null, *logs)):
        os.dup2(source, target)
        os.close(source)
    for name, target in (("stdout", 1), ("stderr", 2)):
        before, binary = getattr(sys, name), io.BufferedWriter(Log(target, "w", closefd=False))
        # By lines: a killed rank keeps what it printed. stderr takes any text.
        setattr(sys, name, io.TextIOWrapper(binary, before.encoding, before.errors, line_buffering=True))
    for number in _FOR_OTHERS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for ignored in request.ignores:
        signal.signal(ignored, signal.SIG_IGN)
    os.environ.update(request.env)
    entitle(f"rank {request.rank}", request.program.target)


def _put_first(directory: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = directory  # instead of what `python -c` put there


def _end(code: int) -> NoReturn:
    """End the process as the interpreter does, but without taking down every module one by one.

    That would write to, and so unshare, each page that the ranks have in common, in all of them at once.
    """
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
