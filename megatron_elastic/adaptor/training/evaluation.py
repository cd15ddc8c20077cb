"""Evaluation: the mean loss of some batches, with the programs' forward passes alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.pipeline.work import Work
from megatron_elastic.state.vote import Ballot, vote

_EVALUATION = -1
"""Step number under which evaluation draws its keys; dropout is off there."""


def evaluate(
    trainer: Trainer, tenure: Tenure, done: int, name: str, data: Sequence[dict[str, Any]], position: int
) -> None:
    """After ``done`` steps: mean loss over ``--eval-iters`` batches, the ``position``-th such stretch of ``data``."""
    iterations, layout = trainer.args.eval_iters, tenure.layout
    tp = layout.tp_index(trainer.rank)
    for model in trainer.stage.models:
        model.eval()
    try:
        total, tokens = 0.0, 0
        for iteration in range(position * iterations, (position + 1) * iterations):
            work = Work(_EVALUATION, layout.num_chunks, log_limit=0)
            tenure.grains.begin(work, partial(trainer.batches.read, data, iteration, layout, trainer.rank))
            tenure.executor.run_forward(tenure.legs, tenure.grains)
            ballot = Ballot({}, work.losses if tp == 0 else {})
            outcome = vote(tenure.vote_group, ballot)
            total, tokens = total + outcome.loss * outcome.tokens, tokens + outcome.tokens
    finally:
        for model in trainer.stage.models:
            model.train()
    trainer.evaluated(done, name, total / max(tokens, 1))
