"""Interruption: unwind, tell the coordinator where this rank stands, and do what it decides."""

from __future__ import annotations

import time
from functools import partial

from megatron_elastic.adaptor.layers import random
from megatron_elastic.adaptor.training.adoption import adopt, come_into
from megatron_elastic.adaptor.training.step import verify_alone
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.messages import Back, Decision, Forward, Reload, Resume, Suspect, WorkDone
from megatron_elastic.cluster.rank import standing
from megatron_elastic.cluster.rank.control import Interrupted
from megatron_elastic.comm.device.devices import end_blocked


def handle(trainer: Trainer, interrupted: Interrupted) -> None:
    """Report, get the new layout, make it true. A further fault meanwhile begins it again."""
    while True:
        # It leads to all that was under way, as a second copy of states, and the recovery needs room.
        interrupted.__traceback__ = None
        try:
            trainer.hooks.at("interrupt")
            if interrupted.suspects:
                _suspect(trainer, interrupted.suspects)
            decision = _report(trainer)
            trainer.batches.settle()
            adopt(trainer, decision)
            return
        except Interrupted as again:
            interrupted = again


def _suspect(trainer: Trainer, suspects: tuple[int, ...]) -> None:
    """Tell the coordinator whose link broke, and wait for the interrupt that must follow."""
    flag = trainer.control.interrupt
    if flag.raised or set(suspects) <= flag.lost:
        return
    reason = f"the link from rank {trainer.rank} to {list(suspects)} broke"
    trainer.control.send(
        Suspect(rank=trainer.rank, epoch=trainer.standing.epoch, suspects=list(suspects), reason=reason)
    )
    trainer.control.wait((), timeout=trainer.config.wait_timeout)


def _progress(trainer: Trainer) -> WorkDone | None:
    if not trainer.standing.member:
        return None
    if trainer.work is not None:
        # A device goes on with garbage when a collective is given up, and nobody knows which sums that got into.
        return None if trainer.transport.doubted else trainer.work.progress()
    step = trainer.standing.step
    return WorkDone.none(step, trainer.ramp.grains(step))


def _report(trainer: Trainer) -> Decision:
    flag = trainer.control.interrupt
    epoch = flag.epoch
    end_blocked(partial(flag.acknowledge, epoch))
    random.leave_checkpointing()
    if trainer.tenure is not None:
        verify_alone(trainer, trainer.tenure)
    recut, trainer.recut = trainer.recut, None
    if recut is not None and recut.plan.epoch == flag.layout:
        trainer.recut = recut  # if this is interrupted, too
        come_into(trainer, recut)
    store = trainer.store
    if store is not None:
        store.abandon_loading()
    held = None if store is None else store.held()
    versions = {} if store is None or trainer.config.replay == "gradient" else store.versions()
    now, saved = time.time(), trainer.saving.saved
    trainer.control.send(standing.report(
        trainer.standing, epoch, trainer.layout, held, versions, now, flag.layout, saved, _progress(trainer)
    ))  # fmt: skip
    trainer.hooks.at("report")
    return trainer.control.wait((Forward, Back, Resume, Reload), timeout=trainer.config.wait_timeout)
