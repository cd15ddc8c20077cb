"""Whole jobs on the software accelerator: the numbers are those of the CPU, whatever is lost, and nobody waits much."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic import cli
from megatron_elastic.device.soft import build
from megatron_elastic.observe.records import read_digest
from tests.faults.test_elastic import STEP_POINTS
from tests.jobs import MODERN, ROOT, Grid, Job, Jobs, assert_exactly_once, assert_same_training, inject
from tests.models.test_experts import EXPERTS

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler (g++, or what CXX names)")

COUNTED = ROOT / "tests" / "megatron_programs" / "counted.py"
SMALL = ("--num-layers", "2", "--global-batch-size", "8")
SOFT = ("--elastic-device", "soft")
PP2_DP2 = Grid(tp=1, pp=2, steps=4, ranks=4)
DP4 = Grid(tp=1, pp=1, steps=4, ranks=4)
TP2_DP2 = Grid(tp=2, pp=1, steps=4, ranks=4)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.library()  # or the ranks would all wait for the first one


def _samples(step: int) -> int:
    return 8 * step


def _cpu(jobs: Jobs, grid: Grid, *flags: str) -> Job:
    return jobs.undisturbed(*grid.flags, *SMALL, "--elastic-device", "cpu", *flags, ranks=grid.ranks)


def _soft(jobs: Jobs, grid: Grid, *flags: str) -> Job:
    return jobs.run(*grid.flags, *SMALL, *SOFT, *flags, ranks=grid.ranks)


def _assert_same(job: Job, reference: Job, lost: Sequence[int] = ()) -> None:
    assert_same_training(job, reference, lost, _samples)


# ---- as on the CPU ---------------------------------------------------------------------------


def _counts(job: Job, rank: int) -> list[dict[str, Any]]:
    log = (job.run_dir / "logs" / f"rank{rank}.log").read_text()
    return [json.loads(line) for line in log.splitlines() if line.startswith('{"step"')]


def _messages(units: Sequence[Sequence[int]], bits: int) -> tuple[int, int]:
    """Bytes to and from host memory in a step of a rank, for sums to owners and weights from them as messages: of units
    of so many weights, of which so many are its own, that so many cells compute; so many ``bits`` to a weight.
    """
    out = [8 * (weights - owned) + bits // 8 * owned for weights, owned, _ in units]
    return sum(out), sum(8 * owned * (cells - 1) + bits // 8 * (weights - owned) for weights, owned, cells in units)


def test_a_step_waits_once_for_the_device(jobs: Jobs, measured: Callable[[object], None]) -> None:
    """The rank that trains waits for its vote, and for nothing else; the numbers are the CPU's, dropout and all. Sums
    and weights do not go through host memory, unless they are to. Samples are not read ahead, in no step's time.
    """
    counts = {}
    for way in ("host", "device"):
        flags = (*PP2_DP2.flags, *SMALL, *SOFT, "--elastic-reduction", way, "--num-workers", "0")
        job = jobs.start(*flags, ranks=4, script=COUNTED)
        job.finish()
        _assert_same(job, _cpu(jobs, PP2_DP2))
        counts[way] = [_counts(job, rank) for rank in range(4)]
    for rank in range(4):
        for way in ("host", "device"):
            steps = counts[way][rank]
            assert len(steps) == 4
            for step in steps[1:]:
                # The thread that copies waits for an activation or its gradient for each of four grains; then, of each
                # of at most three units, for the mean of the own slice for its replica. If messages carry them, for
                # sums of the slice that is another's and for new weights, too; else once until all gradients
                # are there, and once until new weights have come.
                most = 4 + 3 * 3 if way == "host" else 4 + 3 + 2
                assert set(step["waits"]) == {"Event.synchronize", "Event.synchronize, in another thread"}, step
                assert step["waits"]["Event.synchronize"] == 1, step
                assert step["waits"]["Event.synchronize, in another thread"] <= most, step
            measured(f"rank {rank}, a step, --elastic-reduction {way}: {steps[3]}")
            assert steps[1]["to_host"] == steps[3]["to_host"] and steps[1]["launches"] == steps[3]["launches"]
        host, device = counts["host"][rank][3], counts["device"][rank][3]
        saved = host["to_host"] - device["to_host"], host["to_device"] - device["to_device"]
        assert saved == _messages(host["units"], 32), (host, device)
        # What is left is the mean of what is owned, for its replica, four activations, and what is voted.
        left = device["to_host"] - 4 * sum(owned for _, owned, _ in device["units"]) - 4 * 4 * 32 * 32
        assert 0 < left < 4096, device
    out, in_ = _messages([(7_000_000_000, 875_000_000, 8)], 16)
    measured(f"7 billion weights, 8 cells, a step, GB: as messages {(out + 4 * 875e6) / 1e9:.1f} to the host, "
             f"{in_ / 1e9:.1f} to the device; by collectives {4 * 875e6 / 1e9:.1f} to the host, 0.0 to the device")


@pytest.mark.parametrize(("grid", "flags"), [
    pytest.param(DP4, ("--overlap-grad-reduce", "--overlap-param-gather")),
    pytest.param(TP2_DP2, (*MODERN.split(), "--overlap-grad-reduce")),
    pytest.param(PP2_DP2, ("--elastic-schedule", "split", "--bf16")),
    pytest.param(DP4, ("--recompute-granularity", "full")),
    pytest.param(TP2_DP2, ("--recompute-granularity", "selective", "--fp16")),
    pytest.param(DP4, ("--elastic-replay", "state", "--elastic-verify-every", "2")),
    pytest.param(DP4, ("--micro-batch-size", "2", "--optimizer", "sgd")),
    pytest.param(TP2_DP2, (*MODERN.split(), "--elastic-reduction", "host")),
])  # fmt: skip
def test_with_flags(jobs: Jobs, grid: Grid, flags: Sequence[str]) -> None:
    _assert_same(_soft(jobs, grid, *flags), _cpu(jobs, grid, *flags))


@pytest.mark.parametrize(("way", "nearly"), [("host", 0.0), ("device", 1e-5)])
def test_fast_sums_depend_on_their_order_alone(jobs: Jobs, way: str, nearly: float) -> None:
    """Messages are added as on the CPU, softccl begins with the first member."""
    fast = ("--elastic-consistency", "fast")
    expected = _cpu(jobs, DP4, *fast).metrics()
    for step, line in _soft(jobs, DP4, *fast, "--elastic-reduction", way).metrics().items():
        assert line["loss"] == pytest.approx(expected[step]["loss"], rel=nearly, abs=0), step


# ---- losses ----------------------------------------------------------------------------------


def _kills() -> Iterator[object]:
    """Every point of a step in each grid, by different ranks; those of a recovery after it."""
    for grid in (PP2_DP2, DP4, TP2_DP2):
        for index, point in enumerate(STEP_POINTS):
            yield pytest.param(grid, [f"{(3 * index + 1) % 4}@3:{point}"])
    for points in (("interrupt", "edit"), ("report", "promote"), ("replicate", "resume")):
        for second in points:
            yield pytest.param(DP4, ["0@2:vote", f"2@2:{second}"])


@pytest.mark.parametrize(("grid", "kills"), [
    (PP2_DP2, ["1@2:backward"]),
    (TP2_DP2, ["3@3:grad_sync"]),
    *_kills(),
], ids=lambda value: "+".join(value) if isinstance(value, list) else str(value))  # fmt: skip
def test_killed(jobs: Jobs, grid: Grid, kills: list[str]) -> None:
    job = _soft(jobs, grid, *inject(*kills))
    _assert_same(job, _cpu(jobs, grid), [int(kill.partition("@")[0]) for kill in kills])


def test_a_loss_in_mid_step_redoes_what_was_lost(jobs: Jobs) -> None:
    """Sums on the device go on from where they are, if no collective of the device was given up."""
    job = _soft(jobs, DP4, "--elastic-inject", "kill:rank=1,step=3,at=backward,grain=5")
    _assert_same(job, _cpu(jobs, DP4), [1])
    (event,) = job.events("recovered")
    assert event["decision"] == "resume" and event["kept_ops"] > 0


@pytest.mark.parametrize(("flags", "kill"), [
    (("--overlap-grad-reduce", "--overlap-param-gather"), "1@3:backward"),
    (("--overlap-grad-reduce", "--overlap-param-gather"), "2@3:forward"),
    (("--overlap-grad-reduce", "--overlap-param-gather"), "0@3:param_sync"),
    (("--elastic-reduction", "host"), "1@3:grad_sync"),
    (("--elastic-reduction", "host"), "1@3:param_sync"),
    (("--elastic-replicas", "2", "--elastic-slices", "6"), "3@2:replay"),
    (("--elastic-replay", "state", "--elastic-slices", "3"), "3@3:param_sync"),
])  # fmt: skip
def test_killed_while_sums_or_weights_are_under_way(jobs: Jobs, flags: Sequence[str], kill: str) -> None:
    job = _soft(jobs, DP4, *flags, *inject(kill))
    _assert_same(job, _cpu(jobs, DP4, *flags), [int(kill.partition("@")[0])])


@pytest.mark.parametrize("cp", ["1", "2"])
def test_killed_with_experts(jobs: Jobs, cp: str) -> None:
    """Circles of experts are others than those of the rest; with contexts ranks of one cell add up, too."""
    flags = (*EXPERTS.split(), "--expert-model-parallel-size", "2", "--context-parallel-size", cp)
    grid = Grid(tp=1, pp=1, steps=4, ranks=4)
    job = _soft(jobs, grid, *flags, *inject("3@3:grad_sync"))
    _assert_same(job, _cpu(jobs, grid, *flags), [3])


@pytest.mark.parametrize(("grid", "what", "at", "cause"), [
    (PP2_DP2, "error", "backward", "device"),
    (DP4, "lost", "grad_sync", "device"),
    (DP4, "error", "param_sync", "device"),
    (TP2_DP2, "lost", "vote", "device"),
])  # fmt: skip
def test_a_device_fails(jobs: Jobs, grid: Grid, what: str, at: str, cause: str) -> None:
    """Its rank leaves; the others do not notice more than of any loss."""
    flags = ("--elastic-on-error", "stop", "--elastic-inject", f"device:rank=1,step=3,at={at},what={what}")
    job = _soft(jobs, grid, *flags)
    _assert_same(job, _cpu(jobs, grid), [1])
    assert [event["cause"] for event in job.events("recovered")] == [cause]
    (out,) = job.events("device_out")
    assert (out["rank"], out["local_rank"], out["device"]) == (1, 1, "soft:0")
    assert {(event["device"], event["kernels"]) for event in job.events("hello")} == {("soft:0", "torch")}


def _no_memory(rank: int, at: str) -> list[str]:
    return ["--elastic-inject", f"device:rank={rank},step=3,at={at},what=memory"]


@pytest.mark.parametrize(("grid", "at"), [
    (PP2_DP2, "forward"), (PP2_DP2, "backward"), (DP4, "grad_sync"), (TP2_DP2, "backward"), (DP4, "data"),
], ids=str)  # fmt: skip
def test_memory_is_short(jobs: Jobs, grid: Grid, at: str) -> None:
    """Its rank leaves, and says why; its device stays in use."""
    job = _soft(jobs, grid, "--elastic-on-error", "stop", *_no_memory(1, at))
    _assert_same(job, _cpu(jobs, grid), [1])
    assert [event["cause"] for event in job.events("recovered")] == ["out of memory"]
    (error,) = job.events("error")
    assert "OutOfMemoryError: soft out of memory" in error["traceback"]
    assert "WARNING: memory of soft:0 is short on rank 1, which leaves: " in job.output
    assert not job.events("device_out")


def test_another_rank_is_started_where_memory_was_short(jobs: Jobs) -> None:
    """What was in the way, or in pieces, has gone with the process."""
    grid = Grid(tp=1, pp=1, steps=30, ranks=4)
    job = _soft(jobs, grid, "--elastic-respawn", *_no_memory(1, "forward"))
    _assert_same(job, _cpu(jobs, grid), [1])
    assert len(job.layouts()[-1].ranks) == 4, job.output


def test_a_job_whose_memory_is_short_everywhere_ends(jobs: Jobs) -> None:
    """All at the same place, or others when they do the step of the first again, if they had not come there yet."""
    everywhere = [flag for rank in range(4) for flag in _no_memory(rank, "backward")]
    for injections in (everywhere, [*_no_memory(1, "backward"), *_no_memory(2, "vote")]):
        job = jobs.start(*DP4.flags, *SMALL, *SOFT, *injections, ranks=4)
        message = job.finish(code=1)
        again = "memory of devices is short again when others do step 3: the job does not fit them" in message
        at_once = "every rank is dead: the program raised, the last time 'torch.OutOfMemoryError" in message
        assert again or (at_once and injections is everywhere)
        assert message.count("was short on rank") >= 2 and "OutOfMemoryError: soft out of memory" in message
        assert list(job.metrics()) == [1, 2]


@pytest.mark.parametrize(("tp", "at"), [(1, "backward"), (2, "backward"), (1, "replay"), (1, "param_sync")])
def test_a_device_hangs(jobs: Jobs, tp: int, at: str) -> None:
    """Its rank is killed, where other devices wait for it when that happens again."""
    grid = Grid(tp=tp, pp=1, steps=9, ranks=4)
    job = _soft(jobs, grid, "--elastic-inject", f"device:rank=1,step=7,at={at},what=hang")
    reference = _cpu(jobs, grid)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    (fault,) = job.events("fault")
    assert fault["rank"] == 1 and fault["signal"] in ("hangs", "unreachable")
    assert [event["ranks"] for event in job.events("recovered") if event["cause"] != "device collective"] == [[1]]
    assert [event["rank"] for event in job.events("device_out")] == [1] * (fault["signal"] == "hangs")


# ---- everything else -------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [Grid(tp=1, pp=2, steps=30, ranks=4), Grid(tp=2, pp=1, steps=30, ranks=4)], ids=str)
def test_join(jobs: Jobs, grid: Grid) -> None:
    job = jobs.start(*grid.flags, *SMALL, *SOFT, "--elastic-respawn", *inject("3@3:backward"), ranks=4)
    job.finish()
    _assert_same(job, _cpu(jobs, grid), [3])
    assert len(job.layouts()[-1].ranks) == 4, job.output


def test_scale(jobs: Jobs) -> None:
    """Another number of stages: units and owners move."""
    grid = Grid(tp=1, pp=2, steps=40, ranks=4)
    job = jobs.start(*grid.flags, *SMALL, *SOFT, "--elastic-slices", "4", ranks=4)
    job.read_until(" 3/40")
    assert cli.main(["scale", str(job.run_dir), "--pp", "1"]) == 0
    job.read_until("the pipeline has 1 stages")
    job.finish()
    reference = _cpu(jobs, grid, "--elastic-slices", "4")
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job, samples=_samples)
    assert job.layouts()[-1].pipeline_size == 1


def test_cells_of_another_shape(jobs: Jobs) -> None:
    """Experts are shared by fewer ranks and by more: other circles, on the same devices."""
    exact = (*EXPERTS.split(), "--moe-token-dispatcher-type", "alltoall", "--elastic-slices", "4")
    flags = (*exact, "--expert-model-parallel-size", "2")
    grid = Grid(tp=1, pp=1, steps=40, ranks=4)
    job = jobs.start(*grid.flags, *SMALL, *SOFT, *flags, ranks=4)
    job.read_until(" 3/40")
    for ep in ("1", "2"):
        assert cli.main(["scale", str(job.run_dir), "--ep", ep]) == 0
        job.read_until("cells are TP1")
    job.finish()
    _assert_same(job, _cpu(jobs, grid, *flags))
    assert {layout.ep for layout in job.layouts()} == {1, 2}


def test_micro_batches_are_cut(jobs: Jobs) -> None:
    """Four micro-batches of two samples over three cells: other sums than whole ones, and the same as on the CPU."""
    grid = Grid(tp=1, pp=1, steps=5, ranks=4)
    flags = ("--micro-batch-size", "2", "--elastic-dataflow", "resize", "--elastic-redo", "step", *inject("1@3:data"))
    job, on_cpu = _soft(jobs, grid, *flags), _cpu(jobs, grid, *flags)
    _assert_same(job, on_cpu, [1])
    whole = _cpu(jobs, grid, "--micro-batch-size", "2").metrics()
    assert [line["loss_hex"] == whole[step]["loss_hex"] for step, line in job.metrics().items()].count(True) < 5
    assert any(cell.parts for cell in job.layouts()[-1].stages[0].cells)


@pytest.mark.parametrize("what", ["weights", "moments", "replica"])
def test_damage_is_healed(jobs: Jobs, what: str) -> None:
    flip = ("--elastic-verify-every", "1", "--elastic-inject", f"flip:rank=1,step=3,at=forward,what={what}")
    job = _soft(jobs, DP4, *flip)
    reference = _cpu(jobs, DP4)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert job.events("damaged")


@pytest.mark.parametrize("then", ["cpu", "soft"])
def test_checkpoints_are_the_same_on_both(jobs: Jobs, tmp_path: Path, then: str) -> None:
    """Saved on soft while it trains, loaded there or on the CPU."""
    folder = tmp_path / "checkpoint"
    job = _soft(jobs, PP2_DP2, "--save", str(folder), "--save-interval", "2", "--async-save")
    reference = _cpu(jobs, PP2_DP2)
    _assert_same(job, reference)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    again = jobs.run(*PP2_DP2.flags, *SMALL, "--elastic-device", then, "--load", str(folder), ranks=4)
    assert_exactly_once(again, 3, _samples)
    expected = reference.metrics()
    for step, line in again.metrics().items():
        assert line["loss_hex"] == expected[step]["loss_hex"]
    assert read_digest(again.run_dir) == read_digest(reference.run_dir)


def test_a_job_that_does_not_fit_its_devices_ends_at_once(jobs: Jobs) -> None:
    job = jobs.start(*DP4.flags, *SMALL, *SOFT, ranks=4, env={"SOFT_MEMORY": "65536"})
    assert "ranks on a device need" in job.finish(code=2)


def test_a_device_that_an_import_starts_is_started_by_the_ranks(jobs: Jobs) -> None:
    """It could not be used after a fork."""
    preload = "numpy,torch,tests.megatron_programs.starts_device,megatron.core"
    job = jobs.start(*DP4.flags, *SMALL, *SOFT, ranks=4, env={"MEGATRON_ELASTIC_PRELOAD": preload})
    job.finish()
    _assert_same(job, _cpu(jobs, DP4))
    logs = "".join(path.read_text() for path in (job.run_dir / "logs").glob("zygote*"))
    assert "tests.megatron_programs.starts_device starts a device when it is imported" in logs
