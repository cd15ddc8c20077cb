"""Which releases of torch the backend works with: what it needs of ``torch.distributed``, and where that was tried."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elastic.config import UsageError

OLDEST, NEWEST = (2, 11), (2, 14)
"""Those that are taken without a word; the tests run with 2.13."""
_NEEDED = {"register_backend": ("name", "func", "extended_api", "devices")}
"""Of ``torch.distributed.Backend``, with parameters."""
_PRIVATE = ("_world", "_get_default_group")
"""Of ``torch.distributed.distributed_c10d``."""


def admit(version: str = torch.__version__) -> str:
    """What is to be said of a torch of this version before a job trains with it; nothing of one in that range.

    Raises UsageError for an older one, and where something is not there or takes other parameters.
    """
    numbers = tuple(int(number) for number in version.split("+")[0].split(".")[:2])
    if numbers < OLDEST:
        raise UsageError(f"torch {version} is older than {_shown(OLDEST)}: install one from that to {_shown(NEWEST)}")
    problems = [f"torch.distributed.Backend.{name} does not take {parameter}" for name, wanted in _NEEDED.items()
                for parameter in wanted
                if parameter not in inspect.signature(getattr(dist.Backend, name)).parameters]  # fmt: skip
    problems += [f"there is no {c10d.__name__}.{name}" for name in _PRIVATE if not hasattr(c10d, name)]
    if problems:
        raise UsageError(f"torch {version} is not as the backend needs it: {'; '.join(problems)}; install one from "
                         f"{_shown(OLDEST)} to {_shown(NEWEST)}")
    if numbers > NEWEST:
        return f"torch {version} is newer than {_shown(NEWEST)}: it is tried, since what is needed of it is there"
    return ""


def _shown(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
