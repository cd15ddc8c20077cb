"""Evaluation: the mean loss of some batches, with the programs' forward passes alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from megatron_elastic.adaptor.training import ballots
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.pipeline.work import Work
from megatron_elastic.state.vote import Ballot, vote

_EVALUATION = -1
"""Step number under which evaluation draws its keys; dropout is off there."""


def evaluate(
    trainer: Trainer, tenure: Tenure, done: int, name: str, data: Sequence[dict[str, Any]] | None, position: int
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
