"""Operations: floating point operations that a token costs a GPT, from its flags (Megatron-LM's names)."""

from __future__ import annotations

from typing import Any

from megatron_elastic.plan.costs.memory import routed
from megatron_elastic.plan.split import mtp_layers


def flops_per_token(args: Any) -> float:
    """FLOPs of forward and backward of the whole model, for one token of a sample of ``seq_length``.

    Model FLOPs, as they are usually counted (Narayanan et al. 2021, arXiv 2104.04473; PaLM, arXiv 2204.02311,
    appendix B; Megatron-LM): matrix products alone, of the experts those that a token goes to, of causal attention half
    of the scores, and nothing twice that is recomputed. A product of a token with n weights takes 2n operations forward
    and 4n backward.
    """
    a, further = args, mtp_layers(args)
    layers, with_experts = a.num_layers + further, len(routed(a))
    factors = 3 if a.swiglu else 2
    dense = factors * a.hidden_size * a.ffn_hidden_size
    weights = layers * _attention(a) + (layers - with_experts) * dense
    if with_experts:
        each = a.moe_router_topk * (a.moe_ffn_hidden_size or a.ffn_hidden_size)
        weights += with_experts * factors * a.hidden_size * (each + (a.moe_shared_expert_intermediate_size or 0))
    # What predicts a further token begins with a projection of two hidden states into one, and has logits of its own.
    weights += further * 2 * a.hidden_size**2 + (1 + further) * a.hidden_size * a.padded_vocab_size
    return 6.0 * weights


def _attention(a: Any) -> float:
    """Multiplications for a token in a layer's attention: with weights, and with keys and values of other tokens."""
    heads, hidden, seen = a.num_attention_heads, a.hidden_size, a.seq_length / 2
    if getattr(a, "multi_latent_attention", False):
        keys, short = a.qk_head_dim + a.qk_pos_emb_head_dim, a.q_lora_rank or 0
        queries = short * (hidden + heads * keys) if short else hidden * heads * keys
        latent = hidden * (a.kv_lora_rank + a.qk_pos_emb_head_dim)
        latent += a.kv_lora_rank * heads * (a.qk_head_dim + a.v_head_dim)
        return float(queries + latent + heads * a.v_head_dim * hidden + seen * heads * (keys + a.v_head_dim))
    wide = heads * a.kv_channels
    groups = a.num_query_groups if a.group_query_attention else heads
    gate = wide if getattr(a, "attention_output_gate", False) else 0
    return float(hidden * (2 * wide + 2 * groups * a.kv_channels + gate) + seen * 2 * wide)
