"""Scale table: for each number of devices the layout to have there, as predicted. What a fleet's controller reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megatron_elastic.plan.errors import NoLayout
from megatron_elastic.plan.predict.case import Case, CaseError
from megatron_elastic.plan.predict.foresight import Foresee, Foreseen

VERSION = 1
"""Of the format. One more whenever a reader of the one before would go wrong."""
GAIN = 0.05
"""A number of devices is left out if it is not faster by this fraction than every smaller one."""
TOLERANCE = 0.25
"""Two predictions of how much faster a layout is than the present one are inconsistent beyond this factor less 1."""


class ScaleTableError(Exception):
    """A scale table cannot be read. The message says what it should be."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a job would have with so many devices.

    Attributes:
        devices: how many.
        tp, pp, dp, micro_batch, chunks: the layout.
        schedule: ``1f1b``, ``interleaved``, or ``in-step`` for chunks as a V.
        step_ms, tokens_per_s: predicted.
        memory_bytes: on the device that needs most.
        confidence: 1 where two predictors agree, the smaller by the larger of their figures where they do not; None
            where only one has spoken.
    """

    devices: int
    tp: int
    pp: int
    dp: int
    micro_batch: int
    chunks: int
    schedule: str
    step_ms: float
    tokens_per_s: float
    memory_bytes: int
    confidence: float | None


@dataclass(frozen=True, slots=True)
class ScaleTable:
    """Entries by number of devices, ascending, and why other numbers have none.

    ``present``: the layout that the job has, with the sizes of its model; None where these were not known.
    """

    entries: Mapping[int, Entry]
    left_out: Mapping[int, str]
    present: Case | None = None

    def to_json(self) -> str:
        """One object, one entry a line; ``from_json`` reads it."""
        rows = [f"    {json.dumps(str(count))}: {json.dumps(_row(entry))}" for count, entry in self.entries.items()]
        reasons = [f"    {json.dumps(str(count))}: {json.dumps(why)}" for count, why in self.left_out.items()]
        return (
            f'{{\n  "version": {VERSION},\n  "devices": {{\n' + ",\n".join(rows) + "\n  },\n"
            '  "left_out": {\n' + ",\n".join(reasons) + "\n  },\n"
            f'  "present": {json.dumps(None if self.present is None else asdict(self.present))}\n}}\n'
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str | bytes) -> ScaleTable:
        """Raises ScaleTableError."""
        try:
            data = json.loads(text)
            if data["version"] != VERSION:
                raise ScaleTableError(f"the scale table has version {data['version']!r}, but {VERSION} is what is read")
            entries = {int(count): _entry(int(count), row) for count, row in data["devices"].items()}
            present = data.get("present")  # tables of before have none
            return cls(
                entries,
                {int(count): str(why) for count, why in data["left_out"].items()},
                None if present is None else Case(**present),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ScaleTableError(f"not a scale table: {type(error).__name__}: {error}") from None


def _row(entry: Entry) -> Mapping[str, Any]:
    row = asdict(entry)
    del row["devices"]
    layout = {name: row.pop(name) for name in _LAYOUT}
    return {"layout": layout, **row}


_LAYOUT = ("tp", "pp", "dp", "micro_batch", "chunks")


def _entry(devices: int, row: Mapping[str, Any]) -> Entry:
    figures = {**row, **row["layout"], "devices": devices}
    return Entry(**{field.name: figures[field.name] for field in fields(Entry)})


def scale_table(
    counts: Iterable[int],
    layouts: Callable[[int], Iterable[Case]],
    foresee: Foresee,
    *,
    present: Case,
    memory_bytes: float | None = None,
    second: Foresee | None = None,
    uneven: bool = False,
    gain: float = GAIN,
    tolerance: float = TOLERANCE,
) -> ScaleTable:
    """The fastest layout for each number of devices that deserves an entry.

    ``layouts`` names those to look at. Left out are layouts that Megatron would refuse, that do not fit
    ``memory_bytes``, or for which ``foresee`` and ``second`` say different things about how much faster they are than
    the ``present`` layout, which cancels what both get wrong alike; and numbers of devices that are faster by less than
    ``gain`` than a smaller one. Figures of an entry are those of ``foresee``.
    With ``uneven`` replicas may have other numbers of grains, as in jobs with ``--elastic``.
    """
    before = foresee(present), second(present) if second else None

    def consistent(seen: Foreseen, also: Foreseen | None) -> float | None:
        """Confidence. Raises _LeftOut."""
        if also is None or before[0] is None or before[1] is None:
            return None
        speedup, other = before[0].step_ms / seen.step_ms, before[1].step_ms / also.step_ms
        confidence = min(speedup, other) / max(speedup, other)
        if confidence < 1 / (1 + tolerance):
            raise _LeftOut("predicted inconsistently", f"{speedup:.2f} or {other:.2f} times the present speed")
        return confidence

    def entry(case: Case) -> Entry:
        """What the table would say of a case. Raises _LeftOut."""
        try:
            case.check(uneven)
            seen = foresee(case)
            also = second(case) if second else None
        except (CaseError, NoLayout) as error:
            raise _LeftOut("breaks constraints", str(error)) from None
        if seen is None:
            raise _LeftOut("unlike what was measured", f"TP{case.tp}, micro-batches of {case.micro_batch}")
        if memory_bytes is not None and seen.memory_bytes > memory_bytes:
            needs = f"{seen.memory_bytes / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB"
            raise _LeftOut("does not fit", f"TP{case.tp} PP{case.pp} DP{case.dp} needs {needs} a device")
        return _made(case, seen, consistent(seen, also))

    entries: dict[int, Entry] = {}
    left_out: dict[int, str] = {}
    for count in sorted(set(counts)):
        possible: list[Entry] = []
        reasons: dict[str, str] = {}
        for case in layouts(count):
            try:
                possible.append(entry(case))
            except _LeftOut as why:
                reasons.setdefault(why.kind, f"{why.kind}: {why.example}")
        best = min(possible, key=lambda entry: entry.step_ms, default=None)
        so_far = max((entry.tokens_per_s for entry in entries.values()), default=0.0)
        if best is None:
            left_out[count] = "; ".join(reasons.values()) or "there is no such layout"
        elif best.tokens_per_s < so_far * (1 + gain):
            left_out[count] = f"brings little: {best.tokens_per_s:.0f} tokens/s, where fewer devices have {so_far:.0f}"
        else:
            entries[count] = best
    return ScaleTable(entries, left_out)


class _LeftOut(Exception):
    """A layout does not come into question."""

    def __init__(self, kind: str, example: str) -> None:
        super().__init__(kind, example)
        self.kind, self.example = kind, example


def _made(case: Case, seen: Foreseen, confidence: float | None) -> Entry:
    return Entry(
        devices=case.devices, tp=case.tp, pp=case.pp, dp=case.dp, micro_batch=case.micro_batch, chunks=case.chunks,
        schedule="in-step" if case.v else "interleaved" if case.chunks > 1 else "1f1b", step_ms=round(seen.step_ms, 3),
        tokens_per_s=round(1e3 * case.tokens / seen.step_ms, 1), memory_bytes=seen.memory_bytes,
        confidence=None if confidence is None else round(confidence, 4),
    )  # fmt: skip


def divisions(count: int, like: Case, tp: Iterable[int], chunks: Iterable[int] = (1,)) -> list[Case]:
    """All layouts of ``count`` devices for the model and the batch of ``like``, with these tensor-parallel sizes."""
    pieces = [(size, count // size, part) for size in tp if count % size == 0 for part in chunks]
    return [
        replace(like, tp=size, pp=pp, dp=cells // pp, chunks=part)
        for size, cells, part in pieces
        for pp in range(1, cells + 1)
        if cells % pp == 0 and (part == 1 or pp > 1)
    ]
