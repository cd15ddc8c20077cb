"""Profile: what an emulated accelerator is like. The costs that planners read, and what only emulation needs.

One file is both: ``--elastic-profile`` reads the costs and passes over ``"emulation"``. All times are as they are to be
emulated: a model that would take a minute a step on real devices may be emulated in two seconds, with all its times
divided alike (``time_scale``). Nothing here imports torch or Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_elastic.config import MEASURED, UsageError
from megatron_elastic.layout import Layout
from megatron_elastic.plan.choice import SEARCH
from megatron_elastic.plan.costs import memory
from megatron_elastic.plan.costs.cost import EMULATION, Costs, ProfileError, power_of, profile_of
from megatron_elastic.plan.costs.fit import overflow
from megatron_elastic.plan.costs.power import PowerModel
from megatron_elastic.plan.costs.recomputation import recomputing

_FLAG = "--elastic-emulate"


class Emulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry ``"emulation"`` of a profile.

    Attributes:
        model, device: what the figures are of; for people.
        layers: of the model; None: not said.
        tokens, samples: of a grain, on all ranks of a cell together.
        time_scale: emulated seconds for a second of the real device.
        clocks: of ranks whose devices do not run at clock 1, by rank, when the job begins.
        noise: standard deviation of what an operation takes, as a share of that.
    """

    model: str
    device: str
    tokens: int
    samples: int
    time_scale: float
    layers: int | None = None
    clocks: dict[str, float] = {}
    noise: float = 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile that can be emulated. ``power``: of a device; ``text``: the whole file, as JSON."""

    emulation: Emulation
    power: PowerModel
    text: str

    @classmethod
    def parse(cls, text: str) -> Profile:
        """Read a profile. Raises ProfileError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ProfileError(f"the profile is not JSON: {error}") from None
        if not isinstance(data, dict) or EMULATION not in data:
            raise ProfileError(f'the profile has no "{EMULATION}": make one with megatron-elastic emulate')
        for entry in ("exchange", "power"):
            if data.get(entry) is None:
                raise ProfileError(f'the profile has no "{entry}": make one with megatron-elastic emulate')
        try:
            emulation = msgspec.convert(data[EMULATION], Emulation, strict=False)
        except msgspec.ValidationError as error:
            raise ProfileError(f'"{EMULATION}" of the profile: {error}') from None
        profile = cls(emulation, power_of(data["power"]), text)
        for name, value in profile._positive():
            if not value > 0:
                raise ProfileError(f'"{EMULATION}" of the profile: {name} must be positive, got {value:g}')
        if not 0 <= emulation.noise < 1:
            raise ProfileError(f'"{EMULATION}" of the profile: noise must be at least 0 and below 1, got '
                               f"{emulation.noise:g}")
        if any(not rank.isdecimal() for rank in emulation.clocks):
            raise ProfileError(f'"{EMULATION}" of the profile: clocks are by rank, got {sorted(emulation.clocks)}')
        return profile

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read the file of ``--elastic-emulate``. Raises UsageError."""
        try:
            with profile_of(path):
                return cls.parse(path.read_text(encoding="utf-8"))
        except ProfileError as error:
            raise UsageError(f"{_FLAG} {error}") from None

    def costs(self, units: Sequence[str]) -> Costs:
        """Of these units. Raises ProfileError if the profile is of another model."""
        return Costs.from_json(self.text, units)

    def fitting(self, layout: Layout, args: Any) -> Layout:
        """The first layout of a job with these flags, which ``layout`` is but for what has to be recomputed."""
        return recomputing(layout, self.costs(layout.units)) if args.elastic_schedule == SEARCH else layout

    def clocks(self) -> dict[int, float]:
        """By rank; 1 for who is not there."""
        return {int(rank): clock for rank, clock in self.emulation.clocks.items()}

    def _positive(self) -> list[tuple[str, float]]:
        e = self.emulation
        return [
            ("tokens", e.tokens), ("samples", e.samples), ("time_scale", e.time_scale),
            *((f"the clock of rank {rank}", clock) for rank, clock in e.clocks.items()),
        ]  # fmt: skip


def check(args: Any, world_size: int) -> None:
    """Raise UsageError unless a job with these flags (Megatron-LM's names and ``elastic_*``) can be emulated."""
    if args.elastic_emulate is None:
        return
    if not args.elastic:
        raise UsageError(f"{_FLAG} needs --elastic: add it")
    if args.elastic_profile == MEASURED:
        raise UsageError(f"--elastic-profile {MEASURED} would measure this machine's processors, not what is emulated: "
                         f"give it the file of {_FLAG}")
    for flag in ("overlap_grad_reduce", "overlap_param_gather"):
        if getattr(args, flag, False):
            raise UsageError(f"--{flag.replace('_', '-')} cannot be emulated: how much it hides is not known; leave it "
                             "out")
    profile = Profile.read(Path(args.elastic_emulate))
    if (layers := profile.emulation.layers) not in (None, args.num_layers):
        raise UsageError(f"{_FLAG} {args.elastic_emulate}: the profile is of a model of {layers} layers "
                         f"({profile.emulation.model}), and --num-layers is {args.num_layers}: give --num-layers "
                         f"{layers}, or the profile of another model")
    layout = memory.first_layout(args, world_size)
    try:
        costs = profile.costs(layout.units)
    except ProfileError as error:
        raise UsageError(f"{_FLAG} {args.elastic_emulate}: {error}") from None
    layout = profile.fitting(layout, args)
    problem = overflow(layout, layout.ranks, costs, args.elastic_schedule == "split")
    if problem is not None:
        raise UsageError(f"{_FLAG} {args.elastic_emulate}: {problem}")
