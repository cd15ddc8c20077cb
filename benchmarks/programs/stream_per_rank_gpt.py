"""The example script with random numbers as they usually are: each rank has a stream of its own, from its number, and
advances it draw by draw. What a micro-batch draws depends on who computes it, and on what that one computed before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

from megatron_elastic.adaptor.layers.place import begin
from megatron_elastic.adaptor.layers.random import GrainKey

__all__ = ["check_arguments"]

_begun = False


def _go_on(self: GrainKey, unit: str) -> None:
    """In place of ``GrainKey.seed``: the first draw of all begins the rank's stream."""
    global _begun
    if not _begun:
        begin("stream", int(os.environ["RANK"]))
        _begun = True


if __name__ == "__main__":
    GrainKey.seed = _go_on  # type: ignore[method-assign]
    sys.exit(pretrain_gpt.main())
