"""Stand-ins for Kubernetes's API, over HTTP: one of Leases, and a cluster whose pods are processes of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Answer = tuple[int, Any]
"""HTTP status, and what its body says as JSON; bytes are sent as they are."""


class Api:
    """A server of 127.0.0.1, and a kubeconfig that leads there. What it answers is a subclass's."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False  # so that closing waits for who still answers
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}],
            "users": [{"name": "test", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}]}))  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]) -> Answer:
        """To one request. Requests come from several threads."""
        raise NotImplementedError

    @staticmethod
    def error(code: int, reason: str) -> Answer:
        return code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                url = urlsplit(self.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                status, answer = api.answer(self.command, url.path, query, json.loads(body or b"{}"))
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Connection", "close")
                with suppress(ConnectionError):  # who asked may have gone
                    self.end_headers()
                    self.wfile.write(data)

            do_POST = do_PUT = do_DELETE = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


class Leases(Api):
    """The part that deals with Leases: get, create, and replace with the resource version as the guard, with the errors
    and their bodies that the real one sends. In memory.
    """

    def __init__(self, folder: Path) -> None:
        self._leases: dict[str, dict[str, Any]] = {}
        self._version = 0
        super().__init__(folder)

    def answer(self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]) -> Answer:
        with self._lock:
            key = f"{path}/{body['metadata']['name']}" if method == "POST" else path
            found = self._leases.get(key)
            if "/namespaces/there/leases" not in path:
                return self.error(403, "Forbidden")
            if method == "POST" and found is not None:
                return self.error(409, "AlreadyExists")
            if method != "POST" and found is None:
                return self.error(404, "NotFound")
            if method == "GET":
                assert found is not None
                return 200, found
            if found is not None and body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
                return self.error(409, "Conflict")
            if sum(len(text) for text in body["metadata"].get("annotations", {}).values()) > 256 << 10:
                return self.error(422, "Invalid")
            self._version += 1
            body["metadata"]["resourceVersion"] = str(self._version)
            self._leases[key] = body
            return 200 if found is not None else 201, body


class Cluster(Api):
    """Nodes with devices of one resource, and pods, which are started where they fit, in the order of their creation.

    A pod's first container is a process of this machine in a session of its own; what has become of it is seen with
    the next request. ``mood`` makes it answer badly: ``silent``, ``broken``, ``garbage``, ``odd``, ``strict``.
    """

    def __init__(self, folder: Path, nodes: Mapping[str, int], resource: str) -> None:
        self.nodes: dict[str, dict[str, Any]] = {
            name: {"metadata": {"name": name, "labels": {"name": name}}, "spec": {},
                   "status": {"allocatable": {resource: str(devices)}, "conditions": [
                       {"type": "DiskPressure", "status": "False"}, {"type": "Ready", "status": "True"}]}}
            for name, devices in nodes.items()
        }  # fmt: skip
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.mood = ""
        self.created = 0
        self._resource = resource
        self._processes: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._killed_at: dict[tuple[str, str], float] = {}
        self._heard = threading.Event()
        """Whoever was silent may go on, to nobody."""
        super().__init__(folder)

    def close(self) -> None:
        """No process of a pod is left."""
        self._heard.set()
        super().close()
        for process in self._processes.values():
            self._signal(process, signal.SIGKILL)
            process.wait()

    def run(self, name: str, devices: int, namespace: str = "others") -> None:
        """Somebody else's pod, which has no process here."""
        body = {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "resources": {
            "requests": {self._resource: str(devices)}}}]}}  # fmt: skip
        with self._lock:
            self._create(namespace, body)
            self._proceed()

    def remove(self, name: str, namespace: str = "others") -> None:
        """As ``kubectl delete --now`` does."""
        with self._lock:
            self._delete((namespace, name), 1)
            self._proceed()

    def phase(self, name: str, namespace: str = "others") -> str:
        with self._lock:
            self._proceed()
            return str(self.pods[namespace, name]["status"]["phase"])

    def answer(self, method: str, path: str, query: Mapping[str, str], body: dict[str, Any]) -> Answer:
        if self.mood == "silent":
            self._heard.wait()
            return self.error(500, "TooLate")
        if self.mood == "broken":
            return self.error(503, "ServiceUnavailable")
        if self.mood == "strict":
            return self.error(403, "Forbidden")
        if self.mood == "garbage":
            return 200, b"<html>"
        if self.mood == "odd":
            return 200, {"items": [{"metadata": {"name": "a"}}]}
        with self._lock:
            self._proceed()
            if path == "/api/v1/nodes":
                return 200, {"items": list(self.nodes.values())}
            if path == "/api/v1/pods":
                return 200, {"items": [pod for pod in self.pods.values() if _selected(pod, query)]}
            namespace, _, name = path.removeprefix("/api/v1/namespaces/").partition("/pods")
            key = namespace, name.removeprefix("/")
            if method == "POST":
                if (namespace, body["metadata"]["name"]) in self.pods:
                    return self.error(409, "AlreadyExists")
                return 201, self._create(namespace, body)
            if method == "DELETE":
                if key not in self.pods:
                    return self.error(404, "NotFound")
                pod = self.pods[key]
                self._delete(key, int(query["gracePeriodSeconds"]))
                return 200, pod
            return 200, {"items": [pod for (there, _), pod in self.pods.items()
                                   if there == namespace and _selected(pod, query)]}  # fmt: skip

    # ---- scheduler and kubelet ----------------------------------------------------------------

    def _create(self, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        self.created += 1
        body["metadata"] |= {"namespace": namespace, "creationTimestamp": _now()}
        body["status"] = {"phase": "Pending"}
        self.pods[namespace, body["metadata"]["name"]] = body
        return body

    def _delete(self, key: tuple[str, str], grace: int) -> None:
        pod, process = self.pods[key], self._processes.get(key)
        if process is None or process.poll() is not None or grace == 0:
            if process is not None:
                self._signal(process, signal.SIGKILL)
            del self.pods[key]
            return
        if "deletionTimestamp" not in pod["metadata"]:
            process.terminate()
        pod["metadata"]["deletionTimestamp"] = _now()
        self._killed_at[key] = time.monotonic() + grace

    def _proceed(self) -> None:
        for key, process in list(self._processes.items()):
            if time.monotonic() > self._killed_at.get(key, float("inf")):
                self._signal(process, signal.SIGKILL)
            if (code := process.poll()) is None:
                continue
            pod = self.pods.get(key)
            del self._processes[key]
            if pod is not None:
                state = {"terminated": {"exitCode": code if code >= 0 else 128 - code}}
                pod["status"] |= {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"state": state}]}
                if key in self._killed_at:
                    del self.pods[key]
        for key, pod in self.pods.items():
            if pod["status"]["phase"] == "Pending":
                self._place(key, pod)

    def _place(self, key: tuple[str, str], pod: dict[str, Any]) -> None:
        need = self._needs(pod)
        for name, node in self.nodes.items():
            there = [own for own in self.pods.values() if own["spec"].get("nodeName") == name
                     and own["status"]["phase"] == "Running"]  # fmt: skip
            free = int(node["status"]["allocatable"][self._resource]) - sum(map(self._needs, there))
            if need <= free and not node["spec"].get("unschedulable"):
                pod["spec"]["nodeName"] = name
                pod["status"] = {"phase": "Running", "podIP": "127.0.0.1", "startTime": _now()}
                if "command" in pod["spec"]["containers"][0]:
                    self._processes[key] = _start(pod["spec"]["containers"][0], pod["status"]["podIP"])
                return

    def _needs(self, pod: Mapping[str, Any]) -> int:
        return int(pod["spec"]["containers"][0]["resources"]["requests"][self._resource])

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: int) -> None:
        if process.poll() is None:
            os.killpg(process.pid, number)


def _start(container: Mapping[str, Any], address: str) -> subprocess.Popen[bytes]:
    env = {each["name"]: each.get("value", address) for each in container.get("env", [])}

    def expanded(word: str) -> str:
        return re.sub(r"\$\$\(|\$\((\w+)\)", lambda found: env.get(found[1], found[0]) if found[1] else "$(", word)

    words = [expanded(word) for word in (*container["command"], *container["args"])]
    return subprocess.Popen(words, cwd=container["workingDir"], env={**os.environ, **env}, start_new_session=True,
                            stdin=subprocess.DEVNULL)  # fmt: skip


def _selected(pod: Mapping[str, Any], query: Mapping[str, str]) -> bool:
    label = query.get("labelSelector")
    excluded = re.findall(r"status\.phase!=(\w+)", query.get("fieldSelector", ""))
    return pod["status"]["phase"] not in excluded and (label is None or label in pod["metadata"].get("labels", {}))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
