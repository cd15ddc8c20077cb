"""The job outlives any node, the first one and whoever coordinates included: real launchers that are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import TOKEN, Launch, Run, free_port, launches

STEPS = 6


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


def start(launch: Launch, *acts: str, nodes: int = 3, ranks: int = 1, extra: tuple[str, ...] = ()) -> list[Run]:
    """Launchers that share a run directory, the first node's first."""
    launch.env["MEGATRON_ELASTIC_TOKEN"] = TOKEN
    port = str(free_port())
    return [
        launch.start("member.py", "--elastic", *launch.member_flags(*acts, steps=STEPS), *extra,
                     flags=("--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(ranks),
                            "--master-addr", "127.0.0.1", "--master-port", port))
        for node in range(nodes)
    ]


def kill(run: Run) -> None:
    """SIGKILL the launcher; its zygote and its ranks die with it."""
    os.kill(run.process.pid, signal.SIGKILL)


def test_the_first_node_is_lost_and_another_coordinates(launch: Launch) -> None:
    acts = [f"{rank}:3:begin:{act}" for rank in (1, 2) for act in ("tell", "wait")]
    first, second, third = start(launch, *acts)
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
