"""``--elastic-emulate`` with real processes: steps take what they are to take, and everything else stays as it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_elastic.emulation.accelerator import FOLDER
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.observe.compare import compare
from tests.emulation.test_emulation import profile_of
from tests.jobs import BATCH, Grid, Job, Jobs, assert_same_training, inject

PP2 = Grid(tp=1, pp=2, steps=7)
SETTLED = 2
"""Steps until a job that nothing disturbs takes what it takes."""


def emulate(path: Path, profile: Profile) -> list[str]:
    path.write_text(profile.text)
    return ["--elastic-emulate", str(path), "--elastic-profile", str(path)]


def lines(job: Job, rank: int) -> list[dict[str, float]]:
    """What a rank wrote of its steps."""
    return [json.loads(line) for line in (job.run_dir / FOLDER / f"{rank}.jsonl").read_text().splitlines()]


def assert_timed(job: Job, profile: Profile, steps: Sequence[int], schedule: str = "1f1b") -> None:
    """The steps, all of one layout, took at least what they should, and some not much more. Others use the machine,
    too; how exact steps are where nobody does, ``bench emulation`` tells.
    """
    metrics = job.metrics()
    (epoch,) = {metrics[step]["epoch"] for step in steps}
    layout = next(layout for layout in job.layouts() if layout.epoch == epoch)
    expected = forecast(layout, profile, schedule).step_ms
    took = [metrics[step]["step_ms"] for step in steps]
    # From commit to commit, the first of which may have come late.
    assert sum(took) > 0.9 * expected * len(took), (took, expected)
    assert min(took) < 1.3 * expected, (took, expected)


def test_a_kill(jobs: Jobs, tmp_path: Path) -> None:
    """Bit for bit what ranks without emulation compute; as fast as it should be before the loss and after it."""
    profile = profile_of(layer_ms=20, latency_ms=1, boundary=1_000_000, positions=True)
    job = jobs.run(*PP2.flags, *emulate(tmp_path / "profile.json", profile), *inject("1@4:backward"))
    assert_same_training(job, jobs.undisturbed(*PP2.flags), [1])
    # Four micro-batches a cell, of 120 ms at each of two stages, between which they take 2 ms.
    assert 5 * 120 + 2 * 2 <= forecast(job.layouts()[0], profile, "1f1b").pipeline_ms < 620
    assert_timed(job, profile, [2, 3])
    last = job.metrics()[PP2.steps]["epoch"]
    assert_timed(job, profile, [step for step, line in job.metrics().items() if line["epoch"] == last][1:])
    assert [line["step"] for line in lines(job, 1)] == [1, 2, 3], "the dead write no more"
    for rank in job.layouts()[-1].ranks:
        steps = lines(job, rank)
        assert [line["step"] for line in steps] == list(range(1, PP2.steps + 1))
        assert steps[1]["busy_ms"] == pytest.approx(4 * 120)
        power = profile.power
        assert steps[1]["joules"] == pytest.approx(
            power.joules(480, steps[1]["ms"] - 480, 1.0), rel=1e-3)  # fmt: skip


def test_the_memory_of_a_device_is_not_enough_after_a_loss(jobs: Jobs, tmp_path: Path) -> None:
    """Four cells of a stage have room for a quarter of its optimizer state each, but three not for a third. By default
    the job goes on in stages that have room; not under a policy that moves no layers.
    """
    # Two layers: 12 MB of weights and gradients, 24 MB of state, and up to 4 kB of activations.
    profile = profile_of(layer_ms=5, memory=18_500_000, positions=True)
    flags = (*PP2.flags, *emulate(tmp_path / "profile.json", profile), *inject("5@3:forward"))
    assert compare(jobs.run(*flags).run_dir, jobs.undisturbed(*PP2.flags).run_dir) is None
    job = jobs.start(*flags, "--elastic-policy", "recycle", "--elastic-schedule", "split")
    job.finish(1)
    assert list(job.metrics()) == [1, 2], "before it, all was well"
    assert "OutOfMemory" in job.output and "its units and slices of epoch" in job.output


def test_what_cannot_be_is_said_before_anything_starts(jobs: Jobs, tmp_path: Path) -> None:
    small = emulate(tmp_path / "small.json", profile_of(memory=1_000_000, positions=True))
    other = emulate(tmp_path / "other.json", profile_of())
    for flags, message in (
        (small, "the device of rank 0 would hold 0.0 GB of weights"),
        (other, "the profile has no entry for unit 'positions'"),
        ([*small, "--elastic-profile", "measured"], "--elastic-profile measured would measure this machine's"),
        ([*small, "--overlap-grad-reduce"], "--overlap-grad-reduce cannot be emulated"),
    ):
        job = jobs.start(*PP2.flags, *flags)
        job.finish(2)
        assert message in job.output
        assert not (job.run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize("schedule", ["1f1b", "split"])
def test_cells_of_two_with_one_slow_rank(jobs: Jobs, tmp_path: Path, schedule: str) -> None:
    """The slow one holds up its cell, which holds up all: 480 ms of computing take 960."""
    grid = Grid(tp=2, pp=2, steps=6)
    profile = profile_of(layer_ms=10, positions=True, clocks={"1": 0.5})
    flags = [*emulate(tmp_path / "profile.json", profile), "--elastic-schedule", schedule]
    job = jobs.run(*grid.flags, *flags)
    assert_same_training(job, jobs.undisturbed(*grid.flags, "--elastic-schedule", schedule))
    assert_timed(job, profile, range(1 + SETTLED, grid.steps + 1), schedule)
    slow, fast = lines(job, 0)[3], lines(job, 2)[3]
    assert slow["clock"] == 0.5 and fast["clock"] == 1.0
    assert slow["busy_ms"] == pytest.approx(2 * fast["busy_ms"]) == pytest.approx(2 * BATCH / 2 * 60)


def test_micro_batches_that_are_cut(jobs: Jobs, tmp_path: Path) -> None:
    """Three cells share eight micro-batches of two samples: sixteen samples, so six for one of them."""
    flags = [*PP2.flags, "--micro-batch-size", "2", "--elastic-dataflow", "resize", "--train-iters", "12"]
    profile = profile_of(layer_ms=20, positions=True)
    job = jobs.run(*flags, *emulate(tmp_path / "profile.json", profile), *inject("5@3:vote"))
    last = job.layouts()[-1]
    assert any(cell.parts for stage in last.stages for cell in stage.cells)
    assert_timed(job, profile, [step for step, line in job.metrics().items() if line["epoch"] == last.epoch][1:])


def test_who_is_slow_gets_less_to_do(jobs: Jobs, tmp_path: Path) -> None:
    """Speeds that are emulated are seen like real ones."""
    grid = Grid(tp=1, pp=1, steps=14, ranks=4)
    profile = profile_of(layer_ms=8, positions=True, clocks={"2": 0.5})
    job = jobs.run(*grid.flags, *emulate(tmp_path / "profile.json", profile), "--elastic-slow", "share", ranks=4)
    assert_same_training(job, jobs.undisturbed(*grid.flags, ranks=4))
    loads = {cell.leader: len(cell.grains) for cell in job.layouts()[-1].stages[0].cells}
    assert loads[2] == min(loads.values()) < max(loads.values())


def test_layers_leave_the_stage_of_a_slow_rank(jobs: Jobs, tmp_path: Path) -> None:
    """Each stage has one cell: what a grain takes is held against what its units should take, and layers are all that
    can move. Four of eight are on a rank of half the speed, and end up there three.
    """
    grid = Grid(tp=1, pp=2, steps=26, ranks=2)
    flags = (*grid.flags, "--num-layers", "8")
    profile = profile_of(layer_ms=3, positions=True, clocks={"1": 0.5})
    job = jobs.run(*flags, *emulate(tmp_path / "profile.json", profile), "--elastic-slow", "share", ranks=2)
    assert_same_training(job, jobs.undisturbed(*flags, ranks=2))
    assert [event["ranks"] for event in job.events("slow")] == [[1]]
    weighed = [event for event in job.events("considered") if event.get("slow")]
    assert [event["slow"].keys() for event in weighed] == [{"1"}] and weighed[0]["chosen"] == "layers"
    first, last = (
        [sum(layout.units[unit].startswith("layer.") for unit in stage.units) for stage in layout.stages]
        for layout in (job.layouts()[0], job.layouts()[-1])
    )
    assert (first, last) == ([4, 4], [5, 3])
    assert not job.events("recovered")
