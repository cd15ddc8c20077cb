"""Registration: makes the backend ``elastic`` known to torch. The entry point ``torch.backends`` names ``register``.

So torch calls it at the end of ``import torch``, in every program of an environment that this package is installed in.
It takes less than a millisecond, and imports nothing; links are loaded when a group is made.
"""

from __future__ import annotations

from typing import Any

NAME = "elastic"


def register() -> None:
    """Let ``torch.distributed.init_process_group("elastic")`` work. Where torch has no ``distributed``: nothing.

    Idempotent.
    """
    import torch.distributed as dist  # whoever calls it has torch; this module is found without

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: Any) -> Any:
    from megatron_elastic.comm.distributed import backend

    return backend.create(options)
