"""Completion: ``megatron-elastic completion``. Prints what lets a shell complete commands, flags and files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import shtab

from megatron_elastic import cli, usage
from megatron_elastic.cluster.asking.ask import WHERE


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic completion``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic completion", formatter_class=usage.Formatter,
        description="Print what lets a shell complete megatron-elastic's commands, flags and files.",
        epilog="examples:\n  eval \"$(megatron-elastic completion bash)\"         # in ~/.bashrc\n"
               "  megatron-elastic completion zsh > ~/.zfunc/_megatron-elastic",
    )  # fmt: skip
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="%(choices)s", metavar="SHELL")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic completion SHELL``: 0."""
    options = make_parser().parse_args(argv)
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    """What a shell (``bash``, ``zsh`` or ``tcsh``) is to read."""
    return str(shtab.complete(whole(), shell))


def whole() -> argparse.ArgumentParser:
    """All commands as one parser."""
    parser = argparse.ArgumentParser(prog="megatron-elastic")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (what, flags) in cli.parsers().items():
        commands.add_parser(name, help=what, parents=[flags], add_help=False)
    for action in _actions(parser):
        if action.type is Path or action.help == WHERE:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    return parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)
