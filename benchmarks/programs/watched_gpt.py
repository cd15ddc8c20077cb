"""The example script, of which each rank ends its log with how often it has written to its odometer, and in how many
steps: a JSON object after ``odometer``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

from megatron_elastic.faults.odometer import Odometer

__all__ = ["check_arguments"]

_written: Counter[str] = Counter()


def _count(name: str) -> None:
    write = getattr(Odometer, name)

    def counted(self: Odometer, *arguments: Any) -> None:
        _written[name] += 1
        write(self, *arguments)

    setattr(Odometer, name, counted)


if __name__ == "__main__":
    for method in ("at", "moved", "wait", "worked", "settle"):
        _count(method)
    code = pretrain_gpt.main()
    print("odometer", json.dumps(_written))
    sys.exit(code)
