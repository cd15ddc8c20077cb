"""Releases of Megatron: those that the adaptors are written for, and the one that is here. Imports nothing of it."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

from megatron_elastic.patching import Checkout

RELEASES = ("0.16", "0.17", "0.18", "0.19")
"""Those that the adaptors are written for, whatever their last number."""
SUPPORTED = f"core_v{RELEASES[0]}.1 to core_v{RELEASES[-1]}"
"""The same for people. Older ones of the first were not tried."""


def known(release: str) -> bool:
    """Whether a release (``0.19``) is one of those."""
    return release in RELEASES


def release_of(tag: str) -> str:
    """The first two numbers of a tag or version (``core_v0.19.2``, ``0.19.2``)."""
    return ".".join(tag.removeprefix("core_v").split(".")[:2])


def installed() -> Checkout | None:
    """The tree that ``megatron.core`` would be imported from, or is; None without one."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return None if spec is None or spec.origin is None else Checkout.at(Path(spec.origin).parents[2])


@cache
def running() -> str:
    """The release that this process has or would import, ``0.19``; that of the newest known one without any."""
    here = installed()
    return RELEASES[-1] if here is None else release_of(here.tag)
