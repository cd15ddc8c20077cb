"""Trainer: what a rank keeps whatever the layout.

Megatron's model, data sets, step functions and scheduler do the work of a step; groups, gradients, optimizer state and
random numbers follow the layout.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from megatron_elastic.adaptor.checkpoints import common, writer
from megatron_elastic.adaptor.checkpoints.origin import Origin
from megatron_elastic.adaptor.checkpoints.saving import DiskFault, Saving
from megatron_elastic.adaptor.layers import attention, documents, engine, experts, latent, linear, mtp, random, router
from megatron_elastic.adaptor.model import groups, tokens
from megatron_elastic.adaptor.model.grains import ForwardStep
from megatron_elastic.adaptor.model.optimizer import ParameterGroups, make_optimizer
from megatron_elastic.adaptor.model.scale import LossFactor
from megatron_elastic.adaptor.model.stage import ModelProvider, Stage
from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler, main_grads_dtype
from megatron_elastic.adaptor.training import ending
from megatron_elastic.adaptor.training.batches import Batches, DatasetsProvider
from megatron_elastic.adaptor.training.recutting import Recutting, Room
from megatron_elastic.adaptor.training.schedules.counts import Counts
from megatron_elastic.adaptor.training.schedules.rates import RatesByStep
from megatron_elastic.adaptor.training.schedules.scales import LossScales, Rule
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.without_cuda import stand_ins
from megatron_elastic.cluster.messages import Event, Injected, Reachable, VoteResult
from megatron_elastic.cluster.node.line import FIRST_HOST_VARIABLE
from megatron_elastic.cluster.rank import standing
from megatron_elastic.cluster.rank.control import Control
from megatron_elastic.cluster.rank.standing import Standing
from megatron_elastic.comm.device.communicators import Communicators
from megatron_elastic.comm.device.devices import Devices
from megatron_elastic.comm.tag import check_sizes, describe
from megatron_elastic.comm.transport import Transport
from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.device import allowance
from megatron_elastic.device.choice import choose
from megatron_elastic.device.device import Device
from megatron_elastic.emulation.accelerator import Accelerator
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.faults.injection import Injection
from megatron_elastic.layout import Layout
from megatron_elastic.numerics import keyed
from megatron_elastic.numerics.deferred import make_deferred
from megatron_elastic.numerics.exact import Accumulator, make_accumulator
from megatron_elastic.observe.tracing.tracer import FOLDER, Tracer, Window
from megatron_elastic.pipeline.work import Work
from megatron_elastic.plan.costs import memory
from megatron_elastic.plan.split import mtp_layers
from megatron_elastic.plan.work.ramp import Ramp
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.copying import Rate
from megatron_elastic.state.optimizer import Update
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.store import StateStore

_SHOWN_EVERY = 2.0
"""Seconds from one look at memory to the next."""


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
        self.evaluations: tuple[str, ...] = ("validation",) if args.eval_interval else ()
        """Data sets of ``batches`` on which it is to be evaluated."""
        self.rank = control.rank
        self.exit_signal = ending.ExitSignal(args)
        self.odometer = control.odometer
        """What the agent sees of this rank."""
        self.hooks = Hooks(self.rank, self.config.inject, self._announce, self._harm)
        self.hooks.attach(self.odometer.at)
        self.tracer = self._make_tracer()
        self.odometer.tracer = self.tracer
        world_size = int(os.environ["WORLD_SIZE"])
        on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        first_host = int(os.environ.get(FIRST_HOST_VARIABLE, world_size))
        limit = self.config.wait_timeout
        self.transport = self._make_transport(allowance.crowded(on_machine))
        self.device = self._choose_device()
        """What this rank computes on."""
        self.accelerator = self._make_accelerator()
        """What this rank behaves as, if that is emulated."""
        self.devices = Devices(control.interrupt, timedelta(seconds=limit))
        """Ends what of reductions blocks on a device."""
        self.communicators = Communicators(self.transport, self.devices, self.device.name)
        _adapt_megatron(args, self.config)
        self.layout = memory.first_layout(args, world_size, first_host)
        """The newest layout that this rank knows."""
        if self.accelerator is not None:
            self.layout = self.accelerator.profile.fitting(self.layout, args)
        _check_sizes(self.layout)
        if self.rank in self.layout.ranks:
            self.make_groups(self.layout)
        optimizer_config = build_optimizer_config(args)
        self.optimizer = make_optimizer(optimizer_config)
        self.parameter_groups = ParameterGroups(optimizer_config)
        self.loss_scales = LossScales(Rule.of(optimizer_config))
        self.origin = Origin.of(args, begins=self.rank < world_size)
        tuned = bool(getattr(args, "finetune", False))
        # Who comes later may find a newer checkpoint, and is told by the others.
        begins = Ramp.of(args), tuned, self.begins_optimizer
        start = self.origin.start(*begins, files=self.rank == 0) if self.rank < world_size else None
        self.counts = Counts(args, self.loss_scales, start)
        self.ramp = self.counts.ramp(args)
        """How large the batch of each step is. Its grains are those of the layout."""
        self.rates = self.make_rates()
        if start is not None:
            self.rates.begin(self.origin.schedule(self.begins_optimizer))
        self.measures = (*router.names(args), *mtp.names(args))
        """What is measured besides losses and norms."""
        self.counts_zeros: bool = getattr(args, "log_num_zeros_in_grad", False)
        """Whether gradients are searched for zeros, too."""
        self._check_memory(on_machine)
        self._check_save()
        self._model_provider = model_provider
        self.take_shape(self.layout)
        self.recut: Recutting | None = None
        """What this rank is to have in cells of another shape, while nobody knows whether they will be."""
        first = (self.origin.step if start is None else start.done) + 1
        member = self.rank in self.layout.ranks
        self.standing = Standing(rank=self.rank, step=first, epoch=self.layout.epoch, member=member)
        retain = getattr(args, "save_retain_interval", None)
        self.saving = Saving(args.save, args.save_interval, retain, self.rank, first - 1, limit, self.odometer,
                             control.interrupt.check)
        self.batches = Batches(args, datasets_provider, self.odometer, control.interrupt.check, self.device, self.rank)
        self.store: StateStore | None = None
        """None until the model is built; from then on training can only go on, not begin anew."""
        self.tenure: Tenure | None = None
        """What the present layout makes of this rank; None while it is in no cell or has no part of the model yet."""
        self.work: Work | None = None
        """What it has done of the step in progress, from the first grain to the commit."""
        self.counted_from = first, 0
        """The step, and bytes sent before it, from which on traffic is counted."""
        self.forward_step = forward_step
        self._shown = float("-inf")
        """When memory was looked at last."""

    def close(self) -> None:
        """Release links and groups, and end threads."""
        self.batches.close()
        self.tracer.write()
        self.devices.close()
        self.transport.close()

    def _make_transport(self, crowded: bool) -> Transport:
        """The links to other ranks. ``crowded``: this machine has more ranks than processors."""
        control, limit = self.control, self.config.wait_timeout
        return Transport(
            self.rank, control.interrupt, limit, crowded, find=partial(control.find, timeout=limit),
            refused=lambda why: self.event("refused_message", reason=why),
            lasts=lambda peers: self.event("waits", peers=peers, seconds=limit), odometer=self.odometer,
            patience=self.config.hang_timeout, tracer=self.tracer,
        )

    def _make_accelerator(self) -> Accelerator | None:
        """What ``--elastic-emulate`` asks for."""
        if self.config.emulate is None:
            return None
        profile, run_dir = Profile.read(self.config.emulate), Path(os.environ["MEGATRON_ELASTIC_RUN_DIR"])
        return Accelerator(profile, self.transport, run_dir, lambda: self.hooks.slowness)

    def _choose_device(self) -> Device:
        """The device of this rank, in use from now on. Raises UsageError if there is none as the flags want it."""
        config = self.config
        try:
            device = choose(config.device, int(os.environ["LOCAL_RANK"]))
            device.use()
        except RuntimeError as error:
            raise UsageError(f"--elastic-device {config.device}: {error}") from None
        if not device.is_host and config.emulate is not None:
            raise UsageError("--elastic-emulate computes what is tiny, and on the CPU: add --elastic-device cpu")
        if not device.equals_host and config.replay == "gradient":
            raise UsageError(f"--elastic-replay gradient: an update on {device.name} does not give the bits that it "
                             "gives in host memory, where copies are: give --elastic-replay state")
        keyed.draw_from(device.generator)
        return device

    def _make_tracer(self) -> Tracer:
        """What notes what this rank does, in the steps of ``--elastic-trace``."""
        if self.config.trace is None:
            return Tracer.of_nothing()
        folder = Path(os.environ["MEGATRON_ELASTIC_RUN_DIR"]) / FOLDER
        tracer = Tracer(self.rank, Window.parse(self.config.trace), folder, describe)
        self.hooks.attach(tracer.at)
        return tracer

    def _check_memory(self, ranks: int) -> None:
        """Raise UsageError if the ``ranks`` of this machine need more memory than it has, or those that share a device
        more than that has. The first of them looks.
        """
        if self.rank not in self.layout.ranks or self.rank % ranks:
            return
        needs, device = memory.estimate(self.layout, memory.Job.of(self.args)), self.device
        here = [rank for rank in range(self.rank, self.rank + ranks) if rank in needs]  # no spares
        problem = memory.shortage([needs[rank] for rank in here], memory.available(), devices=not device.is_host)
        if problem is None and not device.is_host:
            sharers = [needs[rank] for rank in here[:: device.count()]]
            problem = memory.shortage_of_device(sharers, device.memory().total)
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
        if not self.saves_optimizer:
            return {}
        following = step + 1
        apart = self.layout.ep > 1  # as in Megatron
        state = self.rates.state(self.counts.number(following) - 1, self.counted(following), apart)
        if self.loss_scales.on:
            for optimizer in state["optimizer"].values() if apart else (state["optimizer"],):
                optimizer["grad_scaler"] = self.loss_scales.saved(following)
        return state

    @property
    def begins(self) -> bool:
        """Whether this rank is to be there from the job's first step on, and has not what it takes yet."""
        return self.store is None and self.standing.member

    @property
    def trains(self) -> bool:
        """Whether the job trains at all, or only evaluates what it has loaded (``--skip-train``)."""
        return not getattr(self.args, "skip_train", False)

    @property
    def saves_optimizer(self) -> bool:
        """Whether checkpoints have the optimizer's state."""
        return not getattr(self.args, "no_save_optim", False)

    def prepared(self) -> None:
        """This rank has its part of the model: training begins, or this rank is about to enter."""

    def goes_on(self) -> bool:
        """Whether there is another step to do. All ranks ask before each, and again after a recovery."""
        return self.trains and self.standing.step <= self.args.train_iters and not (
            self.exit_signal.listens and ending.somebody(self.exit_signal.received)
        )

    def applied(self, tenure: Tenure) -> None:
        """This rank has the weights that a step makes of its slices, and will commit it. Repeated if interrupted."""

    def committed(self, result: VoteResult) -> None:
        """This rank has done a step. May come again for the same step, after a recovery."""

    def evaluated(self, done: int, name: str, loss: float) -> None:
        """The mean loss of some batches of ``name``'s data after ``done`` steps is known."""
        if self.rank == self.layout.ranks[0]:
            self.event("evaluated", step=done, data=name, loss=loss)

    def saved(self, step: int) -> None:
        """A checkpoint is complete. The first rank of the layout is told."""
        self.event("saved", step=step, directory=str(self.args.save))

    def pause(self) -> AbstractContextManager[None]:
        """Around what is due between two steps: its time is none of theirs."""
        return nullcontext()

    def conclude(self, tenure: Tenure, done: int) -> None:
        """What is due after the last step. Repeated if it is interrupted."""

    # ---- one layout --------------------------------------------------------------------------

    def reach(self, layout: Layout) -> None:
        """Listen for the other hosts of ``layout``, if it has any, and tell where."""
        if len(layout.hosts) > 1 and not self.transport.listening:
            self.transport.listen()
            self.control.send(Reachable(rank=self.rank, address=self.transport.address))

    def fits(self, layout: Layout) -> bool:
        """Whether cells of ``layout`` have the shape that this rank's model, sums and flags are made for."""
        args = self.args
        sizes = args.tensor_model_parallel_size, args.context_parallel_size, args.expert_model_parallel_size
        return bool(sizes == (layout.tp, layout.cp, layout.ep))

    @property
    def follows(self) -> bool:
        """Whether states that are cut anew can follow the present ones, by their gradients."""
        return self.config.replay == "gradient" and self.optimizer.elementwise

    def take_shape(self, layout: Layout, accumulator: Accumulator | None = None) -> None:
        """Have no part of the model yet, and all else as the shape of a layout's cells wants it.

        ``accumulator``: theirs, if that is made already.
        """
        args = self.args
        args.tensor_model_parallel_size = args.expert_tensor_parallel_size = layout.tp
        args.context_parallel_size, args.expert_model_parallel_size = layout.cp, layout.ep
        # As Megatron: a rank alone has the whole sequence.
        args.sequence_parallel = getattr(args, "sequence_parallel_asked", args.sequence_parallel) and layout.tp > 1
        self.ramp = self.counts.ramp(args)
        self.accumulator = accumulator or self._make_accumulator(layout)
        self.loss_factor = LossFactor(args, layout, self.accumulator, self.loss_scales.on)
        self.stage = Stage(
            args, self.rank, self._model_provider, self.parameter_groups, self.accumulator, self.loss_factor,
            self.transport.look, self._before_use, self.device,
        )  # fmt: skip

    def _make_accumulator(self, layout: Layout) -> Accumulator:
        """What sums gradients in cells of a layout."""
        # An embedding gets a gradient from each of up to three uses, a norm one from each tensor-parallel rank, both
        # from each context-parallel one; and grains may be cut between any samples.
        each = max(3 if mtp_layers(self.args) else 2, layout.tp) * layout.cp * layout.samples
        passes = self.loss_scales.on or not getattr(self.args, "check_for_nan_in_loss_and_grad", True)
        sums = self.config.consistency, each * layout.num_batches, main_grads_dtype(self.args), passes
        return make_accumulator(*sums) if self.device.is_host else make_deferred(*sums, device=self.device.torch)

    def make_room(self, layout: Layout, partitions: Mapping[int, Partition]) -> Room:
        """Where this rank's units will be in cells of another shape."""
        accumulator = self._make_accumulator(layout)
        held = layout.held_by(self.rank)
        return Room(accumulator, {unit: UnitBuffer(partitions[unit], accumulator, self.device.torch) for unit in held})

    def make_groups(self, layout: Layout) -> None:
        """Megatron's groups, as this rank has them in its first layout."""
        timeout = timedelta(seconds=self.config.wait_timeout)
        groups.initialize(self.transport, layout, layout.place_of(self.rank), timeout)
        groups.edit(layout, self.rank)
        random.name_streams(self.args.seed)

    def make_store(self, partitions: Mapping[int, Partition]) -> StateStore:
        """Room for states of slices, of which there are none yet."""
        keeps, rate, dials = self.config.replay == "state", self._copying_rate(partitions), self.odometer.dials
        return StateStore(partitions, self.optimizer, self.transport, keeps, rate, self.device, dials)

    def _copying_rate(self, partitions: Mapping[int, Partition]) -> Rate:
        """What ``--elastic-background-mbps`` allows; no more than emulated links do."""
        limit = self.config.background_mbps * 1e6 / 8
        if self.accelerator is None:
            return lambda _: limit
        each = 4 * (1 + len(self.optimizer.moments))
        emulated = self.accelerator.copying_rate(self.layout, lambda unit: each * partitions[unit].size)
        return lambda unit: min(limit or math.inf, emulated(unit))

    def await_parameters(self, tenure: Tenure) -> None:
        """Return when all parameters are here that the newest step made."""
        tenure.reduction.finish_gathering()
        self.standing = standing.distributed(self.standing)

    def _before_use(self, units: Sequence[str]) -> None:
        """A forward pass is about to use the parameters of these units."""
        assert self.tenure is not None
        self.tenure.await_units(units)

    def new_work(self, grains: int) -> Work:
        """Nothing done yet of the step in progress, which has so many grains."""
        limit = self.config.log_mb * 1e6 if self.config.redo == "lost" else 0
        return Work(self.standing.step, self.layout, grains, limit)

    def update(self, result: VoteResult) -> Update:
        """What a vote says about every state; the scale of the next step follows from it, too."""
        self.loss_scales.follow(result, self.ramp.samples(result.step), counts=not self.counts.skips(result.step))
        limit = self.args.clip_grad
        clip = min(1.0, limit / (result.grad_norm + 1e-6)) if limit > 0 else 1.0
        factor = clip * tokens.weight(self.args, self.ramp.samples(result.step), result.tokens)
        return Update(result.step, factor, self.rates.at(result.counted), result.skipped, result.skips)

    # ---- which steps count -------------------------------------------------------------------

    @property
    def begins_optimizer(self) -> bool:
        """Whether only weights are taken from the checkpoint that the job begins with, which keeps its number of steps:
        learning rate and optimizer begin anew, as Megatron's do.
        """
        return bool(getattr(self.args, "no_load_optim", False))

    def counted(self, step: int) -> int:
        """Samples before a step that the learning rate counts."""
        return self.counts.counted(step, self.ramp)

    def agree(self) -> None:
        """Let all ranks of the layout know what lay behind the job when it began, and by which schedule it goes. All of
        them call it.
        """
        self.counts.agree()
        self.rates.agree()
        self.ramp = self.counts.ramp(self.args)

    # ---- what it shows and tells -----------------------------------------------------------------------

    def show_memory(self, store: StateStore) -> None:
        """Let dials show what states and tensors on the device take, now and then."""
        now = time.monotonic()
        if now - self._shown > _SHOWN_EVERY:
            self._shown = now
            store.show_held()
            if not self.device.is_host:
                self.odometer.dials.use(self.device.memory().used)

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
        if injection.action == "device":
            self.device.harm(injection.what)
        elif injection.action == "disk":
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


def _adapt_megatron(args: argparse.Namespace, config: ElasticConfig) -> None:
    """Replace what Megatron's modules do otherwise here, before there are groups or a model."""
    stand_ins.apply()
    writer.apply()
    common.allow_enums()
    random.install(args.seed)
    linear.install()
    if engine.used(args):
        engine.install(config.consistency == "bitwise")
    router.install(tokens.of_sums(args))
    latent.install()
    attention.install(documents.kept_apart(args))
    mtp.install()
    experts.install()


def _check_sizes(layout: Layout) -> None:
    """Raise UsageError if messages of such a layout cannot be told apart."""
    try:
        check_sizes(
            units=len(layout.units), slices=layout.num_slices, grains=layout.num_grains,
            positions=len(layout.way),
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None
