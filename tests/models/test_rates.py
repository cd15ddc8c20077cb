"""RatesByStep: learning rates as a function of the samples that were counted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpt_arguments import parse_args
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler
from megatron_elastic.adaptor.training.schedules.rates import RatesByStep
from megatron_elastic.config import UsageError

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --seq-length 32 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1.0 --lr-decay-style linear --train-samples 80 --lr-decay-samples 80 --data-path"
)
FROM_CHECKPOINT = "--use-checkpoint-opt_param-scheduler"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("data.bin", "data.idx"):
        (tmp_path / name).touch()
    (tmp_path / "data.json").write_text(
        '{"vocab_size": 1000, "eod": 0, "documents": 1, "tokens": 1, "dtype": "uint16"}'
    )
    return tmp_path


def rates_of(data: Path, flags: str = "") -> RatesByStep:
    args = parse_args([*FLAGS.split(), str(data), *flags.split()])
    return RatesByStep(args, partial(build_scheduler, args), ParameterGroups(build_optimizer_config(args)))


def test_rates_follow_from_samples(data: Path) -> None:
    rates = rates_of(data)
    for samples in (8, 0, 24, 4):
        assert rates.at(samples)[0].lr == pytest.approx(1 - samples / 80)


class MegatronsScheduler:
    """Megatron's own, as it goes on from a checkpoint: with the groups of parameters that are in it, and its values."""

    def __init__(self, saved: dict[str, Any]) -> None:
        groups = saved["optimizer"]["optimizer"]["param_groups"]
        self.groups = [{**group, "params": []} for group in groups]
        self.scheduler = OptimizerParamScheduler(
            SimpleNamespace(param_groups=self.groups), 0.0, 0.5, 0.25, 1, 7, "constant", 0.3, 0.3, 80, "constant",
            use_checkpoint_opt_param_scheduler=True, wsd_decay_steps=16, lr_wsd_decay_style="exponential",
        )  # fmt: skip
        self.scheduler.load_state_dict(saved["opt_param_scheduler"])

    def step(self) -> list[tuple[float, float]]:
        self.scheduler.step(8)
        return [(group["lr"], group["weight_decay"]) for group in self.groups]


SCHEDULES = {
    "linear": "--lr-warmup-samples 24 --min-lr 0.1",
    "cosine": "--lr-decay-style cosine --lr-decay-samples 60 --weight-decay 0.2",
    "root": "--lr-decay-style inverse-square-root --lr-warmup-samples 16",
    "decay that grows": "--start-weight-decay 0.01 --end-weight-decay 0.5 --weight-decay-incr-style cosine",
    "constant": "--lr-decay-style constant",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_from_a_checkpoint(data: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What flags say besides does not count, as in Megatron's own; and who comes later is told by those that know."""
    saved = rates_of(data, SCHEDULES[name]).state(updates=2, counted=16, apart=False)
    other = f"--lr 0.5 --min-lr 0.25 --lr-decay-samples 7 --weight-decay 0.3 {FROM_CHECKPOINT}"
    rates, late = rates_of(data, other), rates_of(data, other)
    rates.begin(saved["opt_param_scheduler"])
    told: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, _: told.append(tensor.clone()))
    rates.agree()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, _: tensor.copy_(tensor.max(told[0])))
    late.agree()
    megatrons = MegatronsScheduler(saved)
    for counted in range(24, 96, 8):
        expected = megatrons.step()
        for ours in (rates, late):
            assert [(rate.lr, rate.weight_decay) for rate in ours.at(counted)[:-1]] == expected
    assert rates.state(2, 16, apart=False) == late.state(2, 16, apart=False) == saved


def test_a_schedule_of_flags(data: Path) -> None:
    """Without that flag, and where there is nothing in the checkpoint or it does not count."""
    saved = rates_of(data, SCHEDULES["cosine"]).state(updates=2, counted=16, apart=False)["opt_param_scheduler"]
    for flags, found in (("", saved), (FROM_CHECKPOINT, None)):
        rates = rates_of(data, flags)
        rates.begin(found)
        assert rates.at(24)[0] == rates_of(data).at(24)[0]


def test_groups_with_a_rate_of_their_own_keep_it(data: Path) -> None:
    """It is the flags': the schedule in a checkpoint has none."""
    saved = rates_of(data, SCHEDULES["linear"]).state(updates=2, counted=16, apart=False)["opt_param_scheduler"]
    rates = rates_of(data, f"--lr 0.5 --decoupled-lr 2.0 {FROM_CHECKPOINT}")
    rates.begin(saved)
    assert [rate.lr for rate in rates.at(24)[:4]] == [1.0, 1.0, 2.0, 2.0]


def test_a_decay_that_the_checkpoint_does_not_tell(data: Path) -> None:
    saved = rates_of(data).state(updates=2, counted=16, apart=False)["opt_param_scheduler"]
    with pytest.raises(UsageError, match=rf"^{FROM_CHECKPOINT}: .* is WSD, .*: add --lr-wsd-decay-iters"):
        rates_of(data, FROM_CHECKPOINT).begin({**saved, "lr_decay_style": "WSD"})
