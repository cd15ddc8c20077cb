"""Megatron-LM's flags with ``--elastic``: what is refused, before anything starts, and that the docs say the same."""

from __future__ import annotations

import argparse
import os
import struct
from enum import Enum
from pathlib import Path

import pytest

from megatron_elastic.adaptor.script.flags import sort
from megatron_elastic.config import UsageError
from megatron_elastic.support import (
    REFUSALS,
    WITHOUT_EFFECT,
    Refusal,
    check_arguments,
    check_batch,
    check_data,
    check_expert_parallel,
    check_length,
    check_namespace,
    check_norms,
    check_rates,
    check_schedule,
)

DOCS = Path(__file__).parents[2] / "docs"
FLAGS = (
    "--num-layers 4 --tensor-model-parallel-size 2 --context-parallel-size 1 --optimizer adam --bf16 --train-iters 3 "
    "--ckpt-format torch_dist --rerun-mode disabled --exp-avg-dtype fp32 --overlap-grad-reduce --elastic"
)


def test_what_works_is_accepted() -> None:
    check_arguments(FLAGS.split())
    check_namespace(argparse.Namespace(optimizer="adam", fp8=None, exp_avg_dtype="torch.float32"))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.flag)
def test_each_refusal(refusal: Refusal) -> None:
    """Of every flag in the table, on the command line and parsed."""
    flag = refusal.flag
    value = "7" if refusal.reads else None
    given = [*FLAGS.split(), flag, *([value] if value else [])]
    with pytest.raises(UsageError, match=f"^{flag}( 7)? does not work with --elastic: .*; .+"):
        check_arguments(given)
    with pytest.raises(UsageError, match=f"^{flag}"):
        check_namespace(argparse.Namespace(**{refusal.name: 7 if refusal.reads else True}))
    for allowed in refusal.but:
        check_namespace(argparse.Namespace(**{refusal.name: allowed}))


def test_values_compare_as_text() -> None:
    """Enumerations and lists, as Megatron's parser makes them."""

    class Mode(Enum):
        DISABLED = "disabled"
        REPORT = "report_determinism_stats"

    check_namespace(argparse.Namespace(rerun_mode=Mode.DISABLED, hierarchical_context_parallel_sizes=[]))
    with pytest.raises(UsageError, match="--rerun-mode report_determinism_stats"):
        check_namespace(argparse.Namespace(rerun_mode=Mode.REPORT))
    with pytest.raises(UsageError, match="--hierarchical-context-parallel-sizes 2 3 does not work"):
        check_namespace(argparse.Namespace(hierarchical_context_parallel_sizes=[2, 3]))


@pytest.mark.parametrize(
    ("ranks", "cp", "ep", "fits"), [(6, 1, 4, False), (8, 1, 4, True), (6, 2, 4, False), (4, 4, 2, True)]
)
def test_experts_are_shared_by_all_ranks(ranks: int, cp: int, ep: int, fits: bool) -> None:
    """None may be left over: they would compute nothing, and their samples would be nobody's."""
    args = argparse.Namespace(data_parallel_size=ranks // cp, context_parallel_size=cp, expert_model_parallel_size=ep,
                              tensor_model_parallel_size=1, pipeline_model_parallel_size=1)  # fmt: skip
    if fits:
        check_expert_parallel(args)
    else:
        with pytest.raises(UsageError, match=r"does not divide the data-parallel size .* start a multiple of 4 proc"):
            check_expert_parallel(args)


def test_learning_rates_go_by_one_of_two() -> None:
    def check(override: bool, use: bool) -> None:
        args = argparse.Namespace(override_opt_param_scheduler=override, use_checkpoint_opt_param_scheduler=use)
        check_schedule(args)

    check(True, False)
    check(False, True)
    with pytest.raises(UsageError, match=r"^--override-opt_param-scheduler .*: leave out one of them$"):
        check(True, True)


def test_what_a_learning_rate_needs() -> None:
    def check(**flags: object) -> None:
        usual = {"lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_fraction": None, "train_iters": None,
                 "train_samples": None, **{f"lr_{name}_{unit}": None for name in ("decay", "wsd_decay")
                                           for unit in ("iters", "samples")},
                 "lr_warmup_iters": 0, "lr_warmup_samples": 0}  # fmt: skip
        check_rates(argparse.Namespace(**{**usual, **flags}))

    check(train_iters=5, lr_warmup_iters=4)
    check(train_iters=5, lr_warmup_iters=5, lr_decay_iters=6)
    check(train_iters=5, lr_decay_style="WSD", lr_wsd_decay_iters=2)
    check(train_samples=5, lr_warmup_fraction=0.99)
    for flags, message in (
        ({"train_iters": 5, "lr": None}, "^--lr is needed: add it$"),
        ({"train_iters": 5, "lr_warmup_iters": 10}, "^--lr-warmup-iters 10 must be below --train-iters 5, by which "
                                                    "the learning rate has decayed: lower it, or raise that$"),
        ({"train_samples": 9, "lr_warmup_samples": 7, "lr_decay_samples": 7},
         "^--lr-warmup-samples 7 must be below --lr-decay-samples 7"),
        ({"train_iters": 5, "lr_warmup_fraction": 1.0}, "^--lr-warmup-fraction must be below 1, got 1$"),
        ({"train_iters": 5, "lr_decay_style": "WSD", "lr_wsd_decay_samples": 1},
         "^--lr-decay-style WSD needs --lr-wsd-decay-iters, how long the last decay is: add it$"),
        ({"train_samples": 9, "lr_decay_style": "WSD"}, "needs --lr-wsd-decay-samples"),
    ):
        with pytest.raises(UsageError, match=message):
            check(**flags)


def test_what_becomes_of_flags() -> None:
    parser = argparse.ArgumentParser()
    plain, vision = parser.add_argument_group("training"), parser.add_argument_group("vision")
    plain.add_argument("--seq-length", type=int)
    plain.add_argument("--optimizer", default="adam")
    plain.add_argument("--exp-avg-dtype", default="fp32")
    plain.add_argument("--dataloader-type")
    plain.add_argument("--no-manual-gc", "--manual-gc", action="store_true")
    plain.add_argument("--min-loss-scale", type=float)
    plain.add_argument("--num-workers", type=int)
    loop = "--manual-gc-interval", "--dump-param-to-param-group-map", "--distributed-timeout-seconds-after-init"
    for flag in loop:
        plain.add_argument(flag)
    vision.add_argument("--num-classes", type=int)
    assert [(flag.flag, flag.kind) for flag in sort(parser)] == [
        ("--seq-length", "passed on"), ("--optimizer", "some values"), ("--exp-avg-dtype", "refused"),
        ("--dataloader-type", "some values"), ("--no-manual-gc", "no effect"), ("--min-loss-scale", "passed on"),
        ("--num-workers", "passed on"), *((flag, "no effect") for flag in loop),
        ("--num-classes", "of other programs"),
    ]


@pytest.mark.parametrize("given", ["--load msc://bucket/dir", "--save msc://bucket/dir", "--data-path s3://bucket/data",
                                   "--pretrained-checkpoint msc://bucket/dir", "--train-data-path 0.5 a 0.5 s3://b/c"])
def test_object_stores_are_refused(given: str) -> None:
    flag, *_, place = given.split()
    with pytest.raises(UsageError, match=rf"^{flag} {place} does not work with --elastic: .* copy$"):
        check_arguments(given.split())


@pytest.mark.parametrize("flag", ["--load", "--save", "--pretrained-checkpoint", "--data-path"])
def test_names_that_are_empty_are_refused(flag: str) -> None:
    """As of a variable of the shell that is not set: it would be the folder where the job is started."""
    with pytest.raises(UsageError, match=f"^{flag}: its name is empty"):
        check_arguments([flag, ""])
    with pytest.raises(UsageError, match=f"^{flag}: its name is empty"):
        check_namespace(argparse.Namespace(**{flag.removeprefix("--").replace("-", "_"): ""}))


def test_docs_have_the_same_table() -> None:
    text = (DOCS / "megatron.md").read_text()
    for refusal in REFUSALS:
        assert f"| `{refusal.flag}`" in text, refusal.flag
        assert refusal.why in text, refusal.flag
    for flags, reason in WITHOUT_EFFECT.items():
        assert f"| {flags} | {reason} |" in text, flags


def test_all_refused_flags_are_named() -> None:
    with pytest.raises(UsageError) as caught:
        check_arguments(["--profile", "--use-megatron-fsdp", "--fp4-format", "e2m1", "--elastic"])
    (line,) = str(caught.value).splitlines()
    for flag in ("--profile", "--use-megatron-fsdp", "--fp4-format e2m1"):
        assert line.count(f"{flag} does not work with --elastic: ") == 1


def test_data_must_be_there(tmp_path: Path) -> None:
    for name in ("a.idx", "a.bin", "b.idx", "talks.jsonl"):
        (tmp_path / name).touch()
    a, b, talks = (str(tmp_path / name) for name in ("a", "b", "talks.jsonl"))
    check_data(["--data-path", "0.3", a, "0.7", a, "--elastic"])
    check_data(["--sft", "--train-data-path", talks])
    with pytest.raises(UsageError, match=f"^--valid-data-path {b}: {b}.bin does not exist; name data that are there"):
        check_data(["--train-data-path", a, "--valid-data-path", "1", b])
    with pytest.raises(UsageError, match=r"^--data-path no.jsonl: no.jsonl does not exist"):
        check_data(["--sft", "--data-path", "no.jsonl"])


@pytest.mark.parametrize(
    ("suffix", "left", "whole"), [("bin", -1, 12), ("bin", 0, 12), ("idx", -1, 74), ("idx", 34, 74), ("idx", 20, 34)]
)
def test_data_must_be_whole(tmp_path: Path, suffix: str, left: int, whole: int) -> None:
    """Who copied them in part is told before anything starts, and not when a rank comes to a text that is missing."""
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 2)
    (tmp_path / "a.idx").write_bytes(head + struct.pack("<2i2q2q", 4, 2, 0, 8, 0, 2))
    (tmp_path / "a.bin").write_bytes(bytes(12))
    place = str(tmp_path / "a")
    check_data(["--data-path", place])
    path = tmp_path / f"a.{suffix}"
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    has = path.stat().st_size
    with pytest.raises(UsageError, match=rf"^--valid-data-path {place}: {path} was cut short: it has {has} bytes of "
                                         rf"{whole}; copy"):  # fmt: skip
        check_data(["--valid-data-path", "1", place])


def test_batches_steps_and_norms() -> None:
    """What a checkout finds out late, or with a traceback."""
    args = argparse.Namespace(micro_batch_size=2, global_batch_size=6, data_parallel_size=2, rampup_batch_size=None,
                              train_iters=None, train_samples=5, transformer_impl="local", no_persist_layer_norm=False)
    with pytest.raises(UsageError, match=r"^--global-batch-size 6 is no multiple of .* = 4: use 8$"):
        check_batch(args)
    with pytest.raises(UsageError, match=r"^--train-samples 5 are too few for a step: its batch has 6"):
        check_length(args)
    args.train_samples = None
    with pytest.raises(UsageError, match=r"^--train-iters or --train-samples is needed"):
        check_length(args)
    args.train_iters = 0
    with pytest.raises(UsageError, match=r"^--train-iters must be at least 1, got 0$"):
        check_length(args)
    with pytest.raises(UsageError, match=r"add --no-persist-layer-norm$"):
        check_norms(args)
    args.no_persist_layer_norm = True
    check_norms(args)
