"""Prints docs/commands.md: what every command says about itself.

    python scripts/commands.py > docs/commands.md
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator


def main() -> None:
    """Print the page."""
    os.environ["COLUMNS"] = "80"
    from megatron_elastic import cli

    print("# Commands\n\nWhat `megatron-elastic COMMAND --help` says. `python scripts/commands.py` writes this page.\n"
          "Of `chaos`, which needs the sources, [faults](faults.md) tells.")
    for what, parser in cli.parsers().values():
        for each in _with_parts(parser):
            title = each.prog.removeprefix("megatron-elastic ")
            lead = f"{what[0].upper()}{what[1:]}.\n\n" if each is parser else ""
            print(f"\n## {title}\n\n{lead}```text\n{each.format_help().rstrip()}\n```")


def _with_parts(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


if __name__ == "__main__":
    main()
