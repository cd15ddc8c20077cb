"""Multi-token prediction: the end of a model predicts further tokens, with the embedding; whoever dies, same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elastic import cli
from tests.changes.test_scale import assert_same, scale
from tests.checkpoints.test_interchange import tensors
from tests.jobs import Grid, Jobs, assert_same_training, inject
from tests.models.test_contexts import assert_contexts_round_only

FURTHER = "--mtp-num-layers 2 --position-embedding-type rope"
UNTIED = "--untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --disable-bias-linear"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 24 --disable-bias-linear --moe-aux-loss-coeff 1e-2 --swiglu"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
EVERYTHING = "--elastic-schedule split --overlap-grad-reduce --overlap-param-gather --recompute-granularity full"
WITHOUT_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


@pytest.mark.parametrize(("tp", "pp", "extra"), [
    (1, 2, EVERYTHING),
    pytest.param(1, 4, f"{UNTIED} --elastic-schedule split --overlap-grad-reduce"),
    pytest.param(2, 2, f"--sequence-parallel --bf16 {EXPERTS} {BIAS}"),
    pytest.param(2, 1, f"--sequence-parallel {UNTIED}"),
    pytest.param(1, 1, f"{EXPERTS} {BIAS} --expert-model-parallel-size 2"),
    pytest.param(1, 2, f"{UNTIED} {EXPERTS} --context-parallel-size 2 --expert-model-parallel-size 2"),
], ids=["PP2, everything", "PP4, untied", "TP2 x PP2, experts", "TP2, untied", "EP2, experts", "CP2 x EP2 x PP2"])
def test_killed(jobs: Jobs, tp: int, pp: int, extra: str) -> None:  # fmt: skip
    flags = (*Grid(tp=tp, pp=pp, steps=4).flags, *FURTHER.split(), *extra.split())
    reference = jobs.undisturbed(*flags)
    kills = {7: "7@2:backward", 1: "1@4:apply"}
    if reference.layouts()[0].stages[0].width == 2:
        del kills[1]
    job = jobs.run(*flags, *inject(*kills.values()))
    assert_same_training(job, reference, sorted(kills))


@pytest.mark.parametrize("extra", [
    "", pytest.param(f"{UNTIED} {EXPERTS} {BIAS}"),
], ids=["tied", "untied experts"])  # fmt: skip
def test_stages_as_asked(jobs: Jobs, extra: str) -> None:
    """One, in which the embedding has all its uses, four, three: the head has no layer where that is faster."""
    flags = (*FURTHER.split(), *extra.split(), "--elastic-slices", "2", "--train-iters", "40")
    job = jobs.start(*flags, ranks=4)
    job.read_until(" 1/40")
    for stages in (4, 3, 2):
        scale(job, stages)
    job.finish()
    layouts = assert_same(job, jobs.undisturbed(*flags, "--pipeline-model-parallel-size", "2", ranks=4))
    for layout in layouts:
        last = [layout.units[unit] for unit in layout.stages[-1].units]
        assert {"embedding", "mtp.0", "mtp.1", "head"} <= set(last)


@pytest.mark.parametrize(("chunks", "extra", "lost"), [
    ("--num-layers-per-virtual-pipeline-stage 2", "", 7),
    ("--elastic-placement v", "", 2), ("--elastic-placement v", f"{UNTIED} {EXPERTS} {BIAS}", 2),
], ids=["loop", "v", "v, untied experts"])  # fmt: skip
def test_chunks_of_stages(jobs: Jobs, chunks: str, extra: str, lost: int) -> None:
    flags = (*Grid(tp=1, pp=2, steps=4).flags, *FURTHER.split(), *extra.split(), "--num-layers", "8")
    job = jobs.run(*flags, *chunks.split(), *inject(f"{lost}@2:backward"))
    assert_same_training(job, jobs.undisturbed(*flags), [lost])


def test_a_split_backward_adds_up_the_same(jobs: Jobs) -> None:
    """The output layer has several products, which autograd would add up."""
    flags = (*Grid(tp=1, pp=2, steps=3).flags, *FURTHER.split(), *UNTIED.split())
    split = jobs.run(*flags, "--elastic-schedule", "split", "--overlap-grad-reduce")
    assert cli.main(["compare", str(split.run_dir), str(jobs.undisturbed(*flags).run_dir)]) == 0


def test_contexts_change_losses_by_rounding_only(jobs: Jobs) -> None:
    """The next token may be another rank's, and tokens that count are those of all ranks."""
    flags = (*Grid(tp=1, pp=2, steps=4).flags, *WITHOUT_DROPOUT, *FURTHER.split())
    assert_contexts_round_only(jobs, *flags)


@pytest.mark.parametrize("extra", ["", UNTIED], ids=["tied", "untied"])
def test_checkpoints(jobs: Jobs, tmp_path: Path, extra: str) -> None:
    """Saved by two stages, loaded by one, and as Megatron names things."""
    flags = (*Grid(tp=1, pp=2, steps=6).flags, *FURTHER.split(), *extra.split())
    reference = jobs.run(*flags, "--save", str(tmp_path), "--save-interval", "3", ranks=4)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    rest = jobs.run(*flags, "--pipeline-model-parallel-size", "1", "--load", str(tmp_path), ranks=4)
    theirs = reference.metrics()
    assert [line["loss_hex"] for line in rest.metrics().values()] == [theirs[step]["loss_hex"] for step in (4, 5, 6)]
    saved = tensors(tmp_path / "iter_0000003")
    assert {name for name in saved if "eh_proj" in name and not name.startswith("optimizer.")} == {
        f"mtp.layers.{layer}.eh_proj.weight" for layer in (0, 1)
    }
