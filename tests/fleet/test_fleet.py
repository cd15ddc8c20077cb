"""A fleet of real jobs: who starts, grows and gives back, and that nothing is lost whoever is killed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.fleet.managers import launch as keeper
from megatron_elastic.fleet.managers.launch import EXIT, PROCESS
from megatron_elastic.fleet.managers.local import Local
from megatron_elastic.fleet.managers.manager import Launch, ManagerError, Pool, Standing
from megatron_elastic.fleet.running import live
from megatron_elastic.fleet.running.journal import Fleet as Kept
from megatron_elastic.fleet.running.journal import Journal, JournalError, Node
from megatron_elastic.fleet.running.progress import Progress, table_of
from megatron_elastic.fleet.running.submission import free_name
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import RunRecords, read_metrics
from megatron_elastic.plan.predict import Entry, ScaleTable
from tests.fleet.fleet_runs import Fleet, fleet, until
from tests.jobs import MODEL, ROOT, Grid, Jobs, environment

PACED = ROOT / "tests" / "megatron_programs" / "paced.py"
GRID = Grid(tp=1, pp=1, steps=150, ranks=2)
FLAGS = (*GRID.flags, "--num-layers", "2", "--micro-batch-size", "2", "--elastic-slices", "4")


@pytest.fixture
def four(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of four slots."""
    with fleet(tmp_path / "fleet", 4) as made:
        yield made


# ---- scale tables --------------------------------------------------------------------------------


def test_a_table_of_what_was_measured() -> None:
    # In proportion as long as nothing else is known.
    assert table_of({2: 100.0}, 2, 5, 1).speeds == pytest.approx((1, 1.5, 2, 2.5))
    assert table_of({2: 100.0}, 2, 9, 2).devices == (2, 4, 6, 8)
    # Four bring 60 more for two devices: so do the next two, at most. Three are between.
    table = table_of({2: 100.0, 4: 160.0}, 2, 6, 1)
    assert table.devices == (2, 3, 4, 5, 6)
    assert table.speeds == pytest.approx((1, 1.3, 1.6, 1.9, 2.2))
    # Four bring nothing, and so nothing is expected of more.
    assert table_of({2: 100.0, 4: 95.0}, 2, 8, 2).devices == (2,)
    # Three were on the way to four of two stages, and say nothing.
    assert table_of({2: 100.0, 3: 70.0}, 2, 4, 2).speeds == pytest.approx((1, 2))
    # What was predicted counts where nothing was measured, as a ratio.
    predicted = {2: 10.0, 4: 15.0, 6: 18.0}
    assert table_of({2: 100.0, 4: 180.0}, 2, 6, 2, predicted).speeds == pytest.approx((1, 1.8))
    assert table_of({2: 100.0}, 2, 6, 2, predicted).speeds == pytest.approx((1, 1.5, 1.8))
    assert table_of({2: 100.0}, 2, 6, 2, {4: 15.0, 6: 0.0}).speeds == pytest.approx((1, 2, 3))
    # Less than was submitted is not asked for.
    assert table_of({1: 60.0, 2: 100.0}, 2, 2, 1).devices == (2,)


@given(st.dictionaries(st.integers(3, 12), st.floats(1, 1e6)), st.floats(1, 1e6), st.integers(2, 16), st.integers(1, 4))
def test_tables_rise(speeds: Mapping[int, float], first: float, most: int, column: int) -> None:
    table = table_of({**speeds, 2: first}, 2, most, column)
    assert table.devices[0] == 2 and table.speeds[0] == 1
    assert list(table.devices) == sorted(set(table.devices)) and list(table.speeds) == sorted(table.speeds)
    assert all(2 <= devices <= most and (devices - 2) % column == 0 for devices in table.devices)


def metrics(records: RunRecords, steps: Sequence[int], ranks: int, epoch: int, step_ms: float) -> None:
    for step in steps:
        records.metrics({
            "step": step, "loss": 1.0, "loss_hex": (1.0).hex(), "grad_norm": 1.0, "grad_norm_hex": (1.0).hex(), "lr": 1,
            "consumed_samples": step, "step_ms": step_ms, "epoch": epoch, "world_size": ranks,
            "tokens_per_s": 1000 / step_ms * 1e3,
        })  # fmt: skip


def test_speeds_come_from_the_records(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "run")
    progress.refresh()
    assert progress.remaining(2) is None, "it has not begun"
    records = RunRecords(tmp_path / "run")
    records.event("started", 0, world_size=2, step=0, train_iters=50)
    metrics(records, [1, 2], 2, 0, 9000.0)  # the first steps of a layout are left out
    progress.refresh()
    assert progress.speeds() == {}
    metrics(records, range(3, 9), 2, 0, 100.0)
    records.event("switched", 1, step=9, entered=[2], shadows=[2], world_size=3)
    metrics(records, range(9, 15), 3, 1, 500.0)  # while somebody follows, too
    records.event("switched", 2, step=15, entered=[], shadows=[], world_size=3)
    metrics(records, range(15, 21), 3, 2, 50.0)
    progress.refresh()
    records.close()
    assert progress.speeds() == pytest.approx({2: 10_000.0, 3: 20_000.0})
    assert progress.steps == 20 and progress.remaining(2) == pytest.approx(30 * 0.1)
    again = Progress(tmp_path / "run")
    entry = Entry(4, 1, 2, 2, 1, 1, "1f1b", 1.0, 7.0, 1, None)
    for table, predicted in (("{", {}), ('{"version": 2, "devices": {}}', {}),
                             ('{"version": 1, "devices": {"4": {"tokens_per_s": 7}}}', {}),
                             (ScaleTable({4: entry}, {}).to_json(), {4: 7.0})):  # fmt: skip
        (tmp_path / "run" / "scale_table.json").write_text(table)
        again.refresh()
        assert again.predicted == predicted
    assert again.speeds() == progress.speeds()


@pytest.mark.parametrize("line", ['{"time": 1, "kind": "spawned", "epoch": 0}', "{"])
def test_records_that_cannot_be_read_are_told_by_status_too(
    line: str, four: Fleet, capfd: pytest.CaptureFixture[str]
) -> None:
    four.manager = Calm(four.slots)
    elastic(four, "llm", 2, 4)
    daemon = four.begin()
    daemon.turn()
    records = RunRecords(four.run_dir("llm"))
    metrics(records, [1], 2, 0, 100.0)
    records.close()
    (four.run_dir("llm") / "events.jsonl").write_text(line + "\n")
    for _ in range(2):
        daemon.turn()
    assert sum("its records cannot be read, so it stays as it is" in line for line in four.said) == 1
    assert cli.main(["fleet", "status", str(four.folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["jobs"]["llm"]["trouble"]


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.job
def test_a_launch_happens_once(tmp_path: Path) -> None:
    """Two managers that do not know of each other start it at the same time, and again when it has ended."""
    noted = tmp_path / "noted"
    launch = Launch("a/0", tmp_path / "a", ["bash", "-c", f"echo $MEGATRON_ELASTIC_SLOTS >> {noted}; exit 5"], 2,
                    [0, 3], tmp_path)  # fmt: skip
    first, second, third = Local(4), Local(4), Local(4)
    assert first.look([launch]).standings["a/0"].state == "absent"
    first.start(launch)
    second.start(launch)
    all_three = (first, second, third)
    until("it has ended", lambda: all(each.look([launch]).standings["a/0"][:2] == ("ended", 5) for each in all_three))
    third.start(launch)
    until("nothing of it is left", lambda: not any(each.look([]) and each._started for each in all_three))
    assert noted.read_text() == "0,3\n"


@pytest.mark.job
def test_modules_of_its_folder_are_nothing_to_who_looks_after_a_command(tmp_path: Path) -> None:
    """A folder of programs has files that are named as modules of Python are."""
    for name in ("errno", "json", "struct", "subprocess"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is not of Python')")
    manager = Local(1)
    asked = Launch("a/0", tmp_path / "a", ["true"], 1, [0], tmp_path)
    manager.start(asked)
    until("it has ended", lambda: manager.look([asked]).standings["a/0"].state == "ended")
    assert manager.look([asked]).standings["a/0"].code == 0, (tmp_path / "a" / "output").read_text()
    until("nothing of it is left", lambda: bool(manager.look([])) and not manager._started)


@pytest.mark.job
def test_what_ends_with_its_keeper_is_known_to_have_ended(tmp_path: Path) -> None:
    manager = Local(1)
    launch = Launch("a/0", tmp_path, ["sleep", "1000"], 1, [0], tmp_path)
    manager.start(launch)
    until("it runs", (tmp_path / PROCESS).exists)
    keeper = json.loads((tmp_path / PROCESS).read_text())["pid"]
    os.killpg(keeper, signal.SIGKILL)
    until("it has ended", lambda: manager.look([launch]).standings["a/0"] == ("ended", None, None))
    assert not (tmp_path / EXIT).exists()


def test_how_it_ended_is_kept_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has filled the disk, and succeeded, has not failed. Who has removed its folder need not know."""
    waited: list[float] = []

    def full_until_it_has_waited_twice(path: Path, record: object) -> None:
        if len(waited) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, record)

    write = keeper.write
    monkeypatch.setattr(keeper, "write", full_until_it_has_waited_twice)
    keeper.keep_code(tmp_path, 0, waited.append)
    assert json.loads((tmp_path / EXIT).read_text()) == {"code": 0} and len(waited) == 2
    with pytest.raises(FileNotFoundError):
        keeper.keep_code(tmp_path / "gone", 0, waited.append)


# ---- submissions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "told"), [
    (["--name", "../x", "--", "true"], "is no name of a job"),
    (["--devices", "0", "--", "true"], "is not a number from 1 on"),
    (["--devices", "4", "--max-devices", "2", "--", "x.py"], "--max-devices 2 is less than --devices 4"),
    (["--", "no-such-program"], "there is no program no-such-program"),
    (["--max-devices", "2", "--", "no_script.py", "--elastic"], "there is no script no_script.py"),
    (["--max-devices", "2", "--", "megatron-elastic", "run", "x.py"], "leave megatron-elastic run and its flags out"),
    (["--max-devices", "2", "--", "--nproc-per-node", "2", str(PACED)], "must be the script and its arguments"),
    (["--max-devices", "2", "--", str(PACED), *MODEL.split(), "--data-path", "{data}", "--train-iters", "1"],
     "put --elastic among the script's arguments"),
    (["--max-devices", "2", "--", str(PACED), "--elastic", "--elastic-run-dir", "x", *MODEL.split(), "--data-path",
      "{data}", "--train-iters", "1"], "leave --elastic-run-dir out"),
    (["--max-devices", "2", "--", str(PACED), "--elastic", *MODEL.split(), "--data-path", "{data}", "--train-iters",
      "1", "--num-attention-heads", "5"], "--num-attention-heads 5"),
])  # fmt: skip
def test_bad_submissions(
    arguments: Sequence[str], told: str, tmp_path: Path, jobs: Jobs, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("{data}", str(jobs.data)) for word in arguments]
    try:
        code = cli.main(["fleet", "submit", str(tmp_path / "fleet"), *words])
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 2
    assert told in capfd.readouterr().err
    assert not list((tmp_path / "fleet").glob("jobs/*"))


@pytest.mark.parametrize("arguments", [
    ["--name", "a", "{fleet}", "--", "bash", "-c", "x", "--", "a", "--"],
    ["{fleet}", "--name", "a", "--", "bash", "-c", "x", "--", "a", "--"],
    ["{fleet}", "--name", "a", "bash", "--", "-c", "--name"],
    ["--name", "a", "{fleet}", "bash", "--"],
    ["--name", "a", "{fleet}", "--", "bash", "-c"],
])  # fmt: skip
def test_a_command_is_kept_word_for_word(arguments: list[str], tmp_path: Path) -> None:
    words = [word.replace("{fleet}", str(tmp_path)) for word in arguments]
    assert cli.main(["fleet", "submit", *words]) == 0
    kept = json.loads((tmp_path / "jobs" / "a" / "submission.json").read_text())
    assert kept["command"] == arguments[arguments.index("bash") :]


def test_names_are_given_once(four: Fleet, capfd: pytest.CaptureFixture[str]) -> None:
    four.submit("a", "true")
    assert cli.main(["fleet", "submit", str(four.folder), "--name", "a", "--", "true"]) == 2
    assert "there is a job a already" in capfd.readouterr().err
    assert cli.main(["fleet", "submit", str(four.folder), "--", "true"]) == 0
    assert cli.main(["fleet", "submit", str(four.folder), "--", "true"]) == 0
    assert sorted(four.journal.names()) == ["a", "true-1", "true-2"]
    assert cli.main(["fleet", "cancel", str(four.folder), "b"]) == 2
    assert "there is no job b" in capfd.readouterr().err


def test_what_a_slot_is_cannot_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fleet", "run", str(tmp_path), "--slots", "4", "--count", "gpu", "--until-idle"]) == 2
    assert "--count is of --slurm and --kubernetes: leave it out with --slots" in capsys.readouterr().err


def test_two_who_submit_at_once_without_a_name_get_two(four: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def name_that_somebody_takes(folder: Path, command: list[str]) -> str:
        name = free_name(folder, command)
        if name == "true-1":
            four.submit(name, "true")
        return name

    monkeypatch.setattr(live, "free_name", name_that_somebody_takes)
    assert cli.main(["fleet", "submit", str(four.folder), "--", "true"]) == 0
    assert four.journal.names() == ["true-1", "true-2"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/..", "../.."])
def test_what_is_no_name_of_a_job_cancels_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fleet" / "jobs" / "a").mkdir(parents=True)
    assert cli.main(["fleet", "cancel", str(tmp_path / "fleet"), name]) == 2
    assert f"there is no job {name!r} in {tmp_path / 'fleet'}" in capsys.readouterr().err
    assert not list(tmp_path.rglob("cancel"))


def test_a_program_with_a_long_name_names_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / ("evaluate-" * 20)
    program.write_text("")
    program.chmod(0o700)
    for number in (1, 2):
        assert cli.main(["fleet", "submit", str(tmp_path / "fleet"), "--", str(program)]) == 0, capsys.readouterr().err
        assert (tmp_path / "fleet" / "jobs" / f"{program.name[:80]}-{number}").is_dir()


@pytest.mark.job
def test_what_somebody_has_written_into_the_folder_is_refused(four: Fleet) -> None:
    four.submit("large", "true", devices=5)
    four.submit("good", "true")
    for name, content in {
        "broken": "{", "other": '{"name": "x"}',
        "strange": json.dumps({"name": "strange", "command": ["true"], "devices": -1, "submitted": 0, "cwd": "/"}),
        "newer": json.dumps({"name": "newer", "command": ["true"], "devices": 1, "submitted": 0, "cwd": "/",
                             "version": 2}),
    }.items():  # fmt: skip
        (four.folder / "jobs" / name).mkdir()
        (four.folder / "jobs" / name / "submission.json").write_text(content)
    four.begin()
    four.until("the good one is done", lambda: four.phase("good") == "done")
    reasons = {name: job["reason"] for name, job in four.status()["jobs"].items() if job["phase"] == "refused"}
    assert sorted(reasons) == ["broken", "large", "newer", "other", "strange"]
    assert reasons["large"] == "it asks for 5 devices, and there are 4"
    assert "is no submission" in reasons["broken"] and "is no submission" in reasons["other"]
    assert "--devices -1" in reasons["strange"] and "version 2" in reasons["newer"]


# ---- rigid jobs ----------------------------------------------------------------------------------


def test_limits_go_on_where_a_clock_is_set_back(four: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"time": 1e9, "monotonic": 100.0}
    monkeypatch.setattr("megatron_elastic.fleet.running.daemon.time",
                        Namespace(time=lambda: clock["time"], monotonic=lambda: clock["monotonic"]))
    looking = four.begin()
    looking.turn()
    assert four.status()["looked"] == 1e9
    clock.update(time=1e9 - 3600, monotonic=107.0)
    looking.turn()
    assert four.status()["looked"] == 1e9 + 7
    clock.update(time=1e9 - 3600 + 10)
    four.begin().turn()
    assert four.status()["looked"] == 1e9 + 7, "who looks after it next goes on from there"


@pytest.mark.job
def test_what_it_says_may_go_nowhere(four: Fleet) -> None:
    """The disk that its output goes to is full."""
    four.submit("one", "true")
    command = [sys.executable, "-m", "megatron_elastic.cli", "fleet", "run", str(four.folder), "--slots", "4"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, "--every", "0.05", "--until-idle"], stdout=full, stderr=subprocess.PIPE,
                              text=True, env=environment(), check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert four.phase("one") == "done"


@pytest.mark.job
def test_jobs_start_in_order_and_end_as_they_do(four: Fleet) -> None:
    first, second = four.holder("first"), four.holder("second")
    four.submit("wide", "bash", "-c", "echo it was wide; kill -9 $$", devices=3)
    four.holder("last")
    four.begin()
    four.until("two run", lambda: first.exists() and second.exists())
    status = four.status()
    assert (status["held"], status["devices"]) == (2, 4)
    assert [four.job(name)["slots"] for name in ("first", "second")] == [[0], [1]]
    assert four.phase("wide") == four.phase("last") == "waiting", "nobody overtakes"
    four.let_end("first", 7)
    four.until("three are free, and then one", lambda: four.phase("wide") == "failed")
    assert four.job("first")["reason"].startswith("exit code 7")
    assert "137" in four.job("wide")["reason"] and "it was wide" in four.job("wide")["reason"]
    four.let_end("second")
    assert cli.main(["fleet", "cancel", str(four.folder), "last"]) == 0
    four.until("all have ended", lambda: four.phase("second") == "done" and four.phase("last") == "cancelled")
    four.until("nobody holds a slot", lambda: four.status()["held"] == 0)
    assert cli.main(["fleet", "status", str(four.folder)]) == 0


@pytest.mark.job
def test_killed_and_started_again_it_finds_all_jobs(four: Fleet, capfd: pytest.CaptureFixture[str]) -> None:
    """One ends while nobody looks, one goes on, one waits; nobody is started twice."""
    noted = [four.holder(name) for name in ("a", "b", "c", "d", "e")]
    daemon = four.run()
    until("four run", lambda: all(each.exists() for each in noted[:4]))
    until("that is known", lambda: [four.phase(name) for name in "abcde"] == ["running"] * 4 + ["waiting"])
    daemon.send_signal(signal.SIGKILL)
    four.close()
    assert not four.status()["running"]
    four.let_end("a", 3)
    until("it has ended", (four.journal.job("a") / "nodes" / "0" / EXIT).exists)
    os.killpg(four.process("b", 0), signal.SIGKILL)
    daemon = four.run("--until-idle")
    until("the last one runs", noted[4].exists)
    assert [four.phase(name) for name in "abcde"] == ["failed", "failed", "running", "running", "running"]
    assert four.job("a")["reason"].startswith("exit code 3") and four.job("b")["reason"].startswith("killed")
    assert cli.main(["fleet", "run", str(four.folder), "--slots", "4"]) == 2
    assert "a fleet runs in" in capfd.readouterr().err
    for name in "cde":
        four.let_end(name)
    output, _ = daemon.communicate()
    assert daemon.returncode == 0, output
    assert [four.phase(name) for name in "cde"] == ["done"] * 3
    assert all(len(each.read_text().splitlines()) == 1 for each in noted)


@pytest.mark.job
def test_killed_again_and_again(four: Fleet) -> None:
    """At any point of its turns: every job is started once, and ends as it does."""
    draw, count = random.Random(7), 20
    four.folder.mkdir()
    for number in range(count):
        noted = four.folder / f"{number}.noted"
        four.submit(f"job-{number}", "bash", "-c", f"echo >> {noted}; exit {number % 2}", devices=1 + number % 3)
    kills = 0
    while not all(each["phase"] in ("done", "failed") for each in four.status()["jobs"].values()) or not kills:
        daemon = four.run("--every", "0.01")
        until("it looks after them", lambda: four.status()["running"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(draw.uniform(0, 0.4))
        four.close()
        kills += 1
    assert [four.phase(f"job-{number}") for number in range(count)] == ["done", "failed"] * (count // 2)
    assert [(four.folder / f"{number}.noted").read_text() for number in range(count)] == ["\n"] * count
    assert four.status()["held"] == 0 and kills > 3


@pytest.mark.job
def test_slots_that_have_gone(four: Fleet) -> None:
    """Nobody loses what it has, nobody gets what is not there, and who asks for too much now is told."""
    noted = [four.holder(name) for name in ("a", "b", "c")]
    before = four.manager = Local(4)
    four.begin()
    four.until("all run", lambda: all(each.exists() for each in noted))
    four.manager = Local(2)
    four.begin()
    late = four.holder("late")
    four.submit("wide", "true", devices=3)
    four.until("all are taken in", lambda: four.phase("wide") == "refused")
    assert four.job("wide")["reason"] == "it asks for 3 devices, and there are 2"
    four.let_end("a")
    four.until("one has ended", lambda: four.phase("a") == "done")
    assert four.status()["held"] == 2 and four.phase("late") == "waiting"
    four.let_end("b")
    four.until("there is room", late.exists)
    four.let_end("c")
    four.let_end("late")
    four.until("all have ended", lambda: not four.status()["held"])
    until("nothing of them is left", lambda: bool(before.look([])) and not before._started)


class Moody:
    """A manager that can be told to answer badly."""

    def __init__(self, manager: Local) -> None:
        self._manager = manager
        self.mood = ""
        self.kind = manager.kind
        self.choose, self.port, self.stop = manager.choose, manager.port, manager.stop

    def look(self, launches: Sequence[Launch]) -> Pool:
        if self.mood == "silent":
            raise ManagerError("it does not answer")
        pool = self._manager.look(launches)
        return pool._replace(standings={}) if self.mood == "wrong" else pool

    def start(self, launch: Launch) -> None:
        if self.mood == "refuses":
            raise ManagerError("not now")
        self._manager.start(launch)


class Calm:
    """A manager whose launches run until they are told to have ended, and do nothing."""

    kind = "nothing"

    def __init__(self, total: int) -> None:
        self._total = total
        self.started: list[str] = []
        self.codes: dict[str, int] = {}
        self.refuses = ""
        self.waits = False

    def look(self, launches: Sequence[Launch]) -> Pool:
        return Pool(self._total, self._total, {launch.name: self._standing(launch.name) for launch in launches})

    def _standing(self, name: str) -> Standing:
        if name in self.codes:
            return Standing("ended", self.codes[name])
        if name in self.started and self.waits:
            return Standing("waiting")
        return Standing("running" if name in self.started else "absent", host="127.0.0.1")

    def choose(self, devices: int, held: Collection[int]) -> list[int]:
        return [slot for slot in range(self._total) if slot not in held][:devices]

    def port(self) -> int:
        return 1

    def start(self, launch: Launch) -> None:
        if self.refuses:
            raise ManagerError(self.refuses)
        self.started.append(launch.name)

    def stop(self, launch: Launch, at_once: bool) -> None:
        self.codes[launch.name] = 143


def elastic(four: Fleet, name: str, devices: int, most: int) -> None:
    """Give it an elastic job, whose script nobody looks at."""
    own = four.journal.job(name)
    own.mkdir(parents=True)
    (own / "submission.json").write_text(json.dumps({
        "name": name, "command": ["train.py"], "devices": devices, "submitted": 0, "cwd": "/", "max_devices": most,
    }))  # fmt: skip


@pytest.mark.job
def test_a_manager_that_answers_badly(four: Fleet) -> None:
    """Nothing is decided meanwhile, nothing is lost, and what could not be started is when it can be."""
    manager = Moody(Local(four.slots))
    four.manager = manager
    noted = four.holder("a")
    four.begin()
    four.until("it runs", noted.exists)
    _while_it_is("silent", manager, four)
    _while_it_is("wrong", manager, four)
    manager.mood = "refuses"
    late = four.holder("late")
    four.until("it was tried", lambda: "not now" in four.said[-1])
    assert not late.exists()
    manager.mood = ""
    four.until("it runs", late.exists)
    four.let_end("late")
    four.let_end("a")
    four.until("all is done", lambda: four.phase("late") == four.phase("a") == "done")
    assert len(four.told("manager_back")) == 2


def _while_it_is(mood: str, manager: Moody, four: Fleet) -> None:
    manager.mood = mood
    failures = len(four.told("manager_failed"))
    noted = four.holder(mood)
    four.until("that is said", lambda: len(four.told("manager_failed")) == failures + 1)
    four.until("what comes is taken in", lambda: four.phase(mood) == "waiting")
    assert four.phase("a") == "running"
    manager.mood = ""
    four.until("it runs", noted.exists)
    four.let_end(mood)
    four.until("it is done", lambda: four.phase(mood) == "done")


def test_how_long_things_take_is_told_by_who_has_seen_them(four: Fleet) -> None:
    """Another fleet that comes a day later finds a job that trains, and a node that has come: that took no day."""
    manager = four.manager = Calm(four.slots)
    elastic(four, "llm", 2, 4)
    four.begin().turn()
    records = RunRecords(four.run_dir("llm"))
    records.event("started", 0, world_size=2, step=0, train_iters=50)
    four.begin().turn()
    metrics(records, range(1, 7), 2, 0, 100.0)
    entry = four.journal.read_entry("llm")
    assert entry is not None and entry.started is not None
    entry.started -= 86400
    entry.nodes.append(Node(2, 1, [2], entry.started))
    four.journal.keep(entry)
    records.event("spawned", 0, node=2, ranks=[2])
    records.layout(Layout.grid(tp=1, pp=1, dp=3, stage_units=[[0, 1]], units=["embedding", "head"], num_grains=3,
                               num_slices=3, replicas=1))  # fmt: skip
    records.close()
    manager.started.append("llm/2")
    daemon = four.begin()
    daemon.turn()
    assert daemon._fleet.starts == daemon._fleet.leads == []
    assert [node["joined"] for node in four.job("llm")["nodes"]] == [True, True]


def test_how_long_a_job_takes_to_begin_counts_from_when_it_runs(four: Fleet) -> None:
    """It has waited for a day in the queue of Slurm, or of Kubernetes."""
    manager = four.manager = Calm(four.slots)
    manager.waits = True
    elastic(four, "llm", 2, 4)
    daemon = four.begin()
    daemon.turn()
    entry = daemon._wards["llm"].entry
    assert entry.started is not None
    entry.started -= 86400
    daemon.turn()
    manager.waits = False
    daemon.turn()
    records = RunRecords(four.run_dir("llm"))
    metrics(records, range(1, 7), 2, 0, 100.0)
    records.close()
    daemon.turn()
    (took,) = daemon._fleet.starts
    assert took < 86400


def test_a_job_whose_folder_is_gone_holds_up_nobody(four: Fleet) -> None:
    """Somebody has removed that of one that runs, and that of one that waits. What comes back is looked after again."""
    four.manager = Calm(four.slots)
    for name in ("runs", "waits", "last"):
        four.submit(name, "true", devices=4)
    daemon = four.begin()
    daemon.turn()
    os.rename(four.journal.job("runs"), four.folder / "runs")
    shutil.rmtree(four.journal.job("waits"))
    daemon.turn()
    assert four.phase("last") == "running"
    assert sum("its folder is gone" in line for line in four.said) == 2
    os.rename(four.folder / "runs", four.journal.job("runs"))
    daemon.turn()
    assert four.status()["held"] == 8


def test_what_cannot_be_started_is_said_once_and_shown(four: Fleet) -> None:
    """It is tried again all the same: Slurm refuses a job that no node has room for, somebody has removed a folder."""
    manager = four.manager = Calm(four.slots)
    manager.refuses = "Requested node configuration is not available"
    four.submit("a", "true")
    daemon = four.begin()
    for _ in range(3):
        daemon.turn()
    assert sum(manager.refuses in line for line in four.said) == 1
    assert four.job("a")["trouble"] == f"node 0 cannot be started: {manager.refuses}"
    manager.refuses = ""
    daemon.turn()
    assert (manager.started, four.job("a")["trouble"]) == (["a/0"], "")


@pytest.mark.parametrize("failing", range(22))
def test_a_full_disk_loses_no_job(failing: int, four: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails: what it was of is done, and written down, once there is room again."""
    manager = four.manager = Calm(four.slots)
    for name in ("a", "b"):
        four.submit(name, "true")
    daemon, writes = four.begin(), 0

    def unsure(write: Callable[..., None]) -> Callable[..., None]:
        def written(*arguments: Any, **fields: Any) -> None:
            nonlocal writes
            writes += 1
            if writes == failing + 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(*arguments, **fields)

        return written

    for name in ("keep", "tell"):
        monkeypatch.setattr(Journal, name, unsure(getattr(Journal, name)))

    def turns() -> None:
        for _ in range(3):
            with contextlib.suppress(OSError):
                daemon.turn()

    turns()
    assert sorted(manager.started) == ["a/0", "b/0"]
    manager.codes = {"a/0": 0, "b/0": 1}
    turns()
    assert daemon.idle
    assert (four.phase("a"), four.phase("b"), four.status()["held"]) == ("done", "failed", 0)


@pytest.mark.job
def test_damaged_journals_are_not_overwritten(four: Fleet) -> None:
    four.submit("a", "true")
    four.begin()
    four.until("it is done", lambda: four.phase("a") == "done")
    four.close()
    path = four.journal.job("a") / "state.json"
    good = path.read_text()
    newer = good.removesuffix('"version": 1}') + '"version": 9}'
    for content, told in (("{", "is damaged"), (newer, "version 9")):
        path.write_text(content)
        with pytest.raises(JournalError, match=told):
            four.begin().turn()
        assert path.read_text() == content
    path.write_text(good)


# ---- elastic jobs --------------------------------------------------------------------------------


class Paced:
    """The elastic job ``llm`` of a fleet, which can be made to wait."""

    def __init__(self, four: Fleet, jobs: Jobs) -> None:
        self.fleet, self._jobs = four, jobs
        four.folder.mkdir()
        self._pace = four.folder / "pace"
        os.environ["PACE"] = str(self._pace)
        # So short that growing pays for what is left of a job of some seconds.
        four.journal.keep(Kept(0, "elastic", "", 0, 0.0, leads=[0.05]))
        # Who is made to wait does not hang, however long a machine takes for what it is to wait for.
        four.submit("llm", str(PACED), "--elastic", "--elastic-slow", "off", "--elastic-hang-timeout", "120",
                    "--data-path", str(jobs.data), *MODEL.split(), *FLAGS, devices=2, most=4)  # fmt: skip

    @property
    def steps(self) -> int:
        path = self.fleet.run_dir("llm") / "metrics.jsonl"
        return max(read_metrics(path.parent), default=0) if path.exists() else 0

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Between two steps."""
        with self._pace.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def joined(self) -> int:
        """Nodes that compute their part now."""
        return sum(node["joined"] for node in self.fleet.job("llm")["nodes"])

    def assert_same(self) -> None:
        reference = self._jobs.undisturbed(*FLAGS, ranks=2)
        assert cli.main(["compare", str(self.fleet.run_dir("llm")), str(reference.run_dir)]) == 0


@pytest.fixture
def paced(four: Fleet, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Paced:
    monkeypatch.setenv("PACE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Paced(four, jobs)


@pytest.mark.job
def test_it_grows_when_idle_and_gives_back_to_who_comes(paced: Paced, four: Fleet) -> None:
    """While it trains, and its result is that of the undisturbed job, bit for bit."""
    four.holder("first")
    four.begin()
    four.until("it trains", lambda: paced.steps >= 6)
    with paced.waits():
        four.until("it grows by what is idle", lambda: four.job("llm")["target"] == 3)
        four.until("a node has come", lambda: "on a node that has come" in output(four, 0))
    four.until("it has grown", lambda: paced.joined() == 2)
    with paced.waits():
        noted = four.holder("second")
        four.until("it is to shrink", lambda: four.job("llm")["target"] == 2)
        assert four.phase("second") == "waiting" and four.status()["held"] == 4
    four.until("the second one runs", noted.exists)
    assert four.job("llm")["devices"] == 2 and four.phase("llm") == "running"
    four.until("it is done", lambda: four.phase("llm") == "done")
    four.let_end("second")
    four.let_end("first")
    four.until("all is done", lambda: not four.status()["held"])
    assert [four.phase(name) for name in ("llm", "first", "second")] == ["done"] * 3
    paced.assert_same()
    told = [event["devices"] for event in four.journal.events() if event["kind"] in ("grows", "shrinks")]
    assert told == [3, 2]
    assert not four.told("lost") and not four.told("disobeys")


def output(four: Fleet, node: int) -> str:
    return (four.journal.job("llm") / "nodes" / str(node) / "output").read_text()


def launcher_of(four: Fleet, node: int) -> int:
    """The process of a launcher of ``llm``: the only child of who keeps it."""
    keeper = four.process("llm", node)
    return int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])


def until_grown(paced: Paced, four: Fleet) -> None:
    """``llm`` trains, and has been joined by the node that there is room for."""
    four.until("it trains", lambda: paced.steps >= 6)
    with paced.waits():
        four.until("a node has come", lambda: "on a node that has come" in output(four, 0))
    four.until("it has grown", lambda: paced.joined() == 2)


@pytest.mark.job
def test_killed_in_the_middle_of_growing(paced: Paced, four: Fleet) -> None:
    """And again while a node leaves: the next one goes on, nothing is begun twice, and bits stay."""
    four.holder("first")
    daemon = four.run()
    until("it trains", lambda: paced.steps >= 6)
    with paced.waits():
        until("it is to grow", lambda: bool(four.told("grows")))
        daemon.send_signal(signal.SIGKILL)
        four.close()
        node = four.job("llm")["nodes"][1]["node"]
        daemon = four.run()
        until("the node has come", lambda: "on a node that has come" in output(four, 0))
    until("it has grown", lambda: paced.joined() == 2)
    with paced.waits():
        noted = four.holder("second")
        until("it is to shrink", lambda: bool(four.told("shrinks")))
        daemon.send_signal(signal.SIGKILL)
        four.close()
        daemon = four.run("--until-idle")
    until("the second one runs", noted.exists)
    assert [each["node"] for each in four.told("left")] == [node]
    until("it is done", lambda: four.phase("llm") == "done")
    four.let_end("second")
    four.let_end("first")
    said, _ = daemon.communicate()
    assert daemon.returncode == 0, said
    paced.assert_same()
    assert len(four.told("grows")) == len(four.told("shrinks")) == 1
    assert not four.told("lost") and not four.told("failed")


@pytest.mark.job
def test_a_node_is_lost_and_then_the_job(paced: Paced, four: Fleet) -> None:
    """Losing a node costs the job that node only; losing its first one is the end of it, and of nobody else."""
    four.holder("first")
    four.begin()
    until_grown(paced, four)
    with paced.waits():
        (node,) = (each["node"] for each in four.job("llm")["nodes"] if each["node"])
        os.kill(launcher_of(four, node), signal.SIGKILL)
        four.until("that is seen", lambda: [each["node"] for each in four.told("lost")] == [node])
        assert four.phase("llm") == "running"
    steps = paced.steps
    four.until("it goes on", lambda: paced.steps > steps)
    os.kill(launcher_of(four, 0), signal.SIGKILL)
    four.until("it has failed", lambda: four.phase("llm") == "failed")
    assert four.job("llm")["reason"].startswith("exit code 137")
    assert four.phase("first") == "running"
    four.let_end("first")
    four.until("nobody has a slot", lambda: not four.status()["held"])
    assert four.phase("first") == "done"


@pytest.mark.job
def test_a_job_that_does_not_obey(paced: Paced, four: Fleet) -> None:
    """Its first launcher is stopped, so that it answers nobody: that is said, others wait, and it obeys later."""
    four.holder("first")
    four.begin(limit=60.0)
    until_grown(paced, four)
    with paced.waits():
        os.kill(launcher_of(four, 0), signal.SIGSTOP)
        noted = four.holder("second")
        four.begin(limit=0.5)
        four.until("it is said", lambda: bool(four.job("llm")["trouble"]))
        assert "has not left within 0.5 s" in four.told("disobeys")[0]["what"]
        assert four.phase("second") == "waiting" and four.status()["held"] == 4
        os.kill(launcher_of(four, 0), signal.SIGCONT)
    four.until("the second one runs", noted.exists)
    assert four.job("llm")["devices"] == 2 and not four.job("llm")["trouble"]
    four.until("it is done", lambda: four.phase("llm") == "done")
    four.let_end("second")
    four.let_end("first")
    four.until("nobody has a slot", lambda: not four.status()["held"])
    assert len(four.told("disobeys")) == 1


@pytest.mark.job
def test_nodes_that_do_not_come(paced: Paced, four: Fleet) -> None:
    """The job does not get to let them in: they are ended, and after three times it is left as it is."""
    four.holder("first")
    four.begin(limit=1.0)
    four.until("it trains", lambda: paced.steps >= 6)
    with paced.waits():
        four.until("three have not come", lambda: len(four.told("disobeys")) == 3)
        four.until("they are gone", lambda: four.job("llm")["devices"] == 2)
    assert all("has not joined within 1 s" in event["what"] for event in four.told("disobeys"))
    four.until("it is done", lambda: four.phase("llm") == "done")
    four.let_end("first")
    four.until("nobody has a slot", lambda: not four.status()["held"])
    paced.assert_same()
    assert len(four.told("grows")) == 3
