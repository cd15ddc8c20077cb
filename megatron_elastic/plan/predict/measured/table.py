"""Table: measured step times from a file of comma-separated values, by the names of its columns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_elastic.plan import tabular
from megatron_elastic.plan.predict.case import Array, Case


class TableError(Exception):
    """A table cannot be read. The message says which column or line, and what was found."""


_NAMES: Mapping[str, str] = {
    "devices": "gpus, gpu count, total gpus, n gpus, ngpus, devices, device count, world size, ranks, accelerators",
    "global_batch": "global batch, global batch size, gbs, batch size, batch, total batch size, train batch size, gb",
    "micro_batch": "micro batch, micro batch size, microbatch, microbatch size, mbs, mb, "
    "train micro batch size per gpu, batch size per gpu",
    "grains": "micro batches, microbatches, gradient accumulation steps, gradient accumulation, accumulation steps, "
    "gas",
    "hidden": "hidden size, hidden, hidden dim, hidden dimension, d model, model dim, embedding size, embed dim, h",
    "heads": "attention heads, heads, n heads, n head, head count, a",
    "layers": "layers, n layers, n layer, layer count, transformer layers, depth, l",
    "seq_length": "sequence length, sequence len, seq length, seq len, seqlen, seq, sequence, max sequence length, "
    "max seq length, max length, context length, context, s",
    "tp": "tensor parallelism, tensor parallel, tensor parallel size, tensor model parallel size, "
    "tensor model parallel, "
    "tensor parallel degree, tensor parallelism degree, tp, tp size, tp degree, tensor, model parallel size, mp",
    "pp": "pipeline parallelism, pipeline parallel, pipeline parallel size, pipeline model parallel size, "
    "pipeline model parallel, pipeline parallel degree, pipeline parallelism degree, pipeline stages, stages, pp, "
    "pp size, pp degree, pipeline",
    "dp": "data parallelism, data parallel, data parallel size, data parallel degree, data parallelism degree, dp, "
    "dp size, dp degree, data",
    "time": "iteration time, iter time, time per iteration, elapsed time per iteration, iteration latency, step time, "
    "time per step, step latency, step duration, iteration duration, measured iteration time, measured step time, "
    "measured time, actual iteration time, real iteration time, measured, elapsed time, elapsed, latency, time",
    "vocab_size": "vocab size, vocabulary size, vocab, vocabulary, padded vocab size",
    "ffn": "ffn hidden size, ffn size, ffn, intermediate size, d ff, mlp hidden size",
    "groups": "query groups, kv heads, key value heads, kv groups",
    "chunks": "virtual stages, virtual pipeline stages, virtual pipeline size, virtual pipeline model parallel size, "
    "model chunks, chunks, vpp, interleaving, interleave",
    "recompute": "recompute, recomputation, full recompute, activation recomputation, activation recompute, "
    "activation checkpointing, checkpoint activations, gradient checkpointing, use checkpoint",
}  # fmt: skip
"""Names that columns go by, in lower case, without units, signs and 'number of'. The earlier name counts."""
_ROLES: Mapping[str, tuple[str, int]] = {
    name.replace(" ", ""): (role, rank) for role, names in _NAMES.items() for rank, name in enumerate(names.split(", "))
}
_LEADS = ("numberof", "num", "noof", "nrof", "no", "nr", "n")
_NEEDED = ("hidden", "heads", "layers", "seq_length", "time")
_DEGREES = ("devices", "tp", "pp", "dp")
_BATCHES = ("global_batch", "micro_batch", "grains")
"""All but one of each of these are needed."""
_CALLED = {
    "seq_length": "sequence length", "time": "iteration time", "hidden": "hidden size", "heads": "attention heads",
    "tp": "tensor parallelism", "pp": "pipeline parallelism", "dp": "data parallelism",
}  # fmt: skip
_UNITS = {
    "ms": 1e-3, "msec": 1e-3, "msecs": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "microseconds": 1e-6, "min": 60.0, "minutes": 60.0,
}  # fmt: skip
_NOTHING = {"", "-", "oom", "out of memory", "nan", "n/a", "na", "none", "null", "failed", "error", "inf"}
"""What stands for a time where there is none."""
_YES = {"1", "true", "yes", "y", "full", "on", "uniform", "block"}
_NO = {"0", "false", "no", "n", "none", "off", "", "-", "selective"}
"""Of recomputation: what is not of whole layers takes little time."""


@dataclass(frozen=True, slots=True)
class Table:
    """Measured steps.

    Attributes:
        name: of the file.
        cases: what was run.
        times: how long a step took, shape (rows,), in units of ``unit``.
        unit: in seconds; None where the table does not say.
        lines: of the file, on which the rows are.
        skipped: rows without a time.
        columns: what was read -> the column it was read from.
        unknown: the other columns.
    """

    name: str
    cases: tuple[Case, ...]
    times: Array
    unit: float | None
    lines: tuple[int, ...]
    skipped: int
    columns: Mapping[str, str]
    unknown: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path, recompute: bool, vocab_size: int = 51_200) -> Table:
        """Read a file. What it has no column for is ``recompute`` and ``vocab_size``. Raises TableError, OSError."""
        try:
            text = tabular.text(path.read_bytes(), packed=path.suffix.lower() == ".gz")
        except ValueError as error:
            raise TableError(f"{path.name}: {error}") from None
        return cls.parse(text, path.name, recompute, vocab_size)

    @classmethod
    def parse(cls, text: str, name: str, recompute: bool, vocab_size: int = 51_200) -> Table:
        """Read text: a line of names, then one for each row; commas, semicolons or tabs between. Raises TableError."""
        try:
            rows = list(tabular.rows(text))
        except ValueError as error:
            raise TableError(f"{name}: {error}") from None
        header: list[str] | None = None
        columns: dict[str, int] = {}
        unit: float | None = None
        cases: list[Case] = []
        times: list[float] = []
        lines: list[int] = []
        skipped = 0
        for number, row in rows:
            if not any(cell.strip() for cell in row):
                continue
            if header is None:
                header = row
                columns, unit = _columns(name, header)
                continue
            line = _Line(f"{name}, line {number}", row, header, columns)
            if line.text("time").lower() in _NOTHING:
                skipped += 1
                continue
            times.append(line.number("time"))
            cases.append(line.case(recompute, vocab_size))
            lines.append(number)
        if not cases:
            raise TableError(f"{name}: there is no row with a time" if header else f"{name}: the file is empty")
        titles = [title.strip().lstrip("\ufeff") for title in header or ()]
        named = {role: titles[index] for role, index in columns.items()}
        unknown = tuple(title for index, title in enumerate(titles) if title and index not in columns.values())
        return cls(name, tuple(cases), np.array(times), unit, tuple(lines), skipped, named, unknown)

    def seconds(self, unit: float) -> Array:
        """Times in seconds, in units of ``unit`` where the table does not say."""
        return self.times * (unit if self.unit is None else self.unit)


# ---- names ----------------------------------------------------------------------------------


def _columns(name: str, header: Sequence[str]) -> tuple[dict[str, int], float | None]:
    """Where each role is, and the unit of the time. Raises TableError."""
    columns: dict[str, int] = {}
    ranks: dict[str, int] = {}
    unit: float | None = None
    for index, title in enumerate(header):
        known, found = _known(title)
        if known is None:
            continue
        role, rank = known
        if role in columns and rank == ranks[role]:
            raise TableError(f"{name}: columns {header[columns[role]]!r} and {title!r} are the same: leave one out")
        if role in columns and rank > ranks[role]:
            continue
        columns[role], ranks[role] = index, rank
        if role == "time":
            unit = found
    there = ", ".join(repr(title.strip().lstrip("\ufeff")) for title in header)
    missing = [role for role in _NEEDED if role not in columns]
    if sum(role in columns for role in _DEGREES) < len(_DEGREES) - 1:
        missing += [role for role in _DEGREES if role != "devices" and role not in columns]
    if sum(role in columns for role in _BATCHES) < len(_BATCHES) - 1:
        missing += [role for role in _BATCHES if role != "grains" and role not in columns]
    if missing:
        first, *more = (repr(_CALLED.get(role, role.replace("_", " "))) for role in missing)
        first += ", nor others that tell" if missing[0] in _DEGREES else ""
        also = f"; also missing: {', '.join(more)}" if more else ""
        raise TableError(f"{name}: there is no column {first}; the columns are {there}{also}")
    return columns, unit


def _known(title: str) -> tuple[tuple[str, int] | None, float | None]:
    """What a column is, and how usual that name of it is, and the unit that it gives."""
    words = re.sub(r"([a-z])([A-Z])", r"\1 \2", title.lstrip("\ufeff").strip()).lower()
    inside = [word for part in re.findall(r"[(\[{]([^)\]}]*)[)\]}]", words) for word in part.split()]
    parts = re.findall(r"[a-z0-9µμ]+", re.sub(r"[(\[{][^)\]}]*[)\]}]", " ", words))
    unit = next((_UNITS[word] for word in inside if word in _UNITS), None)
    if len(parts) > 1 and parts[-1] in _UNITS:
        unit = _UNITS[parts.pop()]
    elif len(parts) > 1 and parts[0] in _UNITS and parts[-1] in ("iteration", "iter", "step"):
        return _ROLES["iterationtime"], _UNITS[parts[0]]
    if parts[-1:] == ["in"]:
        parts.pop()
    name = "".join(parts)
    names = [name, *(name.removeprefix(lead) for lead in _LEADS if name.startswith(lead))]
    return next((_ROLES[plain] for plain in names if plain in _ROLES), None), unit


# ---- rows -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    where: str
    row: Sequence[str]
    header: Sequence[str]
    columns: Mapping[str, int]

    def text(self, role: str) -> str:
        """A cell, '' where the row is too short."""
        index = self.columns[role]
        return self.row[index].strip() if index < len(self.row) else ""

    def number(self, role: str) -> float:
        """A positive number. Raises TableError."""
        text = self.text(role)
        if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text):
            text = text.replace(",", "")
        try:
            value = float(text.replace(",", ".") if "." not in text else text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise TableError(f"{self.where}: {self._title(role)} is {text!r}, but must be a positive number")
        return value

    def size(self, role: str) -> int:
        """A positive whole number. Raises TableError."""
        value = self.number(role)
        if value != int(value):
            raise TableError(f"{self.where}: {self._title(role)} is {value:g}, but must be a whole number")
        return int(value)

    def _title(self, role: str) -> str:
        return repr(self.header[self.columns[role]].strip().lstrip("\ufeff"))

    def case(self, recompute: bool, vocab_size: int) -> Case:
        """What the row says. Raises TableError."""
        tp, pp, dp = self._degrees()
        grains = self.size("grains") if "grains" in self.columns else None
        if "micro_batch" in self.columns:
            micro = self.size("micro_batch")
            batch = self.size("global_batch") if "global_batch" in self.columns else micro * dp * (grains or 1)
        else:
            batch = self.size("global_batch")
            micro = max(1, batch // (dp * (grains or 1)))
        return Case(
            layers=self.size("layers"), hidden=self.size("hidden"), heads=self.size("heads"),
            seq_length=self.size("seq_length"), tp=tp, pp=pp, dp=dp, micro_batch=micro, global_batch=batch,
            vocab_size=self._optional("vocab_size", vocab_size), ffn=self._optional("ffn", 0),
            groups=self._optional("groups", 0), chunks=self._optional("chunks", 1),
            recompute=self._recompute(recompute),
        )  # fmt: skip

    def _optional(self, role: str, default: int) -> int:
        there = role in self.columns and self.text(role).lower() not in _NO
        return self.size(role) if there else default

    def _degrees(self) -> tuple[int, int, int]:
        known = {role: self.size(role) for role in ("devices", "tp", "pp", "dp") if role in self.columns}
        product = math.prod(known.get(role, 1) for role in ("tp", "pp", "dp"))
        missing = [role for role in ("tp", "pp", "dp") if role not in known]
        if missing:
            if known["devices"] % product:
                raise TableError(f"{self.where}: {known['devices']} devices cannot be divided by {product}")
            known[missing[0]] = known["devices"] // product
        elif known.get("devices", product) != product:
            raise TableError(
                f"{self.where}: {self._title('devices')} is {known['devices']}, but the parallel sizes make {product}"
            )
        return known["tp"], known["pp"], known["dp"]

    def _recompute(self, default: bool) -> bool:
        if "recompute" not in self.columns:
            return default
        text = self.text("recompute").lower()
        if text not in _YES | _NO:
            raise TableError(f"{self.where}: {self._title('recompute')} is {text!r}, but must be 'full' or 'none'")
        return text in _YES
