"""Metrics: what Prometheus reads of a job, and the dashboard and alerts that are made of it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed
from prometheus_client.parser import text_string_to_metric_families

from megatron_elastic.observe.dials import CHANNELS, Figures
from megatron_elastic.observe.metrics import Metrics
from tests.jobs import ROOT, Job, Jobs, inject
from tests.observe.test_observe import RECOVERY, line, make

MONITORING = ROOT / "examples" / "monitoring"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")


FIGURES = Figures(
    sent=(100, 20, 0), received=(1, 2, 3), epoch=0, unit=None, source=None, copied=30, copies=100, behind=2, states=40,
    device=30, resident=20,
)  # fmt: skip


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def read(port: int) -> dict[tuple[str, ...], float]:
    """(name, values of the labels but ``run``) -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {(sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "run")): sample.value
            for family in text_string_to_metric_families(text) for sample in family.samples}  # fmt: skip


def named_in(text: str) -> set[str]:
    """Names of metrics in a query or a page, without what Prometheus appends."""
    return {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"\bmegatron_elastic_\w+", text)}


def test_what_happens_is_counted() -> None:
    metrics = Metrics("a run")
    metrics.layout(make())
    metrics.event("started", 0, 0.0, {"train_iters": 9, "step": 0})
    hello = {"rank": 0, "device": "NVIDIA H100 80GB HBM3", "flops_per_token": 989.4e10}
    metrics.event("hello", 0, 0.0, hello)
    metrics.step(line(1, 2.0))
    metrics.step(line(2, 1.5))
    metrics.event("fault", 0, 0.0, {"signal": "kill -9"})
    metrics.event("recovered", 0, 0.0, RECOVERY)
    for rank in (1, 2, 3):
        metrics.event("slow", 0, 0.0, {"ranks": [rank], "times": 3.0})
    metrics.event("well", 0, 0.0, {"ranks": [1], "times": 2.0})  # less slow than it was; 3 will be lost
    metrics.event("well", 0, 0.0, {"ranks": [2], "times": 1.0})
    metrics.event("fallback", 0, 0.0, {"lost_steps": [4, 5]})
    metrics.figures({0: FIGURES, 3: changed(FIGURES, copied=50, device=0)})
    metrics.figures({0: changed(FIGURES, sent=(150, 20, 0), behind=5, resident=9)})
    metrics.figures({2: changed(FIGURES, sent=(0, 0, 0), received=(0, 0, 0), copies=0, copied=0, device=0)})
    metrics.layout(replace(make(), lost=(3,), epoch=1))
    metrics.serve(port := free_port())
    now = read(port)
    metrics.close()
    e = "megatron_elastic_"
    assert (now[f"{e}step",], now[f"{e}loss",], now[f"{e}steps_total",], now[f"{e}tokens_total",]) == (2, 1.5, 2, 1600)
    assert (now[f"{e}ranks", "train"], now[f"{e}cells", "1"], now[f"{e}train_steps",]) == (4, 2, 9)
    assert now[f"{e}recoveries_total", "kill -9", "back"] == now[f"{e}faults_total", "kill -9"] == 1
    assert now[f"{e}recovery_part_seconds_total", "redo"] == pytest.approx(0.7)
    assert (now[f"{e}slow_cells",], now[f"{e}redone_steps_total",], now[f"{e}events_total", "slow"]) == (1, 2, 3)
    assert [now[f"{e}sent_bytes_total", channel] for channel in CHANNELS] == [250, 40, 0]
    assert [now[f"{e}received_bytes_total", channel] for channel in CHANNELS] == [2, 4, 6]
    assert (now[f"{e}replication_lag_steps",], now[f"{e}replication_lag_bytes",]) == (5, 70)
    memory = {key: value for key, value in now.items() if key[0].startswith(f"{e}rank_")}
    assert memory == {(f"{e}rank_resident_bytes", "0"): 9, (f"{e}rank_device_bytes", "0"): 30,
                      (f"{e}rank_state_bytes", "0"): 40, (f"{e}rank_resident_bytes", "2"): 20,
                      (f"{e}rank_state_bytes", "2"): 40}  # fmt: skip
    assert now[f"{e}model_flops_per_second",] == 989.4e13
    assert now[f"{e}mfu",] == pytest.approx(10 / 8)
    with pytest.raises(OSError, match="refused"):
        read(port)


def test_all_metrics_are_documented_and_no_others() -> None:
    page = (ROOT / "docs" / "watching.md").read_text()
    families = {family.name for family in Metrics("x").registry.collect()}
    ours = {name for name in families if not name.startswith("megatron_elastic_coordinator_process")}
    rows = named_in("\n".join(re.findall(r"^\| (`megatron_elastic_.*?) \|", page, re.MULTILINE)))
    assert rows == ours
    for path in ("dashboard.json", "alerts.yml"):
        used = {name for name in named_in((MONITORING / path).read_text()) if "coordinator_process" not in name}
        assert used <= ours, path


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_alert_rules_are_right() -> None:
    assert PROMTOOL is not None
    for what, file in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run([PROMTOOL, "check", what, file], cwd=MONITORING, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_is_counted_while_it_runs(jobs: Jobs) -> None:
    """And a port that is in use is said to be, and harms nothing."""
    port = free_port()
    flags = ("--train-iters", "5000", "--elastic-metrics-port", str(port))
    job = jobs.start(*flags, *inject("1@3:backward"), "--elastic-background-mbps", "0.1", ranks=4)
    job.read_until("recovered from the loss of rank")
    now, lag = read(port), ("megatron_elastic_replication_lag_bytes",)
    while not (now.get(lag) and now.get(("megatron_elastic_events_total", "copying"))):  # who coordinates tells it next
        job.read_until("step")
        now = read(port)
    while read(port)[lag] == now[lag]:
        job.read_until("step")
    for name in ("sent", "received"):
        assert now[f"megatron_elastic_{name}_bytes_total", "shared_memory"] > 0
        assert now[f"megatron_elastic_{name}_bytes_total", "ucx"] == 0
    for name in ("resident", "state"):
        ranks = {rank for key, *rest in now if key == f"megatron_elastic_rank_{name}_bytes" for rank in rest}
        assert ranks == {"0", "2", "3"}
    second = jobs.start("--train-iters", "2", *flags[2:], ranks=1)
    second.finish()
    assert f"--elastic-metrics-port {port}: Address already in use; nobody can read metrics" in second.output
    now = read(port)
    assert now["megatron_elastic_ranks", "train"] == 3
    recoveries = {key: many for key, many in now.items() if key[0] == "megatron_elastic_recoveries_total"}
    assert list(recoveries.values()) == [1] and all(cause == "kill -9" for _, cause, _ in recoveries)
    assert 3 <= now["megatron_elastic_step",] == now["megatron_elastic_steps_total",] < 5000
    end(job)


def test_devices_are_counted(jobs: Jobs) -> None:
    """What their collectives carry, and their memory."""
    port = free_port()
    job = jobs.start("--train-iters", "5000", "--elastic-metrics-port", str(port), "--elastic-device", "soft", ranks=2)
    job.read_until("step ")
    now, used = read(port), ("megatron_elastic_rank_device_bytes", "1")
    while not now.get(used):
        job.read_until("step ")
        now = read(port)
    states = now["megatron_elastic_rank_state_bytes", "1"]
    assert states > 0 and now[used] > states / 2, "owners' states are on the device, and weights"
    for name in ("sent", "received"):
        assert now[f"megatron_elastic_{name}_bytes_total", "device"] > 0
    end(job)


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")
def test_prometheus_reads_it_and_the_dashboard_shows_it(jobs: Jobs, tmp_path: Path) -> None:
    """A real Prometheus during a run with a loss: every query of the dashboard has data, and no alert fires."""
    assert PROMETHEUS is not None
    target, port = free_port(), free_port()
    config = (MONITORING / "prometheus.yml").read_text().replace("9400", str(target)).replace(": 5s", ": 1s")
    (tmp_path / "prometheus.yml").write_text(config)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    job = jobs.start("--train-iters", "5000", "--elastic-metrics-port", str(target), ranks=4)
    server = subprocess.Popen(
        [PROMETHEUS, f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
         f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    deadline = time.monotonic() + 120

    def await_data(queries: Iterable[str]) -> None:
        missing = set(queries)
        while missing:
            assert time.monotonic() < deadline, f"no data for {missing}"
            job.read_until("step")  # one more
            missing = {query for query in missing if not ask(port, query.replace("$run", ".*"))}

    try:
        await_data(["megatron_elastic_step > 1"])
        job.kill(1)
        job.read_until("recovered from the loss of rank")
        board = json.loads((MONITORING / "dashboard.json").read_text())
        await_data(target["expr"] for panel in board["panels"] for target in panel["targets"])
        assert ask(port, 'ALERTS{alertstate="firing"}') == []
    finally:
        server.kill()
        server.wait()
        end(job)


def end(job: Job) -> None:
    """Kill a job that has done its part."""
    job.process.kill()
    job.process.communicate()


def ask(port: int, query: str) -> list[Any]:
    """What Prometheus finds that is a number; nothing while it does not answer yet."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            result: list[Any] = json.load(answer)["data"]["result"]
    except OSError:
        return []
    return [each for each in result if each["value"][1] != "NaN"]
