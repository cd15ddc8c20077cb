"""Hosts that are lost, whoever coordinates included: real jobs in network namespaces; bits do not differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import namespaces
from tests.jobs import Jobs
from tests.lost_hosts import COORDINATES, EVEN, FLAGS, FOLLOW, LED, SEATED, etcd, lost_hosts
from tests.namespaces import Hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not()),
]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with namespaces.hosts() as made:
        yield made


def test_the_first_host_is_lost_and_its_successor(jobs: Jobs, hosts: Hosts) -> None:
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
                node.finish()
        for loss in job.losses(*killed):
            print("measured:", loss)
    job.assert_same(jobs.undisturbed(*FLAGS, ranks=6))


def test_etcd_is_lost_for_a_while_and_two_hosts(jobs: Jobs, hosts: Hosts, tmp_path: Path) -> None:
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
                last.finish()
            assert first in job.nodes
            for loss in job.losses(*killed):
                print("measured:", loss)
    job.assert_same(jobs.undisturbed(*FLAGS, ranks=6))
