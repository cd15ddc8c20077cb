"""Emulated accelerators: profiles, what a step is to take by them, and the timeline of a device."""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from common import JobFailed
from emulated import ablation, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.cluster.rank.control import Interrupted, InterruptFlag
from megatron_elastic.config import UsageError, add_elastic_arguments
from megatron_elastic.emulation import accelerator as module
from megatron_elastic.emulation.accelerator import Accelerator, OutOfMemory
from megatron_elastic.emulation.accelerators import ACCELERATORS
from megatron_elastic.emulation.clocks import Clocks
from megatron_elastic.emulation.command import grid, main
from megatron_elastic.emulation.derive import Batch, Grid, derive, layout_of, scaled
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.emulation.profile import Emulation, Profile, check
from megatron_elastic.faults.hooks import Hooks
from megatron_elastic.faults.injection import Injection
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.program import Op
from megatron_elastic.pipeline.simulate import Step, fastest, scheduled
from megatron_elastic.plan import choice, everything, lose
from megatron_elastic.plan.costs.cost import Costs, ProfileError
from megatron_elastic.plan.costs.fit import overflow
from tests.tiers.examples import examples

EMULATION = Emulation(
    model="tiny", device="none", tokens=32, samples=1, time_scale=1.0,
)  # fmt: skip


def profile_of(
    *, layer_ms: float = 10.0, head_ms: float = 0.0, latency_ms: float = 0.0, memory: int | None = None,
    overhead_ms: float = 0.0, boundary: int = 0, positions: bool = False, ranks_per_host: int | None = None,
    **emulation: Any,
) -> Profile:
    """Layers of a million parameters that take ``layer_ms`` forward and twice that backward."""
    def unit(ms: float, parameters: int) -> dict[str, float]:
        return {"forward_ms": ms, "backward_ms": 2 * ms, "parameter_bytes": 6 * parameters,
                "optimizer_bytes": 12 * parameters, "activation_bytes": 1000 * bool(ms)}

    units = {"embedding": unit(0, 0), "layer": unit(layer_ms, 1_000_000), "head": unit(head_ms, 0)}
    if positions:
        units["positions"] = unit(0, 0)
    return Profile.parse(json.dumps({
        "units": units, "boundary_bytes": boundary, "bandwidth": 1e9, "latency_ms": latency_ms,
        "overhead_ms": overhead_ms, "memory_bytes": memory,
        "exchange": {"sum_bytes": 4, "gradient_bytes": 4, "weight_bytes": 2, "near_bandwidth": 1e9,
                     "near_latency_ms": 0.0, "memory_bandwidth": 1e12, "ranks_per_host": ranks_per_host},
        "power": {"idle_w": 10, "static_w": 20, "dynamic_w": 80}, "clock_steps": [0.5, 0.75, 1.0, 1.25],
        "emulation": msgspec.to_builtins(msgspec.structs.replace(EMULATION, **emulation)),
    }))  # fmt: skip


def layout(pp: int = 2, dp: int = 2, grains: int = 8, layers: int = 4, **others: Any) -> Layout:
    units, stages = gpt_units(layers, pp, tied=False, positions=False)
    values = {"tp": 1, "num_slices": dp, "replicas": 0} | others
    return Layout.grid(pp=pp, dp=dp, stage_units=stages, units=units, num_grains=grains, **values)


# ---- profiles ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "total", "active"), [
    ("llama2-7b", 6.74e9, 6.74e9), ("llama2-13b", 13.02e9, 13.02e9), ("llama2-34b", 33.74e9, 33.74e9),
    ("flextrain-small", 7e9, 1e9), ("flextrain-medium", 60e9, 6e9), ("flextrain-large", 600e9, 30e9),
])  # fmt: skip
def test_models_have_their_sizes(name: str, total: float, active: float) -> None:
    within = 0.001 if name.startswith("llama") else 0.15  # FlexTrain's are published to one digit
    assert MODELS[name].parameters == pytest.approx(total, rel=within)
    assert MODELS[name].active == pytest.approx(active, rel=within)


def test_a_derived_profile_counts_operations() -> None:
    shape, figures = MODELS["llama2-7b"], ACCELERATORS["a100"]
    size, batch = Grid(tp=1, pp=4, dp=2), Batch(samples=1, sequence=4096, grains=16)
    profile = derive("llama2-7b", shape, "a100", figures, size, batch, efficiency=0.5, time_scale=1.0, step_seconds=1.0)
    found = layout_of(shape, size, batch)
    costs = profile.costs(found.units)
    operations = 6 * (shape.parameters - shape.table) * 4096  # looking up embeddings takes nothing
    attention = 6 * 4096 * shape.hidden * 4096 * shape.layers
    total = sum(cost.grain_ms for cost in costs.units)
    assert total == pytest.approx(1e3 * (operations + attention) / (312e12 * 0.5), rel=1e-6)
    assert sum(cost.parameter_bytes for cost in costs.units) == pytest.approx(6 * shape.parameters, rel=1e-3)
    assert costs.boundary_bytes == 4096 * 4096 * 2
    step = forecast(found, profile, "1f1b")
    assert Step.of(scheduled("1f1b", found), found, costs).ms == pytest.approx(step.step_ms)
    assert step.step_ms > step.pipeline_ms
    half = scaled(profile, found, 0.5)
    assert forecast(found, half, "1f1b").step_ms == pytest.approx(step.step_ms / 2)
    assert forecast(found, half, "1f1b").joules == pytest.approx(step.joules)


def test_the_command_prints_what_both_flags_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "llama2-13b", "--layout", "tp1,pp4,dp4", "--step-seconds", "2"]) == 0
    profile = Profile.parse(capsys.readouterr().out)
    found = layout_of(MODELS["llama2-13b"], Grid(tp=1, pp=4, dp=4), Batch(1, 4096, 32))
    assert forecast(found, profile, "1f1b").step_ms == pytest.approx(2000, rel=1e-4)
    assert profile.emulation.layers == 40
    costs = Costs.from_json(profile.text, found.units)
    assert costs.memory_bytes == 80e9
    assert choice.step(found, costs, ["1f1b"]) == pytest.approx(2000, rel=1e-4)


@pytest.mark.parametrize(("flags", "message"), [
    (["--model", "llama2-34b", "--layout", "tp1,pp4,dp4"], "GB of activations, but has 80.0 GB"),
    (["--model", "llama2-7b", "--layout", "tp1,pp33,dp1"], "pp33: llama2-7b has 32 layers"),
    (["--model", "llama2-7b", "--layout", "tp1,pp2,dp1,ep2"], "llama2-7b has no experts"),
    (["--model", "llama2-7b", "--layout", "tp3,pp1,dp1"], "tp3: llama2-7b has 32 heads, which cannot be shared out"),
    (["--model", "llama2-7b", "--layout", "tp1,pp1,dp1,cp3"], "cp3: llama2-7b has 4096 tokens in a sample, which cann"),
    (["--model", "flextrain-small", "--layout", "tp1,pp1,dp1,ep3"], "ep3: flextrain-small has 64 experts, which cann"),
    (["--model", "llama2-7b", "--efficiency", "0"], "--efficiency must be above 0"),
    (["--model", "llama2-7b", "--step-seconds", "-1"], "--step-seconds must be above 0"),
    (["--model", "llama2-7b", "--step-seconds", "inf"], "--step-seconds must be above 0 and finite, got inf"),
    (["--model", "llama2-7b", "--time-scale", "inf"], "--time-scale must be above 0 and finite, got inf"),
    (["--model", "llama2-7b", "--time-scale", "1e-300"], "llama2-7b on a100: the profile has inf"),
])  # fmt: skip
def test_the_command_refuses(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert message in capsys.readouterr().err


def test_parallel_sizes_are_read() -> None:
    assert grid("tp2,pp8,dp12") == Grid(2, 8, 12)
    assert grid("tp1,pp4,dp1,cp8,ep8").ranks == 32
    for text in ("tp1,pp4", "tp1,pp4,dp0", "tp1 pp4 dp4", "tp1,pp4,dp4,xp2"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not like tp1,pp4,dp4"):
            grid(text)


@pytest.mark.parametrize(("change", "message"), [
    ({}, 'has no "emulation"'),
    ({"tokens": 0}, "tokens must be positive, got 0"),
    ({"time_scale": "fast"}, "Expected `float`"),
    ({"colour": 1}, "unknown field `colour`"),
    ({"clocks": {"3": -1}}, "the clock of rank 3 must be positive"),
    ({"clocks": {"all": 1}}, "clocks are by rank"),
])  # fmt: skip
def test_a_bad_profile_is_named(change: dict[str, Any], message: str) -> None:
    data = json.loads(profile_of().text)
    if change:
        data["emulation"] |= change
    else:
        del data["emulation"]
    with pytest.raises(ProfileError) as raised:
        Profile.parse(json.dumps(data))
    assert message in str(raised.value)


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--elastic-emulate .*missing.json: No such file"):
        Profile.read(tmp_path / "missing.json")


def test_a_model_of_another_depth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_of(layers=40).text)
    args = argparse.Namespace(elastic=True, elastic_emulate=path, elastic_profile=None, num_layers=20)
    with pytest.raises(UsageError, match=r"is of a model of 40 layers \(tiny\), and --num-layers is 20: give --num-"):
        check(args, 4)


def test_what_does_not_fit_is_said() -> None:
    found, costs = layout(), profile_of(memory=30_000_000).costs(layout().units)
    assert overflow(found, found.ranks, costs) is None  # 12 MB of weights and gradients, 12 MB of optimizer state
    smaller = replace(costs, memory_bytes=24_002_000)
    problem = overflow(found, found.ranks, smaller)
    assert problem is not None and "rank 0" in problem and "activations" in problem
    assert overflow(found, (2, 3), smaller) is None, "the last stage keeps one grain's activations, the first two"


# ---- forecasts -----------------------------------------------------------------------------------


@settings(max_examples=examples(1000), deadline=None)
@given(
    pp=st.integers(1, 4), dp=st.integers(1, 3), more=st.integers(1, 3), ms=st.floats(0.5, 20),
    latency=st.floats(0, 2), replicas=st.integers(0, 1), split=st.booleans(),
)
def test_a_forecast_is_the_simulated_step(
    pp: int, dp: int, more: int, ms: float, latency: float, replicas: int, split: bool
) -> None:
    found = layout(pp, dp, grains=more * pp * dp, layers=2 * pp, replicas=min(replicas, dp - 1))
    profile = profile_of(layer_ms=ms, latency_ms=latency, boundary=1000)
    costs = profile.costs(found.units)
    step = forecast(found, profile, "split" if split else "1f1b")
    if not split:
        assert step.pipeline_ms == pytest.approx(fastest(found, costs)[1].makespan)
    each = costs.phases(found).values()
    longest = max(one.reduce_ms for one in each), max(one.spread_ms for one in each)
    # Where all stages have as much to do, nothing of it is hidden.
    assert step.pipeline_ms <= step.step_ms <= step.pipeline_ms + sum(longest) + 1e-9
    work = sum(cost.grain_ms for cost in costs.units) * found.num_grains / pp / dp
    assert step.pipeline_ms >= work * (1 - 1e-9)
    slow = forecast(found, profile, "split" if split else "1f1b", dict.fromkeys(found.ranks, 0.5))
    assert slow.pipeline_ms >= 2 * work * (1 - 1e-9)


def test_traffic_is_what_the_runtime_sends() -> None:
    """Two cells, which own a slice each of the two layers of their stage, and copy each other's."""
    found = layout(pp=1, dp=2, layers=2, replicas=1)
    profile = profile_of()
    here = profile.costs(found.units).phases(found)[0]
    # Out: gradients of the other's slices, and means of the own ones: 2 x 2 x half a million x 4 bytes, at 1 GB/s.
    assert here.reduce_ms == pytest.approx(8.0)
    # Weights of the own slices; before that 12 MB of state are read and written at 1 TB/s.
    assert here.spread_ms == pytest.approx(2.0 + 0.024)
    apart = profile_of(ranks_per_host=1, latency_ms=3.0)
    assert apart.costs(found.units).phases(found)[0].reduce_ms == pytest.approx(11.0)


def test_a_forecast_after_a_loss() -> None:
    """Of four grains in each of two cells, one has eight."""
    found = layout(pp=1, dp=2, layers=1, grains=8)
    profile = profile_of()
    after = lose(found, [1], everything(found).without([1]), 1)
    before = forecast(found, profile, "1f1b")
    assert before.pipeline_ms == pytest.approx(4 * 30)
    assert forecast(after, profile, "1f1b").pipeline_ms == pytest.approx(8 * 30)
    busy, idle = 2 * 0.120, 2 * (before.step_ms / 1e3 - 0.120)
    assert before.joules == pytest.approx(busy * 100 + idle * 10)


# ---- what is lost in a benchmark --------------------------------------------------------------------


def test_cases_leave_a_cell_in_each_stage() -> None:
    found = list(cases.cases(layout(pp=4, dp=4, grains=32), [1, 2, 3, 4], ("same", "different")))
    assert [(case.lost, case.where, case.ranks) for case in found] == [
        (1, "same", (4,)), (2, "same", (4, 5)), (2, "different", (4, 9)), (3, "same", (4, 5, 6)),
        (3, "different", (4, 9, 14)), (4, "different", (4, 9, 14, 3)),
    ]  # fmt: skip
    assert found[1].limit_share(layout(pp=4, dp=4, grains=32)) == 14 / 16
    many = layout(pp=8, dp=12, grains=96, layers=8)
    (twelve,) = cases.cases(many, [12], ("different",))
    assert len({many.cell_of(rank).leader for rank in twelve.ranks}) == 12
    assert len({many.stage_of(rank) for rank in twelve.ranks}) == 8
    for where in (("same",), ("different",), ("same", "different")):
        for counts in ([1], [4], [2, 12], [1, 3, 11, 12]):
            lost = [Counter(many.stage_of(rank) for rank in case.ranks) for case in cases.cases(many, counts, where)]
            most = max((max(each.values()) for each in lost), default=0)
            assert cases.most_of_a_stage(8, 12, counts, where) == most, (counts, where)


def test_an_ablation_adds_one_axis_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = layout(pp=4, dp=4, grains=32)
    case = cases.Case(2, "same", (4, 5))
    seen = []

    def measure(run_dir: Path, options: Any, profile: Path, layout: Layout, variant: Any, case: Any) -> Any:
        flags = [*variant.flags, "--elastic-schedule", variant.schedule, "--elastic-policy", variant.policy]
        seen.append(tuple(add_elastic_arguments(argparse.ArgumentParser()).parse_args(flags).__dict__.values()))
        if len(seen) == 3:
            raise JobFailed("out of memory")
        # With clocks all are faster before the loss, too, and a searched order is not there yet: that is not what they
        # are held against.
        undisturbed = 200.0 if {"performance", "search"} & set(flags) else 100.0
        return {"tokens_per_s": 70.0, "undisturbed_tokens_per_s": undisturbed, "predicted_share": 1.0, "pause_s": 1.0,
                "seconds_until": 2.0, "joules_per_token": 0.1, "forecast_step_ms": 500.0}

    monkeypatch.setattr(ablation, "measure", measure)
    (profile := tmp_path / "profile.json").write_text(profile_of().text)
    result = ablation.ablate(tmp_path, argparse.Namespace(schedule="1f1b"), profile, found, [case])
    assert len(set(seen)) == len(seen) == len(ablation.VARIANTS)
    assert "+ graph" not in result[0]["variants"]
    assert {each["share_of_limit"] for each in result[0]["variants"].values()} == {0.8}
    assert len(ablation.table(result).splitlines()) == 2 + len(seen) - 1


# ---- the device at run time ----------------------------------------------------------------------


class Clock:
    """In place of ``time`` and ``select``: sleeping is what makes time go by, and how far a process lags behind."""

    POLLIN = 1

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def poll(self, ms: float | None = None) -> Any:
        return self if ms is None else self.sleep(ms / 1e3)

    def register(self, fd: int, events: int) -> None:
        raise AssertionError("there is no interrupt")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(module, "select", fake)
    return fake


def device(profile: Profile, run_dir: Path, rank: int = 0, flag: Any = None) -> Accelerator:
    interrupt = flag or SimpleNamespace(fd=-1, raised=False, check=lambda: None)
    return Accelerator(profile, SimpleNamespace(rank=rank, interrupt=interrupt, look=interrupt.check), run_dir)  # type: ignore[arg-type]


def test_a_late_process_makes_up_for_it(clock: Clock, tmp_path: Path) -> None:
    one = device(profile_of(layer_ms=500.0, boundary=100_000_000), tmp_path)
    one.enter(layout())  # two layers a stage: a forward takes a second, a backward two
    one.begin(1, {})
    for grain in (0, 1):
        one.keep(Op("forward", grain), 1.0)
    clock.now += 0.25  # what it really computes
    one.compute(Op("forward", 0), 1.0)
    assert clock.now == pytest.approx(101)
    assert one.arrival(1.0) == pytest.approx(101.1)
    clock.now += 1.75  # no processor
    one.compute(Op("forward", 1), 1.0)
    assert clock.now == pytest.approx(102.75), "the device was done at 102 already"
    one.compute(Op("backward", 0), 1.0)
    assert clock.now == pytest.approx(104), "it had the time from 102 on"
    one.needs(109.0)
    clock.now = 109.5
    one.compute(Op("backward_input", 1), 0.5)
    assert clock.now == pytest.approx(109.5), "the input came at 109, and half of a grain takes half a second"
    one.compute(Op("backward_weight", 1))
    assert clock.now == pytest.approx(110.5), "of the whole grain, as the forward was"


def test_who_is_slowed_computes_longer(clock: Clock, tmp_path: Path) -> None:
    """By an injection, until another one says otherwise; and by noise, the same for a rank each time."""
    slow, well = (Injection.parse(f"slow:rank=0,step={step},at=forward,factor={factor}") for step, factor in
                  ((1, 3), (2, 1)))  # fmt: skip
    hooks = Hooks(0, [slow, well], lambda _: None, lambda _: None)
    free = SimpleNamespace(fd=-1, raised=False, check=lambda: None)
    ends = []
    for noise in (0.0, 0.05, 0.05):
        transport = SimpleNamespace(rank=0, interrupt=free, look=free.check)
        one = Accelerator(profile_of(layer_ms=500.0, noise=noise), transport, tmp_path,  # type: ignore[arg-type]
                          lambda: hooks.slowness)  # fmt: skip
        one.enter(layout())
        one.begin(None, {})
        begun = clock.now
        one.compute(Op("forward", 0), 1.0)
        ends.append(clock.now - begun)
    assert ends[0] == pytest.approx(1.0)
    assert ends[1] != ends[0] and ends[1] == pytest.approx(ends[2])
    for hooks.step, factor in ((1, 3.0), (2, 1.0)):
        hooks.at("forward", 0)
        assert hooks.slowness == factor
        begun = clock.now
        one.compute(Op("forward", 0), 1.0)
        assert clock.now - begun == pytest.approx(factor, rel=0.25)


def test_clocks_are_those_of_the_slowest_of_a_cell(clock: Clock, tmp_path: Path) -> None:
    one = device(profile_of(layer_ms=500.0, clocks={"1": 0.5}), tmp_path)
    one.enter(layout(pp=1, dp=2, layers=1, tp=2))
    one.begin(1, {})
    one.compute(Op("forward", 0), 1.0)
    assert clock.now == pytest.approx(101)
    elsewhere = Clocks(tmp_path, {})
    elsewhere.set_clock(1, 2.0)
    elsewhere.set_clock(0, 1.25)
    one.compute(Op("forward", 1), 1.0)
    assert clock.now == pytest.approx(102), "it changes between two steps"
    one.begin(2, {})
    one.compute(Op("forward", 0), 1.0)
    assert clock.now == pytest.approx(102.4)
    with pytest.raises(ValueError, match="clock of rank 1 must be positive, got 0"):
        elsewhere.set_clock(1, 0.0)


def test_a_step_is_noted(clock: Clock, tmp_path: Path) -> None:
    one = device(profile_of(layer_ms=500.0, time_scale=0.5), tmp_path)
    found = layout(pp=1, dp=2, layers=2, replicas=1)
    one.enter(found)
    one.begin(7, {})
    one.compute(Op("forward", 0), 1.0)
    one.end()
    one.reduced()
    assert clock.now == pytest.approx(101.008)
    clock.now = 102.0  # the vote is over
    one.updating()
    clock.now = 102.001
    one.spread()
    one.spread()  # of no step: nothing to note
    (line,) = map(json.loads, (tmp_path / "emulated" / "0.jsonl").read_text().splitlines())
    assert line["step"] == 7 and line["busy_ms"] == 1000 and line["late_ms"] == 0
    assert line["ms"] == pytest.approx(2002.024)
    assert line["joules"] == pytest.approx((1.0 * 100 + 1.002024 * 10) / 0.5, rel=1e-5)


def test_a_disk_that_takes_nothing_costs_the_notes_alone(
    clock: Clock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "emulated").write_text("in the way")
    one = device(profile_of(layer_ms=500.0), tmp_path)
    one.enter(layout(pp=1, dp=2, layers=2, replicas=1))
    for step in (7, 8):
        one.begin(step, {})
        one.end()
        one.updating()
        one.spread()
    assert capsys.readouterr().out.count("rank 0: cannot write") == 1
    (tmp_path / "emulated").unlink()
    one.begin(9, {})
    one.end()
    one.updating()
    one.spread()
    (line,) = map(json.loads, (tmp_path / "emulated" / "0.jsonl").read_text().splitlines())
    assert line["step"] == 9


def test_copies_of_each_unit_take_as_long_as_on_the_devices(tmp_path: Path) -> None:
    """Whatever they are of here, where an embedding may be as large as many layers."""
    said = json.loads(profile_of().text)
    for name, size in {"embedding": 6_000_000, "layer": 12_000_000, "head": 6_000_000}.items():
        said["units"][name]["optimizer_bytes"] = size
    profile = Profile.parse(json.dumps(said))
    made, costs = device(profile, tmp_path), profile.costs(layout().units)
    real = {unit: size for unit, size in enumerate((40_000, 1_000, 1_000, 1_000, 1_000, 25_000))}
    rate = made.copying_rate(layout(), real.__getitem__)
    for unit, size in real.items():
        assert size / rate(unit) == pytest.approx(costs.units[unit].optimizer_bytes / costs.bandwidth)


def test_memory_refuses_to_overflow(tmp_path: Path) -> None:
    # Two layers: 12 MB of weights and gradients, 12 MB of optimizer state, 2 kB for each grain that is live.
    one = device(profile_of(memory=24_005_000), tmp_path)
    one.enter(layout())
    one.keep(Op("forward", 0), 1.0)
    one.keep(Op("forward", 1), 1.0)
    with pytest.raises(OutOfMemory, match="forward of grain 2 wants"):
        one.keep(Op("forward", 2), 1.0)
    one.keep(Op("forward", 2), 0.5)
    one.let_go(Op("backward", 0))
    one.keep(Op("forward", 3), 1.0)
    one.begin(1, {(3, 0): True})  # the others were given up
    one.keep(Op("forward", 4), 1.0)
    one.begin(1, dict.fromkeys([(3, 0), (4, 0)], False))  # of these only the inputs are kept, which count nothing here
    for grain in range(5, 7):
        one.keep(Op("forward", grain), 1.0)
        one.keep(Op("forward", grain), 1.0, whole=False)
    one.keep(Op("forward", 5), 1.0)  # it is made again
    with pytest.raises(OutOfMemory, match=r"rank 0 has 0\.0 GB, but its units and slices of epoch 0"):
        device(profile_of(memory=20_000_000), tmp_path).enter(layout())


def test_an_interrupt_ends_a_sleep(tmp_path: Path) -> None:
    flag = InterruptFlag()
    one = device(profile_of(layer_ms=1e9), tmp_path, flag=flag)
    one.enter(layout())
    one.begin(1, {})
    timer = threading.Timer(0.05, lambda: flag.raise_for(3, frozenset({1})))
    timer.start()
    with pytest.raises(Interrupted):
        one.compute(Op("forward", 0), 1.0)
    timer.join()
