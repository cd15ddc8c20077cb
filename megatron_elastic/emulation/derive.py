"""Derive: a profile from a published shape and stated figures, by counting operations and bytes.

A matrix product of n weights takes 2n operations a token forward and twice as many backward; attention 2 x sequence x
hidden forward, as half of the scores are masked. A device does an assumed share of its stated operations. Sharing a
layer among tensor-parallel ranks takes two all-reduces each way; experts of other ranks two all-to-alls each way.
Matrix products are bound by operations, which a device's clock makes faster; what is bound by its memory or its links
is not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

import msgspec

from megatron_elastic.emulation.accelerators import Figures
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.models import Shape
from megatron_elastic.emulation.profile import Emulation, Profile
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.plan.costs.cost import EMULATION, Costs, UnitCost
from megatron_elastic.plan.costs.exchange import Exchange

WEIGHT, GRADIENT, STATE, ACTIVATION = 2, 4, 12, 2
"""Bytes: of a weight in bf16, of its gradient and of its optimizer state (master weight and two moments) in fp32, and
of an activation in bf16."""
KEPT = 34
"""Bytes that a layer keeps of each token and channel for the backward pass, as a multiple of the hidden size, without
the scores (Korthikanti et al. 2022, arXiv 2205.05198, section 4.1)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Parallel sizes of a job."""

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        """Of the job."""
        return self.tp * self.pp * self.dp * max(self.cp, self.ep)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a job computes in a step.

    Attributes:
        samples: of a grain on each rank.
        sequence: tokens of a sample.
        grains: of the global batch.
        replicas: of each slice of optimizer state.
    """

    samples: int
    sequence: int
    grains: int
    replicas: int = 1


def layout_of(shape: Shape, grid: Grid, batch: Batch) -> Layout:
    """The fault-free layout of the model."""
    split = [[shape.layers // grid.pp + (stage < shape.layers % grid.pp)] for stage in range(grid.pp)]
    units, stages = gpt_units(shape.layers, grid.pp, tied=False, positions=False, split=split,
                              routed=range(shape.layers) if shape.experts else ())
    teams = max(grid.cp, grid.ep)
    return Layout.grid(
        tp=grid.tp, pp=grid.pp, dp=grid.dp, cp=grid.cp, ep=grid.ep, stage_units=stages, units=units,
        num_grains=batch.grains, num_slices=grid.dp * teams, replicas=batch.replicas,
    )


def derive(
    name: str, shape: Shape, device: str, figures: Figures, grid: Grid, batch: Batch, *, efficiency: float,
    time_scale: float | None, step_seconds: float, ranks_per_host: int | None = None, noise: float = 0.0,
) -> Profile:
    """The profile of a model on a device; times as they are with ``time_scale``, or such that a step of the fault-free
    layout takes ``step_seconds``.
    """
    layout = layout_of(shape, grid, batch)
    kinds = _units(shape, figures, grid, batch, efficiency)
    if ranks_per_host is not None:
        figures = replace(figures, per_host=ranks_per_host)
    true = _profile(
        name, shape.layers, device, figures, batch, kinds, layout, _boundary(shape, grid, batch), noise)
    step = forecast(layout, true, "1f1b").step_ms
    return scaled(true, layout, step_seconds * 1e3 / step if time_scale is None else time_scale)


def scaled(profile: Profile, layout: Layout, by: float) -> Profile:
    """The same with all times multiplied, and bandwidths divided."""
    costs, e = profile.costs(layout.units), profile.emulation
    kinds = {name.partition(".")[0]: cost for name, cost in zip(layout.units, costs.units, strict=True)}
    kinds = {
        kind: replace(cost, forward_ms=cost.forward_ms * by, backward_ms=cost.backward_ms * by)
        for kind, cost in kinds.items()
    }
    costs = replace(costs, bandwidth=costs.bandwidth / by, latency_ms=costs.latency_ms * by,
                    overhead_ms=costs.overhead_ms * by,
                    exchange=None if costs.exchange is None else costs.exchange.scaled(by))
    emulation = msgspec.structs.replace(e, time_scale=e.time_scale * by)
    return Profile(emulation, profile.power, _text(kinds, costs, emulation))


def _profile(
    name: str, layers: int, device: str, figures: Figures, batch: Batch, kinds: dict[str, UnitCost], layout: Layout,
    boundary: int, noise: float,
) -> Profile:
    emulation = Emulation(
        model=name, device=device, tokens=batch.samples * batch.sequence * layout.batches,
        samples=batch.samples * layout.batches, time_scale=1.0, layers=layers, noise=noise,
    )
    exchange = Exchange(
        sum_bytes=GRADIENT, gradient_bytes=GRADIENT, weight_bytes=WEIGHT, near_bandwidth=figures.near.bandwidth,
        near_latency_ms=figures.near.latency_ms, memory_bandwidth=figures.memory_bandwidth,
        ranks_per_host=figures.per_host,
    )
    costs = Costs(units=(), boundary_bytes=boundary, bandwidth=figures.far.bandwidth,
                  latency_ms=figures.far.latency_ms, memory_bytes=figures.memory, exchange=exchange,
                  power=figures.power, clock_steps=figures.clock_steps)
    return Profile(emulation, figures.power, _text(kinds, costs, emulation))


def _text(kinds: dict[str, UnitCost], costs: Costs, emulation: Emulation) -> str:
    rows = ",\n".join(f"    {json.dumps(kind)}: {json.dumps(asdict(cost))}" for kind, cost in kinds.items())
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in costs.entries().items()]
    lines.append(f'  "{EMULATION}": {json.dumps(msgspec.to_builtins(emulation), indent=2)}'.replace("\n", "\n  "))
    return '{\n  "units": {\n' + rows + "\n  },\n" + ",\n".join(lines) + "\n}\n"


def _units(shape: Shape, figures: Figures, grid: Grid, batch: Batch, efficiency: float) -> dict[str, UnitCost]:
    tokens = batch.samples * batch.sequence // grid.cp
    speed = figures.flops * efficiency / 1e3  # operations a millisecond

    def cost(weights: float, operations: float, sent: float, kept: float) -> UnitCost:
        """``weights`` on a rank; ``operations`` a token, and bytes ``sent`` to others of the cell, forward."""
        exchange = figures.near.transfer_ms(sent) if sent else 0.0
        forward = operations * tokens / speed
        # What is kept is what operations between the products have written, or will read; backward is twice that, too.
        moved = min(2e3 * kept / figures.memory_bandwidth, forward)
        total = 3 * forward + 2 * exchange
        return UnitCost(
            forward_ms=forward + exchange, backward_ms=2 * forward + exchange,
            parameter_bytes=round(weights * (WEIGHT + GRADIENT)), optimizer_bytes=round(weights * STATE),
            activation_bytes=round(kept), clock_share=round(3 * (forward - moved) / total, 4) if total else 1.0,
        )

    h, row = shape.hidden, tokens * shape.hidden * ACTIVATION
    reduced = 2 * 2 * (grid.tp - 1) / grid.tp * row
    kinds = {
        "embedding": cost(shape.table / grid.tp, 0, 0, row),
        "layer": cost(
            shape.dense / grid.tp + 2 * h, (2 * shape.dense + 2 * batch.sequence * h) / grid.tp, reduced,
            KEPT * tokens * h / grid.tp,
        ),
        "head": cost(shape.table / grid.tp + h, 2 * shape.table / grid.tp, 0,
                     tokens * shape.vocabulary * (ACTIVATION + 4) / grid.tp),
    }  # fmt: skip
    if shape.experts:
        away = 2 * shape.topk * row * (grid.ep - 1) / grid.ep
        kinds["experts"] = cost(
            shape.experts * shape.network / grid.ep / grid.tp, 2 * shape.topk * shape.network / grid.tp, away,
            tokens * shape.topk * (3 * h + 4 * shape.ffn) * ACTIVATION / grid.tp,
        )
    return kinds


def _boundary(shape: Shape, grid: Grid, batch: Batch) -> int:
    return batch.samples * batch.sequence // grid.cp * shape.hidden * ACTIVATION // grid.tp
