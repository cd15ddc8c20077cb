"""Tests of ``pipeline.meter`` and ``plan.costs.profile``: what units cost, measured."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.meter import Measured, Meter
from megatron_elastic.plan import Costs, Sample, measured
from megatron_elastic.plan.costs.cost import UnitCost
from tests.jobs import MODEL, Grid, Jobs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the meter's clock shows."""
    now = [0.0]
    monkeypatch.setattr("megatron_elastic.pipeline.meter.time.perf_counter", lambda: now[0])
    return now


def test_time_goes_to_the_unit_that_took_it(clock: list[float]) -> None:
    meter = Meter({})
    for _ in range(2):
        with meter.pipeline():
            with meter.forward():
                clock[0] += 1  # before the first unit: its input
                meter.enter("embedding")
                clock[0] += 2
                meter.enter("layer.0")
                with meter.waiting():
                    clock[0] += 50
                clock[0] += 4
            with meter.backward():
                clock[0] += 8
                meter.enter("layer.0")  # recomputed
                clock[0] += 8
                meter.leave("layer.0")
                clock[0] += 32
                meter.leave("embedding")
        clock[0] += 64
    read = meter.read()
    assert read is not None
    units, overhead = read
    assert units == {"embedding": Measured(3000, 32000, 0), "layer.0": Measured(4000, 16000, 0)}
    assert overhead == 64000
    assert meter.read() is None


def test_what_autograd_keeps_is_counted_once() -> None:
    weight = torch.nn.Parameter(torch.ones(16, 16))
    meter = Meter({"layer.0": weight})
    with meter.pipeline():
        for _ in range(3):
            with meter.forward():
                meter.enter("layer.0")
                hidden = torch.ones(4, 16, requires_grad=True) @ weight  # keeps its input
                meter.enter("layer.1")
                output = hidden.exp()  # keeps its output
            with meter.backward():
                output.sum().backward()
    read = meter.read()
    assert read is not None
    assert {unit: measured.activation_bytes for unit, measured in read[0].items()} == {"layer.0": 256, "layer.1": 256}


def test_parts_of_a_grain_count_as_such(clock: list[float]) -> None:
    meter = Meter({})
    with meter.pipeline():
        for grains, seconds in ((0.25, 1), (0.5, 2)):
            with meter.forward(grains):
                meter.enter("layer.0")
                output = torch.ones(4, 4, requires_grad=True).exp()  # 64 bytes
                clock[0] += seconds
            with meter.backward(grains):
                output.sum().backward()
                clock[0] += 2 * seconds
                meter.leave("layer.0")
    read = meter.read()
    assert read is not None
    assert read[0] == {"layer.0": Measured(4000, 8000, 256)}


def test_a_grain_that_comes_twice_is_one_grain(clock: list[float]) -> None:
    """Two chunks: each unit is told what it takes, and keeps, for a grain, whichever chunk it is in."""
    meter = Meter({}, chunks=2)
    with meter.pipeline():
        for chunk in (0, 0, 1, 1):  # two grains
            with meter.forward(chunk=chunk):
                meter.enter(f"layer.{chunk}")
                output = torch.ones(4, 4, requires_grad=True).exp()  # 64 bytes
                clock[0] += 1 + chunk
            with meter.backward():
                output.sum().backward()
                clock[0] += 3
                meter.leave(f"layer.{chunk}")
    read = meter.read()
    assert read is not None
    assert read[0] == {"layer.0": Measured(1000, 3000, 64), "layer.1": Measured(2000, 3000, 64)}
    assert (meter.busy, meter.grains) == (2 * (1 + 2 + 3 + 3), 2)


class Product(NamedTuple):
    """A gradient that is due."""

    weight: torch.Tensor
    tensors: list[torch.Tensor]

    def add(self) -> None:
        raise AssertionError

    def kept(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return self.weight, self.tensors


def test_what_waits_for_the_second_half_is_counted_once(clock: list[float]) -> None:
    """By whose weights' gradients it is for, nothing twice, no weights; nothing before all chunks have been seen."""
    weights = torch.ones(3, 16)
    meter = Meter({"layer.0": weights[0], "layer.1": torch.ones(16)}, chunks=2, halves=True)
    given, grad = torch.ones(8), torch.ones(4)
    late: list[dict[str, int | None]] = []
    for chunk in (0, 1, 0):
        with meter.pipeline():
            for each in (0, 1):
                with meter.forward(chunk=each):
                    meter.enter(f"layer.{each}")
                    clock[0] += 1
            with meter.backward(2.0):
                meter.enter("layer.0")
                assert meter.asks_for_halves(chunk) == (len(late) < 2)
            products = [Product(weights[1], [given, grad]), Product(weights[2], [given[:4], weights])]
            meter.keep(0.5, chunk, products)
        read = meter.read()
        late.append({} if read is None else {unit: each.late_bytes for unit, each in read[0].items()})
    assert late == [{"layer.0": None, "layer.1": None}] + 2 * [{"layer.0": 2 * 4 * (8 + 4), "layer.1": 0}]
    assert not Meter({}).asks_for_halves(0)


def test_costs_are_medians_and_layers_are_alike() -> None:
    units, stages = gpt_units(2, 2, tied=False, positions=False)
    layout = Layout.grid(tp=1, pp=2, dp=1, stage_units=stages, units=units, num_grains=4, num_slices=1, replicas=0)
    assert layout.units == ("embedding", "layer.0", "layer.1", "head")
    layer = UnitCost(2.0, 4.0, 100, 300, 10)
    first = Sample({0: UnitCost(1.0, 1.0, 50, 150, 5), 1: layer}, 1000, 0.5, 30.0)
    last = Sample({2: replace(layer, forward_ms=4.0), 3: UnitCost(6.0, 9.0, 7, 8, 9)}, 1000, None, 12.0)
    assert measured(layout, [first]) is None
    costs = measured(layout, [first, last])
    assert costs is not None
    layer = replace(layer, forward_ms=3.0)
    assert costs.units == (first.units[0], layer, layer, last.units[3])
    assert [(replace(layer, late_bytes=size).late, layer.late) for size in (0, 7, 30)] == [(0, 10), (7, 10), (10, 10)]
    assert (costs.overhead_ms, costs.boundary_ms) == (12.0, 0.5)


def test_a_job_writes_what_it_measured(jobs: Jobs) -> None:
    grid = Grid(tp=1, pp=2, steps=21, ranks=4)
    job = jobs.run(*grid.flags, *MODEL.split(), "--elastic-profile", "measured", ranks=4)
    reference = jobs.undisturbed(*grid.flags, *MODEL.split(), ranks=4)
    assert [m["loss_hex"] for m in job.metrics().values()] == [m["loss_hex"] for m in reference.metrics().values()]
    costs = Costs.from_json((job.run_dir / "profile.json").read_text(), job.layouts()[0].units)
    assert all(cost.forward_ms > 0 and cost.backward_ms > 0 for cost in costs.units if cost.activation_bytes)
    layers = [cost for name, cost in zip(job.layouts()[0].units, costs.units, strict=True) if name.startswith("layer.")]
    for one, other in itertools.pairwise(layers):
        assert one == other
    assert costs.boundary_bytes == 32 * 32 * 4
    assert 0 < costs.boundary_ms < 1000 and costs.overhead_ms > 0
