"""The example script, of which each rank ends its log with how often it has written to its odometer, or added to its
dials, and in how many steps: a JSON object after ``odometer``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

from megatron_elastic.faults.odometer import Odometer
from megatron_elastic.observe.dials import Dials

__all__ = ["check_arguments"]

_written: Counter[str] = Counter()


def _count(name: str) -> None:
    write = getattr(Odometer, name)

    def counted(self: Odometer, *arguments: Any) -> None:
        _written[name] += 1
        write(self, *arguments)

    setattr(Odometer, name, counted)


class _Counted:
    """Words of dials."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        _written["add"] += 1
        self._words[index] = value

    def __iter__(self) -> Iterator[int]:
        return iter(self._words)


def _count_additions() -> None:
    make = Dials.__init__

    def made(self: Any, words: memoryview) -> None:
        make(self, words)
        self.sent, self.received = _Counted(self.sent), _Counted(self.received)

    Dials.__init__ = made  # type: ignore[method-assign]


if __name__ == "__main__":
    for method in ("at", "moved", "wait", "worked", "settle"):
        _count(method)
    _count_additions()
    code = pretrain_gpt.main()
    print("odometer", json.dumps(_written))
    sys.exit(code)
