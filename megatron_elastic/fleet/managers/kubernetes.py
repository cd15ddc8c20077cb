"""Kubernetes: the devices of a cluster's nodes. A launch is a pod of its own; others' pods are beside it.

Kubernetes decides who starts and where; the fleet sees pods that wait, lets elastic jobs grow by further pods, whose
process is the launcher that joins, and lets them give back by draining these, which then end. Pods are made by a
template, which has the image and mounts the fleet's folder where this process has it, too. A pod's name follows from
its launch, so that nothing is created twice; annotations say of which job it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from math import inf
from pathlib import Path
from typing import Any

import yaml

from megatron_elastic.cluster.kubernetes import NoAccess, connect
from megatron_elastic.fleet.managers.launch import ENV, exit_code, keeper, write
from megatron_elastic.fleet.managers.manager import HERE, Launch, ManagerError, Other, Pool, Scheduler, Standing

POD = "kubernetes.json"
"""In a launch's folder: the name of its pod."""
DEVICES = {"gpu": "nvidia.com/gpu", "cpu": "cpu"}
"""Resources by the names that people give them here."""
_LIMIT_S = 10.0
"""That one request may take."""
_GRACE_S = 600
"""That a pod may take to end when it is asked to, as by who drains its node, if the template says nothing."""
_LABEL = "megatron-elastic/fleet"
_HERE_VARIABLE = "MEGATRON_ELASTIC_HERE"
_ENDED = ("Succeeded", "Failed")
_EFFECTS = ("NoSchedule", "NoExecute")
_CONFLICT, _NOT_FOUND = 409, 404
_RAW: Mapping[str, Any] = {"_preload_content": False, "_request_timeout": _LIMIT_S}
"""Answers as they come: a cluster has many pods, and objects of all their fields would take seconds."""
_SUFFIXES = {"m": Decimal("0.001"), "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "": Decimal(1)}


class TemplateError(Exception):
    """A pod's template cannot be used. The message says what is missing."""


class Kubernetes(Scheduler):
    """Devices that are counted as ``resource`` on the nodes where pods of ``template`` may run (see ``Manager``).

    Raises TemplateError, and ManagerError where there is no access to a cluster.
    """

    def __init__(self, template: Path, resource: str) -> None:
        self._template = _read(template)
        self._resource = resource
        self._namespace = self._template["metadata"].get("namespace", "default")
        try:
            self._client = connect()
        except NoAccess as error:
            raise ManagerError(str(error)) from None
        from kubernetes import client  # only where it is asked for: it takes a second

        self._api = client.CoreV1Api(self._client)
        self.kind = f"{resource} of Kubernetes, namespace {self._namespace}"

    def close(self) -> None:
        """Give connections back."""
        self._client.close()

    def look(self, launches: Sequence[Launch]) -> Pool:
        """What there is, by what the API says of nodes and pods."""
        api, alive = self._api, ",".join(f"status.phase!={phase}" for phase in _ENDED)
        nodes = self._list("nodes", lambda: api.list_node(**_RAW))
        own = self._list("our pods", lambda: api.list_namespaced_pod(self._namespace, label_selector=_LABEL, **_RAW))
        pods = self._list("pods", lambda: api.list_pod_for_all_namespaces(field_selector=alive, **_RAW))
        try:
            by_name = {pod["metadata"]["name"]: pod for pod in own}
            standings = {launch.name: self._standing(launch, by_name.get(_name(launch))) for launch in launches}
            ours = {(self._namespace, _name(launch)) for launch in launches}
            usable = {node["metadata"]["name"]: node for node in nodes if self._usable(node)}
            others = [
                self._other(pod)
                for pod in pods
                if (pod["metadata"]["namespace"], pod["metadata"]["name"]) not in ours and self._devices(pod)
                and _is_among(usable, pod["spec"])
            ]
            there = [node for node in usable.values() if _ready(node)]
            most = sum(map(self._allocatable, usable.values()))
            return Pool(sum(map(self._allocatable, there)), most, standings, others)
        except (KeyError, TypeError, ValueError, AttributeError, InvalidOperation) as error:
            raise ManagerError(f"it says what is not understood: {type(error).__name__} {error}") from None

    def start(self, launch: Launch) -> None:
        """Create its pod, if there is none of that name."""
        pod = self._pod(launch)

        def request() -> Any:
            return self._api.create_namespaced_pod(self._namespace, pod, **_RAW)

        try:
            launch.folder.mkdir(parents=True, exist_ok=True)
            write(launch.folder / ENV, dict(launch.env), mode=0o600)  # whoever can read pods may not read it
            self._ask(f"creating pod {_name(launch)}", request, expected=_CONFLICT)
            write(launch.folder / POD, {"pod": _name(launch)})
        except OSError as error:
            raise ManagerError(f"cannot start {launch.name}: {error}") from None

    def stop(self, launch: Launch, at_once: bool) -> None:
        """Delete its pod, which gets SIGTERM, and SIGKILL after the time that it has, or a second if ``at_once``."""
        grace = 1 if at_once else self._template["spec"]["terminationGracePeriodSeconds"]
        self._delete(_name(launch), grace)

    # ---- pods ---------------------------------------------------------------------------------

    def _pod(self, launch: Launch) -> dict[str, Any]:
        pod: dict[str, Any] = json.loads(json.dumps(self._template))
        labels = {**pod["metadata"].get("labels", {}), _LABEL: "launch"}
        job, _, node = launch.name.rpartition("/")
        notes = {
            **pod["metadata"].get("annotations", {}),
            "megatron-elastic/job": job, "megatron-elastic/node": node, "megatron-elastic/folder": str(launch.folder),
        }  # fmt: skip
        pod["metadata"] |= {"name": _name(launch), "labels": labels, "annotations": notes}
        container = pod["spec"]["containers"][0]
        words = [word.replace("$(", "$$(").replace(HERE, f"$({_HERE_VARIABLE})") for word in launch.command]
        container["command"], container["args"] = keeper(launch.folder, launch.ends_its_own), words
        container["workingDir"] = str(launch.cwd)
        address = {"name": _HERE_VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        container["env"] = [address, *container.get("env", [])]
        resources = container.setdefault("resources", {})
        for bound in ("limits", "requests"):
            resources[bound] = {**resources.get(bound, {}), self._resource: str(launch.devices)}
        return pod

    def _standing(self, launch: Launch, pod: Mapping[str, Any] | None) -> Standing:
        phase = None if pod is None else pod["status"]["phase"]
        if (code := exit_code(launch.folder)) is not None:
            if phase in _ENDED:
                with contextlib.suppress(ManagerError):  # what it printed is in the folder: nobody needs it any more
                    self._delete(_name(launch), 0)
            return Standing("ended", code)
        if pod is None:
            return Standing("ended" if (launch.folder / POD).exists() else "absent")
        if not (launch.folder / POD).exists():  # created by one that was killed before it had written that down
            with contextlib.suppress(OSError):  # next time, then
                write(launch.folder / POD, {"pod": _name(launch)})
        if phase in _ENDED:
            states = [each.get("state", {}) for each in pod["status"].get("containerStatuses", [])]
            codes = [int(state["terminated"]["exitCode"]) for state in states if "terminated" in state]
            return Standing("ended", codes[0] if codes else None)
        host = pod["status"].get("podIP")
        return Standing("running", host=host) if phase == "Running" and host else Standing("waiting")

    def _other(self, pod: Mapping[str, Any]) -> Other:
        begun = pod["status"].get("startTime") if pod["spec"].get("nodeName") else None
        started = None if begun is None else _seconds(begun)
        limit = pod["spec"].get("activeDeadlineSeconds")
        ends = inf if limit is None or started is None else started + float(limit)
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        return Other(name, self._devices(pod), _seconds(pod["metadata"]["creationTimestamp"]), started, ends)

    def _devices(self, pod: Mapping[str, Any]) -> int:
        """That a pod asks for: of its containers together, or of one that runs before them."""
        spec = pod["spec"]
        together = sum((self._asked(each) for each in spec["containers"]), Decimal(0))
        return math.ceil(max([together, *(self._asked(each) for each in spec.get("initContainers", []))]))

    def _asked(self, container: Mapping[str, Any]) -> Decimal:
        resources = container.get("resources") or {}
        amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        return quantity(amounts.get(self._resource, "0"))

    # ---- nodes --------------------------------------------------------------------------------

    def _usable(self, node: Mapping[str, Any]) -> bool:
        """Whether pods of the template may run there once it is ready."""
        spec = self._template["spec"]
        if not _selected(node, spec):
            return False
        taints = [taint for taint in node["spec"].get("taints") or [] if taint["effect"] in _EFFECTS]
        own = [taint for taint in taints if not taint["key"].startswith("node.kubernetes.io/")]  # those say: not ready
        return all(taint["key"] == self._resource or _tolerated(taint, spec.get("tolerations") or []) for taint in own)

    def _allocatable(self, node: Mapping[str, Any]) -> int:
        return math.floor(quantity(node["status"]["allocatable"].get(self._resource, "0")))

    # ---- the API ------------------------------------------------------------------------------

    def _delete(self, pod: str, grace_s: int) -> None:
        def request() -> Any:
            return self._api.delete_namespaced_pod(pod, self._namespace, grace_period_seconds=grace_s, **_RAW)

        self._ask(f"deleting pod {pod}", request, expected=_NOT_FOUND)

    def _list(self, what: str, request: Callable[[], Any]) -> list[dict[str, Any]]:
        told = self._ask(f"asking for {what}", request)
        try:
            items: list[dict[str, Any]] = told["items"]
        except (KeyError, TypeError):
            raise ManagerError(f"it says nothing of {what}") from None
        return items

    def _ask(self, doing: str, request: Callable[[], Any], expected: int | None = None) -> Any:
        """What the API answers, as JSON; None if it is the ``expected`` error. Raises ManagerError."""
        import urllib3  # both only where the client is
        from kubernetes.client.exceptions import ApiException

        try:
            answer = request().data
        except ApiException as error:
            if error.status == expected:
                return None
            raise ManagerError(f"{doing}: {error.status} {error.reason}: {error.body}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ManagerError(f"the API at {self._client.configuration.host} does not answer: {error}") from None
        try:
            return json.loads(answer)
        except ValueError:
            raise ManagerError(f"{doing}: the API's answer is no JSON: {answer[:100]!r}") from None


def quantity(text: str) -> Decimal:
    """A number as Kubernetes writes it: ``8``, ``7900m``, ``4k``. Raises ValueError."""
    found = re.fullmatch(r"([0-9.]+)(m|k|M|)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no number of devices")
    return Decimal(found[1]) * _SUFFIXES[found[2]]


def _read(path: Path) -> dict[str, Any]:
    """The template, with what is not left to it filled in. Raises TemplateError."""
    try:
        pod = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TemplateError(f"{path} cannot be read: {error}") from None
    try:
        image = pod["spec"]["containers"][0]["image"]
        if pod["kind"] != "Pod" or not isinstance(image, str):
            raise TypeError("kind")
    except (KeyError, IndexError, TypeError):
        raise TemplateError(
            f"{path} must be a Pod whose first container has an image and mounts the fleet's folder"
        ) from None
    pod.setdefault("apiVersion", "v1")
    pod.setdefault("metadata", {})
    pod["spec"].setdefault("terminationGracePeriodSeconds", _GRACE_S)
    pod["spec"]["restartPolicy"] = "Never"
    found: dict[str, Any] = pod
    return found


def _name(launch: Launch) -> str:
    """Of its pod; that of another fleet's has another folder."""
    readable = re.sub(r"[^a-z0-9]+", "-", launch.name.lower()).strip("-")[:40].strip("-") or "launch"
    return f"{readable}-{hashlib.sha256(str(launch.folder).encode()).hexdigest()[:12]}"


def _ready(node: Mapping[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in node["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and not node["spec"].get("unschedulable")


def _is_among(nodes: Mapping[str, Mapping[str, Any]], spec: Mapping[str, Any]) -> bool:
    """Whether a pod is on one of ``nodes``, by name, or, as long as it is nowhere, selects one."""
    name = spec.get("nodeName")
    return name in nodes if name else any(_selected(node, spec) for node in nodes.values())


def _selected(node: Mapping[str, Any], spec: Mapping[str, Any]) -> bool:
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(key) == value for key, value in (spec.get("nodeSelector") or {}).items())


def _tolerated(taint: Mapping[str, Any], tolerations: Iterable[Mapping[str, Any]]) -> bool:
    return any(
        each.get("effect") in (None, "", taint["effect"])
        and each.get("key") in (None, "", taint["key"])
        and (each.get("operator") == "Exists" or each.get("value", "") == taint.get("value", ""))
        for each in tolerations
    )


def _seconds(text: str) -> float:
    """Since 1970."""
    return datetime.fromisoformat(text).timestamp()
