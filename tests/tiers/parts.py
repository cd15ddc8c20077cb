"""Parts: what ``scripts/long.sh`` runs beside the gate, by name."""

from __future__ import annotations

from fnmatch import fnmatch

PARTS: dict[str, tuple[str, ...]] = {
    "checkout": ("test_checkout", "test_interchange", "test_patch*"),
    "models": ("test_models", "test_experts", "test_contexts", "test_plain", "test_optimizer"),
    "lost-hosts": ("test_lost_hosts",),
    "slurm": ("test_slurm",),
    "namespaces": ("test_namespaces", "test_leadership", "test_failover", "test_takeover"),
    "slow": ("test_slow", "test_silence", "test_hang"),
    "bench": ("test_bench", "test_goodput", "test_chaos"),
    "faults": ("*",),
}
"""Modules of tests by part; a module belongs to the first that names it. Its jobs outside the gate run there."""


def part_of(module: str) -> str:
    """The part of a module of tests, by its last name."""
    return next(part for part, patterns in PARTS.items() if any(fnmatch(module, pattern) for pattern in patterns))
