"""``megatron.core.transformer.moe.experts``: what an expert makes of one rank's tokens does not depend on the others'.

Ranks that share experts send one another tokens, and Megatron's experts multiply all that they get at once. How many
that are, and so how a product rounds, says how many ranks share. Here the tokens of each rank go through the experts by
themselves, and what each contributes to a gradient is summed up apart: products, gradients and sums are those of any
other expert-parallel size. An expert's first weights depend on its number in the layer, and not on which rank has it.

So with ``bitwise`` and the dispatcher ``alltoall``, which moves tokens and leaves them as they are; ``allgather`` adds
up what experts of several ranks made of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.layers import place
from megatron_elastic.adaptor.layers.leaves import Leaf, with_leaves

_BY_ORIGIN = "_megatron_elastic_by_origin"
"""Of a ``SequentialMLP``: what computes the tokens of each rank but the first, whose it computes itself, and who sends
them. It is not among them: what leads back to itself would stay until the collector comes."""
_numbers: Iterator[int] | None = None
"""Those of the experts that are about to be made."""
_layer = 0
"""What their weights are drawn from, besides."""


def install() -> None:
    """Let experts be made by their numbers, and compute by origin what is told apart. Idempotent."""
    targets.EXPERTS.wrap(_making)
    targets.EXPERT.wrap(_making_one)
    targets.EXPERTS_FORWARD.wrap(_computing)


def numbered() -> bool:
    """Whether what is drawn now is for an expert, by its number."""
    return _numbers is not None


def tell_apart(layer: torch.nn.Module, leaf: Leaf) -> None:
    """Let the experts of a layer, if it has any, compute the tokens of each rank by themselves. Idempotent.

    ``leaf`` makes leaves for the tokens of other ranks.
    """
    for moe in layer.modules():
        if not isinstance(moe, MoELayer) or not isinstance(moe.experts, SequentialMLP):
            continue
        dispatcher, size = moe.token_dispatcher, parallel_state.get_expert_model_parallel_world_size()
        apart = isinstance(dispatcher, MoEAlltoAllTokenDispatcher) and not dispatcher.drop_and_pad
        if apart and size > 1 and not hasattr(moe.experts, _BY_ORIGIN):
            others = tuple(with_leaves(moe.experts, leaf) for _ in range(size - 1))
            setattr(moe.experts, _BY_ORIGIN, (others, dispatcher))


# ---- computing -----------------------------------------------------------------------------


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute(self: SequentialMLP, tokens: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
        by_origin = getattr(self, _BY_ORIGIN, None)
        if by_origin is None:
            return original(self, tokens, counts, probs)
        others, dispatcher = by_origin
        sizes = _sizes(dispatcher)
        order = _Order(sizes)
        made = [
            original(own, part, size.sum(dim=1), prob)[0]
            for own, part, size, prob in zip(
                (self, *others), order.apart(tokens), sizes.unbind(dim=2), order.apart(probs), strict=True
            )
        ]
        return order.together(made), None  # an expert has added its bias already

    return compute


class _Order:
    """Tokens as they come, [expert][tensor-parallel index][origin], and by origin: [origin][expert][index].

    ``sizes``: how many there are, in the first order.
    """

    def __init__(self, sizes: torch.Tensor) -> None:
        self._origins = sizes.shape[2]
        self._as_they_come: list[int] = sizes.flatten().tolist()
        self._by_origin: list[list[int]] = sizes.permute(2, 0, 1).flatten(1).tolist()

    def apart(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Those of each origin."""
        chunks = tokens.split(self._as_they_come)
        return [torch.cat(chunks[origin :: self._origins]) for origin in range(self._origins)]

    def together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """In the order in which they came."""
        chunks = [part.split(sizes) for part, sizes in zip(parts, self._by_origin, strict=True)]
        return torch.cat([chunk for each in zip(*chunks, strict=True) for chunk in each])


def _sizes(dispatcher: MoEAlltoAllTokenDispatcher) -> torch.Tensor:
    """How many tokens came: [local expert, tensor-parallel index, expert-parallel index]."""
    tp, ep = dispatcher.tp_size, dispatcher.ep_size
    if dispatcher.num_local_experts > 1:
        return dispatcher.num_global_tokens_per_local_expert.cpu().view(tp, ep, -1).permute(2, 0, 1)
    mine = torch.as_tensor(dispatcher.output_splits)  # of a single expert it only keeps what a rank sends itself
    if tp == 1:
        return mine.view(1, 1, ep)
    found = mine.new_empty(tp * ep)
    dist.all_gather_into_tensor(found, mine.contiguous(), group=dispatcher.tp_group)
    return found.view(1, tp, ep)


# ---- making --------------------------------------------------------------------------------


def _making(original: Callable[..., None]) -> Callable[..., None]:
    def make(self: SequentialMLP, num_local_experts: int, *args: Any, **kwargs: Any) -> None:
        global _numbers, _layer
        first = parallel_state.get_expert_model_parallel_rank() * num_local_experts
        with place.aside() as _layer:
            _numbers = iter(range(first, first + num_local_experts))
            try:
                original(self, num_local_experts, *args, **kwargs)
            finally:
                _numbers = None

    return make


def _making_one(original: Callable[..., None]) -> Callable[..., None]:
    def make(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if _numbers is not None:
            place.begin(_layer, "expert", next(_numbers))
        original(self, *args, **kwargs)

    return make
