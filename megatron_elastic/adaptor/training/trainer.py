"""Trainer: what a rank keeps whatever the layout.

Megatron's model, data sets, step functions and scheduler do the work of a step; groups, gradients, optimizer state and
random numbers follow the layout.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_elastic.adaptor.checkpoints import common, folder, writer
from megatron_elastic.adaptor.checkpoints.saving import DiskFault, Saving
from megatron_elastic.adaptor.model import attention, groups, linear, random, router, tokens
from megatron_elastic.adaptor.model.grains import ForwardStep, GrainModel
from megatron_elastic.adaptor.model.optimizer import ParameterGroups, make_optimizer
from megatron_elastic.adaptor.model.stage import ModelProvider, Stage
from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler, main_grads_dtype
from megatron_elastic.adaptor.training import ending
from megatron_elastic.adaptor.training.batches import Batches, DatasetsProvider
from megatron_elastic.adaptor.training.rates import RatesByStep
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.without_cuda import stand_ins
from megatron_elastic.cluster import standing
from megatron_elastic.cluster.control import Control
from megatron_elastic.cluster.messages import Event, Injected, Reachable, VoteResult
from megatron_elastic.cluster.standing import Standing
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.tag import check_sizes
from megatron_elastic.comm.transport import Transport
from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.faults.injection import Injection
from megatron_elastic.layout import Layout
from megatron_elastic.numerics.exact import make_accumulator
from megatron_elastic.pipeline.executor import Executor
from megatron_elastic.pipeline.meter import Meter
from megatron_elastic.pipeline.route import usual
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.pipeline.work import Work
from megatron_elastic.plan import memory
from megatron_elastic.state.optimizer import Update
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.replay import GradientReplay, Replay, StateReplay
from megatron_elastic.state.store import StateStore
from megatron_elastic.state.verification import Verification

_VOTE_GROUP = (1 << 14) - 1
"""Group id of the vote, beyond any that Megatron's groups reach."""


class Trainer:
    """One rank's training. The other modules of this room do it; a subclass can change or add to what is marked below.

    Args:
        args: Megatron's flags, and the ``elastic_*`` ones.
        control: the line to the coordinator.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        control: Control,
        model_provider: ModelProvider,
        datasets_provider: DatasetsProvider,
        forward_step: ForwardStep,
    ) -> None:
        self.args = args
        self.config = ElasticConfig.from_args(args)
        self.control = control
        self.rank = control.rank
        self.exit_signal = ending.ExitSignal(args)
        self.odometer = control.odometer
        """What the agent sees of this rank."""
        self.hooks = Hooks(self.rank, self.config.inject, self._announce, self._harm)
        self.hooks.attach(self.odometer.at)
        world_size = int(os.environ["WORLD_SIZE"])
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        crowded = world_size > len(os.sched_getaffinity(0))
        limit = self.config.wait_timeout
        self.transport = Transport(
            self.rank, control.interrupt, limit, crowded, find=partial(control.find, timeout=limit),
            refused=lambda why: self.event("refused_message", reason=why),
            lasts=lambda peers: self.event("waits", peers=peers, seconds=limit), odometer=self.odometer,
            patience=self.config.hang_timeout,
        )
        stand_ins.apply()
        writer.apply()
        common.allow_enums()
        random.install(args.seed)
        linear.install()
        router.install()
        attention.install()
        self.layout = memory.first_layout(args, world_size, local_ranks)
        """The newest layout that this rank knows."""
        _check_sizes(self.layout)
        if self.rank in self.layout.ranks:
            self.make_groups(self.layout)
        optimizer_config = build_optimizer_config(args)
        self.optimizer = make_optimizer(optimizer_config)
        self.parameter_groups = ParameterGroups(optimizer_config)
        self.rates = self.make_rates()
        self.measures = router.names(args)
        """What is measured besides losses and norms."""
        self._check_memory(local_ranks)
        self._check_save()
        # A tied embedding gets a gradient from each of its two stages, a norm one from each tensor-parallel rank, both
        # from each context-parallel one; and grains may be cut between any samples.
        each = max(2, args.tensor_model_parallel_size) * self.layout.cp * self.layout.samples
        self.accumulator = make_accumulator(
            self.config.consistency, each * self.layout.num_batches, main_grads_dtype(args)
        )
        self.stage = Stage(
            args, self.rank, model_provider, self.parameter_groups, self.accumulator, self.transport.look,
            self._before_use,
        )  # fmt: skip
        self.origin = folder.Origin.of(args)
        first = self.origin.done + 1
        member = self.rank in self.layout.ranks
        self.standing = Standing(rank=self.rank, step=first, epoch=self.layout.epoch, member=member)
        self.saving = Saving(args.save, args.save_interval, self.rank, first - 1, limit, self.odometer,
                             control.interrupt.check)
        self.batches = Batches(args, datasets_provider, self.odometer, control.interrupt.check)
        self.store: StateStore | None = None
        """None until the model is built; from then on training can only go on, not begin anew."""
        self.tenure: Tenure | None = None
        """What the present layout makes of this rank; None while it is in no cell or has no part of the model yet."""
        self.work: Work | None = None
        """What it has done of the step in progress, from the first grain to the commit."""
        self.counted_from = first, 0
        """The step, and bytes sent before it, from which on traffic is counted."""
        self._forward_step = forward_step

    def close(self) -> None:
        """Release links and groups."""
        self.transport.close()

    def _check_memory(self, ranks: int) -> None:
        """Raise UsageError if the ``ranks`` of this machine need more memory than it has. The first of them looks."""
        if self.rank in self.layout.ranks and self.rank % ranks == 0:
            needs = memory.estimate(self.layout, memory.Job.of(self.args))
            problem = memory.shortage([needs[rank] for rank in range(self.rank, self.rank + ranks)], memory.available())
            if problem is not None:
                raise UsageError(problem)

    def _check_save(self) -> None:
        """Raise UsageError if checkpoints cannot go where they are to go, however empty the disk."""
        if self.args.save and not Path(self.args.save).is_dir():
            try:
                Path(self.args.save).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"--save {self.args.save}: {error.strerror}; name a folder that all nodes share"
                ) from None

    # ---- what a subclass may change ----------------------------------------------------------

    def make_rates(self) -> RatesByStep:
        """What learning rate and weight decay are in each step."""
        return RatesByStep(self.args, partial(build_scheduler, self.args), self.parameter_groups)

    def saved_besides(self, step: int) -> dict[str, Any]:
        """What a checkpoint says for plain training only, which needs more than samples and tensors."""
        return self.rates.state(step)

    def prepared(self) -> None:
        """This rank has its part of the model: training begins, or this rank is about to enter."""

    def goes_on(self) -> bool:
        """Whether there is another step to do. All ranks ask before each, and again after a recovery."""
        return self.standing.step <= self.args.train_iters and not (
            self.exit_signal.listens and ending.somebody(self.exit_signal.received)
        )

    def committed(self, result: VoteResult) -> None:
        """This rank has done a step. May come again for the same step, after a recovery."""

    def evaluated(self, done: int, name: str, loss: float) -> None:
        """The mean loss of some batches of ``name``'s data after ``done`` steps is known."""
        if self.rank == self.layout.ranks[0]:
            self.event("evaluated", step=done, data=name, loss=loss)

    def conclude(self, tenure: Tenure, done: int) -> None:
        """What is due after the last step. Repeated if it is interrupted."""

    # ---- one layout --------------------------------------------------------------------------

    def reach(self, layout: Layout) -> None:
        """Listen for the other hosts of ``layout``, if it has any, and tell where."""
        if len(layout.hosts) > 1 and not self.transport.listening:
            self.transport.listen()
            self.control.send(Reachable(rank=self.rank, address=self.transport.address))

    def make_groups(self, layout: Layout) -> None:
        """Megatron's groups, as this rank has them in its first layout."""
        timeout = timedelta(seconds=self.config.wait_timeout)
        groups.initialize(self.transport, layout, layout.place_of(self.rank), timeout)
        groups.edit(layout, self.rank)
        random.name_streams(self.args.seed)

    def begin_tenure(self, layout: Layout, store: StateStore) -> Tenure:
        """What ``layout`` alone determines. The stage holds what it is to hold there."""
        args, stage, every = self.args, self.stage, self.config.verify_every
        replay: Replay = (
            StateReplay(layout, store)
            if self.config.replay == "state"
            else GradientReplay(layout, self.transport, store, self.accumulator.mean_dtype)
        )
        neighbours = layout.hosts[layout.host_of(self.rank)]
        stage.meter = Meter([unit.params for unit in stage.units.values()])
        leader, last = layout.cell_of(self.rank).leader, layout.stage_of(self.rank) == layout.pipeline_size - 1
        sequence = args.seq_length // (layout.cp * (layout.tp if args.sequence_parallel else 1))
        return Tenure(
            layout, store,
            reduction=Reduction(layout, self.transport, stage.units, store, self.accumulator),
            replay=replay,
            verification=Verification(layout, self.transport, stage.units, store, every) if every else None,
            legs=usual(layout, leader, for_cell(self.config.schedule, layout, leader)),
            grains=GrainModel(stage.wrapped, stage.models[0].config, self._forward_step, stage.key, last),
            executor=Executor(
                layout, self.transport, self.hooks, (sequence, args.micro_batch_size, args.hidden_size),
                torch.bfloat16 if args.bf16 else torch.float32, stage.meter, tokens.of_sums(args),
            ),
            vote_group=Group(self.transport, _VOTE_GROUP, layout.ranks),
            speaker=min(rank for rank in neighbours if rank in layout.places),
        )  # fmt: skip

    def await_parameters(self, tenure: Tenure) -> None:
        """Return when all parameters are here that the newest step made."""
        tenure.reduction.finish_gathering()
        self.standing = standing.distributed(self.standing)

    def _before_use(self, units: Sequence[str]) -> None:
        """A forward pass is about to use the parameters of these units."""
        assert self.tenure is not None
        self.tenure.await_units(units)

    def new_work(self) -> Work:
        """Nothing done yet of the step in progress."""
        limit = self.config.log_mb * 1e6 if self.config.redo == "lost" else 0
        return Work(self.standing.step, self.layout.num_chunks, limit)

    def update(self, result: VoteResult) -> Update:
        """What a vote says about every state."""
        limit = self.args.clip_grad
        clip = min(1.0, limit / (result.grad_norm + 1e-6)) if limit > 0 else 1.0
        factor = clip * tokens.weight(self.args, result.tokens)
        return Update(result.step, factor, self.rates.at(result.step), skipped=result.skipped)

    # ---- what it tells -----------------------------------------------------------------------

    def event(self, kind: str, **fields: float | int | str | bool | None | list[int]) -> None:
        """Have a line written for people and tools."""
        self.control.send(Event(rank=self.rank, epoch=self.layout.epoch, kind=kind, fields=fields))

    def _announce(self, injection: Injection) -> None:
        self.control.send(
            Injected(rank=self.rank, time=time.time(), spec=str(injection), deadly=injection.deadly)
        )

    def _harm(self, injection: Injection) -> None:
        """Do on purpose what an injection says."""
        seconds = float("inf") if injection.seconds is None else injection.seconds
        if injection.action == "disconnect":
            self.transport.cut(injection.peers, seconds)
            return
        assert injection.what is not None
        if injection.action == "disk":
            self.saving.fault = DiskFault(injection.what, time.monotonic() + seconds)
        else:
            self._flip(injection.what)

    def _flip(self, what: str) -> None:
        """Damage this rank's memory, to see that it is found: one bit in the middle of a slice."""
        assert self.store is not None
        if what == "weights":
            unit = next(iter(self.stage.units.values()))
            tensor = unit.slice_of(unit.params, 0)
        else:
            at = (self.layout.owned if what == "moments" else self.layout.replicated)(self.rank)[0]
            tensor = self.store[at].tensors[1]
        tensor.view(torch.int32)[tensor.nbytes // 8] ^= 1 << 21


def _check_sizes(layout: Layout) -> None:
    """Raise UsageError if messages of such a layout cannot be told apart."""
    try:
        check_sizes(
            units=len(layout.units), slices=layout.num_slices, grains=layout.num_grains,
            positions=layout.pipeline_size * layout.num_chunks,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None
