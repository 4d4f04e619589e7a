"""Commands for people who train: submit, queue, info, explain, logs, cancel, events."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.connect import Server, connect, user
from fedsched.cli.finite import Finite
from fedsched.cli.output import Format, Output, clock, emit, emit_line, moment, note, span, table

if TYPE_CHECKING:
    from fedsched.adapters.rpc import JobsClient
    from fedsched.core.ids import JobId
    from fedsched.core.job import JobSpec, JobStatus, Transition
    from fedsched.core.routing import Routing
    from fedsched.core.views import ClusterView, Explanation, Job, Submission
    from fedsched.errors import FedschedError

LETTERS = {
    "Queued": "PD",
    "Held": "PD",
    "Dispatched": "D",
    "Starting": "ST",
    "Running": "R",
    "Resizing": "RS",
    "Preempting": "PR",
    "Unreachable": "U",
    "Completing": "CG",
    "Succeeded": "CD",
    "Failed": "F",
    "Cancelled": "CA",
}
COLUMNS = (
    "ID", "NAME", "QUEUE", "USER", "CLUSTER", "ST", "PS", "WORKERS", "PROG", "RUNTIME", "ATT", "ETA", "REASON",
)  # fmt: skip
SPARE = ("QUEUE", "USER", "ATT", "ETA", "RUNTIME")
"""Columns that narrow terminals do without, this one first."""
WAIT_CODES = {"Succeeded": 0, "Failed": 10, "Cancelled": 11}
LOST_CODE = 12
AGAIN_S = 0.5
"""Between two tries to reach it."""
RECONNECT_S = 60.0
"""How long whoever follows bears a controller that does not answer."""

Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id, as `fedsched queue` shows it.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(submit)
    app.command()(queue)
    app.command()(info)
    app.command()(explain)
    app.command()(logs)
    app.command()(cancel)
    app.command()(events)


def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Job file (YAML).", show_default=False)],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="Runs instead of the file's command.")
    ] = None,
    name: Annotated[str | None, typer.Option("-n", "--name", help="Name of the job.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until it is over; exit 0 succeeded, 10 failed, 11 cancelled, 12 lost.")
    ] = False,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", click_type=Finite(min=0.0), help="Seconds that --wait waits at most.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say where it would go.")] = False,
    idempotency_key: Annotated[
        str, typer.Option("--idempotency-key", help="Submitting again with the same key gives the same job.")
    ] = "",
    server: Server = "",
    output: Output = Format.TABLE,
) -> int:
    """Submit a job."""
    from fedsched import jobfile

    spec = jobfile.load(file, name=name, command=command or (), user=user())
    with connect(server) as client:
        submission = _submit_traced(client, spec, idempotency_key, dry_run)
        job = submission.job
        if dry_run:
            _show_dry_run(job.spec, submission.routing, output)
            return 0
        if output is Format.TABLE:
            _say_submitted(job, submission.routing, submission.created)
        if not wait:
            emit(submission, output, [f"job/{job.spec.job_id}"])
            return 0
        over = _attended(client, job.spec.job_id, timeout_s)
        if not emit(over, output, [f"job/{over.spec.job_id}"]):
            _say_ended(over)
        return _wait_code(over.status)


def queue(
    everything: Annotated[bool, typer.Option("-a", "--all", help="Also jobs that are over.")] = False,
    user: Annotated[str | None, typer.Option("-u", "--user", help="Only this user's jobs.")] = None,
    queue_name: Annotated[str | None, typer.Option("-q", "--queue", help="Only this queue's jobs.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Only the newest so many; 0 means all.")] = 0,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """List jobs: those that are not over, or all.

    PS and WORKERS are held/wanted; ETA is a guess from the speed so far. ST is the phase: PD queued, D waits in its
    cluster, ST starting, R running, RS resizing, PR preempting, U cluster unreachable, CG completing, CD completed, F
    failed, CA cancelled.
    """
    with connect(server) as client:
        found = client.list(live_only=not everything, limit=limit)
    jobs = [
        job
        for job in found
        if (user is None or job.spec.user == user) and (queue_name is None or job.spec.queue == queue_name)
    ]
    if not emit(jobs, output, [f"job/{job.spec.job_id}" for job in jobs]):
        table(COLUMNS, [row(job, time.time()) for job in jobs], SPARE)
        if not jobs and found:
            note("no job of that user or queue" + ("" if everything else " waits or runs"))
        elif not jobs:
            note(
                "no job yet" if everything else "no job waits or runs; `fedsched queue --all` lists those that are over"
            )


def info(server: Server = "", output: Output = Format.TABLE) -> None:
    """List clusters."""
    with connect(server) as client:
        clusters = client.clusters()
    if not emit(clusters, output, [f"cluster/{view.name}" for view in clusters]):
        table(
            ("CLUSTER", "STATE", "AGENT", "SEEN", "NODES", "CPU USED/TOTAL", "GPU USED/TOTAL", "QUEUED", "RUNNING",
             "POLICY"),
            [_cluster_row(view) for view in clusters],
            spare=("AGENT", "NODES", "GPU USED/TOTAL"),
        )  # fmt: skip


def explain(job_id: Id, server: Server = "", output: Output = Format.TABLE) -> None:
    """Say why a job is where it is."""
    from fedsched.core.ids import JobId

    with connect(server) as client:
        explanation = client.explain(JobId(job_id))
    if not emit(explanation, output, [f"job/{job_id}"]):
        _show_explanation(explanation)


def logs(
    job_id: Id,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job is over.")] = False,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Show what a job's tasks print."""
    from fedsched.core.ids import JobId

    with connect(server) as client:
        pieces = _printed(client, JobId(job_id), follow)
        if output in (Format.JSON, Format.YAML):
            for task, text in _log_lines(pieces):
                emit_line({"task": task, "text": text}, output)
            return
        printed = 0
        for piece in pieces:
            printed += sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        if not printed:
            sys.stderr.write(f"the tasks of job {job_id} have printed nothing; see `fedsched explain {job_id}`\n")


def _log_lines(pieces: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Task and text of each line; a piece may end within one."""
    begun = b""
    for piece in pieces:
        *lines, begun = (begun + piece).split(b"\n")
        for line in lines:
            task, _, text = line.decode(errors="replace").partition(" | ")
            yield task, text


def cancel(job_id: Id, server: Server = "", output: Output = Format.TABLE) -> None:
    """End a job."""
    from fedsched.core.ids import JobId
    from fedsched.core.job import TERMINAL, JobPhase

    with connect(server) as client:
        job = client.cancel(JobId(job_id))
    if emit(job, output, [f"job/{job_id}"]):
        return
    if job.status.phase is JobPhase.UNREACHABLE:
        print(f"job {job_id} will be cancelled when the agent of {job.status.cluster} is back")
    elif job.status.phase is JobPhase.CANCELLED:
        print(f"job {job_id} is {job.status.phase.value}")
    elif job.status.phase in TERMINAL:
        print(f"job {job_id} was over already: it is {job.status.phase.value}")
    else:
        print(f"job {job_id} is being cancelled by {job.status.cluster}")


def events(
    job_id: Annotated[str | None, typer.Option("--job", metavar="ID", help="Only this job's.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with those to come.")] = False,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Show how jobs moved from phase to phase.

    Each line tells when, which job, who moved it, between which phases, what it holds then and why.
    """
    from fedsched.core.ids import JobId

    with connect(server) as client:
        wanted = JobId(job_id) if job_id else None
        steps = _followed(client, wanted) if follow else client.events(wanted)
        if output in (Format.JSON, Format.YAML) and not follow:
            emit(list(steps), output)
            return
        for step in steps:
            if output is Format.TABLE:
                print(_event_line(step), flush=True)
            elif output is Format.NAME:
                print(f"job/{step.job_id}/{step.seq}", flush=True)
            else:
                emit_line(step, output)


def row(job: Job, now_s: float) -> tuple[object, ...]:
    """A job's line in the queue."""
    spec, status = job.spec, job.status
    held = status.allocation
    end_s = status.finished_s or now_s
    return (
        spec.job_id,
        spec.name,
        spec.queue,
        spec.user,
        status.cluster,
        LETTERS[status.phase.value],
        f"{held.ps}/{spec.ps}",
        f"{held.workers}/{spec.workers}",
        f"{min(100, int(100 * status.progress.epochs / spec.epochs))}%",
        clock(end_s - status.started_s) if status.started_s is not None else None,
        status.attempt,
        _eta(spec, status, now_s),
        status.reason.value,
    )


def _eta(spec: JobSpec, status: JobStatus, now_s: float) -> str | None:
    """Time to the declared end at the speed so far; a guess, so it is marked as one."""
    if status.phase.value not in ("Running", "Resizing"):
        return "?" if status.phase.value == "Unreachable" else None
    if not status.progress.epochs or status.started_s is None:
        return "?"
    left = max(0.0, spec.epochs - status.progress.epochs)
    return f"~{span(left * (now_s - status.started_s) / status.progress.epochs)}"


def _cluster_row(view: ClusterView) -> tuple[object, ...]:
    state = "Ready" if view.reachable else "Lost"
    record = view.record
    if record is None:
        return (view.name, state, None, span(view.seen_age_s), *(["?"] * 6))
    mark = "" if view.reachable else "*"
    used, there = record.usage, record.capacity
    version = f" v{record.policy_version}" if record.policy_version else ""
    are_open = sum(node.schedulable for node in record.nodes)
    return (
        view.name,
        state,
        record.agent_version,
        span(view.seen_age_s),
        str(len(record.nodes)) if are_open == len(record.nodes) else f"{are_open}/{len(record.nodes)}",
        f"{used.cpu_milli / 1000:g}/{there.cpu_milli / 1000:g}{mark}",
        f"{used.gpu_milli / 1000:g}/{there.gpu_milli / 1000:g}{mark}",
        f"{record.queued}{mark}",
        f"{record.running}{mark}",
        f"{record.policy}{version}{' (fallback)' if record.fallback else ''}",
    )


def _submit_traced(client: JobsClient, spec: JobSpec, key: str, dry_run: bool) -> Submission:
    """Submit under a span that becomes the root of the job's trace."""
    from msgspec.structs import replace

    from fedsched import tracing
    from fedsched.local import trace_target

    if dry_run:
        return client.submit(spec, key, dry_run=True)
    endpoint, file = trace_target()
    tracing.setup("cli", endpoint=endpoint, file=file)
    try:
        with tracing.span("submit", attributes={"name": spec.name}) as span_:
            submission = client.submit(replace(spec, traceparent=tracing.traceparent(span_)), key)
            span_.set_attribute("job", submission.job.spec.job_id)
            return submission
    finally:
        tracing.shutdown()


def _say_submitted(job: Job, routing: Routing, created: bool) -> None:
    job_id = job.spec.job_id
    if not created:
        print(f"job {job_id} ({job.spec.name}) was submitted before; it is {job.status.phase.value}")
    elif routing.choice is not None:
        print(f"job {job_id} ({job.spec.name}) submitted; it goes to {routing.choice}, which {routing.message}")
    else:
        print(f"job {job_id} ({job.spec.name}) submitted; it waits: {routing.reason.value}: {routing.message}")
    print(f"  follow it: fedsched logs {job_id} -f     ask why it waits: fedsched explain {job_id}")


def _say_ended(job: Job) -> None:
    status = job.status
    length_s = (status.finished_s or job.spec.submitted_s) - job.spec.submitted_s
    told = "" if status.phase.value == "Succeeded" else f": {status.reason.value}"
    told += f": {status.message}" if told and status.message else ""
    print(f"job {job.spec.job_id} ({job.spec.name}) {status.phase.value} after {span(length_s)}{told}")
    if status.phase.value == "Failed":
        print(f"  what to do: fedsched explain {job.spec.job_id}     what it printed: fedsched logs {job.spec.job_id}")


def _show_dry_run(spec: JobSpec, routing: Routing, output: Format) -> None:
    from fedsched import jobfile

    if output is Format.YAML:
        emit(jobfile.long_form(spec), output)
    elif not emit({"job": jobfile.long_form(spec), "routing": routing}, output, [str(routing.choice or "-")]):
        if routing.choice is not None:
            print(f"job {spec.name} would go to {routing.choice}, which {routing.message}")
        else:
            print(f"job {spec.name} would wait: {routing.reason.value}: {routing.message}")
        _verdicts(routing)


def _verdicts(routing: Routing) -> None:
    table(
        ("CLUSTER", "VERDICT", "FITS NOW", "ASKED", "WAITING", "FREE", "DETAIL"),
        [
            (
                verdict.cluster,
                verdict.reason.value or "Feasible",
                "-" if verdict.reason.value else "yes" if verdict.fits_now else "no",
                "-" if verdict.reason.value else f"{100 * verdict.share:.0f}%",
                verdict.queued,
                "-" if verdict.reason.value else verdict.free,
                verdict.message,
            )
            for verdict in routing.verdicts
        ],
        spare=("ASKED", "WAITING"),
    )


def _show_explanation(found: Explanation) -> None:
    spec, status = found.job.spec, found.job.status
    place = f" on {status.cluster}" if status.cluster else ""
    print(f"job {spec.job_id} ({spec.name}) is {status.phase.value}{place}")
    because = found.reason.value or "-"
    print(f"reason     {because}{': ' if found.message else ''}{found.message}")
    for number, line in enumerate(found.evidence):
        print(f"{'evidence' if number == 0 else '':<10} {line}")
    if found.ahead:
        print(f"ahead      {found.ahead_count} job(s)")
        for job in found.ahead:
            print(f"           {job.job_id} {job.name} {job.user or '-'} {job.phase.value}, minimum {job.minimum}")
    # Where else a job could go is of interest until it has a place.
    if found.routing.verdicts and status.phase.value in ("Queued", "Dispatched"):
        print()
        _verdicts(found.routing)
        print()
    print(f"next step  {found.next_step}")
    if found.trace_id:
        print(f"trace      {found.trace_id}  (fedsched trace show {spec.job_id})")


def _event_line(step: Transition) -> str:
    source = f"{step.source.value} -> " if step.source else ""
    # The part after the slash tells controllers apart; programs find it in the JSON.
    actor = step.actor if step.actor.startswith("agent/") else step.actor.partition("/")[0]
    held = f" [{step.allocation}]" if step.allocation else ""
    why = f" {step.reason.value}" if step.reason.value else ""
    message = f": {step.message}" if step.message else ""
    return f"{moment(step.time_s)}  job {step.job_id:<5} {actor:<12} {source}{step.target.value}{held}{why}{message}"


def _attended(client: JobsClient, job_id: JobId, timeout_s: float | None) -> Job:
    """As `_wait`; whoever interrupts it is told that the job is not ended by that."""
    try:
        return _wait(client, job_id, timeout_s)
    except KeyboardInterrupt:
        note(f"job {job_id} goes on\n  follow it: fedsched logs {job_id} -f     end it: fedsched cancel {job_id}")
        raise


def _wait(client: JobsClient, job_id: JobId, timeout_s: float | None) -> Job:
    """Follow the job to its end and say on stderr how it moves; bears a controller that is away for a while."""
    from fedsched.errors import TimedOut, Unreachable

    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    said, patience = "", _Patience()
    while True:
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimedOut(
                f"job {job_id} is not over after {timeout_s:g} s", f"it goes on; see `fedsched explain {job_id}`"
            )
        try:
            for job in client.watch(job_id, timeout_s=left_s):
                patience.is_answered()
                said = _say_moved(job, said)
                if job.status.phase.value in WAIT_CODES:
                    return job
        except TimedOut:
            continue
        except Unreachable as problem:
            patience.bear(problem)


def _printed(client: JobsClient, job_id: JobId, follow: bool) -> Iterator[bytes]:
    """What the job prints, each line once; who follows bears a controller or an agent that is away for a while."""
    from fedsched.errors import Unreachable

    client.get(job_id)  # a wrong address or job is no matter of patience
    read: dict[str, int] = {}
    patience, said = _Patience(), ""
    while True:
        try:
            for piece in client.logs(job_id, follow, read):
                patience.is_answered()
                said = ""
                if piece.file:
                    read[piece.file] = piece.offset
                yield piece.data
            return
        except Unreachable as problem:
            if not follow:
                raise
            if not said:
                said = problem.message
                sys.stderr.write(f"{said}; trying again for {RECONNECT_S:.0f} s\n")
            patience.bear(problem)


def _followed(client: JobsClient, job_id: JobId | None) -> Iterator[Transition]:
    """Each transition once; bears a controller that is away for a while, and then tells all from the start."""
    from fedsched.errors import Unreachable

    told: dict[JobId, int] = {}
    patience, is_over = _Patience(), False
    while not is_over:
        try:
            for step in client.events(job_id, follow=True):
                patience.is_answered()
                if step.seq > told.get(step.job_id, 0):
                    told[step.job_id] = step.seq
                    is_over = job_id is not None and step.target.value in WAIT_CODES
                    yield step
            if not is_over:
                time.sleep(AGAIN_S)  # it was told to end, and said so
        except Unreachable as problem:
            if not told:
                raise  # it was never reached: a wrong address, say
            patience.bear(problem)


class _Patience:
    """With a controller that was reached and is away now: for a while."""

    def __init__(self) -> None:
        self._lost_s: float | None = None

    def is_answered(self) -> None:
        """It is back."""
        self._lost_s = None

    def bear(self, problem: FedschedError) -> None:
        """Wait a little, or raise the problem when that was long enough."""
        self._lost_s = self._lost_s if self._lost_s is not None else time.monotonic()
        if time.monotonic() - self._lost_s > RECONNECT_S:
            raise problem
        time.sleep(AGAIN_S)


def _say_moved(job: Job, said: str) -> str:
    status = job.status
    place = f" on {status.cluster}" if status.cluster else ""
    held = f" with {status.allocation}" if status.allocation else ""
    line = f"job {job.spec.job_id} {status.phase.value}{place}{held}"
    if line != said:
        sys.stderr.write(f"{line}\n")
    return line


def _wait_code(status: JobStatus) -> int:
    return LOST_CODE if status.reason.value == "Lost" else WAIT_CODES[status.phase.value]
