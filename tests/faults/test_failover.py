"""The job outlives any node, the first one and whoever coordinates included: real launchers that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import TOKEN, Launch, Run, family, free_port, launches
from tests.nursery import rest_of

STEPS = 6


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


def start(
    launch: Launch, *acts: str, nodes: int = 3, ranks: int = 1, shared: bool = True, host: str = "127.0.0.1"
) -> list[Run]:
    """Launchers, the first node's first, which share a run directory or have one each."""
    launch.env["MEGATRON_ELASTIC_TOKEN"] = TOKEN
    port = str(free_port())
    return [start_node(launch, node, nodes, port, *acts, ranks=ranks, shared=shared, host=host)
            for node in range(nodes)]


def start_node(
    launch: Launch, node: int, nodes: int, port: str, *acts: str, ranks: int = 1, shared: bool = True,
    host: str = "127.0.0.1",
) -> Run:  # fmt: skip
    """One launcher of a job that begins with ``nodes``."""
    return launch.start("member.py", "--elastic", *launch.member_flags(*acts, steps=STEPS),
                        flags=("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks),
                               "--master-addr", host, "--master-port", port),
                        name="run" if shared else f"node{node}")


def kill(run: Run) -> None:
    """SIGKILL the launcher; its zygote and its ranks die with it."""
    os.kill(run.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_first_node_is_lost_and_another_coordinates(launch: Launch, host: str) -> None:
    """The store and who takes over listen where the first node's address says."""
    acts = [f"{rank}:3:begin:{act}" for rank in (1, 2) for act in ("tell", "wait")]
    first, second, third = start(launch, *acts, host=host)
    first.read_until("another node takes over")
    launch.hear(2)
    kill(first)
    second.finish()
    third.finish()
    assert first.steps() == list(range(1, STEPS + 1))
    (took,) = first.events("took_over")
    (event,) = first.events("recovered")
    assert event["ranks"] == [0]
    assert event["epoch"] >= 1 and took["term"] == 2


def test_nodes_find_who_has_taken_over(launch: Launch) -> None:
    """Also the first one, started again by its own command, as whoever requeues it does: it begins no other job. Who
    comes when all is over need do nothing.
    """
    launch.env["MEGATRON_ELASTIC_TOKEN"] = TOKEN
    port, acts = str(free_port()), [f"1:{step}:begin:{act}" for step in (3, 4) for act in ("tell", "wait")]
    nodes = [start_node(launch, node, 3, port, *acts) for node in range(3)]
    nodes[0].read_until("another node takes over")
    launch.hear(1)
    kill(nodes[0])
    launch.hear(1)
    (heir,) = [node for node in nodes[1:] if b"coordinator" in Path(f"/proc/{node.process.pid}/cmdline").read_bytes()]
    for number in (0, 3):
        nodes.append(start_node(launch, number, 3, port, *acts))
        heir.read_until("on a node that has come")
    launch.go()
    for node in nodes[1:]:
        node.finish()
    assert "this node joins it" in nodes[3].output
    assert nodes[1].steps() == list(range(1, STEPS + 1))
    assert len(heir.events("took_over")) == 1
    assert [event["node"] for event in heir.events("spawned")] == [0, 3]
    late = start_node(launch, 4, 3, port, *acts)
    assert "has finished: there is nothing to join" in late.finish()


def test_who_coordinates_lets_another_at_sigterm(launch: Launch) -> None:
    """Also if all processes get it. Nobody is lost; ranks that could leave would (``test_drain``)."""
    acts = [f"{rank}:3:begin:{act}" for rank in (1, 2) for act in ("tell", "wait")]
    first, second, third = start(launch, *acts)
    first.read_until("another node takes over")
    launch.hear(2)
    for pid in reversed(family(first.process.pid)):
        os.kill(pid, signal.SIGTERM)
    first.read_until("this node coordinates no longer")
    for node in (first, second, third):
        node.finish()
    assert first.steps() == list(range(1, STEPS + 1))
    (took,) = first.events("took_over")
    assert took["term"] == 2
    assert not first.events("fault")


def test_sigterm_to_all_launchers_ends_the_job(launch: Launch) -> None:
    """Whoever coordinates then: nobody is left who could take over what the others do."""
    acts = [f"{rank}:3:begin:{act}" for rank in (1, 2) for act in ("tell", "wait")]
    nodes = start(launch, *acts)
    nodes[0].read_until("another node takes over")
    launch.hear(2)
    for node in nodes:
        os.kill(node.process.pid, signal.SIGTERM)
    for node in nodes:
        rest_of(node.process, 100.0)
        assert node.process.returncode in (143, 1), "interrupted, or told so by who was"
    assert len(nodes[0].events("failed")) == 1 and not nodes[0].events("finished")


def test_nodes_may_keep_their_own_records(launch: Launch) -> None:
    """Where nodes share no disk, who takes over writes on in its own run directory, from what is not on record."""
    acts = [f"{rank}:3:begin:{act}" for rank in (1, 2) for act in ("tell", "wait")]
    first, second, third = start(launch, *acts, shared=False)
    first.read_until("another node takes over")
    launch.hear(2)
    kill(first)
    second.finish()
    third.finish()
    heir = second if "coordinates from now on" in second.output else third
    assert first.steps() == [1, 2]
    assert heir.steps()[-1] == STEPS
    assert heir.steps() == list(range(heir.steps()[0], STEPS + 1))
    assert heir.steps()[0] <= 3
