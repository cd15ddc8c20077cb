"""Evaluation: the mean loss of some batches, with the programs' forward passes alone."""

from __future__ import annotations

from functools import partial

import numpy as np

from megatron_elastic.adaptor.samples.sample import Reader
from megatron_elastic.adaptor.training import ballots
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.pipeline.work import Work
from megatron_elastic.state.vote import Ballot, vote

_EVALUATION = -1
"""Step number under which evaluation draws its keys; dropout is off there."""


def tell_of_none(trainer: Trainer) -> None:
    """Say once for each evaluation that is asked for and does not happen: there are no such data."""
    if trainer.args.eval_iters and trainer.rank == trainer.layout.ranks[0]:
        for name in trainer.evaluations:
            if getattr(trainer.batches, name) is None:
                trainer.event("not_evaluated", data=name)


def evaluate(
    trainer: Trainer, tenure: Tenure, done: int, name: str, data: Reader | None, position: int
) -> None:
    """After ``done`` steps: mean loss over ``--eval-iters`` batches, the ``position``-th such stretch of ``data``.

    Nothing if there are none: their share of ``--split`` may be 0. Batches are full, also while those of training grow.
    """
    if data is None:
        return
    iterations, batch, layout = trainer.args.eval_iters, trainer.args.global_batch_size, tenure.layout
    tp = layout.tp_index(trainer.rank)
    for model in trainer.stage.models:
        model.eval()
    try:
        total, tokens = 0.0, 0
        for iteration in range(position * iterations, (position + 1) * iterations):
            work = Work(_EVALUATION, layout, layout.num_grains, log_limit=0)
            tenure.grains.begin(work, partial(trainer.batches.read, data, iteration * batch, layout, trainer.rank))
            tenure.executor.run_forward(tenure.legs, tenure.grains)
            ballot = Ballot(np.zeros(0), ballots.losses(trainer, work) if tp == 0 else {})
            outcome = vote(tenure.vote_group, ballot)
            total, tokens = total + outcome.loss * outcome.tokens, tokens + outcome.tokens
    finally:
        for model in trainer.stage.models:
            model.train()
    trainer.evaluated(done, name, total / max(tokens, 1))
