"""Check: predictions held against measured steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_elastic.plan.predict.case import Array, Columns
from megatron_elastic.plan.predict.measured.table import Table
from megatron_elastic.plan.predict.predictor import Predictor

_UNITS = (1.0, 1e-3)
"""In seconds, that a table may mean which does not say."""


@dataclass(frozen=True, slots=True)
class Check:
    """A table's steps as measured and as predicted, in seconds, and their relative errors; shape (rows,)."""

    table: Table
    measured: Array
    predicted: Array

    @classmethod
    def of(cls, table: Table, predictor: Predictor) -> Check:
        """Predict what the table has measured."""
        predicted = predictor.seconds(Columns.of(table.cases))
        return cls(table, table.seconds(likely_unit(table, predictor)), predicted)

    @property
    def errors(self) -> Array:
        """|predicted / measured - 1|."""
        return np.abs(self.predicted / self.measured - 1)

    @property
    def bias(self) -> float:
        """Predicted by measured, at the median."""
        return float(np.median(self.predicted / self.measured))

    def summary(self, rows: Sequence[int] | None = None) -> Mapping[str, float]:
        """Of the rows with these indices, by default all: how many, mean and median error, and the worst row's."""
        errors = self.errors if rows is None else self.errors[np.asarray(rows, dtype=np.intp)]
        figures = {"mean_error": errors.mean(), "median_error": np.median(errors), "worst": errors.max()}
        return {"rows": len(errors), **{name: round(float(value), 6) for name, value in figures.items()}}

    def to_json(self) -> str:
        """``summary`` in one line."""
        return json.dumps(self.summary())

    def known(self, other: Table) -> list[int]:
        """Indices of rows that ``other`` has, too: they say nothing about a predictor that was fitted on it."""
        there = set(zip(other.cases, other.times.tolist(), strict=True))
        rows = zip(self.table.cases, self.table.times.tolist(), strict=True)
        return [index for index, row in enumerate(rows) if row in there]


def likely_unit(table: Table, predictor: Predictor) -> float:
    """The unit of a table's times in seconds: as it says, else the one that is nearest to what is predicted."""
    if table.unit is not None:
        return table.unit
    off = float(np.median(np.log(table.times / predictor.seconds(Columns.of(table.cases)))))
    return min(_UNITS, key=lambda unit: abs(off + np.log(unit)))
