"""Constants: the few numbers that the model of a step cannot know from data sheets, with what is expected of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from megatron_elastic.plan.predict.case import Array


class ConstantsError(Exception):
    """Constants cannot be read. The message names the entry and what it should be."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is expected of a constant before anything was measured: about ``value``, give or take a factor.

    ``spread`` is the standard deviation of its natural logarithm; it stays within ``least`` and ``most``.
    """

    value: float
    spread: float
    least: float
    most: float
    unit: str
    what: str


def _constant(value: float, spread: float, least: float, most: float, unit: str, what: str) -> Any:
    return field(default=value, metadata={"prior": Prior(value, spread, least, most, unit, what)})


@dataclass(frozen=True, slots=True)
class Constants:
    """Numbers of ``step``. The defaults are what is expected of any device; ``FITTED`` are to predict with."""

    matmul: float = _constant(0.7, 0.25, 0.05, 1.0, "of peak", "efficiency of large matrix products")
    fill_us: float = _constant(
        15.0, 0.7, 0.1, 300.0, "us", "what a matrix product takes besides: filling and draining the device"
    )
    memory: float = _constant(0.75, 0.25, 0.05, 1.0, "of bandwidth", "efficiency of what memory bounds")
    scores_bytes: float = _constant(10.0, 0.7, 0.1, 60.0, "bytes", "moved for each attention score of a forward")
    logits_bytes: float = _constant(20.0, 0.7, 1.0, 120.0, "bytes", "moved for each logit of a forward: the loss")
    launch_ms: float = _constant(
        0.6, 0.7, 0.001, 20.0, "ms", "the least that a layer's forward takes: launching its kernels"
    )
    grain_ms: float = _constant(
        0.3, 1.0, 0.001, 50.0, "ms", "of each forward of a grain on each stage besides its layers"
    )
    link: float = _constant(0.7, 0.3, 0.02, 1.0, "of bandwidth", "efficiency of collectives inside a node")
    message_us: float = _constant(
        20.0, 0.8, 0.5, 2000.0, "us", "of a collective besides what it moves, for each doubling of its ranks"
    )
    network: float = _constant(0.5, 0.5, 0.02, 1.0, "of bandwidth", "efficiency of transfers between nodes")
    update: float = _constant(0.75, 0.3, 0.05, 1.0, "of bandwidth", "efficiency of the optimizer's update")
    step_ms: float = _constant(2.0, 1.2, 0.001, 500.0, "ms", "of a step besides")

    @classmethod
    def priors(cls) -> Mapping[str, Prior]:
        """What is expected of each, in order."""
        return {entry.name: entry.metadata["prior"] for entry in fields(cls)}

    @classmethod
    def from_vector(cls, logarithms: Array) -> Constants:
        """From natural logarithms, in order."""
        return cls(*(float(value) for value in np.exp(logarithms)))

    def vector(self) -> Array:
        """Natural logarithms, in order, float64."""
        return np.log(np.array([getattr(self, entry.name) for entry in fields(self)], dtype=np.float64))

    def to_json(self) -> str:
        """One object; ``from_json`` reads it."""
        return json.dumps({name: float(f"{value:.6g}") for name, value in asdict(self).items()}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Constants:
        """Constants of an object with all of them or some; the others are as expected. Raises ConstantsError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConstantsError(f"the constants are not JSON: {error}") from None
        priors = cls.priors()
        if not isinstance(data, dict) or set(data) - set(priors):
            raise ConstantsError(f"constants must be an object with some of {', '.join(priors)}, not {data!r:.80}")
        for name, value in data.items():
            low, high = priors[name].least, priors[name].most
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConstantsError(f"constant {name} is {value!r}, but must be a number from {low:g} to {high:g}")
        return cls(**data)


FITTED = Constants(
    matmul=0.817374, fill_us=18.2688, memory=0.790117, scores_bytes=7.00327, logits_bytes=30.2027, launch_ms=0.736463,
    grain_ms=0.390631, link=0.826937, message_us=38.7458, network=0.5, update=0.820559, step_ms=1.22006,
)  # fmt: skip
"""Fitted on 144 of the 1,440 rows of vTrain's table of one node (A100, full recomputation), drawn with seed 0.

docs/prediction.md has the command. Nothing in it says anything about ``network``, which is what is expected.
"""
