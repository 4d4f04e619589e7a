"""A small Kubernetes on this machine: an API server, a scheduler, and a kubelet per node that runs real processes.

It keeps what clients rely on: resource versions, selectors, watches that end with 410 Gone, graceful deletion, garbage
collection by owner, pod phases and conditions. It is not Kubernetes; the official client and kubectl both work with it.
"""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

Object = dict[str, Any]
KINDS = {"pods": "Pod", "services": "Service", "nodes": "Node"}
TICK_S = 0.05
LOST_AFTER_S = 1.0
"""Between a kubelet's last word and the eviction of its pods; five minutes in real life."""


@dataclass
class Change:
    version: int
    type: str
    plural: str
    object: Object


class Refused(Exception):
    """An answer that is not 2xx."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


class Store:
    """All objects, their versions, and the changes that watches may still ask for."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.changes: list[Change] = []
        self.version = 100
        self.oldest = 100

    def put(self, plural: str, item: Object, *, create: bool = False) -> Object:
        with self.changed:
            meta = item["metadata"]
            key = (plural, meta.get("namespace", ""), meta["name"])
            if create and key in self.objects:
                raise Refused(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists')
            if create:
                meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now()}
            self.version += 1
            meta["resourceVersion"] = str(self.version)
            self.objects[key] = item
            self._note("ADDED" if create else "MODIFIED", plural, item)
            return copy.deepcopy(item)

    def get(self, plural: str, namespace: str, name: str) -> Object:
        with self.changed:
            found = self.objects.get((plural, namespace, name))
            if found is None:
                raise Refused(404, "NotFound", f'{plural} "{name}" not found')
            return found

    def remove(self, plural: str, item: Object) -> None:
        with self.changed:
            meta = item["metadata"]
            if self.objects.pop((plural, meta.get("namespace", ""), meta["name"]), None) is not None:
                self.version += 1
                meta["resourceVersion"] = str(self.version)
                self._note("DELETED", plural, item)

    def list(self, plural: str, namespace: str = "") -> list[Object]:
        with self.changed:
            return [
                item
                for (kind, space, _), item in sorted(self.objects.items())
                if kind == plural and namespace in ("", space)
            ]

    def compact(self) -> None:
        """Forget the past: watches from before end with 410 Gone."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.changes.clear()
            self.changed.notify_all()

    def _note(self, kind: str, plural: str, item: Object) -> None:
        self.changes.append(Change(self.version, kind, plural, copy.deepcopy(item)))
        self.changed.notify_all()


@dataclass
class Container:
    process: subprocess.Popen[bytes]
    log: Path
    kill_at: float = float("inf")
    oom: bool = False
    evicted: bool = False


@dataclass
class Kubelet:
    """Runs the pods of one node as processes."""

    node: str
    folder: Path
    store: Store
    containers: dict[str, Container] = field(default_factory=dict)
    alive: bool = True
    lost_at: float = 0.0

    def work(self) -> None:
        for pod in self.store.list("pods"):
            if pod["spec"].get("nodeName") == self.node:
                self._look_after(pod)
        uids = {pod["metadata"]["uid"] for pod in self.store.list("pods")}
        for uid in set(self.containers) - uids:
            _kill(self.containers.pop(uid).process)

    def _look_after(self, pod: Object) -> None:
        uid, phase = pod["metadata"]["uid"], pod["status"]["phase"]
        found = self.containers.get(uid)
        leaving = "deletionTimestamp" in pod["metadata"]
        if phase in ("Succeeded", "Failed") or (found is None and leaving):
            if leaving:
                self.store.remove("pods", pod)
        elif found is None:
            self._begin(pod)
        elif (code := found.process.poll()) is not None:
            _kill(found.process)
            self._end(pod, found, code)
        else:
            self._push(pod, found)

    def _begin(self, pod: Object) -> None:
        spec = pod["spec"]["containers"][0]
        env = {"PATH": os.environ["PATH"], "HOME": "/root", "HOSTNAME": pod["spec"].get("hostname", "")}
        for entry in spec.get("env", []):
            env[entry["name"]] = entry.get("value") or "127.0.0.1"  # the only field that is asked for is the pod's IP
        log = self.folder / f"{pod['metadata']['uid']}.log"
        command = [*spec.get("command", []), *spec.get("args", [])]
        try:
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, env=env, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
                )
        except OSError as problem:
            state = {"terminated": {"exitCode": 128, "reason": "StartError", "message": str(problem)}}
            self._say(pod, "Failed", state)
            return
        self.containers[pod["metadata"]["uid"]] = Container(process, log)
        self._say(pod, "Running", {"running": {"startedAt": _now()}})

    def _push(self, pod: Object, found: Container) -> None:
        limit = pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory")
        if limit and _resident(found.process) > _bytes(limit):
            found.oom = True
            _kill(found.process)
        if "deletionTimestamp" in pod["metadata"]:
            grace = pod["metadata"]["deletionGracePeriodSeconds"]
            if found.kill_at == float("inf"):
                found.process.send_signal(signal.SIGTERM)
            found.kill_at = min(found.kill_at, time.monotonic() + grace)
            if time.monotonic() > found.kill_at:
                _kill(found.process)

    def _end(self, pod: Object, found: Container, code: int) -> None:
        reason = "OOMKilled" if found.oom else "Completed" if code == 0 else "Error"
        exit_code = code if code >= 0 else 128 - code
        state = {"terminated": {"exitCode": exit_code, "reason": reason, "finishedAt": _now()}}
        self._say(pod, "Succeeded" if code == 0 else "Failed", state)

    def _say(self, pod: Object, phase: str, state: Object) -> None:
        image = pod["spec"]["containers"][0]["image"]
        status = {"name": "task", "image": image, "imageID": image, "ready": phase == "Running", "restartCount": 0}
        pod["status"] |= {"phase": phase, "podIP": "127.0.0.1", "containerStatuses": [status | {"state": state}]}
        self.store.put("pods", pod)


class Kube:
    """The control plane and its nodes. `address` is where the API server listens; `kubeconfig` leads clients there."""

    def __init__(self, folder: Path, nodes: dict[str, tuple[float, int]]) -> None:
        self.folder = folder
        self.store = Store()
        self.kubelets = {name: Kubelet(name, folder, self.store) for name in nodes}
        self.problems: list[BaseException] = []
        for name, (cpu, memory_mib) in nodes.items():
            capacity = {"cpu": str(cpu), "memory": f"{memory_mib}Mi", "pods": "110"}
            self.store.put(
                "nodes",
                {
                    "apiVersion": "v1",
                    "kind": "Node",
                    "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
                    "spec": {},
                    "status": {"capacity": capacity, "allocatable": capacity, "conditions": [_ready("True")]},
                },
                create=True,
            )
        handler = type("Handler", (_Handler,), {"kube": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.closing = threading.Event()
        self.requests: list[str] = []
        self.is_away = False
        self.threads = [
            threading.Thread(target=self.server.serve_forever, daemon=True),
            threading.Thread(target=self._control, daemon=True),
        ]
        for thread in self.threads:
            thread.start()
        self.kubeconfig = folder / "kubeconfig"
        cluster = {"name": "small", "cluster": {"server": self.address}}
        context = {"name": "small", "context": {"cluster": "small", "user": "me"}}
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [cluster],
                    "contexts": [context],
                    "users": [{"name": "me", "user": {}}],
                    "current-context": "small",
                }
            )
        )

    def stop(self) -> None:
        self.closing.set()
        for kubelet in self.kubelets.values():
            for container in kubelet.containers.values():
                _kill(container.process)
        with self.store.changed:
            self.store.changed.notify_all()
        self.server.shutdown()
        self.server.server_close()
        self.threads[1].join(5)

    # --- what happens in a cluster

    def evict(self, namespace: str, name: str) -> None:
        """As the eviction API does it: the condition first, then a graceful deletion."""
        with self.store.changed:
            pod = self.store.get("pods", namespace, name)
            _condition(pod, "DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
            self.store.put("pods", pod)
            self.delete("pods", pod, {})

    def lose(self, node: str) -> None:
        """The kubelet is cut off: its processes go on and nobody hears of them."""
        self.kubelets[node].alive = False
        self.kubelets[node].lost_at = time.monotonic()

    @contextmanager
    def away(self) -> Iterator[None]:
        """The API server refuses everybody and ends the watches; the kubelets work on."""
        self.is_away = True
        yield
        self.is_away = False

    def restore(self) -> None:
        for name, kubelet in self.kubelets.items():
            kubelet.alive = True
            node = self.store.get("nodes", "", name)
            node["status"]["conditions"] = [_ready("True")]

    def create(self, plural: str, namespace: str, item: Object) -> Object:
        item["metadata"].setdefault("namespace", namespace)
        item |= {"apiVersion": "v1", "kind": KINDS[plural]}
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", item["metadata"]["name"]):
            raise Refused(422, "Invalid", f"metadata.name: Invalid value: {item['metadata']['name']!r}")
        for key, value in item["metadata"].get("labels", {}).items():
            if not re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value) or len(value) > 63:
                raise Refused(422, "Invalid", f"metadata.labels: Invalid value for {key}: {value!r}")
        if plural == "pods":
            self._check_pod(item)
            item["status"] = {"phase": "Pending", "qosClass": "Burstable", "conditions": []}
        return self.store.put(plural, item, create=True)

    def _check_pod(self, pod: Object) -> None:
        spec = pod["spec"]
        for field_name in ("hostname", "subdomain"):
            if len(spec.get(field_name, "")) > 63:
                raise Refused(422, "Invalid", f"spec.{field_name}: must be no more than 63 characters")
        mounts = {mount["name"] for each in spec["containers"] for mount in each.get("volumeMounts", [])}
        if not mounts <= {volume["name"] for volume in spec.get("volumes", [])}:
            raise Refused(422, "Invalid", "spec.containers[0].volumeMounts[0].name: Not found")

    def delete(self, plural: str, item: Object, options: Object) -> Object:
        with self.store.changed:
            if plural != "pods":
                self.store.remove(plural, item)
                return item
            grace = options.get("gracePeriodSeconds")
            before = item["metadata"].get("deletionGracePeriodSeconds")
            wanted = item["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else int(grace)
            if wanted == 0 or not item["spec"].get("nodeName"):
                self.store.remove("pods", item)
            elif before is None or wanted < before:
                item["metadata"] |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": wanted}
                self.store.put("pods", item)
            return item

    def _control(self) -> None:
        while not self.closing.wait(TICK_S):
            try:
                with self.store.changed:
                    self._collect()
                    self._schedule()
                    for kubelet in self.kubelets.values():
                        if kubelet.alive:
                            kubelet.work()
                        elif time.monotonic() - kubelet.lost_at > LOST_AFTER_S:
                            self._evict_from(kubelet.node)
            except Exception as problem:
                self.problems.append(problem)

    def _collect(self) -> None:
        uids = {item["metadata"]["uid"] for item in self.store.objects.values()}
        for plural in ("pods", "services"):
            for item in self.store.list(plural):
                owners = item["metadata"].get("ownerReferences", [])
                if owners and not any(owner["uid"] in uids for owner in owners):
                    self.delete(plural, item, {})

    def _schedule(self) -> None:
        for pod in self.store.list("pods"):
            if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                continue
            node = next((name for name in self.kubelets if self._fits(pod, name)), None)
            if node is not None:
                pod["spec"]["nodeName"] = node
                _condition(pod, "PodScheduled", "True", "", "")
                self.store.put("pods", pod)
            elif not pod["status"]["conditions"]:
                words = f"0/{len(self.kubelets)} nodes are available: Insufficient cpu."
                _condition(pod, "PodScheduled", "False", "Unschedulable", words)
                self.store.put("pods", pod)

    def _fits(self, pod: Object, name: str) -> bool:
        node = self.store.get("nodes", "", name)
        wanted = pod["spec"].get("nodeSelector") or {}
        closed = not self.kubelets[name].alive or node["spec"].get("unschedulable")
        closed = closed or any(taint["effect"] != "PreferNoSchedule" for taint in _untolerated(pod, node))
        if closed or not wanted.items() <= node["metadata"]["labels"].items():
            return False
        here = [p for p in self.store.list("pods") if p["spec"].get("nodeName") == name]
        running = [p for p in here if p["status"]["phase"] not in ("Succeeded", "Failed")]
        return sum(_cpu(p) for p in [*running, pod]) <= float(node["status"]["capacity"]["cpu"])

    def taint(self, name: str, *taints: dict[str, str]) -> None:
        with self.store.changed:
            node = self.store.get("nodes", "", name)
            node["spec"]["taints"] = list(taints)
            self.store.put("nodes", node)

    def _evict_from(self, name: str) -> None:
        """The node lifecycle controller: the pods are marked and deleted, and stay because no kubelet confirms."""
        node = self.store.get("nodes", "", name)
        if node["status"]["conditions"][0]["status"] == "True":
            node["status"]["conditions"] = [_ready("Unknown")]
            self.store.put("nodes", node)
        for pod in self.store.list("pods"):
            if pod["spec"].get("nodeName") == name and "deletionTimestamp" not in pod["metadata"]:
                words = "Taint manager: deleting due to NoExecute taint"
                _condition(pod, "DisruptionTarget", "True", "DeletionByTaintManager", words)
                self.delete("pods", pod, {})


def _untolerated(pod: Object, node: Object) -> list[Object]:
    return [
        taint
        for taint in node["spec"].get("taints", [])
        if not any(
            one.get("key", taint["key"]) == taint["key"]
            and one.get("effect", taint["effect"]) == taint["effect"]
            and (one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", ""))
            for one in pod["spec"].get("tolerations", [])
        )
    ]


class _Handler(BaseHTTPRequestHandler):
    kube: Kube
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        self.kube.requests.append(format % args)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _answer(self, method: Any) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        self.body: Object = json.loads(raw) if raw else {}
        try:
            if self.kube.is_away:
                raise Refused(503, "ServiceUnavailable", "the server is currently unable to handle the request")
            with suppress(BrokenPipeError, ConnectionResetError):
                answer = method([part for part in url.path.split("/") if part])
                if answer is not None:
                    self._send(201 if self.command == "POST" else 200, answer)
        except Refused as problem:
            self._send(problem.status["code"], problem.status)

    def _send(self, code: int, answer: Object | str) -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _get(self, parts: list[str]) -> Object | str | None:
        match parts:
            case ["version"]:
                return {"major": "1", "minor": "31", "gitVersion": "v1.31.0"}
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
            case ["apis"]:
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in _MORE]}
            case ["apis", group, "v1"] if group in _MORE:
                return {"kind": "APIResourceList", "groupVersion": f"{group}/v1", "resources": _known(_MORE[group])}
            case ["api", "v1"]:
                return {"kind": "APIResourceList", "groupVersion": "v1", "resources": [*_RESOURCES, *_known(_CORE)]}
            case ["api", "v1", "namespaces", namespace, "pods", name, "log"]:
                return self._log(self.kube.store.get("pods", namespace, name))
            case ["api", "v1", "namespaces", namespace, plural, name] if plural in KINDS:
                with self.kube.store.changed:
                    return copy.deepcopy(self.kube.store.get(plural, namespace, name))
            case ["api", "v1", "nodes", name]:
                return copy.deepcopy(self.kube.store.get("nodes", "", name))
            case ["api", "v1", "namespaces", namespace, plural] if plural in KINDS:
                return self._list(plural, namespace)
            case ["api", "v1", plural] if plural in KINDS:
                return self._list(plural, "")
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def _post(self, parts: list[str]) -> Object:
        match parts:
            case ["api", "v1", "namespaces", namespace, plural] if plural in KINDS:
                return self.kube.create(plural, namespace, self.body)
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def _delete(self, parts: list[str]) -> Object:
        match parts:
            case ["api", "v1", "namespaces", namespace, plural, name] if plural in KINDS:
                options = self.body | {key: value for key, value in self.query.items() if key == "gracePeriodSeconds"}
                item = self.kube.store.get(plural, namespace, name)
                return copy.deepcopy(self.kube.delete(plural, item, options))
        raise Refused(404, "NotFound", "the server could not find the requested resource")

    def _log(self, pod: Object) -> str:
        path = self.kube.folder / f"{pod['metadata']['uid']}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _list(self, plural: str, namespace: str) -> Object | None:
        if self.query.get("watch") in ("true", "1", "True"):
            self._watch(plural, namespace)
            return None
        with self.kube.store.changed:
            items = [copy.deepcopy(item) for item in self.kube.store.list(plural, namespace) if self._selected(item)]
            version = str(self.kube.store.version)
        return {
            "kind": f"{KINDS[plural]}List",
            "apiVersion": "v1",
            "metadata": {"resourceVersion": version},
            "items": items,
        }

    def _selected(self, item: Object) -> bool:
        labels = item["metadata"].get("labels", {})
        for part in filter(None, self.query.get("labelSelector", "").split(",")):
            key, sign, value = part.replace("==", "=").partition("=")
            negated = key.endswith("!")
            if (labels.get(key.rstrip("!")) == value if sign else key in labels) == negated:
                return False
        for part in filter(None, self.query.get("fieldSelector", "").split(",")):
            key, _, value = part.replace("==", "=").partition("=")
            found: Any = item
            for step in key.split("."):
                found = (found or {}).get(step)
            if found != value:
                return False
        return True

    def _watch(self, plural: str, namespace: str) -> None:
        store = self.kube.store
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        version = int(self.query.get("resourceVersion") or store.version)
        until = time.monotonic() + float(self.query.get("timeoutSeconds") or 300)
        while time.monotonic() < until and not self.kube.closing.is_set() and not self.kube.is_away:
            with store.changed:
                if version < store.oldest:
                    gone = Refused(GONE, "Expired", f"too old resource version: {version} ({store.oldest})")
                    self._chunk({"type": "ERROR", "object": gone.status})
                    break
                fresh = [change for change in store.changes if change.version > version]
                if not fresh:
                    store.changed.wait(0.2)
                    continue
            for change in fresh:
                version = change.version
                mine = namespace in ("", change.object["metadata"].get("namespace", ""))
                if change.plural == plural and mine and self._selected(change.object):
                    self._chunk({"type": change.type, "object": change.object})
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: Object) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


GONE = 410
_VERBS = ["create", "delete", "get", "list", "watch"]
_RESOURCES = [
    {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": _VERBS, "shortNames": ["po"]},
    {"name": "pods/log", "singularName": "", "namespaced": True, "kind": "Pod", "verbs": ["get"]},
    {"name": "services", "singularName": "service", "namespaced": True, "kind": "Service", "verbs": _VERBS},
    {"name": "nodes", "singularName": "node", "namespaced": False, "kind": "Node", "verbs": _VERBS},
]


_CORE = {
    "configmaps": "ConfigMap",
    "serviceaccounts": "ServiceAccount",
    "persistentvolumeclaims": "PersistentVolumeClaim",
}
_MORE = {
    "apps": {"deployments": "Deployment"},
    "rbac.authorization.k8s.io": {
        "roles": "Role",
        "rolebindings": "RoleBinding",
        "clusterroles": "ClusterRole",
        "clusterrolebindings": "ClusterRoleBinding",
    },
}
"""Kinds that clients can learn of here; none of them does anything."""


def _known(kinds: dict[str, str]) -> list[Object]:
    return [
        {"name": name, "namespaced": not name.startswith("cluster"), "kind": kind, "verbs": ["create"]}
        for name, kind in kinds.items()
    ]


def _group(name: str) -> Object:
    version = {"groupVersion": f"{name}/v1", "version": "v1"}
    return {"name": name, "versions": [version], "preferredVersion": version}


def _condition(item: Object, kind: str, status: str, reason: str, message: str) -> None:
    conditions = [each for each in item["status"].get("conditions", []) if each["type"] != kind]
    new = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": _now()}
    item["status"]["conditions"] = [*conditions, new]


def _ready(status: str) -> Object:
    return {"type": "Ready", "status": status, "reason": "KubeletReady", "message": "", "lastTransitionTime": _now()}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _cpu(pod: Object) -> float:
    text = str(pod["spec"]["containers"][0].get("resources", {}).get("requests", {}).get("cpu", "0"))
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _bytes(text: str) -> int:
    factors = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(float(text[:-2]) * factors[text[-2:]]) if text[-2:] in factors else int(text)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    if process.poll() is not None:
        return []  # its number may be another's by now; what it left is its shepherd's to end
    with suppress(psutil.Error):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _resident(process: subprocess.Popen[bytes]) -> int:
    total = 0
    for each in _family(process):
        with suppress(psutil.Error):
            total += each.memory_info().rss
    return total


def _kill(process: subprocess.Popen[bytes]) -> None:
    for each in reversed(_family(process)):
        with suppress(psutil.Error):
            each.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(2)


if __name__ == "__main__":  # to look at it with kubectl
    kube = Kube(Path(sys.argv[1]), {"n1": (8.0, 8000), "n2": (8.0, 8000)})
    sys.stdout.write(f"KUBECONFIG={kube.kubeconfig}\n")
    sys.stdout.flush()
    threading.Event().wait()
