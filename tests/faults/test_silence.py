"""Ranks and hosts that fall silent without ending: stopped ranks, nodes that stand still, a coordinator that does."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_elastic import cli
from tests.jobs import Grid, Jobs, assert_exactly_once
from tests.launches import Launch, family, launches, start_nodes

PATIENT = ("--elastic-suspect-timeout", "30")
SUSPECT = 1.0
SOON = ("--elastic-suspect-timeout", str(SUSPECT), "--elastic-heartbeat-timeout", "2.5")
"""The default limits."""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


def stop_child(pid: int) -> None:
    """Stop a child of ours, and return when it is."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


# ---- ranks ---------------------------------------------------------------------------------


def test_a_stopped_rank_is_lost(launch: Launch) -> None:
    run = launch.members("0:2:begin:tell", "0:2:begin:wait", extra=SOON)
    launch.hear(1)
    os.kill(run.pid(2), signal.SIGSTOP)
    run.finish()
    assert run.steps() == [1, 2, 3, 4]
    (suspected,) = run.events("suspected")
    assert (suspected["rank"], suspected["reason"]) == (2, "its process is stopped (SIGSTOP)")
    assert run.events("fenced")[0]["rank"] == 2
    assert len(run.events("fault")) == 1
    (event,) = run.events("recovered")
    assert (event["ranks"], event["cause"]) == ([2], "stopped")
    assert event["detect_ms"] >= SUSPECT * 1e3  # it had the suspect timeout to go on


def test_a_rank_that_goes_on_in_time_is_kept(launch: Launch) -> None:
    run = launch.members("0:2:begin:tell", "0:2:begin:wait", extra=PATIENT)
    launch.hear(1)
    for _ in range(2):
        os.kill(run.pid(2), signal.SIGSTOP)
        run.read_until("rank 2 is suspected")
        os.kill(run.pid(2), signal.SIGCONT)
        run.read_until("rank 2 runs again")
    launch.go()
    run.finish()
    assert run.steps() == [1, 2, 3, 4]
    assert [event["rank"] for event in run.events("resumed")] == [2, 2]
    assert run.events("fault") == []


def test_a_rank_that_is_stopped_while_it_recovers_is_lost_too(launch: Launch) -> None:
    run = launch.members("1:*:edit:freeze", "3:2:begin:kill", extra=SOON)
    run.finish()
    assert run.steps() == [1, 2, 3, 4]
    assert sorted(event["rank"] for event in run.events("fault")) == [1, 3]
    assert [event["reason"] for event in run.events("fenced")] == ["its process is stopped (SIGSTOP)"]


def test_a_rank_in_a_debugger_is_lost(launch: Launch) -> None:
    run = launch.members("0:2:begin:tell", "0:2:begin:wait", extra=SOON)
    launch.hear(1)
    pid = run.pid(2)
    attach, wait_all = 16, 0x40000000  # PTRACE_ATTACH, __WALL
    assert ctypes.CDLL(None).ptrace(attach, pid, None, None) == 0
    _, status = os.waitpid(pid, wait_all)
    assert os.WIFSTOPPED(status)
    _, status = os.waitpid(pid, wait_all)  # a debugger sees the end before the parent does
    assert os.WTERMSIG(status) == signal.SIGKILL
    run.finish()
    assert len(run.events("fault")) == 1
    assert run.events("fenced")[0]["reason"] == "its process is stopped (a debugger holds it)"


@pytest.fixture
def frozen_group() -> Iterator[Path]:
    """A cgroup of version 2 of our own, to be frozen; thawed and removed in the end."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    line = next((line for line in lines if line.startswith("0::")), "0::/")
    top = Path("/sys/fs/cgroup")
    group = (top / "unified" if (top / "unified").is_dir() else top) / line[4:] / f"megatron-elastic-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup of version 2: {error}")
    yield group
    (group / "cgroup.freeze").write_text("0")
    group.rmdir()


def test_a_frozen_rank_is_lost(launch: Launch, frozen_group: Path) -> None:
    run = launch.members("0:2:begin:tell", "0:2:begin:wait", extra=SOON)
    launch.hear(1)
    (frozen_group / "cgroup.procs").write_text(str(run.pid(2)))
    (frozen_group / "cgroup.freeze").write_text("1")
    run.finish()
    assert len(run.events("fault")) == 1
    assert "is frozen" in run.events("fenced")[0]["reason"]


def test_a_stopped_rank_does_not_delay_the_end(launch: Launch) -> None:
    run = launch.members("0:2:begin:tell", "0:2:begin:wait", extra=PATIENT)
    launch.hear(1)
    os.kill(run.pid(2), signal.SIGSTOP)
    run.read_until("rank 2 is suspected")
    run.process.send_signal(signal.SIGTERM)
    assert "and were killed" not in run.finish(code=143)


# ---- nodes ---------------------------------------------------------------------------------


def test_a_silent_node_is_lost_and_ends_when_it_goes_on(launch: Launch) -> None:
    first, second = start_nodes(launch, "0:2:begin:tell", "0:2:begin:wait", ranks=1, extra=SOON)
    launch.hear(1)
    node = family(second.process.pid)
    assert len(node) == 3  # launcher, zygote, rank
    for pid in node:
        os.kill(pid, signal.SIGSTOP)
    first.finish()
    assert first.steps() == [1, 2, 3, 4]
    assert sorted(fault["rank"] for fault in first.events("fault")) == [1]
    (event,) = first.events("recovered")
    assert (event["ranks"], event["cause"]) == ([1], "node 1 silent")
    assert set(node) <= set(launch.processes())
    for pid in node:
        os.kill(pid, signal.SIGCONT)
    assert "this node was silent for 2.5 s and counts as lost" in second.finish(code=1)
    assert launch.processes() == []


def test_a_silent_node_comes_again_with_new_ranks(launch: Launch) -> None:
    first, second = start_nodes(launch, "0:2:begin:tell", "0:2:begin:wait", "0:3:begin:wait", ranks=1, extra=SOON)
    launch.hear(1)
    node = family(second.process.pid)
    for pid in node:
        os.kill(pid, signal.SIGSTOP)
    first.read_until("recovered from the loss of ranks [1]")
    for pid in node:
        os.kill(pid, signal.SIGCONT)
    first.read_until("ranks [2] are started on a node that has come")
    second.read_until("it comes again with new ranks")
    launch.go()
    first.finish()
    second.finish()
    assert first.steps() == [1, 2, 3, 4]


def test_a_stopped_agent_loses_its_rank_although_it_runs(launch: Launch) -> None:
    first, second = start_nodes(launch, "0:2:begin:tell", "0:2:begin:wait", ranks=1, extra=SOON)
    launch.hear(1)
    stop_child(second.process.pid)
    first.finish()
    (event,) = first.events("recovered")
    assert (event["ranks"], event["cause"]) == ([1], "node 1 silent")
    os.kill(second.process.pid, signal.SIGCONT)
    second.finish(code=1)
    assert "this node was silent for 2.5 s and counts as lost" in (second.run_dir / "logs" / "rank1.log").read_text()


def test_a_coordinator_that_stood_still_takes_nobody_for_lost(launch: Launch) -> None:
    """It missed twice the heartbeats that end a node, and a rank that was suspected before went on meanwhile."""
    first, second = start_nodes(launch, "0:2:begin:tell", "0:2:begin:wait", ranks=2, extra=SOON)
    launch.hear(1)
    os.kill(second.pid(3), signal.SIGSTOP)
    first.read_until("rank 3 is suspected")
    stop_child(first.process.pid)
    os.kill(second.pid(3), signal.SIGCONT)
    threading.Event().wait(5.0)  # the fault itself
    os.kill(first.process.pid, signal.SIGCONT)
    first.read_until("rank 3 runs again")
    launch.go()
    first.finish()
    second.finish()
    assert first.steps() == [1, 2, 3, 4]
    assert first.events("fault") == []


def test_a_node_without_a_coordinator_ends(launch: Launch) -> None:
    first, second = start_nodes(launch, "0:2:begin:tell", "0:2:begin:wait", ranks=1,
                                extra=("--elastic-heartbeat-timeout", "0.5", "--elastic-start-timeout", "20"))
    launch.hear(1)
    stop_child(first.process.pid)
    assert "nobody coordinates for 20 s" in second.finish(code=1)
    os.kill(first.process.pid, signal.SIGCONT)
    first.finish()
    assert [fault["rank"] for fault in first.events("fault")] == [1]


# ---- a real job ----------------------------------------------------------------------------


def test_a_stopped_rank_of_a_real_job(jobs: Jobs) -> None:
    grid = Grid(tp=1, pp=2, steps=9)
    reference = jobs.undisturbed(*grid.flags)
    job = jobs.start(*grid.flags)
    job.read_until("step   3/")
    os.kill(job.pid(5), signal.SIGSTOP)
    job.finish()
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0
    assert_exactly_once(job)
    (fault,) = job.events("fault")
    assert fault["rank"] == 5
    (event,) = job.events("recovered")
    assert (event["ranks"], event["cause"]) == ([5], "stopped")
