"""What it costs that ranks, and jobs, are watched: a part of ``megatron-elastic bench overhead``.

It is too little for step times to show, so it is counted: how often a rank writes to its odometer in a step, or adds to
its dials, times what that takes, and what its agent takes to look at all of them.
"""

from __future__ import annotations

import json
import os
import threading
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common import CHECKOUT, JobFailed

from megatron_elastic.cluster.node.gauge import Gauge
from megatron_elastic.cluster.node.instruments import Instruments
from megatron_elastic.cluster.node.speedometer import Speedometer
from megatron_elastic.config import ElasticConfig
from megatron_elastic.faults.odometer import Effort, Odometer
from megatron_elastic.observe.records import RecordsError
from megatron_elastic.observe.run import RECENT, Run
from megatron_elastic.observe.status import picture

SCRIPT = str(CHECKOUT / "benchmarks" / "programs" / "watched_gpt.py")
_TIMES, _REPEAT = 20_000, 5
_EVERY = 1.0
"""Seconds between two looks, as ``top`` has it."""


@contextmanager
def looked_at(run_dir: Path) -> Iterator[None]:
    """Meanwhile somebody looks at the job, as ``megatron-elastic top`` does."""
    over = threading.Event()

    def look() -> None:
        run: Run | None = None
        while not over.wait(_EVERY):
            with suppress(RecordsError):  # it has not begun to write
                run = run or Run.of_folder(run_dir, RECENT)
                run.refresh()
                picture(run)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def watching(run_dir: Path, ranks: int, step_ms: float) -> dict[str, Any]:
    """Costs as parts of a step that takes ``step_ms`` and of a processor, from a job of ``SCRIPT``."""
    logs = [run_dir / "logs" / f"rank{rank}.log" for rank in range(ranks)]
    written = max(map(_written, logs), key=lambda each: sum(each.values()))
    steps = written["worked"]
    cost = _write_us()
    rank_us = sum(many / steps * cost[name] for name, many in written.items())
    every = ElasticConfig().suspect_timeout / 4
    look_us = _look_us(ranks, every)
    return {
        "writes_a_step": round(sum(written.values()) / steps, 1),
        "write_us": {name: round(us, 3) for name, us in cost.items()},
        "ratio_rank": round(rank_us / 1e3 / step_ms, 6),
        "look_us": round(look_us, 1),
        "looks_every_s": every,
        "ratio_agent": round(look_us / 1e6 / every, 6),
    }


def _written(log: Path) -> Mapping[str, int]:
    for line in reversed(log.read_text().splitlines()):
        if line.startswith("odometer "):
            found: dict[str, int] = json.loads(line.partition(" ")[2])
            return found
    raise JobFailed(f"{log} does not say how often the rank wrote to its odometer")


def _write_us() -> dict[str, float]:
    odometer = Odometer.alone()
    effort, sent = Effort(1, 0, 2.0, 3.0), odometer.dials.sent

    def add() -> None:
        sent[0] += 4096

    return {name: _us(write) for name, write in {
        "at": lambda: odometer.at("forward", 3, 1), "moved": odometer.moved, "wait": lambda: odometer.wait(3),
        "worked": lambda: odometer.worked(effort), "settle": odometer.settle,
        "add": add,
    }.items()}  # fmt: skip


def _look_us(ranks: int, every: float) -> float:
    """One look at so many ranks that all have come further since the last."""
    gauge = Gauge(ranks, every)
    speedometer = Speedometer(gauge.odometers)
    instruments = Instruments(gauge.odometers)
    pids, slots = dict.fromkeys(range(ranks), os.getpid()), {rank: rank for rank in range(ranks)}
    odometers = [Odometer.of(gauge.odometers.environment(slot)) for slot in range(ranks)]
    done = 0.0

    def move() -> None:
        nonlocal done
        done += 1.0
        for odometer in odometers:
            odometer.moved()
            odometer.worked(Effort(0, 0, done, done))
            odometer.dials.sent[0] += 4096

    def look() -> None:
        move()
        gauge.look(pids, slots)
        speedometer.look(slots)
        instruments.look(pids, slots, done)

    return _us(look, _TIMES // 100) - _us(move, _TIMES // 100)


def _us(call: Callable[[], object], times: int = _TIMES) -> float:
    """The fastest of some tries: what else the machine does is not the call's."""
    return min(timeit.repeat(call, number=times, repeat=_REPEAT)) / times * 1e6
