"""``megatron.core.transformer.multi_token_prediction``: layers that predict further tokens, at the end of the model.

Each takes what the layer before it has made and the embedding of the token that was predicted last, and its result
goes through the model's output layer. So the end of the model needs the embedding, too, as it does where the output
weight is tied to it: up to three uses of one weight. Where the whole model is one stage, autograd would add up in
floating point what they contribute; so each use gets a leaf of its own there, as it has where stages lie between them.

The loss of a further prediction is the mean over the tokens of a micro-batch that count. Megatron takes it over those
that a context-parallel rank has.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers import context, measures
from megatron_elastic.adaptor.layers.leaves import with_leaves
from megatron_elastic.plan.split import mtp_layers


def install() -> None:
    """Let models predict further tokens in any layout. Idempotent."""
    targets.FINAL_NORM.replace(_has_final_norm)
    targets.MTP_ROLL.replace(_roll)
    targets.LABEL_ROLL.replace(_roll)
    targets.MTP_LOSS.replace(_note_with_hits if targets.MTP_LOSS.takes("correct") else _note)
    targets.MTP_RECOMPUTED.wrap(_without_padding)


def names(args: argparse.Namespace) -> tuple[str, ...]:
    """What the losses of further predictions are called, as in Megatron's log."""
    return tuple(_name(layer) for layer in range(mtp_layers(args)))


def leave_out_output(model: GPTModel) -> None:
    """Let the end of a model not have its output weight twice: Megatron makes it, and then uses the embedding's."""
    if model.mtp_process and model.share_embeddings_and_output_weights and not model.pre_process:
        model.output_layer.register_parameter("weight", None)


def look_up_in(model: GPTModel, weight: torch.nn.Parameter) -> None:
    """Let further predictions look tokens up in this leaf. The looking up is part of what predicts, also in time."""
    embedding = with_leaves(model.embedding, lambda _: weight)  # where predictions are, positions are not learned
    embedding._forward_pre_hooks = OrderedDict()
    model.mtp.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "embedding": embedding}), with_kwargs=True
    )


def _has_final_norm(block: TransformerBlock) -> bool:
    """In place of ``has_final_layernorm_in_this_stage``, which asks for the last layer where there are predictions."""
    return bool(block.submodules.layer_norm and block.post_process and block.post_layer_norm)


def _roll(
    tensor: torch.Tensor, shifts: int = -1, dims: int = -1, cp_group: Any = None, packed_seq_params: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of ``roll_tensor``: the next token's for each token, [batch, sequence / CP], 0 at the end.

    And the sum over the whole sequences; a mean over no tokens is taken over one.
    """
    assert shifts == -1 and packed_seq_params is None
    whole = context.in_order(tensor.movedim(dims, 0))
    rolled = torch.cat((whole[1:], torch.zeros_like(whole[:1])))
    return context.own(rolled).movedim(0, dims).contiguous(), rolled.sum().clamp(min=1)


def _without_padding(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """0.18 tells what recomputes of padding, which there is none of, and it does not take that."""

    def recompute(self: torch.nn.Module, *args: Any, padding_mask: None = None, **kwargs: Any) -> torch.Tensor:
        return original(self, *args, **kwargs)

    return recompute


def _note(
    loss: torch.Tensor, layer_number: int, num_layers: int, reduce_group: object = None, avg_group: object = None
) -> None:
    """In place of ``save_loss_to_tracker``: a rank's part of the mean over a micro-batch."""
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        measures.note(_name(layer_number), layer_number, loss)


def _note_with_hits(
    loss: torch.Tensor, correct: object, total: object, layer_number: int, num_layers: int,
    reduce_group: object = None, avg_group: object = None,
) -> None:  # fmt: skip
    """In place of ``save_metrics_to_tracker`` (0.19), which is also told how many predictions were right."""
    _note(loss, layer_number, num_layers)


def _name(layer: int) -> str:
    return f"mtp_{layer + 1} loss"
