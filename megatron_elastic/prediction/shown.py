"""Shown: how ``megatron-elastic predict`` puts figures on a screen."""

from __future__ import annotations

from megatron_elastic.plan.predict import Case, Device, Entry


def degrees(case: Case | Entry) -> str:
    """Parallel sizes."""
    chunks = f" x {case.chunks} chunks" if case.chunks > 1 else ""
    return f"TP{case.tp} PP{case.pp}{chunks} DP{case.dp}"


def layout_of(case: Case) -> str:
    """Parallel sizes and the samples of a grain."""
    return f"{degrees(case)}, micro-batch {case.micro_batch}"


def figures_of(device: Device) -> str:
    """What a device can do."""
    return (
        f"{device.flops / 1e12:.0f} TFLOP/s, {device.memory_bytes / 1e9:.0f} GB at "
        f"{device.memory_bandwidth / 1e9:.0f} GB/s, "
        f"links {device.link_bandwidth / 1e9:.0f} GB/s, {device.per_node} a node, which has "
        f"{device.node_bandwidth / 1e9:.0f} GB/s to others"
    )


def percent(fraction: float) -> str:
    """With a digit behind the point."""
    return f"{100 * fraction:.1f}%"
