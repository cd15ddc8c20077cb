"""``megatron.core.optimizer.grad_scaler``: the loss scale as a function of what became of the steps before.

Megatron's scalers live on the device, are told of each step, and change; a step that is redone must get the same scale.
So their rule is written down here once more, from one value to the next, and asked for a step. Every rank follows all
votes, and so all know the scale. Who enters has not seen them: the ranks of a layout agree before its first step.

Neither Megatron's schedule nor its optimizer counts steps that were skipped, so how many there were, and with how many
samples, belongs here, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from megatron.core.optimizer import OptimizerConfig
from msgspec.structs import astuple, replace

from megatron_elastic.cluster.messages import UNSCALED, Scaling, VoteResult

_KEPT = 8
"""Newest steps whose scalings stay at hand. Training goes back by one or two, except to a checkpoint."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How a scale changes.

    Attributes:
        initial, minimum: scales.
        window: steps in a row with finite gradients after which it is doubled.
        hysteresis: steps without since then from which on it is halved.
        dynamic: whether it changes at all.
    """

    initial: float
    minimum: float = 0.0
    window: float = math.inf
    hysteresis: int = 0
    dynamic: bool = False

    @classmethod
    def of(cls, config: OptimizerConfig) -> Rule | None:
        """That of the scaler which Megatron would make of ``config``; None if losses are not scaled."""
        if config.loss_scale:
            return cls(_single(config.loss_scale))
        if not config.fp16:
            return None
        return cls(_single(config.initial_loss_scale), _single(config.min_loss_scale), config.loss_scale_window,
                   config.hysteresis, dynamic=True)  # fmt: skip

    @property
    def first(self) -> Scaling:
        """The scaling of a job's first step."""
        return Scaling(scale=self.initial, hysteresis=self.hysteresis)

    def after(self, now: Scaling, skipped: bool, samples: int = 0) -> Scaling:
        """The scaling of the step that follows one of so many ``samples`` with the scaling ``now``, which was
        ``skipped`` or not.
        """
        if skipped:
            now = replace(now, skipped=now.skipped + 1, samples=now.samples + samples)
        if not self.dynamic:
            return now
        if skipped:
            left = now.hysteresis - 1
            return replace(now, scale=now.scale if left > 0 else max(now.scale / 2, self.minimum), growth=0,
                           hysteresis=left)  # fmt: skip
        if now.growth + 1 == self.window:
            return replace(now, scale=now.scale * 2, growth=0, hysteresis=self.hysteresis)
        return replace(now, growth=now.growth + 1)


class LossScales:
    """Scalings by step, as one rank knows them. Without a rule losses are not scaled, and all steps count."""

    def __init__(self, rule: Rule | None) -> None:
        self._rule = rule
        self._known: dict[int, Scaling] = {}

    @property
    def on(self) -> bool:
        """Whether losses are scaled."""
        return self._rule is not None

    def at(self, step: int) -> Scaling:
        """The scaling of a step, which must be known here."""
        return self._known[step] if self.on else UNSCALED

    def begin(self, step: int, skipped: int = 0, samples: int = 0, saved: Mapping[str, Any] | None = None) -> None:
        """Training begins with ``step``, after so many skipped ones with so many samples.

        ``saved``: a scaler's state in a checkpoint.
        """
        if self._rule is None:
            return
        first = self._rule.first
        if saved and self._rule.dynamic:
            first = Scaling(
                scale=float(saved["scale"]), growth=saved["growth_tracker"], hysteresis=saved["hysteresis_tracker"]
            )
        self._known = {step: replace(first, skipped=skipped, samples=samples)}

    def saved(self, step: int) -> dict[str, Any]:
        """What Megatron's scaler would save before ``step``; empty if it does not change."""
        if self._rule is None or not self._rule.dynamic:
            return {}
        now = self.at(step)
        scale = torch.tensor([now.scale], dtype=torch.float32)
        return {"scale": scale, "growth_tracker": now.growth, "hysteresis_tracker": now.hysteresis}

    def follow(self, vote: VoteResult, samples: int, counts: bool = True) -> None:
        """A step of so many samples has been voted; what it says of the scale ``counts``, or nothing was computed. May
        come again for the same step.
        """
        if self._rule is not None:
            self._known[vote.step] = now = vote.scaling
            self._known[vote.step + 1] = self._rule.after(now, vote.skipped, samples) if counts else now
            self._known.pop(vote.step - _KEPT, None)

    def return_to(self, step: int) -> None:
        """``step`` is the one in progress: what was known of later ones does not count."""
        self._known = {known: scaling for known, scaling in self._known.items() if known <= step}

    def agree(self, step: int) -> None:
        """Let all ranks of the layout know the scaling of ``step``, which some of them do. All of them call it."""
        if not self.on:
            return
        known = self._known.get(step)
        told = torch.tensor([-math.inf] * 5 if known is None else astuple(known), dtype=torch.float64)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
        scale, *counts = told.tolist()
        assert math.isfinite(counts[-1]), f"nobody knows the loss scale of step {step}"
        growth, hysteresis, skipped, samples = map(int, counts)
        self._known[step] = Scaling(
            scale=scale, growth=growth, hysteresis=hysteresis, skipped=skipped, samples=samples
        )


def _single(scale: float) -> float:
    """As Megatron keeps it, in float32."""
    return torch.tensor(scale, dtype=torch.float32).item()
