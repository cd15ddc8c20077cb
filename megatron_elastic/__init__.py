"""megatron_elastic: a Megatron-LM plugin for pretraining jobs that lose, gain and move ranks without restarting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megatron_elastic.adaptor.training.entry import pretrain

__all__ = ["__version__", "pretrain"]


def __getattr__(name: str) -> Any:
    # Megatron is imported only by those who train: the launcher and the tools must start fast and without it.
    if name == "pretrain":
        from megatron_elastic.adaptor.training.entry import pretrain

        return pretrain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
