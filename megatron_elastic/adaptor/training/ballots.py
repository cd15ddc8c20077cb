"""Ballots: what a rank contributes to a vote, read from its device with one wait."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from megatron_elastic.adaptor.layers.measures import NUM_ZEROS
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.rank import standing
from megatron_elastic.numerics.deferred import DeferredAccumulator
from megatron_elastic.pipeline.work import Work
from megatron_elastic.state.vote import Ballot


def of_step(trainer: Trainer, tenure: Tenure, work: Work, finite: bool) -> Ballot:
    """Of the step in progress. ``finite``: so far as it is known, all gradients are that were added.

    Raises GradientOverflow if one was too large, Interrupted if what the device has computed means nothing.
    """
    owned, first = tenure.layout.owned(trainer.rank), tenure.layout.tp_index(trainer.rank) == 0
    accumulator, skips = trainer.accumulator, trainer.counts.skips(work.step)
    measured = {name: work.measured(name) for name in trainer.measures}
    if trainer.counts_zeros:
        measured[NUM_ZEROS] = tenure.store.zeros(owned)
    there = [values for values in measured.values() if values is not None]
    grains = list(work.losses) if first else []
    there += [work.losses[grain] for grain in grains]
    if not skips:
        there.append(tenure.store.squares(owned))
    if isinstance(accumulator, DeferredAccumulator):
        there.append(accumulator.largest)
    found = iter(trainer.device.read(there))
    trainer.transport.check_devices()
    measures = {name: [] if values is None else next(found).tolist() for name, values in measured.items()}
    losses = {grain: _pair(next(found)) for grain in grains}
    squares = np.full(1, np.inf) if skips else next(found)
    if isinstance(accumulator, DeferredAccumulator):
        finite &= accumulator.judge(next(found).item())
    return Ballot(squares, losses, standing.informed(trainer.standing), measures, finite)


def losses(trainer: Trainer, work: Work) -> dict[int, tuple[float, float]]:
    """Loss sum and tokens of what was computed here of each grain."""
    found = trainer.device.read(list(work.losses.values()))
    trainer.transport.check_devices()
    return {grain: _pair(each) for grain, each in zip(work.losses, found, strict=True)}


def of_weights(trainer: Trainer, squares: torch.Tensor) -> Ballot:
    """To add up squares alone."""
    return Ballot(trainer.device.read([squares])[0], {})


def _pair(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    total, tokens = values.tolist()
    return total, tokens
