"""Cost: what each unit takes in time and memory, and what links carry. Measured, read from a profile, or assumed.

All figures are of one rank of a cell: with tensor parallelism, of its part of the unit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_elastic.layout import MTP, Layout
from megatron_elastic.plan.costs.exchange import Exchange, Link, Phases
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.usage import is_amount

_ASSUMED = {
    "layer": 1_000_000, "experts": 1_000_000, "bias": 100, "embedding": 1_000_000, "positions": 100_000,
    "mtp": 1_000_000, "head": 1_000,
}  # fmt: skip
"""Parameters of units about which nothing is known, so that a plan is at least proportionate."""
_PARAMETERS_PER_MS = 1_000_000
_OF_A_JOB = {"clocking", "slow"}
"""Fields of ``Costs`` that are no entries of a profile."""
EMULATION = "emulation"
"""Entry of a profile that is not about costs: what only ``--elastic-emulate`` reads."""


class ProfileError(Exception):
    """A profile cannot be read. The message names the entry and what it should be."""


@contextmanager
def profile_of(path: Path) -> Iterator[None]:
    """The profile in a file is read. Raises ProfileError, which names the file, for all that is wrong with it."""
    try:
        yield
    except (OSError, UnicodeDecodeError, ProfileError) as error:
        raise ProfileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What one unit takes.

    Attributes:
        forward_ms, backward_ms: computing one grain.
        parameter_bytes: weights and gradients, which every cell that holds the unit has.
        optimizer_bytes: master weights and moments, which the cells of the unit's home stage share.
        activation_bytes: kept from a grain's forward to its backward.
        late_bytes: kept from the first half of a backward, which computes the gradients of inputs, to the second, which
            computes those of weights; None: not known.
        clock_share: of its time, what a device's clock divides. The rest stays as it is at any clock: moving data in
            memory, or to other devices.
    """

    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    late_bytes: int | None = None
    clock_share: float = 1.0

    def at(self, clock: float) -> UnitCost:
        """What it takes at another clock, as a multiple of that at which it takes this."""
        if clock == 1.0:
            return self
        times = self.clock_share / clock + (1 - self.clock_share)
        return replace(self, forward_ms=self.forward_ms * times, backward_ms=self.backward_ms * times)

    @property
    def late(self) -> int:
        """Bytes of activations that a backward keeps until its second half: all, if nothing is known."""
        return self.activation_bytes if self.late_bytes is None else min(self.late_bytes, self.activation_bytes)

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
        overhead_ms: the part of a step that is neither the pipeline nor the exchange: the vote, and all of the rest
            where ``exchange`` is None.
        memory_bytes: of one device for what ``UnitCost`` counts; None: no limit.
        exchange: of gradients and weights, by which layouts differ; None: not known.
        power: watts of a device; None: not known.
        clock_steps: that a device can have, ascending, as multiples of the clock at which units cost what is said.
        clocking: how a job chooses among these; None: it leaves clocks alone. No entry of a profile.
        slow: how many times as long as usual a grain takes at the same clock, of cells where that is not once, by
            leader. No entry of a profile.
    """

    units: tuple[UnitCost, ...]
    boundary_bytes: int = 0
    bandwidth: float = 10e9
    latency_ms: float = 0.01
    overhead_ms: float = 0.0
    memory_bytes: int | None = None
    exchange: Exchange | None = None
    power: PowerModel | None = None
    clock_steps: tuple[float, ...] = (1.0,)
    clocking: Clocking | None = None
    slow: Mapping[int, float] = field(default_factory=dict)

    def stage_ms(self, layout: Layout, stage: int) -> float:
        """Forward and backward of one grain through all units that are at home in a stage."""
        return sum(self.units[unit].grain_ms for unit in layout.at_home(stage))

    def times_as_long(self, units: Iterable[int], clock: float) -> float:
        """As at the base clock: what some units together take at another."""
        costs = [self.units[unit] for unit in units]
        base = sum(cost.grain_ms for cost in costs)
        return sum(cost.at(clock).grain_ms for cost in costs) / base if base else 1 / clock

    @property
    def boundary_ms(self) -> float:
        """Time of a grain's activation on its way between two stages."""
        return self.transfer_ms(self.boundary_bytes)

    def inlet_bytes(self, position: int) -> int:
        """A grain's input at a position of its way, all that is kept of it where that is recomputed. Tokens, at the
        beginning, count nothing.
        """
        return self.boundary_bytes if position else 0

    def transfer_ms(self, size: float) -> float:
        """Time of ``size`` bytes over one link."""
        return self.far.transfer_ms(size)

    @property
    def far(self) -> Link:
        """The link between hosts."""
        return Link(self.bandwidth, self.latency_ms)

    def host_of(self, layout: Layout, rank: int) -> int:
        """Index of the host that counts for a rank's links."""
        return layout.host_of(rank) if self.exchange is None else self.exchange.host_of(layout, rank)

    def phases(self, layout: Layout) -> dict[int, Phases]:
        """Of each rank of ``layout``, its part in the exchange of a step; empty if that is not known."""
        if self.exchange is None:
            return {}
        near, memory = self.exchange.near(self.far), self.exchange.memory_bandwidth
        parameters = [self.exchange.parameters(unit.parameter_bytes) for unit in self.units]
        found = {}
        for rank, traffic in self.exchange.traffic(layout, parameters).items():
            # The optimizer reads its state and writes it.
            state = sum(self.units[unit].optimizer_bytes / layout.num_slices for unit, _ in layout.owned(rank))
            update = 1e3 * 2 * state / memory if memory else 0.0
            found[rank] = Phases(traffic.gradients.ms(near, self.far), update + traffic.weights.ms(near, self.far))
        return found

    def cell_phases(self, layout: Layout) -> dict[int, Phases]:
        """The same of each cell, by leader: the longest of its ranks."""
        found = self.phases(layout)
        return {
            leader: Phases(max(found[rank].reduce_ms for rank in cell.ranks),
                           max(found[rank].spread_ms for rank in cell.ranks))
            for leader, cell in layout.cells.items() if found
        }  # fmt: skip

    # ---- profiles --------------------------------------------------------------------------

    @classmethod
    def from_json(cls, text: str | bytes, units: Sequence[str] | None = None) -> Costs:
        """Read a profile for the named units; None: for those that it has. An entry ``layer`` stands for all layers
        that have none of their own, and likewise with other kinds of units. What only emulation needs is passed over.
        Raises ProfileError.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ProfileError(f"the profile is not JSON: {error}") from None
        if not isinstance(data, dict) or not isinstance(data.get("units"), dict):
            raise ProfileError('the profile must be an object with an object "units"')
        entries = data.pop("units")
        units = tuple(entries) if units is None else units
        data.pop(EMULATION, None)
        known = {field.name for field in fields(cls)} - _OF_A_JOB
        if unknown := sorted({*data} - known):
            raise ProfileError(f"the profile has {unknown[0]!r}, which is none of {', '.join(sorted(known))}")
        if surplus := sorted(set(entries) - {*units, *(name.partition(".")[0] for name in units), "layer"}):
            raise ProfileError(f"the profile has unit {surplus[0]!r}, but the layout has {', '.join(units)}")
        costs = tuple(_unit(name, entries) for name in units)
        if costs and not any(cost.grain_ms for cost in costs):
            raise ProfileError("no unit of the profile takes any time, so that layouts cannot be compared: say what "
                               "layers take, as --elastic-profile measured does")
        exchange, power, steps = (data.pop(name, None) for name in ("exchange", "power", "clock_steps"))
        return cls(
            units=costs,
            exchange=None if exchange is None else _exchange(exchange),
            power=None if power is None else power_of(power),
            clock_steps=(1.0,) if steps is None else _steps(steps),
            **{key: _number(key, value) for key, value in data.items() if value is not None},
        )

    @classmethod
    def read(cls, path: Path, units: Sequence[str] | None = None) -> Costs:
        """The same of a file. Raises ProfileError, which names it."""
        with profile_of(path):
            return cls.from_json(path.read_text(encoding="utf-8"), units)

    def to_json(self, units: Sequence[str]) -> str:
        """The profile, one named unit a line; ``from_json`` reads it."""
        costs = zip(units, self.units, strict=True)
        rows = (f"    {json.dumps(name)}: {json.dumps(asdict(cost))}" for name, cost in costs)
        rest = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in self.entries().items()]
        return '{\n  "units": {\n' + ",\n".join(rows) + "\n  },\n" + ",\n".join(rest) + "\n}\n"

    def entries(self) -> dict[str, Any]:
        """What a profile says besides its units."""
        return {name: value for name, value in asdict(self).items() if name not in {"units", *_OF_A_JOB}}

    @classmethod
    def assumed(cls, units: Sequence[str], parameters: Mapping[str, int] | None = None) -> Costs:
        """Costs where nothing was measured, in proportion to the units' numbers of parameters.

        A million parameters take 1 ms forward and 2 ms backward; looking up embeddings takes nothing, and the head as
        much as its own weights or, if it has hardly any, the embedding's (then they are tied), once for each token
        that is predicted. Parameters, gradients and optimizer state are those of bf16 training. Units that
        ``parameters`` does not name are taken to have a million, heads a thousand, biases a hundred.
        """
        count = {unit: (parameters or {}).get(unit, _ASSUMED[unit.partition(".")[0]]) for unit in units}
        works = dict(count)
        for unit in units:
            if unit in ("embedding", "positions"):
                works[unit] = 0
            elif unit == "head":
                output = count["embedding"] if count[unit] < count["embedding"] // 2 else count[unit]
                works[unit] = output * (1 + sum(name.startswith(MTP) for name in units))
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
        """The pace of a layout, with its exchange."""
        pace = self.pace(
            [stage.units for stage in layout.stages],
            [stage.width for stage in layout.stages],
            [max(map(layout.load, stage.cells)) for stage in layout.stages],
        )
        longest = max((each.spread_ms + each.reduce_ms for each in self.phases(layout).values()), default=0.0)
        return replace(pace, step_ms=pace.step_ms + longest)

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


def live_activations(stages: int, stage: int, chunks: int = 1, split: bool = False) -> int:
    """Of a chunk each, which a cell keeps at a time at most; ``split``: with backwards in two. As ``pipeline.schedule``
    has them.
    """
    live = stages - stage if chunks == 1 else (chunks - 1) * stages + 2 * (stages - stage) - 1
    return live + stage if split else live


def own(stage_units: Sequence[Sequence[int]], stage: int) -> Sequence[int]:
    """Units of a stage without the tied embedding, which is at home in the first."""
    units = stage_units[stage]
    return units[1:] if stage and units[0] == 0 else units


def _unit(name: str, entries: Mapping[str, Any]) -> UnitCost:
    key = name if name in entries else name.partition(".")[0]
    entry = entries.get(key)
    names = [field.name for field in fields(UnitCost)]
    needed = [field.name for field in fields(UnitCost) if field.default is MISSING]
    if not isinstance(entry, dict):
        kind = "" if key == name else f" or {key!r}"
        raise ProfileError(f"the profile has no entry for unit {name!r}{kind}: it is of another model; add one with "
                           f"{', '.join(needed)}, or give a profile of this model, as --elastic-profile measured "
                           "writes it into a run directory")
    if not {*needed} <= {*entry} <= {*names}:
        raise ProfileError(f"unit {key!r} of the profile has {sorted(entry)}, but must have {', '.join(needed)}, and "
                           f"may have {', '.join(sorted({*names} - {*needed}))}")
    cost = UnitCost(**{field: _number(f"{key}: {field}", value) for field, value in entry.items()
                       if value is not None or field in needed})  # fmt: skip
    if cost.clock_share > 1:
        raise ProfileError(f"the profile has {cost.clock_share:g} for '{key}: clock_share', but a share is at most 1")
    return cost


def _exchange(entry: Any) -> Exchange:
    values = _numbers("exchange", entry, Exchange)
    for key, value in values.items():
        if not value and key != "near_latency_ms":
            raise ProfileError(f'"exchange" of the profile: {key} must be positive, got 0')
        if key == "ranks_per_host" and value != int(value):
            raise ProfileError(f'"exchange" of the profile: {key} must be a whole number, got {value:g}')
    return Exchange(**values)


def power_of(entry: Any) -> PowerModel:
    """The entry ``power`` of a profile. Raises ProfileError."""
    return PowerModel(**_numbers("power", entry, PowerModel))


def _numbers(name: str, entry: Any, kind: type[Exchange | PowerModel]) -> dict[str, Any]:
    """What an entry of the profile says of the fields of ``kind``; those whose default is None may be left out."""
    optional = {field.name: field.default is None for field in fields(kind)}
    if not isinstance(entry, dict) or set(entry) - set(optional):
        raise ProfileError(f'"{name}" of the profile must be an object of {", ".join(optional)}')
    if missing := [key for key, left_out in optional.items() if not left_out and key not in entry]:
        raise ProfileError(f'"{name}" of the profile has no {missing[0]!r}')
    return {key: _number(f"{name}: {key}", value) for key, value in entry.items() if value is not None}


def _steps(entry: Any) -> tuple[float, ...]:
    steps = tuple(sorted(_number("clock_steps", step) for step in entry)) if isinstance(entry, list) else ()
    if 1.0 not in steps or not steps[0]:
        raise ProfileError('"clock_steps" of the profile must be a list of positive numbers with 1 among them')
    return steps


def _number(key: str, value: Any) -> Any:
    if not is_amount(value):
        raise ProfileError(f"the profile has {value!r} for {key!r}, but it must be a number that is not negative")
    if key == "bandwidth" and not value:
        raise ProfileError("the profile has a bandwidth of 0: it must be positive, in bytes a second")
    return value
