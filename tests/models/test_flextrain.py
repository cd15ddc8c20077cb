"""A model as FlexTrain's small one: 15 layers, experts, contexts, two further predictions; killed at every point."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megatron_elastic.faults.injection import HOOK_POINTS
from tests.changes.test_scale import EVEN, ask, assert_same
from tests.faults.test_elastic import ELSEWHERE
from tests.jobs import Grid, Jobs, assert_same_training, inject

MODEL = (
    "--num-layers 15 --mtp-num-layers 2 --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 16 "
    "--moe-shared-expert-intermediate-size 16 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16"
)
SMALL = (
    *Grid(tp=1, pp=2, steps=4).flags, "--context-parallel-size", "2", "--expert-model-parallel-size", "2",
    "--micro-batch-size", "2", "--elastic-schedule", "split", "--overlap-grad-reduce", *MODEL.split(),
)  # fmt: skip

# A stage has two cells of two ranks; of each one may go.
KILLS = [
    ["0@2:data", "6@3:forward"],
    ["5@2:backward", "3@3:grad_sync"],
    ["4@2:replay", "2@3:vote"],
    ["1@2:apply", "7@3:param_sync"],
    ["4@2:commit"],
    ["4@2:vote", "0@2:interrupt"],
    ["5@2:vote", "2@2:edit"],
    ["1@2:param_sync", "5@2:report"],
    ["2@2:vote", "7@2:resume"],
    ["6@2:vote", "3@2:promote"],
    ["7@2:vote", "1@2:replicate"],
]


def test_every_hook_point_is_covered() -> None:
    assert {kill.partition(":")[2] for kills in KILLS for kill in kills} == set(HOOK_POINTS) - ELSEWHERE


@pytest.mark.parametrize("kills", KILLS, ids="+".join)
def test_killed(jobs: Jobs, kills: Sequence[str]) -> None:
    job = jobs.run(*SMALL, *inject(*kills))
    assert_same_training(job, jobs.undisturbed(*SMALL), [int(kill[0]) for kill in kills])


def test_stages_as_asked(jobs: Jobs) -> None:
    """Two, four, three, two; where a stage has one cell, nobody could be missing."""
    flags = (*SMALL, "--train-iters", "28")
    job = jobs.start(*flags)
    job.read_until(" 1/28")
    for stages in (4, 3, 2):
        assert ask(job, stages) == 0
        job.read_until(EVEN)
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*flags))
    sizes = [layout.pipeline_size for layout in layouts]
    assert sorted(set(sizes), key=sizes.index) == [2, 4, 3] and sizes[-1] == 2
