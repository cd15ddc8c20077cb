"""Checkpoints go both ways: what plain training saves starts an elastic job, and the other way."""

from __future__ import annotations

import enum
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_elastic.adaptor.checkpoints import common
from tests.jobs import MODEL, Jobs
from tests.models.test_plain import metrics, train

COMMON = f"{MODEL} --train-iters 6 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"


def losses(run_dir: Path) -> dict[int, float]:
    return {step: float.fromhex(str(line["loss_hex"])) for step, line in metrics(run_dir).items()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint has of weights and optimizer, by Megatron's names."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
             for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
    checkpoint.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


class Kind(enum.Enum):
    """Written as Python 3.11.0 to 3.11.3 write a member."""

    LOCAL = 1

    def __reduce_ex__(self, protocol: object) -> Any:
        return getattr, (Kind, self.name)


class Attribute:
    """Written as an attribute of something else."""

    def __reduce__(self) -> Any:
        return getattr, (Namespace, "__init__")


def test_enumerations_are_read_however_they_were_written(tmp_path: Path) -> None:
    common.allow_enums()
    with torch.serialization.safe_globals([Kind]):  # the others are Megatron's, and torch would forget them afterwards
        torch.save(Namespace(kind=Kind.LOCAL, signal=signal.SIGTERM), tmp_path / "flags.pt")
        found = torch.load(tmp_path / "flags.pt", weights_only=True)
        assert found.kind is Kind.LOCAL and found.signal is signal.SIGTERM
        torch.save(Attribute(), tmp_path / "other.pt")
        with pytest.raises(TypeError, match="which is no enumeration"):
            torch.load(tmp_path / "other.pt", weights_only=True)


@pytest.mark.parametrize("precision", [
    "", pytest.param("--bf16"),
    pytest.param("--fp16 --initial-loss-scale 4194304 --loss-scale-window 2 --hysteresis 1"),
], ids=["fp32", "bf16", "fp16"])  # fmt: skip
def test_plain_elastic_plain(jobs: Jobs, tmp_path: Path, precision: str) -> None:
    """PP2, then TP2 x PP2 with --elastic, then TP2. As if it had been plain from beginning to end."""
    flags = f"{COMMON} {precision}"
    plain, elastic, again = (tmp_path / name for name in ("plain", "elastic", "again"))
    done = train(jobs.data, 2, f"{flags} --pipeline-model-parallel-size 2 --save {plain} --save-interval 2 "
                               f"--elastic-run-dir {tmp_path / 'whole'}")
    assert done.returncode == 0, done.stderr
    whole = losses(tmp_path / "whole")
    (plain / "latest_checkpointed_iteration.txt").write_text("2")
    job = jobs.run(
        *flags.split(), "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2",
        "--load", str(plain), "--save", str(elastic), "--save-interval", "2", ranks=4,
    )  # fmt: skip
    tolerance = 1e-2 if precision else 1e-5
    assert losses(job.run_dir) == pytest.approx({step: whole[step] for step in (3, 4, 5, 6)}, rel=tolerance)
    ours, theirs = tensors(elastic / "iter_0000004"), tensors(plain / "iter_0000004")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].float() == pytest.approx(tensor.float(), rel=tolerance, abs=tolerance), name
    (elastic / "latest_checkpointed_iteration.txt").write_text("4")
    done = train(jobs.data, 2, f"{flags} --tensor-model-parallel-size 2 --load {elastic} --elastic-run-dir {again}")
    assert done.returncode == 0, done.stderr
    assert losses(again) == pytest.approx({step: whole[step] for step in (5, 6)}, rel=tolerance)


@pytest.mark.parametrize("precision", ["", "--bf16"], ids=["fp32", "bf16"])
def test_an_optimizer_that_is_not_sharded(jobs: Jobs, tmp_path: Path, precision: str) -> None:
    """PP2, then TP2 x PP2 with --elastic, then PP2 and sharded. In fp32 the weights are nowhere but in the model."""
    flags, pp2 = f"{COMMON} {precision}", "--pipeline-model-parallel-size 2"
    plain, elastic, again = (tmp_path / name for name in ("plain", "elastic", "again"))
    done = train(jobs.data, 2, f"{flags} {pp2} --no-use-distributed-optimizer --save {plain} --save-interval 2 "
                               f"--elastic-run-dir {tmp_path / 'whole'}")
    assert done.returncode == 0, done.stderr
    whole = losses(tmp_path / "whole")
    (plain / "latest_checkpointed_iteration.txt").write_text("2")
    job = jobs.run(*flags.split(), *pp2.split(), "--tensor-model-parallel-size", "2", "--load", str(plain),
                   "--save", str(elastic), "--save-interval", "2", ranks=4)  # fmt: skip
    tolerance = 1e-2 if precision else 1e-5
    assert losses(job.run_dir) == pytest.approx({step: whole[step] for step in (3, 4, 5, 6)}, rel=tolerance)
    ours, theirs = tensors(elastic / "iter_0000004"), tensors(plain / "iter_0000004")
    assert any("fp32_param" in name for name in theirs) == bool(precision)
    for name, tensor in theirs.items():
        found = ours[name.replace("fp32_param", "param")]
        assert found.float() == pytest.approx(tensor.float(), rel=tolerance, abs=tolerance), name
    (elastic / "latest_checkpointed_iteration.txt").write_text("4")
    done = train(jobs.data, 2, f"{flags} {pp2} --load {elastic} --elastic-run-dir {again}")
    assert done.returncode == 0, done.stderr
    assert losses(again) == pytest.approx({step: whole[step] for step in (5, 6)}, rel=tolerance)
