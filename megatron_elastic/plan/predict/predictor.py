"""Predictor: a device, constants and, where steps were measured, what the model missed there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_elastic.plan.predict.case import Array, Columns
from megatron_elastic.plan.predict.constants import Constants
from megatron_elastic.plan.predict.device import Device
from megatron_elastic.plan.predict.measured.fit import fit
from megatron_elastic.plan.predict.measured.residual import Residual
from megatron_elastic.plan.predict.step import predict

_FOLDS = 5
_FEWEST = 2 * _FOLDS
"""Rows below which there is nothing to hold out."""


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts steps on one kind of device. ``residual`` is None where the model is taken as it is."""

    device: Device
    constants: Constants
    residual: Residual | None = None

    def seconds(self, cases: Columns) -> Array:
        """Of a step of each case."""
        modelled = predict(cases, self.device, self.constants).total
        return modelled if self.residual is None else modelled * self.residual.factor(cases)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A predictor fitted to measured steps.

    Attributes:
        predictor: as fitted on all rows.
        model_error, residual_error: mean relative errors on rows held out in turn, of the model alone and with what it
            missed on the other rows; None where there were too few rows to hold out.
    """

    predictor: Predictor
    model_error: float | None
    residual_error: float | None


def calibrate(cases: Columns, seconds: Array, device: Device, start: Constants | None = None) -> Calibration:
    """Fit constants, and correct by what the model misses if that predicts held-out rows better.

    Deterministic: the same rows in the same order give the same predictor.
    """
    errors = None
    if len(seconds) >= _FEWEST:
        errors = np.mean([_held_out(cases, seconds, device, start, fold) for fold in range(_FOLDS)], axis=0)
    constants = fit(cases, seconds, device, start)
    corrected = _corrected(cases, seconds, Predictor(device, constants))
    if errors is None:
        return Calibration(Predictor(device, constants), None, None)
    chosen = corrected if errors[1] < errors[0] else Predictor(device, constants)
    return Calibration(chosen, float(errors[0]), float(errors[1]))


def _corrected(cases: Columns, seconds: Array, plain: Predictor) -> Predictor:
    missed = np.log(seconds / plain.seconds(cases))
    return Predictor(plain.device, plain.constants, Residual.of(cases, missed))


def _held_out(cases: Columns, seconds: Array, device: Device, start: Constants | None, fold: int) -> Array:
    """Mean errors on one fold of constants fitted on the others: of the model alone, and corrected."""
    order = np.random.default_rng(0).permutation(len(seconds))
    inside, outside = np.sort(order[np.arange(len(order)) % _FOLDS != fold]), np.sort(order[fold::_FOLDS])
    known, asked = cases.take(inside), cases.take(outside)
    plain = Predictor(device, fit(known, seconds[inside], device, start))
    both = plain, _corrected(known, seconds[inside], plain)
    return np.array([np.abs(one.seconds(asked) / seconds[outside] - 1).mean() for one in both])
