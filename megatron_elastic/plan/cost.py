"""Cost: what each unit takes in time and memory, and what links carry. Measured, read from a profile, or assumed.

All figures are of one rank of a cell: with tensor parallelism, of its part of the unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_elastic.layout import Layout

_ASSUMED = {
    "layer": 1_000_000, "experts": 1_000_000, "bias": 100, "embedding": 1_000_000, "positions": 100_000, "head": 1_000,
}  # fmt: skip
"""Parameters of units about which nothing is known, so that a plan is at least proportionate."""
_PARAMETERS_PER_MS = 1_000_000


class ProfileError(Exception):
    """A profile cannot be read. The message names the entry and what it should be."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What one unit takes.

    Attributes:
        forward_ms, backward_ms: computing one grain.
        parameter_bytes: weights and gradients, which every cell that holds the unit has.
        optimizer_bytes: master weights and moments, which the cells of the unit's home stage share.
        activation_bytes: kept from a grain's forward to its backward.
    """

    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def grain_ms(self) -> float:
        """Forward and backward of one grain."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a job.

    Attributes:
        units: in the order of ``Layout.units``.
        boundary_bytes: a grain's activation between two stages.
        bandwidth: of a link, bytes a second.
        latency_ms: of a link.
        overhead_ms: the part of a step that is not the pipeline: reductions, vote, update.
        memory_bytes: of one device for what ``UnitCost`` counts; None: no limit.
    """

    units: tuple[UnitCost, ...]
    boundary_bytes: int = 0
    bandwidth: float = 10e9
    latency_ms: float = 0.01
    overhead_ms: float = 0.0
    memory_bytes: int | None = None

    @property
    def boundary_ms(self) -> float:
        """Time of a grain's activation on its way between two stages."""
        return self.transfer_ms(self.boundary_bytes)

    def transfer_ms(self, size: float) -> float:
        """Time of ``size`` bytes over one link."""
        return self.latency_ms + 1e3 * size / self.bandwidth

    # ---- profiles --------------------------------------------------------------------------

    @classmethod
    def from_json(cls, text: str | bytes, units: Sequence[str]) -> Costs:
        """Read a profile for the named units. An entry ``layer`` stands for all layers that have none of their own.

        Raises ProfileError.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ProfileError(f"the profile is not JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("units"), dict):
            raise ProfileError('the profile must be an object with an object "units"')
        entries = data.pop("units")
        known = {field.name for field in fields(cls)}
        if unknown := sorted({*data} - known):
            raise ProfileError(f"the profile has {unknown[0]!r}, which is none of {', '.join(sorted(known))}")
        if surplus := sorted(set(entries) - {*units, "layer"}):
            raise ProfileError(f"the profile has unit {surplus[0]!r}, but the layout has {', '.join(units)}")
        return cls(
            units=tuple(_unit(name, entries) for name in units),
            **{key: _number(key, value) for key, value in data.items() if value is not None},
        )

    def to_json(self, units: Sequence[str]) -> str:
        """The profile, one named unit a line; ``from_json`` reads it."""
        costs = zip(units, self.units, strict=True)
        rows = (f"    {json.dumps(name)}: {json.dumps(asdict(cost))}" for name, cost in costs)
        rest = [f'  "{field.name}": {json.dumps(getattr(self, field.name))}' for field in fields(self)[1:]]
        return '{\n  "units": {\n' + ",\n".join(rows) + "\n  },\n" + ",\n".join(rest) + "\n}\n"

    @classmethod
    def assumed(cls, units: Sequence[str], parameters: Mapping[str, int] | None = None) -> Costs:
        """Costs where nothing was measured, in proportion to the units' numbers of parameters.

        A million parameters take 1 ms forward and 2 ms backward; looking up embeddings takes nothing, and the head as
        much as its own weights or, if it has hardly any, the embedding's (then they are tied). Parameters, gradients
        and optimizer state are those of bf16 training. Units that ``parameters`` does not name are taken to have a
        million, heads a thousand, biases a hundred.
        """
        count = {unit: (parameters or {}).get(unit, _ASSUMED[unit.partition(".")[0]]) for unit in units}
        works = dict(count)
        for unit in units:
            if unit in ("embedding", "positions"):
                works[unit] = 0
            elif unit == "head" and count[unit] < count["embedding"] // 2:
                works[unit] = count["embedding"]
        return cls(
            tuple(
                UnitCost(
                    forward_ms=works[unit] / _PARAMETERS_PER_MS,
                    backward_ms=2 * works[unit] / _PARAMETERS_PER_MS,
                    parameter_bytes=6 * count[unit],
                    optimizer_bytes=12 * count[unit],
                    activation_bytes=0,
                )
                for unit in units
            )
        )

    # ---- predictions -----------------------------------------------------------------------

    def pace(self, stage_units: Sequence[Sequence[int]], widths: Sequence[int], grains: Sequence[float]) -> Pace:
        """Step time under 1F1B of stages of the given units and widths, whose fullest cells have ``grains``."""
        stages = len(stage_units)
        each = [sum(self.units[unit].grain_ms for unit in own(stage_units, stage)) for stage in range(stages)]
        slowest = max(count * ms for count, ms in zip(grains, each, strict=True))
        live, rest = [], 0.0
        for stage, count in enumerate(grains):
            # From a grain's forward until its backward is done, all stages from here on compute it.
            away = sum(each[stage:]) + 2 * (stages - 1 - stage) * self.boundary_ms
            enough = math.ceil(away * count / slowest * (1 - 1e-9)) if slowest else 1
            usual = stages - stage
            # Far more would only let forwards go before backwards that others wait for.
            live.append(max(usual, min(enough, 2 * usual, self._room(stage_units, stage, widths[stage]))))
            # A cell works without a break, or waits for the first of its live grains to come back.
            rest = max(rest, (count - 1) * each[stage], away * (count - live[stage]) / live[stage])
        return Pace(tuple(live), sum(each) + rest + 2 * (stages - 1) * self.boundary_ms + self.overhead_ms)

    def pace_of(self, layout: Layout) -> Pace:
        """The pace of a layout."""
        return self.pace(
            [stage.units for stage in layout.stages],
            [stage.width for stage in layout.stages],
            [max(map(layout.load, stage.cells)) for stage in layout.stages],
        )

    def _room(self, stage_units: Sequence[Sequence[int]], stage: int, width: int) -> int:
        """Live activations that fit a device of a stage; 0 if its memory is not known."""
        if self.memory_bytes is None:
            return 0
        costs = [self.units[unit] for unit in own(stage_units, stage)]
        fixed = sum(self.units[unit].parameter_bytes for unit in stage_units[stage])
        left = self.memory_bytes - fixed - sum(cost.optimizer_bytes for cost in costs) / width
        return int(left // max(1, sum(cost.activation_bytes for cost in costs)))


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a pipeline is under 1F1B.

    Attributes:
        live: for each stage, how many live activations its cells should be allowed: P - s at stage s of P, and up to
            twice as many where a stage is narrower than those after it and the memory is known to be enough.
        step_ms: estimated time of a step with these; exact for stages of equal times and widths.
    """

    live: tuple[int, ...]
    step_ms: float


def own(stage_units: Sequence[Sequence[int]], stage: int) -> Sequence[int]:
    """Units of a stage without the tied embedding, which is at home in the first."""
    units = stage_units[stage]
    return units[1:] if stage and units[0] == 0 else units


def _unit(name: str, entries: Mapping[str, Any]) -> UnitCost:
    key = name if name in entries else name.partition(".")[0]
    entry = entries.get(key)
    names = [field.name for field in fields(UnitCost)]
    if not isinstance(entry, dict):
        raise ProfileError(f"the profile has no entry for unit {name!r}: add one with {', '.join(names)}")
    if set(entry) != set(names):
        raise ProfileError(f"unit {key!r} of the profile has {sorted(entry)}, but must have {', '.join(names)}")
    return UnitCost(**{field: _number(f"{key}: {field}", value) for field, value in entry.items()})


def _number(key: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ProfileError(f"the profile has {value!r} for {key!r}, but it must be a number that is not negative")
    if key == "bandwidth" and not value:
        raise ProfileError("the profile has a bandwidth of 0: it must be positive, in bytes a second")
    return value
