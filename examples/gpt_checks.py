"""What the flags of ``pretrain_gpt.py`` have to be, and what follows from them.

Importing this file imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from megatron_elastic import profiles
from megatron_elastic.adaptor.checkpoints.folder import COMPLETE, TRACKER, newest_folder, older
from megatron_elastic.adaptor.dataset import locate
from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.emulation import profile as emulation
from megatron_elastic.plan.split import split
from megatron_elastic.plan.work.ramp import Ramp
from megatron_elastic.support import (
    check_at_least,
    check_batch,
    check_cells,
    check_engine,
    check_expert_parallel,
    check_faults,
    check_length,
    check_ramp,
    check_split,
    check_trace,
    check_whole,
)


def check(args: argparse.Namespace) -> None:
    """Check flags that have been parsed, with ``world_size``, and fill in what follows. Raises UsageError."""
    _check_parallelism(args)
    _check_batches(args)
    _check_model(args)
    _check_training(args)
    _check_files(args)
    _check_elastic(args)


def _check_parallelism(args: argparse.Namespace) -> None:
    tp, pp, world = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.world_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    check_at_least(1, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
                   expert_model_parallel_size=ep)
    if cp > 1 and not args.elastic:
        raise UsageError("--context-parallel-size needs --elastic: without it, attention over several ranks is "
                         "Transformer Engine's")
    if world % (tp * pp * cp):
        contexts = f" x --context-parallel-size {cp}" if cp > 1 else ""
        raise UsageError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp}{contexts} = {tp * pp * cp} does "
            f"not divide the world size {world}: start a multiple of {tp * pp * cp} processes, or change the sizes"
        )
    args.data_parallel_size = world // (tp * pp * cp)
    check_expert_parallel(args)
    args.sequence_parallel_asked = args.sequence_parallel  # for cells of another size, while it trains
    args.sequence_parallel = args.sequence_parallel and tp > 1
    if cp > 1 and args.seq_length % (2 * cp):
        raise UsageError(f"--seq-length {args.seq_length} is not divisible by 2 x --context-parallel-size {cp}: a rank "
                         "has two chunks of each sequence")
    if args.sequence_parallel and args.seq_length // cp % tp:
        contexts = f" x --context-parallel-size {cp}" if cp > 1 else ""
        raise UsageError(f"--seq-length {args.seq_length} is not divisible by --tensor-model-parallel-size {tp}"
                         f"{contexts}")
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        raise UsageError("--overlap-param-gather needs --overlap-grad-reduce: add it")


def _check_batches(args: argparse.Namespace) -> None:
    check_at_least(1, micro_batch_size=args.micro_batch_size)
    check_at_least(0, num_workers=args.num_workers)
    at_once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = at_once
    check_at_least(1, global_batch_size=args.global_batch_size)
    check_batch(args)
    batches = max(args.expert_model_parallel_size // args.context_parallel_size, 1)
    args.num_grains = args.global_batch_size // (args.micro_batch_size * batches)
    check_ramp(args)


def _check_experts(args: argparse.Namespace) -> None:
    if args.num_experts is None:
        if args.expert_model_parallel_size > 1:
            raise UsageError("--expert-model-parallel-size needs --num-experts: add it")
        return
    tp, size = args.tensor_model_parallel_size, args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.moe_ffn_hidden_size = size
    check_at_least(1, num_experts=args.num_experts, moe_ffn_hidden_size=size, moe_router_topk=args.moe_router_topk)
    _divides("--moe-ffn-hidden-size", size, "--tensor-model-parallel-size", tp)
    _divides("--num-experts", args.num_experts, "--expert-model-parallel-size", args.expert_model_parallel_size)
    if args.moe_router_topk > args.num_experts:
        raise UsageError(f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {args.num_experts}")
    if tp > 1 and not args.sequence_parallel:
        raise UsageError("--num-experts with --tensor-model-parallel-size needs --sequence-parallel: add it")
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise UsageError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: add it")
    args.expert_tensor_parallel_size = tp
    if args.elastic:
        check_cells(args)


def _check_latent_attention(args: argparse.Namespace) -> None:
    tp, sizes = args.tensor_model_parallel_size, (args.q_lora_rank, args.kv_lora_rank + args.qk_pos_emb_head_dim)
    check_at_least(1, kv_lora_rank=args.kv_lora_rank, qk_head_dim=args.qk_head_dim, v_head_dim=args.v_head_dim,
                   qk_pos_emb_head_dim=args.qk_pos_emb_head_dim, q_lora_rank=args.q_lora_rank or 1)
    if args.group_query_attention:
        raise UsageError("--multi-latent-attention has keys for every head: leave out --group-query-attention")
    if args.position_embedding_type != "rope":
        raise UsageError("--multi-latent-attention needs --position-embedding-type rope: add it")
    if tp > 1 and not args.sequence_parallel:
        raise UsageError("--multi-latent-attention with --tensor-model-parallel-size needs --sequence-parallel: add it")
    if any(size % tp for size in sizes if size):
        raise UsageError("--q-lora-rank, and --kv-lora-rank plus --qk-pos-emb-head-dim, must be divisible by "
                         f"--tensor-model-parallel-size {tp}")


def _check_further_predictions(args: argparse.Namespace) -> None:
    if args.mtp_num_layers is None:
        return
    check_at_least(1, mtp_num_layers=args.mtp_num_layers)
    _divides("--hidden-size", args.hidden_size, "--tensor-model-parallel-size", args.tensor_model_parallel_size)
    if args.position_embedding_type == "learned_absolute":
        raise UsageError("--mtp-num-layers needs --position-embedding-type rope or none: add it")


def _check_model(args: argparse.Namespace) -> None:
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    check_at_least(1, num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=heads,
                   seq_length=args.seq_length, num_query_groups=args.num_query_groups,
                   make_vocab_size_divisible_by=args.make_vocab_size_divisible_by)
    _check_virtual_stages(args)
    _divides("--num-attention-heads", heads, "--tensor-model-parallel-size", tp)
    if args.kv_channels is None:
        _divides("--hidden-size", args.hidden_size, "--num-attention-heads", heads)
        args.kv_channels = args.hidden_size // heads
    if args.group_query_attention:
        _divides("--num-attention-heads", heads, "--num-query-groups", args.num_query_groups)
        _divides("--num-query-groups", args.num_query_groups, "--tensor-model-parallel-size", tp)
    elif args.num_query_groups != 1:
        raise UsageError("--num-query-groups needs --group-query-attention: add it")
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = max(64, wide * 2 // 3 // 64 * 64) if args.swiglu else wide
    _divides("--ffn-hidden-size", args.ffn_hidden_size, "--tensor-model-parallel-size", tp)
    if args.multi_latent_attention:
        _check_latent_attention(args)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        raise UsageError(f"--max-position-embeddings {args.max_position_embeddings} is below --seq-length "
                         f"{args.seq_length}: raise it to at least that")
    _check_experts(args)
    _check_further_predictions(args)
    if args.elastic:
        check_whole(args)
    elif args.transformer_impl != "local":
        raise UsageError(f"--transformer-impl {args.transformer_impl} works with --elastic only: the plain loop was "
                         "made for Megatron's own layers; leave it out")
    check_engine(args)
    for name in ("attention_dropout", "hidden_dropout"):
        if not 0 <= getattr(args, name) < 1:
            raise UsageError(f"{_flag(name)} must be in [0, 1), got {getattr(args, name)}")
    _check_recompute(args)


def _check_virtual_stages(args: argparse.Namespace) -> None:
    """How many virtual stages there are, and whether layers can be split as the flags say."""
    each, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if each is not None and chunks is not None:
        raise UsageError("--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the "
                         "same thing: leave one out")
    pp, drawn = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout is not None
    for name, value in (("num_layers_per_virtual_pipeline_stage", each),
                        ("num_virtual_stages_per_pipeline_rank", chunks)):
        if value is None:
            continue
        check_at_least(1, **{name: value})
        if drawn:
            raise UsageError(f"{_flag(name)} and --pipeline-model-parallel-layout say the same thing: leave one out")
    if each is not None:
        counted = args.num_layers + args.account_for_embedding_in_pipeline_split
        counted += args.account_for_loss_in_pipeline_split
        _divides("--num-layers", counted, f"--num-layers-per-virtual-pipeline-stage {each} x "
                 "--pipeline-model-parallel-size", each * pp)
        chunks = counted // pp // each
    args.virtual_pipeline_model_parallel_size = chunks
    check_split(args)
    if not args.elastic:
        _check_plain_split(args)
    if args.virtual_pipeline_model_parallel_size is None:
        return
    if pp == 1:
        raise UsageError("virtual pipeline stages need --pipeline-model-parallel-size 2 or more")
    if not args.elastic:
        raise UsageError("virtual pipeline stages work with --elastic only: the plain loop has no schedule for them; "
                         "leave them out")


def _check_plain_split(args: argparse.Namespace) -> None:
    """Megatron deals layers out evenly or not at all."""
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    counts = [sum(chunks) for chunks in split(args)]
    counts[0] += args.account_for_embedding_in_pipeline_split
    counts[-1] += args.account_for_loss_in_pipeline_split
    dealt = counts[first is not None:len(counts) - (last is not None)]
    if args.pipeline_model_parallel_layout is None and len(set(dealt)) > 1:
        raise UsageError(f"--num-layers {args.num_layers} cannot be split evenly over --pipeline-model-parallel-size "
                         f"{len(counts)}, which only --elastic does not need: add --elastic, or "
                         "--pipeline-model-parallel-layout")


def _check_recompute(args: argparse.Namespace) -> None:
    if args.recompute_granularity == "full":
        args.recompute_method = args.recompute_method or "uniform"
        args.recompute_num_layers = args.recompute_num_layers or 1
        held = max(max(chunks) for chunks in split(args))
        if not 1 <= args.recompute_num_layers <= held:
            raise UsageError(f"--recompute-num-layers must be from 1 to the {held} layers of a pipeline stage, "
                             f"got {args.recompute_num_layers}")
    elif args.recompute_method or args.recompute_num_layers:
        raise UsageError("--recompute-method and --recompute-num-layers need --recompute-granularity full: add it")


def _check_training(args: argparse.Namespace) -> None:
    check_at_least(0, eval_iters=args.eval_iters, clip_grad=args.clip_grad, lr=args.lr, min_lr=args.min_lr)
    check_at_least(1, eval_interval=args.eval_interval, log_interval=args.log_interval)
    if args.min_lr > args.lr:
        raise UsageError(f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower it")
    _check_length(args, "samples" if args.train_iters is None else "iters")
    _check_weight_decay(args)
    _check_loss_scale(args)
    if args.decoupled_min_lr is not None and args.decoupled_lr is None:
        raise UsageError("--decoupled-min-lr needs --decoupled-lr: add it")
    if not args.elastic:
        _check_plain_optimizer(args)
    if args.exit_signal_handler and not args.elastic:
        raise UsageError("--exit-signal-handler works with --elastic only: the plain loop does not listen; leave it "
                         "out")
    if args.save_interval is not None:
        check_at_least(1, save_interval=args.save_interval)
        if args.save is None:
            raise UsageError("--save-interval needs --save DIR: add it")


def _check_length(args: argparse.Namespace, unit: str) -> None:
    """How long training and its schedule are: in steps (``iters``) or in ``samples``, as Megatron-LM has it."""
    other = "iters" if unit == "samples" else "samples"
    length, decay, warmup = (f"{name}_{unit}" for name in ("train", "lr_decay", "lr_warmup"))
    if getattr(args, length) is None:
        raise UsageError("--train-iters or --train-samples is needed")
    if any(getattr(args, f"{name}_{other}") for name in ("train", "lr_decay", "lr_warmup")):
        raise UsageError(f"{_flag(length)} goes with {_flag(decay)} and {_flag(warmup)}: leave out what is in {other}")
    check_at_least(1, **{length: getattr(args, length)})
    check_at_least(0, **{warmup: getattr(args, warmup)})
    if getattr(args, decay) is None:
        setattr(args, decay, getattr(args, length))
    check_at_least(1, **{decay: getattr(args, decay)})
    if getattr(args, warmup) >= getattr(args, decay):
        raise UsageError(f"{_flag(warmup)} {getattr(args, warmup)} must be below {_flag(decay)} "
                         f"{getattr(args, decay)} (by default {_flag(length)})")
    check_length(args)
    if unit == "samples":
        args.train_iters = Ramp.of(args).steps(args.train_samples)


def _check_weight_decay(args: argparse.Namespace) -> None:
    if args.weight_decay_incr_style == "constant":
        if args.start_weight_decay is not None or args.end_weight_decay is not None:
            raise UsageError("--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
                             "cosine: add it, or use --weight-decay")
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif args.start_weight_decay is None or args.end_weight_decay is None:
        raise UsageError(f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and "
                         "--end-weight-decay: add them")
    if not 0 <= args.start_weight_decay <= args.end_weight_decay:
        raise UsageError(f"weight decay must be at least 0 and not fall, got --start-weight-decay "
                         f"{args.start_weight_decay:g} and --end-weight-decay {args.end_weight_decay:g}")


def _check_loss_scale(args: argparse.Namespace) -> None:
    if args.fp16 and args.bf16:
        raise UsageError("--fp16 and --bf16 exclude each other: leave one out")
    for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
        if (scale := getattr(args, name)) is not None and not 0 < scale < math.inf:
            raise UsageError(f"{_flag(name)} must be above 0 and finite, got {scale:g}")
    if args.min_loss_scale > args.initial_loss_scale:
        raise UsageError(f"--min-loss-scale {args.min_loss_scale:g} is above --initial-loss-scale "
                         f"{args.initial_loss_scale:g}: lower it")
    check_at_least(1, loss_scale_window=args.loss_scale_window, hysteresis=args.hysteresis)


def _check_plain_optimizer(args: argparse.Namespace) -> None:
    if args.optimizer == "sgd" and args.use_distributed_optimizer:
        raise UsageError("--optimizer sgd cannot be sharded by Megatron: add --no-use-distributed-optimizer")
    if args.optimizer == "sgd" and args.load is not None:
        raise UsageError("--load does not work with --optimizer sgd in megatron-core: use adam, or start anew")
    if args.overlap_grad_reduce:
        raise UsageError("--overlap-grad-reduce works with --elastic only: the plain loop does not overlap; "
                         "leave it out")
    if args.async_save:
        raise UsageError("--async-save works with --elastic only: the plain loop saves between two steps; leave it out")
    if args.main_grads_dtype != "fp32":
        raise UsageError(f"--main-grads-dtype {args.main_grads_dtype} works with --elastic only: Megatron has it with "
                         "kernels of Transformer Engine; leave it out")


def _check_files(args: argparse.Namespace) -> None:
    _check_split(args.split)
    prepared = locate(args.data_path).prepared
    if prepared is not None:
        if args.vocab_size not in (None, prepared.vocab_size):
            raise UsageError(f"--vocab-size {args.vocab_size} contradicts the data's {prepared.vocab_size}: "
                             "leave it out")
        args.vocab_size = prepared.vocab_size
    elif args.vocab_size is None:
        raise UsageError(f"--vocab-size is needed: there is no data.json beside {args.data_path}")
    check_at_least(2, vocab_size=args.vocab_size)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    if args.load is not None:
        _check_checkpoint(args.load)
    if args.save is not None and args.save.exists() and not (args.save.is_dir() and os.access(args.save, os.W_OK)):
        raise UsageError(f"--save {args.save} is no folder that can be written to: name another")


def _check_split(split: str) -> None:
    try:
        weights = [float(weight) for weight in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or weights[0] == 0:
        raise UsageError(f"--split {split}: expected up to three weights like 949,50,1, the first above 0")


def _check_checkpoint(load: Path) -> None:
    tracker, folder = load / TRACKER, newest_folder(load)
    if folder is None:
        if load.is_dir() and all(".partial" in path.name for path in load.iterdir()):
            return  # a job that is started again and again finds it empty the first time
        raise UsageError(f"--load {load}: {tracker} does not exist, and there is no checkpoint; leave --load out to "
                         "start from the beginning")
    if not (folder / COMPLETE).is_file():
        raise UsageError(f"--load {load}: {folder} is no complete checkpoint (no {COMPLETE}); {older(folder)}")


def _check_elastic(args: argparse.Namespace) -> None:
    config = ElasticConfig.from_args(args)
    args.distributed_backend = args.distributed_backend or ("elastic" if args.elastic else "gloo")
    if args.elastic and args.distributed_backend != "elastic":
        raise UsageError("--elastic needs --distributed-backend elastic: leave --distributed-backend out")
    if args.tensorboard_dir and not args.elastic:
        raise UsageError("--tensorboard-dir needs --elastic: it is the launcher of an elastic job that writes there")
    emulation.check(args, args.world_size)
    profiles.check_units(args, args.world_size)
    if config.inject and not args.elastic:
        raise UsageError(f"--elastic-inject {config.inject[0]} needs --elastic: add it")
    check_faults(args)
    check_trace(args)


def _divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UsageError(f"{name} {value} is not divisible by {by_name} {by}: "
                         f"use {-(-value // by) * by}, or change {by_name}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
