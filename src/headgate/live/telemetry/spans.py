"""OpenTelemetry spans of requests. Imported only if traces are enabled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Final, final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headgate.core.errors import ConfigError
from headgate.core.states import OUTCOME_NAMES, Outcome
from headgate.live.call import Call

_ERRORS: Final = (Outcome.EXPIRED, Outcome.FAILED)


def export_spans(
    exporters: list[str], environment: Mapping[str, str], models: Sequence[str]
) -> SpanTracer:
    """Return a tracer that exports spans in batches. Raises `ConfigError` for unknown exporters."""
    created = [_exporter(name, environment) for name in exporters]
    provider = make_provider()
    for exporter in created:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return SpanTracer(provider, models)


@final
class SpanTracer:
    """Creates spans of calls. `models` are names by pipeline id."""

    def __init__(self, provider: TracerProvider, models: Sequence[str]) -> None:
        self._provider = provider
        self._models = models
        self._tracer = provider.get_tracer("headgate")
        self._propagator = TraceContextTextMapPropagator()
        # Calls are timed on the monotonic clock and spans on the wall clock. The offset is taken
        # once, so that an adjusted wall clock cannot make a span end before it began.
        self._wall_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, call: Call, traceparent: str | None = None) -> None:
        """Start the span; sampling is decided here."""
        if traceparent is None and isinstance(call.trace, bytes):
            traceparent = call.trace.decode("ascii", "replace")
        context = None
        if traceparent:
            context = self._propagator.extract({"traceparent": traceparent})
        call.trace = self._tracer.start_span(
            "infer",
            context,
            kind=SpanKind.SERVER,
            start_time=self._wall(call.arrived_ns or time.monotonic_ns()),
        )

    def end(self, call: Call) -> None:
        """End the span, with the attributes and child spans of the call."""
        span, call.trace = call.trace, None
        if not isinstance(span, Span):
            return
        if span.is_recording():
            self._describe(span, call)
            within = set_span_in_context(span)
            self._child_span("queue", within, call.arrived_ns, call.began_ns)
            self._child_span("execute", within, call.began_ns, call.ended_ns)
        span.end(self._wall(time.monotonic_ns()))

    def close(self) -> None:
        """Export the remaining spans; takes at most the timeout of the exporter."""
        self._provider.shutdown()

    def _describe(self, span: Span, call: Call) -> None:
        model, settlement = self._models[call.pipeline_id], call.settlement
        assert settlement is not None
        span.update_name(f"infer {model}")
        span.set_attributes(
            {
                "headgate.model": model,
                "headgate.outcome": OUTCOME_NAMES[settlement.outcome],
                "headgate.items": call.items,
                "headgate.priority": call.priority,
            }
        )
        if call.batch_items:
            span.set_attribute("headgate.batch_items", call.batch_items)
        if settlement.reason:
            span.set_attribute("headgate.reason", settlement.reason)
        if settlement.outcome in _ERRORS:
            span.set_status(StatusCode.ERROR, settlement.reason or call.error)

    def _child_span(self, name: str, within: Context, from_ns: int, to_ns: int) -> None:
        if 0 < from_ns <= to_ns:
            part = self._tracer.start_span(name, within, start_time=self._wall(from_ns))
            part.end(self._wall(to_ns))

    def _wall(self, monotonic_ns: int) -> int:
        return monotonic_ns + self._wall_ns


def make_provider() -> TracerProvider:
    """Return a provider configured by the environment; its service is `headgate` by default."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "headgate"}))
    return TracerProvider(resource=resource, shutdown_on_exit=False)


def _exporter(name: str, environment: Mapping[str, str]) -> SpanExporter:
    """Return the exporter registered under a name, as OpenTelemetry finds it: by entry point."""
    registered = name
    if name == "otlp":
        protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
            "OTEL_EXPORTER_OTLP_PROTOCOL"
        )
        registered = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    registered_exporters = {
        entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")
    }
    if registered not in registered_exporters:
        raise ConfigError(
            "is not an installed exporter",
            key="OTEL_TRACES_EXPORTER",
            value=name,
            allowed=", ".join(sorted(registered_exporters)) or "none",
        )
    created: SpanExporter = registered_exporters[registered].load()()
    return created
