"""A fleet on Kubernetes, by its own client, against an API server whose pods are processes of this machine."""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_elastic import cli
from megatron_elastic.fleet.managers import kubernetes
from megatron_elastic.fleet.managers.kubernetes import Kubernetes, TemplateError, quantity
from megatron_elastic.fleet.managers.manager import HERE, Launch, ManagerError, Other, Standing
from megatron_elastic.layout import Layout
from tests.fleet.fleet_runs import Fleet, fleet, until
from tests.fleet.kubernetes_api import Cluster
from tests.fleet.test_fleet import Paced
from tests.jobs import Jobs

GPU = "nvidia.com/gpu"
POD = {
    "kind": "Pod", "metadata": {"namespace": "training", "labels": {"team": "a"}},
    "spec": {"containers": [{"name": "train", "image": "registry/megatron:1", "env": [{"name": "X", "value": "1"}],
                             "resources": {"limits": {"memory": "64Gi"}}}]},
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two nodes of two GPUs."""
    made = Cluster(tmp_path, {"one": 2, "two": 2}, GPU)
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def manager(cluster: Cluster, tmp_path: Path) -> Iterator[Kubernetes]:
    made = Kubernetes(template(tmp_path), GPU)
    try:
        yield made
    finally:
        made.close()


def template(folder: Path, **spec: Any) -> Path:
    path = folder / "pod.yaml"
    path.write_text(yaml.safe_dump({**POD, "spec": {**POD["spec"], **spec}}))  # type: ignore[dict-item]
    return path


def launch(folder: Path, *command: str, devices: int = 1, name: str = "llm/0") -> Launch:
    """Of a fleet in ``folder``, whose command writes what it was given to ``told``."""
    own = folder / "jobs" / name
    return Launch(name, own, command or ["sleep", "1000"], devices, [], folder, env={"TOKEN": "a secret"})


def standing(manager: Kubernetes, asked: Launch) -> Standing:
    return manager.look([asked]).standings[asked.name]


def test_quantities() -> None:
    assert [quantity(text) for text in ("8", "7900m", "0.5", "4k")] == [8, Decimal("7.9"), Decimal("0.5"), 4000]
    for text in ("", "-1", "8Gi", "x"):
        with pytest.raises(ValueError, match="no number"):
            quantity(text)


@pytest.mark.parametrize("text", ["{", "[]", "kind: Pod", "kind: Job\nspec: {containers: [{image: a}]}",
                                  "kind: Pod\nspec: {containers: [{name: a}]}"])  # fmt: skip
def test_what_is_no_template(text: str, tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text(text)
    with pytest.raises(TemplateError, match=r"pod\.yaml"):
        Kubernetes(tmp_path / "pod.yaml", GPU)


def test_without_a_cluster_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert cli.main(["fleet", "run", str(tmp_path), "--kubernetes", str(template(tmp_path))]) == 2
    assert "--kubernetes: no access to a cluster" in capsys.readouterr().err
    assert cli.main(["fleet", "run", str(tmp_path), "--slurm", "p", "--count", "tpu"]) == 2
    assert "Slurm's devices are gpu or cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("mood", "told"), [
    ("silent", "does not answer"), ("broken", "asking for nodes: 503 .*ServiceUnavailable"),
    ("closed", "does not answer"), ("strict", "403 .*Forbidden"), ("garbage", "no JSON: b'<html>'"),
    ("odd", "not understood"),
])  # fmt: skip
def test_it_answers_badly(
    mood: str, told: str, manager: Kubernetes, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kubernetes._RAW, "_request_timeout", 0.3)
    asked = launch(tmp_path)
    cluster.mood = mood
    if mood == "closed":
        monkeypatch.setattr(manager._client.configuration, "host", "http://127.0.0.1:9")
    with pytest.raises(ManagerError, match=told):
        manager.look([asked])
    if mood not in ("odd", "garbage"):
        for ask in (lambda: manager.start(asked), lambda: manager.stop(asked, at_once=False)):
            with pytest.raises(ManagerError):
                ask()
    cluster.mood = ""
    if mood != "closed":
        assert standing(manager, asked).state == "absent"


@pytest.mark.job
def test_a_launch_is_a_pod_that_is_made_once(manager: Kubernetes, cluster: Cluster, tmp_path: Path) -> None:
    told = tmp_path / "told"
    words = ("sh", "-c", f"printf '%s ' $TOKEN $X '{HERE}:1' '$(X)' $(echo yes) > {told}; exit 3")
    asked = launch(tmp_path, *words, devices=2, name="Large_Job/12")
    assert standing(manager, asked) == Standing("absent")
    for _ in range(2):
        manager.start(asked)
    assert cluster.created == 1
    (pod,) = cluster.pods.values()
    assert pod["metadata"]["name"].startswith("large-job-12-")
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["megatron-elastic/job"] == "Large_Job"
    (container,) = pod["spec"]["containers"]
    assert (pod["spec"]["restartPolicy"], pod["spec"]["terminationGracePeriodSeconds"]) == ("Never", 600)
    assert container["resources"]["limits"] == {"memory": "64Gi", GPU: "2"}
    assert "secret" not in json.dumps(pod), "whoever may read pods may not run programs in jobs"
    assert stat.S_IMODE((asked.folder / "env.json").stat().st_mode) == 0o600
    until("it has ended", lambda: standing(manager, asked) == Standing("ended", 3))
    assert told.read_text() == "a secret 1 127.0.0.1:1 $(X) yes "
    until("nobody needs the pod", lambda: bool(manager.look([asked])) and not cluster.pods)
    manager.start(asked)
    assert standing(manager, asked) == Standing("ended", 3), "what has ended is not done again"
    manager.stop(launch(tmp_path, name="never/0"), at_once=True)


@pytest.mark.job
def test_it_ends_as_it_is_told_and_a_pod_that_is_gone_has_ended(
    manager: Kubernetes, cluster: Cluster, tmp_path: Path
) -> None:
    trap = "trap 'exit 7' TERM; while :; do sleep 0.02; done"
    polite, stubborn, evicted = (
        launch(tmp_path, "bash", "-c", script, name=f"a/{number}")
        for number, script in enumerate((trap, "trap '' TERM; echo > ready; while :; do sleep 0.02; done", trap))
    )
    for asked in (polite, stubborn, evicted):
        manager.start(asked)
    all_three = [polite, stubborn, evicted]
    until(
        "all run",
        lambda: all(own == Standing("running", host="127.0.0.1") for own in manager.look(all_three).standings.values()),
    )
    until(
        "their commands do",
        lambda: (tmp_path / "ready").exists() and all((asked.folder / "process.json").exists() for asked in all_three),
    )
    manager.stop(stubborn, at_once=True)
    until("killed after a second", lambda: standing(manager, stubborn).state == "ended")
    (evicted.folder / "kubernetes.json").unlink()  # the fleet was killed before it had written that down
    assert standing(manager, evicted).state == "running"
    cluster.remove(kubernetes._name(evicted), "training")
    until("gone with its node", lambda: standing(manager, evicted).state == "ended")
    manager.stop(polite, at_once=False)
    until("by itself", lambda: standing(manager, polite).state == "ended")
    assert manager.look([]).others == []


@pytest.mark.job
def test_devices_and_who_has_them(manager: Kubernetes, cluster: Cluster, tmp_path: Path) -> None:
    pool = manager.look([])
    assert (pool.total, pool.most, list(pool.others)) == (4, 4, [])
    cluster.run("big", 2)
    cluster.run("idle", 0)
    cluster.run("late", 3)
    asked = launch(tmp_path, devices=2)
    manager.start(asked)
    pool = manager.look([asked])
    big, late = pool.others
    assert (big.name, big.devices, big.ends) == ("others/big", 2, float("inf")) and big.started is not None
    assert (late.name, late.devices, late.started) == ("others/late", 3, None)
    assert pool.standings["llm/0"] == Standing("running", host="127.0.0.1")
    assert [other.name for other in manager.look([]).others if other.started] == ["others/big", next(
        f"training/{name}" for space, name in cluster.pods if space == "training")], "of another fleet"  # fmt: skip
    cluster.nodes["two"]["spec"]["unschedulable"] = True
    assert manager.look([asked])[:2] == (2, 4)
    cluster.nodes["one"]["status"]["conditions"][1]["status"] = "Unknown"
    assert manager.look([asked])[:2] == (0, 4)
    limited = cluster.pods["others", "big"]
    limited["spec"] |= {"activeDeadlineSeconds": 60, "initContainers": [{"resources": {"limits": {GPU: "4"}}}]}
    (other, _) = manager.look([asked]).others
    assert other == Other("others/big", 4, big.submitted, big.started, big.started + 60)


@pytest.mark.parametrize(("spec", "devices"), [
    ({}, 2), ({"tolerations": [{"key": "team", "value": "b", "effect": "NoSchedule"}]}, 4),
    ({"tolerations": [{"operator": "Exists"}]}, 4), ({"tolerations": [{"key": "team", "value": "c"}]}, 2),
    ({"nodeSelector": {"name": "one"}}, 2), ({"nodeSelector": {"name": "three"}}, 0),
])  # fmt: skip
def test_only_nodes_where_pods_may_run_count(
    spec: dict[str, Any], devices: int, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.nodes["two"]["spec"]["taints"] = [
        {"key": "team", "value": "b", "effect": "NoSchedule"}, {"key": GPU, "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"},
    ]  # fmt: skip
    own = Kubernetes(template(tmp_path, **spec), GPU)
    assert own.look([]).most == devices
    own.close()


def test_pods_of_other_nodes_take_nothing_away(cluster: Cluster, tmp_path: Path) -> None:
    """Of a cluster that has other devices, too: neither those nor who has them, or waits for them, count."""
    own = Kubernetes(template(tmp_path, nodeSelector={"name": "two"}), GPU)
    for name in ("there", "here", "waits-there", "waits-here", "waits-anywhere"):
        cluster.run(name, 2)
    for name, node in (("waits-there", "one"), ("waits-here", "two")):
        cluster.pods["others", name]["spec"]["nodeSelector"] = {"name": node}
    pool = own.look([])
    own.close()
    assert (cluster.pods["others", "there"]["spec"]["nodeName"], pool.total) == ("one", 2)
    assert [other.name for other in pool.others] == ["others/here", "others/waits-here", "others/waits-anywhere"]


def test_an_exit_code_that_cannot_be_read_stops_nobody(manager: Kubernetes, tmp_path: Path) -> None:
    asked = launch(tmp_path)
    asked.folder.mkdir(parents=True)
    (asked.folder / "kubernetes.json").write_text("{}")
    (asked.folder / "exit.json").write_text("{")
    assert standing(manager, asked) == Standing("ended")


@pytest.mark.job
def test_rigid_jobs_beside_pods_of_others(manager: Kubernetes, cluster: Cluster, tmp_path: Path) -> None:
    """They start in order with others' pods, nothing is decided while the API is ill, and a killed pod has failed."""
    with fleet(tmp_path / "fleet", 4) as four:
        four.manager = manager
        first = four.holder("first")
        four.begin()
        four.until("it runs", first.exists)
        cluster.run("others", 2)
        four.submit("late", "true", devices=2)
        cluster.mood = "broken"
        four.until("that is said", lambda: bool(four.told("manager_failed")))
        cluster.mood = ""
        four.until("it answers again", lambda: bool(four.told("manager_back")))
        assert (four.phase("late"), four.phase("first"), cluster.phase("others")) == ("waiting", "running", "Running")
        cluster.remove("others")
        four.until("it has its turn", lambda: four.phase("late") == "done")
        (name,) = [name for space, name in cluster.pods if space == "training"]
        cluster.remove(name, "training")
        four.until("a killed pod", lambda: four.phase("first") == "failed")


def test_it_makes_room_for_pods_of_others(
    cluster: Cluster, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows by pods, its fleet is killed and goes on, and it gives back; bits are those of the undisturbed."""
    monkeypatch.setenv("PACE", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with fleet(tmp_path / "fleet", 4) as four:
        paced = Paced(four, jobs)
        daemon = _daemon(four, tmp_path)
        until("it trains", lambda: paced.steps >= 6)
        with paced.waits():
            until("it is to grow", lambda: four.job("llm")["target"] == 4)
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()
            _daemon(four, tmp_path)
            output = four.journal.job("llm") / "nodes" / "0" / "output"
            until("two nodes have come", lambda: output.read_text().count("on a node that has come") == 2)
        until("it has grown", lambda: paced.joined() == 3)
        with paced.waits():
            cluster.run("others", 2)
            until("it is to shrink", lambda: four.job("llm")["target"] == 2)
            assert cluster.phase("others") == "Pending"
        until("the other pod runs", lambda: cluster.phase("others") == "Running")
        assert four.phase("llm") == "running"
        cluster.remove("others")
        until("it is done", lambda: four.phase("llm") == "done" and not four.status()["held"])
        paced.assert_same()
        assert len(four.told("left")) == 2 and not four.told("lost") and not four.told("disobeys")
        paths = sorted((four.run_dir("llm") / "layouts").glob("*.json"), key=lambda path: int(path.stem))
        sizes = [len(Layout.from_json(path.read_bytes()).ranks) for path in paths]
        assert sizes[-1] == 2 and 3 not in sizes[sizes.index(4) :], "both were asked for at once"


def _daemon(four: Fleet, folder: Path) -> Any:
    return four.run("--kubernetes", str(template(folder)), "--every", "0.2")
