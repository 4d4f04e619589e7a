"""The Jobs service: each call reads the cache or orders something of the admission."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from fedsched import tracing
from fedsched.adapters.rpc import from_message, parent_of, to_message
from fedsched.controller.admission import Admission, no_such_job
from fedsched.controller.cache import Cache
from fedsched.controller.history import History
from fedsched.controller.lines import Lines
from fedsched.controller.promoting import Promoting
from fedsched.core.explain import arrival, explain
from fedsched.core.ids import ClusterName, JobId
from fedsched.core.job import TERMINAL, JobPhase, JobSpec
from fedsched.core.record import Record
from fedsched.core.versions import VersionName
from fedsched.core.views import Job
from fedsched.errors import InvalidInput, NotFound, Unreachable
from fedsched.pb import jobs_pb2 as pb
from fedsched.pb import jobs_pb2_grpc as pb_grpc
from fedsched.runtime import codec, keys
from fedsched.runtime.ports import Store

WAIT_S = 0.5
"""How often a stream looks whether its reader is still there."""
LOAD_S = 5.0
"""How long a call waits for the first contents of the store."""


class JobsService(pb_grpc.JobsServicer):
    """What users may ask. While etcd is away every call says so, and works again by itself when it is back."""

    def __init__(
        self, store: Store, cache: Cache, history: History, admission: Admission, lines: Lines, promoting: Promoting
    ) -> None:
        self._store = store
        self._cache = cache
        self._history = history
        self._admission = admission
        self._lines = lines
        self._promoting = promoting
        self._closing = threading.Event()

    def close(self) -> None:
        """End the streams."""
        self._closing.set()

    def Submit(self, request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.SubmitReply:
        """Admit a job."""
        self._ready()
        spec = from_message(JobSpec, request.spec)
        with tracing.span("submit", parent=parent_of(context) or spec.traceparent, attributes={"name": spec.name}):
            submission = self._admission.submit(spec, request.idempotency_key, request.dry_run)
        return to_message(submission, pb.SubmitReply)

    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> pb.Job:
        """The job as it is."""
        self._ready()
        return to_message(self._job(request.job_id), pb.Job)

    def List(self, request: pb.ListRequest, context: grpc.ServicerContext) -> pb.ListReply:
        """Jobs in the order of submission, the newest so many of them.

        Raises:
            InvalidInput: a negative number of them is asked for.
        """
        self._ready()
        _check(request.limit)
        jobs = {job.spec.job_id: job for job in ([] if request.live_only else self._history.jobs())}
        jobs |= {job.spec.job_id: job for job in self._cache.jobs()}
        wanted = [job for job in jobs.values() if not request.live_only or job.status.phase not in TERMINAL]
        ordered = sorted(wanted, key=lambda job: arrival(job.spec))
        return pb.ListReply(jobs=[to_message(job, pb.Job) for job in ordered[-request.limit :]])

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Job]:
        """Jobs, and again when they change."""
        self._ready()
        watch = self._watch_one(request.job_id, context) if request.job_id else self._watch_all(context)
        for job in watch:
            yield to_message(job, pb.Job)

    def _watch_all(self, context: grpc.ServicerContext) -> Iterator[Job]:
        seen = 0
        while self._serving(context):
            newest = self._cache.change
            yield from self._cache.jobs(after=seen)
            seen = newest
            self._cache.wait(seen, WAIT_S)

    def _watch_one(self, job_id: str, context: grpc.ServicerContext) -> Iterator[Job]:
        last: Job | None = None
        while self._serving(context):
            newest = self._cache.change
            job = self._job(job_id)
            if job != last:
                yield job
            if job.status.phase in TERMINAL:
                return
            last = job
            self._cache.wait(newest, WAIT_S)

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.Job:
        """Order the job's end."""
        self._ready()
        job_id = JobId(request.job_id)
        with tracing.span("cancel", parent=parent_of(context), attributes={"job": job_id}):
            self._admission.cancel(job_id)
        job = self._admission.read(job_id)
        if job is not None and job.status.phase is JobPhase.QUEUED:
            self._cache.wait_for_job(job_id, job.status.seq + 1, LOAD_S)
        return to_message(self._job(job_id), pb.Job)

    def Explain(self, request: pb.ExplainRequest, context: grpc.ServicerContext) -> pb.Explanation:
        """Why the job is where it is."""
        self._ready()
        job = self._job(request.job_id)
        return to_message(explain(job, self._cache.jobs(), self._cache.candidates(), time.time()), pb.Explanation)

    def Events(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> Iterator[pb.Transition]:
        """Transitions, oldest first."""
        self._ready()
        wanted = JobId(request.job_id) if request.job_id else None
        if wanted is not None:
            self._job(wanted)
        seen = self._cache.change
        live = self._cache.transitions(wanted)
        there = {(step.job_id, step.seq) for step in live}
        past = [step for step in self._history.transitions(wanted) if (step.job_id, step.seq) not in there]
        for step in sorted((*past, *live), key=lambda step: (step.time_s, step.job_id, step.seq)):
            yield to_message(step, pb.Transition)
        while request.follow and self._serving(context):
            newest = self._cache.wait(seen, WAIT_S)
            # Looked at before the steps are read: the last step comes with the status that ends the job.
            over = wanted is not None and self._job(wanted).status.phase in TERMINAL
            for step in self._cache.transitions(wanted, after=seen):
                yield to_message(step, pb.Transition)
            if over:
                return
            seen = newest

    def Logs(self, request: pb.LogsRequest, context: grpc.ServicerContext) -> Iterator[pb.LogChunk]:
        """What the job's tasks printed."""
        self._ready()
        job = self._job(request.job_id)
        while request.follow and job.status.attempt == 0 and job.status.phase not in TERMINAL:
            if not self._serving(context):
                raise _closes()
            self._cache.wait(self._cache.change, WAIT_S)
            job = self._job(request.job_id)
        if job.status.cluster is None or job.status.attempt == 0:
            raise NotFound(
                f"job {job.spec.job_id} has not started yet ({job.status.phase.value}), so it has no log",
                f"`fedsched explain {job.spec.job_id}` says why it waits; `logs -f` waits for it",
            )
        for part in self._lines.logs(
            job.status.cluster, job.spec.job_id, request.follow, request.read, lambda: self._serving(context)
        ):
            yield pb.LogChunk(data=part.data, partial=part.partial, file=part.file, offset=part.offset)
        if self._closing.is_set():
            raise _closes()

    def Clusters(self, request: pb.ClustersRequest, context: grpc.ServicerContext) -> pb.ClustersReply:
        """All known clusters."""
        self._ready()
        return pb.ClustersReply(clusters=[to_message(view, pb.Cluster) for view in self._cache.clusters()])

    def Rounds(self, request: pb.RoundsRequest, context: grpc.ServicerContext) -> pb.RoundsReply:
        """The aggregator's rounds, oldest first, the newest so many of them.

        Raises:
            InvalidInput: a negative number of them is asked for.
        """
        self._ready()
        _check(request.limit)
        return pb.RoundsReply(rounds=[_struct(record) for record in self._cache.rounds()[-request.limit :]])

    def Policies(self, request: pb.PoliciesRequest, context: grpc.ServicerContext) -> pb.PoliciesReply:
        """Stored policy versions."""
        self._ready()
        return pb.PoliciesReply(
            policies=[
                pb.PolicyVersion(
                    name=item.name,
                    version=item.version,
                    active=item.active,
                    record=_struct(item.record),
                )
                for item in self._cache.policies()
                if not request.name or item.name == request.name
            ]
        )

    def Promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromotionReply:
        """Order that a version decide."""
        self._ready()
        cluster, name = ClusterName(request.cluster), from_message(VersionName, request.version)
        promotion = self._promoting.promote(cluster, name, request.by, request.why)
        return pb.PromotionReply(promotion=_struct(promotion))

    def Rollback(self, request: pb.RollbackRequest, context: grpc.ServicerContext) -> pb.PromotionReply:
        """Order that what decided before decide again."""
        self._ready()
        promotion = self._promoting.rollback(ClusterName(request.cluster), request.by, request.why)
        return pb.PromotionReply(promotion=_struct(promotion))

    def Promotions(self, request: pb.PromotionsRequest, context: grpc.ServicerContext) -> pb.PromotionsReply:
        """A cluster's orders."""
        self._ready()
        cluster = ClusterName(request.cluster)
        self._promoting.check(cluster)
        history = self._promoting.history(cluster)
        return pb.PromotionsReply(promotions=[_struct(promotion) for promotion in history])

    def Shadow(self, request: pb.ShadowRequest, context: grpc.ServicerContext) -> pb.ShadowReply:
        """Name a candidate, or end the comparison."""
        self._ready()
        name = from_message(VersionName, request.version) if request.HasField("version") else None
        candidate = self._promoting.shadow(ClusterName(request.cluster), name, request.by, request.promote)
        return pb.ShadowReply(candidate=_struct(candidate) if candidate is not None else None)

    def Comparisons(self, request: pb.ComparisonsRequest, context: grpc.ServicerContext) -> pb.ComparisonsReply:
        """How candidates stand."""
        self._ready()
        cluster = ClusterName(request.cluster) if request.cluster else None
        if cluster is not None:
            self._promoting.check(cluster)
        found = self._promoting.comparisons(cluster)
        return pb.ComparisonsReply(comparisons=[_struct(comparison) for comparison in found])

    def _ready(self) -> None:
        """Make sure that what the cache says is not old: etcd answers, and its contents have come.

        Raises:
            Unreachable: etcd is away.
        """
        self._store.get(keys.JOB_COUNTER)
        if not self._cache.loaded:
            self._cache.wait(0, LOAD_S)
            if not self._cache.loaded:
                raise Unreachable("the controller has not read etcd yet", "try again in a moment")

    def _job(self, job_id: str) -> Job:
        job = self._admission.read(JobId(job_id))
        if job is None:
            raise no_such_job(JobId(job_id))
        return job

    def _serving(self, context: grpc.ServicerContext) -> bool:
        return context.is_active() and not self._closing.is_set()


def _check(limit: int) -> None:
    if limit < 0:
        raise InvalidInput(f"limit is {limit}; a number of the newest was expected, or 0 for all", "leave it out")


def _closes() -> Unreachable:
    """Ends what is not at its end: whoever follows asks again."""
    return Unreachable("the controller ends", "try again")


def _struct(record: Record) -> Struct:
    return ParseDict(codec.to_plain(record), Struct())
