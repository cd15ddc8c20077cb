"""``megatron.training.utils.append_to_progress_log``: ``progress.txt`` beside the checkpoints (``--log-progress``).

A line when a job starts, and one for each checkpoint, whose throughput is by the number of ranks that the job began
with. Megatron's rank 0 writes them while all meet; here it is the rank that is first at the time, and nobody waits.
"""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from pathlib import Path

from megatron_elastic.adaptor import targets


def operations(args: argparse.Namespace, samples: int) -> int:
    """Floating-point operations that so many samples take, as Megatron counts them."""
    return int(targets.OPERATIONS.find()(args, samples))


class ProgressLog:
    """What one rank writes there: nothing, if the flags do not ask for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._path = Path(args.save) / "progress.txt" if args.log_progress and args.save else None
        told = targets.PROGRESS.takes("save_dir")
        targets.PROGRESS.replace((lambda save_dir, *args: self._append(*args)) if told else self._append)

    def starting(self) -> None:
        """The job starts."""
        self._append("Starting job")

    def saved(self, step: int, samples: int, before: int) -> None:
        """A checkpoint of so many steps and samples is complete, ``before`` of them from before the job.

        Needs Megatron's parsed arguments in its globals.
        """
        if self._path is None:
            return
        args = self._args
        known = args.num_floating_point_operations_so_far, args.consumed_train_samples, args.async_save
        args.num_floating_point_operations_so_far, args.consumed_train_samples, args.async_save = (
            operations(args, before), samples, False
        )  # fmt: skip
        try:
            targets.PROGRESS_SAVED.find()(step, operations(args, samples))
        finally:
            args.num_floating_point_operations_so_far, args.consumed_train_samples, args.async_save = known

    def _append(self, string: str, barrier: bool = True) -> None:
        """In place of ``append_to_progress_log``. A disk that does not take it costs a line."""
        if self._path is None:
            return
        when, job = f"{datetime.now():%Y-%m-%d %H:%M:%S}", os.environ.get("SLURM_JOB_ID", "")
        try:
            with self._path.open("a") as file:
                file.write(f"{when}\tJob ID: {job}\t# GPUs: {self._args.world_size}\t{string}\n")
        except OSError as error:
            print(f"WARNING: {self._path}: {error.strerror}; a line is missing there: {string}", flush=True)
