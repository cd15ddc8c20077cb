"""Building: a rank's part of the model and of the optimizer's state: the first, a newcomer's, a checkpoint's."""

from __future__ import annotations

from megatron_elastic.adaptor.checkpoints import folder, sliced
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
    store = _empty_store(trainer)
    load(trainer, store, trainer.standing.step - 1, trainer.args.load)
    tenure = trainer.begin_tenure(layout, store)
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
    layout, stage = decode(invite.layout), trainer.stage
    trainer.transport.trust(invite.key)
    trainer.reach(layout)
    if trainer.store is None or not stage.fits(layout):
        trainer.store = None
        trainer.make_groups(layout)
        stage.forget()
        stage.learn(invite.shapes, layout)
        stage.hold(layout)
        trainer.batches.open()
        trainer.store = _empty_store(trainer)
    trainer.hooks.at("prepare")
    trainer.control.send(Ready(rank=trainer.rank, epoch=invite.epoch))
    trainer.prepared()


def load(trainer: Trainer, store: StateStore, step: int, directory: str) -> None:
    """Model and optimizer state as after ``step`` steps: those of the checkpoint in ``directory``, or fresh ones."""
    stage, layout, origin = trainer.stage, trainer.layout, trainer.origin
    if step == 0:
        if origin.directory is not None:
            sliced.load_weights(origin.directory, stage.models, origin.step)
        store.create(layout, stage.units)
        return
    samples = step * trainer.args.global_batch_size
    states = sliced.load(directory, stage.models, layout, trainer.rank, stage.units, trainer.optimizer, step, samples)
    store.create(layout, stage.units)
    sliced.fill(store, stage.units, states, step)


def checkpoint_of(trainer: Trainer, step: int) -> str:
    """The directory to go back to for the checkpoint of a step: where this job saves, or where it was loaded from."""
    save = trainer.args.save
    return save if save and folder.has_step(save, step) else trainer.args.load


def _empty_store(trainer: Trainer) -> StateStore:
    keeps = trainer.config.replay == "state"
    rate = trainer.config.background_mbps * 1e6 / 8
    return StateStore(trainer.stage.partitions, trainer.optimizer, trainer.transport, keeps, rate)
