"""Predict: step times and memory of layouts that nobody has run, from shapes, devices, and a few constants."""

from megatron_elastic.plan.predict.case import Case, CaseError, Columns
from megatron_elastic.plan.predict.constants import FITTED, Constants, ConstantsError
from megatron_elastic.plan.predict.device import DEVICES, Device, DeviceError
from megatron_elastic.plan.predict.footprint import footprint
from megatron_elastic.plan.predict.foresight import by_model, by_profile, stand_in
from megatron_elastic.plan.predict.measured.check import Check, likely_unit
from megatron_elastic.plan.predict.measured.table import Table, TableError
from megatron_elastic.plan.predict.predictor import Calibration, Predictor, calibrate
from megatron_elastic.plan.predict.scale_table import (
    Entry,
    ScaleTable,
    ScaleTableError,
    divisions,
    scale_table,
)
from megatron_elastic.plan.predict.step import Step, predict

__all__ = [
    "DEVICES", "FITTED", "Calibration", "Case", "CaseError", "Check", "Columns", "Constants", "ConstantsError",
    "Device", "DeviceError", "Entry", "Predictor", "ScaleTable", "ScaleTableError", "Step", "Table", "TableError",
    "by_model", "by_profile", "calibrate", "divisions", "footprint", "likely_unit", "predict", "scale_table",
    "stand_in",
]  # fmt: skip
