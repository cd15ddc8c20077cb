"""Evaluation: the mean loss of some batches, with the programs' forward passes alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from megatron_elastic.adaptor.samples.sample import Reader
from megatron_elastic.adaptor.training import ballots
from megatron_elastic.adaptor.training.batches import takes_all
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.config import UsageError
from megatron_elastic.pipeline.work import Work
from megatron_elastic.state.vote import Ballot, vote

_EVALUATION = -1
"""Step number under which evaluation draws its keys; dropout is off there."""


def tell_of_none(trainer: Trainer) -> None:
    """Say once for each evaluation that is asked for and does not happen: there are no such data."""
    if trainer.rank == trainer.layout.ranks[0]:
        for kind in trainer.evaluations:
            if wanted(trainer.args, kind) and not trainer.batches.evaluation[kind]:
                trainer.event("not_evaluated", data=kind)


def wanted(args: argparse.Namespace, kind: str) -> bool:
    """Whether it is to be evaluated on data of a kind, if there are any."""
    return bool(args.eval_iters) or takes_all(args, kind)


def evaluate(trainer: Trainer, tenure: Tenure, done: int, kind: str, position: int) -> None:
    """After ``done`` steps: the mean loss of each data set of a kind, over the ``position``-th stretch of its samples.

    Nothing where there are none: their share of ``--split`` may be 0.
    """
    for model in trainer.stage.models:
        model.eval()
    try:
        for name, data in trainer.batches.evaluation[kind] if wanted(trainer.args, kind) else ():
            batches = _all(trainer, name, data) if takes_all(trainer.args, kind) else _stretch(trainer, position)
            trainer.evaluated(done, name, _mean_loss(trainer, tenure, data, batches))
    finally:
        for model in trainer.stage.models:
            model.train()


def _stretch(trainer: Trainer, position: int) -> Iterator[tuple[int, int]]:
    """First sample and grains of each of ``--eval-iters`` batches, which are full also while those of training grow."""
    args = trainer.args
    for batch in range(position * args.eval_iters, (position + 1) * args.eval_iters):
        yield batch * args.global_batch_size, trainer.layout.num_grains


def _all(trainer: Trainer, name: str, data: Reader) -> Iterator[tuple[int, int]]:
    """The same of all samples, but for the last ones if they are too few for a grain.

    Megatron at 0.16.1 takes as many batches as there are samples, going round: each sample counts as often there, but
    for those that are too few for a micro-batch of every data-parallel rank.
    """
    ramp, left = trainer.ramp, len(data) // trainer.ramp.grain
    if not left:
        raise UsageError(f"--full-validation: the {name} data have {len(data)} samples, too few for one micro-batch "
                         f"of {ramp.grain}: give them more, or use --eval-iters")
    first = 0
    while left:
        grains = min(left, trainer.layout.num_grains)
        yield first, grains
        first, left = first + grains * ramp.grain, left - grains


def _mean_loss(trainer: Trainer, tenure: Tenure, data: Reader, batches: Iterable[tuple[int, int]]) -> float:
    total, tokens, layout = 0.0, 0, tenure.layout
    for first, grains in batches:
        work = Work(_EVALUATION, layout, grains, log_limit=0)
        tenure.grains.begin(work, partial(trainer.batches.read, data, first, layout, trainer.rank))
        tenure.executor.run_forward(tenure.legs_of(grains), tenure.grains)
        ballot = Ballot(np.zeros(0), ballots.losses(trainer, work) if layout.tp_index(trainer.rank) == 0 else {})
        outcome = vote(tenure.vote_group, ballot)
        total, tokens = total + outcome.loss * outcome.tokens, tokens + outcome.tokens
    return total / max(tokens, 1)
