"""Units that move: another number of stages on request, and stages that dissolve, in real jobs, bit for bit."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from disturbed import migration

from megatron_elastic import cli
from megatron_elastic.cluster import wire
from megatron_elastic.layout import Holdings, Layout, gpt_units, transfers
from megatron_elastic.plan import Costs, improve
from tests.jobs import ROOT, Grid, Job, Jobs, assert_exactly_once, inject
from tests.launches import TOKEN, free_port
from tests.plan.test_growth import to_stages

PACED = ROOT / "tests" / "megatron_programs" / "paced.py"
WITNESS = ROOT / "tests" / "megatron_programs" / "witness.py"
TIED = ("--elastic-slices", "4", "--train-iters", "48")
PP4 = ("--pipeline-model-parallel-size", "4")
MOVING = "units and slices that are to move are being copied"


EVEN = "slices and grains are even over"


def start(jobs: Jobs, *flags: str, ranks: int = 8, dies: str | None = None) -> Job:
    """Start a job whose ranks ask Megatron in every layout where they are (see ``witness``)."""
    return jobs.start(*flags, ranks=ranks, script=WITNESS, env={} if dies is None else {"WITNESS_DIES": dies})


def ask(job: Job, stages: int) -> int:
    """Ask for a number of stages; the exit code."""
    return cli.main(["scale", str(job.run_dir), "--pp", str(stages)])


def scale(job: Job, stages: int) -> None:
    """Ask for another number of stages, and wait until that is what there is."""
    assert ask(job, stages) == 0
    job.read_until(f"the pipeline has {stages} stages")


def read_until_all(job: Job, *texts: str) -> None:
    """Read the launcher's output until each of the texts was there, in any order."""
    assert job.process.stdout is not None
    missing = set(texts)
    while missing:
        line = job.process.stdout.readline()
        job.output += line
        assert line, f"the launcher ended without printing {missing}:\n{job.output}"
        missing = {text for text in missing if text not in line}


def assert_same(job: Job, reference: Job) -> list[Layout]:
    """Bit for bit, every step once; returns the layouts."""
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job)
    return job.layouts()


def shape(layout: Layout) -> list[int]:
    """Widths."""
    return [stage.width for stage in layout.stages]


def test_stages_as_asked(jobs: Jobs) -> None:
    """Four, two, three and four, while training goes on; all ranks work in the end."""
    job = start(jobs, *TIED, *PP4)
    job.read_until(" 1/48")
    for stages in (2, 3, 4):
        scale(job, stages)
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*TIED, *PP4))
    sizes = [layout.pipeline_size for layout in layouts]
    assert sorted(set(sizes), key=sizes.index) == [4, 2, 3]
    assert shape(layouts[-1]) == [2, 2, 2, 2]
    assert not any(cell.incoming for stage in layouts[-1].stages for cell in stage.cells)
    assert [event["stages"] for event in job.events("asked")] == [2, 3, 4]


def lose_first_node(jobs: Jobs, *flags: str, tmp_path: Path, before: Callable[[Path], None] = lambda _: None) -> Job:
    """A job of three nodes with two ranks each, whose first node, which coordinates, is killed after some steps, and
    ``before`` while its rank 0 stands still.
    """
    pace, run_dir = tmp_path / "pace", tmp_path / "run"
    launcher = ("--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--node-rank")
    with pace.open("w") as file:  # who holds it makes rank 0 wait
        fcntl.flock(file, fcntl.LOCK_EX)
        first, *others = nodes = [
            jobs.start(*flags, "--elastic-store", "embedded", "--elastic-run-dir", str(run_dir), ranks=2, script=PACED,
                       launcher=(*launcher, str(node)), env={wire.TOKEN_VARIABLE: TOKEN, "PACE": str(pace)})
            for node in range(3)
        ]  # fmt: skip
        try:
            first.read_until("another node takes over")
            fcntl.flock(file, fcntl.LOCK_UN)
            first.read_until("step    3/")
            fcntl.flock(file, fcntl.LOCK_EX)
            before(run_dir)
            first.process.kill()
            for node in others:
                node.finish()
        finally:
            for node in nodes:
                node.process.kill()
                node.process.communicate()
    job = Job(others[0].process, run_dir)
    job.output = "".join(node.output for node in others)
    assert len(job.events("took_over")) == 1
    return job


def test_what_is_asked_for_outlives_who_coordinates(jobs: Jobs, tmp_path: Path) -> None:
    """It is lost after it has said yes, with the rank for which all others wait: who takes over makes the stages."""
    grid = Grid(tp=1, pp=1, steps=60, ranks=6)
    flags = (*grid.flags, "--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "12")
    reference = jobs.undisturbed(*flags, ranks=6)

    def ask_for_stages(run_dir: Path) -> None:
        assert cli.main(["scale", str(run_dir), "--pp", "2"]) == 0

    job = lose_first_node(jobs, *flags, tmp_path=tmp_path, before=ask_for_stages)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job, samples=lambda step: 12 * step)
    assert [layout.pipeline_size for layout in job.layouts() if layout.epoch == 0] == [1]
    assert shape(job.layouts()[-1]) == [2, 2]


def test_who_takes_over_goes_by_the_profile(jobs: Jobs, tmp_path: Path) -> None:
    """Two cells of the first stage are lost with the first node: without a profile it would stay as narrow."""
    grid = Grid(tp=1, pp=2, steps=60, ranks=6)
    flags = (*grid.flags, "--micro-batch-size", "2", "--global-batch-size", "12")
    reference = jobs.undisturbed(*flags, ranks=6)
    units = reference.layouts()[0].units
    profile = tmp_path / "profile.json"
    profile.write_text(Costs.assumed(units).to_json(units))
    job = lose_first_node(jobs, *flags, "--elastic-profile", str(profile), tmp_path=tmp_path)
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job, samples=lambda step: 12 * step)
    assert shape(job.layouts()[0]) == [3, 3]
    assert shape(job.layouts()[-1]) == [2, 2]


def test_cells_as_asked(jobs: Jobs) -> None:
    """Fewer, of which one loses a rank, for whom a spare comes; more; and all. What cannot be is refused."""
    flags = (*TIED, "--pipeline-model-parallel-size", "2")
    job = start(jobs, *flags)
    job.read_until(" 1/48")

    def scale_to(ranks: int, *how: str) -> None:
        assert cli.main(["scale", str(job.run_dir), *how]) == 0
        job.read_until(f"{EVEN} {ranks} ranks")

    for impossible in (["--dp", "5"], ["--ranks", "1"], ["--pp", "4", "--dp", "3"]):
        assert cli.main(["scale", str(job.run_dir), *impossible]) == 1
    scale_to(4, "--dp", "2")
    victim = job.layouts()[-1].ranks[-1]
    job.kill(victim)
    job.read_until(f"{EVEN} 4 ranks")
    scale_to(5, "--ranks", "5")
    scale_to(7, "--ranks", "7")
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*flags))
    (lost,) = {layout.lost for layout in layouts if layout.lost}
    assert lost == (victim,) and not layouts[-1].spares
    assert sorted(shape(layouts[-1])) == [3, 4]
    assert [event["cells"] for event in job.events("asked")] == [4, 5, 7]


@pytest.mark.parametrize(("stages", "numbers", "left"), [(2, (5, 8, 6), 2), (4, (3, 8, 6), 3)])
def test_ranks_as_asked_under_kills(jobs: Jobs, stages: int, numbers: tuple[int, ...], left: int) -> None:
    """While each number is made ready a rank is lost, and another comes. Three ranks make three stages of four."""
    flags = ("--elastic-slices", "8", "--train-iters", "48", "--pipeline-model-parallel-size", str(stages))
    job = start(jobs, *flags, "--elastic-respawn")
    job.read_until(" 1/48")
    for ranks in numbers:
        assert cli.main(["scale", str(job.run_dir), "--ranks", str(ranks)]) == 0
        job.kill(job.layouts()[-1].ranks[-1])
        job.read_until("recovered from the loss")
        job.read_until(f"{EVEN} {ranks} ranks")
        assert sum(shape(job.layouts()[-1])) == ranks
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*flags))
    assert layouts[-1].pipeline_size == left
    assert [event["cells"] for event in job.events("asked")] == list(numbers)
    assert len(layouts[-1].lost) == len(numbers)


def test_a_newcomer_beside_one_who_has_moved(jobs: Jobs) -> None:
    """The rest of a cell has come to its layers one by one, a newcomer to all at once: what they compute in parts is
    added up layer by layer all the same.
    """
    flags = (*TIED, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")
    job = start(jobs, *flags, "--elastic-respawn")
    job.read_until(" 1/48")
    scale(job, 1)
    job.read_until(EVEN)
    job.kill(7)
    job.read_until(f"{EVEN} 8 ranks")
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*flags))
    assert [cell.ranks for cell in layouts[-1].stages[0].cells][-1] == (6, 8)
    assert not job.events("error")


def test_stages_and_cells_at_once(jobs: Jobs) -> None:
    """Of cells of two ranks: into more stages and fewer cells, and all of them again."""
    flags = (*TIED, "--tensor-model-parallel-size", "2")
    job = start(jobs, *flags)
    job.read_until(" 1/48")
    assert cli.main(["scale", str(job.run_dir), "--pp", "2", "--dp", "1"]) == 0
    job.read_until(f"{EVEN} 4 ranks")
    assert shape(job.layouts()[-1]) == [1, 1]
    assert cli.main(["scale", str(job.run_dir), "--ranks", "8"]) == 0
    job.read_until(f"{EVEN} 8 ranks")
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*flags))
    assert shape(layouts[-1]) == [2, 2]


def test_layers_go_where_they_cost_least(jobs: Jobs) -> None:
    """By the costs of a profile, after a loss has made a stage narrower: at once without, then with another cut."""
    flags = (*TIED, "--pipeline-model-parallel-size", "2")
    reference = jobs.undisturbed(*flags, ranks=4)
    units = reference.layouts()[0].units
    profile = jobs.folder / "profile.json"
    profile.write_text(Costs.assumed(units).to_json(units))
    job = start(jobs, *flags, "--elastic-profile", str(profile), *inject("3@3:backward"), ranks=4)
    job.finish()
    layouts = assert_same(job, reference)
    names = [[[units[unit] for unit in stage.units] for stage in layout.stages] for layout in layouts]
    layers = [[sum(name.startswith("layer.") for name in stage) for stage in stages] for stages in names]
    assert layers[0] == layers[1] == [2, 2], "training goes on before anything moves"
    assert (layers[-1], shape(layouts[-1])) == ([3, 1], [2, 1])


@pytest.mark.parametrize(
    ("flags", "ranks", "stages"),
    [
        ("--untie-embeddings-and-output-weights --bf16", 4, (2, 1)),
        pytest.param("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 8, (1, 4)),
        pytest.param("--bf16 --pipeline-model-parallel-size 3 --num-layers 3 --elastic-replicas 0", 3, (1, 3)),
        pytest.param("--context-parallel-size 2 --expert-model-parallel-size 4 --num-experts 4 --swiglu "
                     "--disable-bias-linear", 8, (2, 1)),
        pytest.param("--context-parallel-size 4 --expert-model-parallel-size 2 --num-experts 4 --swiglu "
                     "--disable-bias-linear", 8, (2, 1)),
        pytest.param("--tensor-model-parallel-size 2 --context-parallel-size 2", 8, (2, 1)),
    ],
    ids=["untied-bf16", "TP2", "bf16-without-replicas", "CP2 x EP4", "CP4 x EP2", "TP2 x CP2"],
)
def test_other_models(jobs: Jobs, flags: str, ranks: int, stages: tuple[int, ...]) -> None:
    all_flags = ("--elastic-slices", "4", "--train-iters", "16", *flags.split())
    job = start(jobs, *all_flags, ranks=ranks)
    job.read_until(" 1/16")
    for count in stages:
        scale(job, count)
    job.finish()
    reference = jobs.start(*all_flags, ranks=ranks)
    reference.finish()
    assert assert_same(job, reference)[-1].pipeline_size == stages[-1]


@pytest.mark.parametrize(
    ("first", "second", "outside"),
    [
        pytest.param("1@switch", "5@switch", 2),
        pytest.param("0@replicate", "6@promote", 3),
        pytest.param("6@edit", "2@param_sync", 1),
    ],
    ids=["switch", "replicate-promote", "edit-param_sync"],
)
def test_kills_while_units_move(jobs: Jobs, first: str, second: str, outside: int) -> None:
    """One when copies begin to be made, one when the units change their stage, one in between from outside."""
    rank, _, point = first.partition("@")
    job = start(jobs, *TIED, *PP4, "--elastic-inject", f"kill:rank={rank},at={point}", dies=second)
    job.read_until(" 1/48")
    assert ask(job, 2) == 0
    job.read_until("recovered from the loss")
    read_until_all(job, "recovered from the loss", "the pipeline has 2 stages")
    assert ask(job, 3) == 0
    job.read_until(MOVING)
    job.kill(outside)
    job.read_until("recovered from the loss")
    job.read_until("the pipeline has 3 stages")
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*TIED, *PP4))
    assert layouts[-1].lost == tuple(sorted([int(rank), int(second[0]), outside]))
    assert sorted(shape(layouts[-1])) == [1, 2, 2]


def test_checkpoints_and_evaluation_in_between(jobs: Jobs) -> None:
    """Saved with other stages than the job began with, loaded with others again; evaluated at the right weights."""
    steps = ("--train-iters", "18", "--eval-interval", "5", "--eval-iters", "1", "--split", "3,1,1")
    flags = ("--elastic-slices", "4", *steps, "--pipeline-model-parallel-size", "2")
    reference = jobs.undisturbed(*flags)
    folder = jobs.folder / "scale-checkpoint"
    job = start(jobs, *flags, "--save", str(folder), "--save-interval", "5")
    job.read_until(" 1/18")
    scale(job, 4)
    job.finish()
    assert_same(job, reference)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    rest = start(jobs, *flags, "--load", str(folder), ranks=4)
    rest.read_until("11/18")
    assert ask(rest, 1) == 0
    rest.finish()
    for one in (job, rest):
        evaluated = {event["step"]: event["loss"] for event in one.events("evaluated") if event["data"] == "validation"}
        expected = {event["step"]: event["loss"] for event in reference.events("evaluated")}
        assert evaluated == {step: expected[step] for step in evaluated}
    for step, line in rest.metrics().items():
        assert line["loss_hex"] == reference.metrics()[step]["loss_hex"]
    assert (rest.run_dir / "digest.json").read_text() == (reference.run_dir / "digest.json").read_text()


def test_what_cannot_be_is_refused(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason; training goes on as if nobody had asked. And jobs that are over do not answer."""
    flags = ("--train-iters", "12", "--pipeline-model-parallel-size", "2")
    job = start(jobs, *flags, ranks=4)
    job.read_until(" 1/12")
    assert ask(job, 5) == 1
    reason = "5 pipeline stages cannot be made of 4 cells and 6 blocks: ask for another number"
    assert reason in capsys.readouterr().out
    for wrong in (("--pp", "0"), ("--dp", "-1"), ("--dp", "1", "--ranks", "2"), ()):
        with pytest.raises(SystemExit) as refused:
            cli.main(["scale", str(job.run_dir), *wrong])
        assert refused.value.code == 2
        assert capsys.readouterr().err
    job.finish()
    assert job.events("asked") == []
    assert {layout.pipeline_size for layout in job.layouts()} == {2}
    empty = jobs.folder / "empty"
    empty.mkdir()
    for run_dir, said in ((job.run_dir, f"the job in {job.run_dir} has finished: there is nobody to ask"),
                          (empty, f"no elastic job runs in {empty}"),
                          (empty / "nothing", f"there is no directory {empty / 'nothing'}")):
        assert cli.main(["scale", str(run_dir), "--pp", "1"]) == 2
        assert said in capsys.readouterr().err


def test_a_job_whose_launcher_was_killed_does_not_answer(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    job = start(jobs, "--train-iters", "1000", ranks=1)
    job.read_until(" 1/1000")
    job.process.kill()
    job.process.communicate()
    assert ask(job, 1) == 1
    assert f"the job of {job.run_dir} does not answer" in capsys.readouterr().err


def test_down_to_the_last_cell(jobs: Jobs) -> None:
    """All of one stage, one after the other: it dissolves; then all others but one."""
    job = start(jobs, *TIED, "--pipeline-model-parallel-size", "2")
    job.read_until(" 1/48")
    for rank in (4, 6, 5, 7, 0, 3, 1):
        job.kill(rank)
        job.read_until("recovered from the loss")
        if rank != 1:
            job.read_until(EVEN)
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*TIED, *PP4))
    assert [shape(layout) for layout in layouts if layout.lost][-1] == [1]
    assert layouts[-1].ranks == (2,)
    narrow = next(layout for layout in layouts if shape(layout) == [4, 1])
    head = len(narrow.units) - 1
    assert {narrow.stage_of(copy) for copies in narrow.replicas[head] for copy in copies} == {0}


def test_a_stage_dies_at_once_and_its_ranks_come_back(jobs: Jobs) -> None:
    """With two replicas one is in another stage. The newcomers widen the stages that are left."""
    flags = (*TIED, *PP4)
    job = start(jobs, *flags, "--elastic-replicas", "2", "--elastic-respawn")
    job.read_until(EVEN)
    job.kill(4)
    job.kill(5)
    job.read_until("recovered from the loss of ranks")
    job.read_until("over 8 ranks")
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*flags))
    assert (layouts[-1].lost, layouts[-1].ranks) == ((4, 5), (0, 1, 2, 3, 6, 7, 8, 9))
    assert layouts[-1].pipeline_size == 3


@pytest.mark.parametrize("saved", [False, True])
def test_the_last_cell_dies_before_its_copies_are_made(jobs: Jobs, saved: bool) -> None:
    """A checkpoint brings its units back, in other stages; without one that is the end, and is said to be."""
    flags = ("--train-iters", "8", *PP4)
    folder = jobs.folder / "dissolve-checkpoint"
    save = ("--save", str(folder), "--save-interval", "3") if saved else ()
    job = start(jobs, *flags, *save, *inject("4@5:backward", "5@5:replicate"))
    job.finish(0 if saved else 1)
    if saved:
        layouts = assert_same(job, jobs.undisturbed(*flags))
        (event,) = job.events("fallback")
        assert (event["step"], event["lost_steps"]) == (3, [4])
        assert layouts[-1].ranks == (0, 1, 2, 3, 6, 7)
        assert layouts[-1].pipeline_size == 3
    else:
        assert "is held by no live rank" in job.output
        assert "no checkpoint has been written: start the job anew, with --save" in job.output


def test_the_benchmark_sends_as_many_bytes_the_usual_way() -> None:
    """State as much as we copy, and parameters for those that get units anew; in contiguous pieces."""
    units, stage_units = gpt_units(8, 4, True, positions=True)
    before = Layout.grid(tp=1, pp=4, dp=2, stage_units=stage_units, units=units, num_grains=8, num_slices=8, replicas=1)
    parameters = [4096, 128, *[2048] * 8, 64]
    for stages in (2, 4):
        found = improve(before, {}, before.epoch + 1, None, to_stages(stages))
        assert found is not None
        between, after = found
        assert after is not None
        pieces = migration.contiguous(before, between, after, parameters)
        state = sum(parameters[move.unit] / 8 * 12 for move in transfers(between, Holdings.of(before)))
        anew = sum(parameters[u] * 4 for r in after.ranks for u in set(after.held_by(r)) - set(before.held_by(r)))
        assert sum(piece.size for piece in pieces) == pytest.approx(state + anew, abs=len(pieces))
        assert all(piece.source != piece.target for piece in pieces)
        before = replace(after, epoch=between.epoch + 1)
