"""Chooses a cluster for each job that comes: as the controller does, or by cheaper rules for very many clusters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fedsched.core import routing
from fedsched.core.cluster import ClusterRecord
from fedsched.core.ids import ClusterName, stream
from fedsched.core.job import JobPhase, JobSpec
from fedsched.core.resources import Resources
from fedsched.errors import InvalidInput
from fedsched.sim.cluster import SimulatedCluster
from fedsched.sim.ports import SimulatedJob


class Router:
    """One of three rules.

    * `best`: the controller's own filter and score over all clusters;
    * `two_choices`: the same over two that are drawn: nearly as good at a cost that does not grow with the federation
      (Mitzenmacher's power of two choices);
    * `origin`: where the job was submitted; those without an origin go by `two_choices`.
    """

    def __init__(
        self,
        clusters: Mapping[ClusterName, SimulatedCluster],
        rule: Literal["best", "origin", "two_choices"],
        seed: int,
    ) -> None:
        self._clusters = clusters
        self._names = sorted(clusters)
        self._rule = rule
        self._chance = stream(seed, "routing")

    def choose(self, job: SimulatedJob) -> ClusterName:
        """The cluster that the job goes to.

        Raises:
            InvalidInput: no cluster could ever hold it, or its origin is none of them.
        """
        if self._rule == "origin" and job.origin:
            if job.origin not in self._clusters:
                known = ", ".join(self._names[:8])
                raise InvalidInput(
                    f"job {job.spec.job_id} comes from cluster {job.origin}, which is not there",
                    f"the clusters are {known}",
                )
            return ClusterName(job.origin)
        if len(self._names) == 1:
            return self._names[0]
        names = self._names
        if self._rule != "best" and len(names) > 2:
            names = sorted(self._chance.sample(names, 2))
        return self._by_score(job.spec, names)

    def _by_score(self, spec: JobSpec, names: list[ClusterName]) -> ClusterName:
        found = routing.route(spec, [self._candidate(self._clusters[name]) for name in names])
        if found.choice is None and len(names) < len(self._names):
            return self._by_score(spec, self._names)
        if found.choice is None:
            raise InvalidInput(f"job {spec.job_id} can run nowhere: {found.message}", "change the job or the clusters")
        return found.choice

    def _candidate(self, cluster: SimulatedCluster) -> routing.CandidateCluster:
        scheduler = cluster.scheduler
        if scheduler is None:
            return routing.CandidateCluster(cluster.name, None, reachable=False)
        state = scheduler.state
        waiting = [job for job in state.jobs.values() if job.status.phase is JobPhase.DISPATCHED]
        promised = Resources()
        for job in waiting:
            promised = promised + job.spec.demand_of(job.spec.minimum)
        record = ClusterRecord(
            cluster.name,
            term=state.term,
            agent_id="",
            agent_version="",
            host="",
            pid=0,
            nodes=tuple(state.nodes.values()),
            usage=state.usage(),
            queued=len(waiting),
            running=len(state.jobs) - len(waiting),
            policy="",
            policy_version=0,
            slot=state.slot,
            started_s=0.0,
        )
        return routing.CandidateCluster(cluster.name, record, promised=promised, queued=len(waiting))
