"""``megatron.training.training.training_log``: Megatron's log, TensorBoard and Weights & Biases in a job that changes.

Every rank of the layout keeps the running averages, because any of them may have to go on with the log; the last one
writes it. In Megatron that is the last rank too, but a fixed one, and some values are reduced over groups on the way.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers.measures import NUM_ZEROS
from megatron_elastic.adaptor.script.timers import LocalTimers, PartTimers
from megatron_elastic.plan.split import mtp_layers


def install() -> None:
    """Let Megatron's log and timers be one rank's. Call it before Megatron's global variables are set."""
    targets.TIMERS.replace(_set_timers)
    targets.LOG_RATE.replace(lambda stat, group=None: stat)
    targets.LOG_ROUTERS.replace(lambda *_, **__: None)


def _set_timers(args: argparse.Namespace) -> None:
    from megatron.training import global_vars

    global_vars._GLOBAL_TIMERS = LocalTimers(args.timing_log_level, args.timing_log_option)


class TrainingLog:
    """The log of one rank. ``writes`` says whether this rank is the one that writes it now."""

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.training.global_vars import get_timers

        self._args = args
        self._losses: dict[str, Any] = {}
        """Megatron's sums since its last line."""
        self._logged = 0
        """The newest step that has been logged."""
        self._reports_memory, self._arguments_told = True, False
        """Whether Megatron still says with its lines what memory is used, and has been told to show its arguments."""
        self._timer = get_timers()("interval-time", log_level=0)
        self.parts = PartTimers(get_timers())
        """Times a step's parts, once it observes hook points."""
        self.begin()

    def begin(self) -> None:
        """Training begins now, or this rank's part in it: what was before does not count."""
        self._losses.clear()
        self._logged = 0
        self._timer.reset()
        self._timer.start()

    def agree(self) -> None:
        """Let who has entered go on with the line that the others are at. All ranks of the layout call it."""
        told = torch.tensor([self._logged, -self._logged])
        dist.all_reduce(told, dist.ReduceOp.MAX)
        newest, oldest = told.tolist()
        if newest == -oldest:
            return
        knows = self._logged == newest
        teller = torch.tensor([dist.get_rank() if knows else dist.get_world_size()])
        dist.all_reduce(teller, dist.ReduceOp.MIN)
        line = [(self._losses, self._timer.elapsed(reset=False))]
        dist.broadcast_object_list(line, src=int(teller.item()))
        if not knows:
            self.begin()
            self._logged = newest
            losses, elapsed = line[0]
            self._losses.update(losses)
            self._timer.set_elapsed(elapsed)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no part of a step: its time does not count."""
        self._timer.stop()
        try:
            yield
        finally:
            self._timer.start()

    def step(
        self, done: int, loss: float, grad_norm: float | None, lr: float, loss_scale: float, before: int, samples: int,
        ranks: int, writes: bool, measures: Mapping[str, float], params_norm: float | None, first: bool,
    ) -> None:  # fmt: skip
        """Log a step that is done: mean ``loss`` of the global batch, ``samples`` used so far, and ``before`` it.

        Once for each step. ``grad_norm``: None for a step that was skipped. ``lr``, ``loss_scale``: of the next one.
        ``measures``: what the vote says besides. ``params_norm``: of the weights after the step, if that is wanted.
        ``first``: whether it is the first one that the job computes, which has a line whatever ``--log-interval`` is.
        """
        if done <= self._logged:
            return
        self._logged = done
        self.parts.end()
        args = self._args
        args.iteration = args.curr_iteration = done
        args.consumed_train_samples = samples
        targets.BATCH.find()(
            rank=-1, rampup_batch_size=None, global_batch_size=samples - before, micro_batch_size=args.micro_batch_size,
            data_parallel_size=args.data_parallel_size,
        )  # fmt: skip
        _tell_measures(measures, args.num_layers + mtp_layers(args))
        with self._as_writer(writes), _world_of(args, ranks):
            self._reports_memory = targets.LOG.find()(
                {"lm loss": torch.tensor([loss])}, self._losses, learning_rate=lr, iteration=done,
                loss_scale=loss_scale, report_memory_flag=self._reports_memory, skipped_iter=int(grad_norm is None),
                grad_norm=grad_norm, params_norm=params_norm, num_zeros_in_grad=measures.get(NUM_ZEROS),
                max_attention_logit=None,
                # Its line takes nothing from the interval that goes on. Where that ends here, too, it is the usual one.
                is_first_iteration=first and done % args.log_interval != 0,
            )  # fmt: skip

    def evaluation(self, done: int, name: str, loss: float, samples: int, writes: bool) -> None:
        """Log the mean loss over the ``name`` data after ``done`` steps, which have used so many ``samples``."""
        if not writes:
            return
        args = self._args
        perplexity = math.exp(min(20, loss))
        with self._as_writer(True):
            from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

            of, where = ("validation", " on test set") if name == "test" else (name, "")
            line = (f" {of} loss at iteration {done}{where} | lm loss value: {loss:.6E} | "
                    f"lm loss PPL: {perplexity:.6E} | ")
            print("-" * len(line), line, "-" * len(line), sep="\n", flush=True)
            writer, wandb = get_tensorboard_writer(), get_wandb_writer()
            if writer:
                writer.add_scalar(f"lm loss {name}", loss, done)
                writer.add_scalar(f"lm loss {name} vs samples", loss, samples)
                if args.log_validation_ppl_to_tensorboard:
                    writer.add_scalar(f"lm loss {name} ppl", perplexity, done)
                    writer.add_scalar(f"lm loss {name} ppl vs samples", perplexity, samples)
            if wandb:
                wandb.log({f"lm loss {name}": loss}, done)

    def close(self) -> None:
        """Write what is still held back."""
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        writer, wandb = get_tensorboard_writer(), get_wandb_writer()
        if writer:
            writer.flush()
        if wandb:
            wandb.finish()

    @contextmanager
    def _as_writer(self, writes: bool) -> Iterator[None]:
        """Let Megatron's log print and write only if this rank is the one; it may have become so just now."""
        targets.LOG_LAST.replace(_print if writes else _keep_quiet)
        if writes:
            self._open_writers()
        from megatron.training import global_vars

        held = global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER
        if not writes:
            global_vars._GLOBAL_TENSORBOARD_WRITER = global_vars._GLOBAL_WANDB_WRITER = None
        try:
            yield
        finally:
            global_vars._GLOBAL_TENSORBOARD_WRITER, global_vars._GLOBAL_WANDB_WRITER = held

    def _open_writers(self) -> None:
        """Open the writers that the flags ask for, as Megatron's last rank does at start."""
        from megatron.training import global_vars

        args = argparse.Namespace(**{**vars(self._args), "rank": self._args.world_size - 1})
        if global_vars._GLOBAL_TENSORBOARD_WRITER is None:
            targets.TENSORBOARD.find()(args)
        if global_vars._GLOBAL_WANDB_WRITER is None:
            targets.WANDB.find()(args)
        if not self._arguments_told:
            self._arguments_told = True
            targets.TENSORBOARD_ARGUMENTS.find()()


def _tell_measures(measures: Mapping[str, float], layers: int) -> None:
    """Put losses where Megatron's log looks for them: sums over a rank's grains, by layer, which it adds up.

    What is known as a sum over the layers is told as if it were the first one's.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    further = [value for name, value in measures.items() if name.startswith("mtp_")]
    if further:
        name = "loss_values" if targets.MTP_LOSS.takes("correct") else "values"
        targets.MTP_LOSSES.find()[name] = torch.tensor(further) * get_num_microbatches()
    for name, value in measures.items():
        if name.startswith("mtp_") or name == NUM_ZEROS:
            continue
        kind, _, layer = name.partition("/")
        _of_routers(kind, layers)[int(layer or 1) - 1] = value * get_num_microbatches()


def _of_routers(kind: str, layers: int) -> torch.Tensor:
    """Where Megatron's log looks for losses of this kind, by layer: in a dictionary, or in a tracker (0.18)."""
    routers = targets.ROUTER_LOSSES.find()()
    if targets.LOG_ROUTERS.takes("metric_names"):
        routers.ensure_initialized(kind, layers, "cpu")
        entry: Any = vars(routers.metrics[kind])
    else:
        entry = routers.setdefault(kind, {"values": torch.zeros(layers), "reduce_group": None, "avg_group": None})
    values: torch.Tensor = entry["values"]
    return values


@contextmanager
def _world_of(args: argparse.Namespace, ranks: int) -> Iterator[None]:
    """Let Megatron divide throughput by the ranks that are there."""
    start, args.world_size = args.world_size, ranks
    try:
        yield
    finally:
        args.world_size = start


def _print(message: str) -> None:
    print(message, flush=True)


def _keep_quiet(message: str) -> None:
    pass
