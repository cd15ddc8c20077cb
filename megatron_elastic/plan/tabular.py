"""Tabular: text of tables that others have made: packed or not, as UTF-8 or UTF-16, with commas or something else."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator


def text(data: bytes, packed: bool = False) -> str:
    """What a file says, unpacked if it is packed by gzip, as it must be if it is ``packed`` by its name.

    Raises ValueError, saying what it is not.
    """
    if packed or data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"it cannot be unpacked ({error})") from None
    coding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(coding)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8 or UTF-16, or not text at all ({error})") from None


def rows(table: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row, with the line that it ends on, from 1 on.

    Raises ValueError, saying where, for what is no table, as for a quotation without an end.
    """
    reader = csv.reader(io.StringIO(table), delimiter=_delimiter(table), skipinitialspace=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} cannot be read ({error}); does a quotation end?") from None


def _delimiter(table: str) -> str:
    """What is most often in the first line that is not empty, of comma, semicolon, tab and bar."""
    first = next((line for line in table.splitlines() if line.strip()), "")
    return max(",;\t|", key=first.count)
