"""Footprint: memory that a case takes on the device that needs most, from shapes alone; ``plan.costs.memory`` knows
flags.

Mixed precision with Adam, as Megatron has it: weights in 2 bytes, gradients summed in 4, master weights and moments in
12. Activations as Korthikanti et al. count them (Reducing Activation Recomputation, section 4), without sequence
parallelism and with attention scores kept.
"""

from __future__ import annotations

import numpy as np

from megatron_elastic.plan.predict.case import Array, Columns

_WEIGHT, _GRADIENT, _STATE = 2, 4, 12
CONTEXT = 1.5e9
"""Bytes that the device's runtime and communication buffers take. Rounded: it differs between versions."""


def footprint(c: Columns) -> Array:
    """Bytes on the device that needs most, of each case."""
    weights = (c.stage_layers * c.layer_weights + c.embedding_weights) / c.tp
    states = weights * (_WEIGHT + _GRADIENT + _STATE / np.where(c.sharded > 0, c.dp, 1.0))
    first = _in_flight(c) * c.stage_layers * _kept(c)
    logits = c.tokens * c.vocab_size / c.tp * (_WEIGHT + 4)
    last = np.minimum(c.grains, 1.0) * c.stage_layers * _kept(c) + logits
    working = c.recompute * _layer(c)  # of the layer that is computed again
    activations = np.where(c.pp > 1, np.maximum(first, last), first + logits)
    return states + activations + working + CONTEXT


def _in_flight(c: Columns) -> Array:
    """Grains whose activations the first stage keeps under 1F1B, interleaved where there are several chunks. A V keeps
    as many as one chunk does.
    """
    interleaved = ((c.chunks - 1) * c.pp + 2 * c.pp - 1) / c.chunks
    return np.minimum(c.grains, np.where((c.chunks > 1) & (c.v == 0), interleaved, c.pp))


def _kept(c: Columns) -> Array:
    """Bytes that a grain leaves in a layer for the backward."""
    return np.where(c.recompute > 0, _WEIGHT * c.tokens * c.hidden, _layer(c))


def _layer(c: Columns) -> Array:
    inside = _WEIGHT * c.tokens / c.tp * (2 * c.hidden + 2 * c.keys + (2 + c.gated) * c.ffn)
    scores = 5 * c.micro_batch * c.heads / c.tp * c.seq_length**2
    return 10 * c.tokens * c.hidden + inside + scores
