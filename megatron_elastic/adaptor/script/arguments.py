"""``megatron.training.arguments``: Megatron's own parser and checks, with our flags among its own."""

from __future__ import annotations

import argparse
import io
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from megatron_elastic import profiles
from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.checkpoints import whole
from megatron_elastic.adaptor.checkpoints.common import allow_enums
from megatron_elastic.adaptor.checkpoints.folder import newest_folder
from megatron_elastic.adaptor.checkpoints.origin import Origin
from megatron_elastic.config import UsageError, add_elastic_arguments
from megatron_elastic.emulation import profile as emulation
from megatron_elastic.support import (
    check_at_least,
    check_batch,
    check_cells,
    check_documents,
    check_engine,
    check_expert_parallel,
    check_faults,
    check_grouped,
    check_length,
    check_namespace,
    check_norms,
    check_ramp,
    check_rates,
    check_schedule,
    check_split,
    check_trace,
    check_whole,
    engine_installed,
)

Parser = argparse.ArgumentParser

_FROM_ONE = (
    "num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings", "micro_batch_size",
    "global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "eval_interval", "log_interval", "make_vocab_size_divisible_by",
)  # fmt: skip
_FROM_NONE = ("train_iters", "train_samples", "eval_iters", "save_interval", "num_workers", "clip_grad", "lr")
"""Arguments that must be at least 1, and at least 0."""


def parse(
    extra: Callable[[Parser], Parser] | None = None, defaults: Mapping[str, Any] | None = None
) -> argparse.Namespace:
    """Megatron's arguments from the command line, checked by Megatron and for what works with ``--elastic``.

    ``extra`` adds a script's own flags, ``defaults`` hold where neither the command line nor the parser says anything,
    both as Megatron's ``pretrain`` takes them. Raises UsageError where Megatron prints its usage or fails an assertion.
    """

    def provide(parser: Parser) -> Parser:
        return add_elastic_arguments(parser if extra is None else extra(parser))

    with usage_errors():
        args: argparse.Namespace = targets.PARSE.find()(provide)
        _take_over(args, defaults or {})
        check_namespace(args)
        _check_counts(args)
        background, args.sequence_parallel_asked = args.async_save, args.sequence_parallel
        targets.VALIDATE.find()(args, dict(defaults or {}))
        args.async_save = background  # Megatron turns it off without --use-persistent-ckpt-worker; here a thread writes
    _check(args)
    return args


def _take_over(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Let a checkpoint say what the model is, if that is asked for (``--use-checkpoint-args``)."""
    # Without that flag a job begins anew; queued again with the same flags, it finds what it saved.
    if args.exit_on_missing_checkpoint and args.load and newest_folder(Path(args.load)) is None:
        raise UsageError(f"--load {args.load}: there is no checkpoint, and --exit-on-missing-checkpoint is given")
    if not (args.use_checkpoint_args or defaults.get("use_checkpoint_args")):
        return
    if not (args.load or args.pretrained_checkpoint):
        raise UsageError("--use-checkpoint-args needs a checkpoint: add --load or --pretrained-checkpoint")
    allow_enums()
    origin = Origin.of(args)
    if origin.folder is not None:
        whole.check(origin.folder, origin.flag, files=args.rank == 0)
    for load in ("pretrained_checkpoint", "load"):
        targets.CHECKPOINT_ARGS.find()(args, load_arg=load)


def _check_counts(args: argparse.Namespace) -> None:
    """Numbers by which Megatron divides, or of which it makes nothing, wherever it finds that out."""
    for limit, names in ((1, _FROM_ONE), (0, _FROM_NONE)):
        check_at_least(limit, **{name: getattr(args, name, None) for name in names})


def _check(args: argparse.Namespace) -> None:
    """What Megatron does not look at, or only later."""
    check_engine(args)
    check_norms(args)
    if args.rampup_batch_size is None:
        check_batch(args)
    check_length(args)
    check_rates(args)
    if args.gradient_accumulation_fusion:
        raise UsageError("gradient accumulation fusion adds up in Megatron's buffers, and --elastic in slices: add "
                         "--no-gradient-accumulation-fusion")
    if args.position_embedding_type != "learned_absolute" and args.apply_rope_fusion and not engine_installed():
        raise UsageError("rotary embeddings are fused by Transformer Engine, which is not installed: add "
                         "--no-rope-fusion")
    check_split(args)
    if args.elastic_placement == "v" and args.tensor_model_parallel_size > 1:
        raise UsageError("--elastic-placement v with --tensor-model-parallel-size above 1 does not work with Megatron-"
                         "LM's own scripts: they give tensor-parallel ranks no labels in the first stage, where a V "
                         "ends; leave one of them out")
    check_expert_parallel(args)
    check_cells(args)
    check_grouped(args)
    check_whole(args)
    check_ramp(args)
    check_schedule(args)
    check_documents(args)
    if args.eval_interval is None:
        raise UsageError("--eval-interval is needed, because Megatron counts samples by it: add it")
    check_faults(args)
    check_trace(args)
    emulation.check(args, args.world_size)
    profiles.check_units(args, args.world_size)


def install() -> None:
    """Let parsers of this process raise UsageError, instead of printing all their flags into a rank's log."""

    def refuse(_: Parser, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].lower()}{message[1:]}")

    Parser.error = refuse  # type: ignore[assignment, method-assign]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn what Megatron does about bad flags into UsageError: failing assertions, and ``exit()`` after a line."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    except SystemExit as ending:
        *_, last = ["without a word", *said.getvalue().strip().splitlines()]
        raise UsageError(f"Megatron ends at these flags: {last}") from ending
    except (AssertionError, ValueError, RuntimeError, OSError, ImportError) as error:
        raise refusal(error) from error
    finally:
        print(said.getvalue(), end="")


def refusal(error: Exception) -> UsageError:
    """What Megatron has raised about bad flags, in one line."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    frame = next((frame for frame in frames if "megatron" in Path(frame.filename).parts), frames[0])
    what = " ".join(str(error).split()) or f"this must hold: {frame.line}"
    return UsageError(f"Megatron refuses these flags ({os.path.basename(frame.filename)}:{frame.lineno}): {what}")
