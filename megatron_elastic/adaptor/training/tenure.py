"""Tenure: what one layout makes of a member. It is made with the layout and dropped with it, and all that is in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron_elastic.adaptor.layers import documents
from megatron_elastic.adaptor.model import tokens
from megatron_elastic.adaptor.model.grains import GrainModel
from megatron_elastic.adaptor.settings import params_dtype
from megatron_elastic.adaptor.training.recutting import Preparation
from megatron_elastic.cluster.messages import Plan
from megatron_elastic.cluster.title import entitle
from megatron_elastic.comm.group import Group
from megatron_elastic.emulation.executor import EmulatedExecutor
from megatron_elastic.emulation.reduction import EmulatedReduction
from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.executor import Executor
from megatron_elastic.pipeline.meter import Meter
from megatron_elastic.pipeline.program import unpack
from megatron_elastic.pipeline.resumption import Remainder
from megatron_elastic.pipeline.route import Leg, first_of, usual
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.state.device_reduction import DeviceReduction
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.replay import GradientReplay, Replay, StateReplay
from megatron_elastic.state.store import StateStore
from megatron_elastic.state.verification import Verification

if TYPE_CHECKING:
    from megatron_elastic.adaptor.training.trainer import Trainer

_VOTE_GROUP = (1 << 14) - 1
"""Group id of the vote, beyond any that Megatron's groups reach."""


@dataclass(slots=True, eq=False)
class Tenure:
    """What a rank computes, sends and receives in the steps of ``layout``, and what it knows only while that holds.

    Where it stands in the layout, as far as the coordinator or other ranks have to know, is in its ``Standing``.
    """

    layout: Layout
    since: int
    """Epoch since which it has done with a grain what it does here."""
    store: StateStore
    """Outlives the layout; here because a member has one."""
    reduction: Reduction
    replay: Replay
    verification: Verification | None
    legs: tuple[Leg, ...]
    """What it does in a step with a full batch."""
    grains: GrainModel
    executor: Executor
    vote_group: Group
    speaker: int
    """The lowest rank of the layout on this host: it tells the agent of each step."""
    level: bool = False
    """Whether all of its ranks have what some had not (``step.level``)."""
    remainder: Remainder | None = None
    """What it does of the step in progress instead, if that is resumed."""
    plan: Plan | None = None
    """The layout to switch to that it was told of last."""
    preparation: Preparation | None = None
    """What it gets for that one while training goes on, if cells get another shape."""
    copying: bool = False
    """Whether copies had to be made for the layout, to or from this rank."""
    settled: bool = False
    """Whether the coordinator knows that everything the layout asks for is live here."""
    boundary_ms: float | None = None
    """Time of an activation to the next stage, when last measured."""

    def legs_of(self, grains: int) -> tuple[Leg, ...]:
        """What it does in a step of the first ``grains`` grains, which may be nothing."""
        return self.legs if grains == self.layout.num_grains else first_of(self.legs, grains)

    def await_units(self, units: Sequence[str]) -> None:
        """Return when the parameters of these units are here."""
        for name in units:
            self.reduction.await_parameters(self.layout.units.index(name))


def begin_tenure(trainer: Trainer, layout: Layout, store: StateStore, program: bytes | None) -> Tenure:
    """What ``layout`` makes of a rank from now on. The stage holds what it is to hold there.

    ``program``: in what order cells do their work, packed; None: in the usual one.
    """
    args, stage, every = trainer.args, trainer.stage, trainer.config.verify_every
    since = _metered(trainer, layout)
    store.own(layout.owned(trainer.rank))
    replay: Replay = (
        StateReplay(layout, store)
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
            params_dtype(args), stage.meter, tokens.of_sums(args), trainer.device,
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
