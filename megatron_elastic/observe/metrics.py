"""Metrics: what Prometheus reads of a job, from the coordinator, with ``--elastic-metrics-port``.

Counters begin at nothing in every process that coordinates, as Prometheus expects of one that was started anew.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import CHANNELS, Figures
from megatron_elastic.observe.goodput import PARTS
from megatron_elastic.observe.utilisation import Utilisation

_STEP_BUCKETS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_RECOVERY_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
"""Upper ends, in seconds."""


class Metrics:
    """A registry of its own, and the server for it. ``job``: the value of the label that all metrics have."""

    def __init__(self, job: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(namespace="megatron_elastic_coordinator", registry=self.registry)
        self._stop: tuple[Any, threading.Thread] | None = None
        prefix = "megatron_elastic"

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{prefix}_{name}", text, ("run", *labels), registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}_{name}", text, ("run", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}_{name}", text, ("run",), buckets=buckets, registry=self.registry)

        self._job = job
        gauge("info", "Always 1; the version is a label.", "version").labels(job, version("megatron-elastic")).set(1)
        self._step = gauge("step", "Newest committed step.").labels(job)
        self._total = gauge("train_steps", "Steps that the job is to do.").labels(job)
        self._loss = gauge("loss", "Loss of the newest step.").labels(job)
        self._norm = gauge("gradient_norm", "Gradient norm of the newest step, before clipping.").labels(job)
        self._flops = gauge("model_flops_per_second", "Of all devices together, in the newest step.")
        self._mfu = gauge("mfu", "Share of the devices' peak in bf16, from 0 to 1, in the newest step.")
        self._used = Utilisation()
        self._epoch = gauge("epoch", "Epoch of the layout: one more for each reconfiguration.").labels(job)
        self._ranks = gauge("ranks", "Ranks by what they do: train, follow, spare, lost.", "state")
        self._cells = gauge("cells", "Cells of a stage that train.", "stage")
        self._slow = gauge("slow_cells", "Cells that are slow now.").labels(job)
        self._steps = counter("steps", "Committed steps.").labels(job)
        self._samples = gauge("consumed_samples", "Samples of all steps so far.").labels(job)
        self._tokens = counter("tokens", "Tokens of committed steps.").labels(job)
        self._step_seconds = histogram(
            "step_seconds", "From commit to commit, recoveries included.", _STEP_BUCKETS).labels(job)
        self._faults = counter("faults", "Ranks that were lost, by how.", "signal")
        self._recoveries = counter("recoveries", "Recoveries by cause and by what became of the step.", "cause",
                                   "decision")
        self._recovery_seconds = histogram(
            "recovery_seconds", "From the fault to the next committed step.", _RECOVERY_BUCKETS).labels(job)
        self._parts = counter("recovery_part_seconds", "Time of recoveries by part.", "part")
        self._redone = counter("redone_steps", "Steps done again after going back to a checkpoint.").labels(job)
        self._events = counter("events", "Events by kind, as in events.jsonl.", "kind")
        self._sent = counter("sent_bytes", "By ranks since they were started, by channel.", "channel")
        self._received = counter("received_bytes", "By ranks since they were started, by channel.", "channel")
        self._lag_steps = gauge("replication_lag_steps", "Of the copy that is most steps behind.").labels(job)
        self._lag_bytes = gauge("replication_lag_bytes", "Of copies that are still to come.").labels(job)
        resident = gauge("rank_resident_bytes", "Of a rank's process in host memory.", "rank")
        self._device = gauge("rank_device_bytes", "Of a rank's tensors on its device.", "rank")
        states = gauge("rank_state_bytes", "Of the states of slices that a rank holds.", "rank")
        self._memory = resident, self._device, states
        self._figures: dict[int, Figures] = {}
        self._slow_leaders: set[int] = set()

    def step(self, record: Mapping[str, Any]) -> None:
        """A step was committed; ``record`` is its line of metrics.jsonl."""
        seconds = record["step_ms"] / 1e3
        self._step.set(record["step"])
        self._loss.set(record["loss"])
        self._norm.set(record["grad_norm"])
        self._samples.set(record["consumed_samples"])
        self._steps.inc()
        self._tokens.inc(record["tokens_per_s"] * seconds)
        self._step_seconds.observe(seconds)
        for figure, value in ((self._flops, self._used.flops(record)), (self._mfu, self._used.mfu(record))):
            if value is not None:
                figure.labels(self._job).set(value)

    def layout(self, layout: Layout) -> None:
        """A layout came into force."""
        self._epoch.set(layout.epoch)
        cells = [cell for stage in layout.stages for cell in stage.cells]
        counts = {
            "train": sum(len(cell.ranks) for cell in cells if not cell.shadow),
            "follow": sum(len(cell.ranks) for cell in cells if cell.shadow),
            "spare": len(layout.spares), "lost": len(layout.lost),
        }  # fmt: skip
        for state, count in counts.items():
            self._ranks.labels(self._job, state).set(count)
        for rank in self._figures.keys() & {*layout.lost}:
            del self._figures[rank]
            for memory in self._memory:
                memory.remove(self._job, str(rank))
            self._show_lag()
        self._slow_leaders -= {*layout.lost}
        self._slow.set(len(self._slow_leaders))
        self._cells.clear()
        for index, stage in enumerate(layout.stages):
            self._cells.labels(self._job, str(index)).set(sum(not cell.shadow for cell in stage.cells))

    def figures(self, figures: Mapping[int, Figures]) -> None:
        """What the dials of some ranks show."""
        nothing = (0,) * len(CHANNELS)
        for rank, now in figures.items():
            before = self._figures.get(rank)
            for counter, bytes_now, bytes_before in (
                (self._sent, now.sent, nothing if before is None else before.sent),
                (self._received, now.received, nothing if before is None else before.received),
            ):
                for channel, new, old in zip(CHANNELS, bytes_now, bytes_before, strict=True):
                    counter.labels(self._job, channel).inc(max(new - old, 0))
            for memory, size in zip(self._memory, (now.resident, now.device, now.states), strict=True):
                if size or memory is not self._device:
                    memory.labels(self._job, str(rank)).set(size)
        self._figures.update(figures)
        self._show_lag()

    def _show_lag(self) -> None:
        self._lag_steps.set(max((each.behind for each in self._figures.values()), default=0))
        self._lag_bytes.set(sum(each.copies - each.copied for each in self._figures.values()))

    def event(self, kind: str, epoch: int, at: float, fields: Mapping[str, Any]) -> None:
        """Something happened; see docs/records.md."""
        self._events.labels(self._job, kind).inc()
        match kind:
            case "started":
                self._total.set(fields["train_iters"])
                self._step.set(fields["step"])
            case "hello":
                self._used.heard(fields)
            case "fault":
                self._faults.labels(self._job, str(fields["signal"])).inc()
            case "recovered":
                self._recoveries.labels(self._job, str(fields["cause"]), str(fields["decision"])).inc()
                self._recovery_seconds.observe(fields["mttr_ms"] / 1e3)
                for part in (*PARTS, "redo_ms"):
                    self._parts.labels(self._job, part.removesuffix("_ms")).inc(fields[part] / 1e3)
            case "fallback":
                self._redone.inc(len(fields["lost_steps"]))
            case "slow" | "well" if fields["times"] > 1:  # it may be less slow than before, and slow
                self._slow_leaders.add(fields["ranks"][0])
            case "slow" | "well" | "evicted":
                self._slow_leaders.discard(fields["ranks"][0])
        self._slow.set(len(self._slow_leaders))

    def serve(self, port: int) -> None:
        """Answer Prometheus, from now on, in a thread. Raises OSError if the port is in use."""
        self._stop = start_http_server(port, registry=self.registry)

    def close(self) -> None:
        """Answer no more."""
        if self._stop is not None:
            server, thread = self._stop
            server.shutdown()
            server.server_close()
            thread.join()
            self._stop = None
