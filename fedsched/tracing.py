"""Spans for every process: one small interface over OpenTelemetry that costs almost nothing until it is set up.

The SDK and the exporters are imported by `setup`, so that a process without tracing never loads them. The provider is
kept here and not installed as OpenTelemetry's global one: the global one can be set once per process only, and it
survives a fork half alive, while a task process is forked and then sets up tracing of its own.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

Value = str | int | float | bool

QUEUE_MAX = 8192
"""Finished spans that wait for export; more are dropped, so that a dead collector costs no more memory than this."""
EXPORT_EVERY_S = 0.5
EXPORT_TIMEOUT_S = 1.5
"""Longest single delivery to a collector. With `FLUSH_S` it bounds `shutdown`: one delivery may be on its way when
the flush ends, and 0.8 + 1.5 leaves a busy machine some of the promised 3 seconds."""
FLUSH_S = 0.8
"""How long after `shutdown` was called a further delivery may begin."""

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_provider: TracerProvider | None = None
_tracer: Tracer | None = None
_exporter: Any = None


def setup(service: str, *, endpoint: str = "", file: str = "") -> None:
    """Send this process's spans to an OTLP gRPC `endpoint` if set, else append them to `file`, else nowhere.

    May be called again, for another target, and must be called again in a forked process that wants spans of its own.
    """
    global _provider, _tracer, _exporter
    with _lock:
        shutdown()
        if not endpoint and not file:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        _exporter = _bounded(_otlp(endpoint) if endpoint else _json_lines(file, service))
        _provider = TracerProvider(
            resource=Resource({"service.name": service}), id_generator=_ids(), shutdown_on_exit=False
        )
        _provider.add_span_processor(
            BatchSpanProcessor(
                _exporter,
                max_queue_size=QUEUE_MAX,
                schedule_delay_millis=EXPORT_EVERY_S * 1e3,
                max_export_batch_size=512,
            )
        )
        _tracer = _provider.get_tracer("fedsched")


def shutdown() -> None:
    """Deliver what waits and stop; takes at most 3 seconds, also when the collector is dead. Safe to call twice."""
    global _provider, _tracer, _exporter
    with _lock:
        provider, exporter = _provider, _exporter
        _provider = _tracer = _exporter = None
    if provider is not None:
        exporter.close_in(FLUSH_S)
        provider.shutdown()


@contextmanager
def span(
    name: str, *, parent: str = "", links: Sequence[str] = (), attributes: Mapping[str, Value] | None = None
) -> Iterator[Span]:
    """A span around the block, current inside it; an exception is recorded on it and raised on.

    Args:
        parent: a W3C traceparent; empty means the current span.
        links: traceparents of spans that this one follows from without being their child.
    """
    from opentelemetry import trace

    if _tracer is None and not parent:
        yield trace.INVALID_SPAN
        return
    with trace.use_span(
        start(name, parent=parent, links=links, attributes=attributes), end_on_exit=True, record_exception=True
    ) as current:
        yield current


def start(
    name: str,
    *,
    parent: str = "",
    links: Sequence[str] = (),
    attributes: Mapping[str, Value] | None = None,
    start_s: float | None = None,
) -> Span:
    """A span that the caller ends with `.end()`; it does not become the current one.

    Without `setup` it records nothing but still hands `parent` on, so that a trace goes through a process that does
    not take part in it.

    Args:
        start_s: when it began, in seconds since 1970; now if None.
    """
    from opentelemetry import trace

    context = _context(parent) if parent else None
    if _tracer is None:
        return trace.NonRecordingSpan(trace.get_current_span(context).get_span_context())
    return _tracer.start_span(
        name,
        context=context,
        links=[trace.Link(found) for link in links if (found := _remote(link)).is_valid],
        attributes=dict(attributes or {}),
        start_time=None if start_s is None else int(start_s * 1e9),
    )


def link(span: Span, traceparent: str) -> None:
    """Link a span that has begun to another one; what is no valid traceparent is left out."""
    context = _remote(traceparent)
    if context.is_valid:
        span.add_link(context)


def traceparent(span: Span | None = None) -> str:
    """W3C traceparent of `span`, or of the current span; empty if there is none."""
    from opentelemetry import trace

    context = (span if span is not None else trace.get_current_span()).get_span_context()
    return _format(context) if context.is_valid else ""


def _format(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _context(parent: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())


def _remote(link: str) -> Any:
    from opentelemetry import trace

    return trace.get_current_span(_context(link)).get_span_context()


def _ids() -> Any:
    """Ids from the operating system: the SDK draws them from `random`, which training scripts seed alike."""
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class SystemIds(IdGenerator):
        def generate_span_id(self) -> int:
            return int.from_bytes(os.urandom(8), "big") or 1

        def generate_trace_id(self) -> int:
            return int.from_bytes(os.urandom(16), "big") or 1

    return SystemIds()


def _otlp(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    # Without a scheme the exporter would take the host's name for one, and insist on TLS.
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    _speak_once(endpoint)
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)


def _speak_once(endpoint: str) -> None:
    """Turn the exporter's flood of messages about a dead collector into one warning."""
    told = threading.Event()

    class Once(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if record.levelno >= logging.WARNING and not told.is_set():
                told.set()
                _log.warning("spans do not reach %s and may be lost: %s", endpoint, record.getMessage())
            return False

    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
        logger = logging.getLogger(name)
        for old in [known for known in logger.filters if type(known).__name__ == Once.__name__]:
            logger.removeFilter(old)
        # Before the SDK's own filter, which leaves out what resembles the last message of any exporter.
        logger.filters.insert(0, Once())


def _bounded(inner: SpanExporter) -> Any:
    """`inner`, but no delivery begins later than a given time after closing: the SDK itself would wait 30 seconds."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Bounded(SpanExporter):
        def __init__(self) -> None:
            self._until_s = float("inf")

        def close_in(self, seconds: float) -> None:
            self._until_s = time.monotonic() + seconds

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if time.monotonic() > self._until_s:
                return SpanExportResult.FAILURE
            return inner.export(spans)

        def shutdown(self) -> None:
            inner.shutdown()

    return Bounded()


def _json_lines(file: str, service: str) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class JsonLines(SpanExporter):
        """Appends a batch in one write: any number of processes share the file without mixing their lines."""

        def __init__(self) -> None:
            self._torn = False
            self._told = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            # After a write that was cut short (a full disk) a newline first: only the torn line is lost.
            text = "\n" * self._torn + "".join(json.dumps(_plain(span, service)) + "\n" for span in spans)
            try:
                self._append(text.encode())
            except OSError as problem:
                if not self._told:
                    self._told = True
                    _log.warning("spans cannot be written to %s and are lost: %s", file, problem)
                return SpanExportResult.FAILURE
            return SpanExportResult.SUCCESS

        def _append(self, data: bytes) -> None:
            # Opened anew each time, so that a file that was moved away or deleted is made again.
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                written = os.write(descriptor, data)
                self._torn = written < len(data)
            finally:
                os.close(descriptor)

        def shutdown(self) -> None:
            """Nothing is kept open."""

    return JsonLines()


def _plain(span: ReadableSpan, service: str) -> dict[str, object]:
    attributes = dict(span.attributes or {})
    if span.status.description:
        attributes["otel.status_description"] = span.status.description
    return {
        "trace_id": f"{span.context.trace_id:032x}" if span.context else "",
        "span_id": f"{span.context.span_id:016x}" if span.context else "",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else "",
        "name": span.name,
        "service": service,
        "start_s": (span.start_time or 0) / 1e9,
        "end_s": (span.end_time or 0) / 1e9,
        "status": span.status.status_code.name.lower(),
        "attributes": attributes,
        "links": [_format(link.context) for link in span.links],
        "events": [
            {"name": event.name, "at_s": event.timestamp / 1e9, "attributes": dict(event.attributes or {})}
            for event in span.events
        ],
    }


def _forget() -> None:
    """In a forked child: the parent's provider stays the parent's, its spans would be exported twice."""
    global _lock, _provider, _tracer, _exporter
    _lock = threading.RLock()
    _provider = _tracer = _exporter = None


os.register_at_fork(after_in_child=_forget)
atexit.register(shutdown)
