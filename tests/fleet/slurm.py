"""A real Slurm on this machine: a controller and nodes, each on a host of its own (``namespaces``)."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from namespaces import Host, Hosts

from tests.jobs import ROOT

SCRIPT = ROOT / "scripts" / "launch_slurm.sbatch"
_NULL = os.makedev(1, 3)
_GOES_ON = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "PREEMPTED")
"""States of a job that has not ended for good."""
_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
_LIMIT = 90.0
"""Seconds that anything may take; a few times what it needs."""
_LOOK = 0.1
"""Seconds between two looks: Slurm tells nobody that a job's state has changed."""
_GPUS = 8
"""Of a node: as many as the script asks for. They are like ``/dev/null``."""
_CONF = """
ClusterName=tests
SlurmctldHost={hostname}({controller})
SlurmUser=root
SlurmdUser=root
# A credential's lifetime is also how long a job that is queued again has to wait.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectTypeParameters=CR_Core
ReturnToService=2
SelectType=select/cons_tres
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,defer_batch
SlurmdTimeout=5
KillWait=10
NodeName=DEFAULT CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus} State=UNKNOWN
{nodes}
PartitionName=train Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [each for each in _DAEMONS if not _find(each)]
    return f"needs {' and '.join(missing)} (Debian: slurm-wlm, munge)" if missing else ""


class Slurm:
    """Nodes ``node0``, ``node1``... that all share this machine's disk.

    Args:
        hosts: where the controller and the nodes go.
        folder: what all of it writes.
        nodes: how many.
        cpus: of a node; None: those of this machine.
    """

    def __init__(self, hosts: Hosts, folder: Path, nodes: int, cpus: int | None = None) -> None:
        self._folder = folder
        self._cpus = cpus or os.cpu_count()
        self._log = (folder / "daemons.log").open("ab")
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._controller = hosts.add()
        self._hosts: dict[str, Host] = {f"node{number}": hosts.add() for number in range(nodes)}
        hosts.know({name: host.address for name, host in self._hosts.items()})
        self._write(nodes)
        self._daemons = {"munged": self._munged()}
        self.until(f"{folder}/munge.socket", lambda: (folder / "munge.socket").exists())
        self._daemons["slurmctld"] = self._start(self._controller, "slurmctld", "-D")
        for node in self._hosts:
            self.boot(node)
        self.until("all nodes are idle", self.idle)

    def idle(self) -> bool:
        """Whether all nodes are up, and free."""
        return self.ask("sinfo", "-h", "-p", "train", "-o", "%D %t") == f"{len(self._hosts)} idle"

    def boot(self, node: str) -> None:
        """A node comes up."""
        self._daemons[node] = self._start(self._hosts[node], "slurmd", "-D", "-N", node)

    def lose(self, node: str) -> None:
        """A node loses power: its daemon is killed, and with it all that runs there."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(["ip", "netns", "exec", self._controller.name, *command], env=self._env, cwd=self._folder,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def beside(self, *command: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command that uses Slurm's, on the controller's host. ``env``: additions to its environment."""
        return subprocess.Popen(["ip", "netns", "exec", self._controller.name, *command], env={**self._env, **env},
                                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)

    def submit(self, *arguments: str, options: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> Submitted:
        """Submit the launch script with a job's arguments. ``options``: of sbatch, before those of the script."""
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in (env or {}).items())])
        out = self._folder / "out-%j"
        return Submitted(self, self.ask("sbatch", "--parsable", f"--output={out}", f"--export={exported}", *options,
                                        str(SCRIPT), *arguments), self._folder)

    def end(self) -> None:
        """All of it ends, with what runs there."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        self._log.close()

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until that holds."""
        limit = time.monotonic() + _LIMIT
        while not holds():
            if time.monotonic() > limit:
                log = (self._folder / "daemons.log").read_text()[-3000:]
                raise AssertionError(f"not within {_LIMIT:g} s: {what}\n{log}\n{_running()}")
            time.sleep(_LOOK)

    def _write(self, nodes: int) -> None:
        lines = [f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr={host.address}"
                 for name, host in self._hosts.items()]
        (self._folder / "slurm.conf").write_text(_CONF.format(
            hostname=socket.gethostname(), controller=self._controller.address, folder=self._folder,
            cpus=self._cpus, gpus=_GPUS, nodes="\n".join(lines)))
        for number in range(_GPUS):
            os.mknod(self._folder / f"gpu{number}", stat.S_IFCHR | 0o600, _NULL)
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu[0-{_GPUS - 1}]\n")
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self._folder / "state").mkdir()
        (self._folder / "munge.key").write_bytes(os.urandom(128))
        (self._folder / "munge.key").chmod(0o400)

    def _munged(self) -> subprocess.Popen[bytes]:
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed",
                 "log-file": "munge.log"}  # fmt: skip
        flags = [f"--{flag}={self._folder / name}" for flag, name in files.items()]
        return self._run(_find("munged"), "--foreground", "--force", *flags)

    def _start(self, host: Host, daemon: str, *flags: str) -> subprocess.Popen[bytes]:
        return self._run(*host.command([_find(daemon), *flags]))

    def _run(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=self._env, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=self._log,
                                stderr=self._log)


def _running() -> str:
    """What of jobs still runs on this machine, and where launchers are."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,etimes,args"], capture_output=True, text=True, check=True).stdout
    found = [line for line in listed.splitlines() if any(each in line for each in ("slurmstepd", "srun", "megatron"))]
    for line in found[:]:
        if "megatron-elastic run" in line and (spy := shutil.which("py-spy")):
            dump = [spy, "dump", "--pid", line.split()[0]]
            found.append(subprocess.run(dump, capture_output=True, text=True, check=False).stdout)
    return "\n".join(found)


class Submitted:
    """A job that has been submitted."""

    def __init__(self, slurm: Slurm, number: str, folder: Path) -> None:
        self.number = number
        self._slurm = slurm
        self._out = folder / f"out-{number}"

    @property
    def output(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def is_told(self, name: str) -> str:
        """One field of what Slurm tells about it."""
        told = self._slurm.ask("scontrol", "--oneliner", "show", "job", self.number)
        return dict(field.split("=", 1) for field in told.split() if "=" in field)[name]

    def until(self, what: str, holds: Callable[[], bool], also: str = "COMPLETED") -> None:
        """Wait until that holds; the job must not end otherwise, but in the state ``also``."""
        def look() -> bool:
            state = self.is_told("JobState")
            assert state in (*_GOES_ON, also), f"{state}, not {what}:\n{self.output}"
            return holds()

        self._slurm.until(what, look)

    def until_said(self, text: str) -> None:
        """Wait until a line with ``text`` is in its output."""
        self.until(repr(text), lambda: text in self.output)

    def until_state(self, state: str) -> None:
        """Wait until it is in this state."""
        self.until(state, lambda: self.is_told("JobState") == state, also=state)


def _find(program: str) -> str:
    """Its path; empty if it is not there."""
    return shutil.which(program, path=os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))) or ""


@contextmanager
def slurm(hosts: Hosts, folder: Path, nodes: int, cpus: int | None = None) -> Iterator[Slurm]:
    made = Slurm(hosts, folder, nodes, cpus)
    try:
        yield made
    finally:
        made.end()
