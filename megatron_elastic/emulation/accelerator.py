"""Accelerator: one rank's emulated device, by its own timeline.

A unit begins when the device is free and its input is there, and ends as much later as the profile says; until then
the rank sleeps. Both are times by the device's account, not by when this process got a processor, so a rank that comes
late to an operation makes up for that in the next ones, as far as its device would have been busy. All ranks of a
machine have one clock (``time.monotonic``), which emulation needs.
"""

from __future__ import annotations

import json
import random
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_elastic.comm.transport import Transport
from megatron_elastic.emulation.clocks import Clocks
from megatron_elastic.emulation.forecast import Times
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import append, open_lines
from megatron_elastic.pipeline.program import Op
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.exchange import Phases
from megatron_elastic.plan.costs.fit import device_bytes
from megatron_elastic.state.copying import Rate

_NAP = 0.05
"""Seconds that a sleep goes on at most where an interrupt is there and has to wait."""
FOLDER = "emulated"
"""In a run's directory: ``RANK.jsonl``, one line for each step that the rank has done."""


class OutOfMemory(RuntimeError):
    """The device has not as much memory as a rank wants. The message says what takes how much."""


class Accelerator:
    """A rank's device, whatever the layout.

    Args:
        transport: the rank's; an interrupt ends a sleep as it ends a wait.
        run_dir: where it writes what each step took.
        slowness: how many times as long computing takes now, by an injection.
    """

    def __init__(
        self, profile: Profile, transport: Transport, run_dir: Path, slowness: Callable[[], float] = lambda: 1.0
    ) -> None:
        self.profile = profile
        self._slowness = slowness
        self._noise = random.Random(transport.rank)
        self._transport = transport
        self._rank = transport.rank
        self._record = run_dir / FOLDER / f"{self._rank}.jsonl"
        self._unwritten = False
        self._clocks = Clocks(run_dir, profile.clocks())
        self._clock = 1.0
        self._layout: Layout | None = None
        self._costs: Costs
        self._times: Times
        self._phases: Phases
        self._fixed = 0.0
        """Bytes that units and slices take."""
        self._kept: dict[tuple[int, int], tuple[float, float]] = {}
        """From the forward to the backward of a grain and chunk: which fraction of the grain it is, and bytes."""
        self._inlets: tuple[float, ...] = ()
        """[chunk] = bytes of a grain's input."""
        self._step: int | None = None
        """In progress, until it is noted."""
        self._free_at = 0.0
        """Until when the device has something to do, by ``time.monotonic``."""
        self._there_at = 0.0
        """When all was there that the next operation needs."""
        self._since = time.monotonic()
        self._busy, self._joules, self._late = 0.0, 0.0, 0.0
        """Of the step in progress: seconds that it computes, joules for that, and seconds that the process was behind
        its device when the passes were over.
        """

    # ---- what it is to do --------------------------------------------------------------------

    def enter(self, layout: Layout) -> None:
        """Do this rank's part in ``layout`` from now on. Raises OutOfMemory if it does not fit."""
        costs = self.profile.costs(layout.units)
        self._layout, self._costs = layout, costs
        self._fixed = device_bytes(layout, self._rank, costs)
        if costs.memory_bytes is not None and self._fixed > costs.memory_bytes:
            raise OutOfMemory(
                f"the emulated device of rank {self._rank} has {costs.memory_bytes / 1e9:.1f} GB, but its units and "
                f"slices of epoch {layout.epoch} take {self._fixed / 1e9:.1f} GB: use more stages, more ranks or a "
                "smaller model"
            )
        stage = layout.stage_of(self._rank)
        self._times = Times.of(layout, stage, costs, self._clock)
        self._inlets = tuple(
            float(costs.inlet_bytes(number)) for number, position in enumerate(layout.way) if position.stage == stage
        )
        self._phases = costs.phases(layout)[self._rank]

    # ---- the passes of a step ----------------------------------------------------------------

    def begin(self, step: int | None, live: Mapping[tuple[int, int], bool]) -> None:
        """Operations begin: those of a step, or of none. ``live`` grains and chunks are between forward and backward
        already, with all that a forward keeps or with the input alone.
        """
        assert self._layout is not None
        self._step, self._free_at, self._there_at = step, time.monotonic(), 0.0
        # Ranks of a cell compute together, at the speed of the slowest.
        clock = self._clocks.slowest(self._layout.cell_of(self._rank).ranks)
        if clock != self._clock:
            self._clock = clock
            self._times = Times.of(self._layout, self._layout.stage_of(self._rank), self._costs, clock)
        self._kept = {
            (grain, chunk): (fraction, size if live[grain, chunk] else min(size, self._inlets[chunk] * fraction))
            for (grain, chunk), (fraction, size) in self._kept.items()
            if (grain, chunk) in live
        }

    def arrival(self, fraction: float) -> float:
        """When what it has made last is at another stage: the activation of a fraction of a grain."""
        return self._free_at + self._costs.transfer_ms(self._costs.boundary_bytes * fraction) / 1e3

    def needs(self, at: float) -> None:
        """Something that the next operation needs is there at this time."""
        self._there_at = max(self._there_at, at)

    def keep(self, op: Op, fraction: float, whole: bool = True) -> None:
        """A forward begins, of which all is kept that its backward needs, or its input alone. Raises OutOfMemory if
        there is no room for that.
        """
        assert self._layout is not None
        units = self._layout.chunks(self._layout.stage_of(self._rank))[op.chunk]
        size = sum(self._costs.units[unit].activation_bytes for unit in units) * fraction
        if not whole:
            size = min(size, self._inlets[op.chunk] * fraction)
        others = (size for item, (_, size) in self._kept.items() if item != (op.grain, op.chunk))
        limit, kept = self._costs.memory_bytes, sum(others)
        if limit is not None and self._fixed + kept + size > limit:
            raise OutOfMemory(
                f"the emulated device of rank {self._rank} has {limit / 1e9:.1f} GB: units and slices take "
                f"{self._fixed / 1e9:.1f} GB, activations of {len(self._kept)} others {kept / 1e9:.1f} GB, and the "
                f"forward of grain {op.grain} wants {size / 1e9:.1f} GB: use more stages, or smaller micro-batches"
            )
        self._kept[op.grain, op.chunk] = fraction, size

    def keep_late(self, op: Op, fraction: float) -> None:
        """The first half of a backward is over, and what the second needs is kept."""
        assert self._layout is not None
        units = self._layout.chunks(self._layout.stage_of(self._rank))[op.chunk]
        self._kept[op.grain, op.chunk] = fraction, sum(self._costs.units[unit].late for unit in units) * fraction

    def let_go(self, op: Op) -> None:
        """A whole backward is over."""
        self._kept.pop((op.grain, op.chunk), None)

    def compute(self, op: Op, fraction: float | None = None) -> None:
        """Return when an operation on a fraction of a grain is done: by default that of the forward."""
        if fraction is None:
            fraction, _ = self._kept.get((op.grain, op.chunk), (1.0, 0.0))
        seconds = self._times.ms(op) * fraction / 1e3 * self._slowness()
        if self.profile.emulation.noise:
            seconds *= max(0.0, self._noise.gauss(1.0, self.profile.emulation.noise))
        self._free_at = max(self._free_at, self._there_at) + seconds
        self._there_at = 0.0
        self._busy += seconds
        self._joules += self.profile.power.joules(seconds * 1e3, 0.0, self._clock)
        self.sleep()

    def end(self) -> None:
        """All operations of the step are done."""
        self._late += max(0.0, time.monotonic() - self._free_at)

    # ---- the rest of a step ------------------------------------------------------------------

    def reduced(self) -> None:
        """Gradients are where they are to be; return when they would be."""
        self._free_at += self._phases.reduce_ms / 1e3
        self.sleep()

    def updating(self) -> None:
        """The vote is over: the update begins, and weights go where they are wanted."""
        self._free_at = time.monotonic()

    def spread(self) -> None:
        """They are there; return when they would be. If a step was in progress, it is noted."""
        self._free_at += self._phases.spread_ms / 1e3
        self.sleep()
        if self._step is None:
            return
        now, power = time.monotonic(), self.profile.power
        joules = self._joules + power.joules(0.0, max(0.0, now - self._since - self._busy) * 1e3, self._clock)
        line = {
            "step": self._step, "time": time.time(), "ms": round((now - self._since) * 1e3, 3),
            "busy_ms": round(self._busy * 1e3, 3), "late_ms": round(self._late * 1e3, 3), "clock": self._clock,
            "joules": round(joules / self.profile.emulation.time_scale, 6),
        }  # fmt: skip
        self._note(json.dumps(line) + "\n")
        self._step, self._since, self._busy, self._joules, self._late = None, now, 0.0, 0.0, 0.0

    def _note(self, line: str) -> None:
        """Write a line. A disk that takes nothing loses it, and is named once."""
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            with open_lines(self._record) as file:
                append(file, line.encode())
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                print(f"rank {self._rank}: cannot write {self._record}: {error.strerror}", flush=True)
            self._unwritten = True

    def copying_rate(self, layout: Layout, real: Callable[[int], int]) -> Rate:
        """At which slices of units, whose optimizer state is of ``real`` bytes, are to be copied to take as long as
        those of the emulated model between hosts. Units are not in proportion to each other: an embedding is that of
        many layers here.
        """
        costs = self.profile.costs(layout.units)
        return lambda unit: costs.bandwidth * real(unit) / max(1, costs.units[unit].optimizer_bytes)

    # ---- sleeping ----------------------------------------------------------------------------

    def sleep(self) -> None:
        """Until the device is free. Raises what a wait would when there is an interrupt, unless that has to wait."""
        interrupt = self._transport.interrupt
        waiter = select.poll()
        if interrupt.fd >= 0:
            waiter.register(interrupt.fd, select.POLLIN)
        while (left := self._free_at - time.monotonic()) > 0:
            self._transport.look()
            if interrupt.raised:
                time.sleep(min(left, _NAP))  # it would wake at once
            else:
                waiter.poll(left * 1e3)
