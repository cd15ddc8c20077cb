"""``megatron.training``: the elastic counterpart of ``pretrain``, ``train`` and ``train_step``.

One loop: a step, or the recovery from what interrupted it. Megatron's model, data sets, step functions and
scheduler do the work of a step; groups, gradients, optimizer state and random numbers follow the layout.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_elastic.adaptor import checkpoint_writer, cpu, groups, linear, random
from megatron_elastic.adaptor import slice_checkpoint as checkpoint
from megatron_elastic.adaptor.dataset import build_once, collate
from megatron_elastic.adaptor.optimizer import ParameterGroups, make_optimizer
from megatron_elastic.adaptor.profile import sample
from megatron_elastic.adaptor.saving import Saving
from megatron_elastic.adaptor.schedule import Schedule
from megatron_elastic.adaptor.schedules import ForwardStep, GrainModel
from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler, main_grads_dtype
from megatron_elastic.adaptor.stage import ModelProvider, Stage
from megatron_elastic.cluster.control import Control, Interrupted, JobStopped
from megatron_elastic.cluster.messages import (
    Built,
    Commit,
    Committed,
    Damage,
    Damaged,
    Event,
    Failed,
    Finished,
    Hello,
    Injected,
    Invite,
    Plan,
    Profile,
    Ready,
    Recovered,
    Report,
    Settled,
    SliceDigest,
    Start,
    Stop,
    Suspect,
    Switched,
    VoteResult,
)
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.transport import Transport
from megatron_elastic.config import MEASURED, ElasticConfig, UsageError
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.layout import Layout, Part, transfers
from megatron_elastic.numerics.exact import make_accumulator
from megatron_elastic.pipeline.executor import Executor
from megatron_elastic.pipeline.profiler import Profiler
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.plan import everything, memory
from megatron_elastic.state.optimizer import Update
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.replay import GradientReplay, Replay, StateReplay
from megatron_elastic.state.store import StateStore
from megatron_elastic.state.verification import Verification
from megatron_elastic.state.vote import Ballot, vote

_VOTE_GROUP = (1 << 14) - 1
"""Group id of the vote, beyond any that Megatron's groups reach."""
_OWN_FLAGS = frozenset({"elastic_run_dir", "elastic_inject", "rank", "local_rank"})
"""Arguments that may differ from node to node, or from rank to rank."""
_PROFILED = 10
"""Steps over which a stage's times are averaged."""
_EVALUATION = -1
"""Step number under which evaluation draws its keys; dropout is off there."""


DatasetsProvider = Callable[[argparse.Namespace], tuple[Any, Any, Any]]
"""(train, validation, test) map-style data sets; sample i is a dict of tensors."""


def pretrain(
    args: argparse.Namespace,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
) -> None:
    """Train elastically, as one rank of a job started by ``megatron-elastic run``.

    ``args`` has Megatron-LM's names and the ``elastic_*`` ones. Returns when training is done. Raises JobStopped when
    the job ends otherwise; whatever else it raises is an error of the program.
    """
    run(lambda control: Trainer(args, control, model_provider, datasets_provider, forward_step))


def run(make: Callable[[Control], Trainer]) -> None:
    """Let the trainer that ``make`` builds train as this rank, and tell the coordinator if the program fails."""
    control = Control.connect()
    trainer: Trainer | None = None
    try:
        trainer = make(control)
        trainer.run()
    except JobStopped:
        raise
    except Exception as error:
        # Told before the connection closes: a rank that only goes silent counts as dead, and the others train on.
        text = str(error) if isinstance(error, UsageError) else traceback.format_exc()
        control.send(Failed(rank=control.rank, traceback=text))
        raise
    finally:
        if trainer is not None:
            trainer.close()
        control.close()


class Trainer:
    """One rank's training: the state that outlives layouts, and what the present layout makes of it."""

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
        self.world_size = int(os.environ["WORLD_SIZE"])
        self._datasets_provider = datasets_provider
        self._forward_step = forward_step
        self.hooks = Hooks(self.rank, self.config.inject, self._announce, self._flip)
        crowded = self.world_size > len(os.sched_getaffinity(0))
        self.transport = Transport(self.rank, control.interrupt, self.config.wait_timeout, crowded)
        cpu.apply()
        checkpoint_writer.apply()
        random.install(args.seed)
        linear.install()
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        self.layout = memory.first_layout(args, self.world_size, local_ranks)
        if self.rank in self.layout.ranks:
            self._make_groups(self.layout)
        optimizer_config = build_optimizer_config(args)
        self.optimizer = make_optimizer(optimizer_config)
        self.parameter_groups = ParameterGroups(optimizer_config)
        self.schedule = self._schedule()
        self._check_memory(local_ranks)
        # A tied embedding gets a gradient from each of its two stages, a norm one from each rank of a cell; and grains
        # may be cut between any samples.
        each = max(2, args.tensor_model_parallel_size) * self.layout.samples
        self.accumulator = make_accumulator(
            self.config.consistency, each * self.layout.num_grains, main_grads_dtype(args)
        )
        self.stage = Stage(
            args, self.rank, model_provider, self.parameter_groups, self.accumulator, self.transport.look,
            self._before_use,
        )  # fmt: skip
        self.step = checkpoint.latest_step(args.load) + 1
        """The step in progress: committed steps plus one."""
        self.saving = Saving(args.save, args.save_interval, args.async_save, self.step, control.interrupt.check)
        self.vote: VoteResult | None = None
        """Result of the vote of ``step``, once past it."""
        self.last: VoteResult | None = None
        """Result of the newest vote whose step this rank has finished."""
        self.store: StateStore | None = None
        """None until the model is built; from then on training can only go on, not begin anew."""
        self.train_data: Any = None
        self.valid_data: Any = None
        self.test_data: Any = None
        self.plan: Plan | None = None
        """The layout that this rank is informed of and has not switched to."""
        self.agreed = False
        """Whether all ranks are informed of it: the switch is due after the step."""
        self.settled = False
        """Whether the coordinator knows that everything the layout asks for is live here."""
        self.stale = False
        """Whether weights may not be what their owners hold: the next step begins with distributing them."""
        self.counted_from = self.step, 0
        """The step, and bytes sent before it, from which on traffic is counted."""
        self.gathering = False
        """Whether parameters of the newest step may still be on their way here."""
        self.boundary_ms: float | None = None
        """Time of an activation to the next stage, when last measured."""
        self.copying = False
        """Whether copies had to be made for the layout, to or from this rank."""

    def _check_memory(self, ranks: int) -> None:
        """Raise UsageError if the ``ranks`` of this machine need more memory than it has. The first of them looks."""
        if self.rank in self.layout.ranks and self.rank % ranks == 0:
            needs = memory.estimate(self.layout, memory.Job.of(self.args))
            problem = memory.shortage([needs[rank] for rank in range(self.rank, self.rank + ranks)], memory.available())
            if problem is not None:
                raise UsageError(problem)

    # ---- life -------------------------------------------------------------------------------

    def run(self) -> None:
        """From hello to the end of the job."""
        self._join()
        while True:
            try:
                if self.rank not in self.layout.ranks:
                    if self._stand_by():
                        return
                elif self.store is None:
                    self._build()
                elif self._goes_on():
                    self._step()
                else:
                    self._finish()
                    return
            except Interrupted as interrupted:
                self._recover(interrupted)

    def _schedule(self) -> Schedule:
        return Schedule(self.args, partial(build_scheduler, self.args), self.parameter_groups)

    def _goes_on(self) -> bool:
        """Whether there is another step to do. All ranks ask before each, and again after a recovery."""
        return self.step <= self.args.train_iters

    def close(self) -> None:
        """Release links and groups."""
        self.transport.close()

    def _join(self) -> None:
        self.control.send(
            Hello(
                rank=self.rank, pid=os.getpid(), host=socket.gethostname(), address=self.transport.address,
                layout=self.layout.to_json(), start_step=self.step - 1, train_iters=self.args.train_iters,
                flags={name: str(value) for name, value in vars(self.args).items() if name not in _OWN_FLAGS},
                tied=not self.args.untie_embeddings_and_output_weights,
            )
        )  # fmt: skip
        if self.rank in self.layout.ranks:
            start = self.control.wait((Start,), timeout=self.config.start_timeout)
            self.transport.add_peers(start.addresses)

    def _make_groups(self, layout: Layout) -> None:
        timeout = timedelta(seconds=self.config.wait_timeout)
        tp_index = layout.tp_index(self.rank)
        groups.initialize(self.transport, self.args.tensor_model_parallel_size, tp_index, timeout)
        groups.edit(layout, self.rank)
        random.name_streams(self.args.seed)

    def _stand_by(self) -> bool:
        """In no cell: wait to be invited into one, and be let in. Returns whether the job is over."""
        message = self.control.wait((Stop, Invite, Commit), timeout=float("inf"))
        match message:
            case Invite():
                self._prepare(message)
            case Commit():
                self._adopt(message)
        return isinstance(message, Stop)

    def _prepare(self, invite: Invite) -> None:
        """Build this rank's part of the layout it is invited into, without the others, who are training."""
        layout = Layout.from_json(invite.layout)
        self.transport.add_peers(invite.addresses)
        if self.store is None or not self.stage.fits(layout):
            self.store = None
            self._make_groups(layout)
            self.stage.forget()
            self.stage.learn(invite.shapes, layout)
            self.stage.hold(layout)
            self._make_data()
            self.store = self._empty_store(layout)
        self.hooks.at("prepare")
        self.control.send(Ready(rank=self.rank, epoch=invite.epoch))

    def _build(self) -> None:
        """Model, data and optimizer state under the first layout; redone if interrupted."""
        self.stage.forget()
        self.stage.hold(self.layout)
        self._make_data()
        store = self._empty_store(self.layout)
        self._load(store, self.step - 1)
        self._enter(store)
        self.store, self.stale = store, True
        self.counted_from = self.step, self.transport.bytes_sent
        shapes = {unit: buffer.partition.shape for unit, buffer in self.stage.units.items()}
        self.control.send(Built(rank=self.rank, shapes=shapes))

    def _empty_store(self, layout: Layout) -> StateStore:
        keeps = self.config.replay == "state"
        rate = self.config.background_mbps * 1e6 / 8
        tp_index = layout.tp_index(self.rank)
        return StateStore(self.stage.partitions, self.optimizer, self.transport, tp_index, keeps, rate)

    def _load(self, store: StateStore, step: int) -> None:
        """Model and optimizer state as after ``step`` steps: the checkpoint's, or fresh ones."""
        if step == 0:
            store.create(self.layout, self.stage.units)
            return
        states = checkpoint.load(
            self._checkpoint_of(step), self.stage.models, self.layout, self.rank, self.stage.units, self.optimizer, step
        )
        store.create(self.layout, self.stage.units)
        checkpoint.fill(store, self.stage.units, states, step)

    def _checkpoint_of(self, step: int) -> str:
        """The directory with the checkpoint of a step: where this job saves, or where it was loaded from."""
        save = self.args.save
        return save if save and checkpoint.has_step(save, step) else self.args.load

    def _make_data(self) -> None:
        if self.train_data is None:
            with groups.alone(), build_once(Path(os.environ["MEGATRON_ELASTIC_RUN_DIR"])):
                self.train_data, self.valid_data, self.test_data = self._datasets_provider(self.args)

    def _enter(self, store: StateStore) -> None:
        """What the present layout alone determines."""
        layout = self.layout
        self.reduction = Reduction(layout, self.transport, self.stage.units, store, self.accumulator)
        self.replay: Replay = (
            StateReplay(layout, store)
            if self.config.replay == "state"
            else GradientReplay(layout, self.transport, store, self.accumulator.mean_dtype)
        )
        self.settled = False
        every = self.config.verify_every
        self.verification = Verification(layout, self.transport, self.stage.units, store, every) if every else None
        self.program = for_cell(self.config.schedule, layout, layout.cell_of(self.rank).leader)
        args = self.args
        stage = self.stage
        stage.profiler = Profiler([unit.params for unit in stage.units.values()])
        self.grains = GrainModel(
            stage.wrapped, stage.models[0].config, self._forward_step, stage.key,
            layout.stage_of(self.rank) == layout.pipeline_size - 1, self._training_batch,
        )  # fmt: skip
        sequence = args.seq_length // (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        self.executor = Executor(
            layout, self.transport, self.hooks, (sequence, args.micro_batch_size, args.hidden_size),
            torch.bfloat16 if args.bf16 else torch.float32, stage.profiler,
        )  # fmt: skip
        self.vote_group = Group(self.transport, _VOTE_GROUP, layout.ranks)

    # ---- a step -----------------------------------------------------------------------------

    def _step(self) -> None:
        """Compute, reduce, vote, apply. Until the vote is over nothing is applied, and all of it can be redone."""
        assert self.store is not None
        self.hooks.step = self.step
        if self.stale:
            self.reduction.gather_parameters()
        self._between_steps(self.step - 1)
        self.hooks.at("data")
        for unit in self.layout.stages[self.layout.stage_of(self.rank)].units:
            self.stage.units[unit].zero()  # units that are only coming in get no gradients
        if self.args.overlap_grad_reduce:
            self.reduction.reduce_when_complete()
        self.store.drop_gradients()
        self.grains.begin(self.step, self._training_batch)
        with self.stage.profiler.pipeline():
            self.executor.run(self.program, self.grains)
        if self.config.profile == MEASURED and self.step % _PROFILED == 0:
            self.boundary_ms = self.executor.measure_boundary()
        self._await_parameters()
        self.hooks.at("grad_sync")
        self.reduction.reduce_gradients()
        self.hooks.at("replay")
        self._before_vote()
        self.hooks.at("vote")
        if self.verification is not None:
            self._verify(self.verification)
        self.vote = self._cast_vote()
        self.hooks.at("apply")
        self.store.apply(self._update(self.vote))
        self.replay.after_update(self.step)
        self._complete()
        if self.agreed:
            self._switch()

    def _verify(self, verification: Verification) -> None:
        """Nothing that damaged memory had a part in may be voted: have it healed, and the step redone."""
        tp = self.layout.tp_index(self.rank)
        found = [
            Damage(rank=damage.rank, unit=damage.unit, slice=damage.slice, tp=tp, what=damage.what)
            for damage in verification.check()
        ]
        if found:
            assert self.store is not None
            # At once, so that nothing can come between and count it as held.
            bad = {(d.unit, d.slice) for d in found if d.rank == self.rank and d.what == "state"}
            self.store.retire((unit, k) for unit, k, _ in self.store.held() if (unit, k) not in bad)
            # What was sound in the slice's turn before the last is so for certain.
            verified = max(self.step - 1 - self.config.verify_every, 0)
            self.control.send(
                Damaged(rank=self.rank, epoch=self.layout.epoch, step=self.step, found=found, verified=verified)
            )
            self.control.wait((), timeout=self.config.wait_timeout)  # the interrupt that follows ends it

    def _cast_vote(self) -> VoteResult:
        assert self.store is not None
        self.plan = self.control.take((Plan,)) or self.plan
        ballot = Ballot(
            norms={at: self.store.sum_of_squares(at) for at in self.layout.owned(self.rank)},
            losses=self.grains.losses if self.layout.tp_index(self.rank) == 0 else {},
            informed=self.plan is not None and self.plan.epoch > self.layout.epoch,
        )
        outcome = vote(self.vote_group, ballot)
        self.agreed = outcome.switch
        return VoteResult(
            step=self.step, loss=outcome.loss, grad_norm=outcome.grad_norm, lr=self.schedule.at(self.step)[0].lr,
            consumed_samples=self.step * self.args.global_batch_size, tokens=outcome.tokens,
        )  # fmt: skip

    def _complete(self) -> None:
        """The rest of a step that has been voted and applied. May be repeated."""
        assert self.store is not None and self.vote is not None
        self.hooks.at("param_sync")
        self.reduction.start_gathering()
        self.gathering = True
        if not self.args.overlap_param_gather or self.verification is not None:
            self._await_parameters()
        self.hooks.at("commit")
        if self.rank == self.layout.ranks[0]:
            self.control.send(Committed(rank=self.rank, epoch=self.layout.epoch, vote=self.vote, time=time.time()))
        self.last, self.vote, self.stale = self.vote, None, False
        if self.verification is not None:
            self.replay.finish()
            self.verification.note(self.step)
        self.step += 1
        self._committed(self.last)
        if self.config.profile == MEASURED and self.last.step % _PROFILED == 0:
            self._tell_times()
        self.store.settle()
        self._note_copies()

    def _before_vote(self) -> None:
        """What must exist twice is here when this returns; a step that waited for copies that are new says so."""
        assert self.store is not None
        begun = time.time()
        waits = self.config.replay == "state" and not self.settled and self.store.replicating
        self.replay.before_vote()
        if waits:
            self._event("waited", step=self.step, ms=round((time.time() - begun) * 1e3, 3))
        self._note_copies()

    def _note_copies(self) -> None:
        """Tell, once in a layout, that all copies from and to this rank that it asks for are live."""
        assert self.store is not None
        if not self.settled and not self.store.replicating:
            self.settled = True
            if self.copying:
                self._event("replicated", step=self.step - 1)
            self.control.send(Settled(rank=self.rank, epoch=self.layout.epoch))

    def _await_parameters(self) -> None:
        """Return when all parameters are here that the newest step made."""
        self.reduction.finish_gathering()
        self.gathering = False

    def _before_use(self, units: Sequence[str]) -> None:
        """A forward pass is about to use the parameters of these units."""
        for name in units:
            self.reduction.await_parameters(self.layout.units.index(name))

    def _committed(self, result: VoteResult) -> None:
        """This rank has done a step. May come again for the same step, after a recovery."""

    def _tell_times(self) -> None:
        read = self.stage.profiler.read()
        if read is not None and self.layout.tp_index(self.rank) == 0:
            boundary = self.executor.activation_bytes, self.boundary_ms
            told = sample(self.layout, self.rank, *read, boundary, self.stage.units, len(self.optimizer.moments))
            self.control.send(Profile(rank=self.rank, epoch=self.layout.epoch, sample=told))

    def _switch(self) -> None:
        """Between two steps: make the planned layout true, which all ranks do now."""
        plan, self.agreed = self.plan, False
        assert plan is not None
        self._complete_save()  # by the ranks that began it
        self.replay.finish()
        self._await_parameters()
        tells = self.rank == self.layout.ranks[0]  # of those that were there before: who enters does not come here
        self.hooks.at("switch")
        self.transport.add_peers(plan.addresses)
        self._adopt(
            Commit(
                epoch=plan.epoch, layout=plan.layout, decision="switch", step=self.step, vote=None, held=plan.held,
                shapes=plan.shapes, gather=False, saved=self.saving.first - 1,
            )
        )  # fmt: skip
        if tells:
            self.control.send(Switched(rank=self.rank, epoch=plan.epoch, step=self.step))

    def _update(self, result: VoteResult) -> Update:
        clip = self.args.clip_grad / (result.grad_norm + 1e-6) if self.args.clip_grad > 0 else 1.0
        return Update(step=result.step, clip=clip, rates=self.schedule.at(result.step))

    def _between_steps(self, done: int) -> None:
        """What is due after ``done`` steps. Part of the next step, so that an interruption repeats it."""
        args = self.args
        if args.eval_interval and args.eval_iters and done and done % args.eval_interval == 0:
            self._evaluate(done, "validation", self.valid_data, done // args.eval_interval - 1)
        if self.saving.written():
            self._complete_save()
        if self.saving.due(done):
            self.hooks.at("checkpoint")
            self._save(done)

    def _evaluate(self, done: int, name: str, data: Sequence[dict[str, Any]], position: int) -> None:
        """Mean loss over ``--eval-iters`` batches of ``data``: the ``position``-th such stretch of it."""
        first = position * self.args.eval_iters
        for model in self.stage.models:
            model.eval()
        try:
            total, tokens = 0.0, 0
            for i in range(self.args.eval_iters):
                self.grains.begin(_EVALUATION, partial(self._batch, data, first + i))
                self.executor.run_forward(self.program, self.grains)
                ballot = Ballot({}, self.grains.losses if self.layout.tp_index(self.rank) == 0 else {})
                outcome = vote(self.vote_group, ballot)
                total, tokens = total + outcome.loss * outcome.tokens, tokens + outcome.tokens
        finally:
            for model in self.stage.models:
                model.train()
        self._evaluated(done, name, total / max(tokens, 1))

    def _evaluated(self, done: int, name: str, loss: float) -> None:
        if self.rank == self.layout.ranks[0]:
            self._event("evaluated", step=done, data=name, loss=loss)

    def _save(self, done: int) -> None:
        """Save the state after ``done`` steps, or begin to."""
        assert self.store is not None
        self._complete_save()  # one at a time
        self._await_parameters()
        prepare = partial(
            checkpoint.prepare, models=self.stage.models, layout=self.layout, units=self.stage.units, store=self.store,
            transport=self.transport, step=done, apart=self.args.async_save,
        )  # fmt: skip
        self.saving.begin(done, self.layout.epoch, prepare)
        if not self.args.async_save:
            self._complete_save()

    def _complete_save(self) -> None:
        """Have on disk what is being written, if anything is."""
        step = self.saving.complete()
        if step is not None and self.rank == self.layout.ranks[0]:
            self._event("saved", step=step, directory=str(self.args.save))

    def _finish(self) -> None:
        """Report what the model has become, and stay until everybody has."""
        assert self.store is not None
        self.hooks.step = self.step
        self._between_steps(self.step - 1)
        self._await_parameters()
        self._complete_save()
        self._conclude(self.step - 1)
        self._complete_save()
        digests = []
        for unit, k in self.layout.owned(self.rank):
            weights = self.stage.units[unit].slice_of(self.stage.units[unit].params, k)
            sha256 = self.store[unit, k].sha256(weights)
            digests.append(SliceDigest(unit=unit, slice=k, tp=self.layout.tp_index(self.rank), sha256=sha256))
        first, sent = self.counted_from
        self._event("traffic", steps=self.step - first, bytes=self.transport.bytes_sent - sent)
        self.control.send(Finished(rank=self.rank, step=self.step - 1, digests=digests))
        self.control.wait((Stop,), timeout=float("inf"))

    def _conclude(self, done: int) -> None:
        """What is due after the last step. Repeated if it is interrupted."""

    # ---- data -------------------------------------------------------------------------------

    def _training_batch(self, part: Part) -> Mapping[str, torch.Tensor]:
        return self._batch(self.train_data, self.step - 1, part)

    def _batch(self, data: Sequence[dict[str, Any]], iteration: int, part: Part) -> Mapping[str, torch.Tensor]:
        """Samples of part of a grain: the global batch of an iteration is consecutive, and so are its grains."""
        size = self.args.global_batch_size // self.layout.num_grains
        piece = size // self.layout.samples
        first = iteration * self.args.global_batch_size + part.grain * size + part.start * piece
        return collate([data[i] for i in range(first, first + part.size * piece)])

    # ---- recovery ---------------------------------------------------------------------------

    def _recover(self, interrupted: Interrupted) -> None:
        """Report, get the new layout, make it true. A further fault meanwhile begins it again."""
        while True:
            try:
                self.hooks.at("interrupt")
                if interrupted.suspects:
                    self._suspect(interrupted.suspects)
                commit = self._report()
                self._adopt(commit)
                return
            except Interrupted as again:
                interrupted = again

    def _suspect(self, suspects: tuple[int, ...]) -> None:
        """Tell the coordinator whose link broke, and wait for the interrupt that must follow."""
        flag = self.control.interrupt
        if flag.raised or set(suspects) <= flag.lost:
            return
        reason = f"the link from rank {self.rank} to {list(suspects)} broke"
        self.control.send(Suspect(rank=self.rank, epoch=self.layout.epoch, suspects=list(suspects), reason=reason))
        self.control.wait((), timeout=self.config.wait_timeout)

    def _report(self) -> Commit:
        flag = self.control.interrupt
        epoch = flag.epoch
        flag.acknowledge(epoch)
        random.leave_checkpointing()
        if self.store is not None:
            self.store.abandon_loading()
        self.control.send(
            Report(
                rank=self.rank, epoch=epoch, member=self.rank in self.layout.ranks, step=self.step,
                vote=self.vote, last=self.last, held=self._held(),
                versions=self._versions(), stale=self.stale or self.gathering, layout=self.layout.epoch,
                interrupted_at=time.time(),
            )
        )  # fmt: skip
        self.hooks.at("report")
        return self.control.wait((Commit,), timeout=self.config.wait_timeout)

    def _held(self) -> list[tuple[int, int, int]]:
        if self.store is not None:
            return self.store.held()
        # Nothing is trained yet: what a slice is to be can be derived from the seed or the checkpoint.
        return sorted(everything(self.layout).get(self.rank, ()))

    def _versions(self) -> dict[int, list[tuple[int, int, int]]]:
        if self.config.replay == "gradient":
            return {}
        return self.store.versions() if self.store is not None else {self.step - 1: self._held()}

    def _adopt(self, commit: Commit) -> None:
        """Make the committed layout true on this rank; afterwards it trains under it, or is a spare."""
        begun = time.time()
        self.hooks.at("edit")
        self.layout = layout = Layout.from_json(commit.layout)
        self.transport.advance(layout.epoch, layout.lost)
        member = self.rank in layout.ranks
        self.plan, self.agreed = None, False
        self.stale, self.gathering = self.stale or commit.gather, False
        self.saving.abandon(commit.saved)
        if member:
            groups.edit(layout, self.rank)
        if self.store is None:
            if not member:
                self.control.send(Settled(rank=self.rank, epoch=layout.epoch))
            return
        if member:
            self.stage.learn(commit.shapes, layout)
            self.stage.hold(layout)
            self._enter(self.store)
        edited = time.time()
        self.hooks.at("promote")
        done = commit.step if commit.decision == "forward" else commit.step - 1
        # What a spare holds has been overtaken by the steps it did not take part in.
        self.store.return_to(done, ((unit, k) for unit, k, _ in commit.held.get(self.rank, ())))
        if commit.decision == "forward":
            assert commit.vote is not None
            self.store.apply(self._update(commit.vote))
            # A spare's part in the step ends here.
            self.step, self.vote = (commit.step, commit.vote) if member else (commit.step + 1, None)
        else:
            self.step, self.vote = commit.step, None  # the step is new to a rank that enters
            if self.last is not None and self.last.step >= self.step:
                self.last = None  # its step is done again
        if commit.decision == "reload":
            self.hooks.at("reload")
            self.store.retire(())
            if member:
                self._load(self.store, self.step - 1)
                self.stale = True
        # After a reload all is there but copies that stages keep for each other.
        moves = transfers(layout, everything(layout) if commit.decision == "reload" else commit.held)
        self.hooks.at("replicate")
        self.store.replicate(moves, layout, done)
        self.copying = self.store.replicating
        if needed := [move for move in moves if move.role == "owner"]:
            self.store.settle(wait=needed)
        if not member:
            self.store.copy_in_background()
            self.store.flush()
            self.store.retire(())
            self.control.send(Settled(rank=self.rank, epoch=layout.epoch))
            return
        self.store.retire((*layout.owned(self.rank), *layout.replicated(self.rank)))
        if commit.decision == "switch":
            self.store.copy_in_background()
            return
        self.control.send(
            Recovered(
                rank=self.rank, epoch=layout.epoch,
                edit_ms=(edited - begun) * 1e3, state_ms=(time.time() - edited) * 1e3,
            )
        )  # fmt: skip
        self.store.copy_in_background()
        self.hooks.at("resume")
        if commit.decision == "forward":
            self._complete()

    # ---- small things -----------------------------------------------------------------------

    def _announce(self, injection: object) -> None:
        self.control.send(Injected(rank=self.rank, time=time.time(), spec=str(injection)))

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

    def _event(self, kind: str, **fields: float | int | str | bool | None | list[int]) -> None:
        self.control.send(Event(rank=self.rank, epoch=self.layout.epoch, kind=kind, fields=fields))
