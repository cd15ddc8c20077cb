"""Parts: what ``scripts/long.sh`` runs beside the gate, by name."""

from __future__ import annotations

from fnmatch import fnmatch

PARTS: dict[str, tuple[str, ...]] = {
    "checkout": ("test_checkout", "test_loading", "test_data_forms", "test_interchange", "test_example_scripts",
                 "test_flags"),
    "versions": ("test_versions", "test_next_release"),
    "models": ("test_models", "test_numbers", "test_experts", "test_contexts", "test_plain", "test_optimizer",
               "test_mtp", "test_fp16", "test_rampup", "test_memory"),
    "devices": ("test_on_device", "test_devices", "test_soft*", "test_engine", "test_samples"),
    "schedules": ("test_search_job", "test_v_placement", "test_flextrain", "test_virtual_stages", "test_split*"),
    "changes": ("test_scale", "test_reshape*", "test_join", "test_drain", "test_resize"),
    "emulated": ("test_emulated", "test_policies", "test_dvfs", "test_fit"),
    "lost-hosts": ("test_lost_hosts",),
    "slurm": ("test_slurm", "test_fleet_slurm"),
    "fleet": ("test_fleet*",),
    "namespaces": ("test_namespaces", "test_caches", "test_leadership", "test_failover", "test_takeover"),
    "slow": ("test_slow", "test_silence", "test_hang"),
    "bench": ("test_bench", "test_goodput", "test_chaos"),
    "faults": ("*",),
}
"""Modules of tests by part; a module belongs to the first that names it. Its jobs outside the gate run there."""


def part_of(module: str) -> str:
    """The part of a module of tests, by its last name."""
    return next(part for part, patterns in PARTS.items() if any(fnmatch(module, pattern) for pattern in patterns))
