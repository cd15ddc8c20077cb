"""Origin: what a job begins with, by what lies in folders of checkpoints and by Megatron's flags. No jobs."""

from __future__ import annotations

import argparse
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed import checkpoint

from megatron_elastic.adaptor.checkpoints import common, sliced, whole
from megatron_elastic.adaptor.checkpoints.folder import TRACKER, step_folder
from megatron_elastic.adaptor.checkpoints.norms import named_as_saved
from megatron_elastic.adaptor.checkpoints.origin import Origin, Start
from megatron_elastic.adaptor.training.schedules.counts import Counts
from megatron_elastic.adaptor.training.schedules.scales import LossScales
from megatron_elastic.config import UsageError
from megatron_elastic.plan.work.ramp import Phase, Ramp
from tests.jobs import ROOT

BATCH = 16
CONSTANT = Ramp(1, (Phase(1, 0, BATCH),))
FRESH = Start(0, 0, 0, 0)


def write(folder: Path, **said: Any) -> Path:
    """A checkpoint as Megatron's, of one tensor, that says so much."""
    checkpoint.save({"weight": torch.ones(100)}, checkpoint_id=folder, no_dist=True)
    torch.save(said, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


def saved(directory: Path, step: int, name: str = "", **said: Any) -> Path:
    """A checkpoint of so many steps, of which the optimizer and the learning rate have counted one less."""
    directory.mkdir(exist_ok=True)
    counted = max(step - 1, 0)
    groups = {"param_groups": [{"step": float(counted)}]}
    usual = {"iteration": step, "args": argparse.Namespace(consumed_train_samples=step * BATCH),
             "optimizer": {"optimizer": groups}, "opt_param_scheduler": {"num_steps": counted * BATCH}}  # fmt: skip
    return write(directory / (name or step_folder(directory, step).name), **{**usual, **said})


def flags(directory: Path, text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--load", "--pretrained-checkpoint"):
        parser.add_argument(name, type=lambda name: str(directory / name))
    parser.add_argument("--ckpt-step", type=int)
    for name in ("--finetune", "--no-load-optim"):
        parser.add_argument(name, action="store_true")
    return parser.parse_args(text.split())


def begun(args: argparse.Namespace, ramp: Ramp = CONSTANT) -> tuple[str | None, Start]:
    """The folder that a job begins with, and what lies behind it."""
    origin = Origin.of(args)
    start = origin.start(ramp, args.finetune, args.no_load_optim)
    return None if origin.folder is None else f"{origin.folder.parent.name}/{origin.folder.name}", start


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints; one that was converted; one of no step; one with another name than its number; and none."""
    root = tmp_path_factory.mktemp("folders")
    for step in (4, 8):
        saved(root / "two", step)
    (root / "two" / TRACKER).write_text("8\n")
    saved(root / "converted", 0, "release")
    (root / "converted" / TRACKER).write_text("release")
    saved(root / "used", 4, "release")
    (root / "used" / TRACKER).write_text("release")
    saved(root / "zero", 0)
    (root / "zero" / TRACKER).write_text("0")
    saved(root / "renamed", 7, "iter_0000005")
    (root / "renamed" / TRACKER).write_text("5")
    saved(root / "untracked", 4)
    (root / "none").mkdir()
    return root


LATER, EARLIER = Start(8, 128, 112, 7), Start(4, 64, 48, 3)


@pytest.mark.parametrize(("given", "folder", "start"), [
    ("", None, FRESH),
    ("--load none", None, FRESH),
    ("--load two", "two/iter_0000008", LATER),
    ("--load two --ckpt-step 4", "two/iter_0000004", EARLIER),
    ("--load two --finetune", "two/iter_0000008", FRESH),
    ("--load two --finetune --ckpt-step 4", "two/iter_0000004", FRESH),
    ("--load two --no-load-optim", "two/iter_0000008", Start(8, 128, 0, 0)),
    ("--load two --pretrained-checkpoint converted", "two/iter_0000008", LATER),
    ("--load none --pretrained-checkpoint two", "two/iter_0000008", FRESH),
    ("--load none --pretrained-checkpoint two --ckpt-step 4", "two/iter_0000004", FRESH),
    ("--pretrained-checkpoint converted", "converted/release", FRESH),
    ("--pretrained-checkpoint zero", "zero/iter_0000000", FRESH),
    ("--load converted", "converted/release", FRESH),
    ("--load converted --finetune", "converted/release", FRESH),
    ("--load converted --no-load-optim", "converted/release", FRESH),
    ("--load used --finetune", "used/release", FRESH),
    ("--load zero", "zero/iter_0000000", FRESH),
    ("--load zero --finetune", "zero/iter_0000000", FRESH),
    ("--load renamed", "renamed/iter_0000005", Start(7, 112, 96, 6)),
    ("--load untracked", "untracked/iter_0000004", EARLIER),
])  # fmt: skip
def test_what_a_job_begins_with(folders: Path, given: str, folder: str | None, start: Start) -> None:
    assert begun(flags(folders, given)) == (folder, start)


@pytest.mark.parametrize(("given", "why"), [
    ("--load used", r"release says that 64 samples were taken.*add --finetune"),
    ("--load converted --ckpt-step 4", "says release, which has no number: leave it out, or write 4 into that file"),
    ("--load two --ckpt-step 5", "there is no .*iter_0000005, or it is not complete"),
    ("--pretrained-checkpoint none", "none: there is no checkpoint"),
    ("--load none --pretrained-checkpoint none", "none: there is no checkpoint"),
])  # fmt: skip
def test_what_no_job_begins_with(folders: Path, given: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        begun(flags(folders, given))


@pytest.mark.parametrize("optimizer", [
    {"optimizer": {"param_groups": [{"step": 5.0}, {"step": 5.0}]}},
    {0: {"optimizer": {"param_groups": [{"step": 5}]}}, 1: {"optimizer": {"param_groups": [{}]}}},
    {"optimizer": {"param_groups": [{}], "state": {"common_step": torch.tensor(5.0)}}},
    {"param_groups": [{}], "state": {"common_step": torch.tensor(5.0)}},
], ids=["sharded", "experts apart", "half precision", "fp32"])  # fmt: skip
def test_adams_step_has_a_field_of_its_own(optimizer: dict[Any, Any]) -> None:
    assert common.updates({"optimizer": optimizer}, 9) == 5
    assert common.updates({"optimizer": {"optimizer": {"param_groups": [{}]}}}, 9) == 9


def test_what_lies_behind_a_step() -> None:
    """Of a job that has left out one of its own steps, and has begun where the optimizer had done less."""
    args = argparse.Namespace(iterations_to_skip=[2, 9], global_batch_size=BATCH)
    counts = Counts(args, LossScales(None), LATER)
    assert [counts.number(step) for step in (9, 10, 11, 12)] == [8, 9, 9, 10]
    assert [counts.counted(step, CONSTANT) for step in (9, 10, 11, 12)] == [112, 128, 128, 144]
    assert counts.skips(3) and counts.skips(10) and not counts.skips(9)
    assert counts.first == LATER.done + 1
    args.iterations_to_skip = [LATER.done]
    assert Counts(args, LossScales(None), LATER).first == LATER.done + 2


def test_who_came_later_counts_as_the_others_do() -> None:
    """Whatever it finds in ``--load``, where another job may have saved since: all must end at the same step."""
    args = argparse.Namespace(global_batch_size=BATCH)
    those_of_the_start, late = (Counts(args, LossScales(None), start) for start in (LATER, None))
    assert not those_of_the_start.trained(LATER.done)
    for done in range(LATER.done + 1, LATER.done + 20):
        assert those_of_the_start.trained(done) and late.trained(done)


GROWING = Ramp.growing(4, 4, 4, 24, BATCH)


@pytest.mark.parametrize(("ramp", "done", "samples", "before"), [
    (CONSTANT, 4, 64, 64), (CONSTANT, 4, 40, 40), (CONSTANT, 4, 65, None),
    (GROWING, 3, 16, 16), (GROWING, 3, 12, None), (GROWING, 9, 80, 80),
])  # fmt: skip
def test_going_on_after_batches_that_grew(ramp: Ramp, done: int, samples: int, before: int | None) -> None:
    """Data begin where they ended, whatever batches were; but not where the data would not last."""
    since = ramp.since(done, samples)
    assert (None if since is None else since.before(done + 1)) == before
    if since is not None and samples > ramp.span:
        assert since.before(done + 3) == samples + 2 * BATCH


def test_docs_name_a_test_for_each_row() -> None:
    tests = Path(__file__).parent
    text = (ROOT / "docs" / "megatron.md").read_text()
    sources = (tests / "test_origin.py").read_text(), (tests / "test_loading.py").read_text()
    table = text.partition("### What a job begins with")[2].partition("\n*Italic*")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"[*`]([^*`]+)[*`]", row[3])
        assert named and len(row) == 4, row
        for name in named:
            shown = f"def {name}(" if name.startswith("test_") else f'("{name}", ' if name[0] == "-" else f'"{name}": ('
            assert any(shown in source for source in sources), name


def test_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    """Is named, with what is wrong, and so is the one before it."""
    saved(tmp_path, 4)
    for name, damage, why in (
        ("__0_0.distcp", "cut", "__0_0.distcp was cut short: it has"), ("__0_0.distcp", "gone", "lacks the file __0_0"),
        ("common.pt", "gone", r"is no complete checkpoint \(no common.pt\)"), ("common.pt", "cut", "cannot be loaded"),
        (".metadata", "cut", "cannot be loaded"), ("metadata.json", "gone", r"no complete checkpoint \(no metadata.j"),
    ):  # fmt: skip
        folder = saved(tmp_path, 8)
        path = folder / name
        content = path.read_bytes()
        path.unlink()
        if damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        with pytest.raises(UsageError, match=f"^--load X: .*{why}.*write 4 into .*{TRACKER}"):
            Origin(folder, "--load X").start(CONSTANT, tuned=False, begins_optimizer=False)
        shutil.rmtree(folder)
    with pytest.raises(UsageError, match=r"there is no .*iter_0000008; .*write 4 into"):
        whole.check(folder, "--load X")


def test_who_comes_later_need_not_find_what_the_job_began_with(folders: Path) -> None:
    """``--save-retain-interval`` may have deleted it, once there was a newer one."""
    args = flags(folders, "--load two --ckpt-step 5")
    with pytest.raises(UsageError, match=r"there is no .*iter_0000005"):
        Origin.of(args)
    late = Origin.of(args, begins=False)
    assert (late.folder, late.step) == (folders / "two" / "iter_0000005", 5)


def test_one_rank_looks_at_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there are as many as ranks; the others take its word, and look at the few that they read at once."""
    folder = saved(tmp_path, 8)
    expected = Start(8, 8 * BATCH, 7 * BATCH, 7)
    origin, reader = Origin(folder, "--load X"), MagicMock(wraps=checkpoint.FileSystemReader)
    monkeypatch.setattr(whole, "FileSystemReader", reader)
    assert origin.start(CONSTANT, tuned=False, begins_optimizer=False, files=False) == expected
    reader.assert_not_called()
    assert origin.start(CONSTANT, tuned=False, begins_optimizer=False) == expected
    reader.assert_called_once_with(folder)


@pytest.mark.parametrize(("files", "name"), [(("mp_rank_00/model_optim_rng.pt",), "torch"),
                                             ((".metadata", "__0_0.distcp"), "torch_dcp")])  # fmt: skip
def test_other_formats_are_told_with_what_converts_them(tmp_path: Path, files: tuple[str, ...], name: str) -> None:
    for file in files:
        path = tmp_path / "iter_0000004" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(UsageError) as refused:
        whole.check(tmp_path / "iter_0000004", "--load X")
    assert f"--ckpt-format {name} --load {tmp_path} --ckpt-convert-format torch_dist" in str(refused.value)
    assert "--dist-ckpt-optim-fully-reshardable, and give --load NEW/torch_dist" in str(refused.value)
    assert ("fsdp_dtensor" in str(refused.value)) == (name == "torch_dcp")


@pytest.mark.parametrize(("ours", "theirs"), [
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
    ("self_attention.kv_layernorm.bias", "self_attention.linear_kv_up_proj.layer_norm_bias"),
    ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
])  # fmt: skip
def test_norms_have_two_names(ours: str, theirs: str) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    for here, there in ((ours, theirs), (theirs, ours)):
        entry = ShardedTensor.from_rank_offsets(f"decoder.layers.{here}", torch.ones(2))
        for saved_as in (there, here):
            (found,) = named_as_saved({"norm": entry}, {f"decoder.layers.{saved_as}"}).values()
            assert found.key == f"decoder.layers.{saved_as}"


def test_the_first_parameter_that_differs_is_named(tmp_path: Path) -> None:
    there = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(4, 16)),
             "v": ShardedTensor.from_rank_offsets("v", torch.zeros(128, 16), allow_shape_mismatch=True)}
    alike = [*there.values(), ShardedTensor.from_rank_offsets("v", torch.zeros(256, 16), allow_shape_mismatch=True)]
    sliced._compare(tmp_path / "iter_0000004", alike, there)
    for key, shape, message in (
        ("a", (4, 32), r"a has the shape \[4, 16\] there, and these flags make it \[4, 32\]; give the flags"),
        ("b", (8,), r"b is missing there, and these flags make it \[8\]"),
    ):
        other = ShardedTensor.from_rank_offsets(key, torch.zeros(shape))
        with pytest.raises(UsageError, match=rf"^--load {tmp_path}: \S+iter_0000004 is of another model: {message}"):
            sliced._compare(tmp_path / "iter_0000004", [*alike, other], there)
