"""Optimizers over slices: their steps equal torch's, and their trajectories Megatron's own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_elastic.state.optimizer import Adam, Optimizer, Rates, Sgd

pytestmark = pytest.mark.job

ROOT = Path(__file__).parents[2]
STEPS = 8


def _torch(optimizer: Optimizer, weights: torch.Tensor) -> torch.optim.Optimizer:
    match optimizer:
        case Adam():
            cls = torch.optim.AdamW if optimizer.decoupled else torch.optim.Adam
            return cls([weights], betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.eps)
        case Sgd():
            return torch.optim.SGD([weights], momentum=optimizer.momentum)
    raise AssertionError


@pytest.mark.parametrize(
    "optimizer",
    [Adam(0.9, 0.95, 1e-8), Adam(0.8, 0.999, 1e-6, decoupled=False), Sgd(0.9), Sgd(0.0)],
    ids=["adamw", "adam", "momentum", "sgd"],
)
def test_steps_equal_torchs(optimizer: Optimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(1000, generator=generator)
    reference = weights.clone().requires_grad_()
    expected = _torch(optimizer, reference)
    moments = [torch.zeros_like(weights) for _ in optimizer.moments]
    for step in range(1, STEPS + 1):
        grad = torch.randn(1000, generator=generator)
        reference.grad = grad.clone()
        for group in expected.param_groups:
            group.update(lr=0.01 * step, weight_decay=0.1)
        expected.step()
        optimizer.update(step, weights, grad, moments, Rates(0.01 * step, 0.1))
    torch.testing.assert_close(weights, reference.detach(), rtol=1e-6, atol=1e-6)
    for name, moment in zip(optimizer.moments, moments, strict=True):
        torch.testing.assert_close(moment, expected.state[reference][name], rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that passes for data: the program draws its own tokens."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("data.bin", "data.idx"):
        (folder / name).touch()
    (folder / "data.json").write_text('{"vocab_size": 100, "eod": 0, "documents": 1, "tokens": 1, "dtype": "uint16"}')
    return folder


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        ("--clip-grad 0.05 --lr-decay-style cosine --min-lr 1e-4 --lr-warmup-iters 3 --lr-warmup-init 1e-5", 1e-3),
        ("--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.5 --decoupled-lr 2e-3 "
         "--decoupled-min-lr 1e-3 --lr-decay-style linear --untie-embeddings-and-output-weights", 1e-3),
        ("--optimizer sgd --no-use-distributed-optimizer --lr 0.1 --weight-decay 0.1", 1e-3),
        # Some weights are rounded the other way, which is as far as they move in some steps.
        ("--bf16", 0.05),
        # And so are gradients here, which Megatron on a CPU has in fp32 only.
        ("--bf16 --main-grads-dtype bf16 --elastic", 0.05),
    ],
    ids=["adam", "groups", "sgd", "bf16", "bf16-gradients"],
)  # fmt: skip
def test_trajectories_equal_megatrons(data: Path, flags: str, tolerance: float) -> None:
    """Whole training steps of a GPT from the same weights: same gradient norms, and weights that move alike."""
    model = (
        f"--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
        f"--global-batch-size 8 --train-iters {STEPS} --lr 1e-3 --data-path {data} --attention-dropout 0 "
        f"--hidden-dropout 0 --eval-iters 0 --adam-eps 1e-4"
    )
    command = [sys.executable, "-m", "tests.megatron_programs.optimizers", *f"{model} {flags}".split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == STEPS
    for step, (weights, norm) in enumerate(report, start=1):
        assert math.isfinite(weights)
        assert weights < tolerance, f"step {step}: weights are {weights:.2g} of the way apart"
        assert norm < (1e-2 if "bf16" in flags else 1e-4), f"step {step}: norms differ by {norm:.2g}"


def test_groups_follow_megatrons_overrides() -> None:
    """The index is made of the overrides that match, so it means the same on every rank."""
    from megatron.core.optimizer import OptimizerConfig

    from megatron_elastic.adaptor.model.optimizer import ParameterGroups, make_optimizer

    groups = ParameterGroups(OptimizerConfig(lr=1.0, min_lr=0.1, decoupled_lr=2.0, decoupled_min_lr=0.5))
    matrix, vector = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    embedding = torch.nn.Parameter(torch.zeros(2, 2))
    embedding.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    assert [groups.index("a.weight", matrix), groups.index("a.weight", vector), groups.index("a.bias", matrix),
            groups.index("e.weight", embedding)] == [0, 1, 1, 2]  # fmt: skip
    rows = groups.for_scheduler()
    assert [(row["wd_mult"], row["max_lr"], row["min_lr"]) for row in rows] == [
        (1.0, 1.0, 0.1), (0.0, 1.0, 0.1), (1.0, 2.0, 0.5), (0.0, 2.0, 0.5),
    ]  # fmt: skip
    assert make_optimizer(OptimizerConfig(optimizer="sgd", sgd_momentum=0.5)) == Sgd(0.5)
