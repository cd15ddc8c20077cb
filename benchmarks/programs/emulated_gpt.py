"""The example script with layers of two small matrices and nothing else: for ranks that only emulate a larger model.

Units, slices, replicas, stages and random draws are as with any GPT; a layer takes a quarter of the processor's time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

__all__ = ["check_arguments"]


def model_provider(
    args: argparse.Namespace, config_kwargs: Mapping[str, Any] | None = None,
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None,
) -> GPTModel:
    """As the example's, but for the layers."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from megatron_elastic.adaptor.settings import build_config

    network = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear,
                                                           linear_fc2=RowParallelLinear))
    if args.num_experts:
        network = get_moe_module_spec(use_te=False, num_experts=args.num_experts)
    layer = ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(mlp=network,
                                                                               mlp_bda=get_bias_dropout_add))
    return GPTModel(
        config=build_config(args, config_kwargs), transformer_layer_spec=layer, vp_stage=vp_stage,
        vocab_size=args.padded_vocab_size, max_sequence_length=args.max_position_embeddings, pre_process=pre_process,
        post_process=post_process, share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )  # fmt: skip


if __name__ == "__main__":
    pretrain_gpt.model_provider = model_provider
    sys.exit(pretrain_gpt.main())
