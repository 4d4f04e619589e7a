"""A cluster under test whose tasks are pods."""

from __future__ import annotations

import sys
from pathlib import Path

from fedsched.executor.backend import TaskBackend
from fedsched.executor.kubernetes import KubernetesOptions, KubernetesTasks, Toleration
from fedsched.executor.orders import Programs
from fedsched.executor.records import Attempt
from tests.executor.cluster import Cluster, Recorded, told_to_run
from tests.executor.kube import Kube
from tests.waiting import eventually

NAMESPACE = "training"


class OnKubernetes:
    join_s = 60.0

    def __init__(self, kube: Kube) -> None:
        self.kube = kube
        self.tolerations: tuple[Toleration, ...] = ()

    def open(self, root: Path, programs: Programs) -> TaskBackend:
        options = KubernetesOptions(
            image="example.org/fedsched:1",
            namespace=NAMESPACE,
            mount=str(root),
            claim="fedsched",
            python=sys.executable,
            kubeconfig=str(self.kube.kubeconfig),
            tolerations=self.tolerations,
        )
        return KubernetesTasks(options, "east")

    def end(self, root: Path) -> None:
        self.kube.restore()
        self.tolerations = ()
        for name in self.kube.kubelets:
            self.kube.taint(name)
        for plural in ("services", "pods"):
            for item in self.kube.store.list(plural):
                self.kube.delete(plural, item, {"gracePeriodSeconds": 1})
        eventually(lambda: not self.kube.store.list("pods"), "no pod is left", 20.0)
        assert self.kube.problems == []

    def pids(self, attempt: Attempt) -> dict[str, int]:
        return told_to_run(attempt)

    def preempt(self, cluster: Recorded, task: str) -> None:
        self.kube.evict(NAMESPACE, cluster.record(task).handle)

    def kept(self, cluster: Cluster) -> set[str]:
        pods = self.kube.store.list("pods", NAMESPACE)
        return {pod["metadata"]["name"] for pod in pods if "deletionTimestamp" not in pod["metadata"]}

    def lose(self, cluster: Recorded, task: str) -> None:
        self.kube.lose(cluster.record(task).node)
