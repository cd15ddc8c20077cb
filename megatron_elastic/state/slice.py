"""SliceState: the optimizer's state of one slice, and how a step changes it.

Owner and replica run the same code on the same gradient, so their states stay equal bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron_elastic.state.optimizer import SIGNED, Optimizer, Update
from megatron_elastic.state.partition import Segment


class SliceState:
    """float32 master weights and the optimizer's moments of one slice, after ``step`` updates."""

    def __init__(self, master: torch.Tensor, optimizer: Optimizer) -> None:
        self.step = 0
        self.master = master
        self.moments = tuple(torch.zeros_like(master) for _ in optimizer.moments)
        self.grad: torch.Tensor | None = None
        """Reduced gradient of step ``self.step + 1``, once it is here."""
        self.previous: SliceState | None = None
        """The state of one step before, where that is kept."""
        self._optimizer = optimizer

    @classmethod
    def room(cls, size: int, optimizer: Optimizer, step: int) -> SliceState:
        """Room for a state of ``size`` elements. Memory is not touched: that would take long where training waits."""
        state = cls(torch.empty(0), optimizer)
        state.step, state.master = step, torch.empty(size)
        state.moments = tuple(torch.empty(size) for _ in optimizer.moments)
        return state

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that has to move when the slice moves."""
        return self.master, *self.moments

    def sum_of_squares(self, segments: Sequence[Segment]) -> float:
        """Sum of the squared gradient over the counted segments, in float64."""
        assert self.grad is not None
        return sum(
            float(self.grad[s.start : s.end].to(torch.float64).square_().sum().item()) for s in segments if s.counted
        )

    def apply(self, update: Update, segments: Sequence[Segment]) -> None:
        """Do step ``update.step`` and drop the gradient. Does nothing if it was done. Raises RuntimeError out of turn.

        ``segments`` of the slice say which elements are of which group.
        """
        if self.step >= update.step:
            return
        if self.step != update.step - 1 or self.grad is None:
            raise RuntimeError(
                f"a slice at step {self.step} ({'with' if self.grad is not None else 'without'} a gradient) "
                f"cannot do step {update.step}"
            )
        if not update.skipped:
            self._change(update, self.grad.float(), segments)
        self.grad = None
        self.step = update.step

    def _change(self, update: Update, grad: torch.Tensor, segments: Sequence[Segment]) -> None:
        if update.factor != 1.0:
            grad.mul_(update.factor)
        for s in segments:
            if s.group == SIGNED:
                self.master[s.start : s.end].sub_(grad[s.start : s.end].sign(), alpha=update.rates[SIGNED].lr)
                continue
            self._optimizer.update(
                update.step,
                self.master[s.start : s.end],
                grad[s.start : s.end],
                [moment[s.start : s.end] for moment in self.moments],
                update.rates[s.group],
            )

    def keep(self) -> None:
        """Let ``previous`` be the state as it is now."""
        kept = self.previous or SliceState.room(self.master.numel(), self._optimizer, self.step)
        for copy, tensor in zip(kept.tensors, self.tensors, strict=True):
            copy.copy_(tensor)
        kept.step = self.step
        self.previous = kept

    def sha256(self, weights: torch.Tensor) -> str:
        """Digest of the model's weights in this slice and of the optimizer state."""
        digest = hashlib.sha256(self.step.to_bytes(8, "little"))
        for tensor in (weights, *self.tensors):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
