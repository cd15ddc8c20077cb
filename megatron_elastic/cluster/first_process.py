"""First process: what the launcher has to do besides where it is process 1, as in a container without an init.

Processes that have lost their parents are its children then, and stay as zombies unless somebody asks how they ended;
and signals that have no handler do not reach it. So it is only a parent, and the launcher itself is its child.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

_PASSED_ON = frozenset(signal.valid_signals() - {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU,
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS,
})  # fmt: skip
"""All but what concerns this process alone."""


def tend(run: Callable[[], int]) -> int:
    """Have a child do ``run``, pass signals on to it, and ask how all ended that have no parent any more.

    Returns in the child, too, what ``run`` does; here its exit code, 128 + N if signal N has killed it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        _to_the_front()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return run()
    while True:
        number = signal.sigwait(_PASSED_ON | {signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(child, number)  # it is there: nobody has asked how it ended
        elif (code := _ended(child)) is not None:
            return code if code >= 0 else 128 - code


def _to_the_front() -> None:
    """Be what a terminal, if there is one, sends its signals to: they are not to come twice."""
    os.setpgid(0, 0)
    if os.isatty(0):
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # it may be another session's, and sends nothing here
            os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)


def _ended(child: int) -> int | None:
    """Take note of all children that have ended; returns the exit code of this one if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
