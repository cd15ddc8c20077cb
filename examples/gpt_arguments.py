"""The flags of ``pretrain_gpt.py``: Megatron-LM's names and meanings, checked before any process starts.

Importing this file imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
from pathlib import Path
from typing import NoReturn

from megatron_elastic.adaptor.checkpoints.folder import TRACKER, has_step, newest, step_folder
from megatron_elastic.adaptor.dataset import locate
from megatron_elastic.config import ElasticConfig, UsageError, add_elastic_arguments
from megatron_elastic.plan.split import split
from megatron_elastic.support import check_cells, check_split

_UNSUPPORTED = {
    "--fp16": "fp16 needs a loss scaler, which is not supported yet; use --bf16 or neither",
}
"""Megatron-LM's flags that people will try, and what to do instead."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].lower()}{message[1:]}; --help lists the flags")


def parse_args(argv: list[str] | None = None, world_size: int | None = None) -> argparse.Namespace:
    """Parse and check the flags; defaults come from ``sys.argv`` and ``WORLD_SIZE``.

    Besides the flags the namespace carries ``world_size``, ``data_parallel_size``, ``num_grains`` (of the global
    batch), ``vocab_size`` and ``padded_vocab_size``. Raises UsageError, whose one line names flag and fix.
    """
    parser = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(unknown[0], parser)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    _check_parallelism(args)
    _check_batches(args)
    _check_model(args)
    _check_training(args)
    _check_files(args)
    _check_elastic(args)
    return args


def check_arguments(argv: list[str] | None = None, world_size: int | None = None) -> None:
    """Raise UsageError if training with these flags on ``world_size`` ranks cannot work."""
    parse_args(argv, world_size)


def _refuse(flag: str, parser: argparse.ArgumentParser) -> NoReturn:
    name = flag.partition("=")[0]
    if name in _UNSUPPORTED:
        raise UsageError(f"{name}: {_UNSUPPORTED[name]}")
    known = [option for action in parser._actions for option in action.option_strings]
    close = difflib.get_close_matches(name, known, n=1)
    raise UsageError(f"unknown flag {name}: " + (f"did you mean {close[0]}?" if close else "--help lists the flags"))


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(description="Pretrain a GPT on megatron.core; flags as in Megatron-LM.", allow_abbrev=False,
                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    _add_model(parser.add_argument_group("model"))
    _add_latent_attention(parser.add_argument_group("latent attention"))
    _add_experts(parser.add_argument_group("experts"))
    _add_parallelism(parser.add_argument_group("parallelism"))
    _add_training(parser.add_argument_group("training"))
    _add_data(parser.add_argument_group("data, checkpoints and logging"))
    return add_elastic_arguments(parser)


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, required=True)
    group.add_argument("--hidden-size", type=int, required=True)
    group.add_argument("--num-attention-heads", type=int, required=True)
    group.add_argument("--seq-length", type=int, required=True)
    group.add_argument("--max-position-embeddings", type=int, help="default: --seq-length")
    group.add_argument("--ffn-hidden-size", type=int,
                       help="default: 4 x --hidden-size; with --swiglu two thirds of that, a multiple of 64")
    group.add_argument("--kv-channels", type=int, help="default: --hidden-size / --num-attention-heads")
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-query-groups", type=int, default=1)
    group.add_argument("--position-embedding-type", choices=("learned_absolute", "rope", "none"),
                       default="learned_absolute")
    group.add_argument("--rotary-percent", type=float, default=1.0)
    group.add_argument("--rotary-base", type=int, default=10000)
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--norm-epsilon", type=float, default=1e-5)
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    group.add_argument("--add-qkv-bias", action="store_true")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--recompute-granularity", choices=("full", "selective"))
    group.add_argument("--recompute-method", choices=("uniform", "block"),
                       help="for --recompute-granularity full; default: uniform")
    group.add_argument("--recompute-num-layers", type=int,
                       help="for --recompute-granularity full; default: 1")
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128)


def _add_latent_attention(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--multi-latent-attention", action="store_true",
                       help="keys and values are made of a short vector each token, as are queries, as in DeepSeek-V2")
    group.add_argument("--q-lora-rank", type=int, metavar="SIZE", help="of the queries' (default: they have none)")
    group.add_argument("--kv-lora-rank", type=int, default=32, metavar="SIZE", help="of the keys' and values'")
    group.add_argument("--qk-head-dim", type=int, default=128, help="of queries and keys, without what is rotated")
    group.add_argument("--qk-pos-emb-head-dim", type=int, default=64, help="what is rotated of them")
    group.add_argument("--v-head-dim", type=int, default=128)
    group.add_argument("--rope-type", choices=("rope", "yarn"), default="yarn", help="of latent attention")
    group.add_argument("--qk-layernorm", action="store_true", help="normalise queries and keys, or what makes them")


def _add_parallelism(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--context-parallel-size", type=int, default=1, metavar="N",
                       help="ranks that have a part each of the same sequences; needs --elastic, as attention over "
                            "them is Transformer Engine's otherwise")
    group.add_argument("--num-layers-per-virtual-pipeline-stage", type=int, metavar="N",
                       help="stages have chunks of so many layers, which grains pass in turn")
    group.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, metavar="N",
                       help="the same, given as the number of chunks")
    group.add_argument("--pipeline-model-parallel-layout", metavar="TEXT",
                       help="what each stage (and chunk) has: E the embedding, t a layer, L the loss; | ends a stage, "
                            "*N repeats, as in 'Et*3|(tt|)*2L'")
    group.add_argument("--decoder-first-pipeline-num-layers", type=int, metavar="N",
                       help="layers of the first stage; the others share the rest")
    group.add_argument("--decoder-last-pipeline-num-layers", type=int, metavar="N",
                       help="layers of the last stage; the others share the rest")
    group.add_argument("--account-for-embedding-in-pipeline-split", action="store_true",
                       help="count the embedding as a layer where layers are split over stages")
    group.add_argument("--account-for-loss-in-pipeline-split", action="store_true",
                       help="count the loss as a layer where layers are split over stages")
    group.add_argument("--sequence-parallel", action="store_true",
                       help="tensor-parallel ranks share the sequence between layers; no effect without such ranks")
    group.add_argument("--use-distributed-optimizer", action=argparse.BooleanOptionalAction, default=True,
                       help="shard the optimizer over data-parallel ranks; --elastic always does")
    group.add_argument("--overlap-grad-reduce", action="store_true",
                       help="reduce gradients while the rest of the backward pass is computed")
    group.add_argument("--overlap-param-gather", action="store_true",
                       help="gather parameters while the next step begins; needs --overlap-grad-reduce")
    group.add_argument("--distributed-backend", choices=("gloo", "elastic"),
                       help="what carries messages; default: elastic with --elastic, else gloo")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--micro-batch-size", type=int, required=True)
    group.add_argument("--global-batch-size", type=int, help="default: micro-batch size x data-parallel size")
    group.add_argument("--train-iters", type=int, required=True)
    group.add_argument("--lr", type=float, required=True)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--decoupled-lr", type=float, help="learning rate of embedding and output layer")
    group.add_argument("--decoupled-min-lr", type=float)
    group.add_argument("--lr-decay-style", choices=("constant", "linear", "cosine", "inverse-square-root"),
                       default="linear")
    group.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--lr-warmup-init", type=float, default=0.0)
    group.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.999)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--sgd-momentum", type=float, default=0.9)
    group.add_argument("--weight-decay", type=float, default=0.01)
    group.add_argument("--start-weight-decay", type=float)
    group.add_argument("--end-weight-decay", type=float)
    group.add_argument("--weight-decay-incr-style", choices=("constant", "linear", "cosine"), default="constant")
    group.add_argument("--main-grads-dtype", choices=("fp32", "bf16"), default="fp32",
                       help="of the gradients that the optimizer gets; they are summed up in more bits first")
    group.add_argument("--clip-grad", type=float, default=1.0, help="0 does not clip")
    group.add_argument("--seed", type=int, default=1234)


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data-path", type=Path, required=True,
                       help="folder written by 'megatron-elastic data prepare', or prefix of a .bin and .idx")
    group.add_argument("--split", default="949,50,1", help="weights of the training, validation and test documents")
    group.add_argument("--vocab-size", type=int, help="only for data without data.json")
    group.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints there, the last one at the end")
    group.add_argument("--save-interval", type=int, metavar="STEPS")
    group.add_argument("--async-save", action="store_true", help="go on training while a checkpoint is written")
    group.add_argument("--exit-signal-handler", action="store_true",
                       help="at --exit-signal save and end training, as before a scheduler takes the machines away")
    group.add_argument("--exit-signal", type=_signal, default=signal.SIGTERM, metavar="NAME")
    group.add_argument("--load", type=Path, metavar="DIR",
                       help="go on from the newest checkpoint there; an empty folder is the beginning")
    group.add_argument("--eval-interval", type=int, default=1000, metavar="STEPS")
    group.add_argument("--eval-iters", type=int, default=100, help="0 does not evaluate")
    group.add_argument("--log-interval", type=int, default=100, metavar="STEPS")


def _signal(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise argparse.ArgumentTypeError(f"no signal {name}: SIGTERM, SIGUSR1...") from None


def _check_parallelism(args: argparse.Namespace) -> None:
    tp, pp, world = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.world_size
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    _at_least(1, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
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
    if args.data_parallel_size * cp % ep:
        contexts = f" x --context-parallel-size {cp}" if cp > 1 else ""
        raise UsageError(
            f"--expert-model-parallel-size {ep} does not divide the data-parallel size {args.data_parallel_size}"
            f"{contexts}: start a multiple of {tp * pp * ep} processes, or change the sizes"
        )
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
    _at_least(1, micro_batch_size=args.micro_batch_size)
    at_once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = at_once
    _at_least(1, global_batch_size=args.global_batch_size)
    if args.global_batch_size % at_once:
        raise UsageError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {at_once}: "
            f"use {-(-args.global_batch_size // at_once) * at_once}"
        )
    batches = max(args.expert_model_parallel_size // args.context_parallel_size, 1)
    args.num_grains = args.global_batch_size // (args.micro_batch_size * batches)


def _add_experts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-experts", type=int, metavar="N", help="of each layer's feed-forward (default: none)")
    group.add_argument("--expert-model-parallel-size", type=int, default=1, metavar="N",
                       help="ranks that share a layer's experts, and compute a micro-batch each at the same time")
    group.add_argument("--moe-ffn-hidden-size", type=int, help="of an expert (default: --ffn-hidden-size)")
    group.add_argument("--moe-router-topk", type=int, default=2, metavar="K", help="experts that a token goes to")
    group.add_argument("--moe-shared-expert-intermediate-size", type=int, metavar="SIZE",
                       help="of an expert that all tokens go to (default: none)")
    group.add_argument("--moe-router-load-balancing-type", choices=("aux_loss", "seq_aux_loss", "none"),
                       default="aux_loss")
    group.add_argument("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax")
    group.add_argument("--moe-router-enable-expert-bias", action="store_true",
                       help="choose experts with a bias, which moves to those that get few tokens")
    group.add_argument("--moe-router-bias-update-rate", type=float, default=1e-3)
    group.add_argument("--moe-aux-loss-coeff", type=float, default=0.0)
    group.add_argument("--moe-z-loss-coeff", type=float)


def _check_experts(args: argparse.Namespace) -> None:
    if args.num_experts is None:
        if args.expert_model_parallel_size > 1:
            raise UsageError("--expert-model-parallel-size needs --num-experts: add it")
        return
    tp, size = args.tensor_model_parallel_size, args.moe_ffn_hidden_size or args.ffn_hidden_size
    args.moe_ffn_hidden_size = size
    _at_least(1, num_experts=args.num_experts, moe_ffn_hidden_size=size, moe_router_topk=args.moe_router_topk)
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
    _at_least(1, kv_lora_rank=args.kv_lora_rank, qk_head_dim=args.qk_head_dim, v_head_dim=args.v_head_dim,
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


def _check_model(args: argparse.Namespace) -> None:
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    _at_least(1, num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=heads,
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
        _at_least(1, **{name: value})
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
    _at_least(0, train_iters=args.train_iters, lr_warmup_iters=args.lr_warmup_iters, eval_iters=args.eval_iters,
              clip_grad=args.clip_grad, lr=args.lr, min_lr=args.min_lr)
    _at_least(1, eval_interval=args.eval_interval, log_interval=args.log_interval)
    if args.min_lr > args.lr:
        raise UsageError(f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower it")
    if args.lr_decay_iters is None:
        args.lr_decay_iters = max(1, args.train_iters)
    _at_least(1, lr_decay_iters=args.lr_decay_iters)
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise UsageError(f"--lr-warmup-iters {args.lr_warmup_iters} must be below --lr-decay-iters "
                         f"{args.lr_decay_iters} (by default --train-iters)")
    _check_weight_decay(args)
    if args.decoupled_min_lr is not None and args.decoupled_lr is None:
        raise UsageError("--decoupled-min-lr needs --decoupled-lr: add it")
    if not args.elastic:
        _check_plain_optimizer(args)
    if args.exit_signal_handler and not args.elastic:
        raise UsageError("--exit-signal-handler works with --elastic only: the plain loop does not listen; leave it "
                         "out")
    if args.save_interval is not None:
        _at_least(1, save_interval=args.save_interval)
        if args.save is None:
            raise UsageError("--save-interval needs --save DIR: add it")


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
    _at_least(2, vocab_size=args.vocab_size)
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
    tracker = load / TRACKER
    try:
        iteration = newest(load)
    except (OSError, ValueError) as error:
        raise UsageError(f"--load {load}: {tracker} cannot be read ({error}); it should hold a step number") from None
    if iteration is None:
        if load.is_dir() and all(".partial" in path.name for path in load.iterdir()):
            return  # a job that is started again and again finds it empty the first time
        raise UsageError(f"--load {load}: {tracker} does not exist, and there is no checkpoint; leave --load out to "
                         "start from the beginning")
    if not has_step(load, iteration):
        raise UsageError(f"--load {load}: {step_folder(load, iteration)} is no complete checkpoint (no metadata.json); "
                         f"write the number of an older one into {tracker}")


def _check_elastic(args: argparse.Namespace) -> None:
    config = ElasticConfig.from_args(args)
    args.distributed_backend = args.distributed_backend or ("elastic" if args.elastic else "gloo")
    if args.elastic and args.distributed_backend != "elastic":
        raise UsageError("--elastic needs --distributed-backend elastic: leave --distributed-backend out")
    for fault in config.inject:
        flag = f"--elastic-inject {fault}"
        if not args.elastic:
            raise UsageError(f"{flag} needs --elastic: add it")
        # A rank that joins has an id that nobody had before.
        if fault.rank < 0 or (fault.rank >= args.world_size and not config.respawn):
            raise UsageError(f"{flag}: rank must be from 0 to {args.world_size - 1}, unless --elastic-respawn is given")
        if fault.step is not None and not 1 <= fault.step <= args.train_iters:
            raise UsageError(f"{flag}: step must be from 1 to --train-iters {args.train_iters}")
        if fault.grain is not None and not 0 <= fault.grain < args.num_grains:
            raise UsageError(f"{flag}: grain must be from 0 to {args.num_grains - 1} "
                             "(--global-batch-size / --micro-batch-size / --expert-model-parallel-size - 1)")


def _at_least(limit: int, **values: float) -> None:
    for name, value in values.items():
        if value < limit:
            raise UsageError(f"{_flag(name)} must be at least {limit}, got {value:g}")


def _divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        raise UsageError(f"{name} {value} is not divisible by {by_name} {by}: "
                         f"use {-(-value // by) * by}, or change {by_name}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
