"""Plain training: Megatron's own data-parallel wrapper, optimizer and schedules, without anything elastic.

This is the reference that elastic runs are compared with, so it stays close to what Megatron-LM's loop does.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_elastic.adaptor.checkpoints import plain, writer
from megatron_elastic.adaptor.checkpoints.folder import newest
from megatron_elastic.adaptor.checkpoints.plain import Reached
from megatron_elastic.adaptor.samples.sample import collate
from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler
from megatron_elastic.adaptor.without_cuda import stand_ins, torch_adam
from megatron_elastic.comm.distributed import backend
from megatron_elastic.observe.records import RunRecords
from megatron_elastic.plan.work.ramp import Ramp

ForwardStep = Callable[[Iterator[Mapping[str, torch.Tensor]], Any], tuple[torch.Tensor, Callable[..., Any]]]


def pretrain(
    args: argparse.Namespace, model_provider: Callable[..., torch.nn.Module],
    datasets_provider: Callable[[argparse.Namespace], tuple[Any, Any, Any]], forward_step: ForwardStep,
) -> None:
    """Train as the flags say, on the ranks that the environment names (``RANK``, ``WORLD_SIZE``, ``MASTER_*``)."""
    stand_ins.apply()
    torch_adam.apply()
    writer.apply()
    _initialize(args)
    try:
        trainer = _Trainer(args, model_provider, forward_step)
        train, valid, test = datasets_provider(args)
        trainer.train(train, valid)
        if args.eval_iters:
            trainer.report_evaluation("test", test, 0)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _initialize(args: argparse.Namespace) -> None:
    """Connect the ranks, form Megatron's groups, and seed every generator as Megatron-LM does."""
    if args.world_size == 1:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
    backend.register()
    torch.distributed.init_process_group(args.distributed_backend)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        create_gloo_process_groups=False,  # the groups are for the CPU already
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


class _Trainer:
    """Model, optimizer and schedule of one rank, and the loop over them."""

    def __init__(
        self, args: argparse.Namespace, model_provider: Callable[..., torch.nn.Module], forward_step: ForwardStep
    ) -> None:
        self.args = args
        self.forward_step = forward_step
        self.ramp = Ramp.of(args)
        self.bare = model_provider(args, None, parallel_state.is_pipeline_first_stage(),
                                   parallel_state.is_pipeline_last_stage())
        self.model = _wrap(args, self.bare)
        self.optimizer = get_megatron_optimizer(build_optimizer_config(args), [self.model],
                                                use_gloo_process_groups=False)
        self.scheduler = build_scheduler(args, self.optimizer)
        config: Any = self.bare.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        config.no_sync_func = self.model.no_sync
        self.run_batch = get_forward_backward_func()
        # The last rank is in the last stage, which knows the loss.
        self.reports = torch.distributed.get_rank() == args.world_size - 1
        self.progress = Reached(0, 0)
        if args.load and newest(args.load) is not None:
            self.progress = plain.load(args.load, self.bare, self.optimizer, self.scheduler)
            self.say(f"loaded {args.load} at iteration {self.progress.iteration}")

    def say(self, text: str) -> None:
        """Print from the rank that reports."""
        if self.reports:
            print(text, flush=True)

    def train(self, train: Any, valid: Any) -> None:
        """Take the remaining steps; evaluate, save and report when the flags say so."""
        args = self.args
        start = self.progress.iteration
        records = RunRecords(args.elastic_run_dir) if args.elastic_run_dir and self.reports else None
        if records is not None:
            records.event("started", 0, world_size=args.world_size, step=start, train_iters=args.train_iters)
        logged_at = time.perf_counter()
        saved = start
        for iteration in range(start + 1, args.train_iters + 1):
            began = time.perf_counter()
            lr = get_canonical_lr_for_logging(self.optimizer.param_groups)
            loss, grad_norm = self.step(train)
            ended = time.perf_counter()
            if records is not None:
                records.metrics(self._metrics(loss, grad_norm, lr, ended - began))
            if iteration % args.log_interval == 0:
                since = min(args.log_interval, iteration - start)
                self.say(self._log_line(loss, grad_norm, lr, (ended - logged_at) / since))
                logged_at = ended
            if args.eval_iters and iteration % args.eval_interval == 0:
                self.report_evaluation("validation", valid, iteration // args.eval_interval - 1)
                logged_at = time.perf_counter()
            if args.save_interval and iteration % args.save_interval == 0:
                self.save(args.save)
                saved, logged_at = iteration, time.perf_counter()
        if args.save and saved != self.progress.iteration:
            self.save(args.save)
        if records is not None:
            records.event("finished", 0, reason=f"training finished at step {self.progress.iteration}")
            records.close()

    def step(self, data: Any) -> tuple[float, float]:
        """Take one step. Returns the mean loss of the global batch (0 outside the last stage) and the gradient norm.

        If gradients are not finite, which an fp16 model's loss scale has to be found by, nothing else comes of it.
        """
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batch = self.ramp.samples(self.progress.iteration + 1)
        losses = self._run(data, self.progress.consumed_samples, batch, forward_only=False)
        updated, grad_norm, _ = self.optimizer.step()
        if updated:
            self.scheduler.step(increment=batch)
        self.progress = Reached(self.progress.iteration + 1, self.progress.consumed_samples + batch)
        return losses, float(grad_norm) if updated else math.inf

    def report_evaluation(self, name: str, data: Any, position: int) -> None:
        """Print the mean loss over ``--eval-iters`` batches of ``data``: the ``position``-th such stretch of it."""
        batch = self.args.global_batch_size
        self.model.eval()
        with torch.no_grad():
            losses = [self._run(data, (position * self.args.eval_iters + i) * batch, batch, forward_only=True)
                      for i in range(self.args.eval_iters)]
        self.model.train()
        self.say(f" {name} loss at iteration {self.progress.iteration} | lm loss: {sum(losses) / len(losses):.6E} |")

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the current state."""
        plain.save(folder, self.progress, self.bare, self.optimizer, self.scheduler)
        self.say(f"saved iteration {self.progress.iteration} to {folder}")

    def _run(self, data: Any, first_sample: int, batch: int, forward_only: bool) -> float:
        """Run one global batch of so many samples; returns its mean loss in the last stage, 0 elsewhere."""
        args = self.args
        width, mine = args.data_parallel_size, parallel_state.get_data_parallel_rank()
        batches = batch // args.micro_batch_size
        reduced = self.run_batch(
            forward_step_func=self.forward_step,
            data_iterator=_grains(data, first_sample, args.micro_batch_size, range(mine, batches, width)),
            model=[self.model],
            num_microbatches=batches // width,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=forward_only,
        )
        if not parallel_state.is_pipeline_last_stage():
            return 0.0
        total = torch.stack([losses["lm loss"] for losses in reduced]).sum(dim=0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total[0] / total[1])

    def _metrics(self, loss: float, grad_norm: float, lr: float | None, seconds: float) -> dict[str, Any]:
        args = self.args
        return {
            "step": self.progress.iteration, "loss": loss, "loss_hex": loss.hex(), "grad_norm": grad_norm,
            "grad_norm_hex": grad_norm.hex(), "lr": lr, "consumed_samples": self.progress.consumed_samples,
            "step_ms": seconds * 1000, "epoch": 0, "world_size": args.world_size,
            "tokens_per_s": self.ramp.samples(self.progress.iteration) * args.seq_length / seconds,
        }

    def _log_line(self, loss: float, grad_norm: float, lr: float | None, seconds: float) -> str:
        args, done = self.args, self.progress
        return (
            f" iteration {done.iteration:8d}/{args.train_iters:8d} | consumed samples: {done.consumed_samples:12d} "
            f"| elapsed time per iteration (ms): {seconds * 1000:.1f} | learning rate: {lr:.6E} "
            f"| global batch size: {self.ramp.samples(done.iteration):5d} | lm loss: {loss:.6E} "
            f"| loss scale: {self.optimizer.get_loss_scale().item():.1f} | grad norm: {grad_norm:.3f} |"
        )


def _wrap(args: argparse.Namespace, bare: Any) -> DistributedDataParallel:
    """Cast for 16 bits and wrap for data parallelism."""
    for parameter in bare.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    half = args.fp16 or args.bf16
    module = Float16Module(bare.config, bare) if half else bare
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=half, use_distributed_optimizer=args.use_distributed_optimizer,
        check_for_nan_in_grad=not args.fp16 or args.loss_scale is not None,
    )
    return DistributedDataParallel(bare.config, ddp_config, module)


def _grains(data: Any, first_sample: int, size: int, numbers: range) -> Iterator[Mapping[str, torch.Tensor]]:
    """The micro-batches ``numbers`` of the global batch that begins at ``first_sample``, each of ``size`` samples."""
    for number in numbers:
        begin = first_sample + number * size
        yield collate([data[i] for i in range(begin, begin + size)])
