"""Shown: how ``megatron-elastic predict`` puts figures on a screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

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


def grid(*columns: str, padding: int = 3) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False, padding=(0, padding, 0, 0))
    for column in columns:
        table.add_column(column)
    return table


def console() -> Console:
    """Standard output, wide enough for tables where it is no terminal."""
    made = Console(highlight=False, soft_wrap=True)
    if not made.is_terminal:
        made.width = max(160, made.width)
    return made
