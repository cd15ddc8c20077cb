"""A fleet on a real Slurm: an elastic job uses what is idle, and makes room for what others submit to Slurm itself."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import namespaces
import pytest

from megatron_elastic import cli
from megatron_elastic.fleet.managers.manager import Launch, ManagerError, Standing
from megatron_elastic.fleet.managers.slurm import Slurm as Manager
from megatron_elastic.fleet.managers.slurm import gpus_in
from tests.fleet import slurm
from tests.fleet.fleet_runs import Fleet
from tests.fleet.slurm import Slurm
from tests.fleet.test_fleet import Paced
from tests.jobs import Jobs

_REASON = namespaces.why_not() or slurm.why_not()
NODES, CPUS = 3, 2


def test_gpus_are_counted() -> None:
    counts = {"gpu:8": 8, "gres:gpu:3": 3, "gpu:a100:8(S:0-1),nic:2": 8, "gpu:a:2,gpu:b:3": 5, "": 0, "nic:2": 0,
              "gpu:3(IDX:0-2)": 3, "gres:gpu:a100:4": 4, "gpu": 0}  # fmt: skip
    assert {gres: gpus_in(gres) for gres in counts} == counts


@pytest.mark.parametrize(("script", "told"), [
    ("exec sleep 60", "does not answer"), ("echo slurm_load_jobs error >&2; exit 1", "slurm_load_jobs error"),
    ("echo no JSON", "says nothing of nodes"), ('echo \'{"nodes": [], "jobs": [{}]}\'', "not understood"),
])  # fmt: skip
def test_slurm_answers_badly(script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sinfo", "squeue"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("megatron_elastic.fleet.managers.slurm._LIMIT_S", 0.5)
    with pytest.raises(ManagerError, match=told):
        Manager("train", "gpu").look([Launch("a/0", tmp_path, ["true"], 1, [], tmp_path)])


def test_who_waits_in_several_partitions_waits_in_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``sbatch --partition=train,debug`` does: Slurm names all of them until it knows which it is."""
    job = {"job_state": "PENDING", "cpus": 2, "submit_time": 1, "start_time": 0, "end_time": 0, "name": "x"}
    told = {"nodes": [], "jobs": [job | {"job_id": number, "partition": names}
                                  for number, names in enumerate(("debug", "debug,train", "train", "trains"))]}
    for name in ("sinfo", "squeue"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{json.dumps(told)}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [other.name for other in Manager("train", "cpu").look([]).others] == ["1", "2"]


def test_an_exit_code_that_cannot_be_read_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sinfo", "squeue"):
        (tmp_path / name).write_text("#!/bin/sh\necho '{\"nodes\": [], \"jobs\": []}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    asked = Launch("a/0", tmp_path, ["true"], 1, [], tmp_path)
    (tmp_path / "slurm.json").write_text('{"job": 7}')
    (tmp_path / "exit.json").write_text("{")
    assert Manager("train", "cpu").look([asked]).standings["a/0"] == Standing("ended")
    (tmp_path / "exit.json").write_text('{"code": 3}')
    assert Manager("train", "cpu").look([asked]).standings["a/0"] == Standing("ended", 3)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Slurm]:
    with namespaces.hosts() as hosts, slurm.slurm(hosts, tmp_path, NODES, CPUS) as made:
        yield made


@pytest.mark.skipif(bool(_REASON), reason=_REASON)
def test_it_makes_room_for_jobs_of_slurm(
    cluster: Slurm, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows by batch jobs, its fleet is killed and goes on, and it gives back; bits are those of the undisturbed."""
    monkeypatch.setenv("PACE", "")
    four = Fleet(tmp_path / "fleet", NODES * CPUS)
    paced = Paced(four, jobs)
    command = [sys.executable, "-m", "megatron_elastic.cli", "fleet", "run", str(four.folder), "--slurm", "train",
               "--count", "cpu", "--every", "0.2"]  # fmt: skip
    env = {"PACE": str(four.folder / "pace"), "PYTHONPATH": str(Path(__file__).parents[2])}
    daemon = cluster.beside(*command, env=env)
    try:
        cluster.until("it trains", lambda: paced.steps >= 6)
        with paced.waits():
            cluster.until("it is to grow", lambda: four.job("llm")["target"] == 4)
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            daemon = cluster.beside(*command, env=env)
            output = four.journal.job("llm") / "nodes" / "0" / "output"
            cluster.until("two nodes have come", lambda: output.read_text().count("on a node that has come") == 2)
        cluster.until("it has grown", lambda: paced.joined() == 3)
        assert four.status()["devices"] == NODES * CPUS
        with paced.waits():
            other = cluster.ask("sbatch", "--parsable", "--partition=train", "--nodes=2", f"--ntasks-per-node={CPUS}",
                                "--wrap", "sleep 1000")  # fmt: skip
            cluster.until("it is to shrink", lambda: four.job("llm")["target"] == 2)
            assert cluster.ask("squeue", "-h", "-j", other, "-o", "%T") == "PENDING"
        cluster.until("Slurm's job runs", lambda: cluster.ask("squeue", "-h", "-j", other, "-o", "%T") == "RUNNING")
        assert four.phase("llm") == "running"
        cluster.until("it is done", lambda: four.phase("llm") == "done" and not four.status()["held"])
        cluster.ask("scancel", other)
    finally:
        daemon.kill()
        daemon.wait()
    paced.assert_same()
    assert [event["devices"] for event in four.told("grows")][:1] == [4]
    assert len(four.told("left")) == 2 and not four.told("lost") and not four.told("disobeys")
    cluster.until("nothing of it is left", lambda: cluster.ask("squeue", "-h") == "")
    assert cli.main(["fleet", "status", str(four.folder)]) == 0
