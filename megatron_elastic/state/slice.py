"""SliceState: the optimizer's state of one slice, and the Adam step on it.

Owner and replica run the same code on the same gradient, so their states stay equal bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_elastic.state.buffer import Segment


@dataclass(frozen=True, slots=True)
class Adam:
    """Hyper-parameters that do not change during a run (Megatron's ``OptimizerConfig`` names)."""

    beta1: float
    beta2: float
    eps: float


@dataclass(frozen=True, slots=True)
class Update:
    """What one step's update needs besides the gradient; the same on every rank.

    ``clip`` multiplies the gradient. ``lr`` and ``weight_decay`` come from the scheduler.
    """

    step: int
    clip: float
    lr: float
    weight_decay: float


class SliceState:
    """float32 master weights and Adam moments of one slice, after ``step`` updates."""

    def __init__(self, master: torch.Tensor, step: int = 0) -> None:
        self.step = step
        self.master = master
        self.exp_avg = torch.zeros_like(master)
        self.exp_avg_sq = torch.zeros_like(master)
        self.grad: torch.Tensor | None = None
        """Reduced gradient of step ``self.step + 1``, once it is here."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Everything that has to move when the slice moves."""
        return self.master, self.exp_avg, self.exp_avg_sq

    def sum_of_squares(self, segments: Sequence[Segment]) -> float:
        """Sum of the squared gradient over the counted segments, in float64."""
        assert self.grad is not None
        return sum(
            float(self.grad[s.start : s.end].to(torch.float64).square_().sum().item()) for s in segments if s.counted
        )

    def apply(self, update: Update, adam: Adam, segments: Sequence[Segment]) -> None:
        """Do step ``update.step`` (AdamW, decoupled weight decay), drop the gradient. Does nothing if it was done."""
        if self.step >= update.step:
            return
        if self.step != update.step - 1 or self.grad is None:
            raise RuntimeError(
                f"a slice at step {self.step} ({'with' if self.grad is not None else 'without'} a gradient) "
                f"cannot do step {update.step}"
            )
        if update.clip < 1.0:
            self.grad.mul_(update.clip)
        # The kernel counts the step up before it uses it.
        done = torch.tensor(float(self.step))
        for s in segments:
            torch._fused_adamw_(
                [self.master[s.start : s.end]], [self.grad[s.start : s.end]],
                [self.exp_avg[s.start : s.end]], [self.exp_avg_sq[s.start : s.end]], [], [done + 1],
                lr=update.lr, beta1=adam.beta1, beta2=adam.beta2,
                weight_decay=update.weight_decay if s.decay else 0.0, eps=adam.eps,
                amsgrad=False, maximize=False,
            )
        self.grad = None
        self.step = update.step

    def sha256(self, weights: torch.Tensor) -> str:
        """Digest of the model's weights in this slice and of the optimizer state."""
        digest = hashlib.sha256(self.step.to_bytes(8, "little"))
        for tensor in (weights, *self.tensors):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
