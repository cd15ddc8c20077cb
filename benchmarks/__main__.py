"""``python benchmarks NAME [ARGS]``: become one of the benchmarks, as ``megatron_elastic.bench`` does."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Sequence
from types import TracebackType


def _quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say nothing of Ctrl-C, which ends the process all the same."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _quietly  # before the imports of a benchmark, which take seconds


def main(argv: Sequence[str]) -> int:
    """Run the benchmark: 1 and a line where a job failed, 130 after Ctrl-C. Refuses what is none, as ``bench`` does."""
    from common import JobFailed, words

    from megatron_elastic import bench

    room = bench.rooms().get(argv[0]) if argv else None
    if room is None:
        return bench.main(argv)
    try:
        return int(importlib.import_module(f"{room}.{argv[0]}").main(argv[1:]))
    except JobFailed as error:
        print(f"{shlex.join(words(argv[0]))}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
