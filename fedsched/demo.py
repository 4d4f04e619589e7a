"""The whole story in a few minutes: a federation of two clusters, six real jobs, resizes and a federated round."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from fedsched import jobfile, local, tracing
from fedsched.adapters.rpc import JobsClient
from fedsched.addresses import free_address
from fedsched.config import ClusterConfig, FederationConfig, NodeConfig, PromotionConfig, RoundConfig, SlotConfig
from fedsched.core.ids import JobId
from fedsched.core.job import TERMINAL, JobPhase, JobSpec, Reason, Transition
from fedsched.core.rounds import RoundRecord
from fedsched.core.views import Job
from fedsched.errors import Conflict, StartFailed

NAME = "demo"
CLUSTERS = ("east", "west")
JOBS = (("mlp-a", "digits-mlp", 70), ("cnn-a", "digits-cnn", 18), ("mlp-b", "digits-mlp", 60),
        ("cnn-b", "digits-cnn", 15), ("mlp-c", "digits-mlp", 50), ("mlp-d", "digits-mlp", 40))  # fmt: skip
"""Name, example and epochs of each job: long enough to overlap, or nobody would have to shrink or could grow."""
PAUSE_S = 4.0
"""Between two submissions: jobs that come and go are what makes others shrink and grow."""
STORY_S = 150.0
"""Longest time from the first submission to the last job's end and a round of both clusters."""

Show = Callable[[tuple[Job, ...]], None]


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """What came of it."""

    jobs: tuple[Job, ...]
    resizes: int
    rounds: tuple[RoundRecord, ...]
    """Those that combined gradients of both clusters."""
    versions_before: tuple[tuple[str, int], ...]
    """Policy version of each cluster's agent when the jobs came."""
    versions_after: tuple[tuple[str, int], ...]
    lost: int
    doubled: int
    trace_file: str

    @property
    def problems(self) -> tuple[str, ...]:
        """What did not happen as promised; empty when all did."""
        ended = [f"job {job.spec.job_id} {job.status.phase.value}: {job.status.message}" for job in self.jobs
                 if job.status.phase is not JobPhase.SUCCEEDED]  # fmt: skip
        before, after = dict(self.versions_before), dict(self.versions_after)
        rules = (
            (len(self.jobs) == len(JOBS), f"only {len(self.jobs)} of {len(JOBS)} jobs were submitted in time"),
            (self.resizes > 0, "no job was resized while it ran"),
            (bool(self.rounds), "no round combined gradients of both clusters"),
            (
                all(after.get(cluster, 0) > before.get(cluster, 0) for cluster in CLUSTERS),
                "not every agent loaded a new policy version",
            ),
            (not self.lost, f"{self.lost} job(s) lost"),
            (not self.doubled, f"{self.doubled} job(s) ran twice at once"),
        )
        return (*ended, *(text for holds, text in rules if not holds))


def run(say: Callable[[str], None], show: Show) -> DemoSummary:
    """Start the federation, tell the story and stop everything again, whatever happens.

    Args:
        say: shows a line.
        show: shows the jobs as they are, several times a second.

    Raises:
        Conflict: a demo runs already.
        StartFailed: the federation did not come up.
    """
    state_dir = local.home() / NAME
    if local.runs(state_dir):
        raise Conflict("a demo runs already", "wait for its end, or stop it with `fedsched down --name demo`")
    shutil.rmtree(state_dir, ignore_errors=True)
    config = _federation()
    try:
        local.up(config, state_dir, say)
        tracing.setup("cli", file=str(state_dir / "trace.jsonl"))
        with JobsClient(config.controller) as client:
            return _story(client, say, show, state_dir / "trace.jsonl")
    finally:
        tracing.shutdown()
        local.down(state_dir, purge=False, say=say)


def _federation() -> FederationConfig:
    return FederationConfig(
        name=NAME,
        controller=free_address(),
        aggregator=free_address(),
        slot=SlotConfig(length_s=2.0, decision_s_max=1.0),
        rounds=RoundConfig(interval_s=10.0, quorum=2, samples_min=4),
        promotion=PromotionConfig(accept="at_once"),  # half a minute proves nothing about a version
        clusters=tuple(
            ClusterConfig(name=name, nodes=tuple(NodeConfig(name=f"{name}-{n}", cpus=3, memory_gb=6) for n in (1, 2)))
            for name in CLUSTERS
        ),
    )


def _story(client: JobsClient, say: Callable[[str], None], show: Show, trace_file: Path) -> DemoSummary:
    before = _versions(client)
    deadline_s = time.monotonic() + STORY_S
    waiting = list(JOBS)
    next_s = time.monotonic()
    ids: list[JobId] = []
    seen: set[tuple[str, int]] = set()
    round_told = 0
    while True:
        if waiting and time.monotonic() >= next_s:
            ids.append(_submit(client, *waiting.pop(0), say))
            next_s = time.monotonic() + PAUSE_S
        jobs = client.list()
        show(jobs)
        for step in client.events():
            if (step.job_id, step.seq) not in seen:
                seen.add((step.job_id, step.seq))
                _tell(step, say)
        for record in _combined(client):
            if record.number > round_told:
                round_told = record.number
                _tell_round(record, say)
        over = not waiting and all(job.status.phase in TERMINAL for job in jobs)
        if (over and _learned(client, before)) or time.monotonic() >= deadline_s:
            return _summary(client, jobs, before, trace_file)
        time.sleep(0.3)


def _submit(client: JobsClient, name: str, example: str, epochs: int, say: Callable[[str], None]) -> JobId:
    spec = _example(example, name, epochs)
    with tracing.span("submit", attributes={"name": name}) as span:
        answer = client.submit(replace(spec, traceparent=tracing.traceparent(span)))
        span.set_attribute("job", answer.job.spec.job_id)
    job_id = answer.job.spec.job_id
    say(f"job {job_id} ({name}) submitted; it goes to {answer.routing.choice}")
    return job_id


def _example(example: str, name: str, epochs: int) -> JobSpec:
    found = importlib.util.find_spec("fedsched.examples")
    if found is None or not found.submodule_search_locations:
        raise StartFailed("the package's examples are missing", "install fedsched again")
    folder = Path(next(iter(found.submodule_search_locations)))
    spec = jobfile.load(folder / f"{example}.yaml", name=name, user="demo")
    env = {**dict(spec.env), "EPOCHS": str(epochs)}
    return replace(spec, epochs=float(epochs), env=tuple(sorted(env.items())))


def _tell(step: Transition, say: Callable[[str], None]) -> None:
    """A line for what people want to see; the rest is in `fedsched events`."""
    if step.target in (JobPhase.RUNNING, JobPhase.RESIZING) or step.target in TERMINAL:
        held = f" with {step.allocation}" if step.allocation and step.target is JobPhase.RUNNING else ""
        why = f": {step.message}" if step.message else ""
        say(f"job {step.job_id} {step.target.value}{held}{why}")


def _tell_round(record: RoundRecord, say: Callable[[str], None]) -> None:
    gave = ", ".join(f"{part.cluster} ({part.samples} decisions)" for part in record.contributions)
    say(f"round {record.number}: gradients from {gave}; policy v{record.base_version} -> v{record.version}")


def _versions(client: JobsClient) -> tuple[tuple[str, int], ...]:
    return tuple((view.name, view.record.policy_version) for view in client.clusters() if view.record is not None)


def _combined(client: JobsClient) -> tuple[RoundRecord, ...]:
    """Rounds to which every cluster contributed and that made a new version."""
    return tuple(
        record
        for record in client.rounds()
        if record.version > record.base_version and {part.cluster for part in record.contributions} == set(CLUSTERS)
    )


def _learned(client: JobsClient, before: tuple[tuple[str, int], ...]) -> bool:
    old = dict(before)
    return bool(_combined(client)) and all(version > old[cluster] for cluster, version in _versions(client))


def _summary(
    client: JobsClient, jobs: tuple[Job, ...], before: tuple[tuple[str, int], ...], trace_file: Path
) -> DemoSummary:
    return DemoSummary(
        jobs=jobs,
        resizes=sum(job.status.resizes for job in jobs),
        rounds=_combined(client),
        versions_before=before,
        versions_after=_versions(client),
        lost=sum(job.status.phase not in TERMINAL or job.status.reason is Reason.LOST for job in jobs),
        doubled=_doubled(list(client.events())),
        trace_file=str(trace_file),
    )


def _doubled(steps: list[Transition]) -> int:
    """Jobs that were dispatched twice from the queue, or of which one attempt was started twice."""
    starts = [(step.job_id, step.attempt) for step in steps if step.target is JobPhase.STARTING]
    given = [
        (step.job_id, 0) for step in steps if step.source is JobPhase.QUEUED and step.target is JobPhase.DISPATCHED
    ]
    return len({job_id for job_id, number in (*starts, *given) if (*starts, *given).count((job_id, number)) > 1})
