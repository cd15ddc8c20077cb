"""The launcher in a container: as its first process, within its limits, and when all its processes get a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.launch import launcher
from megatron_elastic.cluster.program import Program
from megatron_elastic.cluster.rank import zygote
from megatron_elastic.cluster.rank.deathwatch import Deathwatch
from megatron_elastic.cluster.recording.screen import complain
from megatron_elastic.config import UsageError
from megatron_elastic.device import allowance
from tests.jobs import PATIENT
from tests.launches import PROGRAMS

_answers: msgspec.msgpack.Decoder[zygote.Ready | zygote.Spawned | zygote.Exited] = msgspec.msgpack.Decoder(
    zygote.Ready | zygote.Spawned | zygote.Exited)


# ---- signals -------------------------------------------------------------------------------------


class Zygote:
    """One that starts ranks of a program that says that it runs, and then waits for signals."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        script = folder / "waits.py"
        script.write_text("import signal\nprint('runs', flush=True)\nwhile True:\n    signal.pause()\n")
        self._program = Program(str(script), False, [])
        self._socket, theirs = socket.socketpair()
        with theirs, (folder / "zygote.log").open("ab") as log:
            env = {**os.environ, zygote.PRELOAD_VARIABLE: ""}
            self._process = zygote.start(theirs, Deathwatch(1), str(folder), log, env)
        assert isinstance(self.receive(), zygote.Ready)

    def receive(self) -> zygote.Ready | zygote.Spawned | zygote.Exited:
        payload = wire.receive_frame(self._socket)
        assert payload is not None
        return _answers.decode(payload)

    def spawn(self, *ignores: int) -> int:
        """Start a rank; returns its process, when its program runs."""
        fifo = self._folder / "fifo"
        os.mkfifo(fifo)
        self.send(zygote.Spawn(0, {"LOCAL_RANK": "0", "RANK": "0"}, str(fifo), str(fifo), self._program, ignores))
        with fifo.open() as output:
            assert output.readline() == "runs\n"
            answer = self.receive()
        assert isinstance(answer, zygote.Spawned)
        return answer.pid

    def send(self, request: zygote.Spawn | zygote.Kill) -> None:
        self._socket.sendall(wire.encode(request))

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Zygote]:
    there = Zygote(tmp_path)
    yield there
    there.close()


@pytest.mark.parametrize(("ignores", "ended"), [((), -signal.SIGTERM), ((signal.SIGTERM,), -signal.SIGKILL)],
                         ids=["a plain job", "an elastic one"])
def test_sigterm_to_all_processes_is_the_launchers_to_answer(
    ranks: Zygote, ignores: tuple[int, ...], ended: int
) -> None:
    """A rank that can leave ignores what a scheduler sends it; its agent can end it all the same."""
    pid = ranks.spawn(*ignores)
    os.kill(pid, signal.SIGTERM)
    if ignores:
        ranks.send(zygote.Kill(0, signal.SIGTERM))
    answer = ranks.receive()
    assert isinstance(answer, zygote.Exited) and answer.returncode == ended


# ---- the first process ---------------------------------------------------------------------------

_ORPHANS = """
import os, signal, sys
from megatron_elastic.cluster import first_process

def run():
    for _ in range(3):  # each leaves a child behind, which ends at once
        if os.fork() == 0:
            os.fork()
            os._exit(0)
    for _ in range(3):
        os.wait()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    print("runs", flush=True)
    signal.sigwait([signal.SIGUSR1])
    while (there := {*filter(str.isdecimal, os.listdir("/proc"))}) != {"1", str(os.getpid())}:
        pass  # for ever, if nobody asks how they ended
    print("alone, first", os.getppid(), flush=True)
    return 7

sys.exit(first_process.tend(run))
"""


def test_the_first_process_leaves_no_orphans_and_passes_signals_on() -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("unshare --pid needs to be root, or user namespaces")
    with subprocess.Popen([*command, sys.executable, "-c", _ORPHANS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "runs\n"
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGUSR1)
        assert process.stdout.readline() == "alone, first 1\n"
        assert process.wait(60) == 7


def test_a_first_process_may_have_a_terminal_that_is_not_its_sessions() -> None:
    """As in a container that got its standard input from outside."""
    program = """
import os, sys
from megatron_elastic.cluster import first_process
os.dup2(os.openpty()[1], 0)
sys.exit(first_process.tend(lambda: 7))
"""
    done = subprocess.run([sys.executable, "-c", program], start_new_session=True, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr


# ---- limits --------------------------------------------------------------------------------------


def allow(monkeypatch: pytest.MonkeyPatch, cores: float | None = None, processes: int | None = None) -> None:
    monkeypatch.setattr(allowance, "limits", lambda: allowance.Limits(cores, None, processes))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(("cores", "ranks"), [(None, 8), (3.5, 3), (0.5, 1)])
def test_as_many_ranks_as_the_container_has_processors(
    monkeypatch: pytest.MonkeyPatch, cores: float | None, ranks: int
) -> None:
    allow(monkeypatch, cores)
    assert launcher._ranks_per_node("cpu") == ranks


def test_more_ranks_than_a_container_lets_start_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, processes=40)
    launcher._check_processes(6)
    with pytest.raises(UsageError, match=r"--nproc-per-node 8: this container lets 40 more .*pids.max"):
        launcher._check_processes(8)


# ---- a read-only root ----------------------------------------------------------------------------

_READ_ONLY = """
mount --make-rprivate /
mount -t tmpfs none "$1"
mkdir "$1/meet" "$1/run"
mount -o remount,ro,bind /
shift
! touch /tmp/x 2> /dev/null || exit 99
exec "$@"
"""


@pytest.mark.job
def test_only_the_run_directory_can_be_written(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "bash", "-ec", _READ_ONLY, "bash", str(tmp_path)]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("mounting needs to be root, and nothing else to be mounted on /tmp")
    command = [sys.executable, "-m", "megatron_elastic.cli", "run", "--nproc-per-node", "2",
               str(PROGRAMS / "member.py"), "--elastic", *PATIENT, "--meet", str(tmp_path / "meet"), "--steps", "4",
               "--elastic-run-dir", str(tmp_path / "run")]
    env = {**os.environ, zygote.PRELOAD_VARIABLE: "", "PYTHONPATH": str(PROGRAMS.parents[1]),
           "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
    env.pop("TMPDIR", None)
    done = subprocess.run([*inside, *command], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training finished at step 4" in done.stdout


# ---- what a system lacks -------------------------------------------------------------------------


def test_a_system_without_pidfds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(UsageError, match=r"no pidfd_open \(Function not implemented\): Linux 5.3"):
        launcher._check_kernel()


def test_jobs_that_begin_in_one_second_have_run_directories_of_their_own(tmp_path: Path) -> None:
    names = [launcher._own(tmp_path / "runs" / "20261126-220504").name for _ in range(3)]
    assert names == ["20261126-220504", "20261126-220504-2", "20261126-220504-3"]


def test_a_launcher_whose_stderr_is_gone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    complain("note", "nobody reads this", as_json=False)
