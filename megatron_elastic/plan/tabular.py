"""Tabular: text of tables that others have made: packed or not, as UTF-8 or UTF-16, with commas or something else."""

from __future__ import annotations

import gzip
import zlib


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


def delimiter(table: str) -> str:
    """What is most often in the first line that is not empty, of comma, semicolon, tab and bar."""
    first = next((line for line in table.splitlines() if line.strip()), "")
    return max(",;\t|", key=first.count)
