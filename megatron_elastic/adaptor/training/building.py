"""Building: a rank's part of the model and of the optimizer's state, its first, a newcomer's, a checkpoint's; and its
tenure under a layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_elastic.adaptor.checkpoints import common, sliced
from megatron_elastic.adaptor.checkpoints.folder import has_step, step_folder
from megatron_elastic.adaptor.layers import documents
from megatron_elastic.adaptor.model import tokens
from megatron_elastic.adaptor.model.grains import GrainModel
from megatron_elastic.adaptor.settings import activations_dtype
from megatron_elastic.adaptor.training.evaluation import tell_of_none
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.messages import Built, Invite, Ready
from megatron_elastic.cluster.rank import standing
from megatron_elastic.cluster.title import entitle
from megatron_elastic.comm.group import Group
from megatron_elastic.emulation.executor import EmulatedExecutor
from megatron_elastic.emulation.reduction import EmulatedReduction
from megatron_elastic.layout import Layout, decode
from megatron_elastic.pipeline.executor import Executor
from megatron_elastic.pipeline.meter import Meter
from megatron_elastic.pipeline.program import unpack
from megatron_elastic.pipeline.route import usual
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.state.device_reduction import DeviceReduction
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.replay import GradientReplay, Replay, StateReplay
from megatron_elastic.state.store import StateStore
from megatron_elastic.state.verification import Verification

_VOTE_GROUP = (1 << 14) - 1
"""Group id of the vote, beyond any that Megatron's groups reach."""


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


def begin_tenure(trainer: Trainer, layout: Layout, store: StateStore, program: bytes | None) -> Tenure:
    """What ``layout`` makes of a rank from now on. The stage holds what it is to hold there.

    ``program``: in what order cells do their work, packed; None: in the usual one.
    """
    args, stage, every = trainer.args, trainer.stage, trainer.config.verify_every
    since = _metered(trainer, layout)
    store.own(layout.owned(trainer.rank))
    replay: Replay = (
        StateReplay(layout, trainer.rank, store)
        if trainer.config.replay == "state"
        else GradientReplay(layout, trainer.transport, store, trainer.accumulator.mean_dtype)
    )
    neighbours = layout.hosts[layout.host_of(trainer.rank)]
    index, cell = layout.stage_of(trainer.rank), layout.cell_of(trainer.rank)
    entitle(f"rank {trainer.rank} (stage {index}, cell {layout.stages[index].cells.index(cell)})")
    leader, last = cell.leader, index == layout.way[-1].stage
    # Who only follows does nothing, and may have come when the others had their order.
    ops = (for_cell(trainer.config.schedule, layout, leader) if program is None or cell.shadow
           else unpack(program, leader))  # fmt: skip
    make_reduction: Callable[..., Reduction] = Reduction
    make_executor: Callable[..., Executor] = Executor
    if not trainer.device.is_host and trainer.config.reduction == "device":
        make_reduction = partial(DeviceReduction, communicators=trainer.communicators)
    if trainer.accelerator is not None:
        trainer.accelerator.enter(layout)
        make_reduction = partial(EmulatedReduction, accelerator=trainer.accelerator)
        make_executor = partial(EmulatedExecutor, accelerator=trainer.accelerator)
    sequence = args.seq_length // (layout.cp * (layout.tp if args.sequence_parallel else 1))
    return Tenure(
        layout, since, store,
        reduction=make_reduction(layout, trainer.transport, stage.units, store, trainer.accumulator),
        replay=replay,
        verification=Verification(layout, trainer.transport, stage.units, store, every) if every else None,
        legs=usual(layout, leader, ops),
        grains=GrainModel(
            stage.wrapped, stage.models[0].config, trainer.forward_step, stage.key, last,
            documents.kept_apart(args), trainer.accumulator,
        ),
        executor=make_executor(
            layout, trainer.transport, trainer.hooks, (sequence, args.micro_batch_size, args.hidden_size),
            activations_dtype(args, stage.models[0].config), stage.meter, tokens.of_sums(args), trainer.device,
        ),
        vote_group=Group(trainer.transport, _VOTE_GROUP, layout.ranks),
        speaker=min(rank for rank in neighbours if rank in layout.places),
    )  # fmt: skip


def _metered(trainer: Trainer, layout: Layout) -> int:
    """Measure from now on what this rank does in ``layout``; the epoch since which it has done that."""
    stage, index = trainer.stage, layout.stage_of(trainer.rank)
    # An embedding that is at home elsewhere is the head's weight here.
    parameters = {layout.units[unit] if layout.home(unit) == index else "head": buffer.params
                  for unit, buffer in stage.units.items()}  # fmt: skip
    before, metered = trainer.tenure, stage.meter
    stage.meter = Meter(parameters, len(layout.chunks(index)), trainer.config.schedule == "search")
    if before is None or before.layout.task_of(trainer.rank) != layout.task_of(trainer.rank):
        return layout.epoch
    stage.meter.go_on(metered)
    return before.since
