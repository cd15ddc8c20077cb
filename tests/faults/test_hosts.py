"""Hosts: a job goes on when a host goes, though all ranks of a stage were there."""

from __future__ import annotations

import os
import signal

from megatron_elastic import cli
from megatron_elastic.cluster import wire
from tests.jobs import Grid, Jobs
from tests.launches import TOKEN, free_port

GRID = Grid(tp=1, pp=2, steps=150, ranks=6)
FLAGS = (*GRID.flags, "--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "12",
         "--elastic-slices", "3")  # fmt: skip


def test_a_stage_outlives_its_host(jobs: Jobs) -> None:
    """The first replicas are made of the stage's own weights; then copies go to the other stage's host.

    From there first comes what a rank of the stage owned, and then what all of them did.
    """
    reference = jobs.undisturbed(*FLAGS, ranks=6)
    port, env = str(free_port()), {wire.TOKEN_VARIABLE: TOKEN}
    launcher = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--node-rank")
    first, second = (jobs.start(*FLAGS, ranks=3, launcher=(*launcher, str(node)), env=env) for node in (0, 1))
    try:
        first.read_until("slices and grains are even over 6 ranks")
        begun, apart = first.layouts()[0], first.layouts()[-1]
        assert begun.hosts == ((0, 1, 2), (3, 4, 5))
        for layout, hosts in ((begun, 1), (apart, 2)):
            for owners, replicas in zip(layout.owners, layout.replicas, strict=True):
                for owner, copies in zip(owners, replicas, strict=True):
                    assert len({layout.host_of(at) for at in (owner, *copies)}) == hosts
        os.kill(second.pid(4), signal.SIGKILL)
        first.read_until("slices and grains are even over 5 ranks")
        second.process.kill()
        first.read_until("lost ranks [3, 5] (node 1 lost)")
        first.finish()
    finally:
        for node in (first, second):
            node.process.kill()
            node.process.communicate()
    assert cli.main(["compare", str(first.run_dir), str(reference.run_dir)]) == 0, first.output
    recovered = [(event["ranks"], event["decision"]) for event in first.events("recovered")]
    assert [ranks for ranks, _ in recovered] == [[4], [3, 5]]
    assert all(decision != "reload" for _, decision in recovered), "nothing is read from a checkpoint"
    assert (first.layouts()[-1].ranks, first.layouts()[-1].pipeline_size) == ((0, 1, 2), 1)
