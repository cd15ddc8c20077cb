"""Who is told of what is written down, in one job: the launcher's output, TensorBoard, OpenTelemetry."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_elastic.cluster.recording.spans import VARIABLE, Spans
from megatron_elastic.observe.goodput import PARTS
from megatron_elastic.observe.records import read_events, read_metrics
from tests.jobs import Job, Jobs
from tests.observe.collector import Collector, collecting
from tests.observe.test_board import read
from tests.observe.test_observe import RECOVERY, make

HAS_OPENTELEMETRY = importlib.util.find_spec("opentelemetry") is not None


class Watched(NamedTuple):
    """A job, and where it told of itself."""

    job: Job
    board: Path
    collector: Collector | None


@pytest.fixture(scope="module")
def watched(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    board = folder / "board"
    flags = ("--train-iters", "6", "--tensorboard-dir", str(board), "--elastic-log-format", "json",
             "--elastic-inject", "kill:rank=2,step=3,at=forward")  # fmt: skip
    with collecting() as collector:
        env = {VARIABLE: collector.endpoint} if HAS_OPENTELEMETRY else {}
        job = jobs.start(*flags, ranks=4, env=env)
        job.finish()
    return Watched(job, board, collector if HAS_OPENTELEMETRY else None)


@pytest.mark.job
def test_a_job_tells_each_thing_once_and_as_in_the_records(watched: Watched) -> None:
    told = [json.loads(each) for each in watched.job.output.splitlines()]
    assert len({_thing(each) for each in told}) == len(told)
    events, steps = read_events(watched.job.run_dir), read_metrics(watched.job.run_dir)
    assert [each["step"] for each in told if each["event"] == "step"] == list(steps)
    kinds = [each["event"] for each in told if each["event"] not in ("step", "said")]
    assert kinds == [event["kind"] for event in events]
    assert kinds.count("fault") == kinds.count("recovered") == kinds.count("finished") == 1
    assert len([each for each in told if each["event"] == "said"]) <= 4


def _thing(told: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in told.items() if name != "time"}, sort_keys=True)


@pytest.mark.job
def test_a_job_tells_tensorboard(watched: Watched) -> None:
    pytest.importorskip("tensorboard")
    scalars, texts = read(watched.board)
    rates = {step: record["tokens_per_s"] for step, record in watched.job.metrics().items()}
    assert dict(scalars["elastic/tokens_per_s"]) == pytest.approx(rates)
    (recovered,) = watched.job.events("recovered")
    # With the step before, which was the newest then.
    assert scalars["elastic/recovered/mttr_ms"][0][1] == pytest.approx(recovered["mttr_ms"])
    assert {text.split()[0] for _, text in texts} >= {"**started**", "**fault**", "**recovered**", "**finished**"}


@pytest.mark.job
def test_a_job_tells_opentelemetry(watched: Watched) -> None:
    if watched.collector is None:
        pytest.skip("opentelemetry is not installed")
    assert watched.collector.runs == {watched.job.run_dir.name}
    (recovered,) = watched.job.events("recovered")
    assert_recovered(watched.collector.spans, recovered)
    (whole,) = [span for span in watched.collector.spans if span.name == "recovered"]
    assert "fault" in {event.name for event in whole.events}


def assert_recovered(spans: list[Any], recovered: dict[str, Any]) -> None:
    """A span of the recovery, whose parts lie in it one after the other."""
    (whole,) = [span for span in spans if span.name == "recovered"]
    assert whole.end_time_unix_nano - whole.start_time_unix_nano == pytest.approx(recovered["mttr_ms"] * 1e6, rel=1e-3)
    parts = sorted((span for span in spans if span.parent_span_id == whole.span_id), key=lambda span: span.name)
    assert [part.name for part in parts] == sorted(part.removesuffix("_ms") for part in (*PARTS, "redo_ms"))
    for part in parts:
        took = part.end_time_unix_nano - part.start_time_unix_nano
        assert took == pytest.approx(recovered[f"{part.name}_ms"] * 1e6, rel=1e-3, abs=1e3)
        assert part.trace_id == whole.trace_id and part.start_time_unix_nano >= whole.start_time_unix_nano
    attributes = {each.key: each.value for each in whole.attributes}
    assert attributes["cause"].string_value == recovered["cause"]
    assert attributes["step"].int_value == recovered["step"]


@pytest.mark.skipif(not HAS_OPENTELEMETRY, reason="opentelemetry is not installed")
def test_spans_of_recoveries_and_of_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv(VARIABLE, collector.endpoint)
        spans = Spans.wanted("a run", print)
        assert spans is not None
        spans.event("spawned", 0, 100.0, {"ranks": [9]})  # long before
        spans.event("fault", 1, 1000.0, {"rank": 1, "signal": "kill -9", "exited_at": None})
        spans.event("recovered", 1, 1000.5, {**RECOVERY, "epochs": [1]})
        both = {"ranks": [2, 3], "bytes": [50, 60], "units": [0, 0], "sources": [1, 1]}
        spans.event("copying", 1, 1001.0, {**both, "done": [10, 10]})
        spans.event("copying", 1, 1003.0, {**both, "done": [50, 20]})
        spans.layout(replace(make(), epoch=2))  # rank 3 gets no more
        spans.event("copying", 2, 1004.0, {**both, "done": [0, 0]})
        spans.event("reshaped", 2, 2000.0, {"rank": 0, "step": 5, "ms": 250.0})
        spans.event("switched", 3, 2001.0, {"step": 6, "entered": [], "shadows": [], "moved": True})
        spans.close(10)
    assert collector.runs == {"a run"}
    assert_recovered(collector.spans, RECOVERY)
    (whole,) = [span for span in collector.spans if span.name == "recovered"]
    assert [event.name for event in whole.events] == ["fault"]
    (copying,) = [span for span in collector.spans if span.name == "copying"]
    assert copying.end_time_unix_nano - copying.start_time_unix_nano == 2_000_000_000
    assert {each.key: each.value.int_value for each in copying.attributes} == {"epoch": 1, "rank": 2, "bytes": 50}
    (switched,) = [span for span in collector.spans if span.name == "switched"]
    assert switched.start_time_unix_nano == switched.end_time_unix_nano == 2_001_000_000_000
    (reshaped,) = [span for span in collector.spans if span.name == "reshaped"]
    assert reshaped.end_time_unix_nano - reshaped.start_time_unix_nano == 250_000_000


def test_without_opentelemetry_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Spans.wanted("a run", told.append) is None and not told
    monkeypatch.setenv(VARIABLE, "http://localhost:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert Spans.wanted("a run", told.append) is None
    assert len(told) == 1 and "pip install 'megatron-elastic[otel]'" in told[0]


@pytest.mark.skipif(not HAS_OPENTELEMETRY, reason="opentelemetry is not installed")
def test_a_collector_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, ended = threading.Event(), threading.Event()
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9")
    spans = Spans.wanted("a run", print)
    assert spans is not None
    shutdown = spans._provider.shutdown

    def wait() -> None:
        answered.wait(5.0)
        shutdown()
        ended.set()

    monkeypatch.setattr(spans._provider, "shutdown", wait)
    spans.close(0.1)
    assert not ended.is_set()
    answered.set()
    assert ended.wait(60.0)
