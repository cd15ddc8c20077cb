"""What the benchmarks share: running jobs with visible progress, and saying where figures come from."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_elastic import __version__
from megatron_elastic.cluster.asking import scale
from megatron_elastic.layout import Layout

CHECKOUT = Path(__file__).resolve().parent.parent
DATA = CHECKOUT / "data" / "stdlib"
"""The default corpus, prepared once; git ignores it."""
SCRIPT = "examples/pretrain_gpt.py"
_EVEN = re.compile(r"slices and grains are even over (\d+) ranks")
_PACKAGES = ("torch", "megatron-core", "ucxx-cu12", "ucxx-cu13")
"""Those whose versions are told with a result, as far as they are installed."""
_ENOUGH = 4
"""Ratios of which a mean says something."""


class JobFailed(Exception):
    """A job ended with an error, or its records are not as they must be."""


def progress(text: str) -> None:
    """Say on stderr how far the benchmark is."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@contextmanager
def run_root() -> Iterator[Path]:
    """A folder for the runs of a benchmark. Removed at the end, but kept and named when the benchmark fails."""
    root = Path(tempfile.mkdtemp(prefix="megatron-elastic-bench-"))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the running job is ended, too
    try:
        yield root
    except BaseException:
        progress(f"the runs so far are in {root}")
        raise
    subprocess.run(["rm", "-r", str(root)], check=True)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def prepare_data() -> Path:
    """The folder of the default corpus, made if missing."""
    if not (DATA / "data.json").is_file():
        progress(f"preparing data in {DATA}")
        _run([*cli(), "data", "prepare", str(DATA)], Path(os.devnull))
    return DATA


def run_job(
    run_dir: Path, ranks: int, flags: Sequence[str], script: str = SCRIPT, checkout: Path = CHECKOUT
) -> None:
    """Train ``script`` with ``flags`` over ``ranks`` ranks, as a checkout has it; records go to ``run_dir``.

    Raises JobFailed, with the end of the job's output, unless it exits with 0.
    """
    _run(job_command(run_dir, ranks, flags, script), run_dir.with_suffix(".out"), checkout)


def watch_job(run_dir: Path, ranks: int, flags: Sequence[str], script: str = SCRIPT) -> Generator[str, None, None]:
    """The same, and the lines of the launcher's output as they come."""
    yield from watch(job_command(run_dir, ranks, flags, script), run_dir.with_suffix(".out"))


def ask_while_it_trains(
    run_dir: Path, ranks: int, flags: Sequence[str], requests: Sequence[Sequence[str]], *,
    done: str, first: int, between: int, script: str = SCRIPT,
) -> None:  # fmt: skip
    """Run a job and ask it for other shapes, one after the other: ``requests``, as flags of ``megatron-elastic scale``.

    The first is made after step ``first``, each further one so many steps after a line with ``done`` in it has told
    that the one before has come true. Raises JobFailed, also if one is refused or does not come true.
    """
    asked, step, due = 0, 0, first
    with closing(watch_job(run_dir, ranks, flags, script)) as lines:
        for line in lines:
            if line.startswith("step"):
                step = int(line.split()[1].partition("/")[0])
            if done in line:
                due = step + between
            if step >= due and asked < len(requests):
                due = sys.maxsize
                with redirect_stdout(sys.stderr):
                    if scale.main([str(run_dir), *requests[asked]]):
                        raise JobFailed(f"the job of {run_dir} refused {' '.join(requests[asked])}")
                asked += 1
    if due == sys.maxsize or asked < len(requests):
        raise JobFailed(f"the job of {run_dir} ended before all {len(requests)} changes were done")


def pid_of(run_dir: Path, rank: int) -> int:
    """Process of a living rank: the one that writes its log. Raises JobFailed if there is none."""
    log = str(run_dir.resolve() / "logs" / f"rank{rank}.log")
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "fd" / "1") == log:
                return int(entry.name)
        except OSError:
            continue  # it ended while we looked, or is none of ours
    raise JobFailed(f"no process writes {log}")


def newest_layout(run_dir: Path) -> Layout:
    """The layout that a job has now."""
    path = max((run_dir / "layouts").iterdir(), key=lambda path: int(path.stem))
    return Layout.from_json(path.read_text())


def even_over(line: str) -> int | None:
    """Over how many ranks a job's line of output says that all is even again; None if it says something else."""
    match = _EVEN.search(line)
    return int(match[1]) if match else None


def step_times(metrics: dict[int, dict[str, Any]], leave_out: int = 2) -> list[float]:
    """Step times in ms, without the first steps, which also warm things up."""
    return [metrics[step]["step_ms"] for step in sorted(metrics)[leave_out:]]


def summary(values: Iterable[float]) -> dict[str, float]:
    """Median and worst of some times, in ms."""
    values = list(values)
    return {"median": round(statistics.median(values), 1), "worst": round(max(values), 1)}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and range of some times, in ms."""
    values = list(values)
    return {"median": round(statistics.median(values), 1), "min": round(min(values), 1), "max": round(max(values), 1)}


def spread_of_ratios(ratios: Sequence[float]) -> dict[str, float]:
    """Range of some ratios; of enough to tell, their geometric mean and its standard error, too."""
    found = {"min": round(min(ratios), 4), "max": round(max(ratios), 4)}
    if len(ratios) >= _ENOUGH:
        error = statistics.stdev(map(math.log, ratios)) / math.sqrt(len(ratios))
        found |= {"mean": round(statistics.geometric_mean(ratios), 4), "error": round(error, 4)}
    return found


def emit(name: str, argv: Sequence[str], figures: dict[str, Any]) -> None:
    """Print the result: one line of JSON, the last of stdout."""
    record = {
        "benchmark": name,
        **figures,
        "command": shlex.join([*words(name), *argv]),
        "versions": {"megatron-elastic": __version__, "python": platform.python_version(),
                     **_versions()},
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }
    print(json.dumps(record), flush=True)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def words(name: str) -> list[str]:
    """The command that a benchmark is."""
    return ["megatron-elastic", name] if name == "chaos" else ["megatron-elastic", "bench", name]


def machine() -> dict[str, Any]:
    """This machine: processor, cores that may be used, memory in GiB, operating system."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": _cpu_model(), "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory, 1),
            "os": f"{platform.system()} {platform.release()}"}


def load_average() -> float:
    """Processes that ran or wanted to during the last minute: should be near 0 before a benchmark begins."""
    return round(os.getloadavg()[0], 2)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cli() -> list[str]:
    """The command line tool, run by this interpreter."""
    return [sys.executable, "-m", "megatron_elastic.cli"]


def job_command(run_dir: Path, ranks: int, flags: Sequence[str], script: str) -> list[str]:
    """Trains ``script`` over so many ranks, with records in ``run_dir``."""
    return [*cli(), "run", "--nproc-per-node", str(ranks), script,
            "--elastic-run-dir", str(run_dir), *flags]


def watch(
    command: Sequence[str], output: Path, env: Mapping[str, str] | None = None
) -> Generator[str, None, None]:
    """Run a command and yield the lines it prints, which also go to a file. Raises JobFailed unless it exits with 0.

    ``env``: additions to ours. When the caller stops early, the command is interrupted and waited for.
    """
    with output.open("w") as sink:
        process = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env={**os.environ, **(env or {})})
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sink.write(line)
                yield line
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise
    check(code, command, output)


def _run(command: Sequence[str], output: Path, checkout: Path = CHECKOUT) -> None:
    """Run a command with its output in a file; passes an interruption on and waits, so that no process is left."""
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    with output.open("wb") as sink:
        process = subprocess.Popen(command, cwd=checkout, stdout=sink, stderr=subprocess.STDOUT, env=env)
        try:
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    check(code, command, output)


def check(code: int, command: Sequence[str], output: Path) -> None:
    """Raise JobFailed, with the end of what it printed, unless a command's exit code is 0."""
    if code:
        tail = "\n".join(output.read_text(errors="replace").splitlines()[-15:])
        raise JobFailed(f"exit code {code} of: {shlex.join(command)}\n{tail}")
