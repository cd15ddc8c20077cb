"""RatesByStep: learning rates as a function of the samples that were counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from gpt_arguments import parse_args

from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler
from megatron_elastic.adaptor.training.rates import RatesByStep

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1.0 --lr-decay-style linear --train-samples 80 --lr-decay-samples 80 --data-path"
)


def test_rates_follow_from_samples(tmp_path: Path) -> None:
    for name in ("data.bin", "data.idx"):
        (tmp_path / name).touch()
    (tmp_path / "data.json").write_text(
        '{"vocab_size": 1000, "eod": 0, "documents": 1, "tokens": 1, "dtype": "uint16"}'
    )
    args = parse_args([*FLAGS.split(), str(tmp_path)])
    rates = RatesByStep(args, partial(build_scheduler, args), ParameterGroups(build_optimizer_config(args)))
    for samples in (8, 0, 24, 4):
        assert rates.at(samples)[0].lr == pytest.approx(1 - samples / 80)
