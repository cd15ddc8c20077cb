"""Submission: a job that somebody gives to a fleet, as a file in the fleet's folder, whether the fleet runs or not."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

import msgspec

from megatron_elastic.cluster.launch import launcher
from megatron_elastic.config import UsageError

JOBS = "jobs"
"""Folder of a fleet with one for each job, by its name."""
FILE = "submission.json"
CANCEL = "cancel"
"""A file beside it: the job is to end."""
VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OF_A_PROGRAM = 80
"""Letters of a program's name in that of a job, at most."""
_PREFIXES = (("megatron-elastic", "run"), ("torchrun",))


class SubmissionError(Exception):
    """A job that cannot be, or cannot be given to a fleet."""


class NameTaken(SubmissionError):
    """There is a job of this name."""


class Submission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was asked for.

    A rigid job (``max_devices`` None) is a program with its arguments. Of an elastic one ``command`` is what follows
    ``megatron-elastic run``: a script and its arguments.
    """

    name: str
    command: list[str]
    devices: int
    submitted: float
    """Seconds since 1970."""
    cwd: str
    max_devices: int | None = None
    seconds: float | None = None
    """That it is expected to run, on ``devices``."""
    version: int = VERSION

    @property
    def elastic(self) -> bool:
        """Whether it can have more devices."""
        return self.max_devices is not None


def submit(folder: Path, submission: Submission) -> Path:
    """Check a job and leave it for the fleet of ``folder``; returns its own folder. Raises SubmissionError."""
    check(submission)
    jobs = folder / JOBS
    fresh = jobs / f".{submission.name}.{secrets.token_hex(4)}"
    own = jobs / submission.name
    try:
        fresh.mkdir(parents=True, mode=0o700)
        (fresh / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(submission), indent=1))
        os.rename(fresh, own)  # is refused if there is such a folder, as no folder of a job is empty
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if own.exists():
            raise NameTaken(f"there is a job {submission.name} already ({own}): choose another --name") from None
        raise SubmissionError(f"cannot write {own}: {error.strerror}") from None
    return own


def cancel(folder: Path, name: str) -> None:
    """Ask the fleet of ``folder`` to end a job. Raises SubmissionError if there is none of this name."""
    if not _NAME.fullmatch(name):
        raise SubmissionError(f"there is no job {name!r} in {folder}: that is no name of a job")
    try:
        (folder / JOBS / name / CANCEL).touch()
    except OSError as error:
        raise SubmissionError(f"there is no job {name} in {folder}: {error.strerror}") from None


def read(own: Path) -> Submission:
    """The submission of a job's folder, as somebody has written it. Raises SubmissionError."""
    try:
        submission = msgspec.json.decode((own / FILE).read_bytes(), type=Submission)
    except OSError as error:
        raise SubmissionError(f"cannot read {own / FILE}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SubmissionError(f"{own / FILE} is no submission: {error}") from None
    if submission.name != own.name:
        raise SubmissionError(f"{own / FILE} is of a job {submission.name}")
    check_sizes(submission)
    return submission


def free_name(folder: Path, command: list[str]) -> str:
    """A name for a job that was given none: that of its program, numbered."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(next(iter(command), "job")).stem).strip(".-_")[:_OF_A_PROGRAM] or "job"
    number = 1
    while (folder / JOBS / f"{stem}-{number}").exists():
        number += 1
    return f"{stem}-{number}"


def check(submission: Submission) -> None:
    """Look at everything that can be looked at before the job starts, here and now. Raises SubmissionError."""
    check_sizes(submission)
    if submission.elastic:
        _check_elastic(submission)
    elif shutil.which(submission.command[0]) is None:
        raise SubmissionError(f"there is no program {submission.command[0]}")


def check_sizes(submission: Submission) -> None:
    """Look at name and numbers. Raises SubmissionError."""
    given, most = submission.devices, submission.max_devices
    if submission.version != VERSION:
        raise SubmissionError(f"the submission is of version {submission.version}, and this program reads {VERSION}")
    if not _NAME.fullmatch(submission.name):
        raise SubmissionError(
            f"{submission.name!r} is no name of a job: up to 100 letters, digits, '.', '_' and '-', none of the last "
            "three at the beginning"
        )
    if not submission.command:
        raise SubmissionError("there is no command: put it behind --")
    if given < 1:
        raise SubmissionError(f"--devices {given}: a job needs at least one")
    if most is not None and most < given:
        raise SubmissionError(f"--max-devices {most} is less than --devices {given}")
    if submission.seconds is not None and not 0 < submission.seconds < 1e10:
        raise SubmissionError(f"--seconds {submission.seconds:g} is no duration")


def _check_elastic(submission: Submission) -> None:
    command = submission.command
    for prefix in _PREFIXES:
        if tuple(command[: len(prefix)]) == prefix:
            raise SubmissionError(
                f"leave {' '.join(prefix)} and its flags out: of an elastic job the command is the script and its "
                "arguments, and the fleet starts the launchers"
            )
    if command[0].startswith("-") and command[0] not in ("-m", "--module"):
        raise SubmissionError(
            f"the command begins with {command[0]}: it must be the script and its arguments, or -m MODULE ...; the "
            "fleet says how many ranks there are, and where"
        )
    try:
        config = launcher.check(["--nproc-per-node", str(submission.devices), *command])
    except UsageError as error:
        raise SubmissionError(str(error)) from None
    if not config.elastic:
        raise SubmissionError("a job with --max-devices must be elastic: put --elastic among the script's arguments")
    if config.run_dir is not None:
        raise SubmissionError("leave --elastic-run-dir out: records go to the job's folder in the fleet's")
