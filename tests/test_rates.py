"""RatesByStep: learning rates as a function of the step and of what was left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from gpt_arguments import parse_args

from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler
from megatron_elastic.adaptor.training.rates import RatesByStep
from megatron_elastic.plan.ramp import Ramp

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1.0 --lr-decay-style linear --train-samples 80 --lr-decay-samples 80 --data-path"
)


@pytest.mark.parametrize(("ramp", "sizes"), [("", [8] * 5), ("--rampup-batch-size 4 4 16", [4, 4, 4, 4, 8])])
def test_samples_that_are_left_out_do_not_count(ramp: str, sizes: list[int], tmp_path: Path) -> None:
    for name in ("data.bin", "data.idx"):
        (tmp_path / name).touch()
    (tmp_path / "data.json").write_text(
        '{"vocab_size": 1000, "eod": 0, "documents": 1, "tokens": 1, "dtype": "uint16"}'
    )
    args = parse_args([*FLAGS.split(), str(tmp_path), *ramp.split()])
    rates = RatesByStep(
        args, partial(build_scheduler, args), ParameterGroups(build_optimizer_config(args)), Ramp.of(args)
    )
    for step in range(1, 6):
        for left_out in (0, 4, 8):
            if (samples := sum(sizes[: step - 1]) - left_out) >= 0:
                assert rates.at(step, left_out)[0].lr == pytest.approx(1 - samples / 80)
