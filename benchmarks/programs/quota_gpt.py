"""The example script, each rank of which enters a cgroup of its own: the one of its number in the folder ``QUOTAS``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

__all__ = ["check_arguments"]

if __name__ == "__main__":
    (Path(os.environ["QUOTAS"]) / os.environ["RANK"] / "cgroup.procs").write_text(str(os.getpid()))
    sys.exit(pretrain_gpt.main())
