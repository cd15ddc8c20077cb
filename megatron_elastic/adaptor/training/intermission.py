"""Intermission: what is due between two steps: an evaluation, a checkpoint.

It is part of the step that follows, so that an interruption repeats it.
"""

from __future__ import annotations

from functools import partial

from megatron_elastic.adaptor.checkpoints import sliced
from megatron_elastic.adaptor.training.evaluation import evaluate
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer


def hold(trainer: Trainer, tenure: Tenure, done: int) -> None:
    """Do what is due after ``done`` steps. What a job goes on from was evaluated before it was saved."""
    args = trainer.args
    if args.eval_interval and trainer.counts.trained(done) and done % args.eval_interval == 0:
        with trainer.pause():
            evaluate(trainer, tenure, done, "validation", done // args.eval_interval - 1)
    if trainer.saving.written():
        complete_save(trainer)
    if (late := trainer.saving.late(done)) is not None and trainer.rank == tenure.layout.ranks[0]:
        trainer.event("save_late", step=late, done=done)
    if trainer.saving.due(done):
        trainer.hooks.at("checkpoint")
        save(trainer, tenure, done)


def save(trainer: Trainer, tenure: Tenure, done: int) -> None:
    """Save the state after ``done`` steps, or begin to."""
    complete_save(trainer)  # one at a time
    trainer.await_parameters(tenure)
    apart = trainer.args.async_save
    prepare = partial(
        sliced.prepare, models=trainer.stage.models, layout=tenure.layout, rank=trainer.rank, units=trainer.stage.units,
        store=tenure.store, names=sliced.parts(trainer.optimizer) if trainer.saves_optimizer else (), step=done,
        samples=trainer.ramp.before(done + 1), besides=trainer.saved_besides(done), apart=apart,
    )  # fmt: skip
    with trainer.pause():
        with trainer.odometer.patient():  # state may have to be copied
            trainer.saving.begin(done, tenure.layout.epoch, prepare)
        if not apart:
            complete_save(trainer)


def complete_save(trainer: Trainer) -> None:
    """Have on disk what is being written, if anything is. If it cannot be, training goes on from the one before."""
    outcome = trainer.saving.complete()
    if outcome is None or trainer.rank != trainer.layout.ranks[0]:
        return
    if outcome.problem is None:
        trainer.saved(outcome.step)
    else:
        trainer.event("save_failed", step=outcome.step, directory=str(trainer.args.save), reason=outcome.problem)
