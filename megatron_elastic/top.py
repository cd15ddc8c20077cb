"""Top: ``megatron-elastic top``. What a job is doing, live, with keys to look closer and to ask for changes."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Input, Static

from megatron_elastic import usage
from megatron_elastic.cluster.asking.ask import WHERE, run_of
from megatron_elastic.cluster.node.stack import save_stack
from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.run import Run
from megatron_elastic.observe.status import picture

_EVERY = 1.0
"""Seconds between two looks at the records."""
_HELP = "log RANK, stack RANK, scale --pp N ..., drain --node N; empty: back to the job"


class Top(App[None]):
    """The status of a run, read on every second; a line below takes commands."""

    CSS = "Static { padding: 0 1; } Input { dock: bottom; display: none; } Input.asked { display: block; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("l", "ask('log ')", "log of a rank"),
        Binding("s", "ask('stack ')", "stack of a rank"),
        Binding("c", "ask('scale ')", "scale"),
        Binding("d", "ask('drain --node ')", "drain a node"),
        Binding("escape", "return", "back to the job"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run_shown = run
        self.title = f"megatron-elastic {run.place.name}"
        self._aside = False
        """Whether something else is shown."""
        self._look: asyncio.Task[None] | None = None

    def compose(self) -> ComposeResult:
        """One page that scrolls, the line for commands, and the keys."""
        with VerticalScroll():
            yield Static(id="page")
        yield Input(placeholder=_HELP, select_on_focus=False)  # what is begun is to be completed
        yield Footer()

    def on_mount(self) -> None:
        """Look now, and from now on."""
        self.look()
        self.looking = self.set_interval(_EVERY, self.look)

    def look(self) -> None:
        """Show the job as it is, as soon as that is known."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._looked())

    async def _looked(self) -> None:
        page: RenderableType
        try:
            await asyncio.to_thread(self.run_shown.refresh)  # which may be over the network
            page = picture(self.run_shown)
        except RecordsError as error:
            page = Text(str(error), style="red")
        if not self._aside and self.is_running:
            self.query_one("#page", Static).update(page)

    def show(self, text: str) -> None:
        """Show something else, until the job is asked for again."""
        self._aside = True
        self.looking.pause()
        self.query_one("#page", Static).update(Text(text))

    def action_ask(self, begun: str) -> None:
        """Let the user complete a command."""
        line = self.query_one(Input)
        line.value = begun
        line.cursor_position = len(begun)
        line.add_class("asked")
        line.focus()

    def action_return(self) -> None:
        """To the job."""
        self.query_one(Input).remove_class("asked")
        self._aside = False
        self.looking.resume()
        self.look()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        """Do what was asked for."""
        self.action_return()
        try:
            words = shlex.split(event.value)
        except ValueError as error:  # a quotation without an end
            self.show(f"{event.value!r} cannot be read: {error}; {_HELP}")
            return
        if words:
            self.show(await answer(self.run_shown, words))


async def answer(run: Run, words: Sequence[str]) -> str:
    """What a command has to say: the end of a rank's log, its stack, or what the job says about a request."""
    match words:
        case ["log", rank] if rank.isdecimal():
            return await asyncio.to_thread(run.place.log, int(rank))
        case ["stack", rank] if rank.isdecimal():
            return await _stack(run, int(rank))
        case ["scale" | "drain" as command, *rest]:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "megatron_elastic.cli", command, run.place.name, *rest,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
            output, _ = await process.communicate()
            return output.decode(errors="replace")
    return f"there is no command {shlex.join(words)!r}; {_HELP}"


async def _stack(run: Run, rank: int) -> str:
    known = run.processes.get(rank)
    if known is None:
        return f"the records do not say which process rank {rank} is"
    pid, host = known.pid, known.host
    if host != socket.gethostname():
        return f"rank {rank} is process {pid} of {host}; its stack can be seen there: py-spy dump --pid {pid}"
    if not os.path.isdir(f"/proc/{pid}"):
        return f"rank {rank} was process {pid}, which has ended"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stack"
        await save_stack(pid, path)
        return path.read_text() if path.is_file() else "py-spy is not installed: pip install py-spy"


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic top``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic top",
        description="Show what a job is doing, live: state, speed, goodput, layout, events. Keys: l shows a rank's "
        "log, s its stack (py-spy), c asks for another shape (scale), d lets a node leave (drain), Esc goes back, q "
        "quits.",
        epilog="examples:\n  megatron-elastic top runs/20261121-120000\n"
               "  MEGATRON_ELASTIC_TOKEN=... megatron-elastic top host0:29500",
        formatter_class=usage.Formatter,
    )
    parser.add_argument("job", metavar="JOB", help=WHERE)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic top JOB``: 0, or 2 where there are no readable records."""
    options = make_parser().parse_args(argv)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print("megatron-elastic top: error: there is no terminal to show it on; megatron-elastic status prints what it "
              "would show", file=sys.stderr)
        return 2
    try:
        run = run_of(options.job)
    except RecordsError as error:
        print(f"megatron-elastic top: error: {error}", file=sys.stderr)
        return 2
    Top(run).run()
    return 0
