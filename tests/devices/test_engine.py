"""Layers of Transformer Engine: its own Python, over a library made of software (``tests.engine``), in elastic jobs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elastic import support
from megatron_elastic.adaptor import doctor
from megatron_elastic.config import UsageError
from tests import engine
from tests.jobs import MODERN, SEARCHED, Job, Jobs, assert_same_training, inject
from tests.models import test_numbers
from tests.models.test_checkout import CheckoutJobs, assert_same, checkout, grid, needs_checkout, patched, search_path

__all__ = ["checkout", "patched"]
needs_engine = pytest.mark.skipif(bool(engine.missing()), reason=engine.missing())
RANKS = 4
ENGINE = ("--transformer-impl", "transformer_engine")
PP2 = ("--pipeline-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2")
SPLIT = ("--elastic-schedule", "split")
ROPE = ("--position-embedding-type", "rope")
LATENT = ("--multi-latent-attention", *ROPE, "--sequence-parallel", "--qk-layernorm", "--qk-head-dim", "16",
          "--qk-pos-emb-head-dim", "8", "--v-head-dim", "10")  # fmt: skip
TOLERANCE = 1e-5
"""Norms of the software library round otherwise than torch's."""


def environment(folder: Path, path: str) -> dict[str, str]:
    """That of a job that finds Transformer Engine, put together in an empty folder, beside what is in ``path``."""
    return {**engine.provide(folder), "PYTHONPATH": f"{folder}:{path}"}


class EngineJobs:
    """Starts jobs of four ranks that find Transformer Engine, and remembers undisturbed ones."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self._jobs = jobs
        self._env = environment(folder, SEARCHED)
        self._baselines: dict[tuple[str, ...], Job] = {}

    def start(self, *flags: str) -> Job:
        """Start a job."""
        return self._jobs.start("--train-iters", "4", *flags, ranks=RANKS, env=self._env)

    def run(self, *flags: str) -> Job:
        """Run a job to its end, which must be a good one."""
        job = self.start(*flags)
        job.finish()
        return job

    def undisturbed(self, *flags: str) -> Job:
        """The job with these flags and without faults; run once for all tests."""
        if flags not in self._baselines:
            self._baselines[flags] = self.run(*flags)
        return self._baselines[flags]


@pytest.fixture(scope="module")
def engine_jobs(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> EngineJobs:
    return EngineJobs(jobs, tmp_path_factory.mktemp("engine"))


@pytest.mark.job
@needs_engine
@pytest.mark.parametrize(
    ("flags", "besides", "kills"),
    [
        pytest.param(PP2, SPLIT, ("1@2:backward_weight", "2@3:backward"), id="PP2, split"),
        pytest.param(PP2, (), ("2@2:forward", "1@3:vote"), id="PP2"),
        pytest.param((*TP2, *MODERN.split()), (), ("3@3:grad_sync",), id="TP2, modern"),
        pytest.param((*TP2, *MODERN.split()), SPLIT, ("0@2:backward_weight",), id="TP2, modern, split"),
        pytest.param((*TP2, "--fp16"), (), ("1@2:backward",), id="TP2, fp16"),
        pytest.param(PP2, ("--recompute-granularity", "full"), ("3@2:backward",), id="PP2, recomputed"),
        pytest.param((*TP2, "--qk-layernorm"), ("--recompute-granularity", "selective"), ("3@2:backward",),
                     id="TP2, attention recomputed"),
        pytest.param((*TP2, *LATENT), SPLIT, ("2@2:backward",), id="TP2, latent attention, split"),
        pytest.param((*PP2, *ROPE, "--mtp-num-layers", "1"), SPLIT, ("3@2:backward",), id="PP2, further tokens, split"),
        pytest.param((*PP2, "--num-experts", "4"), (), ("3@2:backward",), id="PP2, experts"),
        pytest.param(("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type",
                      "alltoall"), (), ("3@2:backward",), id="EP2"),
    ],
)  # fmt: skip
def test_kills(
    engine_jobs: EngineJobs, flags: tuple[str, ...], besides: tuple[str, ...], kills: tuple[str, ...]
) -> None:
    """Neither they nor the order of work, nor that it is done twice, change a bit."""
    killed = engine_jobs.run(*ENGINE, *flags, *besides, *inject(*kills))
    assert_same_training(killed, engine_jobs.undisturbed(*ENGINE, *flags), lost=sorted(int(kill[0]) for kill in kills))


@pytest.mark.job
@needs_engine
@pytest.mark.parametrize("grid", [PP2, TP2], ids=["PP2", "TP2"])
def test_newcomers(engine_jobs: EngineJobs, grid: tuple[str, ...]) -> None:
    """Layers that are built anew, and filled by others, are those that were lost."""
    flags = (*ENGINE, *grid, "--num-layers", "2", "--train-iters", "60")
    job = engine_jobs.start(*flags, "--elastic-respawn", *inject("3@3:backward"))
    job.read_until("slices and grains are even over 4 ranks")
    job.finish()
    assert_same_training(job, engine_jobs.undisturbed(*flags), lost=[3])
    assert len(job.layouts()[-1].ranks) == RANKS


@needs_engine
@pytest.mark.parametrize("flags", [PP2, (*TP2, "--sequence-parallel", *ROPE)], ids=["PP2", "TP2"])
def test_local_layers(jobs: Jobs, engine_jobs: EngineJobs, flags: tuple[str, ...], tmp_path: Path) -> None:
    """Either go on with what the others have saved, and have their losses but for rounding; dropout is the same."""

    def losses(job: Job, first: int) -> list[float]:
        return [line["loss"] for step, line in job.metrics().items() if step >= first]

    def ends(steps: int, *more: str) -> tuple[str, ...]:
        return (*flags, "--train-iters", str(steps), *more)

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    jobs.run(*ends(2, "--save", first), ranks=RANKS)
    local = jobs.run(*ends(6, "--load", first), ranks=RANKS)
    mine = engine_jobs.run(*ENGINE, *ends(4, "--load", first, "--save", second))
    assert losses(mine, 3) == pytest.approx(losses(local, 3)[:2], rel=TOLERANCE)
    assert losses(mine, 3) != losses(local, 3)[:2], "these were the same layers"
    again = jobs.run(*ends(6, "--load", second), ranks=RANKS)
    assert losses(again, 5) == pytest.approx(losses(local, 5), rel=TOLERANCE)
    moved = engine_jobs.run(*ENGINE, "--train-iters", "6", "--load", second, *flags[2:], *PP2, *TP2)
    assert losses(moved, 5) == pytest.approx(losses(local, 5), rel=TOLERANCE)


@needs_checkout
@needs_engine
@pytest.mark.parametrize("name", ["latent attention", "latent attention, no latent queries", "DeepSeek-like"])
def test_latent_attention_over_tensor_ranks(patched: CheckoutJobs, tmp_path: Path, name: str) -> None:
    """Losses and norms of gradients are those of one rank: the key that all heads share gets all of its gradient."""
    env, saved = environment(tmp_path, search_path()), str(tmp_path / "saved")
    model = (*test_numbers.FLAGS, *ENGINE, *test_numbers.ROWS[name].split())

    def run(*flags: str, ranks: int) -> Job:
        job = patched.start(*model, *flags, ranks=ranks, env=env)
        job.finish()
        return job

    alone = run("--save", saved, "--save-interval", "1", ranks=1)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("1")
    split = test_numbers.TP2.split()
    layouts = {"TP2": split, "TP2, SP": [*split, "--sequence-parallel"], "PP2": PP2}
    gaps = {layout: test_numbers.gap(run("--load", saved, *flags, ranks=2), alone)
            for layout, flags in layouts.items() if layout != "TP2" or "--num-experts" not in model}  # fmt: skip
    assert {layout: value for layout, value in gaps.items() if value > test_numbers.TOLERANCE} == {}, gaps


@needs_checkout
@needs_engine
@pytest.mark.parametrize(
    ("tp", "pp", "flags"),
    [(1, 2, SPLIT), (2, 1, ("--sequence-parallel", "--bf16", "--swiglu", *ROPE, "--no-rope-fusion"))],
    ids=["PP2, split", "TP2, modern"],
)
def test_megatrons_own_script(
    patched: CheckoutJobs, tp: int, pp: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """With its parser's defaults for everything that Transformer Engine has."""
    env = environment(tmp_path, search_path())
    usual = (*grid(tp, pp, 4), *ENGINE, *flags)
    jobs = [patched.start(*usual, *kills, ranks=RANKS, env=env) for kills in ((), inject("3@2:backward"))]
    for job in jobs:
        job.finish()
    assert_same(*jobs)
    assert [job.layouts()[-1].lost for job in jobs] == [(), (3,)]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "use tensorwise, blockwise or mxfp8"),
        ({"context_parallel_size": 2}, "its attention finds the others"),
        ({"reset_attention_mask": True}, "masks of documents"),
        ({"sft": True}, "masks of documents"),
        ({"elastic_dataflow": "resize"}, "needs --attention-dropout 0"),
        ({"num_experts": 4, "elastic_schedule": "split"}, "use --elastic-schedule 1f1b"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, flags: dict[str, object], reason: str) -> None:
    """What Transformer Engine's layers cannot do, and others can."""
    args = argparse.Namespace(
        transformer_impl="transformer_engine", context_parallel_size=1, attention_dropout=0.1, num_experts=None,
        elastic_dataflow="reroute", elastic_schedule="1f1b", fp8="e4m3", fp8_recipe="tensorwise",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(support.model, "engine_installed", lambda: False)
        with pytest.raises(UsageError, match="is not installed: add --transformer-impl local"):
            support.check_engine(args)
    monkeypatch.setattr(support.model, "engine_installed", lambda: True)
    support.check_engine(args)
    vars(args).update(flags)
    with pytest.raises(UsageError, match=reason):
        support.check_engine(args)
    args.transformer_impl = "local"
    support.check_engine(args)


@needs_engine
def test_doctor_looks_at_it(tmp_path: Path) -> None:
    """At its Python only, which is not imported; also where something is missing."""
    assert [finding for finding in doctor.examine_engine(engine.WHEEL) if finding.problem] == []
    (tmp_path / "transformer_engine").mkdir()
    assert {finding.problem for finding in doctor.examine_engine(tmp_path)} == {"there is no such module"}


@pytest.mark.parametrize(
    ("version", "missing"),
    [("2.2.0", {"WeightGradStore", "DotProductAttention"}), ("2.5.0", set()), ("2.11.0", set()), ("2.20.2", set())],
)
def test_which_releases_fit(version: str, missing: set[str], tmp_path: Path) -> None:
    """Of those that are published."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--target", str(tmp_path), f"transformer_engine=={version}"]  # fmt: skip
    subprocess.run(command, check=True)
    misfits = {finding.target.name for finding in doctor.examine_engine(tmp_path) if finding.problem}
    assert {name.partition(".")[0] for name in misfits} == missing
