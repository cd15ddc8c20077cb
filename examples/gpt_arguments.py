"""The flags of ``pretrain_gpt.py``: Megatron-LM's names and meanings, checked before any process starts.

Importing this file imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
from typing import NoReturn

from gpt_checks import check

from megatron_elastic import support, usage
from megatron_elastic.config import UsageError, add_elastic_arguments


class _Parser(argparse.ArgumentParser):
    """A parser that raises UsageError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message[:1].lower()}{message[1:]}; --help lists the flags")


def parse_args(argv: list[str] | None = None, world_size: int | None = None) -> argparse.Namespace:
    """Parse and check the flags; defaults come from ``sys.argv`` and ``WORLD_SIZE``.

    With ``--elastic`` what ``support`` says of Megatron-LM's flags holds here, too.

    Besides the flags the namespace carries ``world_size``, ``data_parallel_size``, ``num_grains`` (of the global
    batch), ``vocab_size`` and ``padded_vocab_size``. Raises UsageError, whose one line names flag and fix.
    """
    parser = _build_parser()
    args, unknown = parser.parse_known_args(argv)
    if args.elastic:
        support.check_arguments(unknown)
        unknown = support.not_named(unknown)
    if unknown:
        _refuse(unknown[0], parser)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    check(args)
    return args


def check_arguments(argv: list[str] | None = None, world_size: int | None = None) -> None:
    """Raise UsageError if training with these flags on ``world_size`` ranks cannot work."""
    parse_args(argv, world_size)


def _refuse(flag: str, parser: argparse.ArgumentParser) -> NoReturn:
    name = flag.partition("=")[0]
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
    _add_loss_scale(parser.add_argument_group("loss scale"))
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
    group.add_argument("--apply-residual-connection-post-layernorm", action="store_true")
    group.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    group.add_argument("--add-qkv-bias", action="store_true")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--mtp-num-layers", type=int, metavar="N",
                       help="predict so many tokens further ahead, with a layer each (default: only the next one)")
    group.add_argument("--mtp-loss-scaling-factor", type=float, default=0.1, metavar="X",
                       help="what the mean of further predictions' losses counts")
    group.add_argument("--calculate-per-token-loss", action="store_true",
                       help="the loss is the mean over all tokens of a step, not over its micro-batches' means")
    group.add_argument("--attention-softmax-in-fp32", action="store_true")
    group.add_argument("--attention-dropout", type=float, default=0.1)
    group.add_argument("--hidden-dropout", type=float, default=0.1)
    group.add_argument("--init-method-std", type=float, default=0.02)
    group.add_argument("--fp16", action="store_true")
    group.add_argument("--bf16", action="store_true")
    group.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local",
                       help="whose layers: Megatron's own, or Transformer Engine's, which is to be installed")
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
    group.add_argument("--rotary-scaling-factor", type=float, default=1.0, help="of YaRN")
    group.add_argument("--mscale", type=float, default=1.0, help="of YaRN, in the rotation")
    group.add_argument("--mscale-all-dim", type=float, default=0.0, help="of YaRN, in the softmax")
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
    group.add_argument("--rampup-batch-size", type=int, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"),
                       help="let the global batch grow from START by INCREMENT each time, over so many samples")
    group.add_argument("--train-iters", type=int)
    group.add_argument("--train-samples", type=int, help="in place of --train-iters; a batch that grows needs it")
    group.add_argument("--lr", type=float, required=True)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--decoupled-lr", type=float, help="learning rate of embedding and output layer")
    group.add_argument("--decoupled-min-lr", type=float)
    group.add_argument("--lr-decay-style", choices=("constant", "linear", "cosine", "inverse-square-root"),
                       default="linear")
    group.add_argument("--lr-decay-iters", type=int, help="default: --train-iters")
    group.add_argument("--lr-decay-samples", type=int, help="default: --train-samples")
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--lr-warmup-samples", type=int, default=0)
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


def _add_loss_scale(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--loss-scale", type=float, metavar="X",
                       help="a constant one, in any precision (default: with --fp16 it changes, else there is none)")
    group.add_argument("--initial-loss-scale", type=float, default=2.0**32, metavar="X")
    group.add_argument("--min-loss-scale", type=float, default=1.0, metavar="X")
    group.add_argument("--loss-scale-window", type=float, default=1000, metavar="STEPS",
                       help="without a gradient that is not finite, after which it is doubled")
    group.add_argument("--hysteresis", type=int, default=2, metavar="STEPS",
                       help="with one until it is halved")


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data-path", type=usage.path, required=True,
                       help="folder written by 'megatron-elastic data prepare', or prefix of a .bin and .idx")
    group.add_argument("--split", default="949,50,1", help="weights of the training, validation and test documents")
    group.add_argument("--vocab-size", type=int, help="only for data without data.json")
    group.add_argument("--num-workers", type=int, default=2, metavar="N",
                       help="with --elastic, a thread reads up to 2 N micro-batches ahead; 0, or without: none")
    group.add_argument("--save", type=usage.path, metavar="DIR",
                       help="write checkpoints there, the last one at the end")
    group.add_argument("--save-interval", type=int, metavar="STEPS")
    group.add_argument("--async-save", action="store_true", help="go on training while a checkpoint is written")
    group.add_argument("--exit-signal-handler", action="store_true",
                       help="at --exit-signal save and end training, as before a scheduler takes the machines away")
    group.add_argument("--exit-signal", type=_signal, default=signal.SIGTERM, metavar="NAME")
    group.add_argument("--load", type=usage.path, metavar="DIR",
                       help="go on from the newest checkpoint there; an empty folder is the beginning")
    group.add_argument("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler",
                       action="store_true",
                       help="learning rates and weight decay go by what the checkpoint says, not by the flags")
    group.add_argument("--eval-interval", type=int, default=1000, metavar="STEPS")
    group.add_argument("--eval-iters", type=int, default=100, help="0 does not evaluate")
    group.add_argument("--log-interval", type=int, default=100, metavar="STEPS")
    group.add_argument("--tensorboard-dir", metavar="DIR", help="with --elastic, the launcher writes curves there")


def _signal(name: str) -> signal.Signals:
    try:
        return signal.Signals[name]
    except KeyError:
        raise argparse.ArgumentTypeError(f"no signal {name}: SIGTERM, SIGUSR1...") from None


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
    group.add_argument("--moe-token-dispatcher-type", choices=("allgather", "alltoall"), default="allgather",
                       help="how tokens get to experts of other ranks; with alltoall, and --elastic, results do not "
                       "depend on how many ranks share experts, bit for bit")
    group.add_argument("--moe-router-score-function", choices=("softmax", "sigmoid"), default="softmax")
    group.add_argument("--moe-router-pre-softmax", action="store_true", help="softmax before experts are chosen")
    group.add_argument("--moe-router-num-groups", type=int, metavar="N",
                       help="experts are in so many groups, and --moe-router-group-topk of them are chosen first")
    group.add_argument("--moe-router-group-topk", type=int, metavar="K")
    group.add_argument("--moe-router-topk-scaling-factor", type=float, metavar="X", help="of the chosen scores")
    group.add_argument("--moe-router-dtype", choices=("fp32", "fp64"), help="of scores (default: the model's)")
    group.add_argument("--moe-expert-capacity-factor", type=float, metavar="X",
                       help="tokens that an expert takes, to those of an even share; others are dropped (default: all)")
    group.add_argument("--moe-pad-expert-input-to-capacity", action="store_true")
    group.add_argument("--moe-token-drop-policy", choices=("probs", "position"), default="probs")
    group.add_argument("--moe-router-enable-expert-bias", action="store_true",
                       help="choose experts with a bias, which moves to those that get few tokens")
    group.add_argument("--moe-router-bias-update-rate", type=float, default=1e-3)
    group.add_argument("--moe-aux-loss-coeff", type=float, default=0.0)
    group.add_argument("--moe-z-loss-coeff", type=float)
