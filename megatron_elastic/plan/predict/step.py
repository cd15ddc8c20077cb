"""Step: how long one takes, from what is computed, moved and waited for. Vectorised over cases; times in seconds.

docs/prediction.md derives the formulas. A backward counts as two forwards in all but communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_elastic.plan.predict.case import Array, Columns
from megatron_elastic.plan.predict.constants import Constants
from megatron_elastic.plan.predict.device import Device

_TILE = 128
"""Rows and columns of a result that one processor computes at a time."""
_SHARPNESS = 4
"""Exponent by which the greater of two bounds wins: 1 would be their sum, infinity their maximum."""
_WIDTH = 2
"""Bytes of weights, activations and gradients: bf16 or fp16."""
UPDATE_BYTES = 36
"""Bytes that Adam reads and writes for a weight: gradient, master, two moments, and the copy in half precision."""


@dataclass(frozen=True, slots=True)
class Step:
    """Predicted times of each case, in seconds, shape (cases,).

    Attributes:
        total: the step.
        layer_forward, layer_backward: of a grain, with the layer's collectives.
        layer_collectives: those of both passes alone.
        head, embedding: forward and backward of a grain.
        boundary: a grain's activation on its way between two stages.
        busy: what the busiest stage computes in a step, its collectives included.
        bubble: the rest of the pipeline.
        reduction: of gradients, as far as training waits for it.
        update: the optimizer's.
    """

    total: Array
    layer_forward: Array
    layer_backward: Array
    layer_collectives: Array
    head: Array
    embedding: Array
    boundary: Array
    busy: Array
    bubble: Array
    reduction: Array
    update: Array


def predict(cases: Columns, device: Device, constants: Constants) -> Step:
    """Steps of all cases under 1F1B, interleaved where there are several chunks."""
    c, k = cases, constants
    tokens, launch = c.tokens, 1e-3 * k.launch_ms
    collective = all_reduce(_WIDTH * tokens * c.hidden, c.tp, np.ones_like(tokens), np.ones_like(tokens), device, k)
    computing = _greater(_layer(c, device, k), launch)
    forward = computing + 2 * collective
    backward = 2 * computing + 2 * collective + c.recompute * forward
    head = 3 * (_head(c, device, k) + 1e-3 * k.grain_ms)
    embedding = 3 * (_moved(4 * _WIDTH * tokens * c.hidden, device, k) + 1e-3 * k.grain_ms) + collective
    boundary = send(_WIDTH * tokens * c.hidden / c.tp, c, device, k)
    busiest, pipeline = _pipeline(c, forward + backward, head, embedding, boundary)
    reduction, update = _end(c, device, k)
    exposed = np.where(c.overlap > 0, np.maximum(0.0, reduction - busiest / c.grains * 2 / 3), reduction)
    return Step(
        total=pipeline + exposed + update + 1e-3 * k.step_ms,
        layer_forward=forward,
        layer_backward=backward,
        layer_collectives=(4 + 2 * c.recompute) * collective,
        head=head,
        embedding=embedding,
        boundary=boundary,
        busy=busiest,
        bubble=pipeline - busiest,
        reduction=exposed,
        update=update,
    )


# ---- what is computed -----------------------------------------------------------------------


def _greater(one: Array, other: Array | float) -> Array:
    """Whichever bounds, smoothly: where both are alike, neither hides the other."""
    return (one**_SHARPNESS + np.asarray(other) ** _SHARPNESS) ** (1 / _SHARPNESS)


def _matmul(m: Array, n: Array, k: Array, device: Device, constants: Constants, count: Array | float = 1.0) -> Array:
    """``count`` products at a time, (m, k) by (k, n): by computing or by memory, whichever takes longer."""
    tiles = np.ceil(m / _TILE) * np.ceil(n / _TILE) * count
    computing = tiles * _TILE * _TILE * 2 * k / (device.flops * constants.matmul)
    moving = _moved(_WIDTH * count * (m * k + k * n + m * n), device, constants)
    return _greater(computing, moving) + 1e-6 * constants.fill_us


def _moved(size: Array, device: Device, constants: Constants) -> Array:
    return size / (device.memory_bandwidth * constants.memory)


def _layer(c: Columns, device: Device, k: Constants) -> Array:
    """Forward of a layer on one rank without its collectives."""
    tokens, tp, hidden = c.tokens, c.tp, c.hidden
    products = (
        _matmul(tokens, (hidden + 2 * c.keys) / tp, hidden, device, k)
        + _matmul(c.seq_length, c.seq_length, hidden / c.heads, device, k, c.micro_batch * c.heads / tp)
        + _matmul(c.seq_length, hidden / c.heads, c.seq_length, device, k, c.micro_batch * c.heads / tp)
        + _matmul(tokens, hidden, hidden / tp, device, k)
        + _matmul(tokens, (1 + c.gated) * c.ffn / tp, hidden, device, k)
        + _matmul(tokens, hidden, c.ffn / tp, device, k)
    )
    scores = k.scores_bytes * c.micro_batch * c.heads / tp * c.seq_length**2
    # Two norms (read, write), two sums with bias and dropout (two reads, a write, a mask), and the activation function.
    others = tokens * (2 * 2 + 2 * 3.5) * _WIDTH * hidden + tokens * (2 + c.gated) * _WIDTH * c.ffn / tp
    return products + _moved(scores + others, device, k)


def _head(c: Columns, device: Device, k: Constants) -> Array:
    """Forward of the output layer and the loss on one rank."""
    logits = c.tokens * c.vocab_size / c.tp
    return _matmul(c.tokens, c.vocab_size / c.tp, c.hidden, device, k) + _moved(k.logits_bytes * logits, device, k)


# ---- what is sent ---------------------------------------------------------------------------


def all_reduce(size: Array, ranks: Array, stride: Array, rivals: Array, device: Device, k: Constants) -> Array:
    """A ring's all-reduce of ``size`` bytes among ``ranks`` that are ``stride`` apart, 0 for one rank.

    Inside a node and between nodes at a time: the slower counts. ``rivals`` groups share a node's adapters.
    """
    inside = np.minimum(ranks, np.maximum(1, device.per_node // np.minimum(stride, device.per_node)))
    nodes = np.ceil(ranks / inside)
    within = 2 * (inside - 1) / inside * size / (device.link_bandwidth * k.link)
    between = 2 * (nodes - 1) / nodes * size * rivals / (device.node_bandwidth * k.network)
    hops = np.log2(np.maximum(ranks, 1))
    latency = hops * 1e-6 * k.message_us + np.where(nodes > 1, 2 * np.log2(nodes) * device.node_latency, 0.0)
    return np.where(ranks > 1, np.maximum(within, between) + latency, 0.0)


def send(size: Array, c: Columns, device: Device, k: Constants) -> Array:
    """From one stage to the next, 0 for one stage. All ranks of a node send at the same time."""
    inside = c.tp * c.dp * c.pp <= device.per_node
    link = size / (device.link_bandwidth * k.link) + device.link_latency
    network = size * device.per_node / (device.node_bandwidth * k.network) + device.node_latency
    return np.where(c.pp > 1, np.where(inside, link, network) + 1e-6 * k.message_us, 0.0)


# ---- how it is arranged ---------------------------------------------------------------------


def _pipeline(c: Columns, layer: Array, head: Array, embedding: Array, boundary: Array) -> tuple[Array, Array]:
    """What the busiest stage computes, and how long the pipeline takes: ``Costs.pace`` of stages of equal widths."""
    most = int(c.pp.max())
    stage = np.arange(most)[None, :]
    there = stage < c.pp[:, None]
    # The first stages get the layers that are left over, as with plan.split.
    layers = np.floor(c.layers / c.pp)[:, None] + (stage < np.mod(c.layers, c.pp)[:, None])
    each = np.where(there, layers * layer[:, None], 0.0)
    each[:, 0] += embedding
    each[np.arange(len(head)), np.where(c.v > 0, 0, c.pp.astype(int) - 1)] += head
    slowest, total = each.max(axis=1), each.sum(axis=1)
    away = np.cumsum(each[:, ::-1], axis=1)[:, ::-1]
    behind = np.where(there, c.pp[:, None] - 1 - stage, 0)
    away = away + 2 * behind * boundary[:, None]
    grains, live = c.grains[:, None], behind + 1
    waiting = np.where(c.chunks[:, None] > 1, 0.0, away * (grains - live) / live)
    rest = np.where(there, np.maximum((grains - 1) * each, waiting), 0.0).max(axis=1)
    filling = (total - slowest) / c.pieces + 2 * (c.pp * c.chunks - 1 - c.v) * boundary
    return c.grains * slowest, slowest + filling + rest


def _end(c: Columns, device: Device, k: Constants) -> tuple[Array, Array]:
    """Reduction of gradients and update, on a rank of the stage that has most weights."""
    weights = (c.stage_layers * c.layer_weights + c.embedding_weights) / c.tp
    reduction = all_reduce(_WIDTH * weights, c.dp, c.tp, np.minimum(c.tp, device.per_node), device, k)
    # The first and the last stage both hold the embedding; they are on other nodes unless all is on one.
    apart = np.where(c.tp * c.dp * c.pp <= device.per_node, 1.0, device.per_node)
    rivals = np.minimum(c.tp * c.dp, device.per_node)
    tied = all_reduce(_WIDTH * c.embedding_weights / c.tp, np.minimum(c.pp, 2), apart, rivals, device, k)
    share = np.where(c.sharded > 0, c.dp, 1.0)
    update = UPDATE_BYTES * weights / share / (device.memory_bandwidth * k.update)
    return reduction + tied, update
