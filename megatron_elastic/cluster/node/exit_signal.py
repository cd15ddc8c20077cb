"""Exit signal: what a scheduler sends some time before it takes the machines away.

With Megatron-LM's ``--exit-signal-handler`` the ranks save and end training when it comes. The launcher, which is what
a scheduler signals, passes it on to them instead of ending the job. Else SIGTERM lets the ranks of the node leave, if
the others can go on without them.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence

_ARGUMENTS = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
_ARGUMENTS.add_argument("--exit-signal-handler", action="store_true")
_ARGUMENTS.add_argument("--exit-signal", default="SIGTERM", choices=[each.name for each in signal.Signals])


class ExitSignal:
    """The signal that a script's ``arguments`` ask for, if they do. ``number`` is None if they do not.

    ``pass_on`` and ``leave`` are to be set as soon as there may be ranks to send it to, or that can leave.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.number: signal.Signals | None = None
        self.pass_on: Callable[[int], bool] | None = None
        """Sends it to the ranks of this node; returns whether any of them listens by now."""
        self.leave: Callable[[], bool] | None = None
        """Lets the ranks of this node leave; returns whether they will."""
        try:
            options = _ARGUMENTS.parse_known_args(list(arguments))[0]
        except argparse.ArgumentError:
            return  # Megatron's parser will say what is wrong
        if options.exit_signal_handler:
            self.number = signal.Signals[options.exit_signal]

    def taken(self, number: int) -> str | None:
        """What is done about a signal instead of ending the job, for people. That is done once: another one ends it."""
        if number == self.number and self.pass_on is not None and self.pass_on(number):
            self.pass_on = None
            return f"{self.number.name} goes to the ranks, which end training (--exit-signal-handler)"
        if number == signal.SIGTERM and self.leave is not None:
            leave, self.leave = self.leave, None
            return "the ranks of this node leave the job; SIGTERM again ends them at once" if leave() else None
        return None
