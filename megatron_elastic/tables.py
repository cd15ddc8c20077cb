"""Tables: figures for people, or for a file."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


class Screen(Console):
    """Standard output, to which brackets are nothing else."""

    def __init__(self, highlight: bool = True, soft_wrap: bool = False) -> None:
        super().__init__(markup=False, highlight=highlight, soft_wrap=soft_wrap)

    def on_broken_pipe(self) -> None:
        """Nobody reads on: ``cli.main`` says with which exit code that ends."""
        raise BrokenPipeError


def console(width: int) -> Console:
    """Standard output; where it is no terminal, at least so wide."""
    made = Screen(highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = max(width, made.width)
    return made


def grid(*columns: str, padding: int = 3) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
