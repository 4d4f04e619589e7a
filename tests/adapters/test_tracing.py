"""Spans: what is written, that it crosses processes, and that a dead collector costs nothing."""

from __future__ import annotations

import json
import logging
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from fedsched import tracing
from tests.waiting import soon

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture(autouse=True)
def _no_tracing_left() -> Iterator[None]:
    yield
    tracing.shutdown()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(script: str, *arguments: str) -> str:
    """Run a script in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_span_is_written_with_all_that_was_said_of_it(tmp_path: Path) -> None:
    """Who looks for a slow job has nothing but this line."""
    file = tmp_path / "trace.jsonl"
    tracing.setup("agent-a", file=str(file))
    with tracing.span("decide", attributes={"job": "job-1", "slot": 3, "late": False}) as outer:
        outer.add_event("asked", {"policy": "dl2"})
        with tracing.span("place", links=[PARENT, "not a traceparent"]):
            pass
    tracing.shutdown()

    place, decide = lines(file)
    assert (decide["name"], decide["service"], decide["parent_id"]) == ("decide", "agent-a", "")
    assert decide["attributes"] == {"job": "job-1", "slot": 3, "late": False}
    assert decide["events"][0]["name"] == "asked"
    assert decide["start_s"] <= place["start_s"] <= place["end_s"] <= decide["end_s"]
    assert abs(decide["start_s"] - time.time()) < 60
    assert (place["parent_id"], place["trace_id"]) == (decide["span_id"], decide["trace_id"])
    assert place["links"] == [PARENT]


def test_an_exception_is_recorded_and_goes_on(tmp_path: Path) -> None:
    """Tracing must neither hide a failure nor miss it."""
    file = tmp_path / "trace.jsonl"
    tracing.setup("agent", file=str(file))
    with pytest.raises(ValueError, match="no room"), tracing.span("place"):
        raise ValueError("no room")
    tracing.shutdown()

    (place,) = lines(file)
    assert place["status"] == "error"
    assert "no room" in place["attributes"]["otel.status_description"]


def test_a_trace_crosses_to_another_process_by_its_traceparent(tmp_path: Path) -> None:
    """One job is one trace, from the command line to the worker."""
    file = tmp_path / "trace.jsonl"
    tracing.setup("controller", file=str(file))
    with tracing.span("submit"):
        carried = tracing.traceparent()
    tracing.shutdown()

    run(
        "import sys; from fedsched import tracing; tracing.setup('worker', file=sys.argv[1])\n"
        "with tracing.span('step', parent=sys.argv[2]): pass",
        str(file),
        carried,
    )

    submit, step = lines(file)
    assert (step["trace_id"], step["parent_id"]) == (submit["trace_id"], submit["span_id"])
    assert step["service"] == "worker"


def test_a_span_can_be_started_in_the_past_and_ended_elsewhere(tmp_path: Path) -> None:
    """A job's span begins when it was submitted, which its agent learns later."""
    file = tmp_path / "trace.jsonl"
    tracing.setup("agent", file=str(file))
    span = tracing.start("job", parent=PARENT, start_s=1_000_000.5)
    assert tracing.traceparent() == ""
    assert tracing.traceparent(span).split("-")[1] == "a" * 32
    span.end()
    tracing.shutdown()

    (job,) = lines(file)
    assert (job["start_s"], job["parent_id"]) == (1_000_000.5, "b" * 16)


def test_a_bad_traceparent_begins_a_new_trace(tmp_path: Path) -> None:
    """It comes from the network; nothing that is in it may stop a job."""
    file = tmp_path / "trace.jsonl"
    tracing.setup("agent", file=str(file))
    with tracing.span("outer"), tracing.span("job", parent="00-junk"):
        pass
    tracing.shutdown()

    job, outer = lines(file)
    assert job["parent_id"] == ""
    assert job["trace_id"] != outer["trace_id"]


def test_without_setup_spans_are_nothing_but_the_context_goes_through() -> None:
    """A process that does not trace must not cut the trace of those that do."""
    with tracing.span("quiet") as span:
        assert not span.is_recording()
        assert tracing.traceparent() == ""
    with tracing.span("passing", parent=PARENT) as span:
        span.set_attribute("job", "job-1")
        assert tracing.traceparent() == PARENT
    assert tracing.traceparent(tracing.start("passing", parent=PARENT)) == PARENT


def test_without_setup_the_sdk_is_never_loaded() -> None:
    """`fedsched --help` must answer at once."""
    told = run(
        "import sys; from fedsched import tracing\n"
        "print('opentelemetry' in sys.modules)\n"
        "with tracing.span('x'): pass\n"
        "tracing.setup('cli'); tracing.shutdown()\n"
        "print('opentelemetry.sdk.trace' in sys.modules, 'grpc' in sys.modules)"
    )
    assert told.split() == ["False"] * 3


def test_many_processes_share_one_file(tmp_path: Path) -> None:
    """All of a federation on one machine writes there; a mixed line is two lost spans."""
    file = tmp_path / "trace.jsonl"
    script = (
        "import sys; from fedsched import tracing; tracing.setup(sys.argv[2], file=sys.argv[1])\n"
        "for n in range(1000):\n  with tracing.span('s', attributes={'n': n, 'text': 'x' * 200}): pass"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(file), f"p{n}"]) for n in range(3)]
    for process in processes:
        assert process.wait(60) == 0

    written = lines(file)
    assert sorted((line["service"], line["attributes"]["n"]) for line in written) == [
        (f"p{process}", number) for process in range(3) for number in range(1000)
    ]


def test_a_forked_child_traces_for_itself(tmp_path: Path) -> None:
    """A task is forked from a process that traces; the parent's spans must not come twice."""
    run(
        "import os, sys; from fedsched import tracing; tracing.setup('parent', file=sys.argv[1])\n"
        "tracing.start('before').end()\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "  tracing.start('unseen').end()\n"
        "  tracing.setup('child', file=sys.argv[1])\n"
        "  tracing.start('in child').end(); tracing.shutdown(); os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "tracing.start('after').end()",
        str(tmp_path / "trace.jsonl"),
    )

    told = sorted((line["service"], line["name"]) for line in lines(tmp_path / "trace.jsonl"))
    assert told == [("child", "in child"), ("parent", "after"), ("parent", "before")]


def test_ids_do_not_come_from_the_random_that_training_seeds(tmp_path: Path) -> None:
    """Workers with one seed would give their spans the same ids, and tracing would change what they train."""
    file = tmp_path / "trace.jsonl"
    tracing.setup("worker", file=str(file))
    drawn = []
    for _ in range(2):
        random.seed(7)
        with tracing.span("step"):
            drawn.append(random.random())
    tracing.shutdown()

    assert drawn[0] == drawn[1] == random.Random(7).random()
    assert len({line["span_id"] for line in lines(file)}) == 2


@pytest.fixture(params=["nobody listens", "never answers"])
def dead_endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            listener.listen(8)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.live
def test_a_dead_collector_slows_nothing_and_is_told_once(dead_endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """opentelemetry-python#2024: a collector that was down stalled its clients for two minutes."""
    caplog.set_level(logging.WARNING)
    tracing.setup("agent", endpoint=dead_endpoint)

    spans = tracing.QUEUE_MAX + 1000
    start_s = time.monotonic()
    for _ in range(spans):
        with tracing.span("work"):
            pass
    worked_s = time.monotonic() - start_s
    with soon("it does not wait for the collector"):
        tracing.shutdown()

    # Waiting for the collector once a batch takes this long; a busy machine alone does not.
    assert worked_s < spans / 512 * tracing.EXPORT_TIMEOUT_S
    assert len([record for record in caplog.records if dead_endpoint in record.getMessage()]) == 1
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


@pytest.mark.live
def test_an_interpreter_with_a_dead_collector_exits_soon(dead_endpoint: str) -> None:
    """opentelemetry-python#3309: a program that has ended must be gone."""
    with soon("it does not wait for the collector"):
        run(
            "import sys; from fedsched import tracing; tracing.setup('cli', endpoint=sys.argv[1])\n"
            "with tracing.span('submit'): pass",
            dead_endpoint,
        )


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return otlp.ExportTraceServiceResponse()


@pytest.mark.live
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_spans_reach_a_collector(scheme: str) -> None:
    """An operator who sets an endpoint sees the federation in the tools that are there already."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracing.setup("agent", endpoint=f"{scheme}localhost:{port}")
        with tracing.span("decide", parent=PARENT):
            pass
        tracing.shutdown()
    finally:
        server.stop(None).wait(10)

    (request,) = collector.requests
    (resource,) = request.resource_spans
    assert [item.value.string_value for item in resource.resource.attributes if item.key == "service.name"] == ["agent"]
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("decide", "a" * 32, "b" * 16)


def test_a_file_that_cannot_be_written_is_told_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk must not fail a job."""
    caplog.set_level(logging.WARNING)
    tracing.setup("agent", file=str(tmp_path / "missing" / "trace.jsonl"))
    for _ in range(1500):
        with tracing.span("work"):
            pass
    tracing.shutdown()

    (told,) = [record.getMessage() for record in caplog.records]
    assert "cannot be written" in told
