"""Tables: figures for people, or for a file."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def console(width: int) -> Console:
    """Standard output; where it is no terminal, at least so wide. Brackets are nothing else to it."""
    made = Console(highlight=False, soft_wrap=True, markup=False)
    if not made.is_terminal:
        made.width = max(width, made.width)
    return made


def grid(*columns: str, padding: int = 3) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0))
    for column in columns:
        table.add_column(column)
    return table
