"""Models: a GPT of about so many parameters, jobs that lose ranks with it, and how long those pause."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import JobFailed, progress, run_job, step_times, summary

from megatron_elastic.observe.records import read_events, read_metrics

VOCABULARY = 4096
"""Tokens of the default corpus."""
SEQUENCE = 64
RANKS = 8
PHASES = ("forward", "vote", "param_sync")
FIRST_KILL, BETWEEN = 3, 4
STEPS = FIRST_KILL + len(PHASES) * BETWEEN
_SHARE = 0.6
"""Of the memory that is free, what the ranks of a job may take together."""


@dataclass(frozen=True, slots=True)
class Model:
    """A GPT; ``name`` is what was asked for."""

    name: str
    layers: int
    hidden: int

    @property
    def parameters(self) -> int:
        """How many it really has: embeddings of tokens and positions, layers with biases, the final norm."""
        h = self.hidden
        return (VOCABULARY + SEQUENCE) * h + self.layers * (12 * h * h + 13 * h) + 2 * h

    @classmethod
    def parse(cls, name: str) -> Model:
        """The one nearest to a size such as ``20M``. Raises ValueError."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)M", name)
        if match is None:
            raise ValueError(f"{name!r} is no size: give millions of parameters, for instance 20M")
        wanted = float(match[1]) * 1e6
        candidates = (cls(name, layers, hidden) for hidden in range(64, 4097, 64) for layers in range(4, 17, 4))
        return min(candidates, key=lambda model: abs(model.parameters - wanted))


def accumulation(models: Sequence[Model], available: float) -> str:
    """The exact mode if the largest model's ranks fit ``available`` bytes with it, else ``fast``.

    A rank has weights, gradients and sums of all of its stage, and two 8ths of the three states of a slice.
    """
    largest = max(model.parameters for model in models)
    needed = RANKS * largest * (4 + 4 + 8 + 3 * 4 * 2 / RANKS)
    return "bitwise" if needed < _SHARE * available else "fast"


def available_memory() -> float:
    """Bytes that can be had without swapping."""
    text = Path("/proc/meminfo").read_text()
    match = re.search(r"MemAvailable: *(\d+) kB", text)
    return float(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * float(os.sysconf("SC_AVPHYS_PAGES"))


def flags_of(model: Model, data: Path, pp: int, steps: int) -> list[str]:
    """Flags of the model and of its training, for elastic and plain jobs."""
    values = {
        "data-path": data, "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": pp,
        "num-layers": model.layers, "hidden-size": model.hidden, "num-attention-heads": 4, "seq-length": SEQUENCE,
        "micro-batch-size": 1, "global-batch-size": RANKS, "train-iters": steps, "lr": 1e-4, "eval-iters": 0,
    }
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def lose_ranks(model: Model, data: Path, pp: int, mode: str, root: Path) -> dict[str, Any]:
    """Run a job that loses a rank in each of ``PHASES``; its times, in ms. Raises JobFailed."""
    width = RANKS // pp
    # Of different columns, and of all stages in turn.
    victims = [1 + 2 * i if pp == 1 else (1 + i) % width + width * (i % pp) for i in range(len(PHASES))]
    run_dir = root / f"{model.name}-pp{pp}"
    flags = ["--elastic", "--elastic-consistency", mode, *flags_of(model, data, pp, STEPS)]
    for i, (rank, phase) in enumerate(zip(victims, PHASES, strict=True)):
        flags += ["--elastic-inject", f"kill:rank={rank},step={FIRST_KILL + i * BETWEEN},at={phase}"]
    run_job(run_dir, RANKS, flags)
    events = [event for event in read_events(run_dir) if event["kind"] == "recovered"]
    if [event["ranks"] for event in events] != [[rank] for rank in victims]:
        raise JobFailed(f"{run_dir}: the losses of {victims} were to be recovered from one by one")
    before = {step: line for step, line in read_metrics(run_dir).items() if step < FIRST_KILL}
    pauses = [event["mttr_ms"] - event["redo_ms"] for event in events]
    # What a rank is computing when it is interrupted is let end: no interrupt comes into a matrix product.
    besides = [pause - event["interrupt_ms"] for pause, event in zip(pauses, events, strict=True)]
    progress(f"{model.name} PP{pp} x DP{width}: pauses of {_list(pauses)} ms, recovered after "
             f"{_list(event['mttr_ms'] for event in events)} ms")
    return {
        "pauses": pauses,
        "besides": besides,
        "mttr_ms": summary(event["mttr_ms"] for event in events),
        "pause_ms": summary(pauses),
        "interrupt_ms": summary(event["interrupt_ms"] for event in events),
        "state_ms": summary(event["state_ms"] for event in events),
        "step_ms": round(statistics.median(step_times(before, leave_out=1)), 1),
    }


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)
