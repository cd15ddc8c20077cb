"""SliceState: the optimizer's state of one slice, and how a step changes it.

Owner and replica run the same code on the same gradient, so their states stay equal bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron_elastic.device.copies import to_device
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
    def room(
        cls, size: int, optimizer: Optimizer, step: int, device: torch.device | str = "cpu"
    ) -> SliceState:
        """Room for a state of ``size`` elements. Memory is not touched: that would take long where training waits."""
        state = cls(torch.empty(0), optimizer)
        state.step, state.master = step, torch.empty(size, device=device)
        state.moments = tuple(torch.empty(size, device=device) for _ in optimizer.moments)
        return state

    def move(self, device: torch.device) -> None:
        """Be in the memory of a device, or the host's. Waits, if it comes from a device."""
        if self.master.device != device:
            self.master, *moments = (_moved(tensor, device) for tensor in self.tensors)
            self.moments = tuple(moments)
        if self.grad is not None:
            self.grad = _moved(self.grad, device)
        if self.previous is not None:
            self.previous.move(device)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Everything that has to move when the slice moves."""
        return self.master, *self.moments

    def counted(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """What of the gradient enters its norm."""
        assert self.grad is not None
        return [self.grad[s.start : s.end] for s in segments if s.counted]

    def counted_weights(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """What of the master weights enters their norm."""
        return [self.master[s.start : s.end] for s in segments if s.counted]

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
        self._change(update, self.grad.float(), segments)
        self.grad = None
        self.step = update.step

    def _change(self, update: Update, grad: torch.Tensor, segments: Sequence[Segment]) -> None:
        if not update.skipped and update.factor != 1.0:
            grad.mul_(update.factor)
        for s in segments:
            if s.group == SIGNED:
                self.master[s.start : s.end].sub_(grad[s.start : s.end].sign(), alpha=update.rates[SIGNED].lr)
                continue
            if update.skipped:
                continue
            self._optimizer.update(
                update.step - update.skips,
                self.master[s.start : s.end],
                grad[s.start : s.end],
                [moment[s.start : s.end] for moment in self.moments],
                update.rates[s.group],
            )

    def keep(self) -> None:
        """Let ``previous`` be the state as it is now."""
        kept = self.previous or SliceState.room(self.master.numel(), self._optimizer, self.step, self.master.device)
        for copy, tensor in zip(kept.tensors, self.tensors, strict=True):
            copy.copy_(tensor)
        kept.step = self.step
        self.previous = kept

    def sha256(self, weights: torch.Tensor) -> str:
        """Digest of the model's weights in this slice and of the optimizer state."""
        digest = hashlib.sha256(self.step.to_bytes(8, "little"))
        for tensor in (weights, *self.tensors):
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return to_device(tensor, device) if device.type != "cpu" else tensor.cpu()
