"""Case: one model in one parallel layout with one batch, whose step time and memory are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""One figure a case: shape (cases,), float64."""


_OF_A_V = 1.5


class CaseError(Exception):
    """A case cannot be: its sizes do not divide. The message says which, and what would."""


@dataclass(frozen=True, slots=True)
class Case:
    """A GPT and how it is trained, by Megatron's names.

    Attributes:
        layers, hidden, heads, seq_length, vocab_size: of the model.
        ffn: hidden size of the networks after attention; 0: four times ``hidden``.
        groups: of queries that share keys and values; 0: as many as heads.
        gated: whether these networks have a gate (SwiGLU).
        tp, pp, dp: sizes of tensor, pipeline and data parallelism.
        micro_batch: samples of a grain.
        global_batch: samples of a step.
        chunks: of a pipeline stage (virtual stages).
        v: whether they are two, placed as a V: the first stage has both ends of the model.
        recompute: whether the backward of a layer begins with its forward (full recomputation).
        overlap: whether gradients are reduced during the backward.
        sharded: whether the optimizer's state is divided among the data-parallel ranks.
    """

    layers: int
    hidden: int
    heads: int
    seq_length: int
    tp: int
    pp: int
    dp: int
    micro_batch: int
    global_batch: int
    vocab_size: int = 51_200
    ffn: int = 0
    groups: int = 0
    gated: bool = False
    chunks: int = 1
    recompute: bool = False
    overlap: bool = False
    sharded: bool = False
    v: bool = False

    @property
    def devices(self) -> int:
        """That the layout takes."""
        return self.tp * self.pp * self.dp

    @property
    def pieces(self) -> float:
        """Into how many the bubble of 1F1B is cut, or rather by which it is divided. A V in step leaves two thirds."""
        return _OF_A_V if self.v else float(self.chunks)

    @property
    def grains(self) -> int:
        """Micro-batches of the data-parallel replica that has most."""
        return -(-self.global_batch // (self.dp * self.micro_batch))

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.seq_length

    def check(self, uneven: bool = False) -> None:
        """Raises CaseError where Megatron would refuse it; with ``uneven`` replicas may differ in their grains."""
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("ffn", "groups") or isinstance(value, bool) else 1
            if value < least:
                raise CaseError(f"{field.name} is {value}, but must be at least {least}")
        blocks = self.pp * self.chunks
        if self.layers < blocks:
            raise CaseError(f"{self.layers} layers are too few for {self.pp} stages of {self.chunks} chunks")
        if self.hidden % self.heads:
            raise CaseError(f"a hidden size of {self.hidden} cannot be divided among {self.heads} heads")
        if self.groups and self.heads % self.groups:
            raise CaseError(f"{self.heads} heads cannot be divided among {self.groups} groups that share keys")
        if self.heads % self.tp or (self.groups and self.groups % self.tp):
            raise CaseError(f"{self.groups or self.heads} heads or groups cannot be divided among {self.tp} ranks (TP)")
        replicas = 1 if uneven else self.dp
        if self.global_batch % (replicas * self.micro_batch) or self.global_batch < self.dp * self.micro_batch:
            raise CaseError(
                f"a global batch of {self.global_batch} cannot be divided into micro-batches of {self.micro_batch} "
                f"on {self.dp} replicas (DP)"
            )
        if self.chunks > 1 and self.pp == 1:
            raise CaseError("several chunks a stage need several stages")
        if self.v and self.chunks != 2:
            raise CaseError(f"a V has two chunks a stage, not {self.chunks}")


@dataclass(frozen=True, slots=True)
class Columns:
    """Cases as columns of numbers: every attribute as in ``Case``, float64, shape (cases,)."""

    layers: Array
    hidden: Array
    heads: Array
    seq_length: Array
    tp: Array
    pp: Array
    dp: Array
    micro_batch: Array
    global_batch: Array
    vocab_size: Array
    ffn: Array
    groups: Array
    gated: Array
    chunks: Array
    recompute: Array
    overlap: Array
    sharded: Array
    v: Array

    @classmethod
    def of(cls, cases: Sequence[Case]) -> Columns:
        """Columns of the cases, with what a 0 stands for filled in."""
        columns = {
            field.name: np.array([getattr(case, field.name) for case in cases], dtype=np.float64)
            for field in fields(cls)
        }
        columns["ffn"] = np.where(columns["ffn"] > 0, columns["ffn"], 4 * columns["hidden"])
        columns["groups"] = np.where(columns["groups"] > 0, columns["groups"], columns["heads"])
        return cls(**columns)

    def take(self, rows: NDArray[np.intp]) -> Columns:
        """Only some cases, by index."""
        return Columns(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def pieces(self) -> Array:
        """As of a case."""
        return np.where(self.v > 0, _OF_A_V, self.chunks)

    @property
    def grains(self) -> Array:
        """Micro-batches of the data-parallel replica that has most."""
        return np.ceil(self.global_batch / (self.dp * self.micro_batch))

    @property
    def tokens(self) -> Array:
        """Of a grain."""
        return self.micro_batch * self.seq_length

    @property
    def keys(self) -> Array:
        """Width of all keys, which is that of all values."""
        return self.hidden * self.groups / self.heads

    @property
    def layer_weights(self) -> Array:
        """Weights of one layer, on all its tensor-parallel ranks together; norms and biases are left out."""
        return self.hidden * (2 * self.hidden + 2 * self.keys + (2 + self.gated) * self.ffn)

    @property
    def embedding_weights(self) -> Array:
        """Of the embedding, to which the head is tied."""
        return self.vocab_size * self.hidden

    @property
    def stage_layers(self) -> Array:
        """Layers of the stage that has most of them."""
        return np.ceil(self.layers / self.pp)
