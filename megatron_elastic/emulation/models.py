"""Models: shapes as published, which costs are computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with gated feed-forward networks and an output layer of its own.

    Attributes:
        groups: of queries, which share keys and values.
        ffn: width of a layer's feed-forward network, or of each expert's.
        experts: of a layer, ``topk`` of which a token goes to, besides ``shared`` ones; 0: it is dense.
        sequence: length of a sample that the model is trained with.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocabulary: int
    sequence: int
    experts: int = 0
    topk: int = 0
    shared: int = 0

    @property
    def attention(self) -> int:
        """Weights of a layer's attention."""
        return round(2 * self.hidden**2 * (1 + self.groups / self.heads))

    @property
    def network(self) -> int:
        """Weights of one feed-forward network."""
        return 3 * self.hidden * self.ffn

    @property
    def dense(self) -> int:
        """Weights of a layer that all tokens use, norms aside."""
        return self.attention + self.network * (self.shared if self.experts else 1)

    @property
    def table(self) -> int:
        """Weights of the embedding, and of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the model."""
        return self.layers * (self.dense + self.experts * self.network) + 2 * self.table

    @property
    def active(self) -> int:
        """Of these, what one token uses."""
        return self.layers * (self.dense + self.topk * self.network) + 2 * self.table


MODELS: Mapping[str, Shape] = {
    # Touvron et al. 2023, arXiv 2307.09288, table 1, and the models' published configurations.
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2-13b": Shape(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2-34b": Shape(48, 8192, 64, 8, 22016, 32000, 4096),
    # FlexTrain: layers, sizes (1B of 7B, 6B of 60B, 30B of 600B) and sequence lengths are published. Widths and numbers
    # of experts are chosen here so that the sizes come out; the two further predictions are left out.
    "flextrain-small": Shape(15, 2048, 16, 16, 1024, 100000, 8192, experts=64, topk=4, shared=1),
    "flextrain-medium": Shape(29, 4096, 32, 32, 1280, 100000, 32768, experts=128, topk=6, shared=1),
    "flextrain-large": Shape(61, 7168, 56, 56, 2048, 100000, 8192, experts=224, topk=5, shared=1),
}
