"""What does control cost as the job grows? ``megatron-elastic bench control --ranks 1000,10000``.

The real coordinator, with its door, its records and encrypted connections, is a process of its own. The nodes are in a
few others: each has its agent's part in messages and a connection, and its ranks say what training ranks say, without
training. Then the coordinator's function alone, with more ranks (``--pure``).

Phases: ``start`` (from the first connection until all ranks train and all is settled), ``rank_lost`` and ``node_lost``
(until a step commits again, which is done again), ``..._even`` (until the layout is as good as it can be),
``node_joins`` (until it has its even part), ``steps`` (100 of them), ``idle`` (a heartbeat each way of each node),
``resume`` (a rank is lost in the middle of a step, of which is kept what others have done, until it commits),
``takeover`` (in the middle of a step another process coordinates, from the first connection to it until that step
commits). ``own_...`` is what comes in besides the heartbeats of the time that a phase takes on a machine that emulates
all ranks besides. Each size is measured ``--repeat`` times in alternation; a figure is the median.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import JobFailed, emit, load_average, progress, run_root

from control_plane import coordinating, guests
from control_plane.processes import Process
from control_plane.pure import SETTINGS, measure
from control_plane.ranks import NODE, grid
from megatron_elastic.cluster.wire import Credentials
from megatron_elastic.cluster.wire.token import make_token

LIMIT = 1200.0
"""Seconds of a phase."""
_LOOK = 0.02
"""Seconds between two looks at how far a phase is."""
LEAST = 32
"""Ranks, so that two nodes can be hit and every slice lives on."""
STEPS = 100
PASSED = ("messages_in", "messages_out", "own_messages_in", "own_bytes_in", "bytes_in", "bytes_out")
"""What goes over the connections of the coordinator: in ``own_bytes_in`` before encryption, else with it."""
IDLE = SETTINGS.heartbeat_timeout / 4
"""Seconds in which each end of a connection sends a heartbeat."""


class Bench:
    """One size: a coordinator and its nodes."""

    def __init__(self, run_dir: Path, ranks: int, processes: int) -> None:
        self.size = len(grid(ranks).ranks)
        self.phases: dict[str, dict[str, float]] = {}
        self._nodes = self.size // NODE
        self._arguments = run_dir, self.size, self._nodes, Credentials(make_token())
        self._coordinator = Process(coordinating.begin, *self._arguments)
        port = self._coordinator.ask("port")
        self._guests = [Process(guests.begin, self.size, port, self._arguments[-1]) for _ in range(processes)]

    def run(self) -> dict[str, Any]:
        """All phases."""
        with self._phase("start"):
            self._everywhere("come", [[node for node in range(self._nodes) if node % len(self._guests) == i]
                                      for i in range(len(self._guests))])
            self._until("all ranks train", lambda: self._sum("started") == self.size)
            self._until_even()
        self._commit(None)
        with self._phase("rank_lost"):
            self._recover("kill", NODE + 5)
        with self._phase("rank_lost_even"):
            self._until_even()
        with self._phase("node_lost"):
            self._recover("lose", 2)
        with self._phase("node_lost_even"):
            self._until_even()
        with self._phase("node_joins"):
            self._guests[0].ask("come", [self._nodes])
            self._until("the node has come", lambda: self._state()["announced"] is not None)
            self._until_even()
        with self._phase("steps"):
            for _ in range(STEPS):
                self._commit(None)
        with self._phase("idle"):
            time.sleep(IDLE)
        with self._phase("resume"):
            self._everywhere("work", [()] * len(self._guests))
            self._recover("kill", 3 * NODE + 5)
            self._resumed()
        self._until_even()
        epoch = self._state()["epoch"]
        self._everywhere("work", [()] * len(self._guests))
        self._everywhere("forsaken", [()] * len(self._guests))
        self._coordinator.kill()
        self._coordinator = Process(coordinating.succeed, *self._arguments)
        port = self._coordinator.ask("port")
        with self._phase("takeover"):
            self._everywhere("follow", [[port]] * len(self._guests))
            self._recovered(epoch)
            self._resumed()
        return {"ranks": self.size, "nodes": self._nodes, **self.phases}

    def close(self) -> None:
        """End all processes."""
        for process in (self._coordinator, *self._guests):
            process.end()

    # ---- what is done ---------------------------------------------------------------------

    def _recover(self, order: str, what: int) -> None:
        before = self._state()["epoch"]
        self._everywhere(order, [[what]] * len(self._guests))
        self._recovered(before)

    def _recovered(self, before: int) -> None:
        """There is a layout after that of epoch ``before``, and a step has committed in it."""
        self._until("a layout is decided", lambda: self._state()["epoch"] not in (None, before))
        self._until("everybody is back", lambda: self._sum("back") == self._state()["members"])
        self._commit(None)
        self._until("it is recovered", lambda: not self._state()["recovering"])

    def _resumed(self) -> None:
        if self._sum("resumed") < len(self._guests):
            raise JobFailed(f"{self.size} ranks: what was done of the step was not kept; {self._state()}")

    def _until_even(self) -> None:
        """Slices are even, and all copies there."""
        deadline = time.monotonic() + LIMIT
        while not (state := self._state())["settled"]:
            if time.monotonic() > deadline:
                raise JobFailed(f"{self.size} ranks: it does not become even within {LIMIT:g} s; {state}")
            self._everywhere("settle", [()] * len(self._guests))
            announced = state["announced"]
            if announced is not None and self._sum("informed", announced) == state["members"]:
                self._commit(announced)
            else:
                time.sleep(_LOOK)

    def _commit(self, switch: int | None) -> None:
        """A step of everybody, and the coordinator knows of it."""
        before = self._state()
        self._everywhere("commit", [[switch]] * len(self._guests))
        self._until("the step is written", lambda: self._state()["written"] > before["written"])
        if switch is not None:
            self._until("the layout is in force", lambda: self._state()["epoch"] == switch)

    def _until(self, what: str, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            if time.monotonic() > deadline:
                raise JobFailed(f"{self.size} ranks: {what}: not within {LIMIT:g} s; {self._state()}")
            time.sleep(_LOOK)

    # ---- who is asked ---------------------------------------------------------------------

    def _everywhere(self, order: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        for process, each in zip(self._guests, arguments, strict=True):
            process.tell(order, *([each] if order == "come" else each))
        return [process.answer() for process in self._guests]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._coordinator.ask("state")
        return state

    def _sum(self, name: str, epoch: int = 0) -> int:
        return sum(each[name] for each in self._everywhere("state", [[epoch]] * len(self._guests)))

    # ---- what it costs --------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._coordinator.ask("quiet")
        before, began = self._costs(), time.perf_counter()
        yield
        elapsed = time.perf_counter() - began
        costs = {key: value - before[key] for key, value in self._costs().items()}
        self.phases[name] = {"elapsed_s": round(elapsed, 3), **{key: round(value, 3) for key, value in costs.items()}}
        progress(f"{self.size} ranks: {name}: {elapsed:.2f} s; coordinator: {costs['processor_s']:.3f} s of the "
                 f"processor ({costs['loop_s']:.3f} s in its loop), {costs['messages_in']:.0f} messages and "
                 f"{costs['bytes_in'] / 1e6:.2f} MB in, {costs['messages_out']:.0f} and "
                 f"{costs['bytes_out'] / 1e6:.2f} MB out")

    def _costs(self) -> dict[str, float]:
        passed = [sum(each) for each in zip(*(process.ask("passed") for process in self._guests), strict=True)]
        return {"processor_s": self._coordinator.processor_s, "loop_s": self._coordinator.loop_s,
                **dict(zip(PASSED, passed, strict=True))}


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure of each phase."""
    first = runs[0]
    return {
        name: {key: statistics.median(each[name][key] for each in runs) for key in value}
        if isinstance(value, dict) else value
        for name, value in first.items()
    }


def growth(small: dict[str, Any], large: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times as much each figure of each phase is."""
    return {
        phase: {name: round(value / small[phase][name], 2) for name, value in figures.items() if small[phase][name]}
        for phase, figures in large.items()
        if isinstance(figures, dict)
    }


def _measure(run_dir: Path, ranks: int, processes: int) -> dict[str, Any]:
    bench = Bench(run_dir, ranks, processes)
    try:
        return bench.run()
    finally:
        bench.close()
        shutil.rmtree(run_dir)


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; always 0."""
    parser = argparse.ArgumentParser(prog="megatron-elastic bench control",
                                     description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=_sizes, default=[1000, 10_000], metavar="N,...",
                        help="sizes of the job (default: 1000,10000)")
    parser.add_argument("--pure", type=_sizes, default=[1000, 10_000, 100_000], metavar="N,...",
                        help="sizes for the coordinator's function alone (default: 1000,10000,100000)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that nodes are in (default: 2)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N",
                        help="times that each size is measured (default: 3)")
    options = parser.parse_args(argv)
    if min([*options.ranks, *options.pure], default=LEAST) < LEAST or min(options.processes, options.repeat) < 1:
        parser.error(f"--ranks and --pure must be at least {LEAST}, --processes and --repeat at least 1")
    load = load_average()
    with run_root() as root:
        rounds = [[_measure(root / str(ranks), ranks, options.processes) for ranks in options.ranks]
                  for _ in range(options.repeat)]
    sizes = [medians(runs) for runs in zip(*rounds, strict=True)]
    pure = [measure(ranks) for ranks in options.pure]
    emit("control", argv, {
        "sizes": sizes, "growth": growth(sizes[0], sizes[-1]) if len(sizes) > 1 else {},
        "pure": pure, "pure_growth": growth(pure[0], pure[-1]) if len(pure) > 1 else {}, "load_before": load,
    })  # fmt: skip
    return 0
