"""Program: what a rank runs, and how that ends."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_elastic.cluster.rank.control import JobStopped, report_failure
from megatron_elastic.config import USAGE, UsageError

_KEPT = 1000
"""Bytes of what a rank prints that it remembers, to tell the last line."""

_USAGE_ERROR = ": error: "
"""In what ``argparse`` prints last."""


class Program(msgspec.Struct, frozen=True):
    """What a rank runs, with its arguments: a script, a module by its name, or a program that is no Python."""

    target: str
    is_module: bool
    arguments: list[str]
    is_command: bool = False

    @property
    def directory(self) -> str:
        """What Python puts first into the module search path when it runs the program."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.target))

    def run(self) -> int:
        """Run it as ``__main__`` and return its exit code; report what it raises to the coordinator."""
        sys.argv = [self.target, *self.arguments]
        try:
            if self.is_command:
                return _run_command(sys.argv)
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(os.path.abspath(self.target), run_name="__main__")
        except SystemExit as ending:
            return _ended_itself(ending.code)
        except JobStopped as stopped:
            print(f"stopped: {stopped}", file=sys.stderr)
            return 1
        except BaseException as error:
            text, code = (str(error), USAGE) if isinstance(error, UsageError) else (_own_traceback(error), 0)
            print(text, file=sys.stderr)
            report_failure(text, code)
            return code or 1
        return 0


class Log(io.FileIO):
    """A log that a full disk leaves with gaps: a rank must not end because it cannot print."""

    end = b""
    """The last some that was written."""

    def write(self, data: Any, /) -> int:
        self.end = (self.end + bytes(memoryview(data)))[-_KEPT:]
        try:
            return super().write(data)
        except OSError:
            return len(memoryview(data))


def _ended_itself(code: Any) -> int:
    """What a program ends with that has called ``sys.exit``; its last word goes to the coordinator."""
    if code is None or code == 0:
        return 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    number = code & 0xFF  # what becomes of it
    sys.stderr.flush()
    log = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    said = log.end.decode(errors="replace").strip() if isinstance(log, Log) else ""
    if number:
        rank, last = os.environ["RANK"], said.rpartition("\n")[2]
        told = f"rank {rank} ended with exit code {number}{f': {last}' if said else ''}; see rank{rank}.log"
        report_failure(last if number == USAGE and _USAGE_ERROR in last else told, number)
    return number


def _run_command(command: Sequence[str]) -> int:
    """Run a program that is no Python, as a process of this rank's group; its exit code is the rank's."""
    try:
        code = subprocess.run(command, check=False).returncode
        return code if code >= 0 else 128 - code  # as a shell tells it
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def _own_traceback(error: BaseException) -> str:
    """The traceback without the frames that started the program."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        name = frame.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            break
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame))
