"""One span per request, with child spans, in the trace of its caller; none without tracing."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from metrics_rig import MODELS, ended_call
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from headgate.core.clock import MILLISECOND_NS
from headgate.core.errors import ConfigError
from headgate.core.states import Outcome, Rejection
from headgate.live.call import Call
from headgate.live.gateway.process import make_tracer
from headgate.live.telemetry.spans import SpanTracer, make_provider

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def traced(call: Call, traceparent: str | None = None) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = make_provider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = SpanTracer(provider, MODELS)
    tracer.begin(call, traceparent)
    tracer.end(call)
    tracer.close()
    assert call.trace is None
    return {span.name: span for span in exporter.get_finished_spans()}


def recent_call(outcome: int, **how: object) -> Call:
    """Return a call that arrived 50 ms ago."""
    at_ms = time.monotonic_ns() // MILLISECOND_NS - 50
    return ended_call(outcome, at_ms=at_ms, **how)  # type: ignore[arg-type]


def test_request_is_a_span_in_the_trace_of_its_caller() -> None:
    call = recent_call(Outcome.MET, queue_ms=10, execute_ms=20, batch_items=4)
    spans = traced(call, f"00-{TRACE}-{PARENT}-01")
    assert set(spans) == {"infer resnet", "queue", "execute"}
    request = spans["infer resnet"]
    assert request.kind is SpanKind.SERVER
    assert request.context is not None and request.parent is not None
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert request.attributes is not None
    assert request.attributes["headgate.outcome"] == "met"
    assert request.attributes["headgate.batch_items"] == 4
    for part in (spans["queue"], spans["execute"]):
        assert part.parent is not None and part.parent.span_id == request.context.span_id


def test_span_times_are_on_the_wall_clock() -> None:
    spans = traced(recent_call(Outcome.MET, queue_ms=10, execute_ms=20))
    request, queue, execute = spans["infer resnet"], spans["queue"], spans["execute"]
    assert request.start_time and request.end_time and queue.start_time and queue.end_time
    assert execute.start_time and execute.end_time
    assert abs(request.start_time + 50 * MILLISECOND_NS - time.time_ns()) < 5_000_000_000
    assert queue.start_time == request.start_time
    assert queue.end_time - queue.start_time == 10 * MILLISECOND_NS
    assert execute.start_time == queue.end_time
    assert execute.end_time - execute.start_time == 20 * MILLISECOND_NS
    assert request.end_time >= execute.end_time


def test_request_that_never_ran_has_no_child_spans() -> None:
    spans = traced(recent_call(Outcome.REJECTED, reason=Rejection.OVERLOADED))
    (span,) = spans.values()
    assert span.attributes is not None and span.attributes["headgate.reason"] == "overloaded"
    assert span.status.status_code is StatusCode.UNSET, "turning it away is no mistake"
    (span,) = traced(recent_call(Outcome.FAILED, reason="lost")).values()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "lost")


def test_header_is_kept_in_the_call() -> None:
    call = recent_call(Outcome.MET)
    call.trace = f"00-{TRACE}-{PARENT}-01".encode()
    (span,) = traced(call).values()
    assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE


def test_invalid_header_starts_a_new_trace() -> None:
    (span,) = traced(recent_call(Outcome.MET), "00-zz-1").values()
    assert span.parent is None


def test_sampling_decision_of_the_caller_is_respected() -> None:
    assert not traced(recent_call(Outcome.MET, execute_ms=1), f"00-{TRACE}-{PARENT}-00")


def test_service_name_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_provider().resource.attributes["service.name"] == "headgate"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    assert make_provider().resource.attributes["service.name"] == "shop"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_tracing_is_off_by_default(environment: dict[str, str]) -> None:
    assert make_tracer(MODELS, environment) is None


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "console"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
    ],
)
def test_tracing_is_enabled_by_variables(environment: dict[str, str]) -> None:
    tracer = make_tracer(MODELS, environment)
    assert tracer is not None
    tracer.close()


def test_unknown_exporter_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="OTEL_TRACES_EXPORTER: 'pigeon': is not an installed exporter"
    ):
        make_tracer(MODELS, {"OTEL_TRACES_EXPORTER": "pigeon"})


def test_missing_extra_disables_tracing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole clusters set these variables: a warning is logged, and the server runs."""
    monkeypatch.delitem(sys.modules, "headgate.live.telemetry.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert make_tracer(MODELS, {"OTEL_TRACES_EXPORTER": "console"}) is None
    assert "headgate[otel]" in caplog.text


def test_opentelemetry_is_not_imported_without_tracing() -> None:
    code = (
        "import sys, headgate.live.gateway.process as t; t.make_tracer([], {});"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
