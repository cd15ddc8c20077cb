"""The cluster room with real processes: ranks without a model, killed, frozen, failing and finishing."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import (
    Back,
    Committed,
    FromAgent,
    Hello,
    Interrupt,
    Message,
    Moves,
    Report,
    Said,
    Start,
    Stop,
    VoteResult,
)
from megatron_elastic.cluster.node.line import AGENT_VARIABLE
from megatron_elastic.cluster.protocol.faults.decision import decide
from megatron_elastic.cluster.protocol.job import Told
from megatron_elastic.cluster.rank.control import Control, Interrupted, InterruptFlag, JobStopped
from megatron_elastic.layout import Transfer
from megatron_elastic.observe.records import read_digest, read_metrics
from tests.launches import PROGRAMS, TOKEN, Launch, Run, free_port, launches, start_nodes


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


# ---- elastic jobs --------------------------------------------------------------------------


def test_a_job_finishes(launch: Launch) -> None:
    run = launch.members()
    output = run.finish()
    assert "training finished at step 4" in output
    assert run.steps() == [1, 2, 3, 4]
    assert read_digest(run.run_dir)["step"] == 4
    assert json.loads((run.run_dir / "layouts" / "0.json").read_text())["epoch"] == 0


@pytest.mark.parametrize(
    ("act", "cause"),
    [
        ("2:2:begin:kill", "kill -9"),
        ("0:2:begin:announce", "kill -9"),
        ("0:3:committed:kill", "kill -9"),
        ("0:2:voted:segv", "SIGSEGV"),
    ],
)
def test_a_rank_dies(launch: Launch, act: str, cause: str) -> None:
    run = launch.members(act)
    run.finish()
    assert run.steps() == [1, 2, 3, 4]
    (event,) = run.events("recovered")
    assert event["ranks"] == [int(act[0])]
    assert event["cause"] == cause
    parts = [event[name] for name in ("detect_ms", "interrupt_ms", "plan_ms", "edit_ms", "state_ms", "redo_ms")]
    assert all(part >= 0 for part in parts)
    assert event["edit_ms"] == 1.0
    assert event["state_ms"] == 2.0
    assert json.loads((run.run_dir / "layouts" / "1.json").read_text())["lost"] == [int(act[0])]
    assert read_metrics(run.run_dir)[4]["world_size"] == 3


def test_a_step_without_a_vote_is_redone(launch: Launch) -> None:
    acts = [f"{rank}:2:begin:{act}" for rank in (0, 1, 2) for act in ("tell", "wait")]
    run = launch.members(*acts)
    launch.hear(3)
    os.kill(run.pid(3), signal.SIGKILL)
    run.finish()
    (event,) = run.events("recovered")
    assert (event["ranks"], event["step"], event["decision"]) == ([3], 2, "back")
    assert run.steps() == [1, 2, 3, 4]


def test_a_step_that_somebody_voted_for_is_finished(launch: Launch) -> None:
    run = launch.members("0:2:voted:tell", "0:2:voted:wait")
    launch.hear(1)
    os.kill(run.pid(3), signal.SIGKILL)
    run.finish()
    (event,) = run.events("recovered")
    assert (event["ranks"], event["step"], event["decision"]) == ([3], 2, "forward")
    assert run.steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("act", ["0:*:report:kill", "0:*:edit:kill"])
def test_a_second_rank_dies_while_the_first_is_recovered(launch: Launch, act: str) -> None:
    run = launch.members("2:2:begin:kill", act)
    run.finish()
    assert run.steps() == [1, 2, 3, 4]
    (event,) = run.events("recovered")
    assert (event["ranks"], event["epochs"]) == ([0, 2], [1, 2])
    assert read_metrics(run.run_dir)[4]["world_size"] == 2


def test_a_suspected_rank_is_fenced(launch: Launch) -> None:
    run = launch.members("1:2:begin:mute", "0:2:begin:suspect1", extra=("--elastic-suspect-timeout", "0.2"))
    run.finish()
    (event,) = run.events("recovered")
    assert (event["ranks"], event["cause"]) == ([1], "fenced")
    assert "on purpose" in run.events("fenced")[0]["reason"]


def test_a_rank_that_does_not_report_is_fenced(launch: Launch) -> None:
    run = launch.members("1:*:report:mute", "3:2:begin:kill",
                         extra=("--elastic-report-timeout", "0.5", "--elastic-suspect-timeout", "0.2",
                                "--elastic-heartbeat-timeout", "0.4"))
    run.finish()
    (event,) = run.events("recovered")
    assert event["ranks"] == [1, 3]
    assert "did not answer" in run.events("fenced")[0]["reason"]


def test_different_results_of_one_step_stop_the_job(launch: Launch) -> None:
    run = launch.members("1:2:voted:different", "0:3:begin:kill")
    assert "diverged" in run.finish(code=1)
    assert "step 2" in run.events("diverged")[0]["reason"]


def test_no_state_left_is_a_failure(launch: Launch) -> None:
    run = launch.members("0:2:begin:kill", "1:2:begin:kill", ranks=2)
    output = run.finish(code=1)
    assert "checkpoint" in output


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("1:2:begin:raise", "RuntimeError: the program is wrong on purpose"),
        ("1:2:begin:leave", "ended with exit code 0 before training was finished"),
        ("1:2:begin:leave7", "rank 1 ended with exit code 7"),
    ],
)
def test_an_error_of_the_program_ends_the_job(launch: Launch, act: str, message: str) -> None:
    assert message in launch.members(act).finish(code=7 if "leave7" in act else 1)


def test_children_of_a_rank_end_with_it(launch: Launch) -> None:
    launch.members("1:2:begin:child").finish()


def test_ranks_that_do_not_come_up_are_named(launch: Launch) -> None:
    run = launch.start("plain.py", "hang", "--elastic", "--elastic-start-timeout", "2", flags=("--nproc-per-node", "2"))
    assert "ranks [0, 1] did not come up within 2 s" in run.finish(code=1)


# ---- the end of the launcher ---------------------------------------------------------------


def waiting(launch: Launch, *arguments: str) -> Run:
    """A launcher that waits for another node."""
    launch.env[wire.TOKEN_VARIABLE] = TOKEN
    run = launch.start("member.py", "--elastic", *launch.member_flags(), *arguments,
                       flags=("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())))
    run.read_until("for node 1 of 2")
    return run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(launch: Launch, number: signal.Signals, code: int) -> None:
    run = launch.members("1:2:begin:wait")  # so that the job is not over before
    run.read_until("step   1/4")
    run.process.send_signal(number)
    assert "interrupted" in run.finish(code=code)


def test_an_exit_signal_before_there_are_ranks_ends_everything(launch: Launch) -> None:
    """Nothing is trained that could be saved, and nobody would hear it."""
    run = waiting(launch, "--exit-signal-handler")
    run.process.send_signal(signal.SIGTERM)
    assert "interrupted" in run.finish(code=143)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "SIGUSR1"])
def test_an_exit_signal_that_no_rank_listens_for_yet_is_kept_from_them(launch: Launch, number: signal.Signals) -> None:
    """It would kill them, and they would be started again."""
    run = launch.start("plain.py", "hang", "--elastic", "--exit-signal-handler", "--exit-signal", number.name,
                       flags=("--nproc-per-node", "2", "--tee", "3"))
    run.read_until("waiting")
    run.process.send_signal(number)
    assert "interrupted" in run.finish(code=128 + number)


def test_a_second_signal_ends_the_patience(launch: Launch) -> None:
    run = launch.members("1:2:begin:stubborn")
    launch.hear(1)
    run.process.send_signal(signal.SIGINT)
    run.read_until("interrupted")
    run.process.send_signal(signal.SIGINT)
    assert "and were killed" in run.finish(code=130)


def test_a_killed_launcher_takes_its_ranks_along(launch: Launch) -> None:
    run = launch.members("1:2:begin:stubborn", "0:2:begin:stubborn")
    launch.hear(2)
    pids = [os.pidfd_open(pid) for pid in launch.processes() if pid != run.process.pid]
    assert len(pids) >= 5
    run.process.kill()
    with selectors.DefaultSelector() as selector:
        for pidfd in pids:
            selector.register(pidfd, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(timeout=10)
            assert ready, f"{len(selector.get_map())} processes outlived the launcher"
            for key, _ in ready:
                selector.unregister(key.fd)
                os.close(key.fd)


def test_strangers_do_not_disturb(launch: Launch) -> None:
    port = free_port()
    run = launch.start("member.py", "--elastic", *launch.member_flags("1:2:begin:wait"),
                       flags=("--nproc-per-node", "2", "--master-port", str(port)))
    run.read_until("step   1/4")
    with pytest.raises(wire.WireError, match="job token"):
        wire.connect("127.0.0.1", port, wire.Credentials("another token"), limit=10, silence=10)
    for garbage in (b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", wire.frame(b"x" * 32) + wire.frame(b"y" * 32)):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):  # until the coordinator closes
                    pass
    launch.go()
    assert "closed a connection from" in run.finish()


# ---- several nodes -------------------------------------------------------------------------


def test_two_nodes(launch: Launch) -> None:
    first, second = start_nodes(launch, "3:2:begin:kill", ranks=2)
    first.finish()
    second.finish()
    assert first.steps() == [1, 2, 3, 4]
    (event,) = first.events("recovered")
    assert event["ranks"] == [3]
    logs = sorted(path.name for path in (second.run_dir / "logs").iterdir())
    assert logs == ["rank2.log", "rank3.log", "zygote1.log"]


def test_a_node_is_lost(launch: Launch) -> None:
    first, second = start_nodes(launch, "0:2:begin:wait", ranks=1)
    first.read_until("step   1/4")
    second.process.kill()
    first.finish()
    (event,) = first.events("recovered")
    assert event["ranks"] == [1]


def test_the_first_node_is_lost(launch: Launch) -> None:
    first, second = start_nodes(launch, "0:2:begin:wait", ranks=1, extra=("--elastic-heartbeat-timeout", "2.5"))
    first.read_until("step   1/4")
    first.process.kill()
    assert "lost the coordinator" in second.finish(code=1)


# ---- plain jobs and bad commands -----------------------------------------------------------


def test_a_plain_program_gets_the_environment_of_torchrun(launch: Launch) -> None:
    run = launch.start("plain.py", "one", flags=("--nproc_per_node=2", "--standalone"))
    assert "all ranks ended with exit code 0" in run.finish()
    for rank in (0, 1):
        seen = json.loads((run.run_dir / "logs" / f"rank{rank}.log").read_text())
        assert seen["RANK"] == seen["LOCAL_RANK"] == str(rank)
        assert seen["WORLD_SIZE"] == seen["LOCAL_WORLD_SIZE"] == "2"
        assert seen["argv"][:2] == [str(PROGRAMS / "plain.py"), "one"]
        assert seen["path"] == str(PROGRAMS)


def test_a_plain_program_fails_on_one_rank(launch: Launch) -> None:
    run = launch.start("plain.py", "fail", flags=("--nproc-per-node", "2"))
    assert "ValueError: wrong on rank 1" in run.finish(code=1)


def test_a_module_that_ranks_need_cannot_be_imported(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "broken_for_test.py").write_text("raise RuntimeError('broken on purpose')")
    launch.env |= {"MEGATRON_ELASTIC_PRELOAD": "broken_for_test",
                   "PYTHONPATH": f"{launch.env['PYTHONPATH']}:{tmp_path}"}
    output = launch.start("plain.py").finish(code=1)
    assert "cannot import broken_for_test" in output
    assert "broken on purpose" in output


def test_a_used_port_is_named(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run = launch.start("plain.py", flags=("--master-port", str(port)))
        assert f"port {port} is in use" in run.finish(code=1)


@pytest.mark.parametrize(
    ("program", "arguments", "flags", "message"),
    [
        ("nowhere.py", (), (), "there is no script"),
        ("plain.py", ("impossible",), ("--nproc-per-node", "3"), "3 ranks cannot do this"),
        ("plain.py", (), ("--nproc-per-node", "none"), "--nproc-per-node none"),
        ("plain.py", (), ("--nnodes", "2"), "--master-addr"),
        ("plain.py", (), ("--nnodes", "1:2"), "--nnodes 1:2"),
        ("plain.py", (), ("--node-rank", "1"), "--node-rank 1"),
        ("plain.py", (), ("--nproc", "1"), "nproc"),
        ("plain.py", ("--elastic-inject", "kill:rank=1"), (), "lacks at"),
        ("plain.py", ("--elastic-report-timeout", "900"), (), "--elastic-report-timeout"),
        ("plain.py", ("--elastic-heartbeat-timeout", "60"), (), "--elastic-heartbeat-timeout (60 s) must be below"),
        ("plain.py", ("--elastic-suspect-timeout", "0"), (), "--elastic-suspect-timeout must be positive"),
        ("plain.py", (), ("-m",), "there is no module"),
        ("plain.py", ("--elastic-tls-cert", "a.pem"), (), "--elastic-tls-key and --elastic-tls-ca must be given"),
    ],
)
def test_bad_commands(
    launch: Launch, program: str, arguments: tuple[str, ...], flags: tuple[str, ...], message: str
) -> None:
    output = launch.start(program, *arguments, flags=flags).finish(code=2)
    assert output.startswith("megatron-elastic: error: ")
    assert message in output
    assert output.count("\n") == 1


def test_a_used_run_directory_is_refused(launch: Launch) -> None:
    launch.members(ranks=2).finish()
    assert "metrics.jsonl is there already" in launch.members(ranks=2).finish(code=2)


def test_a_run_directory_is_one_job_s_from_the_beginning(launch: Launch) -> None:
    """Though nothing is on record before all nodes have come."""
    first = waiting(launch)
    assert f"has begun a job in {first.run_dir}" in launch.members(ranks=2).finish(code=2)


# ---- the rank's side -----------------------------------------------------------------------


def readable(fd: int) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))


def test_the_flag_is_raised_until_it_is_acknowledged() -> None:
    flag = InterruptFlag()
    flag.check()
    flag.raise_for(2, frozenset({5}))
    flag.raise_for(1, frozenset())  # late: must change nothing
    assert flag.raised
    assert readable(flag.fd)
    with pytest.raises(Interrupted) as caught:
        flag.check()
    assert caught.value.epoch == 2
    assert flag.lost == {5}
    flag.acknowledge(1)
    assert flag.raised
    flag.acknowledge(2)
    flag.check()
    assert not readable(flag.fd)
    flag.stop("over")
    flag.acknowledge(9)
    assert readable(flag.fd)
    with pytest.raises(JobStopped, match="over"):
        flag.check()
    flag.close()


class Agent:
    """An agent's side of one connection, on a thread: sends ``messages`` and closes."""

    def __init__(self, *messages: Message) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{uuid.uuid4()}")
        self._listener.listen()
        self._messages = messages
        self.env = {"RANK": "3", AGENT_VARIABLE: self._listener.getsockname()[1:].decode()}
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with sock, self._listener:
            for message in self._messages:
                sock.sendall(wire.encode(message))

    def join(self) -> None:
        self._thread.join()


def test_control_hands_over_messages_and_drops_old_decisions() -> None:
    def back(epoch: int, layout: bytes) -> Back:
        return Back(epoch=epoch, layout=layout, step=1, shapes={}, gather=False, saved=0)

    move = Transfer(1, 2, 0, 3, 4, "replica")
    agent = Agent(
        back(1, b""),
        Start(addresses={0: b"a"}, key=b"k"),
        Moves(epoch=1, moves=[], kept=[]),
        Interrupt(epoch=2, layout=1, lost=[1]),
        Moves(epoch=2, moves=[move], kept=None),
        back(2, b"new"),
    )
    control = Control.connect(agent.env)
    assert control.wait((Start,), timeout=10).addresses == {0: b"a"}
    with pytest.raises((Interrupted, JobStopped)):
        control.wait((), timeout=10)
    assert control.interrupt.lost == {1}
    assert control.interrupt.layout == 1
    control.interrupt.acknowledge(2)
    assert control.wait((Back,), timeout=10).layout == b"new"
    assert control.moves(2) == Moves(epoch=2, moves=[move], kept=None)
    assert control.moves(2) == Moves(epoch=2, moves=[], kept=None)
    with pytest.raises(JobStopped, match="gone"):
        control.wait((Stop,), timeout=10)
    with pytest.raises(JobStopped, match="gone"):
        control.interrupt.check()
    control.close()
    agent.join()


def test_control_stops_when_the_job_failed() -> None:
    agent = Agent(Stop(ok=False, reason="rank 1 failed"))
    control = Control.connect(agent.env)
    with pytest.raises(JobStopped, match="rank 1 failed"):
        control.wait((Start,), timeout=10)
    control.close()
    agent.join()


def test_control_needs_the_launcher() -> None:
    with pytest.raises(JobStopped, match="megatron-elastic run"):
        Control.connect({})


def test_messages_survive_the_wire() -> None:
    vote = VoteResult(step=3, loss=float("inf"), grad_norm=0.1, lr=1e-4, consumed_samples=24, tokens=512)
    decoder = msgspec.msgpack.Decoder(FromAgent)
    for message in (
        Committed(rank=1, epoch=2, vote=vote, time=1.5),
        Hello(rank=0, pid=1, host="h", address=b"\x00\xff", linked=False, layout=b"{}", start_step=0, train_iters=4,
              flags={}, likeness=b"x", tied=True),
    ):
        said = Said(message=message)
        assert wire.decode(wire.encode(said)[4:], decoder) == said
    with pytest.raises(wire.WireError):
        wire.decode(b"\xc1 no message", decoder)


def test_reports_that_contradict_each_other_are_refused() -> None:
    def report(rank: int, step: int) -> Report:
        return Report(rank=rank, epoch=1, member=True, step=step, vote=None, last=None, held=[], interrupted_at=0.0)

    assert decide([report(0, 4), report(1, 4)], {}).decision == "back"
    with pytest.raises(ValueError, match="more than one step"):
        decide([report(0, 4), report(1, 6)], {})
    with pytest.raises(ValueError, match="nobody reports its vote"):
        decide([report(0, 4), report(1, 5)], {})


def test_a_vote_of_the_dead_counts_until_somebody_has_gone_on_to_a_newer_layout() -> None:
    def report(rank: int, layout: int) -> Report:
        return Report(rank=rank, epoch=9, member=True, step=4, vote=None, last=None, held=[], interrupted_at=0.0,
                      layout=layout)

    vote = VoteResult(step=4, loss=1.0, grad_norm=1.0, lr=0.1, consumed_samples=32, tokens=64)
    for told_in, decision in ((2, "back"), (3, "forward"), (5, "forward")):
        assert decide([report(0, 3), report(1, 2)], {4: Told(vote, told_in, told_in)}).decision == decision


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "commands:"),
        (("--help",), 0, "commands:"),
        (("--version",), 0, ""),
        (("run", "--help"), 0, "examples:"),
        (("data", "prepare", "--help"), 0, "--vocab-size"),
        (("walk",), 2, "there is no command 'walk'"),
    ],
)
def test_the_command_line_explains_itself(arguments: tuple[str, ...], code: int, message: str) -> None:
    command = [sys.executable, "-m", "megatron_elastic.cli", *arguments]
    done = subprocess.run(command, cwd=PROGRAMS.parents[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert message in done.stdout + done.stderr
