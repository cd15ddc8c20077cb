"""Jobs: real ``megatron-elastic run`` jobs of a model that is tiny and still has everything."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic import cli
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import RECOVERED, read_digest, read_events, read_metrics
from tests.nursery import Launched, Nursery, output_until, rest_of

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "pretrain_gpt.py"
RANKS = 8
BATCH = 16
MODEL = (
    f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    f"--global-batch-size {BATCH} --lr 5e-3 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0 "
    "--attention-dropout 0.1 --hidden-dropout 0.1 --eval-iters 0 --seed 7"
)
MODERN = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
    "--sequence-parallel"
)
"""What a job of tensor-parallel ranks can have besides, all at once."""
_LISTENS = "0A"
"""State of a TCP socket, in ``/proc/net``."""
_LIMIT = 200.0
"""Seconds for which a job may print nothing; some hundred times what it needs."""
PATIENT = (
    "--elastic-hang-timeout", "30", "--elastic-heartbeat-timeout", "10", "--elastic-suspect-timeout", "5",
)  # fmt: skip
"""Limits of a job on a busy machine, where a test is not about them."""


SEARCHED = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("MEGATRON_CORE_PATH")])])
"""Where jobs look for modules first: ``MEGATRON_CORE_PATH`` names a folder with another megatron-core than the one that
is installed, for all tests (``tests/conftest.py``).
"""


def environment() -> dict[str, str]:
    """That of a job. Ranks outnumber cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCHED}


@dataclass(frozen=True, slots=True)
class Grid:
    """Parallel sizes of a job, its number of steps, and of ranks at the start."""

    tp: int
    pp: int
    steps: int
    ranks: int = RANKS

    def __str__(self) -> str:
        return f"TP{self.tp}-PP{self.pp}-DP{self.ranks // self.tp // self.pp}"

    @property
    def flags(self) -> list[str]:
        """The grid as flags of the training script."""
        return [
            "--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp),
            "--train-iters", str(self.steps),
        ]  # fmt: skip


class Job:
    """One launcher process and what it left behind."""

    def __init__(self, process: subprocess.Popen[str] | Launched, run_dir: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self.output = ""

    def read_until(self, text: str) -> str:
        """Read the launcher's output up to the line with ``text``, and return that line."""
        output, line = output_until(self.process, text, _LIMIT)
        self.output += output
        return line

    def finish(self, code: int = 0) -> str:
        """Wait for the launcher and check its exit code; returns everything it printed."""
        try:
            self.output += rest_of(self.process, _LIMIT)
        except subprocess.TimeoutExpired as late:
            self.output += str(late.output)
            raise AssertionError(f"the job printed nothing for {_LIMIT:g} s, and did not end:\n{self.output}") from None
        assert self.process.returncode == code, self.output
        return self.output

    def pid(self, rank: int) -> int:
        """Process of a living rank: the one that writes its log."""
        log = str(self.run_dir / "logs" / f"rank{rank}.log")
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and os.readlink(entry / "fd" / "1") == log:
                    return int(entry.name)
            except OSError:
                continue  # it ended while we looked, or is none of ours
        raise AssertionError(f"no process writes {log}")

    def kill(self, rank: int) -> None:
        """As from outside."""
        os.kill(self.pid(rank), signal.SIGKILL)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, in order."""
        return [event for event in read_events(self.run_dir) if event["kind"] == kind]

    def metrics(self) -> dict[int, dict[str, Any]]:
        """Metrics by step."""
        return read_metrics(self.run_dir)

    def layouts(self) -> list[Layout]:
        """The layouts in use one after the other; reading checks that they are valid."""
        paths = sorted((self.run_dir / "layouts").glob("*.json"), key=lambda path: int(path.stem))
        layouts = [Layout.from_json(path.read_text()) for path in paths]
        assert [layout.epoch for layout in layouts] == [int(path.stem) for path in paths]
        return layouts


class Jobs:
    """Starts jobs on one data set, and remembers undisturbed ones.

    Args:
        folder: where run directories go.
        data: a prepared data set.
        nursery: starts the launchers that find the same modules; None: each is started as a user does it.
    """

    def __init__(self, folder: Path, data: Path, nursery: Nursery | None = None) -> None:
        self.folder = folder
        self.data = data
        self.nursery = nursery
        self._baselines: dict[tuple[int | str, ...], Job] = {}

    def command(
        self, *flags: str, run_dir: Path, ranks: int = RANKS, launcher: tuple[str, ...] = (), script: Path | None = None
    ) -> list[str]:
        """Command line of an elastic job; ``flags`` come last, so they win. ``script``: instead of the usual one.

        Nobody is slow: ranks of all nodes share this machine's processors.
        """
        return [
            sys.executable, "-m", "megatron_elastic.cli", "run", "--nproc-per-node", str(ranks), *launcher,
            str(script or SCRIPT), "--elastic", "--elastic-slow", "off", "--elastic-run-dir", str(run_dir),
            *PATIENT, "--data-path", str(self.data), *MODEL.split(), *flags,
        ]  # fmt: skip

    def start(
        self, *flags: str, ranks: int = RANKS, launcher: tuple[str, ...] = (), script: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Job:  # fmt: skip
        """Start a job. ``launcher``: flags of ``megatron-elastic run``; ``env``: additions to the environment."""
        run_dir = self.folder / uuid.uuid4().hex[:8]
        command = self.command(*flags, run_dir=run_dir, ranks=ranks, launcher=launcher, script=script)
        env = {**environment(), **(env or {})}
        if self.nursery is not None and env["PYTHONPATH"] == SEARCHED:
            return Job(self.nursery.start(command[3:], env), run_dir)
        process = subprocess.Popen(
            command, text=True, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return Job(process, run_dir)

    def run(self, *flags: str, ranks: int = RANKS) -> Job:
        """Run a job to its end, which must be a good one."""
        job = self.start(*flags, ranks=ranks)
        job.finish()
        return job

    def undisturbed(self, *flags: str, ranks: int = RANKS) -> Job:
        """The job with these flags and without faults; run once for all tests."""
        if (ranks, *flags) not in self._baselines:
            self._baselines[ranks, *flags] = self.run(*flags, ranks=ranks)
        return self._baselines[ranks, *flags]


def open_ports(pid: int) -> list[str]:
    """Sockets of a process that strangers could send to: all of UDP, those of TCP that listen."""
    own = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we looked
            own.add(os.readlink(fd))
    found = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if f"socket:[{inode}]" in own and (state == _LISTENS or name.startswith("udp")):
                found.append(f"{name} {address}")
    return found


def inject(*specs: str) -> list[str]:
    """Flags that kill ranks: ``rank@step:point``, or ``rank@point`` for the first time that the rank comes there."""
    flags = []
    for spec in specs:
        rank, _, rest = spec.partition("@")
        step, _, point = rest.rpartition(":")
        when = f",step={step}" if step else ""
        flags += ["--elastic-inject", f"kill:rank={rank}{when},at={point}"]
    return flags


def usual_samples(step: int) -> int:
    """Taken after a step, where every batch is full."""
    return step * BATCH


def assert_exactly_once(job: Job, first: int = 1, samples: Callable[[int], int] = usual_samples) -> None:
    """Every step has one line of metrics, in order, and the samples are counted right."""
    metrics = job.metrics()  # reading refuses a step that is there twice
    (started,) = job.events("started")
    assert list(metrics) == list(range(first, started["train_iters"] + 1))
    for step, line in metrics.items():
        assert line["consumed_samples"] == samples(step)
        assert line["step_ms"] > 0


def assert_same_training(
    job: Job, reference: Job, lost: Collection[int] = (), samples: Callable[[int], int] = usual_samples, *,
    stages_stay: bool = True,
) -> None:
    """``job`` lost the ranks ``lost`` and nevertheless trained bit for bit like ``reference``; records are right.

    Unless ``stages_stay``, a loss may also change how many stages there are, and which cells are at which.
    """
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job, samples=samples)
    layouts = job.layouts()
    for before, after in itertools.pairwise(layouts) if stages_stay else ():
        assert_only_cells_go(before, after)
    assert sorted(lost) == list(layouts[-1].lost)
    assert list(read_digest(job.run_dir)["units"]) == list(layouts[-1].units)
    last = list(job.metrics().values())[-1]
    assert (last["epoch"], last["world_size"]) in [(layout.epoch, len(layout.ranks)) for layout in layouts]
    recoveries = job.events("recovered")
    assert sorted({rank for event in recoveries for rank in event["ranks"]}) == sorted(lost)
    for event in recoveries:
        assert_sensible(event)


def assert_only_cells_go(before: Layout, after: Layout) -> None:
    """From one layout to the next, dead ranks cost their cells and nothing else; without deaths nobody leaves."""
    dead = set(after.lost) - set(before.lost)
    gone = {
        rank for stage in before.stages for cell in stage.cells if dead.intersection(cell.ranks) for rank in cell.ranks
    }
    if dead:
        assert set(after.ranks) == set(before.ranks) - gone
        assert set(after.spares) == {*before.spares, *gone} - dead
        for old, new in zip(before.stages, after.stages, strict=True):
            stay = [cell.ranks for cell in old.cells if not dead.intersection(cell.ranks)]
            assert [cell.ranks for cell in new.cells] == stay
            shadows = {cell.leader for cell in old.cells if cell.shadow}
            assert {cell.leader for cell in new.cells if cell.shadow} == shadows - gone
    else:
        assert set(before.ranks) <= set(after.ranks)
    assert set(before.lost) <= set(after.lost)


def assert_sensible(event: Mapping[str, Any]) -> None:
    """A ``recovered`` event has all its fields, and its times add up."""
    assert list(event)[: 3 + len(RECOVERED)] == ["time", "kind", "epoch", *RECOVERED]
    causes = ("kill -9", "stopped", "exception", "device", "out of memory", "hangs", "hangs in the kernel")
    assert event["cause"] in causes or event["cause"].startswith("node")
    assert event["decision"] in ("forward", "back", "resume", "reload")
    parts = [event[name] for name in RECOVERED if name.endswith("_ms") and name != "mttr_ms"]
    assert all(part >= 0 for part in parts), event
    assert sum(parts) >= event["mttr_ms"] - 0.01  # redo is what is left; clocks may make it 0, never less
    assert 0 < event["mttr_ms"] < _LIMIT * 1e3
