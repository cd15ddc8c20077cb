"""Sequence parallelism: the numbers of the job without it, and bit for bit its own whatever dies."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_elastic.adaptor.layers import sequence
from tests.jobs import Grid, Jobs, assert_same_training, inject

TP2_PP2 = Grid(tp=2, pp=2, steps=4)
MODERN = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --bf16 "
    "--recompute-granularity full --overlap-grad-reduce --overlap-param-gather"
)


@pytest.mark.parametrize(
    ("flags", "kills"),
    [
        ([], ["3@2:backward", "4@3:apply"]),
        pytest.param(MODERN.split(), ["6@3:grad_sync"]),
    ],
    ids=["usual", "modern"],
)
def test_killed(jobs: Jobs, flags: list[str], kills: list[str]) -> None:
    """Dropout is on: each part of the sequence draws masks of its own, the same ones in every layout."""
    flags = [*TP2_PP2.flags, "--sequence-parallel", *flags]
    reference = jobs.undisturbed(*flags)
    job = jobs.run(*flags, *inject(*kills))
    assert_same_training(job, reference, [int(kill[0]) for kill in kills])


def test_the_losses_are_those_of_the_job_without(jobs: Jobs) -> None:
    flags = [*TP2_PP2.flags, "--attention-dropout", "0", "--hidden-dropout", "0"]
    whole, parts = (job.metrics() for job in (jobs.run(*flags), jobs.run(*flags, "--sequence-parallel")))
    for step, line in whole.items():
        for what in ("loss", "grad_norm"):
            assert parts[step][what] == pytest.approx(line[what], rel=1e-5), (step, what)
    assert parts[1]["grad_norm_hex"] != whole[1]["grad_norm_hex"]  # it is not the same computation


def test_parts_of_gradients() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, qk_layernorm=True)
    norm, marked = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    marked.sequence_parallel = True  # type: ignore[attr-defined]
    attention = "decoder.layers.0.self_attention"
    names = (f"{attention}.q_layernorm.weight", f"{attention}.k_layernorm.bias", f"{attention}.linear_proj.bias")
    assert [sequence.is_partial(name, norm, config) for name in names] == [True, True, False]
    assert not sequence.is_partial(names[2], marked, config)
    config.sequence_parallel = True
    assert sequence.is_partial(names[2], marked, config)
