"""Fit: constants from measured steps: robust least squares of logarithms, drawn to what is expected of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_elastic.plan.predict.case import Array, Columns
from megatron_elastic.plan.predict.constants import Constants
from megatron_elastic.plan.predict.device import Device
from megatron_elastic.plan.predict.step import predict

_NOISE = 0.08
"""Relative error that the model is expected to have on a row: what weighs rows against the expectations."""
_MOST = 32
"""Rows beyond which more of them weigh no more together: the model errs alike on rows that are alike."""
_OUTLIER = 2.5
"""Errors, in units of the noise, beyond which a row counts with its error and no longer with the square of it."""
_ROUNDS = 60
_NUDGE = 1e-4


def fit(cases: Columns, seconds: Array, device: Device, start: Constants | None = None) -> Constants:
    """Constants with which the cases take ``seconds``, as nearly as what is expected of them allows.

    What is expected are the constants ``start``, by default those of ``Constants()``, and the priors' spreads.
    """
    priors = list(Constants.priors().values())
    expected = (start or Constants()).vector()
    spread = np.array([prior.spread for prior in priors])
    low, high = (np.log([getattr(prior, end) for prior in priors]) for end in ("least", "most"))
    measured, noise = np.log(seconds), _NOISE * max(1.0, len(seconds) / _MOST) ** 0.5

    def errors(point: Array) -> Array:
        predicted = np.log(predict(cases, device, Constants.from_vector(point)).total)
        return np.asarray((predicted - measured) / noise)

    return Constants.from_vector(_minimum(errors, expected, spread, low, high))


def _minimum(errors: Callable[[Array], Array], expected: Array, spread: Array, low: Array, high: Array) -> Array:
    """Levenberg and Marquardt's steps within bounds, on errors that Huber's weights tame."""
    point, damping = np.clip(expected, low, high), 1e-2
    now = errors(point)
    cost = _cost(now, point, expected, spread)
    for _ in range(_ROUNDS):
        slope = np.stack([(errors(point + step) - now) / _NUDGE for step in _NUDGE * np.eye(len(point))], axis=1)
        weight = np.minimum(1.0, _OUTLIER / np.maximum(np.abs(now), 1e-9))
        gradient = slope.T @ (weight * now) + (point - expected) / spread**2
        curvature = slope.T @ (weight[:, None] * slope) + np.diag(spread**-2.0)
        while damping < 1e8:
            move = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            there = np.clip(point + move, low, high)
            then = errors(there)
            better = _cost(then, there, expected, spread)
            if better < cost:
                break
            damping *= 4
        else:
            break
        done = cost - better < 1e-6 * cost
        point, now, cost, damping = there, then, better, damping / 5
        if done:
            break
    return point


def _cost(errors: Array, point: Array, expected: Array, spread: Array) -> float:
    size = np.abs(errors)
    huber = np.where(size <= _OUTLIER, size**2 / 2, _OUTLIER * (size - _OUTLIER / 2))
    return float(huber.sum() + (((point - expected) / spread) ** 2).sum() / 2)
