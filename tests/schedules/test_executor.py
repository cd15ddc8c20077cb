"""The executor between processes: activations of whole grains and of parts, and losses of grains that are shared."""

from __future__ import annotations

import pytest
import torch

from megatron_elastic.comm.group import Group
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.layout import Layout, Part, gpt_units
from megatron_elastic.pipeline.executor import Executor
from megatron_elastic.pipeline.meter import Meter
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.route import usual
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.pipeline.work import Work
from megatron_elastic.plan import everything, lose
from tests import world
from tests.world import Peer

pytestmark = pytest.mark.job

SAMPLES, SEQUENCE, HIDDEN = 4, 3, 5


class Multiply:
    """A stage of one weight. The last one's loss is a mean over tokens, of which samples have different numbers."""

    def __init__(self, first: bool, last: bool) -> None:
        self.weight = torch.tensor(1.5 if first else 0.5, requires_grad=True, dtype=torch.float64)
        self.seen: list[Part] = []
        self.losses: dict[int, tuple[float, float]] = {}
        self._due: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._first = first
        self._last = last

    def forward(self, op: Op, part: Part, received: torch.Tensor | None) -> torch.Tensor:
        """Of samples that are all different, to see that each arrives in its place."""
        self.seen.append(part)
        own = [inputs(part.grain, sample) for sample in range(part.start, part.stop)]
        data = torch.stack([values for values, _ in own], dim=1)
        assert (received is None) == self._first
        hidden = data if received is None else received
        assert hidden.shape == data.shape
        if not self._last:
            return hidden * self.weight
        assert torch.equal(hidden.detach(), data * 1.5)
        mask = torch.stack([mask for _, mask in own], dim=1)
        total = ((hidden * self.weight) ** 2 * mask).sum()
        self.losses[part.grain] = float(total), float(mask.sum())
        return total / mask.sum().clamp(min=1)

    def tokens(self, grain: int) -> float:
        """Those that are not masked."""
        return self.losses[grain][1]

    def backward(
        self, op: Op, part: Part, received: torch.Tensor | None, output: torch.Tensor, grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """As Megatron does it; or without the weight."""
        if op.kind == "backward":
            torch.autograd.backward(output, grad)
            return None if received is None else received.grad
        self._due[op.grain] = output, grad
        return None if received is None else torch.autograd.grad(output, received, grad, retain_graph=True)[0]

    def backward_weight(self, op: Op) -> None:
        """The weight."""
        output, grad = self._due.pop(op.grain)
        torch.autograd.backward(output, grad, inputs=[self.weight])


def inputs(grain: int, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and mask of a sample. One grain has no token that counts at all, one has some in its last sample only."""
    generator = torch.Generator().manual_seed(100 * grain + sample)
    values = torch.randn(SEQUENCE, HIDDEN, generator=generator, dtype=torch.float64)
    counting = 0 if grain == 2 or (grain == 1 and sample < 3) else 1 + (grain + 7 * sample) % (SEQUENCE * HIDDEN)
    mask = (torch.arange(SEQUENCE * HIDDEN) < counting).view(SEQUENCE, HIDDEN).double()
    return values, mask


def expected(grains: int) -> tuple[float, float, float]:
    """Gradients of both weights, summed over the grains' mean losses, and the sum of these."""
    weights = torch.tensor([1.5, 0.5], dtype=torch.float64, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for grain in range(grains):
        values, masks = (torch.stack(parts) for parts in zip(*(inputs(grain, s) for s in range(SAMPLES)), strict=True))
        total = total + ((values * weights[0] * weights[1]) ** 2 * masks).sum() / masks.sum().clamp(min=1)
    total.backward()
    assert weights.grad is not None
    return (*weights.grad.tolist(), total.item())


@pytest.mark.parametrize("schedule", ["1f1b", "split"])
@pytest.mark.parametrize("lost", [(), (1,), (4,), (0, 5), (0, 1, 5)], ids=str)
def test_cut_grains_give_what_whole_ones_do(lost: tuple[int, ...], schedule: str) -> None:
    """Stages may cut grains at different places; in the last one samples of a grain count by their tokens."""
    units, stage_units = gpt_units(2, 2, True, False)
    layout = Layout.grid(
        tp=1, pp=2, dp=3, stage_units=stage_units, units=units, num_grains=3, num_slices=3, replicas=1, samples=SAMPLES
    )
    for rank in lost:
        layout = lose(layout, [rank], everything(layout), layout.epoch + 1)

    def body(peer: Peer) -> None:
        if peer.rank in layout.ranks:
            peer.transport.advance(layout.epoch, ())
            stage = layout.stage_of(peer.rank)
            model = Multiply(stage == 0, stage == 1)
            executor = Executor(
                layout, peer.transport, Hooks(peer.rank, (), print, print), (SEQUENCE, SAMPLES, HIDDEN), torch.float64,
                Meter({}),
            )  # fmt: skip
            legs = usual(layout, peer.rank, for_cell(schedule, layout, peer.rank))
            executor.run(legs, model, Work(1, layout, layout.num_grains, log_limit=0))
            assert sorted(model.seen) == sorted(layout.part(peer.rank, g) for g in layout.cell_of(peer.rank).share)
            boundary = executor.measure_boundary()
            assert boundary is None if stage == 1 else boundary is not None and boundary > 0
            grad = 0.0 if model.weight.grad is None else float(model.weight.grad)
            sums = torch.zeros(2, dtype=torch.float64)
            sums[stage] = grad
            group = Group(peer.transport, 1, layout.ranks)
            peer.transport.run(group.all_reduce(sums, torch.Tensor.add_))
            first, second, _ = expected(layout.num_grains)
            assert sums.tolist() == pytest.approx([first, second], rel=1e-12)
            model.losses.clear()
            executor.run_forward(legs, model)
            totals = torch.zeros(layout.num_grains, 2, dtype=torch.float64)
            for grain, loss in model.losses.items():
                totals[grain] = torch.tensor(loss, dtype=torch.float64)
            peer.transport.run(group.all_reduce(totals, torch.Tensor.add_))
            means = totals[:, 0] / totals[:, 1].clamp(min=1)
            assert float(means.sum()) == pytest.approx(expected(layout.num_grains)[2], rel=1e-12)
        peer.leave()

    world.run(body, size=6)
