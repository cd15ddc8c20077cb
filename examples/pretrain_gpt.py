"""Pretrain a GPT on ``megatron.core``: elastically with ``--elastic``, as plain Megatron without.

    megatron-elastic data prepare data
    megatron-elastic run --nproc-per-node 8 examples/pretrain_gpt.py --elastic --data-path data ...
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --data-path data ...

The functions before ``main`` are what a training script provides, in Megatron's conventions; both ways of training
use them. Importing this file imports neither torch nor Megatron, so that the launcher can check the flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if str(Path(__file__).parent) not in sys.path:  # the launcher reads this file from elsewhere to check the flags
    sys.path.insert(0, str(Path(__file__).parent))

from gpt_arguments import check_arguments, parse_args

from megatron_elastic.config import UsageError

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel

__all__ = ["check_arguments", "datasets_provider", "forward_step", "main", "model_provider"]


def model_provider(
    args: argparse.Namespace, config_kwargs: Mapping[str, Any] | None = None,
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None,
) -> GPTModel:
    """Build this rank's part of the model; ``config_kwargs`` override fields of the ``TransformerConfig``.

    ``pre_process``: it has the embedding. ``post_process``: it has the output head and returns losses. ``vp_stage``:
    which of its virtual stages this is, if it has several.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )

    from megatron_elastic.adaptor.settings import build_config

    config = build_config(args, config_kwargs)
    engine = args.transformer_impl == "transformer_engine"
    if engine:
        layer = get_gpt_layer_with_transformer_engine_spec(
            args.num_experts, qk_layernorm=args.qk_layernorm, multi_latent_attention=args.multi_latent_attention,
        )
    else:
        layer = get_gpt_layer_local_spec(
            args.num_experts, qk_layernorm=args.qk_layernorm, multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    further = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=engine, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=further,
        vp_stage=vp_stage,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    )


def datasets_provider(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Training, validation and test data; see ``build_datasets``. Every rank calls this."""
    from megatron_elastic.adaptor.dataset import build_datasets
    from megatron_elastic.plan.work.ramp import Ramp

    batch, iterations = args.global_batch_size, args.train_iters
    evaluations = (iterations // args.eval_interval + 1) * args.eval_iters
    training = Ramp.of(args).before(iterations + 1)
    return build_datasets(
        args.data_path, split=args.split, seq_length=args.seq_length, seed=args.seed,
        samples=(training, evaluations * batch, args.eval_iters * batch), vocab_size=args.vocab_size,
    )


def forward_step(
    data_iterator: Iterator[Mapping[str, torch.Tensor]], model: Any
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run the model on the next micro-batch; returns its output and the function that makes it a loss."""
    batch = own_part(next(data_iterator))
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(loss_func, batch["loss_mask"])


def own_part(batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """What this context-parallel rank has of a micro-batch."""
    import inspect

    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.utils import get_batch_on_this_cp_rank

    since_0_18 = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    kind = {"is_hybrid_cp": False} if since_0_18 else {}
    part: Mapping[str, torch.Tensor] = get_batch_on_this_cp_rank(
        dict(batch), cp_group=get_context_parallel_group(), **kind
    )
    return part


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of one micro-batch, [micro-batch size, seq_length], over the tokens that count.

    Returns the sum, the number of those tokens (an int tensor), and both as they are reported.
    """
    import torch

    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def main(argv: list[str] | None = None) -> int:
    """Train. Returns the exit code: 2 for flags that cannot work."""
    try:
        args = parse_args(argv)
        from megatron_elastic.device import stand_in

        stand_in.install()
        if args.elastic:
            from megatron_elastic import pretrain
        else:
            from plain_training import pretrain
        pretrain(args, model_provider, datasets_provider, forward_step)
    except UsageError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
