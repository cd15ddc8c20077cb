"""Building: a rank's part of the model and of the optimizer's state: the first, a newcomer's, a checkpoint's."""

from __future__ import annotations

from megatron_elastic.adaptor.checkpoints import common, folder, sliced
from megatron_elastic.adaptor.training.evaluation import tell_of_none
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster import standing
from megatron_elastic.cluster.messages import Built, Invite, Ready
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
    load(trainer, store, trainer.standing.step - 1, trainer.args.load)
    tenure = trainer.begin_tenure(layout, store, program=None)
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


def load(trainer: Trainer, store: StateStore, step: int, directory: str) -> None:
    """Model and optimizer state as after ``step`` steps: those of the checkpoint in ``directory``, or fresh ones."""
    stage, layout, origin = trainer.stage, trainer.layout, trainer.origin
    if step == 0:
        trainer.loss_scales.begin(1)
        if origin.directory is not None:
            sliced.load_weights(origin.directory, stage.models, origin.step)
        store.create(layout, stage.units)
        return
    following, samples = step + 1, trainer.ramp.before(step + 1)
    expected = samples - trainer.uncounted(following, scaled=False)
    if not expected:
        trainer.loss_scales.begin(following)
        sliced.load_weights(directory, stage.models, step, samples)
        store.create(layout, stage.units, step)
        return
    states, told = sliced.load(
        directory, stage.models, layout, trainer.rank, stage.units, trainer.optimizer, step, samples
    )
    left_out = expected - common.scheduled(told, expected)
    if left_out < 0 or (left_out and not trainer.loss_scales.on):
        raise sliced.other_count(directory, samples, samples - left_out, expected)
    # Scales are found by the first steps, so that those are the ones that were skipped, if batches grow.
    trainer.loss_scales.begin(following, left_out // trainer.ramp.samples(1), left_out, common.scaler(told))
    store.create(layout, stage.units)
    sliced.fill(store, stage.units, states, step)


def checkpoint_of(trainer: Trainer, step: int) -> str:
    """The directory to go back to for the checkpoint of a step: where this job saves, or where it was loaded from."""
    save = trainer.args.save
    return save if save and folder.has_step(save, step) else trainer.args.load
