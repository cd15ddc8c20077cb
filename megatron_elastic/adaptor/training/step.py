"""Step: compute, reduce, vote, apply, and what is the same whether a step was computed here or is only finished."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from megatron_elastic.adaptor.layers.measures import NUM_ZEROS
from megatron_elastic.adaptor.model import tokens
from megatron_elastic.adaptor.training import ballots, intermission, measurement
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.messages import Committed, Damage, Damaged, Plan, Profile, Settled, VoteResult
from megatron_elastic.cluster.rank import standing
from megatron_elastic.config import MEASURED
from megatron_elastic.faults import odometer
from megatron_elastic.layout import decode
from megatron_elastic.numerics.deferred import DeferredAccumulator
from megatron_elastic.pipeline.route import Leg
from megatron_elastic.pipeline.work import Work
from megatron_elastic.state import verification
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.vote import vote

_PROFILED = 10
"""Steps over which a stage's times are averaged."""


def take(trainer: Trainer, tenure: Tenure) -> None:
    """Do the step in progress, or what is missing of it. Until the vote is over nothing is applied."""
    hooks, layout, step = trainer.hooks, tenure.layout, trainer.standing.step
    first, grains = trainer.ramp.before(step), trainer.ramp.grains(step)
    hooks.step = step
    trainer.tracer.enter(step)
    level(trainer, tenure)
    intermission.hold(trainer, tenure, step - 1)
    hooks.at("data")
    work, remainder = _work(trainer, tenure, grains), tenure.remainder
    tenure.store.drop_gradients()
    trainer.loss_factor.set(trainer.loss_scales.at(step).scale)
    trainer.batches.expect(layout, trainer.rank, _to_read(trainer, tenure), tenure.grains.asking)
    tenure.grains.begin(work, partial(trainer.batches.take, first, layout, trainer.rank))
    with trainer.stage.meter.pipeline():
        if trainer.counts.skips(step):
            tenure.executor.run((), tenure.grains, work)
        elif remainder is None:
            tenure.executor.run(tenure.legs_of(grains), tenure.grains, work)
        else:
            tenure.executor.run(remainder.legs, tenure.grains, work, remainder.again)
    if trainer.config.profile == MEASURED and step % _PROFILED == 0:
        tenure.boundary_ms = tenure.executor.measure_boundary()
    trainer.await_parameters(tenure)
    hooks.at("grad_sync")
    tenure.reduction.reduce_gradients(grains)
    hooks.at("replay")
    _before_vote(trainer, tenure)
    hooks.at("vote")
    verify(trainer, tenure)
    result = _cast_vote(trainer, tenure)
    hooks.at("apply")
    update = trainer.update(result)
    tenure.store.apply(update)
    tenure.replay.after_update(step)
    complete(trainer, tenure, result)
    if tenure.preparation is not None:
        tenure.preparation.following.apply(update)


def level(trainer: Trainer, tenure: Tenure) -> None:
    """Let all ranks have what some may not, between two steps: the weights that owners hold, and what counts."""
    if trainer.standing.stale:
        tenure.reduction.gather_parameters()
    if not tenure.level:
        trainer.agree()
        trainer.loss_scales.agree(trainer.standing.step)
        tenure.level = True


def _to_read(trainer: Trainer, tenure: Tenure) -> Iterator[tuple[int, Sequence[Leg]]]:
    """This step and the next one: the first sample of each, and what this rank does of it."""
    for step in (trainer.standing.step, trainer.standing.step + 1):
        if step <= trainer.args.train_iters and not trainer.counts.skips(step):
            again = tenure.remainder if step == trainer.standing.step else None
            legs = tenure.legs_of(trainer.ramp.grains(step)) if again is None else again.legs
            yield trainer.ramp.before(step), legs


def _work(trainer: Trainer, tenure: Tenure, grains: int) -> Work:
    """What the step begins with: nothing, or what is kept of it."""
    if trainer.work is None and isinstance(trainer.accumulator, DeferredAccumulator):
        trainer.accumulator.begin()
    for unit in _computed(trainer, tenure):
        if trainer.work is None:
            unit.zero()
        else:
            unit.go_on()
    if trainer.args.overlap_grad_reduce and tenure.remainder is None:
        tenure.reduction.reduce_when_complete(grains)
    if trainer.work is None:
        trainer.work = trainer.new_work(grains)
    return trainer.work


def _computed(trainer: Trainer, tenure: Tenure) -> list[UnitBuffer]:
    """The units that this rank computes. Those that are only coming in, or going, get no gradients."""
    layout = tenure.layout
    return [trainer.stage.units[unit] for unit in layout.stages[layout.stage_of(trainer.rank)].units]


def complete(trainer: Trainer, tenure: Tenure, result: VoteResult) -> None:
    """The rest of a step that has been voted and applied. May be repeated."""
    trainer.applied(tenure)
    trainer.hooks.at("param_sync")
    tenure.reduction.start_gathering()
    trainer.standing = standing.distributing(trainer.standing)
    overlaps = trainer.args.overlap_param_gather or tenure.reduction.ordered
    if not overlaps or tenure.verification is not None:
        trainer.await_parameters(tenure)
    trainer.hooks.at("commit")
    trainer.tracer.commit(result.step)
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
    meter = trainer.stage.meter
    trainer.odometer.worked(odometer.Effort(tenure.layout.epoch, tenure.since, meter.busy, meter.grains))
    if trainer.config.measures and result.step % _PROFILED == 0:
        _tell_times(trainer, tenure)
    tenure.store.settle()
    trainer.show_memory(tenure.store)
    _note_copies(trainer, tenure)


def _before_vote(trainer: Trainer, tenure: Tenure) -> None:
    """What must exist twice is here when this returns; a step that waited for copies that are new says so."""
    begun = time.time()
    waits = trainer.config.replay == "state" and not tenure.settled and tenure.store.replicating
    tenure.replay.before_vote()
    if waits:
        trainer.event("waited", step=trainer.standing.step, ms=round((time.time() - begun) * 1e3, 3))
    if tenure.preparation is not None:
        tenure.preparation.following.before_vote()
        trainer.standing = standing.lacks(trainer.standing, not tenure.preparation.following.up_to_date)
    _note_copies(trainer, tenure)


def _note_copies(trainer: Trainer, tenure: Tenure) -> None:
    """Tell, once in a layout, that all copies from and to this rank that it asks for are live."""
    if not tenure.settled and not tenure.store.replicating:
        tenure.settled = True
        if tenure.copying:
            trainer.event("replicated", step=trainer.standing.step - 1)
        trainer.control.send(Settled(rank=trainer.rank, epoch=tenure.layout.epoch))


def verify(trainer: Trainer, tenure: Tenure) -> None:
    """Nothing that damaged memory had a part in may be voted: have it healed, and the step redone."""
    if tenure.verification is not None and (found := tenure.verification.check()):
        trainer.control.send(_spoiled(trainer, tenure, found))
        trainer.control.wait((), timeout=trainer.config.wait_timeout)  # the interrupt that follows ends it


def verify_alone(trainer: Trainer, tenure: Tenure) -> None:
    """The same before a layout is left, by this rank's own checksums: nobody looks at them later. Its report tells, and
    so does the next one where that is interrupted, too.
    """
    if trainer.standing.damaged is not None or tenure.verification is None:
        return
    if found := tenure.verification.changed():
        _spoiled(trainer, tenure, found)


def _spoiled(trainer: Trainer, tenure: Tenure, damages: Sequence[verification.Damage]) -> Damaged:
    """What is to be told of damage. What is damaged here counts as held no more."""
    layout, step = tenure.layout, trainer.standing.step
    found = [
        Damage(rank=each.rank, unit=each.unit, slice=each.slice, part=layout.part_of(each.unit, each.rank),
               what=each.what)
        for each in damages
    ]
    # At once, so that nothing can come between and count it as held.
    bad = {(d.unit, d.slice) for d in found if d.rank == trainer.rank and d.what == "state"}
    tenure.store.retire((unit, k) for unit, k, _ in tenure.store.held() if (unit, k) not in bad)
    # What was sound in the slice's turn before the last is so for certain.
    verified = max(step - 1 - trainer.config.verify_every, 0)
    message = Damaged(rank=trainer.rank, epoch=layout.epoch, step=step, found=found, verified=verified)
    trainer.standing = standing.spoiled(trainer.standing, message)
    return message


def _cast_vote(trainer: Trainer, tenure: Tenure) -> VoteResult:
    layout, step, work = tenure.layout, trainer.standing.step, trainer.work
    assert work is not None
    if plan := trainer.control.take((Plan,)):
        tenure.plan, trainer.standing = plan, standing.told(trainer.standing, plan.epoch)
        trainer.reach(decode(plan.layout))
    ballot = ballots.of_step(trainer, tenure, work, all(unit.finite for unit in _computed(trainer, tenure)))
    outcome = vote(tenure.vote_group, ballot)
    ramp, batches, counted = trainer.ramp, work.grains * layout.batches, trainer.counted(step)
    norm = outcome.grad_norm * tokens.weight(trainer.args, ramp.samples(step), outcome.tokens)
    result = VoteResult(
        step=step, loss=outcome.loss, grad_norm=norm, lr=trainer.rates.at(counted)[0].lr,
        consumed_samples=ramp.before(step + 1), tokens=outcome.tokens,
        measures={name: total / (1 if name == NUM_ZEROS else batches) for name, total in outcome.measures.items()},
        counted=counted, skips=step - trainer.counts.number(step), scaling=trainer.loss_scales.at(step),
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
