"""Origin: the checkpoint that a job begins with, as Megatron's flags say, and what it says that lies behind."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_elastic.adaptor.checkpoints import common, whole
from megatron_elastic.adaptor.checkpoints.folder import (
    RELEASE,
    TRACKER,
    has_step,
    is_release,
    newest_folder,
    step_folder,
)
from megatron_elastic.config import UsageError
from megatron_elastic.plan.work.ramp import Ramp


class Start(NamedTuple):
    """What lies behind a job when it begins. A checkpoint has each in a field of its own, and none follows from
    another: batches may have grown, steps may have been skipped, learning rate or optimizer may have begun later.
    """

    done: int
    """Steps (Megatron's iterations)."""
    samples: int
    """That they took."""
    counted: int
    """Of these, by the learning rate."""
    updates: int
    """Of the optimizer: Adam's step."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a job's first weights come from.

    Attributes:
        folder: of a checkpoint; None: they are drawn.
        flag: that named it, for messages.
        anew: nothing else is taken from it: training begins with its first step, and fresh optimizer states.
    """

    folder: Path | None
    flag: str = ""
    anew: bool = False

    @property
    def step(self) -> int:
        """Steps that the job has behind it when it begins, as far as the name of the folder says."""
        number = "0" if self.folder is None or self.anew else self.folder.name.removeprefix("iter_")
        return int(number)

    @classmethod
    def of(cls, args: argparse.Namespace, begins: bool = True) -> Origin:
        """As Megatron's flags say: ``--load``, ``--ckpt-step``, ``--finetune``, ``--pretrained-checkpoint``.

        ``begins``: whether the job does. For a rank that comes later that of ``--ckpt-step`` may be gone.
        Raises UsageError if a checkpoint that is named is not there.
        """
        load, pretrained = args.load, getattr(args, "pretrained_checkpoint", None)
        tuned, step = bool(getattr(args, "finetune", False)), getattr(args, "ckpt_step", None)
        gone = not begins and not pretrained
        if load and (folder := _chosen(Path(load), step, required=not pretrained, gone=gone)) is not None:
            return cls(folder, f"--load {load}", tuned or folder.name == RELEASE)
        if not pretrained:
            return cls(None)
        flag = f"--pretrained-checkpoint {pretrained}"
        folder = _chosen(Path(pretrained), step, required=True)
        if folder is None:
            raise UsageError(f"{flag}: there is no checkpoint; name the folder that has its {TRACKER}")
        return cls(folder, flag, anew=True)

    def start(self, ramp: Ramp, tuned: bool, begins_optimizer: bool, files: bool = True) -> Start:
        """What lies behind the job, as the checkpoint says. ``ramp``: what the flags make of batches; ``tuned``:
        ``--finetune``; ``begins_optimizer``: learning rate and optimizer begin anew; ``files``: as ``whole.check``.

        Raises UsageError if the checkpoint is not whole, of another format, or cannot be gone on from.
        """
        if self.folder is None:
            return Start(0, 0, 0, 0)
        whole.check(self.folder, self.flag, files)
        with whole.reading(self.folder, self.flag):
            told = common.told(self.folder)
        samples = common.samples(told)
        if self.anew:
            if samples and not tuned and self.folder.name == RELEASE:
                raise UsageError(
                    f"{self.flag}: {self.folder} says that {samples} samples were taken, and that no step "
                    "was done: add --finetune to begin with the first sample"
                )
            return Start(0, 0, 0, 0)
        done = common.iteration(told)
        natural = ramp.before(done + 1)
        samples = natural if samples is None else samples
        if ramp.since(done, samples) is None:
            raise _other_batch(self.flag, done, samples, natural)
        if begins_optimizer:
            return Start(done, samples, 0, 0)
        return Start(done, samples, common.scheduled(told, samples), common.updates(told, done))

    def schedule(self, begins_optimizer: bool) -> Mapping[str, Any] | None:
        """The state of Megatron's scheduler in the checkpoint; None if learning rates begin anew."""
        if self.folder is None or self.anew or begins_optimizer:
            return None
        return common.schedule(common.told(self.folder))


def _chosen(directory: Path, step: int | None, required: bool, gone: bool = False) -> Path | None:
    """The folder of the checkpoint of ``step`` steps in a directory, or of the newest one. None if there is none.

    ``required``: that of ``step`` must be there, if it may not be ``gone``.
    """
    if not step:
        return newest_folder(directory)
    if is_release(directory):  # which Megatron loads then, whatever the number
        raise UsageError(
            f"--ckpt-step {step}: {directory / TRACKER} says {RELEASE}, which has no number: leave it out, "
            f"or write {step} into that file"
        )
    if gone or has_step(directory, step):
        return step_folder(directory, step)
    if required:
        raise UsageError(
            f"--ckpt-step {step}: there is no {step_folder(directory, step)}, or it is not "
            "complete; give the number of another one, or leave it out for the newest"
        )
    return None


def _other_batch(flag: str, done: int, saved: int, samples: int) -> UsageError:
    """The data sets are made for as many samples as all steps take by the flags."""
    return UsageError(
        f"{flag}: its {done} steps took {saved} samples, and with these flags they would have taken "
        f"{samples}: give --global-batch-size {saved // max(done, 1)}, or the --rampup-batch-size that it "
        "was made with"
    )
