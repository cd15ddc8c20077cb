"""Jobs started as people start them: with torchrun's flags, by links and modules, without a terminal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_elastic.cluster import wire
from tests.launches import PROGRAMS, TOKEN, Launch, Run, free_port, launches

PLAIN = PROGRAMS / "plain.py"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


def seen(run: Run, rank: int) -> dict[str, object]:
    """What a rank of ``plain.py`` has found."""
    found: dict[str, object] = json.loads((run.run_dir / "logs" / f"rank{rank}.log").read_text().splitlines()[0])
    return found


def started(launch: Launch, *command: str, folder: Path) -> Run:
    """A launcher that is started from ``folder``, perhaps by another program; ``run`` there is its run directory."""
    process = subprocess.Popen(command, cwd=folder, env=launch.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, stdin=subprocess.DEVNULL, start_new_session=True)
    launch.runs.append(Run(process, folder / "run"))
    return launch.runs[-1]


RUN = (sys.executable, "-m", "megatron_elastic.cli", "run")


# ---- what one reads -------------------------------------------------------------------------


@pytest.mark.parametrize("elastic", [(), ("--elastic",)], ids=["plain", "elastic"])
def test_a_usage_error_is_the_last_line(launch: Launch, elastic: tuple[str, ...]) -> None:
    run = launch.start("plain.py", "usage", *elastic, flags=("--nproc-per-node", "2"))
    last = run.finish(code=2).splitlines()[-1]
    assert last == "megatron-elastic: error: train.py: error: unrecognized arguments: --checkpoint-activations"


@pytest.mark.parametrize("code", [1, 37])
def test_an_exit_code_of_the_script_is_the_job_s(launch: Launch, code: int) -> None:
    last = launch.start("plain.py", "exit", str(code)).finish(code=code).splitlines()[-1]
    assert last == f"megatron-elastic: error: rank 0 ended with exit code {code}: last line; see rank0.log"


def test_an_end_without_training_is_told(launch: Launch) -> None:
    output = launch.start("plain.py", "say", "--elastic").finish(code=1)
    assert "ended with exit code 0 before training was finished: the end of rank0.log may tell why" in output


@pytest.mark.parametrize(("act", "code", "last"), [
    (("exit", "37"), 37, "megatron-elastic: error: rank 0 ended with exit code 37: last line; see rank0.log\n"),
    (("say",), 0, ""),
], ids=["failed", "finished"])  # fmt: skip
def test_how_a_job_has_ended_does_not_depend_on_its_output(
    launch: Launch, tmp_path: Path, act: tuple[str, ...], code: int, last: str
) -> None:
    """The disk that it goes to is full."""
    run = started(launch, "bash", "-c", 'exec "$@" > /dev/full', "-", *RUN, str(PLAIN), *act, "--elastic-run-dir",
                  "run", folder=tmp_path)
    assert run.finish(code) == last


def test_flags_without_effect_are_told_once(launch: Launch) -> None:
    flags = ("--nproc-per-node", "2", "--max_restarts=3", "--monitor_interval", "1", "--start-method", "spawn")
    output = launch.start("plain.py", flags=flags).finish()
    assert [output.count(f"note: {flag} has no effect: ") for flag in (
        "--max-restarts 3", "--monitor-interval 1", "--start-method spawn")] == [1, 1, 1]


@pytest.mark.parametrize(("flags", "lines"), [
    ((), set()),
    (("--tee", "0:3"), {(0, "out"), (0, "err"), (1, "out"), (1, "err")}),
    (("-r", "3", "-t", "0:3"), {(0, "out"), (0, "err")}),
    (("--redirects", "1"), {(0, "err"), (1, "err")}),
    (("--local_ranks_filter", "1"), {(1, "out"), (1, "err")}),
], ids=["none", "tee", "redirected", "one-stream", "filter"])  # fmt: skip
def test_what_is_on_the_console(launch: Launch, flags: tuple[str, ...], lines: set[tuple[int, str]]) -> None:
    run = launch.start("plain.py", "say", flags=("--nproc-per-node", "2", "--role", "trainer", *flags))
    output = run.finish().splitlines()
    assert {(rank, stream) for rank in (0, 1) for stream in ("out", "err")
            if f"[trainer{rank}]:to std{stream}" in output} == lines
    for rank in (0, 1):
        logs = "".join(path.read_text() for path in sorted((run.run_dir / "logs").glob(f"rank{rank}*.log")))
        assert "to stdout\n" in logs
        assert "to stderr\n" in logs


def test_lines_of_ranks_as_objects(launch: Launch) -> None:
    run = launch.start("plain.py", "say", "--elastic-log-format", "json", flags=("--tee", "2", "--redirects", "1"))
    objects = [json.loads(line) for line in run.finish().splitlines()]
    said = [(each["rank"], each["stream"], each["message"]) for each in objects if each["event"] == "output"]
    assert said == [(0, "stderr", "to stderr")]


def test_logs_in_a_folder_of_their_own(launch: Launch, tmp_path: Path) -> None:
    run = launch.start("plain.py", flags=("--log_dir", str(tmp_path / "logs"), "--rdzv-id", "job7", "--role", "r"))
    run.finish()
    assert (tmp_path / "logs" / "job7_run" / "rank0.log").samefile(run.run_dir / "logs" / "rank0.log")
    names = ("TORCHELASTIC_RUN_ID", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE")
    assert [seen(run, 0)[name] for name in names] == ["job7", "r", "0", "1", "1"]


# ---- scripts --------------------------------------------------------------------------------


def test_a_script_behind_links_finds_what_is_beside_it(launch: Launch, tmp_path: Path) -> None:
    """The link's file is in a folder that is a link, too; as python does."""
    real = tmp_path / "real"
    real.mkdir()
    (real / "beside.py").write_text("import os\nNAME = os.path.basename(__file__)\n")
    (real / "train.py").write_text("import os, beside\nprint(beside.NAME)\nos.chdir('/')\nprint(__file__)\n")
    (tmp_path / "folder").symlink_to(real)
    (tmp_path / "link.py").symlink_to(tmp_path / "folder" / "train.py")
    run = started(launch, *RUN, "link.py", "--elastic-run-dir", "run", folder=tmp_path)
    run.finish()
    assert (run.run_dir / "logs" / "rank0.log").read_text() == f"beside.py\n{tmp_path / 'link.py'}\n"


def test_a_module_of_the_working_directory(launch: Launch, tmp_path: Path) -> None:
    """Also where the launcher is not started by ``python -m``, which would put that directory first by itself."""
    (tmp_path / "package").mkdir()
    shutil.copy(PLAIN, tmp_path / "package" / "train.py")
    run = started(launch, str(Path(sys.executable).with_name("megatron-elastic")), "run", "-m", "package.train", "one",
                  "--elastic-run-dir", "run", folder=tmp_path)
    run.finish()
    assert seen(run, 0)["path"] == str(tmp_path)
    assert seen(run, 0)["argv"] == [str(tmp_path / "package" / "train.py"), "one", "--elastic-run-dir", "run"]


@pytest.mark.parametrize("code", [0, 5])
def test_a_program_that_is_no_python(launch: Launch, tmp_path: Path, code: int) -> None:
    flags = ("--no-python", "--nproc-per-node", "2", "--tee", "3")
    run = started(launch, *RUN, *flags, "sh", "-c", f"echo rank $RANK of $WORLD_SIZE; exit {code}",
                  "--elastic-run-dir", "run", folder=tmp_path)
    output = run.finish(code).splitlines()
    assert {"[default0]:rank 0 of 2", "[default1]:rank 1 of 2"} <= set(output)


# ---- without a terminal ---------------------------------------------------------------------


@pytest.mark.parametrize("before", ["nohup", "setsid"])
def test_a_job_outlives_its_terminal(launch: Launch, tmp_path: Path, before: str) -> None:
    """With ``nohup`` the hangup of launcher and rank is nothing; with ``setsid`` nobody sends one."""
    run = started(launch, before, *RUN, "--tee", "3", str(PLAIN), "wait", str(launch.path / "meet" / "go"),
                  "--elastic-run-dir", "run", folder=tmp_path)
    found = json.loads(run.read_until('"pid"').partition(":")[2])
    if before == "nohup":
        os.killpg(found["pid"], signal.SIGHUP)
        os.kill(run.process.pid, signal.SIGHUP)
    launch.go()
    assert "all ranks ended with exit code 0" in run.finish()


def test_a_hangup_ends_a_job_else(launch: Launch, tmp_path: Path) -> None:
    """Whatever the tests were started with."""
    run = started(launch, "env", "--default-signal=HUP", *RUN, "--tee", "3", str(PLAIN), "hang",
                  "--elastic-run-dir", "run", folder=tmp_path)
    run.read_until("waiting")
    run.process.send_signal(signal.SIGHUP)
    run.finish(code=129)


def test_chosen_signals_end_a_job(launch: Launch) -> None:
    run = launch.start("plain.py", "hang", flags=("--tee", "3", "--signals-to-handle", "SIGUSR2"))
    run.read_until("waiting")
    run.process.send_signal(signal.SIGUSR2)
    run.finish(code=128 + signal.SIGUSR2)


# ---- several nodes --------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "[::1]"])
def test_addresses_of_all_kinds(launch: Launch, host: str) -> None:
    """The second node has it from ``--rdzv-endpoint``."""
    launch.env[wire.TOKEN_VARIABLE] = TOKEN
    port = str(free_port())
    endpoint = f"[{host}]:{port}" if host == "::1" else f"{host}:{port}"
    flags = (("--node-rank", "0", "--master-addr", host, "--master-port", port),
             ("--node-rank", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint))
    runs = [launch.start("plain.py", name=f"node{node}", flags=("--nnodes", "2:2", *each))
            for node, each in enumerate(flags)]
    for run in runs:
        run.finish()
    assert [seen(run, rank)["MASTER_ADDR"] for rank, run in enumerate(runs)] == [host.strip("[]")] * 2


def test_nodes_join_up_to_the_most(launch: Launch) -> None:
    """``--nnodes 1:2``: the job begins with one, and goes on with two."""
    launch.env[wire.TOKEN_VARIABLE] = TOKEN
    port = str(free_port())

    def node(number: int) -> Run:
        return launch.start("member.py", "--elastic", *launch.member_flags("0:2:begin:tell", "0:2:begin:wait"),
                            name=f"node{number}",
                            flags=("--nnodes", "1:2", "--node-rank", str(number), "--nproc-per-node", "2",
                                   "--master-addr", "127.0.0.1", "--master-port", port))

    first = node(0)
    launch.hear(1)
    assert "--node-rank 2 must be from 0 to 1, as --nnodes is 1:2" in node(2).finish(code=2)
    second = node(1)
    first.read_until("on a node that has come")
    launch.go()
    first.finish()
    second.finish()
    assert first.steps() == [1, 2, 3, 4]
