"""Batches: whether steps, their batches and what is to happen in them can be as flags say that Megatron has parsed."""

from __future__ import annotations

import argparse

from megatron_elastic import usage
from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.observe.tracing.tracer import Window
from megatron_elastic.plan.work.ramp import Ramp


def check_at_least(limit: int, **values: float | None) -> None:
    """Raise UsageError if the value of a flag is below a limit; ``values``: by name, None where nothing is said."""
    for name, value in values.items():
        if value is not None and value < limit:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {limit}, got {value:g}")


def check_batch(args: argparse.Namespace) -> None:
    """Raise UsageError if the global batch cannot be divided among the data-parallel ranks."""
    at_once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % at_once:
        raise UsageError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {at_once}: "
            f"use {-(-args.global_batch_size // at_once) * at_once}"
        )


def check_length(args: argparse.Namespace) -> None:
    """Raise UsageError if there would be no step to do."""
    if args.train_iters is None and args.train_samples is None:
        raise UsageError("--train-iters or --train-samples is needed")
    if args.train_samples is None:
        check_at_least(1, train_iters=args.train_iters)
    elif Ramp.of(args).steps(args.train_samples) < 1:
        raise UsageError(f"--train-samples {args.train_samples} are too few for a step: its batch has "
                         f"{Ramp.of(args).before(2)}; raise it")


def check_ramp(args: argparse.Namespace) -> None:
    """Raise UsageError if the global batch cannot grow as ``--rampup-batch-size`` says, at any step of it.

    Megatron finds out about some of that when a step comes whose batch cannot be divided.
    """
    if args.rampup_batch_size is None:
        return
    shown = f"--rampup-batch-size {' '.join(map(str, args.rampup_batch_size))}"
    for flag in ("--no-load-optim", "--iterations-to-skip"):
        if getattr(args, usage.dest(flag), None):
            raise UsageError(f"{shown} does not work with {flag}: while batches grow the learning rate counts "
                             "the samples of all steps; leave one of them out")
    try:
        start, increment, span = map(int, args.rampup_batch_size)
    except ValueError:
        raise UsageError(f"{shown}: expected three numbers, START INCREMENT SAMPLES") from None
    full, at_once = args.global_batch_size, args.micro_batch_size * args.data_parallel_size
    if min(start, increment, span) < 1:
        raise UsageError(f"{shown}: START, INCREMENT and SAMPLES must be at least 1")
    if start >= full or (full - start) % increment:
        raise UsageError(f"{shown}: --global-batch-size {full} must be START and one or more times INCREMENT more")
    if start % at_once or increment % at_once:
        raise UsageError(f"{shown}: START and INCREMENT must be multiples of --micro-batch-size "
                         f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {at_once}, as "
                         "--global-batch-size is")
    if args.train_samples is None:
        raise UsageError("--rampup-batch-size needs --train-samples in place of --train-iters")


def check_faults(args: argparse.Namespace) -> None:
    """Raise UsageError if faults are to happen (``--elastic-inject``) on a rank, or in what, there will never be."""
    config, ramp, steps = ElasticConfig.from_args(args), Ramp.of(args), _last_step(args)
    for fault in config.inject:
        flag = f"--elastic-inject {fault}"
        # A rank that joins has an id that nobody had before.
        if fault.rank < 0 or (fault.rank >= args.world_size and not (config.respawn or config.spares)):
            raise UsageError(f"{flag}: rank must be from 0 to {args.world_size - 1}, unless --elastic-respawn or "
                             "--elastic-spares is given")
        if fault.step is not None and not 1 <= fault.step <= steps:
            raise UsageError(f"{flag}: step must be from 1 to {steps}, which is the last one")
        grains = ramp.grains(steps if fault.step is None else fault.step)
        if fault.grain is not None and not 0 <= fault.grain < grains:
            raise UsageError(f"{flag}: grain must be from 0 to {grains - 1} "
                             "(batch size / --micro-batch-size / --expert-model-parallel-size - 1)")


def check_trace(args: argparse.Namespace) -> None:
    """Raise UsageError if steps are to be traced (``--elastic-trace``) that there will never be."""
    steps = _last_step(args)
    for first, _ in Window.parse(args.elastic_trace).ranges if args.elastic_trace else ():
        if first > steps:
            raise UsageError(f"--elastic-trace {args.elastic_trace}: there is no step {first}, as {steps} is the "
                             "last one")


def _last_step(args: argparse.Namespace) -> int:
    return Ramp.of(args).steps(args.train_samples) if args.train_iters is None else int(args.train_iters)


def check_rates(args: argparse.Namespace) -> None:
    """Raise UsageError if Megatron's flags do not say what learning rates are, or warm up for as long as they decay.

    Megatron finds that out when it makes the schedule, without a word.
    """
    if args.lr is None:
        raise UsageError("--lr is needed: add it")
    unit = "iters" if args.train_iters else "samples"
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        raise UsageError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, how long the last decay is: add it")
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_fraction >= 1:
            raise UsageError(f"--lr-warmup-fraction must be below 1, got {args.lr_warmup_fraction:g}")
        return
    warmup, decay = getattr(args, f"lr_warmup_{unit}"), getattr(args, f"lr_decay_{unit}")
    flag, end = ("train", getattr(args, f"train_{unit}")) if decay is None else ("lr-decay", decay)
    if warmup >= end:
        raise UsageError(f"--lr-warmup-{unit} {warmup} must be below --{flag}-{unit} {end}, by which the learning rate "
                         "has decayed: lower it, or raise that")


def check_schedule(args: argparse.Namespace) -> None:
    """Raise UsageError if learning rates are to go by the flags and by a checkpoint."""
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UsageError("--override-opt_param-scheduler goes by the flags and --use-checkpoint-opt_param-scheduler by "
                         "the checkpoint: leave out one of them")
