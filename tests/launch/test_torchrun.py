"""torchrun's command line, flag by flag: what each of them does with ``megatron-elastic run``."""

from __future__ import annotations

import argparse
import asyncio
import errno
import fcntl
import json
import os
import signal
import socket
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron_elastic.cluster.launch import attempt, launcher, torchrun
from megatron_elastic.cluster.launch.output import BOTH, STDERR, STDOUT, streams_shown
from megatron_elastic.cluster.launch.rendezvous import endpoint_of, every_interface, host_of, is_here, nodes_of
from megatron_elastic.cluster.launch.torchrun import FLAGS, Flag
from megatron_elastic.cluster.node.exit_signal import ExitSignal
from megatron_elastic.cluster.node.station import Station
from megatron_elastic.cluster.protocol import Outcome
from megatron_elastic.cluster.recording.screen import Screen
from megatron_elastic.cluster.wire import Credentials
from megatron_elastic.cluster.wire.address import Address, leave_address
from megatron_elastic.config import UsageError
from tests.jobs import ROOT
from tests.launches import PROGRAMS, TOKEN

PLAIN = str(PROGRAMS / "plain.py")


def read(*flags: str, script: str = PLAIN, arguments: tuple[str, ...] = ()) -> launcher._Command:
    return launcher._read_command([*flags, script, *arguments])


def test_the_table_has_every_flag_of_torchrun() -> None:
    """A flag that torch gets, or drops, is to be thought about here."""
    from torch.distributed.run import get_args_parser

    theirs = {option for action in get_args_parser()._actions for option in action.option_strings}
    ours = {option for flag in FLAGS for option in flag.spellings}
    assert theirs - {"-h", "--help"} <= ours
    assert {flag.name for flag in FLAGS} <= theirs


def test_values_are_taken_as_torchrun_takes_them() -> None:
    """A switch is a switch there, too: otherwise what follows would be another thing."""
    from torch.distributed.run import get_args_parser

    actions = get_args_parser()._actions
    switches = {option for action in actions if action.nargs == 0 for option in action.option_strings}
    for flag in FLAGS:
        assert (flag.metavar is None) == (flag.name in switches), flag.name


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_what_becomes_of_each_flag(flag: Flag, capsys: pytest.CaptureFixture[str]) -> None:
    """In all its spellings: it works, is said to have no effect, or is refused with the reason."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    torchrun.add_flags(parser)
    value = {int: "1", float: "2.5"}.get(flag.type, "x")
    for spelling in flag.spellings:
        options = parser.parse_args([spelling] if flag.metavar is None else [spelling, value])
        assert str(getattr(options, flag.dest)) == ("True" if flag.metavar is None else value)
        if flag.kind == "refused":
            with pytest.raises(UsageError, match=rf"^{flag.name}( x)? does not work here: .+"):
                list(torchrun.look_at(options))
        else:
            idle = list(torchrun.look_at(options))
            assert [why for _, why in idle] == ([flag.says] if flag.kind == "no effect" else [])
    for harmless in flag.but:
        assert not list(torchrun.look_at(parser.parse_args([flag.name, harmless])))


def test_docs_have_the_same_table() -> None:
    text = (ROOT / "docs" / "launching.md").read_text()
    for flag in FLAGS:
        names = ", ".join(f"`{name}`" for name in (flag.name, flag.short) if name)
        but = f" (but {', '.join(f'`{value}`' for value in flag.but)})" if flag.but else ""
        row = f"| {names} | {flag.kind}{but} | {flag.says} |"
        assert row in text, row


# ---- rows that work -------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "nodes", "node_rank", "host", "port"), [
    ((), 1, 0, "127.0.0.1", 0),
    (("--nnodes", "1:1"), 1, 0, "127.0.0.1", 0),
    (("--standalone", "--rdzv-endpoint", "elsewhere:1"), 1, 0, "127.0.0.1", 0),
    (("--nnodes=2", "--node_rank=1", "--master_addr", "host0"), 2, 1, "host0", 29500),
    (("--nnodes=2", "--node-rank=1", "--rdzv-endpoint", "host0:7", "--rdzv-backend", "c10d"), 2, 1, "host0", 7),
    (("--nnodes=2", "--node-rank=1", "--rdzv-endpoint", "[fe80::1%eth0]:7"), 2, 1, "fe80::1%eth0", 7),
    (("--nnodes=2", "--master-addr", "::1", "--master-port", "5"), 2, 0, "::1", 5),
    (("--nnodes=2", "--master-addr", "[0:0:0:0:0:0:0:1]"), 2, 0, "::1", 29500),
    (("--nnodes=2", "--rdzv-endpoint=127.0.0.1"), 2, 0, "127.0.0.1", 29500),
])  # fmt: skip
def test_where_nodes_meet(
    flags: tuple[str, ...], nodes: int, node_rank: int, host: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_ELASTIC_TOKEN", TOKEN)
    found = read(*flags).rendezvous
    assert (found.nodes, found.node_rank, found.host, found.port) == (nodes, node_rank, host, port)


@pytest.mark.parametrize("flags", [("--nnodes", "1", "--node-rank", "3"), ("--nnodes", "2:4", "--node-rank", "2")])
def test_a_node_that_joins_may_have_fewer_ranks_than_a_job_begins_with(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of two pipeline stages, and fewer ranks than the job keeps as spares: both say nothing of the others."""
    monkeypatch.setenv("MEGATRON_ELASTIC_TOKEN", TOKEN)
    gpt = str(ROOT / "examples" / "pretrain_gpt.py")
    arguments = ("--elastic", "--elastic-spares", "2", "--pipeline-model-parallel-size", "2")
    assert read(*flags, "--master-addr", "host0", script=gpt, arguments=arguments).rendezvous.joins
    with pytest.raises(UsageError, match="there are 1 ranks in all"):
        read("--nnodes", "1", script=gpt, arguments=arguments)
    with pytest.raises(UsageError, match="the following arguments are required"):
        read("--nnodes", "1", "--nproc-per-node", "4", script=gpt, arguments=arguments)


def test_a_range_of_nodes_is_of_an_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_ELASTIC_TOKEN", TOKEN)
    flags = ("--nnodes", "2:4", "--master-addr", "host0")
    for node in range(4):
        found = read(*flags, "--node-rank", str(node), arguments=("--elastic",)).rendezvous
        assert (found.nodes, found.node_rank) == (2, node)


@pytest.mark.parametrize(("flags", "message"), [
    (("--nnodes", "2:1"), "--nnodes 2:1: give a positive number, or MIN:MAX"),
    (("--nnodes", "0:1"), "--nnodes 0:1"),
    (("--nnodes", "1:2"), "only to an --elastic job nodes can come while it trains; add --elastic"),
    (("--nnodes", "2"), "several nodes need --master-addr"),
    (("--nnodes", "2", "--master-addr", "192.0.2.1"), "192.0.2.1 is no address of this machine, so it is not node 0"),
    (("--nnodes", "2", "--master-addr", "h:29500"), "--master-addr h:29500 is no address of a host: give the port as "
     "--master-port 29500"),
    (("--master-addr", "[::1"), "--master-addr [::1 is no address of a host: expected a name, IPv4, or IPv6"),
    (("--master-addr", "host..0"), "--master-addr host..0 is no address of a host: each part of a "
     "name has 1 to 63 characters"),
    (("--rdzv-endpoint", "h:port"), "--rdzv-endpoint h:port: expected HOST:PORT"),
    (("--rdzv-endpoint", "::g"), "--rdzv-endpoint ::g is no address"),
    (("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "etcd:2379"), "--rdzv-backend etcd-v2 does not work here: there "
     "would be no node 0"),
    (("--nproc", "2"), "unknown flag --nproc before SCRIPT, where the launcher's are: did you mean --nproc-per-node?"),
    (("--bogus=1",), "unknown flag --bogus before SCRIPT, where the launcher's are: --help lists them"),
    (("--elastic",), "--elastic is for the script: put it behind SCRIPT"),
    (("--master-port", "65536"), "--master-port 65536 is no port: give a number up to 65535"),
    (("--nproc-per-node", "xpu"), "--nproc-per-node xpu: give a positive number, auto, cpu or gpu"),
    (("--nproc-per-node", "9" * 5000), "9: give a positive number, auto, cpu or gpu; at most 1000000"),
    (("--nproc-per-node", "1000000"), "1000000 ranks are at least 6000000: start fewer"),
    (("--nnodes", "9999999999999", "--master-addr", "127.0.0.1", "--node-rank", "0"), "both up to 1000000"),
    (("--nnodes", "1:" + "9" * 5000), "both up to 1000000"),
    (("--tee", "4"), "--tee 4: expected 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
    (("--redirects", "0:3,1"), "--redirects 0:3,1: expected"),
    (("--local-ranks-filter", "0-3"), "--local-ranks-filter 0-3: expected local ranks, as 0,1,2"),
    (("--local-ranks-filter", "7"), "--local-ranks-filter 7: none of them is here, where local ranks are 0 to 0"),
    (("--signals-to-handle", "TERM"), "--signals-to-handle TERM: expected names like SIGTERM,SIGUSR1"),
    (("--signals-to-handle", "SIGKILL"), "of signals that a program may handle"),
    (("--shutdown-timeout", "0"), "--shutdown-timeout must be positive, got 0"),
    (("--no-python", "-m"), "--no-python and -m exclude each other"),
    (("--no-python",), "there is no program"),
    (("--virtual-local-rank",), "a rank finds its device by its local rank; leave it out"),
    (("--role", "x\udcff"), "'x\\udcff' is no Unicode, and cannot be told to ranks"),
    (("--rdzv-id", "x\udcff"), "'x\\udcff' is no Unicode, and cannot be told to ranks"),
    (("--log-dir", __file__), f"--log-dir {__file__}: cannot keep logs there: File exists"),
])  # fmt: skip
def test_bad_values(
    flags: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGATRON_ELASTIC_TOKEN", TOKEN)
    with pytest.raises(UsageError) as caught:
        launcher._make_run_dir(read(*flags, arguments=("--elastic-run-dir", str(tmp_path / "run"))), begins=True)
    assert message in str(caught.value)


def test_a_node_that_joins_has_a_number_that_messages_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_ELASTIC_TOKEN", TOKEN)
    with pytest.raises(UsageError, match=f"--node-rank {10**20} must be from 0 to"):
        read("--nnodes", "2", "--master-addr", "host0", "--node-rank", str(10**20), arguments=("--elastic",))


def test_bad_scripts_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says what happened, where, and what to do."""
    monkeypatch.chdir(tmp_path)
    long = 300 * "x"
    for command, message in (
        ([], "there is no SCRIPT: megatron-elastic run [options] SCRIPT [ARGS ...]; --help lists the options"),
        (["a.py"], f"there is no script a.py (looked for from {tmp_path}): give its path, or -m and a module's name"),
        (["/"], "there is no script /: it is a directory; name a file in it"),
        ([long], f"cannot read {long}: File name too long"),
        (["/proc/self/mem"], "cannot read /proc/self/mem: Input/output error"),
        ([PLAIN, "--name", "x\udcff"], "'x\\udcff' is no Unicode, and cannot be told to ranks: name it otherwise"),
        ([PLAIN, "--elastic", "--elastic-replica", "1"], "unknown flag --elastic-replica: did you mean "
         "--elastic-replicas?"),
        ([PLAIN, "--elastic", "--elastic-qqqqqqqqqq=1"], "unknown flag --elastic-qqqqqqqqqq: docs/flags.md lists them"),
        ([PLAIN, "--elastic-run-dir", long], f"--elastic-run-dir: cannot make {long}: File name too long; name a "
         "folder that can be written to"),
        ([PLAIN, "--elastic-run-dir", "/proc/x"], "--elastic-run-dir: cannot make /proc/x: No such file or directory; "
         "name a folder that can be written to"),
    ):
        with pytest.raises(UsageError) as caught:
            launcher._make_run_dir(launcher._read_command(command), begins=True)
        assert str(caught.value) == message
    (folder := tmp_path / "x\udcff").mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match=r"/x.udcff/run' is no Unicode"):
        launcher._make_run_dir(launcher._read_command([PLAIN, "--elastic-run-dir", "run"]), begins=True)
    monkeypatch.setenv("MEGATRON_ELASTIC_ARGS", "--title 'a b")
    with pytest.raises(UsageError, match=r"_ARGS=--title 'a b: .* no closing quotation; close the quotation"):
        read()


def test_hosts() -> None:
    assert host_of("", "name-of.host") == "name-of.host"
    assert [host_of("", text) for text in ("::1", "[::1]", "10.0.0.1")] == ["::1", "::1", "10.0.0.1"]
    assert [endpoint_of(text) for text in ("a", "a:1", "::1", "[::1]", "[::1]:2")] == [
        ("a", None), ("a", 1), ("::1", None), ("::1", None), ("::1", 2)]
    assert is_here("127.0.0.1")
    assert not is_here("no.such.host.invalid")
    assert (every_interface("127.0.0.1"), every_interface("::1")) == ("0.0.0.0", "::")
    assert (nodes_of("3"), nodes_of("1:1"), nodes_of("2:8")) == ((3, 3), (1, 1), (2, 8))


@pytest.mark.parametrize(("redirects", "tee", "only", "shown"), [
    (None, None, None, {}),
    ("3", None, None, {}),
    ("3", "0:3", None, {0: BOTH}),
    ("1", None, None, {0: STDERR, 1: STDERR}),
    ("0:3", None, None, {1: BOTH}),
    ("3", "1", None, {0: STDOUT, 1: STDOUT}),
    (None, "3", "1", {1: BOTH}),
    (None, None, "0", {0: BOTH}),
    ("0", None, "0,7", {0: BOTH}),
])  # fmt: skip
def test_what_is_on_the_console(
    redirects: str | None, tee: str | None, only: str | None, shown: dict[int, int]
) -> None:
    """What torchrun would show there of two ranks, but nothing if no flag is given."""
    assert streams_shown(redirects, tee, only, 2) == shown


def test_ranks_of_a_node() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert [read("--nproc-per-node", text).ranks_per_node for text in ("3", "cpu", "auto")] == [3, cpus, cpus]


def test_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    assert read().signals == usual
    assert read("--signals-to-handle", "SIGTERM,SIGUSR2").signals == {signal.SIGTERM, signal.SIGUSR2}
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    assert read().signals == usual - {signal.SIGHUP}, "nohup"


def test_the_rest(tmp_path: Path) -> None:
    found = read("--role", "trainer", "--rdzv-id", "7", "--shutdown-timeout", "3.5", "--run-path")
    assert (found.console.role, found.name, found.end_limit) == ("trainer", "7", 3.5)
    assert read("--no-python", script="/bin/true").program.is_command


def test_logs_are_kept_elsewhere(tmp_path: Path) -> None:
    """In a folder for each job, also if two have the same name."""
    for folder, name in (("a", "7_run"), ("b", "7_run-2")):
        flags = ("--log_dir", str(tmp_path / "logs"), "--rdzv-id", "7")
        command = read(*flags, arguments=("--elastic-run-dir", str(tmp_path / folder / "run")))
        run = launcher._make_run_dir(command, begins=True)
        assert (run / "logs").resolve() == tmp_path / "logs" / name


def test_a_folder_that_another_node_makes_meanwhile_is_not_in_the_way(tmp_path: Path) -> None:
    """As nodes of two jobs that begin at once. Here what is no folder when it is looked at, and there all the same."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "run").symlink_to("nowhere")
    flags = ("--log-dir", str(tmp_path / "logs"))
    run = launcher._make_run_dir(read(*flags, arguments=("--elastic-run-dir", str(tmp_path / "run"))), begins=True)
    assert (run / "logs").resolve() == tmp_path / "logs" / "run-2"


# ---- scripts --------------------------------------------------------------------------------


def test_a_script_is_found_as_python_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a link, by a relative path, and as a module of a package."""
    package = tmp_path / "real" / "package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "train.py").write_text("")
    (tmp_path / "link.py").symlink_to(package / "inner" / "train.py")
    monkeypatch.chdir(tmp_path)
    for script in ("link.py", "real/package/inner/train.py"):
        assert read(script=script).program.directory == str(package / "inner")
    monkeypatch.chdir(tmp_path / "real")
    assert read("-m", script="package.inner.train").program.directory == str(tmp_path / "real")
    for module, message in (("package.nothing", "there is no module package.nothing"),
                            ("package", "package is a package without a __main__ module")):
        with pytest.raises(UsageError, match=message):
            read("-m", script=module)


def test_a_module_is_asked_about_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asked.py").write_text(Path(PLAIN).read_text())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="2 ranks cannot do this"):
        read("-m", "--nproc-per-node", "2", script="asked", arguments=("impossible",))


@pytest.mark.parametrize(("text", "flags", "message"), [
    (None, (), "No such file or directory"),
    ("{", (), "the profile is not JSON"),
    ("[]", (), 'the profile must be an object with an object "units"'),
    ('{"units": {"layer": {}}}', (), "unit 'layer' of the profile has"),
    ('{"units": {}}', ("--elastic-dvfs", "energy"), 'has no "power"'),
])  # fmt: skip
def test_a_bad_profile(text: str | None, flags: tuple[str, ...], message: str, tmp_path: Path) -> None:
    """Named once, before anything starts."""
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read(arguments=("--elastic", "--elastic-profile", str(path), *flags))
    assert message in str(caught.value) and str(caught.value).count(str(path)) == 1
    with pytest.raises(UsageError, match="Is a directory"):
        read(arguments=("--elastic", "--elastic-profile", str(tmp_path)))


def test_what_ended_before_its_first_step_is_not_in_the_way(tmp_path: Path) -> None:
    run = read(arguments=("--elastic-run-dir", str(tmp_path)))
    for number in (1, 2):
        (tmp_path / "layouts").mkdir()
        (tmp_path / "metrics.jsonl").touch()
        (tmp_path / "events.jsonl").write_text('{"kind": "started"}\n{"kind": "failed"}\n')
        assert launcher._make_run_dir(run, begins=True) == tmp_path
        moved = tmp_path / f"attempt-{number}"
        assert {path.name for path in moved.iterdir()} == {"layouts", "metrics.jsonl", "events.jsonl"}
        assert not (tmp_path / "events.jsonl").exists() and (tmp_path / "logs").is_dir()


@pytest.mark.parametrize(("name", "text"), [("metrics.jsonl", '{"step": 1}\n'), ("digest.json", "{}")])
def test_what_has_trained_or_finished_is_in_the_way(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "events.jsonl").write_text('{"kind": "failed"}\n')
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=r"metrics.jsonl is there already; choose another --elastic-run-dir"):
        launcher._make_run_dir(read(arguments=("--elastic-run-dir", str(tmp_path))), begins=True)


def test_a_job_that_is_about_to_train_is_in_the_way(tmp_path: Path) -> None:
    """Unless nobody is there any more."""
    (tmp_path / "events.jsonl").write_text('{"kind": "hello"}\n')
    run = read(arguments=("--elastic-run-dir", str(tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        leave_address(tmp_path, Address("127.0.0.1", coordinator.getsockname()[1], Credentials("secret", None)))
        with pytest.raises(UsageError, match="of a job that is about to train"):
            launcher._make_run_dir(run, begins=True)
    launcher._make_run_dir(run, begins=True)
    assert (tmp_path / "attempt-1" / "events.jsonl").exists()


def test_a_job_that_waits_for_its_nodes_is_in_the_way(tmp_path: Path) -> None:
    """On another host whose locks are not seen here; nothing is on record yet."""
    run = read(arguments=("--elastic-run-dir", str(tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as coordinator:
        leave_address(tmp_path, Address("127.0.0.1", coordinator.getsockname()[1], Credentials("secret", None)))
        with pytest.raises(UsageError, match=r"coordinator.json is there already, of a job that is about to train"):
            launcher._make_run_dir(run, begins=True)
    launcher._make_run_dir(run, begins=True)


@pytest.mark.parametrize(("error", "taken"), [(errno.EAGAIN, True), (errno.EACCES, True), (errno.ENOLCK, False)])
def test_where_files_cannot_be_locked_jobs_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, taken: bool
) -> None:
    def lockf(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(UsageError, match="another process has begun a job in") if taken else nullcontext():
        attempt.claim(tmp_path)


@pytest.mark.parametrize(("token", "said"), [("x" * 32, 0), ("t" * 32, 1)], ids=["another job's", "its own"])
def test_the_first_node_begins_where_nobody_coordinates(tmp_path: Path, token: str, said: int) -> None:
    """What a dead job, or one with another token, has left there is waited for by nobody, or not for long."""
    notes: list[str] = []
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert not attempt.led(tmp_path, Credentials("t" * 32), 0.0, notes.append), "there is no address"
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    leave_address(tmp_path, Address("127.0.0.1", port, Credentials(token)))
    assert not attempt.led(tmp_path, Credentials("t" * 32), 0.0, notes.append)
    assert len(notes) == said
    (tmp_path / "metrics.jsonl").write_text("")
    assert not attempt.led(tmp_path, Credentials("t" * 32), 60.0, notes.append), "it has not trained"
    assert len(notes) == said


# ---- what is said ---------------------------------------------------------------------------


class _Ends:
    """A station whose job has ended."""

    coordinates = True

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    async def run(self) -> Outcome:
        return self._outcome

    async def end(self, outcome: Outcome) -> None:
        """Nothing is left."""


def ended(outcome: Outcome, run_dir: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """What a launcher says whose job has ended so."""
    monkeypatch.setattr(launcher, "Station", lambda *_: _Ends(outcome))
    return launcher.main([PLAIN, "--elastic-run-dir", str(run_dir), *arguments])


def test_the_last_line_has_the_time_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(Outcome(True, "done"), tmp_path, monkeypatch, "--elastic-log-format", "json") == 0
    *_, before, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert last["message"].startswith("records and logs are in")
    assert before["time"] <= last["time"]


def test_a_flag_that_a_checkout_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "pretrain_gpt.py: error: unrecognized arguments: --elastic-run-dir runs/z"
    assert ended(Outcome(False, why, 2), tmp_path, monkeypatch) == 2
    assert "knows the --elastic-... flags only with --elastic: add it" in capsys.readouterr().err


def test_a_fault_that_never_happened_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never, once = "kill:rank=0,step=2,at=backward,grain=2", "kill:rank=0,step=2,at=vote"

    async def end(*_: object) -> None:
        (tmp_path / "events.jsonl").write_text(json.dumps({"kind": "injected", "spec": once}) + "\n")

    monkeypatch.setattr(_Ends, "end", end)
    assert ended(Outcome(True, "done"), tmp_path, monkeypatch, "--elastic-inject", never, "--elastic-inject", once) == 0
    out = capsys.readouterr().out
    assert f"WARNING: --elastic-inject {never} never happened" in out
    assert out.count("never happened") == 1


def test_who_interrupts_is_told_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the console; the reason on record is only what happened."""
    said: list[str] = []

    async def interrupted(_: Station) -> Outcome:
        raise asyncio.CancelledError

    async def run() -> Outcome:
        monkeypatch.setattr(Station, "_serve", interrupted)
        command = read()
        station = Station(launcher._brief(command, tmp_path, begins=True), ExitSignal(()), Screen(), said.append)
        outcome = await station.run()
        await station.end(outcome)
        return outcome

    assert asyncio.run(run()).reason == "interrupted"
    assert said == ["interrupted: ending all ranks; interrupt again to kill them at once"]
