"""``megatron.core.models.gpt.gpt_layer_specs``: what norms are called in checkpoints of local layers and of others.

Transformer Engine has a norm in the product that follows it, Megatron's local layers have it apart. Megatron calls them
alike in a checkpoint where all layers are dense and attention is the usual one, and otherwise by where they are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

_PAIRS = (
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
"""Names of the same norm; either may be here, and the other one in a checkpoint."""


def named_as_saved(entries: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """A model's sharded tensors, with the names that a checkpoint has for them; ``names``: all of them there."""
    return {name: _as_saved(entry, names) for name, entry in entries.items()}


def _as_saved(entry: Any, names: Collection[str]) -> Any:
    if entry.key in names:
        return entry
    for pair in _PAIRS:
        for ours, theirs in (pair, pair[::-1]):
            if (key := entry.key.replace(ours, theirs)) != entry.key and key in names:
                return replace(entry, key=key)
    return entry
