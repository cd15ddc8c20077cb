"""Building: a rank's part of the model and of the optimizer's state: the first, a newcomer's, a checkpoint's."""

from __future__ import annotations

from pathlib import Path

from megatron_elastic.adaptor.checkpoints import common, sliced
from megatron_elastic.adaptor.checkpoints.folder import has_step, step_folder
from megatron_elastic.adaptor.training.evaluation import tell_of_none
from megatron_elastic.adaptor.training.tenure import begin_tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.messages import Built, Invite, Ready
from megatron_elastic.cluster.rank import standing
from megatron_elastic.layout import decode
from megatron_elastic.state.store import StateStore


def build(trainer: Trainer) -> None:
    """Model, data and optimizer state under the first layout; redone if interrupted."""
    stage, layout = trainer.stage, trainer.layout
    stage.forget()
    stage.hold(layout)
    trainer.batches.open()
    tell_of_none(trainer)
    store = trainer.make_store(trainer.stage.partitions)
    load(trainer, store, trainer.standing.step - 1)
    tenure = begin_tenure(trainer, layout, store, program=None)
    trainer.store, trainer.tenure, trainer.standing = store, tenure, standing.built(trainer.standing)
    trainer.counted_from = trainer.standing.step, trainer.transport.bytes_sent
    tell(trainer)
    trainer.prepared()


def tell(trainer: Trainer) -> None:
    """Tell what the units here are like."""
    shapes = {unit: buffer.partition.shape for unit, buffer in trainer.stage.units.items()}
    trainer.control.send(Built(rank=trainer.rank, shapes=shapes))


def prepare(trainer: Trainer, invite: Invite) -> None:
    """Build this rank's part of the layout it is invited into, without the others, who are training."""
    layout = decode(invite.layout)
    trainer.transport.trust(invite.key)
    trainer.reach(layout)
    if trainer.store is None or not trainer.fits(layout) or not trainer.stage.fits(layout):
        trainer.store = None
        if not trainer.fits(layout):
            trainer.take_shape(layout)
        stage = trainer.stage
        trainer.make_groups(layout)
        stage.forget()
        stage.learn(invite.shapes, layout)
        stage.hold(layout)
        trainer.batches.open()
        trainer.store = trainer.make_store(stage.partitions)
    trainer.hooks.at("prepare")
    trainer.control.send(Ready(rank=trainer.rank, epoch=invite.epoch))
    trainer.prepared()


def load(trainer: Trainer, store: StateStore, step: int) -> None:
    """Model and optimizer state as after ``step`` steps: those of a checkpoint, or fresh ones."""
    stage, layout, origin, counts = trainer.stage, trainer.layout, trainer.origin, trainer.counts
    dials = trainer.odometer.dials
    following, begins = step + 1, step == counts.start.done
    if begins and (origin.folder is None or origin.anew or trainer.begins_optimizer):
        trainer.loss_scales.begin(following)
        if not origin.anew and (origin.folder is not None or step):
            sliced.load_weights(_checkpoint_of(trainer, step), stage.models, dials, counts.start.samples)
        elif origin.folder is not None:
            sliced.load_weights(origin.folder, stage.models, dials)
        store.create(layout, stage.units, step)
        return
    states, told = sliced.load(
        _checkpoint_of(trainer, step), stage.models, layout, trainer.rank, stage.units, trainer.optimizer,
        trainer.ramp.before(following), dials,
    )  # fmt: skip
    # What it has counted less than the flags say was skipped, for the sake of the loss scale, since the job began.
    samples = counts.counted(following, trainer.ramp, scaled=False)
    skipped_samples = samples - common.scheduled(told, samples)
    updates = counts.number(following, scaled=False) - 1
    skipped = updates - common.updates(told, updates - skipped_samples // trainer.ramp.samples(1))
    trainer.loss_scales.begin(following, skipped, skipped_samples, common.scaler(told))
    store.create(layout, stage.units)
    sliced.fill(store, stage.units, states, step)


def _checkpoint_of(trainer: Trainer, step: int) -> Path:
    """The checkpoint of so many steps: the one that the job began with, or one that it has saved."""
    args, origin = trainer.args, trainer.origin.folder
    if step != trainer.counts.start.done and args.save and has_step(args.save, step):
        return step_folder(Path(args.save), step)
    # Its folder may have any name. And who came later may have found another one.
    if origin is not None and origin.is_dir() and common.iteration(common.told(origin)) == step:
        return origin
    return step_folder(Path(args.load), step)
