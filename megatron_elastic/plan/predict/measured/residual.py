"""Residual: what the model of a step misses on measured rows, carried over to rows like them (kriging).

A Gaussian process over the logarithm of measured by predicted. Far from all rows it is 1, so that what is unlike them
is predicted by the model alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from megatron_elastic.plan.predict.case import Array, Columns

_Matrix = NDArray[np.float64]
_MOST = 160
"""Rows on which scales are chosen; all rows are used with them."""
_EXPECTED, _TRUST = 0.05, 4.0
"""Relative error that is expected of the model, and how many rows that expectation weighs."""
_KERNEL_SCALES = (0.4, 0.7, 1.5)
_ALL_SCALES = (1.5, 3.0, 6.0)
_SHARES = (0.5, 0.8, 0.95)
_NOISES = (0.002, 0.02, 0.1, 0.4)
"""Choices: distances in doublings within which rows are alike, in what kernels see and in all; the part of the variance
that kernels explain; the part of it that is noise."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Of the process: one of each of the choices above."""

    kernels: float
    all: float
    share: float
    noise: float


@dataclass(frozen=True, slots=True)
class Residual:
    """Corrects predictions by rows that were measured.

    Attributes:
        rows: features of the rows, shape (rows, features).
        weights: of the rows, shape (rows,).
        scales: within which rows are alike.
    """

    rows: _Matrix
    weights: Array
    scales: Scales

    @classmethod
    def of(cls, cases: Columns, logarithms: Array) -> Residual:
        """From what the model misses: logarithms of measured by predicted, shape (cases,)."""
        rows = _features(cases)
        scales = _likeliest(rows, logarithms)
        covariance = _alike(rows, rows, scales) + scales.noise * np.eye(len(rows))
        return cls(rows, np.asarray(np.linalg.solve(covariance, logarithms), dtype=np.float64), scales)

    def factor(self, cases: Columns) -> Array:
        """By which the model's predictions are to be multiplied."""
        return np.asarray(np.exp(_alike(_features(cases), self.rows, self.scales) @ self.weights))


_KERNEL_FEATURES = 4
"""Of ``_features`` the first so many are what the kernels of a layer see; the others are how often they run."""


def _features(c: Columns) -> _Matrix:
    """In doublings, shape (cases, features)."""
    columns = (c.hidden, c.tokens, c.tp, c.seq_length, c.stage_layers, c.grains, c.dp, c.pp)
    return np.log2(np.stack(columns, axis=1))


def _alike(one: _Matrix, other: _Matrix, scales: Scales) -> _Matrix:
    kernels, everything = _near(one, other, scales.kernels, _KERNEL_FEATURES), _near(one, other, scales.all, None)
    return scales.share * kernels + (1 - scales.share) * everything


def _near(one: _Matrix, other: _Matrix, scale: float, features: int | None) -> _Matrix:
    """1 for rows that are alike in the first so many features, 0 for those that are far apart."""
    a, b = one[:, :features] / scale, other[:, :features] / scale
    squares = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2 * a @ b.T
    return np.asarray(np.exp(-np.maximum(squares, 0.0) / 2))


def _likeliest(rows: _Matrix, logarithms: Array) -> Scales:
    """The choice under which the logarithms are likeliest, with a variance that is drawn to what is expected."""
    some = np.linspace(0, len(rows) - 1, min(len(rows), _MOST)).round().astype(int)
    rows, logarithms = rows[some], logarithms[some]
    near = {scale: _near(rows, rows, scale, _KERNEL_FEATURES) for scale in _KERNEL_SCALES}
    nearer = {scale: _near(rows, rows, scale, None) for scale in _ALL_SCALES}
    weight, best, likeliest = len(rows) + _TRUST, -np.inf, None
    for kernels, everything, share, noise in product(near, nearer, _SHARES, _NOISES):
        covariance = share * near[kernels] + (1 - share) * nearer[everything] + noise * np.eye(len(rows))
        explained, halved = _whitened(covariance, logarithms, noise)
        variance = (explained + _TRUST * _EXPECTED**2) / weight
        likelihood = -weight * np.log(variance) / 2 - halved
        if likelihood > best:
            best, likeliest = likelihood, Scales(kernels, everything, share, noise)
    assert likeliest is not None
    return likeliest


def _whitened(covariance: _Matrix, values: Array, least: float) -> tuple[float, float]:
    """values' covariance^-1 values, and half the logarithm of the determinant; no eigenvalue is below ``least``.

    By one factorisation: with the values as a further row, the factor's last row is what solving would give.
    """
    corner = float(values @ values) / least + 1.0
    bordered = np.block([[covariance, values[:, None]], [values[None, :], np.array([[corner]])]])
    factor = np.linalg.cholesky(bordered)
    return float((factor[-1, :-1] ** 2).sum()), float(np.log(np.diag(factor)[:-1]).sum())
