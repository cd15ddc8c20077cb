"""A global batch that grows (``--rampup-batch-size``): as Megatron has it; whoever is lost meanwhile, the same bits."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.config import UsageError
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.route import Leg, first_of, usual
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.plan.work.ramp import Ramp
from megatron_elastic.plan.work.reroute import reroute
from megatron_elastic.support import check_ramp
from tests.changes.test_scale import scale
from tests.checkpoints.test_interchange import losses
from tests.jobs import BATCH, MODEL, MODERN, Job, Jobs, assert_same_training, inject
from tests.models.test_checkout import (
    CheckoutJobs,
    checkout,
    evaluations,
    losses_after_loading,
    needs_checkout,
    patched,
)
from tests.models.test_checkout import assert_same as assert_equal
from tests.models.test_checkout import inject as inject_into
from tests.models.test_experts import EXPERTS
from tests.models.test_plain import train
from tests.tiers.examples import examples

__all__ = ["checkout", "patched"]

ramps = st.builds(
    lambda grain, start, increment, times, span: (grain, grain * start, grain * increment, span,
                                                  grain * (start + increment * times)),
    st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(1, 3000),
)  # fmt: skip
"""Samples of a grain; START, INCREMENT and SAMPLES; samples of the full batch."""


@settings(max_examples=examples(500))
@given(ramp=ramps, data=st.data())
def test_batches_grow_as_megatron_has_it(ramp: tuple[int, int, int, int, int], data: st.DataObject) -> None:
    """In every step, and until the samples are used up (``megatron.training.training.update_train_iters``)."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    grain, start, increment, span, full = ramp
    ours = Ramp.growing(*ramp)
    theirs = RampupBatchsizeNumMicroBatchesCalculator(full, grain, 1, False, 1, start, increment, span)
    consumed = step = 0
    while consumed <= span + 3 * full:
        step += 1
        theirs.update(consumed, consistency_check=True)
        assert ours.before(step) == consumed
        assert (ours.samples(step), ours.grains(step)) == (theirs.current_global_batch_size, theirs.get())
        consumed += theirs.current_global_batch_size
    train_samples = data.draw(st.integers(1, span + 3 * full))
    iterations = consumed = 0
    while consumed <= span and consumed <= train_samples:
        theirs.update(consumed, consistency_check=False)
        consumed += theirs.current_global_batch_size
        iterations += 1
    if train_samples > consumed:
        iterations += (train_samples - consumed) // full
    assert ours.steps(train_samples) == iterations


@given(batch=st.integers(1, 64), size=st.integers(1, 4), step=st.integers(1, 1000), rest=st.integers(0, 63))
def test_a_batch_that_does_not_grow(batch: int, size: int, step: int, rest: int) -> None:
    flags = Namespace(micro_batch_size=size, global_batch_size=batch * size, rampup_batch_size=None,
                      context_parallel_size=1, expert_model_parallel_size=1)  # fmt: skip
    ramp = Ramp.of(flags)
    samples = batch * size
    assert (ramp.samples(step), ramp.grains(step), ramp.before(step)) == (samples, batch, (step - 1) * samples)
    assert ramp.steps(step * samples + rest % samples) == step


@given(pp=st.integers(1, 4), dp=st.integers(1, 4), chunks=st.integers(1, 3), full=st.integers(1, 24),
       fewer=st.integers(0, 23), schedule=st.sampled_from(["1f1b", "split"]))  # fmt: skip
def test_a_step_of_fewer_grains_has_the_usual_order(
    pp: int, dp: int, chunks: int, full: int, fewer: int, schedule: str
) -> None:
    """Of what a layout of so many grains would do; also if there are fewer than stages, or than cells."""
    some = max(full - fewer, 1)
    units, stage_units = gpt_units(pp * chunks, pp, True, False, chunks=chunks if pp > 1 else 1)
    layouts = [Layout.grid(tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=1,
                           replicas=0) for grains in (full, some)]  # fmt: skip
    for leader in layouts[0].cells:
        legs, expected = (usual(layout, leader, for_cell(schedule, layout, leader)) for layout in layouts)
        fewer_legs = first_of(legs, some)
        assert sorted(fewer_legs) == sorted(expected)
        # What the stage before waits for keeps its place; what nobody waits for may come sooner.
        assert _awaited(fewer_legs) == _awaited(expected)


def _awaited(legs: Sequence[Leg]) -> list[Leg]:
    return [leg for leg in legs if leg.op.kind != "backward_weight"]


@pytest.mark.parametrize(("given", "why"), [
    ("4 4 24", None), ("12 4 1", None), ("4 12 99", None),
    ("4 4 many", "three numbers"), ("4 4", "three numbers"), ("0 4 24", "at least 1"), ("4 4 0", "at least 1"),
    ("16 4 24", "one or more times INCREMENT"), ("20 4 24", "one or more times"), ("4 8 24", "one or more times"),
    ("2 2 24", "multiples of --micro-batch-size 2 x data-parallel size 2 = 4"), ("4 6 24", "multiples of"),
])  # fmt: skip
def test_what_cannot_grow_is_refused(given: str, why: str | None) -> None:
    flags = Namespace(micro_batch_size=2, data_parallel_size=2, global_batch_size=16, rampup_batch_size=given.split(),
                      train_samples=100)  # fmt: skip
    if why is None:
        check_ramp(flags)
    else:
        with pytest.raises(UsageError, match=f"^--rampup-batch-size {given}: .*{why}"):
            check_ramp(flags)
    flags.iterations_to_skip = [3]
    with pytest.raises(UsageError, match=f"^--rampup-batch-size {given} does not work with --iterations-to-skip"):
        check_ramp(flags)


def test_steps_are_counted_by_samples_while_batches_grow() -> None:
    """Megatron 0.19 does not look."""
    flags = Namespace(micro_batch_size=2, data_parallel_size=2, global_batch_size=16, rampup_batch_size=[4, 4, 24],
                      train_samples=None, train_iters=6)  # fmt: skip
    with pytest.raises(UsageError, match=r"^--rampup-batch-size needs --train-samples in place of --train-iters"):
        check_ramp(flags)


@given(width=st.integers(1, 8), rounds=st.integers(1, 8), rest=st.integers(0, 7), victim=st.none() | st.integers(0, 7),
       joins=st.booleans())  # fmt: skip
def test_the_first_grains_are_spread_as_evenly_as_all(
    width: int, rounds: int, rest: int, victim: int | None, joins: bool
) -> None:
    """After a loss, a join or both no cell has more than one too many of those that a batch of any size has."""
    grains = width * rounds + rest
    cells = [tuple(range(index, grains, width)) for index in range(width) if index != victim]
    shares = reroute([*cells, *([()] if joins or not cells else [])], grains)
    for some in range(1, grains + 1):
        counts = [sum(grain < some for grain in share) for share in shares]
        assert max(counts) <= -(-some // len(shares)) + 1


# ---- jobs ------------------------------------------------------------------------------------

SIZES = [4, 4, 8, 12, 16, 16]
"""Samples of the steps of ``SHORT``."""
SHORT = ("--rampup-batch-size", "4", "4", "24", "--train-samples", str(sum(SIZES)))
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")


def ramp_of(flags: Sequence[str]) -> Ramp:
    """Of flags of a job with micro-batches of one sample."""
    start, increment, span = map(int, flags[1:4])
    return Ramp.growing(1, start, increment, span, BATCH)


def grid(tp: int, pp: int) -> tuple[str, ...]:
    return ("--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp))


def assert_same(job: Job, reference: Job, lost: Sequence[int], ramp: Sequence[str] = SHORT) -> None:
    growing = ramp_of(ramp)
    assert_same_training(job, reference, lost, lambda step: growing.before(step + 1))


def test_killed_while_the_batch_grows(jobs: Jobs) -> None:
    """Before and after changes; two die in the middle of steps, of which only what they had done is done again."""
    flags = (*grid(1, 2), *SHORT)
    reference = jobs.undisturbed(*flags)
    assert [ramp_of(SHORT).samples(step) for step in reference.metrics()] == SIZES
    job = jobs.run(*flags, *OVERLAP, *inject("1@2:backward", "6@3:forward", "3@4:apply"))
    assert_same(job, reference, [1, 3, 6])
    resumed = [event for event in job.events("recovered") if event["decision"] == "resume"]
    assert all(event["redone_ops"] <= 2 * SIZES[event["step"] - 1] for event in resumed)


@pytest.mark.parametrize("point", ["data", "forward", "backward", "grad_sync", "replay", "vote", "apply", "param_sync",
                                   "commit"])  # fmt: skip
@pytest.mark.parametrize(("tp", "pp", "extra"), [(1, 2, ()), (2, 1, MODERN.split())], ids=["PP2 x DP4", "TP2 x DP4"])
def test_killed_anywhere_before_and_after_a_change(
    jobs: Jobs, tp: int, pp: int, extra: Sequence[str], point: str
) -> None:
    """In the last step of a size, and in the first of each other."""
    flags = (*grid(tp, pp), *SHORT, *extra, "--elastic-replicas", "2")
    job = jobs.run(*flags, *inject(f"1@2:{point}", f"6@3:{point}", f"2@5:{point}"))
    assert_same(job, jobs.undisturbed(*flags), [1, 2, 6])


@pytest.mark.parametrize(("tp", "pp", "extra"), [
    (2, 2, [*MODERN.split(), *OVERLAP]),
    (1, 4, ["--elastic-schedule", "split", "--elastic-verify-every", "1"]),
    (1, 2, ["--num-virtual-stages-per-pipeline-rank", "2", "--elastic-schedule", "split", *OVERLAP]),
    (1, 2, [*EXPERTS.split(), "--expert-model-parallel-size", "2"]),
    (1, 2, ["--context-parallel-size", "2"]),
    (1, 2, ["--elastic-replay", "state", "--elastic-redo", "step"]),
], ids=["TP2 x PP2", "fewer grains than stages", "virtual stages", "EP2", "CP2", "states, whole steps"])  # fmt: skip
def test_other_cells_and_programs(jobs: Jobs, tp: int, pp: int, extra: Sequence[str]) -> None:
    flags = (*grid(tp, pp), *SHORT, *extra)
    job = jobs.run(*flags, *inject("2@2:backward", "5@4:vote"))
    assert_same(job, jobs.undisturbed(*flags), [2, 5])


def test_micro_batches_are_cut(jobs: Jobs) -> None:
    """Of nine over two cells one is cut, which smaller batches do not have; losses are the same but rounding."""
    flags = ("--rampup-batch-size", "6", "6", "12", "--train-samples", "54", "--global-batch-size", "18",
             "--micro-batch-size", "2")  # fmt: skip
    reference = jobs.undisturbed(*flags, ranks=3)
    job = jobs.run(*flags, "--elastic-dataflow", "resize", *inject("1@2:backward"), ranks=3)
    assert any(cell.parts for cell in job.layouts()[-1].stages[0].cells)
    assert [line["consumed_samples"] for line in reference.metrics().values()] == [6, 18, 36, 54]
    for step, line in reference.metrics().items():
        assert job.metrics()[step]["loss"] == pytest.approx(line["loss"], rel=1e-6, abs=0), step


LONG = ("--rampup-batch-size", "4", "4", "480", "--train-samples", "960")


def sizes_at(job: Job, *kinds: str) -> list[int]:
    """Samples of the steps of these events."""
    ramp = ramp_of(LONG)
    return [ramp.samples(event["step"]) for kind in kinds for event in job.events(kind)]


def test_a_rank_joins_while_the_batch_grows(jobs: Jobs) -> None:
    flags = (*grid(1, 2), *LONG)
    job = jobs.run(*flags, "--elastic-respawn", *inject("3@2:backward"))
    assert_same(job, jobs.undisturbed(*flags), [3], LONG)
    assert len(job.layouts()[-1].ranks) == 8
    assert sizes_at(job, "switched")[0] < BATCH


def test_stages_change_while_the_batch_grows(jobs: Jobs) -> None:
    """One stage of eight cells, of which half have nothing to compute at first."""
    flags = (*grid(1, 2), *LONG, "--elastic-slices", "4")
    job = jobs.start(*flags)
    job.read_until(" 1/")
    scale(job, 1)
    job.finish()
    assert_same(job, jobs.undisturbed(*flags), [], LONG)
    assert [layout.pipeline_size for layout in job.layouts()][-1] == 1
    assert sizes_at(job, "switched")[0] < BATCH


def test_a_checkpoint_from_the_middle(jobs: Jobs, tmp_path: Path) -> None:
    """Under another layout, with the same bits, also when the batch has grown; with other batches it is refused."""
    flags, saves = (*grid(1, 2), *SHORT, "--elastic-slices", "4"), ("--save", str(tmp_path), "--save-interval", "1")
    whole = jobs.run(*flags, *saves)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    rest = jobs.run(*flags, *grid(1, 4), "--load", str(tmp_path), *inject("1@4:backward", "6@5:apply"))
    theirs = whole.metrics()
    assert list(rest.metrics()) == [4, 5, 6]
    for step, line in rest.metrics().items():
        for name in ("loss_hex", "grad_norm_hex", "lr", "consumed_samples"):
            assert line[name] == theirs[step][name], (step, name)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert SIZES[4] == BATCH
    grown = jobs.run(*flags, *grid(1, 4), "--load", str(tmp_path))
    assert {step: line["loss_hex"] for step, line in grown.metrics().items()} == {6: theirs[6]["loss_hex"]}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    other = jobs.start(*flags, "--rampup-batch-size", "4", "4", "48", "--load", str(tmp_path))
    assert "its 3 steps took 16 samples, and with these flags they would have taken 12" in other.finish(code=2)


def test_everybody_goes_back_to_a_checkpoint(jobs: Jobs, tmp_path: Path) -> None:
    """Owner and replica are lost at once, after the batch has grown; it does so again."""
    flags = (*grid(1, 2), *SHORT)
    job = jobs.run(*flags, "--save", str(tmp_path), "--save-interval", "2", *inject("0@4:backward", "1@4:backward"))
    assert_same(job, jobs.undisturbed(*flags), [0, 1])
    assert [event["decision"] for event in job.events("recovered")] == ["reload"]


def test_as_plain_training(jobs: Jobs, tmp_path: Path) -> None:
    """From the same weights; learning rate and weight decay follow the samples."""
    flags = f"{MODEL} {' '.join(SHORT)} --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine " \
            "--lr-warmup-samples 10 --min-lr 1e-3 --eval-iters 1 --eval-interval 2 --split 3,1,1"  # fmt: skip
    done = train(jobs.data, 4, f"{flags} --pipeline-model-parallel-size 2 --save {tmp_path} --save-interval 1 "
                               f"--elastic-run-dir {tmp_path / 'plain'}")
    assert done.returncode == 0, done.stderr
    whole = losses(tmp_path / "plain")
    assert len(whole) == len(SIZES)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    job = jobs.run(*flags.split(), *grid(1, 4), "--load", str(tmp_path), *inject("1@3:forward", "6@5:vote"))
    assert losses(job.run_dir) == pytest.approx({step: whole[step] for step in range(2, 7)}, rel=1e-5)
    told = re.findall(r"validation loss at iteration (\d+) . lm loss: (\S+)", done.stdout)
    evaluated = {event["step"]: event["loss"] for event in job.events("evaluated")}
    assert evaluated == pytest.approx({int(step): float(loss) for step, loss in told}, rel=1e-5)


# ---- Megatron-LM -----------------------------------------------------------------------------

SAVES = ("--save-interval", "1", "--dist-ckpt-optim-fully-reshardable")
WITHOUT_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0", "--lr-warmup-samples", "10")
LOGGED = re.compile(r"iteration +(\d+)/.*consumed samples: +(\d+) .*learning rate: (\S+) .*global batch size: +(\d+)")


def logged(*logs: Path) -> dict[int, tuple[int, str, int]]:
    """Consumed samples, learning rate and batch size that Megatron has logged of each step."""
    found = (line for log in logs for line in LOGGED.finditer(log.read_text()))
    return {int(line[1]): (int(line[2]), line[3], int(line[4])) for line in found}


@needs_checkout
@pytest.mark.parametrize(("extra", "parallel"), [
    ("", ""),
    ("--calculate-per-token-loss --eod-mask-loss --vocab-size 399 --train-samples 140", ""),
    ("--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall "
     "--disable-bias-linear --swiglu", "--expert-model-parallel-size 2"),
], ids=["dense", "losses by token", "EP2"])  # fmt: skip
def test_as_megatron_lm(
    patched: CheckoutJobs, tmp_path: Path, extra: str, parallel: str, measured: Callable[[object], None]
) -> None:
    """From the same weights, through a checkpoint, and back; with ranks that are killed, the same bits."""
    flags, saved = (*SHORT, *WITHOUT_DROPOUT, *SAVES, *extra.split()), tmp_path / "saved"
    whole = losses_after_loading(patched.plain(*flags, "--save", str(tmp_path), ranks=1))
    newest = max(patched.folder.glob("plain*/runs/*/logs/*.log"), key=lambda log: log.stat().st_mtime)
    plain, steps = logged(newest), [step for step in whole if step > 1]
    assert [size for *_, size in plain.values()][: len(SIZES)] == SIZES
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    elastic = ("--elastic", *flags, *parallel.split(), *grid(1, 2), "--load", str(tmp_path))
    undisturbed = patched.run(*elastic)
    lines = undisturbed.metrics()
    ours = {step: line["loss"] for step, line in lines.items()}
    measured(max(abs(ours[step] / whole[step] - 1) for step in ours))
    assert ours == pytest.approx({step: whole[step] for step in steps}, rel=1e-5)
    counted = [line["tokens_per_s"] * line["step_ms"] / 1e3 / plain[step][2] for step, line in lines.items()]
    assert (min(counted) < 31.9) == ("--eod-mask-loss" in flags), "of sequences of 32 tokens"
    killed = patched.run(*elastic, *inject_into("kill:rank=3,step=3,at=backward", "kill:rank=1,step=5,at=apply"),
                         "--save", str(saved))  # fmt: skip
    assert_equal(killed, undisturbed)
    assert evaluations(killed) == evaluations(undisturbed)
    for job in (undisturbed, killed):
        assert logged(*job.run_dir.glob("logs/rank*.log")) == {step: plain[step] for step in steps}
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    # The optimizer of divided experts is one that Megatron loads for divided experts alone; gloo has no alltoall.
    divided = (*parallel.split(), "--moe-token-dispatcher-type", "allgather") if parallel else ()
    rest = losses_after_loading(patched.plain(*flags, *divided, "--load", str(saved), ranks=2 if parallel else 1))
    assert rest == pytest.approx({step: whole[step] for step in steps if step > 3}, rel=1e-5)


@needs_checkout
def test_all_samples_are_taken_in_every_release(patched: CheckoutJobs) -> None:
    """Also by Megatron-LM 0.19, which passes over the flag: as many steps as they are, with their sizes in the log."""
    job = patched.run("--elastic", *SHORT, *WITHOUT_DROPOUT, "--lr-decay-samples", "60", ranks=2)
    found = logged(*job.run_dir.glob("logs/rank*.log"))
    assert [size for *_, size in found.values()] == SIZES
    assert found[len(SIZES)][0] == sum(SIZES)


@needs_checkout
@pytest.mark.parametrize(("flags", "reason"), [
    (("--rampup-batch-size", "1", "3", "24", "--train-samples", "60"), "START and INCREMENT must be multiples of"),
    (("--rampup-batch-size", "4", "4", "24", "--train-iters", "6"), "expected no batch-size rampup"),
    (("--decrease-batch-size-if-needed", "--train-iters", "6"), "batches stay as large as the flags say"),
])  # fmt: skip
def test_what_megatron_lm_cannot(patched: CheckoutJobs, flags: tuple[str, ...], reason: str) -> None:
    job = patched.start("--elastic", *flags, ranks=2)
    job.output = job.process.communicate(timeout=200)[0]
    assert job.process.returncode in (1, 2), job.output
    assert reason in job.output
    assert "Traceback" not in job.output
