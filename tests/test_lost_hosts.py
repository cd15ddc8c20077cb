"""Hosts that are lost, whoever coordinates included: real jobs in network namespaces; bits do not differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import namespaces
import pytest
from namespaces import Hosts

from tests.jobs import Jobs
from tests.lost_hosts import COORDINATES, EVEN, FLAGS, FOLLOW, LED, SEATED, etcd, lost_hosts

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
    """Nobody starts anything: a host without a cable for six seconds is back soon, and so is who coordinated."""
    steps = ("--train-iters", "500")
    with lost_hosts(jobs, hosts, *steps) as job:
        first = job.until(LED)
        job.until(EVEN.format(6))
        mended = []
        for node, texts in ((job.nodes[2], ()), (first, (COORDINATES,))):
            mended.append(job.cut_off(node, 6.0))
            job.until(*texts, FOLLOW, EVEN.format(6))
        for node in job.nodes:
            job.finish(node)
        for since in mended:
            measured(f"back {job.back_after(since):.2f} s after the link")
            assert job.back_after(since) < 5.0
    job.assert_same(jobs.undisturbed(*FLAGS, *steps, ranks=6))


@pytest.mark.parametrize(("nodes", "tp", "pp"), LAYOUTS, ids=lambda value: str(value))
def test_a_host_that_is_cut_off_comes_again_in_other_layouts(
    jobs: Jobs, hosts: Hosts, nodes: int, tp: int, pp: int, measured: Measured
) -> None:
    flags = ("--train-iters", "300", "--tensor-model-parallel-size", str(tp),
             "--pipeline-model-parallel-size", str(pp), "--micro-batch-size", "1")  # fmt: skip
    with lost_hosts(jobs, hosts, *flags, nodes=nodes) as job:
        job.until("step    40/300")
        since = job.cut_off(job.nodes[-1], 6.0)
        job.until(FOLLOW, EVEN.format(2 * nodes))
        for node in job.nodes:
            job.finish(node)
        measured(f"back {job.back_after(since):.2f} s after the link")
        assert job.back_after(since) < 5.0
    job.assert_same(jobs.undisturbed(*FLAGS, *flags, ranks=2 * nodes))


def test_etcd_is_lost_for_a_while_and_two_hosts(jobs: Jobs, hosts: Hosts, tmp_path: Path,
                                                 measured: Measured) -> None:
    """Training does not need etcd. Of three hosts one is enough, one after the other."""
    place = hosts.add()
    with etcd(place, tmp_path) as server:
        with lost_hosts(jobs, hosts, "--elastic-store", f"etcd://{place.address}:2379") as job:
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
    job.assert_same(jobs.undisturbed(*FLAGS, ranks=6))
