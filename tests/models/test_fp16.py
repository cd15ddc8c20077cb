"""fp16: losses are scaled, steps are skipped whose gradients overflow, the scale changes; whoever dies, the same bits.

In jobs the scale is all the time at the edge of what overflows: it is doubled after two good steps, and halved at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.cluster.messages import UNSCALED, Scaling, VoteResult
from megatron_elastic.numerics.exact import ExactAccumulator, FloatAccumulator, GradientOverflow
from megatron_elastic.numerics.kernels import SCALE
from megatron_elastic.state.buffer import Member, UnitBuffer, shape_of
from megatron_elastic.state.optimizer import SIGNED, Adam, Rates, Update
from megatron_elastic.state.partition import Partition, Segment
from megatron_elastic.state.slice import SliceState
from megatron_elastic.state.vote import Ballot, add_up, count
from tests.checkpoints.test_fallback import BOTH
from tests.jobs import Grid, Job, Jobs, assert_exactly_once, assert_same_training, inject
from tests.models.test_experts import EXPERTS

EDGE = ("--fp16", "--initial-loss-scale", str(2.0**21), "--loss-scale-window", "2", "--hysteresis", "1")
GRID = Grid(tp=1, pp=2, steps=10)
FLAGS = (*GRID.flags, *EDGE)
SKIPPED, GROWN = [1, 2, 3, 8], [6, 8]
"""Steps of that job that are skipped, and those that begin with a scale that has been doubled."""
BIASED = f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"


# ---- what a step makes of the scale ---------------------------------------------------------


def scales(**config: Any) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from megatron_elastic.adaptor.training.schedules.scales import LossScales, Rule

    return LossScales(Rule.of(OptimizerConfig(**config)))


def megatrons(window: int, hysteresis: int) -> Any:
    """Megatron's scaler, which can be made with a device only."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler

    scaler = DynamicGradScaler.__new__(DynamicGradScaler)
    vars(scaler).update(
        _scale=torch.tensor([64.0]), min_scale=torch.tensor([4.0]), growth_factor=torch.tensor([2.0]),
        backoff_factor=torch.tensor([0.5]), growth_interval=window, hysteresis=hysteresis, _growth_tracker=0,
        _hysteresis_tracker=hysteresis,
    )  # fmt: skip
    return scaler


def dynamic(window: int, hysteresis: int) -> dict[str, Any]:
    return {"fp16": True, "initial_loss_scale": 64.0, "min_loss_scale": 4.0, "loss_scale_window": window,
            "hysteresis": hysteresis}  # fmt: skip


def vote(step: int, scaling: Scaling, overflows: bool) -> VoteResult:
    norm = math.inf if overflows else 1.0
    return VoteResult(step=step, loss=1.0, grad_norm=norm, lr=0.1, consumed_samples=step, tokens=1, scaling=scaling)


@given(window=st.integers(1, 4), hysteresis=st.integers(1, 3), outcomes=st.lists(st.booleans(), min_size=1),
       data=st.data())  # fmt: skip
def test_scales_are_those_of_megatrons_scaler(
    window: int, hysteresis: int, outcomes: Sequence[bool], data: st.DataObject
) -> None:
    """Whatever is asked meanwhile, and also when a step or two are done again."""
    ours, theirs = scales(**dynamic(window, hysteresis)), megatrons(window, hysteresis)
    expected = []
    for overflows in outcomes:
        expected.append((theirs.scale.item(), dict(theirs.state_dict())))
        theirs.update(overflows)
    ours.begin(1)
    step, repeats = 1, 2
    while step <= len(outcomes):
        scaling = ours.at(step)
        assert scaling.scale == expected[step - 1][0]
        assert ours.saved(step) == expected[step - 1][1]
        assert scaling.skipped == sum(outcomes[: step - 1]) and scaling.samples == 4 * scaling.skipped
        ours.follow(vote(step, scaling, outcomes[step - 1]), samples=4)
        if repeats and step > 2 and data.draw(st.booleans()):
            repeats -= 1
            step -= data.draw(st.integers(0, 1))
            ours.return_to(step)
        else:
            step += 1


@given(outcomes=st.lists(st.booleans(), max_size=9), more=st.lists(st.booleans(), max_size=9))
def test_a_checkpoint_has_what_it_takes_to_go_on(outcomes: Sequence[bool], more: Sequence[bool]) -> None:
    first, second = scales(**dynamic(2, 2)), scales(**dynamic(2, 2))
    first.begin(1)
    for step, overflows in enumerate(outcomes, start=1):
        first.follow(vote(step, first.at(step), overflows), samples=4)
    step = len(outcomes) + 1
    second.begin(step, first.at(step).skipped, first.at(step).samples, first.saved(step))
    for later, overflows in enumerate(more, start=step):
        assert first.at(later) == second.at(later)
        for each in (first, second):
            each.follow(vote(later, each.at(later), overflows), samples=4)


def test_a_constant_scale_stays_and_what_a_checkpoint_says_does_not_count() -> None:
    constant = scales(bf16=True, loss_scale=1000.0)
    constant.begin(1)
    constant.follow(vote(1, constant.at(1), overflows=True), samples=4)
    assert constant.at(2) == Scaling(scale=1000.0, skipped=1, samples=4)
    assert constant.saved(2) == {}
    constant.begin(5, 2, 8, {"scale": torch.tensor([8.0]), "growth_tracker": 1, "hysteresis_tracker": 1})
    assert constant.at(5) == Scaling(scale=1000.0, skipped=2, samples=8)


def test_without_a_scaler_every_step_counts() -> None:
    none = scales(bf16=True)
    none.begin(1)
    none.follow(vote(1, none.at(1), overflows=True), samples=4)
    assert (none.on, none.at(7), none.saved(7)) == (False, UNSCALED, {})


# ---- what a gradient makes of the sums ------------------------------------------------------


@given(st.permutations([1.5, -0.25, 3.0, 2.0**-14, 65504.0, -7.0]), st.sampled_from([2.0**-16, 2.0**-3, 0.001]))
def test_gradients_are_unscaled_as_they_are_added(values: list[float], factor: float) -> None:
    total, accumulator = torch.zeros(1, dtype=torch.int64), ExactAccumulator(8)
    accumulator.factor = factor
    scaled = torch.tensor([SCALE * factor], dtype=torch.float32).double().item()
    for value in values:
        assert accumulator.add(total, torch.tensor([value]).half())
    exact = sum(int(torch.tensor(value * scaled, dtype=torch.float32).item()) for value in values)
    assert total.item() == exact
    assert accumulator.mean([total], 1).item() == pytest.approx(factor * sum(values), rel=1e-6)
    floats = FloatAccumulator()
    floats.factor = factor
    inexact = torch.zeros(1)
    for value in values:
        assert floats.add(inexact, torch.tensor([value]).half())
    assert inexact.item() == pytest.approx(factor * sum(values), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_told_and_what_is_too_large_is_an_error(bad: float) -> None:
    accumulator, total = ExactAccumulator(4, passes=True), torch.zeros(200_000, dtype=torch.int64)
    value = torch.zeros(200_000).half()
    value[199_999] = bad
    assert not accumulator.add(total, value)
    assert not total.any()
    accumulator.factor = 2.0**7  # a scale below 1
    value[199_999] = 32768.0
    with pytest.raises(GradientOverflow):
        accumulator.add(total, value)
    assert accumulator.add(total, value, plain=True), "a count is scaled by nothing"
    assert total[199_999] == 32768 * int(SCALE)


def test_a_step_that_is_resumed_knows_that_it_will_be_skipped() -> None:
    members = [Member(torch.nn.Parameter(torch.ones(8).half()), 0, runs=1)]
    buffer = UnitBuffer(Partition(shape_of("a", members), 1, 0, 1), ExactAccumulator(2, passes=True))
    buffer.bind(members, fill=True)
    buffer.zero()
    (members[0].parameter.sum() * math.inf).backward()
    buffer.go_on()
    members[0].parameter.sum().backward()
    assert not buffer.finite
    buffer.zero()
    assert buffer.finite


def test_one_gradient_that_is_not_finite_is_enough() -> None:
    ballots = [Ballot(np.ones(1), {}), Ballot(np.zeros(0), {}, finite=False)]
    assert add_up(sum(map(count, ballots[1:]), start=count(ballots[0])))[0] == math.inf


def test_the_optimizer_does_not_count_skipped_steps() -> None:
    """But what moves by its sign alone moves, as Megatron's biases of experts do."""
    rates = (Rates(0.1, 0.1), Rates(0.01, 0.0))
    segments = [Segment(0, 6, 0, True), Segment(6, 8, SIGNED, False)]
    some, others = (SliceState(torch.ones(8), Adam(0.9, 0.99, 1e-8)) for _ in range(2))
    skips = 0
    for step, overflows in enumerate([True, False, True, True, False, False], start=1):
        some.grad = torch.full((8,), math.inf if overflows else float(step))
        some.apply(Update(step, 0.0 if overflows else 0.5, rates, overflows, skips), segments)
        if overflows:
            skips += 1
            continue
        others.grad = torch.full((8,), float(step))
        others.apply(Update(step - skips, 0.5, rates), segments)
    assert (some.step, others.step) == (6, 3)
    for ours, theirs in zip(some.tensors, others.tensors, strict=True):
        assert torch.equal(ours[:6], theirs[:6])
    assert some.master[6:].tolist() == pytest.approx([1 - 6 * 0.01] * 2)


# ---- jobs -----------------------------------------------------------------------------------


def steps_of(job: Job, kind: str) -> list[int]:
    return [event["step"] for event in job.events(kind)]


def changes(job: Job) -> list[tuple[int, float]]:
    """Steps that begin with another scale than the one before, and that."""
    return [(event["step"], event["scale"]) for event in job.events("loss_scale")]


def assert_same_scales(job: Job, reference: Job) -> None:
    assert changes(job) == changes(reference)
    assert steps_of(job, "skipped") == steps_of(reference, "skipped")


def test_killed_while_the_scale_changes(jobs: Jobs) -> None:
    """As a step is skipped, and as the scale grows: before and after everybody knows of it."""
    reference = jobs.undisturbed(*FLAGS)
    assert steps_of(reference, "skipped") == SKIPPED
    grown = [step for (_, before), (step, after) in zip(changes(reference), changes(reference)[1:], strict=False)
             if after > before]  # fmt: skip
    assert grown == GROWN
    rates = [line["lr"] for line in reference.metrics().values()]
    assert len(set(rates)) == 1
    job = jobs.run(*FLAGS, *inject("1@1:vote", "5@3:apply", "6@7:param_sync", "2@8:forward"))
    assert_same_training(job, reference, [1, 2, 5, 6])
    assert_same_scales(job, reference)


def test_who_joins_learns_the_scale(jobs: Jobs) -> None:
    """And in the end all who have known it from the beginning are gone."""
    flags = (*Grid(tp=1, pp=1, steps=60, ranks=2).flags, *EDGE, "--num-layers", "2")
    job = jobs.start(*flags, "--elastic-respawn", *inject("1@2:apply"), ranks=2)
    job.read_until("slices and grains are even over 2 ranks")
    job.kill(0)
    job.finish()
    reference = jobs.undisturbed(*flags, ranks=2)
    assert_same_training(job, reference, [0, 1])
    assert_same_scales(job, reference)
    assert len(changes(reference)) > 10


@pytest.mark.parametrize("steps", [{6: 3, 1: 5, 5: 8}, {6: 4, 1: 7}], ids=str)
@pytest.mark.parametrize("at", ["forward", "backward", "grad_sync", "replay", "vote", "apply", "param_sync", "commit"])
def test_killed_anywhere(jobs: Jobs, steps: Mapping[int, int], at: str) -> None:
    """In the last of the first steps that are skipped, in those before the scale grows, in the one that is too much."""
    job = jobs.run(*FLAGS, *inject(*(f"{rank}@{step}:{at}" for rank, step in steps.items())))
    assert_same_training(job, jobs.undisturbed(*FLAGS), sorted(steps))
    assert_same_scales(job, jobs.undisturbed(*FLAGS))


@pytest.mark.parametrize(("tp", "pp", "extra"), [
    (2, 2, "--sequence-parallel --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights"),
    (1, 2, "--elastic-replay state"),
    (1, 2, "--elastic-verify-every 1 --overlap-grad-reduce --overlap-param-gather --elastic-schedule split"),
    (1, 2, "--recompute-granularity full --num-layers-per-virtual-pipeline-stage 1"),
    (1, 2, f"{BIASED} --expert-model-parallel-size 2"),
    (1, 2, "--context-parallel-size 2 --position-embedding-type rope"),
    (1, 1, "--loss-scale 3e5 --micro-batch-size 2"),
    (1, 2, "--optimizer sgd --main-grads-dtype bf16"),
], ids=["TP2", "states replayed", "overlapped", "virtual", "EP2, biased", "CP2", "constant", "SGD"])  # fmt: skip
def test_killed_with_what_there_is_besides(jobs: Jobs, tp: int, pp: int, extra: str) -> None:
    flags = (*Grid(tp=tp, pp=pp, steps=10).flags, *EDGE, *extra.split())
    reference = jobs.undisturbed(*flags)
    assert steps_of(reference, "skipped") or "--loss-scale" in extra
    kills = {5: "5@3:apply"} if len(reference.layouts()[0].cells) == 4 else {5: "5@3:apply", 1: "1@7:backward"}
    job = jobs.run(*flags, *inject(*kills.values()))
    assert_same_training(job, reference, sorted(kills))
    assert_same_scales(job, reference)


def test_placement_does_not_show(jobs: Jobs) -> None:
    """Nor how many ranks there are: what overflows depends on the number of slices."""
    job = jobs.run(*FLAGS, "--pipeline-model-parallel-size", "1", "--elastic-slices", "4", ranks=2)
    reference = jobs.undisturbed(*FLAGS)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0
    assert_same_scales(job, reference)


def test_sums_that_are_not_exact(jobs: Jobs) -> None:
    flags = (*FLAGS, "--elastic-consistency", "fast")
    reference = jobs.undisturbed(*FLAGS)
    job = jobs.run(*flags, *inject("1@1:vote", "5@3:apply", "6@7:param_sync"))
    assert_exactly_once(job)
    assert_same_scales(job, reference)
    for step, line in job.metrics().items():
        assert line["loss"] == pytest.approx(reference.metrics()[step]["loss"], rel=1e-3), step


def test_micro_batches_are_cut(jobs: Jobs) -> None:
    """Nine of two samples, over two ranks: who computes part of one scales its part of the loss."""
    flags = (*Grid(tp=1, pp=1, steps=8).flags, *EDGE, "--micro-batch-size", "2", "--global-batch-size", "18")
    reference = jobs.undisturbed(*flags, ranks=3)
    job = jobs.run(*flags, "--elastic-dataflow", "resize", *inject("1@3:backward"), ranks=3)
    assert any(cell.parts for cell in job.layouts()[-1].cells.values())
    for step, line in job.metrics().items():
        assert line["loss"] == pytest.approx(reference.metrics()[step]["loss"], rel=1e-3), step
        if line["grad_norm"] is not None and reference.metrics()[step]["grad_norm"] is not None:
            assert line["grad_norm"] == pytest.approx(reference.metrics()[step]["grad_norm"], rel=2e-2), step


def test_back_to_a_checkpoint_and_from_one(jobs: Jobs, tmp_path: Path) -> None:
    """An owner and its replica die, and the scale is that of the checkpoint; as it is for another job, of one stage."""
    flags = (*Grid(tp=1, pp=1, steps=10, ranks=4).flags, *EDGE, "--elastic-respawn")
    reference = jobs.undisturbed(*flags, ranks=4)
    job = jobs.run(*flags, "--save", str(tmp_path), "--save-interval", "2", *inject(*BOTH), ranks=4)
    assert_same_training(job, reference, [1, 2])
    assert steps_of(job, "fallback") == [4]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    rest = jobs.run(*flags, "--pipeline-model-parallel-size", "2", "--load", str(tmp_path), ranks=8)
    theirs = reference.metrics()
    assert {step: line["loss_hex"] for step, line in rest.metrics().items()} == {
        step: theirs[step]["loss_hex"] for step in range(7, 11)
    }
    assert steps_of(rest, "skipped") == [step for step in steps_of(reference, "skipped") if step > 6]
