"""Trains like examples/pretrain_gpt.py. Its data are there once somebody has written into the pipe ``DATA_PIPE``.

Who opens it writes its rank into ``DATA_PIPE`` + ``.rank`` before.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pretrain_gpt

check_arguments = pretrain_gpt.check_arguments
_provider = pretrain_gpt.datasets_provider


def datasets_provider(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The usual one, some time later."""
    pipe = Path(os.environ["DATA_PIPE"])
    if pipe.exists():
        pipe.with_suffix(".rank").write_text(os.environ["RANK"])
        pipe.read_text()
        pipe.unlink(missing_ok=True)
    return _provider(args)


if __name__ == "__main__":
    pretrain_gpt.datasets_provider = datasets_provider
    sys.exit(pretrain_gpt.main())
