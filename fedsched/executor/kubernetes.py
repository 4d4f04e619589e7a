"""The back end `kubernetes`: each task is a pod; a headless service per attempt owns them and gives them names.

The pods mount the cluster's directory from one volume. Deleting an attempt's service takes all that is left of the
attempt along, so that nothing depends on this process being there to tidy up. Pods are followed with one list and watch
for the whole cluster. Tested with the official client and with kubectl against an API server of our own, not against a
real cluster.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import urllib3
from kubernetes import client, config, watch
from kubernetes.config.config_exception import ConfigException

from fedsched.core.ids import NodeName
from fedsched.core.job import Reason
from fedsched.core.resources import Resources
from fedsched.errors import InvalidConfiguration, StartFailed
from fedsched.executor.launching import MachineTrouble
from fedsched.executor.records import Attempt, TaskOrder, TaskRecord
from fedsched.executor.shepherded import COORDINATOR_NEEDS, Known, Shepherded, TaskCondition
from fedsched.runtime.backoff import Backoff

ASK_S = 20.0
"""Longest wait for an answer of the API server."""
WATCH_S = 300
"""After so long a watch is asked for anew: a connection that died silently must not be trusted for ever."""
BACKOFF_S = (0.5, 15.0)
"""First and longest pause between two tries to reach the API server."""
TRIES_MAX = 12
"""So often a request is made before it is given up: for about two minutes."""
NAME_MAX = 63
"""Names of pods become names of hosts, which are no longer than this."""
GONE = 410
"""The API server's answer to a watch from a past that it no longer knows."""
PREFIX = "fedsched.io/"
"""Of the labels by which pods of ours are found."""
HOSTNAME = "kubernetes.io/hostname"
"""The label by which nodes are known."""
PREEMPTING = ("PreemptionByScheduler", "EvictionByEvictionAPI", "TerminationByKubelet")
LOSING = ("DeletionByTaintManager", "DeletionByPodGC")
"""Reasons of the condition `DisruptionTarget`."""
EVICTING = ("Evicted", "Preempting", "Terminated", "NodeShutdown", "Shutdown")
"""Reasons in a pod's own status when the kubelet ended it."""

KEEPING_AWAY = ("NoSchedule", "NoExecute")
"""Effects of taints that keep new pods off a node; the third one only puts it last."""
TOLERATED = "node.kubernetes.io/memory-pressure"
"""A taint that Kubernetes itself has every pod tolerate which asks for some memory, as ours do."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Toleration:
    """Lets pods on nodes with a taint, as in a pod's `tolerations`. Empty `key` and `effect`: any."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Any) -> bool:
        """Whether pods with this go on a node with that taint, as Kubernetes has it."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or self.value == (taint.value or "")

    def as_object(self) -> dict[str, str]:
        """As it stands in a pod."""
        fields = {"key": self.key, "operator": self.operator, "value": self.value, "effect": self.effect}
        return {name: text for name, text in fields.items() if text}


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """How pods are made."""

    image: str
    """Has fedsched and what the jobs need."""
    namespace: str = "default"
    claim: str = ""
    """The persistent volume claim that holds the cluster's directory; every node can mount it at once."""
    mount: str = ""
    """Where the claim is mounted in pods, as it is in the agent's own. Without a claim: a directory of every node."""
    kubeconfig: str = ""
    """The file that leads to the cluster; without it the one that the agent runs in, or else kubectl's own."""
    context: str = ""
    """Of that file; empty means its current one."""
    python: str = "python"
    """The interpreter in the image."""
    service_account: str = ""
    node_selector: tuple[tuple[str, str], ...] = ()
    coordinator: Resources = COORDINATOR_NEEDS
    tolerations: tuple[Toleration, ...] = ()


@dataclass(slots=True)
class _Seen:
    """The newest state of a pod."""

    pod: Any
    gone: bool = False


@dataclass(slots=True)
class _Pods:
    """What the watch has told."""

    by_name: dict[str, _Seen] = field(default_factory=dict)
    forgotten: dict[str, float] = field(default_factory=dict)
    """Of forgotten tasks those that may still be there, and since when: what is told of them is not wanted."""
    listed_at_s: float = float("-inf")


class KubernetesTasks(Shepherded):
    """Tasks as pods.

    Args:
        cluster: labels the pods, so that several agents can share a namespace.

    Raises:
        InvalidConfiguration: there is no way to an API server.
    """

    def __init__(self, options: KubernetesOptions, cluster: str) -> None:
        super().__init__(options.coordinator)
        self._options = options
        self._cluster = cluster
        self._api = client.CoreV1Api(_client(options.kubeconfig, options.context))
        self._pods = _Pods()
        self._closing = threading.Event()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._watch = watch.Watch()
        self._threads = [
            threading.Thread(target=self._follow, name="kubernetes-watch", daemon=True),
            threading.Thread(target=self._do_work, name="kubernetes", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let go: the pods go on."""
        self._closing.set()
        self._watch.stop()
        self._work.put(None)
        self._threads[1].join(ASK_S)  # the watch's may wait for the API server for minutes, and holds nothing

    def sweep(self, attempt: Attempt, records: Iterable[TaskRecord]) -> bool:
        """Delete the attempt's service, and with it every pod that it owns."""
        if super().sweep(attempt, records):
            return True
        name = self._service(attempt)
        self._work.put(
            lambda: self._api.delete_namespaced_service(name, self._options.namespace, _request_timeout=ASK_S)
        )
        return False

    def _submit(self, order: TaskOrder, program: tuple[str, ...]) -> str:
        attempt = order.attempt
        try:
            pod = self._pod(order, attempt, self._owner(attempt), program)
            made = self._api.create_namespaced_pod(self._options.namespace, pod, _request_timeout=ASK_S)
        except (client.ApiException, urllib3.exceptions.HTTPError) as problem:
            with self._lock:
                self._drop(self._pod_name(order, attempt))  # it may have been made nevertheless
            raise _refusal(order, problem) from problem
        return str(made.metadata.name)

    def _says(self, handle: str, known: Known) -> TaskCondition:
        seen = self._pods.by_name.get(handle)
        if seen is None:
            # A list that came since does not have it: it is gone for good.
            return TaskCondition(ended=self._pods.listed_at_s > known.since_s)
        return _standing(seen.pod, gone=seen.gone, by_us=known.ended_by_us)

    def _drop(self, handle: str) -> None:
        seen = self._pods.by_name.pop(handle, None)
        if seen is None or not seen.gone:
            # An ended pod stays until somebody deletes it; its log is in the cluster's directory.
            self._pods.forgotten[handle] = time.monotonic()
            self._work.put(functools.partial(self._delete, handle, {}))

    def _tell(self, handles: list[str], signum: signal.Signals) -> None:
        # Not 0: that would take the pod off the books while its processes still run.
        grace = {"grace_period_seconds": 1} if signum is signal.SIGKILL else {}
        for name in handles:
            self._work.put(functools.partial(self._delete, name, grace))

    def _closed_of(self, nodes: Sequence[NodeName]) -> Mapping[NodeName, str] | None:
        try:
            found = self._api.list_node(_request_timeout=ASK_S).items
        except client.ApiException as problem:
            _log.warning("Kubernetes refused to list nodes: %s", _words(problem))
            return None
        except urllib3.exceptions.HTTPError as problem:
            _log.warning("Kubernetes does not answer: %s", problem)
            return None
        tolerations = self._options.tolerations
        said = {
            (node.metadata.labels or {}).get(HOSTNAME, node.metadata.name): _why_closed(node, tolerations)
            for node in found
        }
        closed = {name: said.get(name, f"no node has the label {HOSTNAME}={name}") for name in nodes}
        return {name: why for name, why in closed.items() if why}

    def _delete(self, name: str, grace: dict[str, int]) -> None:
        self._api.delete_namespaced_pod(name, self._options.namespace, **grace, _request_timeout=ASK_S)

    def _do_work(self) -> None:
        """Requests that nobody waits for, one after the other: what keeps one from being served keeps all of them."""
        while (request := self._work.get()) is not None:
            self._carry_out(request)

    def _carry_out(self, request: Callable[[], object]) -> None:
        """Deletions, all of them: what has gone is fine, and what is not asked again stays there for good."""
        backoff = Backoff(*BACKOFF_S)
        for _ in range(TRIES_MAX):
            try:
                request()
                return
            except client.ApiException as problem:
                if problem.status == 404:
                    return
                why = _words(problem)
                if not _may_pass(problem):
                    break
            except urllib3.exceptions.HTTPError as problem:
                why = str(problem)
            _log.warning("Kubernetes does not serve a request, trying again: %s", why)
            if self._closing.wait(backoff.pause_s()):
                return
        _log.error("Kubernetes did not serve a request: %s", why)

    def _labels(self, attempt: Attempt) -> dict[str, str]:
        return {
            "app.kubernetes.io/managed-by": "fedsched",
            f"{PREFIX}cluster": self._cluster,
            f"{PREFIX}job": _name(attempt.job_dir.name),
            f"{PREFIX}attempt": str(attempt.number),
        }

    def _service(self, attempt: Attempt) -> str:
        return _name(f"{self._cluster}-{attempt.job_dir.name}-{attempt.number}", NAME_MAX - 28)

    def _pod_name(self, order: TaskOrder, attempt: Attempt) -> str:
        return _name(f"{self._service(attempt)}-{order.task}", NAME_MAX - 9) + f"-{order.request[:8]}"

    def _owner(self, attempt: Attempt) -> dict[str, Any]:
        """The attempt's headless service, which is made with its first task."""
        name, namespace = self._service(attempt), self._options.namespace
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "labels": self._labels(attempt)},
            "spec": {
                "clusterIP": "None",
                "selector": self._labels(attempt),
                "publishNotReadyAddresses": True,
            },
        }
        try:
            made = self._api.create_namespaced_service(namespace, service, _request_timeout=ASK_S)
        except client.ApiException as problem:
            if problem.status != 409:
                raise
            made = self._api.read_namespaced_service(name, namespace, _request_timeout=ASK_S)
        return {"apiVersion": "v1", "kind": "Service", "name": name, "uid": made.metadata.uid}

    def _pod(
        self, order: TaskOrder, attempt: Attempt, owner: dict[str, Any], program: tuple[str, ...]
    ) -> dict[str, Any]:
        options = self._options
        container = {
            "name": "task",
            "image": options.image,
            "command": [options.python, *program, "--echo"],
            "env": [{"name": "FEDSCHED_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            "resources": _resources(self._counted(order.demand)),
        }
        spec: dict[str, Any] = {
            "containers": [container],
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": max(1, math.ceil(order.grace_s)),
            "hostname": order.task,
            "subdomain": owner["name"],
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "nodeSelector": dict(options.node_selector),
            "tolerations": [toleration.as_object() for toleration in options.tolerations],
        }
        if order.node:
            spec["nodeSelector"][HOSTNAME] = order.node
        if options.service_account:
            spec["serviceAccountName"] = options.service_account
        if options.mount:
            source = {"persistentVolumeClaim": {"claimName": options.claim}}
            spec["volumes"] = [
                {"name": "shared", **(source if options.claim else {"hostPath": {"path": options.mount}})}
            ]
            container["volumeMounts"] = [{"name": "shared", "mountPath": options.mount}]
        labels = self._labels(attempt) | {f"{PREFIX}task": order.task}
        name = self._pod_name(order, attempt)
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": spec,
        }

    def _follow(self) -> None:
        backoff = Backoff(*BACKOFF_S)
        while not self._closing.is_set():
            try:
                version = self._list()
                backoff.reset()
                self._watch_from(version)
            except client.ApiException as problem:
                if problem.status != GONE:  # then too much has happened since: list again, at once
                    _log.warning("Kubernetes refused to list pods: %s", _words(problem))
                    self._closing.wait(backoff.pause_s())
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as problem:  # cut off, or no JSON any more
                _log.warning("the watch of Kubernetes broke off: %s", problem)
                self._closing.wait(backoff.pause_s())

    def _list(self) -> str:
        began_s = time.monotonic()
        found = self._api.list_namespaced_pod(
            self._options.namespace, label_selector=f"{PREFIX}cluster={self._cluster}", _request_timeout=ASK_S
        )
        present = {pod.metadata.name: pod for pod in found.items}
        pods = self._pods
        with self._lock:
            pods.forgotten = {name: at_s for name, at_s in pods.forgotten.items() if name in present or at_s >= began_s}
            for name, seen in pods.by_name.items():
                seen.gone = seen.gone or name not in present
            pods.by_name |= {name: _Seen(pod) for name, pod in present.items() if name not in pods.forgotten}
            pods.listed_at_s = began_s
        return str(found.metadata.resource_version)

    def _watch_from(self, version: str) -> None:
        stream = self._watch.stream(
            self._api.list_namespaced_pod,
            self._options.namespace,
            label_selector=f"{PREFIX}cluster={self._cluster}",
            resource_version=version,
            timeout_seconds=WATCH_S,
            _request_timeout=(ASK_S, WATCH_S + ASK_S),
        )
        for event in stream:
            self._note(event["object"], gone=event["type"] == "DELETED")
            if self._closing.is_set():
                return

    def _note(self, pod: Any, *, gone: bool) -> None:
        name = pod.metadata.name
        with self._lock:
            if name not in self._pods.forgotten:
                self._pods.by_name[name] = _Seen(pod, gone)
            elif gone:
                del self._pods.forgotten[name]


def _standing(pod: Any, *, gone: bool, by_us: bool) -> TaskCondition:
    """What a pod's status says, in our words."""
    status = pod.status
    conditions = {condition.type: condition for condition in status.conditions or () if condition.type}
    target = conditions.get("DisruptionTarget")
    disruption = target.reason if target is not None and target.status == "True" else ""
    node = f" {pod.spec.node_name}" if pod.spec.node_name else ""
    if disruption in LOSING or status.reason == "NodeLost":
        return TaskCondition(
            ended=True, reason=Reason.NODE_LOST, message=f"lost its node{node} ({disruption or status.reason})"
        )
    if not gone and status.phase not in ("Succeeded", "Failed"):
        return TaskCondition(waiting=_waiting(status, conditions) if status.phase == "Pending" else "")
    if disruption in PREEMPTING or status.reason in EVICTING:
        words = status.message or (target.message if target is not None else "") or ""
        return TaskCondition(
            ended=True, reason=Reason.PREEMPTED, message=f"was evicted ({disruption or status.reason}): {words}"
        )
    ends = [container.state.terminated for container in status.container_statuses or () if container.state]
    if any(end is not None and end.reason == "OOMKilled" for end in ends):
        return TaskCondition(
            ended=True, reason=Reason.OUT_OF_MEMORY, message="used more memory than it was given (OOMKilled)"
        )
    if gone and not by_us and status.phase not in ("Succeeded", "Failed"):
        return TaskCondition(ended=True, reason=Reason.PREEMPTED, message="was deleted by others")
    return TaskCondition(ended=True)


def _why_closed(node: Any, tolerations: Sequence[Toleration]) -> str:
    """Why a node takes no pods; empty if it does."""
    ready = next((condition for condition in node.status.conditions or () if condition.type == "Ready"), None)
    if ready is None or ready.status != "True":
        return f"Kubernetes says {ready.reason or 'not ready'}" if ready is not None else "Kubernetes says not ready"
    if node.spec.unschedulable:
        return "it is cordoned in Kubernetes"
    for taint in node.spec.taints or ():
        keeps_away = taint.effect in KEEPING_AWAY and taint.key != TOLERATED
        if keeps_away and not any(toleration.covers(taint) for toleration in tolerations):
            value = f"={taint.value}" if taint.value else ""
            return f"it has the taint {taint.key}{value}:{taint.effect}, which executor.tolerations does not name"
    return ""


def _waiting(status: Any, conditions: dict[str, Any]) -> str:
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status != "True":
        return f"Kubernetes says {scheduled.reason}: {scheduled.message}"
    for container in status.container_statuses or ():
        waits = container.state.waiting if container.state else None
        if waits is not None and waits.reason not in ("ContainerCreating", "PodInitializing"):
            return f"Kubernetes says {waits.reason}: {waits.message}"
    return "Kubernetes has not begun it yet"


def _resources(demand: Resources) -> dict[str, dict[str, str]]:
    """Memory and GPUs are limits, too. CPU is not: such a limit is a quota of time per 100 ms, and a task that has used
    it up stands still for the rest of them, idle cores beside it, and with it all others of its job. What protects the
    neighbours of a task are their own requests (kubernetes/kubernetes#51135)."""
    cpu, memory = f"{demand.cpu_milli}m", f"{demand.memory_mib}Mi"
    limits = {"memory": memory}
    if demand.gpu_milli:
        limits["nvidia.com/gpu"] = str(demand.gpu_milli // 1000)
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": limits}


def _name(text: str, longest: int = NAME_MAX) -> str:
    """A DNS label for any text: readable, and never the same for two texts."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if plain and plain == text and len(text) <= longest:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{plain[: longest - 9].strip('-')}-{digest}".lstrip("-")


def _refusal(order: TaskOrder, problem: client.ApiException | urllib3.exceptions.HTTPError) -> StartFailed:
    if isinstance(problem, urllib3.exceptions.HTTPError):
        return MachineTrouble(
            f"{order.task} could not be started: no answer from Kubernetes: {problem}",
            "see whether `kubectl get nodes` answers",
        )
    kind = MachineTrouble if _may_pass(problem) else StartFailed
    why = f"{order.task} could not be started: Kubernetes refused it: {_words(problem)}"
    return kind(why, "see `kubectl get events`, or ask who looks after the cluster")


def _may_pass(problem: client.ApiException) -> bool:
    """Whether the API server, and not what is asked of it, is the trouble."""
    return problem.status in (0, 429) or problem.status >= 500


def _words(problem: client.ApiException) -> str:
    found = re.search(r'"message"\s*:\s*"((?:[^"\\]|\\.)*)"', str(problem.body or ""))
    return found[1] if found else f"{problem.status} {problem.reason}"


def _client(kubeconfig: str, context: str) -> client.ApiClient:
    try:
        if not kubeconfig and not context:
            try:
                settings = client.Configuration()
                config.load_incluster_config(settings)
                return client.ApiClient(settings)
            except ConfigException:
                pass
        return config.new_client_from_config(config_file=kubeconfig or None, context=context or None)
    except (ConfigException, OSError) as problem:
        raise InvalidConfiguration(
            f"there is no way to a Kubernetes API server: {problem}",
            "run the agent in the cluster, or set KUBECONFIG to a file that kubectl can use",
        ) from problem
