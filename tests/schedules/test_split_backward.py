"""Split backward: the numbers of 1F1B bit for bit, whatever else is switched on and whoever dies."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

from megatron_elastic.adaptor.layers import linear
from megatron_elastic.pipeline.program import check
from megatron_elastic.pipeline.schedule import for_cell, one_forward_one_backward, split_backward
from tests.jobs import MODERN, Grid, Jobs, assert_same_training, inject

SPLIT = ("--elastic-schedule", "split")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
PP4 = Grid(tp=1, pp=4, steps=4)
TP2_PP2 = Grid(tp=2, pp=2, steps=4)


def test_killed(jobs: Jobs) -> None:
    """In each half of a backward, in stages that put off different numbers of them."""
    job = jobs.run(*PP4.flags, *SPLIT, *inject("5@2:backward", "2@3:backward_weight"))
    assert_same_training(job, jobs.undisturbed(*PP4.flags), [2, 5])
    layouts = job.layouts()
    for layout in layouts:
        program = split_backward(one_forward_one_backward(layout), layout)
        check(program, layout)
        for leader, ops in program.cells.items():
            assert for_cell("split", layout, leader) == ops


@pytest.mark.parametrize(
    ("grid", "flags", "extra"),
    [
        (PP4, "", OVERLAP),
        pytest.param(TP2_PP2, "", ("--recompute-granularity", "full")),
        pytest.param(TP2_PP2, MODERN, (*OVERLAP, "--recompute-granularity", "selective")),
    ],
    ids=["overlap", "recompute", "modern"],
)
def test_together_with(jobs: Jobs, grid: Grid, flags: str, extra: tuple[str, ...]) -> None:
    reference = jobs.undisturbed(*grid.flags, *flags.split())
    job = jobs.run(*grid.flags, *flags.split(), *SPLIT, *extra, *inject("7@3:backward_weight"))
    assert_same_training(job, reference, [7])


@pytest.mark.parametrize("shape", [(6, 2, 16), (12, 16)], ids=["sequence", "flat"])
def test_a_linear_layer_in_two_parts(shape: tuple[int, ...]) -> None:
    linear.install()
    generator = torch.Generator().manual_seed(1)
    given, weight, bias = (
        torch.randn(size, generator=generator, requires_grad=True) for size in (shape, (24, 16), (24,))
    )
    grad = torch.randn(*shape[:-1], 24, generator=generator)

    def backward() -> None:
        linear_with_grad_accumulation_and_async_allreduce(given, weight, bias, False, False, False).backward(grad)

    def same(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    backward()
    whole = [leaf.grad for leaf in (given, weight, bias)]
    given.grad = weight.grad = bias.grad = None
    # As in the pass whose activations are counted: what is saved is unpacked as another tensor.
    with linear.put_off() as due, torch.autograd.graph.saved_tensors_hooks(same, same):
        backward()
    assert weight.grad is None
    for gradient in due:
        gradient.add()
    for leaf, before in zip((given, weight, bias), whole, strict=True):
        assert leaf.grad is not None and before is not None and torch.equal(leaf.grad, before)
