"""Settings: Megatron's configuration objects, from the flags of ``examples/gpt_arguments.py``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron_elastic.config import UsageError


def build_config(args: argparse.Namespace, overrides: Mapping[str, Any] | None = None) -> TransformerConfig:
    """The model's configuration; ``overrides`` are further fields of ``TransformerConfig``."""
    dtype = params_dtype(args)
    fields: dict[str, Any] = dict(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        ffn_hidden_size=args.ffn_hidden_size,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        apply_residual_connection_post_layernorm=args.apply_residual_connection_post_layernorm,
        calculate_per_token_loss=args.calculate_per_token_loss,
        attention_softmax_in_fp32=args.attention_softmax_in_fp32,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        init_method_std=args.init_method_std,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        qk_layernorm=args.qk_layernorm,
        mtp_num_layers=args.mtp_num_layers,
        mtp_loss_scaling_factor=args.mtp_loss_scaling_factor,
        fp16=args.fp16,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        num_moe_experts=args.num_experts,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size,
        moe_router_topk=args.moe_router_topk,
        moe_shared_expert_intermediate_size=args.moe_shared_expert_intermediate_size,
        moe_router_load_balancing_type=args.moe_router_load_balancing_type,
        moe_token_dispatcher_type=args.moe_token_dispatcher_type,
        moe_router_score_function=args.moe_router_score_function,
        moe_router_pre_softmax=args.moe_router_pre_softmax,
        moe_router_num_groups=args.moe_router_num_groups,
        moe_router_group_topk=args.moe_router_group_topk,
        moe_router_topk_scaling_factor=args.moe_router_topk_scaling_factor,
        moe_router_dtype=args.moe_router_dtype,
        moe_expert_capacity_factor=args.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=args.moe_pad_expert_input_to_capacity,
        moe_token_drop_policy=args.moe_token_drop_policy,
        moe_router_enable_expert_bias=args.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=args.moe_router_bias_update_rate,
        moe_aux_loss_coeff=args.moe_aux_loss_coeff,
        moe_z_loss_coeff=args.moe_z_loss_coeff,
        # Megatron-LM's flags switch these on, with the plain versions as fallback where there are no kernels.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    if not args.elastic:  # there the layout says which layers a stage has
        fields.update(
            pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
            num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
            num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
            account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
            account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
        )
    if not args.multi_latent_attention:
        return _accepted(TransformerConfig, {**fields, **(overrides or {})})
    fields.update(
        q_lora_rank=args.q_lora_rank, kv_lora_rank=args.kv_lora_rank, qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim, v_head_dim=args.v_head_dim, rope_type=args.rope_type,
        rotary_base=args.rotary_base, rotary_percent=args.rotary_percent, mscale=args.mscale,
        rotary_scaling_factor=args.rotary_scaling_factor, mscale_all_dim=args.mscale_all_dim,
    )  # fmt: skip
    return _accepted(MLATransformerConfig, {**fields, **(overrides or {})})


def _accepted(kind: type[TransformerConfig], fields: Mapping[str, Any]) -> TransformerConfig:
    """A configuration, if Megatron takes its fields together. Raises UsageError."""
    try:
        return kind(**fields)
    except (AssertionError, ValueError) as error:
        raise UsageError(f"Megatron refuses these flags: {error}") from error


def build_optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """The optimizer's configuration."""
    return OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        sgd_momentum=args.sgd_momentum,
        decoupled_lr=args.decoupled_lr,
        decoupled_min_lr=args.decoupled_min_lr,
        clip_grad=args.clip_grad,
        apply_wd_to_qk_layernorm=getattr(args, "apply_wd_to_qk_layernorm", False),
        fp16=args.fp16,
        bf16=args.bf16,
        params_dtype=params_dtype(args),
        loss_scale=args.loss_scale,
        initial_loss_scale=args.initial_loss_scale,
        min_loss_scale=args.min_loss_scale,
        loss_scale_window=args.loss_scale_window,
        hysteresis=args.hysteresis,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )


def params_dtype(args: argparse.Namespace) -> torch.dtype:
    """Type of the model's weights."""
    return torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32


def activations_dtype(args: argparse.Namespace, config: TransformerConfig) -> torch.dtype:
    """Type of what goes from stage to stage: that of weights, unless the model's configuration has another one, as 0.19
    does with ``--fp32-residual-connection``.
    """
    return config.pipeline_dtype or params_dtype(args)


def main_grads_dtype(args: argparse.Namespace) -> torch.dtype:
    """Type of the mean gradients that the optimizer gets; Megatron-LM's own parser has made a dtype of it already."""
    name = args.main_grads_dtype
    return name if isinstance(name, torch.dtype) else {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def build_scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay; its steps are samples, as in Megatron-LM.

    ``optimizer`` is anything with ``param_groups``; after each step, call ``step`` with the samples as increment.
    """
    if args.train_samples is None:
        batch, iterations = args.global_batch_size, max(1, args.train_iters)
        warmup, decay, whole = (count * batch for count in (args.lr_warmup_iters, args.lr_decay_iters, iterations))
    else:
        warmup, decay, whole = args.lr_warmup_samples, args.lr_decay_samples, args.train_samples
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=whole,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=not args.use_checkpoint_opt_param_scheduler,
    )
