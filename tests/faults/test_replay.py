"""Replay of whole states: how far ranks go back, and jobs that are killed while replicas are behind."""

from __future__ import annotations

import json

import pytest

from megatron_elastic import cli
from megatron_elastic.cluster.messages import VoteResult
from megatron_elastic.cluster.protocol.faults.decision import newest_complete
from megatron_elastic.cluster.protocol.job import Decided
from tests.jobs import Jobs, inject

PARTS = [(0, 0, 0), (0, 1, 0)]
A, B = PARTS
VOTE = VoteResult(step=5, loss=1.0, grad_norm=1.0, lr=1.0, consumed_samples=1, tokens=1)
FORWARD, BACK = Decided("forward", 5, VOTE), Decided("back", 5, None)


@pytest.mark.parametrize(
    ("decision", "versions", "expected"),
    [
        # The voted step can be finished: both owners live, or the new state of the dead one's slice has arrived.
        (FORWARD, {0: {5: [A], 4: [A, B]}, 1: {5: [B], 4: [A, B]}}, (FORWARD, 5)),
        (FORWARD, {0: {5: [A, B], 4: [A, B]}}, (FORWARD, 5)),
        # It cannot: the owner of B died, and its new state with it.
        (FORWARD, {0: {5: [A], 4: [A, B]}}, (BACK, 4)),
        # Not voted, and all have the step before; or somebody died before that had arrived.
        (BACK, {0: {4: [A, B], 3: [A, B]}}, (BACK, 4)),
        (BACK, {0: {5: [A], 4: [A], 3: [A, B]}}, (Decided("back", 4, None), 3)),
        # Nothing helps: what is missing is for the plan to tell.
        (BACK, {0: {4: [A], 3: [A]}}, (BACK, 4)),
    ],
)  # fmt: skip
def test_how_far_back(
    decision: Decided, versions: dict[int, dict[int, list[tuple[int, int, int]]]], expected: tuple[Decided, int]
) -> None:
    assert newest_complete(decision, PARTS, versions) == expected


FLAGS = ("--train-iters", "10", "--elastic-slices", "4", "--pipeline-model-parallel-size", "2",
         "--elastic-replay", "state")  # fmt: skip


@pytest.mark.parametrize(
    "kills",
    [
        ("1@2:data", "6@4:backward", "3@6:grad_sync"),
        ("5@2:replay", "2@4:vote", "7@6:apply"),
        ("0@2:param_sync", "6@4:commit", "3@7:forward"),
        # While the others go back.
        ("3@4:apply", "1@4:promote"),
        ("2@3:apply", "4@3:edit"),
        ("2@3:param_sync", "0@4:replicate", "5@5:resume"),
    ],
    ids=" ".join,
)
def test_kills_do_not_show_while_replicas_are_behind(jobs: Jobs, kills: tuple[str, ...]) -> None:
    reference = jobs.undisturbed(*FLAGS)
    job = jobs.run(*FLAGS, *inject(*kills))
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    behind = {event["step"] for event in job.events("behind")}
    for kill in kills:
        if kill.endswith(":apply"):
            assert int(kill.partition("@")[2].partition(":")[0]) in behind, "its gradients died with it"


def test_replays_make_the_same_steps(jobs: Jobs) -> None:
    state, gradient = jobs.undisturbed(*FLAGS), jobs.run(*FLAGS, "--elastic-replay", "gradient")
    assert cli.main(["compare", str(state.run_dir), str(gradient.run_dir)]) == 0


def test_ranks_join_and_memory_is_verified_while_states_are_replayed(jobs: Jobs) -> None:
    flags = (*FLAGS, "--train-iters", "80", "--elastic-verify-every", "2")
    reference = jobs.undisturbed(*flags)
    job = jobs.run(*flags, "--elastic-respawn", *inject("2@3:apply"),
                   "--elastic-inject", "flip:rank=4,step=6,at=data,what=replica")  # fmt: skip
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert job.events("damaged"), json.dumps(job.events("injected"))
    assert len(job.layouts()[-1].ranks) == 8, "the rank that was started in its place takes part"
