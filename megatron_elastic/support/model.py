"""Model: whether layers, experts and what computes them can be as flags say that Megatron has parsed."""

from __future__ import annotations

import argparse
import importlib.util
import os

from megatron_elastic import usage
from megatron_elastic.config import UsageError
from megatron_elastic.device import visible
from megatron_elastic.layout import LayoutError
from megatron_elastic.plan.split import split


def check_split(args: argparse.Namespace) -> None:
    """Raise UsageError if layers cannot be split over the stages as flags say; virtual stages are counted here."""
    try:
        chunks = max(map(len, split(args)))
    except LayoutError as error:
        raise UsageError(str(error)) from None
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks


def check_cells(args: argparse.Namespace) -> None:
    """Raise UsageError if experts and contexts cannot be divided as flags say that Megatron has parsed."""
    if not getattr(args, "num_experts", None):
        return
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    if max(cp, ep) % min(cp, ep):
        raise UsageError(f"--context-parallel-size {cp} with --expert-model-parallel-size {ep} does not work with "
                         "--elastic: one must divide the other; change one of them")
    if args.expert_tensor_parallel_size not in (None, args.tensor_model_parallel_size):
        raise UsageError(f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} does not work with "
                         "--elastic: experts are cut as other layers are; leave it out")


def check_grouped(args: argparse.Namespace) -> None:
    """Raise UsageError if experts' products cannot be computed at once, as flags say."""
    if not getattr(args, "moe_grouped_gemm", False):
        return
    on = args.elastic_device or ("cuda" if visible.count(os.environ) else "cpu")
    engine = args.transformer_impl in (None, "transformer_engine") and engine_installed()
    if on in ("cpu", "soft") or not (engine or importlib.util.find_spec("grouped_gemm")):
        raise UsageError("--moe-grouped-gemm needs a GPU, and Transformer Engine or the package grouped_gemm: leave it "
                         "out, and each expert's products are computed by themselves")


def check_expert_parallel(args: argparse.Namespace) -> None:
    """Raise UsageError if ranks would be left over that share no experts, which Megatron does not check."""
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    if args.data_parallel_size * cp % ep:
        contexts = f" x --context-parallel-size {cp}" if cp > 1 else ""
        whole = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * max(cp, ep)
        raise UsageError(f"--expert-model-parallel-size {ep} does not divide the data-parallel size "
                         f"{args.data_parallel_size}{contexts}: start a multiple of {whole} processes, or change the "
                         "sizes")


def check_whole(args: argparse.Namespace) -> None:
    """Raise UsageError if micro-batches may be cut of which something looks at the whole."""
    if args.elastic_dataflow != "resize":
        return
    for flag, who in (("--num-experts", "a router looks"), ("--mtp-num-layers", "the mean of further losses looks")):
        if getattr(args, usage.dest(flag), None):
            raise UsageError(f"--elastic-dataflow resize does not work with {flag}: {who} at whole micro-batches, so "
                             "they cannot be cut; use --elastic-dataflow reroute")


def check_documents(args: argparse.Namespace) -> None:
    """Raise UsageError if documents or conversations are to be kept apart, and cannot be."""
    if args.sft and args.mtp_num_layers:
        raise UsageError("--sft with --mtp-num-layers does not work with --elastic: further predictions would look "
                         "beyond conversations; leave out one of them")
    if args.sft and (args.create_attention_mask_in_dataloader or args.reset_attention_mask or args.reset_position_ids):
        raise UsageError("--sft: Megatron's data set of conversations needs --no-create-attention-mask-in-dataloader, "
                         "and neither --reset-attention-mask nor --reset-position-ids, which conversations do anyway")
    if args.reset_attention_mask and not args.create_attention_mask_in_dataloader:
        raise UsageError("--reset-attention-mask with --no-create-attention-mask-in-dataloader does not work with "
                         "--elastic: local attention knows documents by the masks of the data; leave out one of them")


_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Of 8-bit products, those whose scales follow from what is multiplied alone."""


def engine_installed() -> bool:
    """Whether there is a Transformer Engine. It is not imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_norms(args: argparse.Namespace) -> None:
    """Raise UsageError if norms are to be fused of which there are only torch's, as on a CPU."""
    if args.transformer_impl == "local" and not args.no_persist_layer_norm and not importlib.util.find_spec("apex"):
        raise UsageError("persistent norms are Apex's, which is not installed: add --no-persist-layer-norm")


def check_engine(args: argparse.Namespace) -> None:
    """Raise UsageError if layers of Transformer Engine cannot do what flags say that Megatron has parsed."""
    if args.transformer_impl != "transformer_engine":
        return
    if not engine_installed():
        raise UsageError("--transformer-impl transformer_engine, which is Megatron-LM's default, needs Transformer "
                         "Engine, which is not installed: add --transformer-impl local")
    local, own = "use --transformer-impl local", "--transformer-impl transformer_engine"
    if getattr(args, "fp8", None) and args.fp8_recipe not in _RECIPES:
        raise UsageError(f"--fp8-format with --fp8-recipe {args.fp8_recipe} does not work with --elastic: scales that "
                         f"follow from earlier micro-batches belong to a place, not to a grain; use {_RECIPES[0]}, "
                         f"{_RECIPES[1]} or {_RECIPES[2]}")
    if args.context_parallel_size > 1:
        raise UsageError(f"--context-parallel-size with {own} does not work with --elastic: its attention finds the "
                         f"others by their places in the job, which change; {local}")
    if getattr(args, "reset_attention_mask", False) or getattr(args, "sft", False):
        raise UsageError(f"--reset-attention-mask and --sft with {own} do not work with --elastic: its attention does "
                         f"not look at masks of documents; {local}")
    if args.elastic_dataflow == "resize" and args.attention_dropout:
        raise UsageError(f"--elastic-dataflow resize with {own} needs --attention-dropout 0: its kernels draw for the "
                         f"micro-batch that they get, and not for the whole one; add that, or {local}")
    if args.num_experts and args.elastic_schedule != "1f1b":
        raise UsageError(f"--elastic-schedule {args.elastic_schedule} with --num-experts and {own} does not work: "
                         f"experts' gradients are not put off; use --elastic-schedule 1f1b, or {local}")
