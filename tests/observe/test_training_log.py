"""Megatron's log in a job that changes: of which steps its means are, and of which time.

Megatron's own part of it, which needs a checkout, is left out.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core import timers as core_timers
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine, initialize_rerun_state_machine

from megatron_elastic.adaptor.script import log, progress_log
from megatron_elastic.adaptor.script.timers import LocalTimers, PartTimers
from megatron_elastic.adaptor.training import intermission
from megatron_elastic.comm.distributed import backend
from megatron_elastic.plan.split import UNSAID
from tests import world
from tests.world import Peer


class Clock:
    """What Megatron's timers look at; it moves when it is told."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


def megatron(monkeypatch: pytest.MonkeyPatch, **known: Any) -> None:
    """Let this be what Megatron keeps for the whole process."""
    training, variables = ModuleType("megatron.training"), ModuleType("megatron.training.global_vars")
    vars(training).update(global_vars=variables)
    vars(variables).update(known)
    for module in (training, variables):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """With timers of this rank as Megatron's global ones."""
    clock, timers = Clock(), LocalTimers(0, "minmax")
    megatron(monkeypatch, get_timers=lambda: timers)
    monkeypatch.setattr(core_timers, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return clock


@pytest.fixture
def trainer() -> MagicMock:
    """As ``intermission`` knows it, of a job that evaluates and saves every three steps."""
    trainer = MagicMock()
    trainer.args, trainer.counts.trained = Namespace(eval_interval=3, async_save=False), lambda done: done > 0
    trainer.saving.written.return_value, trainer.saving.late.return_value = False, None
    trainer.saving.due.side_effect = lambda done: done > 0 and done % 3 == 0
    trainer.saving.complete.return_value = None
    return trainer


def test_times_of_steps_are_without_what_is_due_between_them(
    clock: Clock, trainer: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron stops its timer around evaluations and checkpoints; also where one is interrupted."""
    written = log.TrainingLog(Namespace())
    trainer.pause = written.paused
    trainer.saving.begin.side_effect = lambda *_: clock.move(70)
    monkeypatch.setattr(intermission, "evaluate", lambda *_: clock.move(700))
    for done in range(7):
        intermission.hold(trainer, MagicMock(), done)
        clock.move(1)
    assert clock.now == 7 + 2 * 770
    with suppress(KeyboardInterrupt), written.paused():
        clock.move(70)
        raise KeyboardInterrupt
    clock.move(1)
    assert written._timer.elapsed() == 8


def test_parts_of_a_step_are_timed(clock: Clock) -> None:
    """With what is done again after an interruption, and without waiting for the decision."""
    all_timers = LocalTimers(1, "minmax")
    parts, asked = PartTimers(all_timers), []
    for point in ("data", "forward", "interrupt", "edit", "data", "forward", "grad_sync", "replay", "vote", "apply"):
        parts(point, 3, None)
        clock.move(1)
    parts.end()
    clock.move(70)
    for name in ("forward-backward", "all-grads-sync", "optimizer"):
        asked.append(all_timers(name, log_level=1).elapsed())
    assert asked == [4, 2, 1]


def test_who_enters_again_makes_its_means_of_what_follows(clock: Clock) -> None:
    """A rank that was a spare meanwhile: what it had when it left belongs to steps whose line others have written."""
    written = log.TrainingLog(Namespace())
    written._losses.update({"lm loss": torch.tensor([9.0]), "advanced iterations": 2})
    clock.move(70)
    with written.paused():
        clock.move(700)
    written.begin()
    clock.move(1)
    assert written._losses == {}
    assert written._timer.elapsed() == 1


@pytest.mark.job
def test_who_enters_goes_on_with_the_line(clock: Clock) -> None:
    """Of an interval of four steps the others have done two; and when all have done the same, nothing is to be told."""

    def body(peer: Peer) -> None:
        backend.initialize(peer.transport, range(peer.size), timedelta(seconds=60))
        written, was_there = log.TrainingLog(Namespace()), peer.rank < 2
        if was_there:
            written._logged = 6
            written._losses.update({"lm loss": torch.tensor([9.1]), "advanced iterations": 1, "skipped iterations": 1})
        clock.move(70 if was_there else 700)
        written.agree()
        clock.move(1)
        assert written._losses == {"lm loss": torch.tensor([9.1]), "advanced iterations": 1, "skipped iterations": 1}
        assert written._timer.elapsed() == 71
        assert written._logged == 6
        if not was_there:
            written._losses.clear()
        written.agree()
        assert bool(written._losses) == was_there
        peer.leave()

    world.run(body, size=3)


def test_what_was_evaluated_before_the_checkpoint_is_not_again(
    trainer: MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that goes on after six steps, of which every third is followed by an evaluation."""
    evaluated: list[int] = []
    monkeypatch.setattr(intermission, "evaluate", lambda trainer, tenure, done, *_: evaluated.append(done))
    trainer.counts.trained = lambda done: done > 6
    for done in range(6, 13):
        intermission.hold(trainer, MagicMock(), done)
    assert evaluated == [9, 12]


def test_a_step_is_logged_once_by_whoever_does_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a rank that came later, and found a checkpoint of more steps in ``--load``, from another job."""
    monkeypatch.setattr(log, "targets", MagicMock())
    monkeypatch.setattr(log.TrainingLog, "_as_writer", lambda *_: nullcontext())
    args = Namespace(num_layers=2, mtp_num_layers=None, micro_batch_size=1, data_parallel_size=2, world_size=2,
                     log_interval=1)  # fmt: skip
    written = log.TrainingLog(args)
    for done in (12, 13, 13, 14, 13):
        written.step(done, 5.5, 1.0, 1e-3, 1.0, 16 * (done - 1), 16 * done, 2, True, {}, None, False)
    told = log.targets.LOG.find.return_value  # type: ignore[attr-defined]
    assert [call.kwargs["iteration"] for call in told.call_args_list] == [12, 13, 14]


def test_the_first_step_has_a_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Megatron's own loop; one that ends an interval has it anyway, and the next interval begins after it."""
    monkeypatch.setattr(log, "targets", MagicMock())
    monkeypatch.setattr(log.TrainingLog, "_as_writer", lambda *_: nullcontext())
    told = log.targets.LOG.find.return_value  # type: ignore[attr-defined]
    for begins in (4, 6):
        args = Namespace(num_layers=2, mtp_num_layers=None, micro_batch_size=1, data_parallel_size=2, world_size=2,
                         log_interval=3)  # fmt: skip
        written = log.TrainingLog(args)
        for done in (begins, begins + 1):
            written.step(done, 5.5, 1.0, 1e-3, 1.0, 16 * (done - 1), 16 * done, 2, True, {}, None, done == begins)
    assert [call.kwargs["is_first_iteration"] for call in told.call_args_list] == [True, False, False, False]


def test_memory_is_told_until_megatron_has_told_enough_of_it(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in its own loop: with its first lines, which say then whether the next one shall."""
    monkeypatch.setattr(log, "targets", MagicMock())
    monkeypatch.setattr(log.TrainingLog, "_as_writer", lambda *_: nullcontext())
    told = log.targets.LOG.find.return_value  # type: ignore[attr-defined]
    told.side_effect = lambda *_, iteration, report_memory_flag, **__: report_memory_flag and iteration < 2
    args = Namespace(num_layers=2, mtp_num_layers=None, micro_batch_size=1, data_parallel_size=2, world_size=2,
                     log_interval=1)  # fmt: skip
    written = log.TrainingLog(args)
    for done in (1, 2, 3):
        written.step(done, 5.5, 1.0, 1e-3, 1.0, 16 * (done - 1), 16 * done, 2, True, {}, None, False)
    assert [call.kwargs["report_memory_flag"] for call in told.call_args_list] == [True, True, False]


def test_arguments_are_shown_once_by_whoever_writes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch, get_timers=MagicMock(), _GLOBAL_TENSORBOARD_WRITER=None, _GLOBAL_WANDB_WRITER=None)
    monkeypatch.setattr(log, "targets", MagicMock())
    shown = log.targets.TENSORBOARD_ARGUMENTS.find.return_value  # type: ignore[attr-defined]
    written = log.TrainingLog(Namespace(world_size=4))
    counts = []
    for writes in (False, True, True):
        with written._as_writer(writes):
            counts.append(shown.call_count)
    assert counts == [0, 1, 1]


def test_an_evaluation_is_drawn_at_the_samples_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a rank that has not logged a step yet: it has entered just now, and is the last one."""
    board = MagicMock()
    megatron(monkeypatch, get_timers=MagicMock(), get_tensorboard_writer=lambda: board, get_wandb_writer=lambda: None,
             _GLOBAL_TENSORBOARD_WRITER=board, _GLOBAL_WANDB_WRITER=MagicMock())  # fmt: skip
    monkeypatch.setattr(log, "targets", MagicMock())
    args = Namespace(consumed_train_samples=0, world_size=4, log_validation_ppl_to_tensorboard=False)
    log.TrainingLog(args).evaluation(6, "validation", 5.5, 96, writes=True)
    board.add_scalar.assert_any_call("lm loss validation", 5.5, 6)
    board.add_scalar.assert_any_call("lm loss validation vs samples", 5.5, 96)


@pytest.mark.job
def test_what_is_said_of_a_result_names_its_step() -> None:
    """``--check-for-spiky-loss``: Megatron's warnings count steps from 0."""

    def body(peer: Peer) -> None:
        from megatron_elastic.adaptor.checkout import CheckoutTrainer  # changes parsers of its process

        initialize_rerun_state_machine(mode=RerunMode.DISABLED)
        trainer = MagicMock()
        trainer.standing.step, trainer.stage.key.part.size, trainer.layout.samples, trainer.layout.loops = 7, 1, 1, 1
        trainer.args = Namespace(**UNSAID, micro_batch_size=1, pipeline_model_parallel_size=1)
        step = MagicMock(side_effect=lambda *_: get_rerun_state_machine().current_iteration)
        assert CheckoutTrainer._compute_part(trainer, step, None, MagicMock()) == 6
        peer.leave()

    world.run(body, size=1)


def test_throughput_of_a_job_counts_from_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``progress.txt``, also from a rank that came later, and is the first one now."""
    args = Namespace(log_progress=True, save=str(tmp_path), num_floating_point_operations_so_far=0, async_save=False,
                     consumed_train_samples=0)  # fmt: skip
    told: list[tuple[int, int, int]] = []
    megatron = MagicMock()
    megatron.OPERATIONS.find.return_value = lambda args, samples: 10 * samples
    megatron.PROGRESS_SAVED.find.return_value = lambda step, done: told.append(
        (step, done, args.num_floating_point_operations_so_far)
    )
    monkeypatch.setattr(progress_log, "targets", megatron)
    progress_log.ProgressLog(args).saved(20, 320, before=64)
    assert told == [(20, 3200, 640)]
