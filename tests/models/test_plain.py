"""The plain job, with real processes: it learns, and it goes on from a checkpoint exactly where it was."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elastic.adaptor.dataset import prepare
from megatron_elastic.observe.records import read_events
from megatron_elastic.observe.run import Run
from megatron_elastic.observe.status import status
from tests.jobs import SEARCHED

pytestmark = pytest.mark.job

ROOT = Path(__file__).parents[2]
MODEL = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
         "--global-batch-size 8 --lr 5e-3 --lr-decay-style constant --log-interval 1 --seed 7")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    prepare(out, [Path(email.__file__).parent], vocab_size=400)
    return out


def train(data: Path, ranks: int, extra: str) -> subprocess.CompletedProcess[str]:
    """Run the example under torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCHED}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(ROOT / "examples" / "pretrain_gpt.py"), "--data-path", str(data), *MODEL.split(), *extra.split()],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def metrics(run_dir: Path) -> dict[int, dict[str, object]]:
    """Metrics lines by step, without how long the steps took."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {k: v for k, v in line.items() if k not in ("step_ms", "tokens_per_s")} for line in lines}


def test_loss_falls(data: Path, tmp_path: Path) -> None:
    done = train(data, 2, "--pipeline-model-parallel-size 2 --train-iters 12 --eval-interval 6 --eval-iters 1 "
                          f"--split 8,1,1 --elastic-run-dir {tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "validation loss at iteration 6 | lm loss: " in done.stdout
    assert "test loss at iteration 12 | lm loss: " in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith(" iteration")]
    steps = metrics(tmp_path)
    assert len(lines) == len(steps) == 12
    losses = [float.fromhex(str(steps[i]["loss_hex"])) for i in range(1, 13)]
    assert f"lm loss: {losses[-1]:.6E}" in lines[-1]
    assert losses[-1] < losses[0] - 0.5
    assert steps[12]["consumed_samples"] == 96
    seen = status(Run.of_folder(tmp_path))
    assert (seen["state"], seen["reason"]) == ("finished", "training finished at step 12")
    assert (seen["step"], seen["total_steps"]) == (12, 12)


@pytest.mark.parametrize("layout", [
    pytest.param("--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"),
    pytest.param("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                 "--untie-embeddings-and-output-weights --bf16"),
    pytest.param("--tensor-model-parallel-size 2 --recompute-granularity full"),
])  # fmt: skip
def test_resume_is_exact(data: Path, tmp_path: Path, layout: str) -> None:
    common = f"{layout} --train-iters 6 --eval-iters 0"
    whole = train(data, 4, f"{common} --save {tmp_path} --save-interval 3 --elastic-run-dir {tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "6"
    tracker.write_text("3")
    resumed = train(data, 4, f"{common} --load {tmp_path} --elastic-run-dir {tmp_path / 'resumed'}")
    assert resumed.returncode == 0, resumed.stderr
    expected = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "resumed") == {step: expected[step] for step in (4, 5, 6)}
    started, finished = read_events(tmp_path / "resumed")
    assert (started["kind"], started["world_size"], started["step"], started["train_iters"]) == ("started", 4, 3, 6)
    assert finished["kind"] == "finished"


def test_uneven_stages(data: Path, tmp_path: Path) -> None:
    """Megatron gets the flags that say which layers a stage has."""
    common = "--train-iters 4 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
    for layers, pp, split in ((2, 4, "--pipeline-model-parallel-layout E|t|t|L"),
                              (3, 2, "--decoder-last-pipeline-num-layers 1")):
        found = []
        for ranks, flags in ((1, ""), (pp, f"--pipeline-model-parallel-size {pp} {split}")):
            run_dir = tmp_path / f"{layers}-{ranks}"
            done = train(data, ranks, f"{common} --num-layers {layers} {flags} --elastic-run-dir {run_dir}")
            assert done.returncode == 0, done.stderr
            found.append([float.fromhex(str(line["loss_hex"])) for line in metrics(run_dir).values()])
        assert found[0] == pytest.approx(found[1], rel=0.02), "other initial weights, and no more"


def test_resume_under_another_layout(data: Path, tmp_path: Path) -> None:
    common = "--train-iters 6 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
    whole = train(data, 4, f"{common} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
                           f"--save {tmp_path} --save-interval 3 --elastic-run-dir {tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = train(data, 2, f"{common} --load {tmp_path} --elastic-run-dir {tmp_path / 'resumed'}")
    assert resumed.returncode == 0, resumed.stderr
    expected, found = metrics(tmp_path / "whole"), metrics(tmp_path / "resumed")
    for step in (4, 5, 6):
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-4)
        assert found[step]["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-3)


def test_nothing_to_do(data: Path) -> None:
    """It is refused, as with ``--elastic``."""
    done = train(data, 1, "--train-iters 0 --eval-iters 0")
    assert done.returncode != 0
    assert "--train-iters must be at least 1, got 0" in done.stderr


def test_flags_that_cannot_work_end_the_job(data: Path) -> None:
    done = train(data, 1, "--train-iters 1 --num-layer 3")
    assert done.returncode != 0
    assert "pretrain_gpt.py: error: unknown flag --num-layer: did you mean --num-layers?" in done.stderr


STREAMS = """
from megatron_elastic.device import stand_in as device
device.install()
from megatron.core import tensor_parallel
from megatron_elastic.adaptor.without_cuda import stand_ins
stand_ins.apply()
import torch

class Rank:
    def __init__(self, rank): self._rank = rank
    def rank(self): return self._rank
    def size(self): return 2

def draws(seed, tp):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    tensor_parallel.model_parallel_cuda_manual_seed(seed, tp_rank=tp, ep_rank=0, etp_rank=0, force_reset_rng=True)
    outside = torch.rand(4)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(4)
    return outside.tolist(), inside.tolist(), torch.rand(4).tolist()

first, again, other = draws(3, 0), draws(3, 0), draws(3, 1)
assert first == again
assert first[0] == other[0] and first[2] == other[2] and first[1] != other[1]
assert len({tuple(part) for part in first}) == 3
"""


def test_random_streams_have_an_effect() -> None:
    """Without answers for the CUDA generator, seeds and forks silently do nothing."""
    subprocess.run([sys.executable, "-c", STREAMS], check=True, env={**os.environ, "PYTHONPATH": SEARCHED})
