"""Work: what of a step outlives layouts."""

from __future__ import annotations

import pytest
import torch

from megatron_elastic.cluster.messages import Kept
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.work import Work


def work(log_limit: float) -> Work:
    units, stages = gpt_units(2, 2, tied=False, positions=False)
    layout = Layout.grid(tp=1, pp=2, dp=1, stage_units=stages, units=units, num_grains=4, num_slices=2, replicas=0)
    return Work(1, layout, layout.num_grains, log_limit)


def test_what_is_not_kept_leaves_the_log() -> None:
    of = work(log_limit=64)
    for grain in (0, 1):
        of.live[grain, 0] = (None, None)
        of.log(Op("forward", grain), torch.full((8,), grain, dtype=torch.float32))
    of.keep(Kept(added=[], live=[1], half=[], leader=0))
    with pytest.raises(KeyError):
        of.logged(Op("forward", 0))
    assert of.logged(Op("forward", 1)).tolist() == [1.0] * 8
    of.log(Op("forward", 2), torch.zeros(8))
    assert of.progress() is not None, "what was forgotten makes room"
    of.log(Op("forward", 3), torch.zeros(8))
    assert of.progress() is None
    with pytest.raises(KeyError):
        of.logged(Op("forward", 1))
