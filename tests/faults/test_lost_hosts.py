"""Hosts that are lost, whoever coordinates included: real jobs in network namespaces; bits do not differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import namespaces
import pytest
from namespaces import Hosts

from megatron_elastic.observe.tracing.path import graph_of
from megatron_elastic.observe.tracing.reading import Traces, answer
from tests.faults.lost_hosts import COORDINATES, EVEN, FLAGS, FOLLOW, LED, LOST, SEATED, etcd, lost_hosts
from tests.jobs import Jobs

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not()),
]


Measured = Callable[[object], None]

LAYOUTS = [(2, 1, 2), (2, 2, 1), (3, 1, 1)]
"""Hosts of two ranks each, tensor-parallel and pipeline-parallel size."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with namespaces.hosts() as made:
        yield made


def test_the_first_host_is_lost_and_its_successor(jobs: Jobs, hosts: Hosts, measured: Measured) -> None:
    """A new host comes in between, and its ranks catch up when the second one is lost."""
    with lost_hosts(jobs, hosts) as job:
        first = job.until(LED)
        job.until(EVEN.format(6))
        killed = [first.kill()]
        second = job.until(COORDINATES)
        job.until(EVEN.format(4))
        job.come()
        job.until(FOLLOW, SEATED)  # before that the store could not lose another member
        killed.append(second.kill())
        for node in job.nodes:
            if node not in (first, second):
                job.finish(node)
        for loss in job.losses(*killed):
            measured(loss)
    job.assert_same(jobs.undisturbed(*FLAGS, ranks=6))


def test_hosts_that_are_cut_off_come_again(jobs: Jobs, hosts: Hosts, measured: Measured) -> None:
    """Nobody starts anything: a host whose cable is out until it is lost comes back, and so does who coordinated."""
    steps = ("--train-iters", "500")
    with lost_hosts(jobs, hosts, *steps) as job:
        first = job.until(LED)
        job.until(EVEN.format(6))
        mended = []
        for node, texts in ((job.nodes[2], (LOST,)), (first, (COORDINATES, LOST))):
            mended.append(job.cut_off(node, *texts))
            job.until(FOLLOW, EVEN.format(6))
        for node in job.nodes:
            job.finish(node)
        for since in mended:
            measured(f"back {job.back_after(since):.2f} s after the link")
    job.assert_same(jobs.undisturbed(*FLAGS, *steps, ranks=6))


def test_a_trace_of_hosts_with_clocks_of_their_own(jobs: Jobs, hosts: Hosts, measured: Measured) -> None:
    """They have one name and one time of day, and the second one's monotonic clock is a day ahead: in the trace nothing
    arrives before it was sent, and clocks are as far apart as they were made, but for half a round trip.
    """
    ahead = 86_400
    with lost_hosts(jobs, hosts, "--train-iters", "12", "--elastic-trace", "4-9", nodes=2, clocks=(0, ahead)) as job:
        for node in job.nodes:
            job.finish(node)
    traces = Traces.read([job.run_dir])
    assert len({trace.origin.host for trace in traces.ranks.values()}) == 1
    shifts = [trace.commits[0].at - _first_commit(job.run_dir, rank) for rank, trace in sorted(traces.ranks.items())]
    assert (shifts[0], shifts[2]) == (shifts[1], shifts[3])
    error = abs(shifts[0] - shifts[2] - ahead * 10**9)
    senders = traces.senders()
    took: dict[tuple[bool, bool], list[int]] = {}
    """Of messages in votes, from host to host."""
    for trace in traces.ranks.values():
        for piece in trace.pieces():
            for wait in trace.waits:
                if piece.phase.name != "vote" or not piece.begun <= wait.begun <= piece.ended:
                    continue
                for sent in (answer(senders, trace.rank, tag, wait.ended) for tag in wait.tags):
                    assert sent is not None, "a message of a vote arrives before it is sent"
                    took.setdefault((sent[0] > 1, trace.rank > 1), []).append(wait.ended - sent[1].at)
    there, back = min(took[False, True]), min(took[True, False])
    measured(f"wrong by {error / 1e3:.1f} us; messages {there / 1e3:.1f} us and {back / 1e3:.1f} us")
    assert error <= max(there, back)
    elapsed = traces.elapsed()
    assert list(elapsed) == [4, 5, 6, 7, 8, 9] and error < min(elapsed.values()) / 20
    assert sum(link.took for link in graph_of(traces, 6).links) == elapsed[6]


def _first_commit(run_dir: Path, rank: int) -> int:
    """When a rank committed the first traced step, by its host's clock."""
    lines = map(json.loads, (run_dir / "traces" / f"rank{rank}.jsonl").read_text().splitlines())
    return next(int(line[1]) for line in lines if line[0] == "commit")


@pytest.mark.parametrize(("nodes", "tp", "pp"), LAYOUTS, ids=lambda value: str(value))
def test_a_host_that_is_cut_off_comes_again_in_other_layouts(
    jobs: Jobs, hosts: Hosts, nodes: int, tp: int, pp: int, measured: Measured
) -> None:
    flags = ("--train-iters", "200", "--tensor-model-parallel-size", str(tp),
             "--pipeline-model-parallel-size", str(pp), "--micro-batch-size", "1")  # fmt: skip
    with lost_hosts(jobs, hosts, *flags, nodes=nodes) as job:
        job.until("step    40/200")
        since = job.cut_off(job.nodes[-1], LOST)
        job.until(FOLLOW, EVEN.format(2 * nodes))
        for node in job.nodes:
            job.finish(node)
        measured(f"back {job.back_after(since):.2f} s after the link")
    job.assert_same(jobs.undisturbed(*FLAGS, *flags, ranks=2 * nodes))


def test_etcd_is_lost_for_a_while_and_two_hosts(jobs: Jobs, hosts: Hosts, tmp_path: Path,
                                                 measured: Measured) -> None:
    """Training does not need etcd. Of three hosts one is enough, one after the other."""
    place = hosts.add()
    steps = ("--train-iters", "400")
    with etcd(place, tmp_path) as server:
        with lost_hosts(jobs, hosts, *steps, "--elastic-store", f"etcd://{place.address}:2379") as job:
            first = job.until(LED)
            job.until(EVEN.format(6))
            server.kill()
            server.wait()
            job.until("this node coordinates no longer")
            with etcd(place, tmp_path):
                second = job.until(COORDINATES)
                job.until("recovered from")
                killed = [second.kill()]
                third = job.until(COORDINATES)
                job.until(EVEN.format(4))
                killed.append(third.kill())
                (last,) = (node for node in job.nodes if node not in (second, third))
                job.finish(last)
            assert first in job.nodes
            for loss in job.losses(*killed):
                measured(loss)
    job.assert_same(jobs.undisturbed(*FLAGS, *steps, ranks=6))
