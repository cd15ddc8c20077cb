"""Step: compute, reduce, vote, apply, and what is the same whether a step was computed here or is only finished."""

from __future__ import annotations

import time
from functools import partial

from megatron_elastic.adaptor.model import tokens
from megatron_elastic.adaptor.training import intermission, measurement
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster import standing
from megatron_elastic.cluster.messages import Committed, Damage, Damaged, Plan, Profile, Settled, VoteResult
from megatron_elastic.config import MEASURED
from megatron_elastic.faults import odometer
from megatron_elastic.layout import decode
from megatron_elastic.pipeline.work import Work
from megatron_elastic.state.verification import Verification
from megatron_elastic.state.vote import Ballot, vote

_PROFILED = 10
"""Steps over which a stage's times are averaged."""


def take(trainer: Trainer, tenure: Tenure) -> None:
    """Do the step in progress, or what is missing of it. Until the vote is over nothing is applied."""
    hooks, layout, step = trainer.hooks, tenure.layout, trainer.standing.step
    hooks.step = step
    if trainer.standing.stale:
        tenure.reduction.gather_parameters()
    intermission.hold(trainer, tenure, step - 1)
    hooks.at("data")
    work, remainder = _work(trainer, tenure), tenure.remainder
    tenure.store.drop_gradients()
    tenure.grains.begin(work, partial(trainer.batches.read, trainer.batches.training, step - 1, layout, trainer.rank))
    with trainer.stage.meter.pipeline():
        if remainder is None:
            tenure.executor.run(tenure.legs, tenure.grains, work)
        else:
            tenure.executor.run(remainder.legs, tenure.grains, work, remainder.again)
    if trainer.config.profile == MEASURED and step % _PROFILED == 0:
        tenure.boundary_ms = tenure.executor.measure_boundary()
    trainer.await_parameters(tenure)
    hooks.at("grad_sync")
    tenure.reduction.reduce_gradients()
    hooks.at("replay")
    _before_vote(trainer, tenure)
    hooks.at("vote")
    if tenure.verification is not None:
        _verify(trainer, tenure, tenure.verification)
    result = _cast_vote(trainer, tenure)
    hooks.at("apply")
    tenure.store.apply(trainer.update(result))
    tenure.replay.after_update(step)
    complete(trainer, tenure, result)


def _work(trainer: Trainer, tenure: Tenure) -> Work:
    """What the step begins with: nothing, or what is kept of it."""
    layout = tenure.layout
    # Units that are only coming in get no gradients.
    units = [trainer.stage.units[unit] for unit in layout.stages[layout.stage_of(trainer.rank)].units]
    for unit in units:
        if trainer.work is None:
            unit.zero()
        else:
            unit.go_on()
    if trainer.args.overlap_grad_reduce and tenure.remainder is None:
        tenure.reduction.reduce_when_complete()
    if trainer.work is None:
        trainer.work = trainer.new_work()
    return trainer.work


def complete(trainer: Trainer, tenure: Tenure, result: VoteResult) -> None:
    """The rest of a step that has been voted and applied. May be repeated."""
    trainer.hooks.at("param_sync")
    tenure.reduction.start_gathering()
    trainer.standing = standing.distributing(trainer.standing)
    if not trainer.args.overlap_param_gather or tenure.verification is not None:
        trainer.await_parameters(tenure)
    trainer.hooks.at("commit")
    if trainer.rank == tenure.speaker:
        first = trainer.rank == tenure.layout.ranks[0]
        trainer.control.send(
            Committed(rank=trainer.rank, epoch=tenure.layout.epoch, vote=result, time=time.time(), first=first)
        )
    if tenure.verification is not None:
        tenure.replay.finish()
        tenure.verification.note(result.step)
    trainer.standing = standing.committed(trainer.standing)
    trainer.work = tenure.remainder = None
    trainer.committed(result)
    trainer.odometer.settle()
    trainer.odometer.worked(odometer.Work(tenure.layout.epoch, trainer.stage.meter.busy, trainer.stage.meter.grains))
    if trainer.config.profile == MEASURED and result.step % _PROFILED == 0:
        _tell_times(trainer, tenure)
    tenure.store.settle()
    _note_copies(trainer, tenure)


def _before_vote(trainer: Trainer, tenure: Tenure) -> None:
    """What must exist twice is here when this returns; a step that waited for copies that are new says so."""
    begun = time.time()
    waits = trainer.config.replay == "state" and not tenure.settled and tenure.store.replicating
    tenure.replay.before_vote()
    if waits:
        trainer.event("waited", step=trainer.standing.step, ms=round((time.time() - begun) * 1e3, 3))
    _note_copies(trainer, tenure)


def _note_copies(trainer: Trainer, tenure: Tenure) -> None:
    """Tell, once in a layout, that all copies from and to this rank that it asks for are live."""
    if not tenure.settled and not tenure.store.replicating:
        tenure.settled = True
        if tenure.copying:
            trainer.event("replicated", step=trainer.standing.step - 1)
        trainer.control.send(Settled(rank=trainer.rank, epoch=tenure.layout.epoch))


def _verify(trainer: Trainer, tenure: Tenure, verification: Verification) -> None:
    """Nothing that damaged memory had a part in may be voted: have it healed, and the step redone."""
    layout, step = tenure.layout, trainer.standing.step
    found = [
        Damage(rank=each.rank, unit=each.unit, slice=each.slice, part=layout.part_of(each.unit, each.rank),
               what=each.what)
        for each in verification.check()
    ]
    if found:
        # At once, so that nothing can come between and count it as held.
        bad = {(d.unit, d.slice) for d in found if d.rank == trainer.rank and d.what == "state"}
        tenure.store.retire((unit, k) for unit, k, _ in tenure.store.held() if (unit, k) not in bad)
        # What was sound in the slice's turn before the last is so for certain.
        verified = max(step - 1 - trainer.config.verify_every, 0)
        message = Damaged(rank=trainer.rank, epoch=tenure.layout.epoch, step=step, found=found, verified=verified)
        trainer.standing = standing.spoiled(trainer.standing, message)
        trainer.control.send(message)
        trainer.control.wait((), timeout=trainer.config.wait_timeout)  # the interrupt that follows ends it


def _cast_vote(trainer: Trainer, tenure: Tenure) -> VoteResult:
    layout, step, work = tenure.layout, trainer.standing.step, trainer.work
    assert work is not None
    tp = layout.tp_index(trainer.rank)
    if plan := trainer.control.take((Plan,)):
        tenure.plan, trainer.standing = plan, standing.told(trainer.standing, plan.epoch)
        trainer.reach(decode(plan.layout))
    ballot = Ballot(
        norms={at: tenure.store.sum_of_squares(at) for at in layout.owned(trainer.rank)},
        losses=work.losses if tp == 0 else {},
        informed=standing.informed(trainer.standing),
        measures={name: work.measured(name) for name in trainer.measures},
    )
    outcome = vote(tenure.vote_group, ballot)
    norm = outcome.grad_norm * tokens.weight(trainer.args, outcome.tokens)
    result = VoteResult(
        step=step, loss=outcome.loss, grad_norm=norm, lr=trainer.rates.at(step)[0].lr,
        consumed_samples=step * trainer.args.global_batch_size, tokens=outcome.tokens,
        measures={name: total / layout.num_batches for name, total in outcome.measures.items()},
    )  # fmt: skip
    trainer.standing = standing.voted(trainer.standing, result, outcome.switch)
    return result


def _tell_times(trainer: Trainer, tenure: Tenure) -> None:
    read = trainer.stage.meter.read()
    if read is not None and tenure.layout.place_of(trainer.rank) == 0:
        boundary = tenure.executor.activation_bytes, tenure.boundary_ms
        moments = len(trainer.optimizer.moments)
        told = measurement.of_stage(tenure.layout, trainer.rank, *read, boundary, trainer.stage.units, moments)
        trainer.control.send(Profile(rank=trainer.rank, epoch=tenure.layout.epoch, sample=told))
